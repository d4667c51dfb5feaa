"""The standard deviation of a run's final loss, t-tests with it, and the number of seeds that a difference needs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special  # scipy.stats has the same functions under clearer names, but takes a second to import

CONFIDENCE = 0.95
POWER = 0.8
MIN_SIGMA = 1e-9  # nats; smaller differences are rounding errors


def t_quantile(dof: int) -> float:
    """Student's two-sided quantile at `CONFIDENCE`."""
    return float(special.stdtrit(dof, (1 + CONFIDENCE) / 2))


def f_tail(ratio: float, dof: int, dof_below: int) -> float:
    """P(F > `ratio`) for Fisher's F distribution with `dof` (numerator) and `dof_below` (denominator)."""
    return float(special.fdtrc(dof, dof_below, ratio))


@dataclass(frozen=True)
class Noise:
    """Standard deviation of one run's final loss, in nats, and the degrees of freedom of its estimate."""

    sigma: float
    dof: int
    source: str

    @property
    def t(self) -> float:
        """Student's two-sided quantile at `CONFIDENCE`."""
        return t_quantile(self.dof)

    def ties(self, difference: float, n: int, m: int) -> bool:
        """Whether a t-test finds no significant `difference` between the means of `n` and of `m` runs."""
        return abs(difference) <= self.t * self.sigma * math.sqrt(1 / n + 1 / m)


def seed_noise(losses: Sequence[Sequence[float]]) -> Noise | None:
    """Noise pooled over cells. `losses` holds each cell's losses over its seeds, in nats.

    Returns None if no cell has two seeds.
    """
    squares = sum(float(np.sum((np.asarray(of_cell) - np.mean(of_cell)) ** 2)) for of_cell in losses)
    dof = sum(len(of_cell) - 1 for of_cell in losses)
    return _noise(squares, dof, "seeds") if dof else None


def pool(seeds: Noise | None, residuals: Sequence[tuple[float, int]]) -> Noise | None:
    """Pool the noise between seeds with the residuals of fits: (sum of squares, degrees of freedom) of each fit.

    Returns None without any degree of freedom.
    """
    squares, dof = sum(rest for rest, _ in residuals), sum(dof for _, dof in residuals)
    if not dof:
        return seeds
    if seeds is None:
        return _noise(squares, dof, "runs around their parabolas")
    return _noise(seeds.dof * seeds.sigma**2 + squares, seeds.dof + dof, "seeds, and runs around their parabolas")


def _noise(squares: float, dof: int, source: str) -> Noise:
    return Noise(max(MIN_SIGMA, math.sqrt(squares / dof)), dof, source)


def seeds_needed(difference: float, sigma: float) -> int:
    """Seeds per cell that show a `difference` between two cells' mean losses with power 0.8 at the 5% level.

    Normal approximation: 2 (z_0.975 + z_0.8)^2 (sigma / difference)^2, rounded up.
    """
    z = float(special.ndtri((1 + CONFIDENCE) / 2) + special.ndtri(POWER))
    return max(1, math.ceil(2 * (z * sigma / difference) ** 2))
