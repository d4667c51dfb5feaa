"""The gradient noise scale against brute force: all pairs of gradients, and a known covariance."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gptexp.config.noise_scale import NoiseScale, Norms

B = 3  # sequences of a small gradient


def gradients(n: int = 6, width: int = 40) -> np.ndarray:
    """Gradients of `n` micro-batches around a common mean, (n, width)."""
    draw = np.random.default_rng(0)
    return 0.3 * draw.normal(size=width) + draw.normal(size=(n, width))


def norms_of(g: np.ndarray, scale: float = 1.0) -> Norms:
    """The norms of all small gradients. `scale`: a wrong factor in their squares."""
    return Norms(float((g**2).sum(1).mean()) * scale, float((g.mean(0) ** 2).sum()), B, B * len(g))


def check_identities(signal: Callable[[Norms], float], noise: Callable[[Norms], float], scale: float = 1.0) -> None:
    """With every small gradient measured, the estimates equal a mean over pairs and a sample variance."""
    g = gradients()
    pairs = [float(g[i] @ g[j]) for i, j in itertools.permutations(range(len(g)), 2)]
    norms = norms_of(g, scale)
    assert signal(norms) == pytest.approx(np.mean(pairs), rel=1e-6)
    assert noise(norms) == pytest.approx(B * g.var(axis=0, ddof=1).sum(), rel=1e-6)


def test_estimates_are_the_mean_pairwise_product_and_the_sample_variance() -> None:
    check_identities(Norms.signal, Norms.noise)


@pytest.mark.parametrize(
    "mutant",
    [
        (
            Norms.signal,
            Norms.noise,
            1 / 6**2,
        ),  # the loss was divided by the accumulation steps, the norm was not multiplied by them
        (lambda n: (6 * n.big - n.small) / 6, Norms.noise, 1.0),  # n for n - 1
        (Norms.signal, lambda n: B * (n.small - n.big), 1.0),
        (lambda n: n.big, Norms.noise, 1.0),  # the biased estimate
    ],
)
def test_the_identities_fail_for_wrong_estimates(mutant: Any) -> None:
    with pytest.raises(AssertionError):
        check_identities(*mutant)


def test_the_cosine_equals_the_mean_over_pairs() -> None:
    g = gradients()
    pairs = [float(g[i] @ g[j]) for i, j in itertools.permutations(range(len(g)), 2)]
    assert norms_of(g).cosine() == pytest.approx(np.mean(pairs) / np.mean((g**2).sum(1)), rel=1e-9)


@pytest.mark.e2e
@pytest.mark.parametrize("seed", range(5))
def test_a_known_noise_scale_is_found_from_four_of_32_micro_batches(seed: int) -> None:
    """Loss |θ - x|²/2 with x ~ N(0, S): a sequence's gradient has covariance S, and |G| = |θ|."""
    draw = np.random.default_rng(seed)
    width, m, world, accumulated, steps = 2000, 8, 2, 16, 200
    spread = np.sqrt(1 + np.arange(width) % 7)
    theta = draw.normal(size=width) * 0.35
    truth = float((spread**2).sum() / (theta**2).sum())
    averages = NoiseScale()
    for step in range(1, steps + 1):
        # The mean of m sequences is Gaussian too, so it is drawn directly.
        means = theta - draw.normal(size=(world * accumulated, width)) * spread / math.sqrt(m)
        first = means.reshape(world, accumulated, width)[:, :2].reshape(-1, width)  # the first two of each rank
        sequences = m * world * accumulated
        norms = Norms(float((first**2).sum(1).mean()), float((means.mean(0) ** 2).sum()), m, sequences)
        averages.take(norms, step * 1000, 1e9)
    assert averages.sequences == pytest.approx(truth, rel=0.05)


def test_the_weight_of_a_step_halves_in_a_half_life_at_every_batch_size() -> None:
    """Equal numbers of tokens have equal weight: one step counts as much as two steps of half its size."""
    early, late = Norms(10.0, 2.0, 1, 8), Norms(4.0, 3.0, 1, 8)
    coarse, fine = NoiseScale(), NoiseScale()
    for averages, step in ((coarse, 1000), (fine, 500)):
        for tokens in range(step, 3001, step):
            averages.take(early if tokens <= 2000 else late, tokens, 1000)
    assert (coarse.signal, coarse.noise) == pytest.approx((fine.signal, fine.noise))
    # Weights 1/8, 1/4 and 1/2, from the oldest thousand tokens to the newest.
    assert coarse.signal == pytest.approx((0.375 * early.signal() + 0.5 * late.signal()) / 0.875)


def test_the_scale_is_nan_without_a_positive_signal() -> None:
    averages = NoiseScale()
    averages.take(Norms(10.0, 0.5, 1, 8), 1, 10)
    assert averages.signal < 0
    assert math.isnan(averages.sequences)
    assert math.isnan(NoiseScale().sequences)


@pytest.mark.parametrize(("saved", "half_life"), [({}, 1e30), ({"tokens": 10**18}, 2048), ({"noise_sum": 1.0}, 1e30)])
def test_without_weight_the_averages_are_nan(saved: dict[str, Any], half_life: float) -> None:
    """The half-life is far longer than the run, or a checkpoint says that more tokens were read than there are."""
    scale = NoiseScale(**saved)
    norms = Norms(small=2.0, big=1.0, small_sequences=4, big_sequences=32)
    assert scale.valid_noise == 0
    scale.take(norms, 256, half_life)
    assert (scale.valid_noise, scale.weight) == (0, 0)
    assert all(math.isnan(value) for value in (scale.signal, scale.noise))
    assert scale.metrics(norms, 0.5, 64)
