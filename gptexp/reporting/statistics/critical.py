"""Steps and tokens to reach a loss at each batch size, and the critical batch size that follows.

The steps S and tokens E = S B that reach a given loss lie near the hyperbola (S / S_min - 1) (E / E_min - 1) = 1
(McCandlish et al. 2018, arXiv 1812.06162, section 2.2), which is S = S_min (1 + B_crit / B). At B_crit both S and E are
twice their minimum. The hyperbola is an approximation, so a second definition is reported too: the largest batch size
that takes at most 20% more tokens than the cheapest (arXiv 2410.21676). On the hyperbola that is B_crit / 5.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import scipy

from gptexp.reporting.statistics.forms import Array
from gptexp.reporting.statistics.noise import LEVEL, f_tail, t_quantile

OVERHEAD = 1.2
ROUNDING = 1e-16  # mean square of log S; smaller ones are rounding errors
OCTAVES_BEYOND = 20.0  # how far a fit may go beyond the batch sizes of the runs; there S is a power of B, or constant
FEWEST = 4  # batch sizes; a hyperbola has two parameters, and its residuals need two degrees of freedom


@dataclass(frozen=True)
class Hyperbola:
    """S = least_steps (1 + tokens / B). `tokens` is the critical batch size; `low` to `high` its 95% interval."""

    tokens: float
    low: float
    high: float
    least_steps: float


@dataclass(frozen=True)
class Critical:
    """Critical batch size by both definitions. Batch sizes in tokens."""

    status: Literal["bracketed", "lower bound only", "upper bound only", "open", "too few"]  # of the hyperbola's fit
    steps: dict[int, float]  # batch size -> steps to the target loss
    twenty_percent: int  # the largest batch size of the runs that takes at most 1.2 times the fewest tokens
    twenty_percent_open: bool  # `twenty_percent` is the largest batch size of the runs, so the true one may be larger
    hyperbola: Hyperbola | None = None  # given if status is "bracketed"
    bound: float | None = None  # 95% bound of the critical batch size, if status is a bound
    misfit: bool = False  # an exponent other than 1 of tokens / B fits significantly better


def critical_batch_size(steps: Mapping[int, float]) -> Critical:
    """Fit log S over the batch sizes by least squares. `steps`: batch size in tokens -> steps; at least two sizes.

    The interval follows from the residuals: it holds each critical batch size whose sum of squares, with the best
    S_min for it, is not significantly above the lowest. It is unbounded where S is a power of B over all batch sizes.
    """
    ordered = dict(sorted(steps.items()))
    sizes, s = np.array(list(ordered), dtype=float), np.array(list(ordered.values()))
    tokens = sizes * s
    twenty = int(sizes[tokens <= OVERHEAD * tokens.min()].max())
    is_largest = bool(twenty == sizes[-1])
    if len(sizes) < FEWEST:
        return Critical("too few", ordered, twenty, is_largest)
    least_steps, crit, cost = _fit(sizes, s, with_exponent=False)
    dof = len(sizes) - 2
    t = t_quantile(dof)
    limit = 2 * cost * (1 + t * t / dof) + ROUNDING

    def excess(octave: float) -> float:
        """The sum of squares at a critical batch size of 2^`octave`, minus the limit."""
        rest = np.log(s) - np.log1p(2**octave / sizes)
        return float(np.sum((rest - rest.mean()) ** 2)) - limit

    lowest, highest = math.log2(sizes[0]) - OCTAVES_BEYOND, math.log2(sizes[-1]) + OCTAVES_BEYOND
    best = float(np.clip(math.log2(crit), lowest, highest))
    low, high = (
        2.0 ** scipy.optimize.brentq(excess, *sorted((best, end))) if excess(end) > 0 > excess(best) else None
        for end in (lowest, highest)
    )
    *_, cost_with_exponent = _fit(sizes, s, with_exponent=True)
    left = max(cost_with_exponent / (dof - 1), ROUNDING)
    misfit = f_tail((cost - cost_with_exponent) / left, 1, dof - 1) < LEVEL
    critical = Critical("open", ordered, twenty, is_largest, misfit=misfit)
    if low is None and high is None:
        return critical
    if high is None or crit > sizes[-1]:
        return replace(critical, status="lower bound only", bound=low)
    if low is None or crit < sizes[0]:
        return replace(critical, status="upper bound only", bound=high)
    return replace(critical, status="bracketed", hyperbola=Hyperbola(crit, low, high, least_steps))


def _fit(sizes: Array, s: Array, with_exponent: bool) -> tuple[float, float, float]:
    """Fit S = S_min (1 + (B_crit / B)^p), with p = 1 unless `with_exponent`.

    Returns S_min, B_crit and half the sum of squared residuals of log S.
    """

    def residuals(parameters: Array) -> Array:
        p = parameters[2] if with_exponent else 1.0
        return np.asarray(parameters[0] + np.logaddexp(0, p * (parameters[1] - np.log(sizes))) - np.log(s))

    start = [math.log(s.min()), math.log((sizes * s).min() / s.min()), *([1.0] if with_exponent else [])]
    fit = scipy.optimize.least_squares(residuals, start, x_scale="jac")
    return math.exp(fit.x[0]), math.exp(fit.x[1]), float(fit.cost)


def steps_to(loss: float, course: Sequence[tuple[int, float]]) -> float | None:
    """Steps at which a run first reaches `loss`, interpolated between two (steps, loss) of `course`.

    Returns None if it never does, or does so before the first evaluation.
    """
    for (step_before, loss_before), (step, value) in itertools.pairwise(course):
        if loss_before <= loss:
            return None
        if value <= loss:
            return step_before + (loss_before - loss) / (loss_before - value) * (step - step_before)
    return None
