"""The law of the learning rate on sweeps whose exponent is known."""

import numpy as np
import pytest
from drawn import SIGMA, draw, power_law

from gptexp.reporting.curves import fit_curves
from gptexp.reporting.law import fit_law

CASES = [(0.5, 6, 2), (1.0, 4, 2), (0.0, 6, 3), (0.1, 6, 2)]


@pytest.mark.parametrize(
    ("alpha", "sizes", "seeds", "sweeps"),
    [
        *((*case, 4) for case in CASES[:2]),
        *(pytest.param(*case, 200, marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_the_exponent_is_recovered_and_its_interval_has_the_stated_coverage(
    alpha: float, sizes: int, seeds: int, sweeps: int
) -> None:
    rng = np.random.default_rng(6)
    found, widths, held = [], [], 0
    for _ in range(sweeps):
        law = fit_law(fit_curves(draw(rng, power_law(alpha, sizes), seeds=seeds), {}, SIGMA).octaves)
        if law is None:  # by chance too few learning rates or too much noise
            continue
        found.append(law.exponent)
        widths.append(law.high - law.low)
        held += law.admits(alpha)
        assert law.at(law.tokens) == pytest.approx(law.lr)
        assert law.at(4 * law.tokens) == pytest.approx(law.lr * 4**law.exponent)
    assert len(found) >= 0.95 * sweeps
    errors = np.abs(np.array(found) - alpha)
    assert np.median(errors) < (0.03 if sizes == 6 else 0.06)
    print(f"held {held / len(found):.3f}, width {np.median(widths):.2f}")
    assert held >= (0.93 * len(found) if sweeps > 100 else len(found) - 1)
    assert np.median(widths) < (0.25 if sizes == 6 else 0.5)


def test_rules_that_contradict_the_data_are_rejected() -> None:
    rng = np.random.default_rng(7)
    for alpha in (0.0, 0.5, 1.0):
        law = fit_law(fit_curves(draw(rng, power_law(alpha)), {}, SIGMA).octaves)
        assert law is not None
        assert [rule for rule in (0.0, 0.5, 1.0) if law.admits(rule)] == [alpha]


def test_optima_that_are_not_straight_in_log_log_are_flagged() -> None:
    """The optima grow with the root of the batch size for four octaves and are constant above."""
    rng = np.random.default_rng(8)
    surge = [0.0, 0.5, 1.0, 1.4, 1.5, 1.5]
    law = fit_law(fit_curves(draw(rng, surge, sigma=0.001), {}, SIGMA).octaves)
    assert law is not None
    assert law.bends
    straight = [fit_law(fit_curves(draw(rng, power_law(0.5), sigma=0.001), {}, SIGMA).octaves) for _ in range(5)]
    assert sum(law is not None and bool(law.bends) for law in straight) <= 2


def test_a_single_optimum_gives_no_law() -> None:
    assert fit_law(fit_curves(draw(np.random.default_rng(9), [0.2]), {}, SIGMA).octaves) is None


def test_the_band_of_a_law_is_made_of_the_optima_it_is_drawn_with() -> None:
    """Between two batch sizes that are known well it is narrow; far beyond them it is wide."""
    rng = np.random.default_rng(3)
    octaves = {2**k: 0.5 * k + 0.1 * rng.standard_normal(2000) for k in range(10, 15)}
    law = fit_law(octaves)
    assert law is not None
    widths = [np.log2(high / low) for low, high in (law.interval_at(2.0**k) for k in (12, 10, 20))]
    assert widths[0] < widths[1] < widths[2]
    for k in (10, 12, 14):
        low, high = law.interval_at(2.0**k)
        assert low < 2.0 ** (0.5 * k) < high


def test_two_optima_that_agree_with_every_rule_refuse_none() -> None:
    rng = np.random.default_rng(4)
    law = fit_law({1024: 2 * rng.standard_normal(2000), 2048: 2 * rng.standard_normal(2000)})
    assert law is not None
    assert all(law.admits(rule) for rule in (0.0, 0.5, 1.0))
