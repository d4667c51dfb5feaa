"""The noise between seeds, and how many seeds a difference needs."""

import numpy as np
import pytest
from scipy import stats

from gptexp.reporting.noise import pool, seed_noise, seeds_needed


def test_noise_is_pooled_within_cells() -> None:
    cells = [[1.0, 3.0], [10.0], [5.0, 6.0, 7.0]]
    noise = seed_noise(cells)
    assert noise is not None
    assert (noise.sigma**2 * noise.dof, noise.dof) == pytest.approx((2.0 + 2.0, 3))
    assert seed_noise([[1.0], [2.0]]) is None
    both = pool(noise, [(6.0, 2), (0.0, 0)])
    assert both is not None
    assert (both.sigma**2 * both.dof, both.dof) == pytest.approx((10.0, 5))
    assert noise.t == pytest.approx(stats.t.ppf(0.975, 3))


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
    shown = np.mean([stats.ttest_ind(x, y).pvalue < 0.05 for x, y in zip(a, b, strict=True)])
    assert 0.76 < shown < 0.85
