"""Curves of the loss over the learning rate: they fall slowly and rise like a wall.

The curve is a straight line plus an exponential in log2(lr), the LINEX function of Varian (1975, in Studies in Bayesian
Econometrics and Statistics): loss = a g(u) + b u + c with u = log2(lr) - centre and g(u) = 2 (e^(ku) - 1 - ku) / k^2.
Its skew k is common to all batch sizes of a sweep; with k = 0 it is a parabola. For a given k the fit is linear.

No formula is exact. Far above its minimum a curve is trusted less: to a share `MISFIT` of its height there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]

SKEWS = np.linspace(-1.0, 2.5, 71)  # per octave
USUAL_SKEW, SKEW_SPREAD = 0.5, 1.0  # of curves of real sweeps: a weak preference, as they are alike
MISFIT = 0.2  # standard deviation of a curve's misfit, as a share of the height above its minimum
LARGEST_MISFIT = 0.4  # the same for intervals, which must hold the minimum of curves that no formula fits well
SCAN = 401  # learning rates that are tested as the minimum, from one end of the bracket to the other


@dataclass(frozen=True)
class Linex:
    """A fitted curve with its minimum."""

    centre: float  # log2 of a learning rate
    skew: float
    a: float
    b: float
    c: float
    covariance: Array  # (3, 3), of a, b, c at this skew
    lrs: tuple[float, ...]  # of the fit

    def at(self, x: Array | float) -> Array:
        """The loss at log2(lr) = `x`."""
        u = np.asarray(x) - self.centre
        return self.a * _g(self.skew, u) + self.b * u + self.c

    @property
    def minimum(self) -> float:
        """log2 of the learning rate; `a` must be positive."""
        slope = -self.b / (2 * self.a)
        if self.skew == 0:
            return self.centre + slope
        return self.centre + math.log1p(max(-1 + 1e-12, slope * self.skew)) / self.skew

    def sd_at(self, x: float) -> float:
        """Standard error of the loss at log2(lr) = `x`."""
        gradient = np.array([float(_g(self.skew, np.asarray(x - self.centre))), x - self.centre, 1.0])
        return math.sqrt(gradient @ self.covariance @ gradient)


@dataclass(frozen=True)
class Target:
    """The points of one batch size to fit, and the bracket in which their minimum lies."""

    lrs: Sequence[float]
    means: Sequence[float]
    variances: Sequence[float]  # of the means
    t: float  # quantile of the intervals
    below: float
    above: float


@dataclass(frozen=True)
class Fitted:
    """A curve, and the interval of its minimum in log2(lr)."""

    curve: Linex
    minimum: float
    low: float
    high: float
    sd: float  # standard error of the minimum, in octaves


def fit_all(targets: Mapping[int, Target]) -> dict[int, Fitted]:
    """Fit curves of one skew to all batch sizes, each with three learning rates or more.

    A batch size has no curve if none that suits its points has a minimum.

    The interval of a minimum holds each x within the bracket at which a curve with its minimum there, and the skew that
    suits it, fits worse than the best curve by at most t^2 in units of the variances (profile likelihood).
    """
    fits = {batch: _Fits(target) for batch, target in targets.items()}
    shared = sum((fit.misfit for fit in fits.values()), ((SKEWS - USUAL_SKEW) / SKEW_SPREAD) ** 2)
    return {batch: fit.result(shared) for batch, fit in fits.items() if (fit.coefficients[:, 0] > 0).any()}


class _Fits:
    """The fits of one batch size at every skew of `SKEWS`."""

    def __init__(self, target: Target) -> None:
        self.target = target
        x, y = np.log2(target.lrs), np.asarray(target.means)
        self.centre = float(x[np.argmin(y)])
        u, root = x - self.centre, 1 / np.sqrt(target.variances)
        skews = SKEWS[:, None]
        columns = [_g(skews, u), np.broadcast_to(u, (len(SKEWS), len(u))), np.ones((len(SKEWS), len(u)))]
        q, r = np.linalg.qr(np.stack(columns, axis=-1) * root[None, :, None])
        inverse = np.linalg.inv(r)
        rotated = np.einsum("kni,n->ki", q, root * y)
        self.coefficients = np.einsum("kij,kj->ki", inverse, rotated)  # (K, 3)
        self.covariance = np.einsum("kij,klj->kil", inverse, inverse)  # (K, 3, 3)
        rest = root * y - np.einsum("kni,ki->kn", q, rotated)
        self.misfit = (rest**2).sum(axis=1)  # (K,)

    def result(self, shared: Array) -> Fitted:
        """`shared`: the misfit of all batch sizes at each skew."""
        target = self.target
        x = np.linspace(math.log2(target.below), math.log2(target.above), SCAN)
        slope_of_g = _slope_of_g(SKEWS[:, None], x - self.centre)  # (K, X)
        (a, b, c), v = self.coefficients.T, self.covariance
        slope = a[:, None] * slope_of_g + b[:, None]
        variance = slope_of_g**2 * v[:, 0, 0, None] + 2 * slope_of_g * v[:, 0, 1, None] + v[:, 1, 1, None]
        misfit = np.where(a[:, None] > 0, slope**2 / variance + shared[:, None], math.inf)  # else it is a maximum
        profile = misfit.min(axis=0)
        profile -= profile.min()
        inside, near = x[profile <= target.t**2], x[profile <= 1]
        best = int(np.argmin(np.where(a > 0, shared, math.inf)))
        curve = Linex(self.centre, float(SKEWS[best]), float(a[best]), float(b[best]), float(c[best]), v[best],
                      tuple(target.lrs))  # fmt: skip
        minimum = min(max(curve.minimum, float(inside[0])), float(inside[-1]))
        sd = max(float(near[-1] - near[0]), float(x[1] - x[0])) / 2
        return Fitted(curve, minimum, float(inside[0]), float(inside[-1]), sd)


def _g(skew: Array | float, u: Array) -> Array:
    """2 (e^(ku) - 1 - ku) / k^2, which tends to u^2 for small k."""
    ku = np.asarray(skew * u)
    safe = np.where(np.abs(ku) < 1e-4, 1.0, ku)
    values: Array = u**2 * np.where(np.abs(ku) < 1e-4, 1 + ku / 3, 2 * (np.expm1(safe) - safe) / safe**2)
    return values


def _slope_of_g(skew: Array, u: Array) -> Array:
    """2 (e^(ku) - 1) / k, which tends to 2 u for small k."""
    ku = np.asarray(skew * u)
    safe = np.where(np.abs(ku) < 1e-6, 1.0, ku)
    values: Array = 2 * u * np.where(np.abs(ku) < 1e-6, 1 + ku / 2, np.expm1(safe) / safe)
    return values
