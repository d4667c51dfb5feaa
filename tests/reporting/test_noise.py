"""How much a loss usually varies over seeds, and how many seeds a difference needs."""

import numpy as np
import pytest
from scipy import stats

from gptexp.reporting.statistics.noise import USUAL_SPREADS, seeds_needed, usual_spread


def test_the_usual_spread_decreases_with_size_and_length() -> None:
    assert usual_spread(1e5, 1e4) > max(sd for _, _, sd in USUAL_SPREADS)
    for size, length, sd in USUAL_SPREADS:
        assert usual_spread(size, length) == usual_spread(2 * size, length) == sd
        assert usual_spread(size / 2, length) > sd


def test_near_a_guess_seeds_move_a_loss_by_hundredths() -> None:
    assert usual_spread(1e5, 1e4, learned=0.25) == pytest.approx(0.025)
    assert usual_spread(1e5, 1e4, learned=0.0) == 0.01
    assert usual_spread(1e5, 1e4, learned=7.0) == usual_spread(1e5, 1e4)


@pytest.mark.parametrize(
    ("sigma", "difference", "seeds"),
    [(0.002, 0.005, 3), (0.002, 0.003, 7), (0.005, 0.005, 16), (0.005, 0.01, 4), (0.001, 1.0, 1)],
)
def test_the_number_of_seeds_needed_for_a_difference(sigma: float, difference: float, seeds: int) -> None:
    assert seeds_needed(difference, 2 * sigma**2) == seeds
    assert seeds_needed(difference, 2 * sigma**2, pairs=7) >= seeds


def test_the_proposed_number_of_seeds_shows_the_difference_at_the_stated_rate() -> None:
    rng = np.random.default_rng(10)
    n = seeds_needed(0.005, 2 * 0.005**2)
    a, b = rng.normal(0, 0.005, (2000, n)), rng.normal(0.005, 0.005, (2000, n))
    shown = np.mean(stats.ttest_ind(a, b, axis=1).pvalue < 0.05)
    assert 0.76 < shown < 0.85
