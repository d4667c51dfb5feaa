"""How much the final loss varies from run to run, which cells tie with the best, and how many seeds would tell."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import special  # scipy.stats has the same by nicer names, and takes a second to import

CONFIDENCE = 0.95
POWER = 0.8
LEAST = 1e-9  # nats: below it equal losses differ by rounding


def t_quantile(dof: int) -> float:
    """Student's two-sided quantile at `CONFIDENCE`."""
    return float(special.stdtrit(dof, (1 + CONFIDENCE) / 2))


def f_tail(ratio: float, dof: int, of: int) -> float:
    """Probability of a larger ratio of two estimates of one variance, with `dof` and `of` degrees of freedom."""
    return float(special.fdtrc(dof, of, ratio))


@dataclass(frozen=True)
class Noise:
    """Standard deviation of one run's final loss, in nats, and the degrees of freedom it was estimated with."""

    sigma: float
    dof: int
    source: str

    @cached_property
    def t(self) -> float:
        """Student's two-sided quantile at `CONFIDENCE`."""
        return t_quantile(self.dof)

    def ties(self, difference: float, n: int, m: int) -> bool:
        """Whether a `difference` of the means of `n` and `m` runs cannot be told from zero (t-test)."""
        return abs(difference) <= self.t * self.sigma * math.sqrt(1 / n + 1 / m)


def seed_noise(losses: Sequence[Sequence[float]]) -> Noise | None:
    """Pooled over cells; `losses` holds those of each cell's seeds, in nats. None where no cell has two."""
    squares = sum(float(np.sum((np.asarray(of_cell) - np.mean(of_cell)) ** 2)) for of_cell in losses)
    dof = sum(len(of_cell) - 1 for of_cell in losses)
    return _noise(squares, dof, "seeds") if dof else None


def pool(seeds: Noise | None, residuals: Sequence[tuple[float, int]]) -> Noise | None:
    """With sums of squares around fits, each with its degrees of freedom; None where there is neither."""
    squares, dof = (sum(column) for column in zip(*residuals, strict=True)) if residuals else (0.0, 0)
    if not dof:
        return seeds
    if seeds is None:
        return _noise(squares, dof, "runs around their parabolas")
    return _noise(seeds.dof * seeds.sigma**2 + squares, seeds.dof + dof, "seeds, and runs around their parabolas")


def _noise(squares: float, dof: int, source: str) -> Noise:
    return Noise(max(LEAST, math.sqrt(squares / dof)), dof, source)


def seeds_needed(difference: float, sigma: float) -> int:
    """Runs of each of two cells that show a `difference` of their mean losses with power 0.8 at the 5% level.

    Normal approximation: 2 (z_0.975 + z_0.8)^2 (sigma / difference)^2, rounded up.
    """
    z = float(special.ndtri((1 + CONFIDENCE) / 2) + special.ndtri(POWER))
    return max(1, math.ceil(2 * (z * sigma / difference) ** 2))
