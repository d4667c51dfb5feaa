"""Sweeps drawn from formulas with noise of known size, for the tests of the report's statistics."""

from collections.abc import Callable, Sequence

import numpy as np

from gptexp.reporting.curves import Losses

CURVATURE, SIGMA = 0.01, 0.003  # nats per octave squared; the standard deviation over seeds of a small model, in nats
Rng = np.random.Generator


def u_curve(optimum: float, cubic: float = 0.0) -> Callable[[float], float]:
    """A loss over log2(lr) with its minimum at `optimum`."""
    return lambda x: 3 + CURVATURE * ((x - optimum) ** 2 + cubic * (x - optimum) ** 3)


def draw(
    rng: Rng, optima: Sequence[float], sigma: float = SIGMA, lrs: int = 5, seeds: int = 5, cubic: float = 0.0
) -> dict[int, Losses]:
    """A sweep over learning rates an octave apart, a batch size for each optimum; the centre cell has several seeds."""
    sweep: dict[int, Losses] = {}
    for number, optimum in enumerate(optima):
        loss = u_curve(optimum, cubic)
        grid = round(optimum) + np.arange(lrs) - lrs // 2
        at_batch = {2.0**x: [loss(x) + sigma * rng.standard_normal()] for x in map(float, grid)}
        if number == len(optima) // 2:
            x = float(grid[lrs // 2])
            at_batch[2.0**x] += [loss(x) + sigma * rng.standard_normal() for _ in range(seeds - 1)]
        sweep[2 ** (12 + number)] = at_batch
    return sweep


def power_law(alpha: float, sizes: int = 6) -> list[float]:
    """log2 of the best learning rates at batch sizes a factor of two apart."""
    return [alpha * (number - (sizes - 1) / 2) for number in range(sizes)]
