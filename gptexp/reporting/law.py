"""The best learning rate as a power of the batch size, lr*(B) = lr_0 (B / B_0)^alpha, fitted to a sweep's optima."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gptexp.reporting.curves import Curves, Optimum
from gptexp.reporting.linex import Array
from gptexp.reporting.noise import LEVEL, f_tail, t_quantile

SLOPES = {"constant": 0.0, "square root": 0.5, "linear": 1.0}  # exponents of the usual scaling rules


@dataclass(frozen=True)
class Law:
    """lr*(B) = lr (B / tokens)^exponent; `tokens` is the weighted geometric mean of the batch sizes."""

    lr: float
    tokens: float
    exponent: float
    low: float  # 95% interval of the exponent
    high: float
    sd: float  # standard error of the exponent
    lr_sd_octaves: float  # standard error of log2(lr); independent of the exponent's
    sizes: tuple[int, ...]  # tokens per step
    scatter: bool  # the optima scatter more than their intervals allow; the exponent's interval includes the scatter
    bends: bool | None  # a quadratic term in log2(B) is significant; None with fewer than four batch sizes

    def at(self, tokens: float) -> float:
        """The best learning rate at a batch size in tokens."""
        return float(self.lr * (tokens / self.tokens) ** self.exponent)

    def admits(self, exponent: float) -> bool:
        return self.low <= exponent <= self.high


def fit_law(curves: Curves) -> Law | None:
    """Fit log2 lr* over log2 B by least squares with weights 1 / variance. Returns None with fewer than two optima."""
    optima = curves.optima
    if len(optima) < 2:
        return None
    dof = min(curves.noises[batch].dof for batch in optima)
    return _fit({batch: (math.log2(o.lr), o.sd_octaves or 0.0) for batch, o in optima.items()}, dof)


def fit_ratio(one: Mapping[int, Optimum], other: Mapping[int, Optimum], dof_of_noise: int) -> Law | None:
    """Fit the best learning rates of `one` divided by those of `other`, at the batch sizes that have both.

    The exponent is the difference of theirs. If both lie on a curve, the ratio does as far as the curves differ, so it
    is known better than from two laws. None with fewer than two such batch sizes.
    """
    ratios = {}
    for batch in one.keys() & other.keys():
        octaves = math.log2(one[batch].lr / other[batch].lr)
        ratios[batch] = octaves, math.hypot(one[batch].sd_octaves or 0.0, other[batch].sd_octaves or 0.0)
    return _fit(ratios, dof_of_noise) if len(ratios) > 1 else None


def _fit(octaves: Mapping[int, tuple[float, float]], dof_of_noise: int) -> Law:
    """Fit a power law. `octaves`: for each batch size, log2 of a value and the standard error of that."""
    sizes = sorted(octaves)
    x = np.log2(sizes)
    y, sd = np.array([octaves[size] for size in sizes]).T
    centre = float(np.average(x, weights=sd**-2))
    (slope, level), covariance, chi2 = _least_squares(np.vander(x - centre, 2), y, sd)
    dof, t = len(x) - 2, t_quantile(dof_of_noise)
    scatter = dof > 0 and f_tail(chi2 / dof, dof, dof_of_noise) < LEVEL
    if scatter:
        covariance = covariance * chi2 / dof
        t = t_quantile(dof)
    bends = None
    if len(x) >= 4:
        *_, chi2_quadratic = _least_squares(np.vander(x - centre, 3), y, sd)
        bends = f_tail(chi2 - chi2_quadratic, 1, dof_of_noise) < LEVEL
    sd_slope, sd_level = (math.sqrt(variance) for variance in np.diag(covariance))
    return Law(
        lr=2.0**level,
        tokens=2.0**centre,
        exponent=float(slope),
        low=float(slope - t * sd_slope),
        high=float(slope + t * sd_slope),
        sd=sd_slope,
        lr_sd_octaves=sd_level,
        sizes=tuple(sizes),
        scatter=scatter,
        bends=bends,
    )


def _least_squares(design: Array, y: Array, sd: Array) -> tuple[Array, Array, float]:
    """Weighted least squares: the coefficients, their covariance, and the weighted sum of squared residuals."""
    weighted = design / sd[:, None]
    covariance = np.linalg.inv(weighted.T @ weighted)
    coefficients = covariance @ (weighted.T @ (y / sd))
    return coefficients, covariance, float(np.sum((y / sd - weighted @ coefficients) ** 2))
