"""Sweeps drawn from formulas with noise of known size, for the tests of the report's statistics."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from gptexp.reporting.statistics.likelihood import Losses

CURVATURE, SIGMA = 0.01, 0.003  # nats per octave squared; the standard deviation over seeds of a small model, in nats
Rng = np.random.Generator


def u_curve(optimum: float, cubic: float = 0.0) -> Callable[[float], float]:
    """A loss over log2(lr) with its minimum at `optimum`."""
    return lambda x: 3 + CURVATURE * ((x - optimum) ** 2 + cubic * (x - optimum) ** 3)


def steep(u: float) -> float:
    """A skewed curve: it falls slowly and rises fast."""
    return 0.05 * u**2 + 0.01 * u**3


def wall(u: float) -> float:
    """A parabola up to one octave above its minimum, and a wall from there."""
    return 0.03 * u**2 + 0.06 * max(0.0, u - 1) ** 3


def draw(
    rng: Rng,
    optima: Sequence[float],
    sigma: float = SIGMA,
    lrs: int = 5,
    seeds: int = 2,
    cubic: float = 0.0,
    truth: Callable[[float], float] | None = None,
    growth: float = 1.0,
    heavy_tails: bool = False,
) -> dict[int, Losses]:
    """A sweep over learning rates an octave apart, a batch size for each optimum, `seeds` runs in each cell.

    `truth` is the loss over the distance to the optimum in octaves, else `u_curve`. From one batch size to the next the
    noise grows by the factor `growth`. Heavy tails are those of Student's t with three degrees of freedom.
    """
    sweep: dict[int, Losses] = {}
    for number, optimum in enumerate(optima):
        loss = partial(lambda x, optimum: truth(x - optimum), optimum=optimum) if truth else u_curve(optimum, cubic)
        spread = sigma * growth**number
        grid = round(optimum) + np.arange(lrs) - lrs // 2
        noise = rng.standard_t(3, (lrs, seeds)) / math.sqrt(3) if heavy_tails else rng.standard_normal((lrs, seeds))
        sweep[2 ** (12 + number)] = {
            2.0**x: [loss(x) + spread * float(z) for z in of_seeds]
            for x, of_seeds in zip(map(float, grid), noise, strict=True)
        }
    return sweep


def power_law(alpha: float, sizes: int = 6) -> list[float]:
    """log2 of the best learning rates at batch sizes a factor of two apart."""
    return [alpha * (number - (sizes - 1) / 2) for number in range(sizes)]
