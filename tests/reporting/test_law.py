"""The law of the learning rate, from draws of optima as a posterior gives them."""

import numpy as np
import pytest
from drawn import SIGMA, draw, power_law
from scipy import stats

from gptexp.reporting.statistics.curves import fit_curves
from gptexp.reporting.statistics.forms import Array
from gptexp.reporting.statistics.law import Law, fit_law, independent_difference

SWEEPS = 200


def fitted(rng: np.random.Generator, levels: list[float], errors: list[float], common: float = 0.0) -> Law:
    """The law of optima at 1,024, 2,048, … tokens whose logarithms are `levels`.

    Each is known up to its standard error in octaves, and all up to an error of `common` octaves that they share.
    """

    def moved() -> Array:
        return np.array(errors) * rng.standard_normal(len(levels)) + common * rng.standard_normal()

    centre = np.array(levels) + moved()
    draws = np.array([centre + moved() for _ in range(400)])
    law = fit_law({1024 * 2**i: draws[:, i] for i in range(len(levels))})
    assert law is not None
    return law


@pytest.mark.e2e
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("errors", "common"), [([0.05] * 3, 0.0), ([0.1] * 6, 0.3), ([0.3, 0.1, 0.05, 0.1], 0.0), ([0.05, 0.2], 0.1)]
)
def test_intervals_of_the_exponent_hold_it(alpha: float, errors: list[float], common: float) -> None:
    """At least as often as they say: they allow for a scatter too, and admit what the intervals of the optima do."""
    rng = np.random.default_rng(6)
    levels = [alpha * i for i in range(len(errors))]
    laws = [fitted(rng, levels, errors, common) for _ in range(SWEEPS)]
    held = sum(law.admits(alpha) for law in laws)
    assert held >= stats.binom.ppf(0.001, SWEEPS, 0.95)
    design = np.vander(np.arange(len(errors)), 2) / np.array(errors)[:, None]
    known = 3.92 * np.sqrt(np.linalg.inv(design.T @ design)[0, 0])  # the width by least squares
    assert np.median([law.high - law.low for law in laws]) < 3 * known
    for law in laws[:3]:
        assert law.at(law.tokens) == pytest.approx(law.lr)
        assert law.at(4 * law.tokens) == pytest.approx(law.lr * 4**law.exponent)


@pytest.mark.e2e
def test_the_exponent_of_a_sweep_is_recovered_and_other_rules_are_rejected() -> None:
    rng = np.random.default_rng(7)
    for alpha in (0.0, 0.5, 1.0):
        law = fit_law(fit_curves(draw(rng, power_law(alpha, 4), seeds=2), {}, SIGMA).octaves)
        assert law is not None
        assert law.exponent == pytest.approx(alpha, abs=0.1)
        assert [rule for rule in (0.0, 0.5, 1.0) if law.admits(rule)] == [alpha]


@pytest.mark.e2e
def test_optima_that_are_not_straight_in_log_log_are_flagged() -> None:
    """The optima grow with the root of the batch size for three octaves and are constant above."""
    rng = np.random.default_rng(8)
    errors = [0.05] * 6
    bent = [fitted(rng, [0.0, 0.5, 1.0, 1.4, 1.5, 1.5], errors).bends for _ in range(SWEEPS)]
    straight = [fitted(rng, [0.5 * i for i in range(6)], errors).bends for _ in range(SWEEPS)]
    assert sum(map(bool, bent)) > 0.9 * SWEEPS
    assert sum(map(bool, straight)) <= stats.binom.ppf(0.999, SWEEPS, 0.05)


def test_optima_that_scatter_around_their_line_are_flagged() -> None:
    rng = np.random.default_rng(9)
    scattered = [fitted(rng, list(0.5 * np.arange(6) + 0.4 * rng.standard_normal(6)), [0.03] * 6) for _ in range(50)]
    straight = [fitted(rng, [0.5 * i for i in range(6)], [0.03] * 6) for _ in range(50)]
    assert sum(law.scatter for law in scattered) > 40
    assert sum(law.scatter for law in straight) < 3
    held = sum(law.admits(0.5) for law in scattered)
    assert held >= stats.binom.ppf(0.001, 50, 0.95)


def test_a_single_optimum_gives_no_law() -> None:
    assert fit_law({1024: np.zeros(10)}) is None


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


def test_arms_with_the_same_random_numbers_are_independent() -> None:
    """Draws of several forms lie one after the other, in the same order in both arms."""
    rng = np.random.default_rng(5)
    draws = np.concatenate([rng.standard_normal(1000) * 0.1 + centre for centre in (-1.0, 1.0)])
    assert independent_difference(draws, draws).var() == pytest.approx(2 * draws.var(), rel=0.1)


def test_two_optima_that_agree_with_every_rule_refuse_none() -> None:
    rng = np.random.default_rng(4)
    law = fit_law({1024: 2 * rng.standard_normal(2000), 2048: 2 * rng.standard_normal(2000)})
    assert law is not None
    assert all(law.admits(rule) for rule in (0.0, 0.5, 1.0))
