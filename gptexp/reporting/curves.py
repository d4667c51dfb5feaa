"""Final loss against learning rate, for each batch size: its shape, and where that allows it the best learning rate.

The shape comes first and needs no fit (`shape.py`). A bracketed curve gets an optimum: with a measured noise that of a
skewed curve through the nearest learning rates, with a 95% interval (`linex.py`); without one the vertex of the
parabola through the best learning rate and its two neighbours, which is no more exact than the bracket.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

import numpy as np

from gptexp.process.words import counted
from gptexp.reporting.linex import LARGEST_MISFIT, MISFIT, SCAN, Fitted, Linex, Target, fit_all
from gptexp.reporting.noise import Losses, Noise, measure, ties
from gptexp.reporting.shape import (
    CLEAR,
    Points,
    Shape,
    Status,
    outlier,
    outlying_seed,
    points_of,
    shape_of,
)

JAGGED = "the loss falls and rises more than once, by more than seeds explain"
MOST = 5  # learning rates in a fit
SPACING = 2.0  # ratio of learning rates next to a grid of only one
WIDE_GAP = 1.9  # ratio of two learning rates between which the lowest point may be missed: about an octave
SAME = 0.1  # octaves: learning rates that are closer are one point of a parabola
MOST_SKEWED = 4.0  # a wall that rises more times as far as the loss falls before it says no more of the lowest point
MOST_OUTLIERS = 0.25  # of a batch size's runs; more of them are no outliers, and the curve is jagged


@dataclass(frozen=True)
class Optimum:
    """The best learning rate. Losses in nats per token. The fields that need a measured noise are None without one."""

    lr: float
    loss: float  # of the curve at `lr`
    low: float | None = None  # 95% interval of `lr`
    high: float | None = None
    sd_octaves: float | None = None  # standard error of log2(lr)
    loss_half_width: float | None = None  # half of the 95% interval of `loss`
    tie_low: float | None = None  # a run between this and `tie_high` does not differ significantly from a run at `lr`
    tie_high: float | None = None
    curve: Linex | None = None

    def above(self, other: "Optimum") -> tuple[float, float]:
        """How far its loss is above that of `other`, and half of the 95% interval of that, in nats."""
        return self.loss - other.loss, math.hypot(self.loss_half_width or 0.0, other.loss_half_width or 0.0)


@dataclass(frozen=True)
class Outlier:
    """A run that takes no part in shape, fit and noise."""

    lr: float
    loss: float
    why: str


@dataclass(frozen=True)
class Curve:
    """The losses at one batch size."""

    status: Status
    why: str  # the finding behind the status
    best: float | None = None  # the learning rate with the lowest mean loss
    noise: Noise | None = None
    bracket: tuple[float, float] | None = None  # "bracketed": the nearest learning rates on both sides that are worse
    optimum: Optimum | None = None  # "bracketed"
    tied: tuple[float, float] | None = None  # "flat": the range of learning rates that tie with the best
    next_lr: float | None = None  # "not bracketed": the learning rate to run next; None if only seeds help
    outliers: list[Outlier] = field(default_factory=list)


@dataclass(frozen=True)
class Curves:
    """The curves of all batch sizes."""

    of: dict[int, Curve]  # batch size in tokens -> curve
    losses: dict[int, dict[float, list[float]]]  # as given, without outliers
    usual_spread: float  # nats: standard deviation over seeds; decides shapes where a batch size has too few seeds

    @property
    def optima(self) -> dict[int, Optimum]:
        """Batch size in tokens -> optimum, for the batch sizes whose optimum has an interval."""
        return {b: c.optimum for b, c in self.of.items() if c.optimum is not None and c.optimum.low is not None}

    @property
    def noises(self) -> dict[int, Noise]:
        """Batch size in tokens -> noise, for those at which it was measured."""
        return {batch: curve.noise for batch, curve in self.of.items() if curve.noise is not None}

    def ties(self, one: tuple[int, float], other: tuple[int, float]) -> bool | None:
        """Whether two cells (batch size, learning rate) do not differ significantly; None without a measured noise."""
        noise, other_noise = self.of[one[0]].noise, self.of[other[0]].noise
        if noise is None or other_noise is None:
            return None
        of_one, of_other = self.losses[one[0]][one[1]], self.losses[other[0]][other[1]]
        return ties(fmean(of_one) - fmean(of_other), noise, len(of_one), other_noise, len(of_other))


def fit_curves(losses: Mapping[int, Losses], diverged: Mapping[int, Sequence[float]], usual_spread: float) -> Curves:
    """Judge and fit all batch sizes of one sweep.

    `losses`: batch size -> losses of completed runs; `diverged`: batch size -> learning rates that diverged;
    `usual_spread`: standard deviation over seeds that such runs have had, in nats. It decides shapes and outliers where
    too few seeds measure the noise. A larger noise at another batch size takes its place in the shapes.
    """
    kept, outliers = {}, {}
    for batch, at_batch in losses.items():
        kept[batch], outliers[batch] = _without_outliers(at_batch, usual_spread)
    noises = measure(kept)
    usual_spread = max([usual_spread, *(noise.sigma for noise in noises.values() if noise.is_sure)])
    points = {batch: points_of(at_batch, noises.get(batch), usual_spread) for batch, at_batch in kept.items()}
    shapes = {batch: _shape(of_batch, diverged.get(batch, ())) for batch, of_batch in points.items()}
    bracketed = {b: shape.bracket for b, shape in shapes.items() if shape.bracket is not None and b in noises}
    targets, careful = (
        {batch: _target(points[batch], noises[batch], *ends, misfit) for batch, ends in bracketed.items()}
        for misfit in (MISFIT, LARGEST_MISFIT)
    )
    intervals = fit_all(careful)
    optima = {
        batch: _optimum(fitted, intervals.get(batch), targets[batch], noises[batch])
        for batch, fitted in fit_all(targets).items()
    }
    curves = {
        batch: _curve(of_batch, shapes[batch], optima.get(batch), diverged.get(batch, ()), outliers[batch])
        for batch, of_batch in points.items()
    }
    return Curves(curves, kept, usual_spread)


def _without_outliers(losses: Losses, usual_spread: float) -> tuple[dict[float, list[float]], list[Outlier]]:
    """The losses of one batch size that the fit may use, and those that it may not."""
    kept = {lr: list(of_seeds) for lr, of_seeds in losses.items()}
    found: list[Outlier] = []
    most = int(MOST_OUTLIERS * sum(map(len, kept.values())))
    for _ in range(most):
        if (seed := outlying_seed(kept, usual_spread)) is not None:
            lr, loss = seed
            kept[lr].remove(loss)
            others = fmean(kept[lr])
            found.append(Outlier(lr, loss, f"other seeds of its cell have a loss of {others:.4f}"))
            if loss > others and len(kept) > 1:  # as where a seed diverged: the mean of the others would be too low
                why = f"another seed of its cell has a loss of {loss:.4f}"
                found += [Outlier(lr, other, why) for other in kept.pop(lr)]
        elif (alone := outlier(points_of(kept, measure({0: kept}).get(0), usual_spread))) is not None:
            [loss] = kept.pop(alone)
            found.append(Outlier(alone, loss, "no curve through its neighbours explains its loss"))
        else:
            break
    return kept, found


def _shape(points: Points, diverged: Sequence[float]) -> Shape:
    """The shape of the points, where a learning rate that diverged is worse than the best one.

    It ends the bracket only if a loss between them is known: else the loss falls as far up as is known.
    """
    shape = shape_of(points)
    if shape.status == "too few" or not diverged:
        return shape
    best, limit = points.lrs[points.best], min(diverged)
    if limit < best:
        return Shape("jagged")
    if shape.status in ("flat", "jagged") or not (shape.above or any(best < lr < limit for lr in points.lrs)):
        return shape
    above = min(limit, shape.above or math.inf)
    return Shape("not bracketed" if shape.below is None else "bracketed", shape.below, above)


def _target(points: Points, noise: Noise, below: float, above: float, misfit: float) -> Target:
    """The best learning rate, its neighbours, and the next nearest, with the variances of their means."""
    best = points.best
    x = np.log2(points.lrs)
    others = sorted(range(len(x)), key=lambda i: (abs(i - best) > 1, round(abs(x[i] - x[best]), 6), points.means[i]))
    used = sorted(others[:MOST])
    heights = [points.means[i] - points.means[best] for i in used]
    variances = [
        noise.sigma**2 / points.counts[i] + (misfit * height) ** 2 for i, height in zip(used, heights, strict=True)
    ]
    return Target([points.lrs[i] for i in used], [points.means[i] for i in used], variances, noise.t, below, above)


def _optimum(fitted: Fitted, interval: Fitted | None, target: Target, noise: Noise) -> Optimum:
    """`interval`: the curve whose interval counts; None: the whole bracket does."""
    curve = fitted.curve
    x = np.linspace(math.log2(target.below), math.log2(target.above), SCAN)
    ends = (interval.low, interval.high) if interval is not None else (float(x[0]), float(x[-1]))
    loss = float(curve.at(fitted.minimum))
    worse = curve.at(x) - loss > noise.t * noise.sigma * math.sqrt(2)
    low = max(x[worse & (x < fitted.minimum)], default=x[0])
    high = min(x[worse & (x > fitted.minimum)], default=x[-1])
    return Optimum(
        lr=2**fitted.minimum,
        loss=loss,
        low=2 ** min(fitted.low, ends[0]),
        high=2 ** max(fitted.high, ends[1]),
        sd_octaves=fitted.sd,
        loss_half_width=noise.t * curve.sd_at(fitted.minimum),
        tie_low=float(2**low),
        tie_high=float(2**high),
        curve=curve,
    )


def _vertex(points: Points) -> Optimum:
    """The minimum of the parabola through the best point and its two neighbours, never beyond half-way to one of these.

    Its loss is that of the best point: three points do not say how far below it the minimum lies.
    """
    x, best = np.log2(points.lrs), points.best
    left = max((i for i in range(best) if x[best] - x[i] >= SAME), default=best - 1)
    right = min((i for i in range(best + 1, len(x)) if x[i] - x[best] >= SAME), default=best + 1)
    before, after = x[best] - x[left], x[right] - x[best]
    fall, rise = (points.means[i] - points.means[best] for i in (left, right))
    if min(fall, rise) > 0:
        fall, rise = min(fall, MOST_SKEWED * rise), min(rise, MOST_SKEWED * fall)
    curvature = fall / before + rise / after
    shift = (fall * after / before - rise * before / after) / (2 * curvature) if curvature else 0.0
    return Optimum(lr=float(2 ** (x[best] + shift)), loss=points.means[best])


def _curve(
    points: Points, shape: Shape, optimum: Optimum | None, diverged: Sequence[float], outliers: list[Outlier]
) -> Curve:
    best = points.lrs[points.best] if points.lrs else None
    judged = partial(Curve, best=best, noise=points.noise, outliers=outliers)
    if shape.status == "too few":
        completed = counted(len(points.lrs), "learning rate")
        return judged("too few", f"{completed} completed, and a lowest point needs three")
    if shape.status == "jagged":
        below = [lr for lr in diverged if best is not None and lr < best]
        why = f"training diverged at {min(below):g}, below the best learning rate {best:g}" if below else JAGGED
        return judged("jagged", why)
    if shape.status == "flat":
        return judged("flat", _differences(points), tied=_tied(points))
    if shape.bracket is not None:
        low, high = shape.bracket
        why = (
            f"the loss at {low:g} is clearly higher, and training diverged at {high:g}"
            if high in diverged
            else f"the losses at {low:g} and {high:g} are clearly higher"
        )
        return judged("bracketed", why, bracket=shape.bracket, optimum=optimum or _vertex(points))
    why, next_lr = _next(points, shape, diverged, [outlier.lr for outlier in outliers])
    return judged("not bracketed", why, next_lr=next_lr)


def _differences(points: Points) -> str:
    if points.sure_noise is not None:
        return "the differences are not significant"
    return f"the losses differ by {points.height:.2g} nats, less than {CLEAR:g} times the standard deviation over seeds"


def _tied(points: Points) -> tuple[float, float]:
    """The learning rates around the best one up to the first that is worse."""
    best = points.best
    worse = [i for i in range(len(points.lrs)) if points.is_worse(i, best)]
    low = max((i for i in worse if i < best), default=-1) + 1
    high = min((i for i in worse if i > best), default=len(points.lrs)) - 1
    return points.lrs[low], points.lrs[high]


def one_step_outside(lrs: Sequence[float]) -> tuple[float, float]:
    """The learning rates below and above a grid of rising ones, as far from its ends as the next ones inside."""
    if len(lrs) < 2:
        return lrs[0] / SPACING, lrs[0] * SPACING
    return lrs[0] ** 2 / lrs[1], lrs[-1] ** 2 / lrs[-2]


def _next(
    points: Points, shape: Shape, diverged: Sequence[float], left_out: Sequence[float]
) -> tuple[str, float | None]:
    """Why a curve is not bracketed, and the learning rate to run next; None if only seeds help.

    The grid is extended only if the best learning rate is its end, or next to its end.
    """
    if shape.below is None and shape.above is None:
        return f"the losses differ by {points.height:.2g} nats, but seeds move them as much", None
    best = points.lrs[points.best]
    if shape.below is None:
        why = (
            "the loss rises from the lowest learning rate on"
            if points.best == 0
            else f"the loss does not clearly rise below {best:g}"
        )
        beyond = one_step_outside(points.lrs)[0] if points.best <= 1 else None
    else:
        bad = [(lr, "diverged") for lr in diverged if lr > best]
        bad = bad or [(lr, "is left out") for lr in left_out if lr > points.lrs[-1]]
        limit, what = min(bad, default=(math.inf, ""))
        points = points.below(limit)
        highest = points.lrs[-1]
        falls = f"the loss falls up to {best:g}" if bad else "the loss falls to the top of the grid"
        why = falls if best == highest else f"the loss does not clearly rise above {best:g}"
        why += f", and {limit:g} {what}" if bad else ""
        beyond = math.sqrt(highest * limit) if bad else one_step_outside(points.lrs)[1]
        if points.best < len(points.lrs) - 2:
            beyond = None
    if (gap := _widest_gap(points)) is not None:
        return f"{why}, and the gap beside it is wide", gap
    return why, beyond


def _widest_gap(points: Points) -> float | None:
    """The middle of the wider gap beside the best learning rate, if that is not at an edge and the gap is wide.

    The lowest point may lie there, on either side: to extend the grid could lead away from it.
    """
    best, lrs = points.best, points.lrs
    if not 0 < best < len(lrs) - 1:
        return None
    ratio, middle = max((max(a / b, b / a), math.sqrt(a * b)) for a, b in ((lrs[best], lrs[best + i]) for i in (-1, 1)))
    return middle if ratio >= WIDE_GAP else None
