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
        *((*case, 100) for case in CASES[:2]),
        *(pytest.param(*case, 100, marks=pytest.mark.e2e) for case in CASES[2:]),
        *(pytest.param(*case, 1000, marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_the_exponent_is_recovered_and_its_interval_has_the_stated_coverage(
    alpha: float, sizes: int, seeds: int, sweeps: int
) -> None:
    rng = np.random.default_rng(6)
    found, widths, held = [], [], 0
    for _ in range(sweeps):
        law = fit_law(fit_curves(draw(rng, power_law(alpha, sizes), seeds=seeds), {}, SIGMA))
        if law is None:  # by chance too few learning rates or too much noise
            continue
        found.append(law.exponent)
        widths.append(law.high - law.low)
        held += law.admits(alpha)
        assert law.at(law.tokens) == pytest.approx(law.lr)
        assert law.at(4 * law.tokens) == pytest.approx(law.lr * 4**law.exponent)
    assert len(found) >= 0.99 * sweeps
    errors = np.abs(np.array(found) - alpha)
    assert np.median(errors) < (0.02 if sizes == 6 else 0.03)
    assert np.quantile(errors, 0.95) < (0.04 if sizes == 6 else 0.08)
    assert abs(np.mean(found) - alpha) < 0.006
    assert held >= 0.92 * len(found)
    assert np.median(widths) < (0.2 if sizes == 6 else 0.4)


def test_rules_that_contradict_the_data_are_rejected() -> None:
    rng = np.random.default_rng(7)
    for alpha in (0.0, 0.5, 1.0):
        law = fit_law(fit_curves(draw(rng, power_law(alpha)), {}, SIGMA))
        assert law is not None
        assert [rule for rule in (0.0, 0.5, 1.0) if law.admits(rule)] == [alpha]


def test_optima_that_are_not_straight_in_log_log_are_flagged() -> None:
    """The optima grow with the root of the batch size for four octaves and are constant above."""
    rng = np.random.default_rng(8)
    surge = [0.0, 0.5, 1.0, 1.4, 1.5, 1.5]
    law = fit_law(fit_curves(draw(rng, surge, sigma=0.001), {}, SIGMA))
    assert law is not None
    assert law.bends
    straight = [fit_law(fit_curves(draw(rng, power_law(0.5), sigma=0.001), {}, SIGMA)) for _ in range(60)]
    assert sum(law is not None and bool(law.bends) for law in straight) <= 8


def test_a_single_optimum_gives_no_law() -> None:
    assert fit_law(fit_curves(draw(np.random.default_rng(9), [0.2]), {}, SIGMA)) is None
