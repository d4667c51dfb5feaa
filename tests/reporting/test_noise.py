"""The noise between seeds, and how many seeds a difference needs."""

import numpy as np
import pytest
from scipy import stats

from gptexp.reporting.noise import USUAL_SPREADS, Noise, measure, seeds_needed, ties, usual_spread


def test_noise_is_measured_within_cells() -> None:
    noises = measure({8: {1.0: [3.1, 3.3], 2.0: [3.5], 3.0: [3.5, 3.6, 3.7]}, 16: {1.0: [3.1], 2.0: [3.2]}})
    assert noises.keys() == {8}  # one seed measures nothing
    assert (noises[8].sigma ** 2 * noises[8].dof, noises[8].dof) == pytest.approx((0.02 + 0.02, 3))
    assert noises[8].t == pytest.approx(stats.t.ppf(0.975, 3))


def test_seeds_far_from_the_best_learning_rate_do_not_count() -> None:
    """Neither on the wall, where they move more, nor far below the best one, where they move less."""
    on_the_wall = {1.0: [3.2], 2.0: [3.1, 3.12], 4.0: [3.2], 8.0: [4.0, 7.0]}
    assert measure({8: on_the_wall})[8].sigma == pytest.approx(0.02 / 2**0.5)
    far_below = {1.0: [3.5, 3.5001, 3.5002, 3.5, 3.5], 2.0: [3.4], 4.0: [3.3], 8.0: [3.2], 16.0: [3.3]}
    assert measure({8: far_below}) == {}


def test_batch_sizes_are_pooled_only_if_bartletts_test_allows_it() -> None:
    rng = np.random.default_rng(0)
    for factor in (1.0, 1.3, 2.0, 4.0):
        for _ in range(20):
            groups = [rng.normal(0, 0.001 * factor**i, (3, 3)) for i in range(3)]
            noises = measure({i: dict(enumerate(map(list, group))) for i, group in enumerate(groups)})
            residuals = [(group - group.mean(axis=1, keepdims=True)).ravel() for group in groups]
            # scipy's test counts n - 1 degrees of freedom: seven values with the same variance stand for 3 x 3 runs
            samples = [np.sqrt(r @ r / 6) * _unit(7) for r in residuals]
            pooled = stats.bartlett(*samples).pvalue >= 0.2
            assert (len({*noises.values()}) == 1) == pooled
            if pooled:
                squares = sum(float(r @ r) for r in residuals)
                assert noises[0].sigma == pytest.approx((squares / 18) ** 0.5)


def _unit(n: int) -> np.ndarray:
    """`n` values with a sample variance of one."""
    values = np.arange(n) - (n - 1) / 2
    return values / values.std(ddof=1)


def test_two_cells_tie_by_a_t_test() -> None:
    one, other = Noise(0.01, 4, (8,)), Noise(0.02, 10, (16,))
    limit = stats.t.ppf(0.975, 4) * (0.01**2 / 2 + 0.02**2 / 3) ** 0.5
    assert ties(0.99 * limit, one, 2, other, 3)
    assert not ties(-1.01 * limit, one, 2, other, 3)


def test_the_usual_spread_decreases_with_size_and_length() -> None:
    assert usual_spread(1e5, 1e4) > max(sd for _, _, sd in USUAL_SPREADS)
    for size, length, sd in USUAL_SPREADS:
        assert usual_spread(size, length) == usual_spread(2 * size, length) == sd
        assert usual_spread(size / 2, length) > sd


@pytest.mark.parametrize(
    ("sigma", "difference", "seeds"),
    [(0.002, 0.005, 3), (0.002, 0.003, 7), (0.005, 0.005, 16), (0.005, 0.01, 4), (0.001, 1.0, 1)],
)
def test_the_number_of_seeds_needed_for_a_difference(sigma: float, difference: float, seeds: int) -> None:
    assert seeds_needed(difference, sigma) == seeds


def test_the_proposed_number_of_seeds_shows_the_difference_at_the_stated_rate() -> None:
    rng = np.random.default_rng(10)
    n = seeds_needed(0.005, 0.005)
    a, b = rng.normal(0, 0.005, (2000, n)), rng.normal(0.005, 0.005, (2000, n))
    shown = np.mean(stats.ttest_ind(a, b, axis=1).pvalue < 0.05)
    assert 0.76 < shown < 0.85
