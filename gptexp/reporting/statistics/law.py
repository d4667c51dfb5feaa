"""The best learning rate as a power of the batch size, lr*(B) = lr_0 (B / B_0)^alpha, from the posterior of the optima.

log2 lr* is a line in log2 B, and the optima scatter around it. For a given size of scatter, the means and covariance of
the optima give the line by generalised least squares. This size has a prior near zero and is averaged over (random
effects; DerSimonian and Laird 1986, Controlled Clinical Trials 7:177; Gelman 2006, Bayesian Analysis 1:515).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import special

from gptexp.reporting.statistics.curves import CENTRAL
from gptexp.reporting.statistics.forms import Array
from gptexp.reporting.statistics.posterior import DRAWS, interval

SLOPES = {"constant": 0.0, "square root": 0.5, "linear": 1.0}  # exponents of the usual scaling rules
SCATTERS = np.array([0.0, 0.03, 0.06, 0.1, 0.15, 0.25, 0.4, 0.7, 1.2])  # octaves
USUAL_SCATTER, SCATTER_DOF = 0.015, 3.0  # scale in octaves, and degrees of freedom, of the half-t prior of the scatter
LARGE_SCATTER = 0.1  # octaves; a larger scatter is mentioned
BENDS_FROM = 4  # batch sizes that the test for a bend needs


@dataclass(frozen=True)
class Law:
    """lr*(B) = lr (B / tokens)^exponent; `tokens` is the weighted geometric mean of the batch sizes."""

    lr: float
    tokens: float
    exponent: float
    low: float  # 95% interval of the exponent
    high: float
    sizes: tuple[int, ...]  # tokens per step
    scatter: bool  # the optima scatter more than their intervals allow
    bends: bool | None  # a quadratic term in log2(B) is significant; None with fewer than four batch sizes
    lines: Array  # (draws, 2): exponents, and log2 of lr

    def at(self, tokens: float) -> float:
        """The best learning rate at a batch size in tokens."""
        return float(self.lr * (tokens / self.tokens) ** self.exponent)

    def interval_at(self, tokens: float) -> tuple[float, float]:
        """The 95% interval of the line at a batch size in tokens."""
        low, high = interval(self.lines[:, 1] + self.lines[:, 0] * np.log2(tokens / self.tokens))
        return 2**low, 2**high

    def admits(self, exponent: float) -> bool:
        return self.low <= exponent <= self.high


def independent_difference(one: Array, other: Array) -> Array:
    """Draws of a difference of two arms, one of them shuffled: both were drawn with the same random numbers."""
    return np.asarray(one - np.random.default_rng(2).permutation(other))


def fit_law(octaves: Mapping[int, Array]) -> Law | None:
    """The law of optima; None for fewer than two. `octaves`: batch size -> joint draws of log2 of a learning rate."""
    if len(octaves) < 2:
        return None
    sizes = sorted(octaves)
    x, draws = np.log2(sizes), np.column_stack([octaves[size] for size in sizes])
    mean, covariance = draws.mean(0), np.atleast_2d(np.cov(draws.T))
    precision = np.linalg.inv(covariance + 1e-8 * np.eye(len(x))).sum(0)
    centre = float(np.average(x, weights=np.maximum(precision, 1e-9)))
    lines, scatters = _coefficients(np.vander(x - centre, 2), mean, covariance)
    low, high = interval(lines[:, 0])
    # The interval includes the exponents of all lines that pass through the central interval of each batch size.
    ends = [(at, *interval(draws[:, j], CENTRAL)) for j, at in enumerate(x)]
    flattest = max((low_1 - high_0) / (x_1 - x_0) for (x_0, _, high_0), (x_1, low_1, _) in combinations(ends, 2))
    steepest = min((high_1 - low_0) / (x_1 - x_0) for (x_0, low_0, _), (x_1, _, high_1) in combinations(ends, 2))
    if flattest <= steepest:
        low, high = min(low, flattest), max(high, steepest)
    bends = None
    if len(x) >= BENDS_FROM:
        quadratic, _ = _coefficients(np.vander(x - centre, 3), mean, covariance)
        bent_low, bent_high = interval(quadratic[:, 0])
        bends = not bent_low <= 0 <= bent_high
    exponent, level = np.median(lines, axis=0)
    scatter = float((scatters > LARGE_SCATTER).mean()) > 0.5
    return Law(float(2**level), 2**centre, float(exponent), low, high, tuple(sizes), scatter, bends, lines)


def _coefficients(design: Array, mean: Array, covariance: Array) -> tuple[Array, Array]:
    """Draws of the coefficients of `design`, and the scatter of each draw."""
    logs, centres, roots = [], [], []  # one for each of SCATTERS
    for scatter in SCATTERS:
        noise = covariance + (scatter**2 + 1e-8) * np.eye(len(mean))
        inverse = np.linalg.inv(noise)
        known = design.T @ inverse @ design
        error = np.linalg.inv(known)
        best = error @ (design.T @ inverse @ mean)
        left = mean - design @ best
        # Marginal likelihood with a flat prior of the coefficients. `shares` accounts for the spacing of SCATTERS.
        log = -0.5 * (left @ inverse @ left + np.linalg.slogdet(noise)[1] + np.linalg.slogdet(known)[1])
        log -= (SCATTER_DOF + 1) / 2 * np.log1p((scatter / USUAL_SCATTER) ** 2 / SCATTER_DOF)
        logs.append(log)
        centres.append(best)
        roots.append(np.linalg.cholesky(error))
    shares = special.softmax(np.array(logs) + np.log(np.gradient(SCATTERS)))
    rng = np.random.default_rng(1)
    chosen = np.searchsorted(np.cumsum(shares), (np.arange(DRAWS) + 0.5) / DRAWS).clip(0, len(SCATTERS) - 1)
    normal = rng.standard_normal((DRAWS, design.shape[1]))
    return np.array(centres)[chosen] + np.einsum("dij,dj->di", np.array(roots)[chosen], normal), SCATTERS[chosen]


def fit_ratio(one: Mapping[int, Array], other: Mapping[int, Array]) -> Law | None:
    """The law of the best learning rates of an arm divided by those of another, at the batch sizes that both have.

    Its exponent is the difference of the arms' exponents. A bend that both arms share cancels in the ratio, so the
    difference is known better than from two laws. None with fewer than two such batch sizes.
    """
    return fit_law({size: independent_difference(one[size], other[size]) for size in one.keys() & other.keys()})
