"""How the best learning rate moves with the batch size: lr*(B) = lr_0 (B / B_0)^alpha, from the optima of a sweep."""

import math
from dataclasses import dataclass

import numpy as np

from gptexp.report.curves import LEVEL, Array, Curves
from gptexp.report.noise import f_tail, t_quantile

SLOPES = {"none": 0.0, "square root": 0.5, "linear": 1.0}  # what rules of thumb say of the exponent


@dataclass(frozen=True)
class Law:
    """lr*(B) = lr (B / tokens)^exponent, with the 95% interval of the exponent; `tokens` is the middle of the sizes."""

    lr: float
    tokens: float
    exponent: float
    low: float
    high: float
    sd: float
    lr_sd_octaves: float  # standard error of log2(lr), which is independent of that of the exponent
    sizes: tuple[int, ...]
    scatter: bool  # optima lie farther from the line than their intervals say; the interval allows for it
    bends: bool | None  # a quadratic term in log2(B) is significant; None with fewer than four sizes

    def at(self, tokens: float) -> float:
        """The best learning rate at a batch size in tokens."""
        return float(self.lr * (tokens / self.tokens) ** self.exponent)

    def admits(self, exponent: float) -> bool:
        return self.low <= exponent <= self.high


def fit_law(curves: Curves) -> Law | None:
    """Weighted least squares of log2 lr* over log2 B, weights 1 / variance; None with fewer than two optima."""
    optima = dict(sorted(curves.optima.items()))
    if len(optima) < 2 or curves.noise is None:
        return None
    x = np.log2(list(optima))
    y = np.log2([optimum.lr for optimum in optima.values()])
    sd = np.array([optimum.sd_octaves for optimum in optima.values()])
    centre = float(np.average(x, weights=sd**-2))
    (slope, level), covariance, chi2 = _least_squares(np.vander(x - centre, 2), y, sd)
    dof, t = len(x) - 2, curves.noise.t
    scatter = dof > 0 and f_tail(chi2 / dof, dof, curves.noise.dof) < LEVEL
    if scatter:
        covariance = covariance * chi2 / dof
        t = t_quantile(dof)
    bends = None
    if len(x) >= 4:
        _, _, rest = _least_squares(np.vander(x - centre, 3), y, sd)
        gain = chi2 - rest
        bends = f_tail(gain, 1, curves.noise.dof) < LEVEL
    sd_slope = math.sqrt(covariance[0, 0])
    return Law(
        2.0**level,
        2.0**centre,
        float(slope),
        float(slope - t * sd_slope),
        float(slope + t * sd_slope),
        sd_slope,
        math.sqrt(covariance[1, 1]),
        tuple(optima),
        scatter,
        bends,
    )


def _least_squares(design: Array, y: Array, sd: Array) -> tuple[Array, Array, float]:
    """Coefficients, their covariance, and the weighted sum of squares that is left."""
    weighted = design / sd[:, None]
    covariance = np.linalg.inv(weighted.T @ weighted)
    found = covariance @ (weighted.T @ (y / sd))
    return found, covariance, float(np.sum((y / sd - weighted @ found) ** 2))
