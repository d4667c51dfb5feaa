"""How many steps and tokens a loss takes at each batch size, and the critical batch size.

The steps S and tokens E = S B that reach a given loss lie near the hyperbola (S / S_min - 1) (E / E_min - 1) = 1
(McCandlish et al. 2018, arXiv 1812.06162, section 2.2), which is S = S_min (1 + B_crit / B). At B_crit both are twice
their least. The curve is an approximation, so the other definition in use stands beside it: the largest batch size that
takes at most 20% more tokens than the cheapest (arXiv 2410.21676); on the hyperbola that is B_crit / 5.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gptexp.report.curves import LEVEL, Array
from gptexp.report.noise import f_tail, t_quantile

OVERHEAD = 1.2
EXACT = 1e-16  # mean square of log S that is rounding
FAR = 20.0  # octaves beyond the sizes that were run: there S is a power of B, or constant
FEWEST = 4  # batch sizes that the two parameters of a hyperbola and its noise need


@dataclass(frozen=True)
class Hyperbola:
    """S = least_steps (1 + tokens / B), with the 95% interval of `tokens`, the critical batch size."""

    tokens: float
    low: float
    high: float
    least_steps: float


@dataclass(frozen=True)
class Critical:
    """Batch sizes in tokens. `status` says what the sizes that were run allow to say by the hyperbola."""

    status: Literal["bracketed", "lower bound only", "upper bound only", "open", "too few"]
    steps: dict[int, float]  # batch size -> steps to the target loss
    twenty_percent: int  # the largest size run with at most 1.2 times the fewest tokens
    twenty_percent_open: bool  # it is the largest that was run: the true one may be larger
    hyperbola: Hyperbola | None = None  # "bracketed"
    bound: float | None = None  # of the critical batch size, at 95%: for the two statuses that are bounds
    misfit: bool = False  # an exponent other than 1 of tokens / B fits better


def critical_batch_size(steps: Mapping[int, float]) -> Critical:
    """Fit log S over the batch sizes (in tokens, two at least) by least squares; intervals from what is left over.

    The interval holds each critical batch size at which the best S_min leaves no significantly larger sum of squares:
    where S is a power of B over all sizes it has no end.
    """
    from scipy import optimize

    ordered = {b: steps[b] for b in sorted(steps)}
    sizes, s = np.array(list(ordered), dtype=float), np.array(list(ordered.values()))
    tokens = sizes * s
    twenty = int(sizes[tokens <= OVERHEAD * tokens.min()].max())
    is_largest = bool(twenty == sizes[-1])
    if len(sizes) < FEWEST:
        return Critical("too few", ordered, twenty, is_largest)
    least, crit, cost, _ = _fit(sizes, s, with_exponent=False)
    dof = len(sizes) - 2
    t = t_quantile(dof)
    limit = 2 * cost * (1 + t * t / dof) + EXACT

    def off(octave: float) -> float:
        """How far the sum of squares at a critical batch size of 2^`octave` is beyond the limit."""
        rest = np.log(s) - np.log1p(2**octave / sizes)
        return float(np.sum((rest - rest.mean()) ** 2)) - limit

    at = float(np.clip(math.log2(crit), math.log2(sizes[0]) - FAR, math.log2(sizes[-1]) + FAR))
    ends = []
    for end in (math.log2(sizes[0]) - FAR, math.log2(sizes[-1]) + FAR):
        ends.append(2.0 ** optimize.brentq(off, min(at, end), max(at, end)) if off(end) > 0 > off(at) else None)
    low, high = ends
    misfit = _misfits(sizes, s, cost)
    if low is None and high is None:
        return Critical("open", ordered, twenty, is_largest, misfit=misfit)
    if high is None or crit > sizes[-1]:
        return Critical("lower bound only", ordered, twenty, is_largest, bound=low, misfit=misfit)
    if low is None or crit < sizes[0]:
        return Critical("upper bound only", ordered, twenty, is_largest, bound=high, misfit=misfit)
    return Critical("bracketed", ordered, twenty, is_largest, Hyperbola(crit, low, high, least), misfit=misfit)


def _fit(sizes: Array, s: Array, with_exponent: bool) -> tuple[float, float, float, Array]:
    """S_min and B_crit, half the sum of squares that is left, and the Jacobian of log S in their logarithms.

    `with_exponent`: (B_crit / B)^p instead of B_crit / B.
    """

    from scipy import optimize

    def off(parameters: Array) -> Array:
        p = parameters[2] if with_exponent else 1.0
        return np.asarray(parameters[0] + np.logaddexp(0, p * (parameters[1] - np.log(sizes))) - np.log(s))

    start = [math.log(s.min()), math.log((sizes * s).min() / s.min()), *([1.0] if with_exponent else [])]
    found = optimize.least_squares(off, start, x_scale="jac")
    return math.exp(found.x[0]), math.exp(found.x[1]), float(found.cost), found.jac


def _misfits(sizes: Array, s: Array, cost: float) -> bool:
    """F-test of an exponent other than 1."""
    dof = len(sizes) - 3
    *_, other, _ = _fit(sizes, s, with_exponent=True)
    return f_tail((cost - other) / max(other / dof, EXACT), 1, dof) < LEVEL


def steps_to(loss: float, course: Sequence[tuple[int, float]]) -> float | None:
    """Steps at which a run came to `loss`, between two (steps, loss) of `course`; None: never, or before the first."""
    before: tuple[int, float] | None = None
    for step, value in course:
        if value <= loss:
            if before is None:
                return None
            return before[0] + (before[1] - loss) / (before[1] - value) * (step - before[0])
        before = (step, value)
    return None
