"""Which run to make next to find the best learning rate of a batch size, and when to stop.

Every run has its full length, because early losses rank learning rates backwards. The first runs lie an octave (a
factor of two) apart, and go on until a learning rate lies between two that are worse. From then on, the next run is the
one that lowers the variance of log2 of the best learning rate most: at a learning rate between others, or with another
seed. How far it lowers it follows from the posterior's draws, as if all were normal (Chaloner and Verdinelli 1995,
Bayesian Experimental Design, Statistical Science 10:273).

Nothing here depends on time or chance: the same results always lead to the same next run.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gptexp.reporting.statistics.curves import CLOSEST, FLATTER, JUMP, SAME, BatchFit, Curves
from gptexp.reporting.statistics.forms import Array
from gptexp.reporting.statistics.law import independent_difference
from gptexp.reporting.statistics.likelihood import SMALLEST_SIGMA
from gptexp.reporting.statistics.noise import LEVEL
from gptexp.reporting.statistics.posterior import NARROWEST, interval
from gptexp.reporting.statistics.prior import expected_optima, starts

OCTAVE = 2.0
FEWEST = 3  # learning rates that a lowest point needs
FLAT = 0.1  # of a seed's spread: a smaller loss from not knowing the best learning rate exactly is not worth a run
GAP = 0.8  # octaves: the widest gap between the learning rates around the best one
SHARING = 5  # of so many batch sizes, one has learning rates half an octave apart
EARLY = 0.9  # a search stops when an interval happens to be narrow; it must be narrower by this to hold as often
REACH = 2.0  # runs lie within this ratio of the ends of the interval that they narrow
WIDEST = 4096.0  # largest over smallest learning rate; where so many were run, more seeds help, not more of them
SMALLEST_GAIN = 0.98  # a run must narrow the interval to less than this share of its width
SMALLEST_GAIN_OF_ALL = 0.81  # the same of all runs together that may be made

Why = Literal["first", "bracket", "narrow", "noise", "form"]
Stop = Literal["narrow", "flat", "exhausted", "law", "decided"]


@dataclass(frozen=True)
class Trial:
    """A run: its batch size in tokens, learning rate, and how many seeds its cell has before it."""

    batch: int
    lr: float
    repeat: int = 0


@dataclass(frozen=True)
class Step:
    """The next run at a batch size. Widths of the 95% interval; None before a minimum is bracketed.

    They are in octaves; with `Goal.decided` they are those of the loss at the minimum, in nats.
    """

    trial: Trial
    why: Why
    now: float | None = None
    then: float | None = None  # expected

    @property
    def gain(self) -> float:
        """By how many octaves of its width the interval becomes narrower; infinite before there is an interval."""
        return math.log2(self.now / self.then) if self.now is not None and self.then else math.inf


@dataclass(frozen=True)
class Goal:
    """When the best learning rate is known well enough, and which runs may be made for it."""

    within: float  # octaves on each side of the 95% interval
    seeds: int  # the most of a cell
    rates: Mapping[int, Sequence[float]] = field(default_factory=dict)  # batch size -> the only learning rates, if any
    closed: Collection[int] = ()  # batch sizes at which no run can be made
    low: float = 0.0  # learning rates lie between these two
    high: float = math.inf
    decided: Collection[int] | None = None  # if arms are compared: the batch sizes at which their difference is known

    def nearest(self, batch: int, lr: float, is_wanted: Callable[[float], bool] = lambda _: True) -> float:
        """The learning rate nearest to `lr` that may be run; of a list, one that `is_wanted`, if there is one."""
        rates = self.rates.get(batch, ())  # all within the range
        wanted = [rate for rate in rates if is_wanted(rate)] or rates
        return min(wanted, key=lambda rate: abs(math.log(rate / lr)), default=min(max(lr, self.low), self.high))


class Search:
    """The search at one batch size: its results so far, and what runs now."""

    def __init__(self, curves: Curves, batch: int, running: Sequence[Trial], goal: Goal) -> None:
        """`running`: the runs of all batch sizes that have not ended."""
        self.batch, self.goal, self.curves = batch, goal, curves
        self.losses = curves.losses.get(batch, {})
        self.diverged = curves.diverged.get(batch, [])
        self.running_anywhere = running
        self.running = [trial for trial in running if trial.batch == batch]
        self.tried = sorted({*self.losses, *self.diverged, *(trial.lr for trial in self.running)})

    def bracketing(self) -> Step | None:
        """A run outside the learning rates tried, if none of them is known to be too high, or too low."""
        lr = self._outside() if self.tried else None
        return None if lr is None else Step(Trial(self.batch, lr), "bracket")

    def next_step(self) -> Step | Stop | None:
        """The next run, or why there is none; None if that depends on runs that have not ended.

        There must be a run that has ended, or goes on, and no `bracketing` one.
        """
        if len(self.losses) < 2:
            return None if self.running else "exhausted"
        fit = self.curves.fits[self.batch]
        reached = self._reached(fit)
        return (self._between(fit) if reached in ("narrow", "flat") else None) or reached or self._narrowing(fit)

    def _between(self, fit: BatchFit) -> Step | None:
        """A run between the two learning rates around the best one, if these are an octave apart.

        Three losses an octave apart fit every form of the curve, each with another best learning rate. All batch sizes
        share the form, so one in `SHARING` needs such a run, and each at which the loss may jump above the lowest one.
        """
        gaps = [_gap(other) for other in self.curves.fits.values()]
        below, above = _gap(fit)
        higher = min((lr for lr in self.tried if lr > fit.best), default=fit.best)
        if self.curves.means.get((self.batch, higher), 0.0) - fit.means[fit.best] > JUMP:
            below, above = fit.best, higher
        elif SHARING * sum(low < high < 2**GAP * low for low, high in gaps) >= len(gaps):
            return None
        lr = self.goal.nearest(self.batch, math.sqrt(below * above))
        if above < 2**GAP * below or not below * SAME < lr < above / SAME or self._is_tried(lr):
            return None
        low, high = interval(fit.octaves)
        return Step(Trial(self.batch, lr), "form", high - low, high - low)

    def _is_tried(self, lr: float) -> bool:
        return any(1 / SAME < lr / other < SAME for other in self.tried)

    def _outside(self) -> float | None:
        if self.diverged and not self.losses:
            is_first = self.tried[0] == self.diverged[0]  # else lower ones run already
            return self._beyond(self.tried[0], 1 / OCTAVE) if is_first else None
        means = self.curves.plain_means.get(self.batch, {})
        best = self.curves.lowest_rate(self.batch) if means else self.running[0].lr
        # A loss that seeds may have raised shows no rise: the lowest one may lie in a dip of a plateau. So it may if
        # the loss rises, down to the lowest learning rate, much less for each octave than down to a nearer one. But if
        # three are worse for sure, the lowest learning rates hardly train, and the loss rises no further.
        rising = self.curves.worse_rates(self.batch) if means and self._noise_is_known else list(means)
        slopes = {lr: (mean - means[best]) / math.log2(best / lr) for lr, mean in means.items() if lr < best}
        steepest = max((slopes[lr] for lr in rising if lr < best), default=math.inf)
        running = [trial.lr for trial in self.running]
        is_above = any(lr > best for lr in [*rising, *running, *self.diverged])
        is_below = any(lr < best for lr in running) or slopes.get(min(means, default=best), 0.0) > FLATTER * steepest
        is_below |= sum(lr < best for lr in rising) >= FEWEST
        sides = (self.tried[-1], OCTAVE, is_above), (self.tried[0], 1 / OCTAVE, is_below)
        # First the side whose end is nearer, because a plateau on one side must not take all that may be tried.
        for end, factor, is_closed in sorted(sides, key=lambda side: round(abs(math.log2(side[0] / best)), 3)):
            if not is_closed and (lr := self._beyond(end, factor)) is not None:
                return lr
        return None

    def _beyond(self, end: float, factor: float) -> float | None:
        """The learning rate beyond an end of those tried, `factor` times it if possible; None if there is none."""

        def is_beyond(lr: float) -> bool:
            return lr > end * SAME if factor > 1 else lr < end / SAME

        lr = self.goal.nearest(self.batch, end * factor, is_beyond)
        ratio = max(lr, self.tried[-1]) / min(lr, self.tried[0])
        return lr if is_beyond(lr) and ratio <= WIDEST else None

    @property
    def _noise_is_known(self) -> bool:
        """Whether seeds have measured the noise at this batch size, or may not."""
        return self.goal.seeds == 1 or bool(self.curves.seeds_below(self.batch))

    def _is_flat(self, fit: BatchFit) -> bool:
        return self.goal.decided is None and regret(fit) <= FLAT * fit.sigma

    def _reached(self, fit: BatchFit) -> Stop | None:
        """Why no further run is needed, if so."""
        if self.goal.seeds > 1 and not self.curves.noise_is_known:
            return None
        if self.goal.decided is not None:
            return "decided" if self.batch in self.goal.decided else None
        optimum = self.curves.by_batch[self.batch].optimum
        if optimum is not None and optimum.is_within(EARLY * self.goal.within):
            return "narrow"
        is_jagged = self.curves.by_batch[self.batch].status == "jagged"
        return "flat" if self._noise_is_known and self._is_flat(fit) and not is_jagged else None

    def _narrowing(self, fit: BatchFit) -> Step | Stop | None:
        """The run that lowers the variance of the optimum, or of the loss there, most.

        Without a second seed, the noise is a guess, or that of other batch sizes. So one comes first, at one batch size
        at least, and at each batch size that else would count as flat or exhausted. It is one of the lowest loss,
        because far above the best learning rate noise can be ten times as large.
        """
        candidates = list(self._candidates(fit))
        if not candidates:
            return None if self.running else "exhausted"
        draws, narrowest = (fit.octaves, NARROWEST) if self.goal.decided is None else (fit.best_losses, SMALLEST_SIGMA)
        low, high = interval(draws)
        now = max(high - low, narrowest)
        shares = variance_left(fit, draws, [trial.lr for trial in self.running], [trial.lr for trial in candidates])
        shares = np.round(shares, 3)  # of equal ones the first: new learning rates come before seeds
        then = np.maximum(now * np.sqrt(shares), narrowest)
        best = int(shares.argmin())
        is_weak = then[best] > SMALLEST_GAIN * now
        if self.curves.by_batch[self.batch].optimum is not None:  # else the draws are far from normal
            is_weak |= self._left_by_all(fit, draws, candidates) > SMALLEST_GAIN_OF_ALL**2
        repeats = [number for number, trial in enumerate(candidates) if trial.repeat]
        if repeats and not self._noise_is_known and (not self.curves.noise_is_known or is_weak or self._is_flat(fit)):
            if any(trial.repeat for trial in (self.running if self.curves.noise_is_known else self.running_anywhere)):
                return None
            lowest = self.curves.lowest_rate(self.batch)
            best = min(repeats, key=lambda number: abs(math.log(candidates[number].lr / lowest)))
            return Step(candidates[best], "noise", now, float(then[best]))
        if is_weak:
            return None if self.running else "exhausted"
        return Step(candidates[best], "narrow", now, float(then[best]))

    def _left_by_all(self, fit: BatchFit, draws: Array, candidates: Sequence[Trial]) -> float:
        """Which share of the variance of `draws` is left once each candidate has as many seeds as it may have."""
        seeds = [1.0] * len(self.running) + [float(self.goal.seeds - trial.repeat) for trial in candidates]
        joint = _observed(fit, draws, [trial.lr for trial in (*self.running, *candidates)], seeds)
        known = _conditioned(joint, range(1, 1 + len(self.running)))
        return float(_conditioned(known, range(1 + len(self.running), len(joint)))[0, 0] / known[0, 0])

    def _candidates(self, fit: BatchFit) -> Iterator[Trial]:
        """The runs that may narrow the interval: learning rates between and just outside of the others, and seeds."""
        low, high = (2**end for end in interval(fit.octaves))
        limit = 2 ** float(fit.posterior.cells.limit[fit.posterior.column[self.batch]])
        tried = [lr for lr in self.tried if lr <= limit * SAME]
        places = [math.sqrt(a * b) for a, b in itertools.pairwise(tried) if b / a > CLOSEST]
        places += [self._beyond(tried[0], 1 / OCTAVE) or 0.0]
        if limit == math.inf:
            places += [self._beyond(tried[-1], OCTAVE) or 0.0]
        low, high = low / REACH, high * REACH
        for lr in (self.goal.nearest(self.batch, place) for place in places if place):
            if low <= lr <= high and not self._is_tried(lr):
                yield Trial(self.batch, lr)
        for lr, seeds in fit.losses.items():
            repeat = len(seeds) + sum(trial.lr == lr for trial in self.running)
            if low <= lr <= high and repeat < self.goal.seeds:
                yield Trial(self.batch, lr, repeat)


def _gap(fit: BatchFit) -> tuple[float, float]:
    """The learning rates that were run next to the best one, below and above it; equal ends if it is outside them."""
    centre = 2 ** float(np.median(fit.octaves))
    rates = sorted([*fit.lrs, *fit.plateau, *fit.diverged])
    below = max((lr for lr in rates if lr <= centre), default=rates[0])
    return below, min((lr for lr in rates if lr > centre), default=below)


def regret(fit: BatchFit) -> float:
    """The expected loss in nats of the median of the best learning rate, above the lowest loss of the curve."""
    centre = [float(np.median(fit.octaves))]
    lowest = fit.posterior.c[:, fit.posterior.column[fit.batch]]  # also where it lies just below a limit
    return float(np.mean(fit.posterior.loss(fit.batch, centre)[:, 0] - lowest))


def variance_left(fit: BatchFit, draws: Array, running: Sequence[float], candidates: Sequence[float]) -> Array:
    """Which share of the variance of `draws` is left after a run at each of the learning rates `candidates`.

    `draws` are those of the optimum, or of the loss there. The share is one of the variance that is expected once the
    runs at `running` have ended.
    """
    joint = _observed(fit, draws, [*running, *candidates], [1.0] * (len(running) + len(candidates)))
    joint = _conditioned(joint, range(1, 1 + len(running)))
    first = 1 + len(running)
    gained = joint[0, first:] ** 2 / np.diag(joint)[first:]
    return np.asarray(np.clip(1 - gained / joint[0, 0], 0.0, 1.0))


def covariance(fit: BatchFit, draws: Array, x: Array) -> tuple[Array, Array]:
    """The covariance of `draws` and of the expected losses at log2(lr) = `x`, and the variance of one run at each."""
    joint = np.cov(np.column_stack([draws, fit.posterior.loss(fit.batch, x)]).T)
    return np.asarray(joint), np.asarray(np.median(fit.posterior.noise(fit.batch, x), axis=0) ** 2)


def _observed(fit: BatchFit, draws: Array, lrs: Sequence[float], seeds: Sequence[float]) -> Array:
    """The covariance of `draws` and of the mean losses of `seeds` runs at each of the learning rates `lrs`."""
    joint, noise = covariance(fit, draws, np.log2(lrs))
    return joint + np.diag([0.0, *(noise / seeds)])


def _conditioned(joint: Array, known: Iterable[int]) -> Array:
    """The covariance once these of its variables are known."""
    for number in known:
        joint = joint - np.outer(joint[:, number], joint[number]) / joint[number, number]
        joint[number, number] = 1.0
    return joint


def next_steps(
    curves: Curves, running: Sequence[Trial], goal: Goal, prior: Mapping[int, float], spread: float
) -> dict[int, Step | Stop | None]:
    """The next run of each batch size of `prior`; one without runs begins where the others and `prior` expect it.

    While an optimum is to be bracketed, no interval is narrowed, and the other batch sizes have None. A batch size that
    is closed has None in place of a run.

    `prior`: batch size in tokens -> learning rate; `spread`: its standard deviation in octaves.
    """
    searches = {batch: Search(curves, batch, running, goal) for batch in prior}
    brackets = {batch: search.bracketing() for batch, search in searches.items()}
    steps: dict[int, Step | Stop | None] = {b: None if b in goal.closed else step for b, step in brackets.items()}
    if any(steps.values()):
        return steps
    if new := [batch for batch, search in searches.items() if not search.tried and batch not in goal.closed]:
        found = {batch: optimum for batch, optimum in found_optima(curves).items() if batch in prior}
        start = starts(prior, found, spread)
        return steps | {batch: Step(Trial(batch, goal.nearest(batch, start[batch])), "first") for batch in new}
    for batch, search in searches.items():
        step = search.next_step() if search.tried and brackets[batch] is None else None
        steps[batch] = None if batch in goal.closed and isinstance(step, Step) else step
    return steps


def decided_sizes(arms: Sequence[Curves]) -> set[int]:
    """The batch sizes at which the losses of arms, each at its own best learning rate, are known to differ, or not.

    They differ if the 95% interval of the difference to the lowest arm does not hold 0. They do not if it lies within
    one seed's standard deviation of 0. As this is asked after each run, the interval is widened (`EARLY`).
    """
    decided = set()
    for batch in set.intersection(*({*curves.optima} for curves in arms)):
        losses = [curves.best_losses[batch] for curves in arms]
        sigma = max(curves.fits[batch].sigma for curves in arms)
        lowest = min(losses, key=lambda draws: float(np.median(draws)))
        level = 1 - LEVEL / math.comb(len(arms), 2)  # the lowest was chosen
        gaps = [interval(independent_difference(draws, lowest), level) for draws in losses if draws is not lowest]
        wider = [((low + high) / 2, (high - low) / 2 / EARLY) for low, high in gaps]  # middle, half of the width
        if all(abs(middle) > half or abs(middle) + half <= sigma for middle, half in wider):
            decided.add(batch)
    return decided


def found_optima(curves: Curves) -> dict[int, tuple[float, float]]:
    """Batch size -> mean and variance of log2 of the best learning rate, where three have been run or more."""
    fits = {batch: fit for batch, fit in curves.fits.items() if len(fit.lrs) + len(fit.plateau) >= FEWEST}
    return {batch: (float(fit.octaves.mean()), float(fit.octaves.var())) for batch, fit in fits.items()}


def law_sizes(sizes: Collection[int]) -> list[int]:
    """The batch sizes whose runs find a law: the ends, and the one nearest to the middle between them."""
    low, high = min(sizes), max(sizes)
    return sorted({low, min(sorted(sizes), key=lambda size: abs(math.log(size * size / (low * high)))), high})


def next_law_steps(
    curves: Curves, running: Sequence[Trial], goal: Goal, prior: Mapping[int, float], spread: float
) -> dict[int, Step | Stop | None]:
    """Like `next_steps`, for the law of the best learning rate: runs at three batch sizes, the ends and the middle.

    A run must narrow the expected optima of all batch sizes, on average, to less than `SMALLEST_GAIN` of their width.
    """
    sizes = sorted(prior)
    chosen = {size: prior[size] for size in law_sizes(prior)}
    steps = next_steps(curves, running, goal, chosen, spread)
    known = found_optima(curves)

    def width(found: Mapping[int, tuple[float, float]]) -> float:
        return float(np.sqrt(np.diag(expected_optima(prior, found, spread)[1])).mean())

    for batch, step in steps.items():
        if isinstance(step, Step) and step.why in ("narrow", "form") and batch in curves.optima:
            mean, variance = known[batch]
            if width({**known, batch: (mean, variance * 4**-step.gain)}) > SMALLEST_GAIN * width(known):
                steps[batch] = "law"
    return steps | {size: "law" for size in sizes if size not in chosen}


def most_useful(
    steps: Mapping[int, Step | Stop | None], costs: Mapping[int, float], tried: Collection[int]
) -> Step | None:
    """The step to make first: one that brackets an optimum, then the one that narrows an interval most for its cost.

    `costs`: batch size -> cost of a run; `tried`: the batch sizes with runs, whose brackets are completed first.
    """
    found = [step for step in steps.values() if isinstance(step, Step)]

    def order(step: Step) -> tuple[float, ...]:
        batch = step.trial.batch
        return -step.gain / costs[batch], batch not in tried, costs[batch], -batch

    return min(found, key=order, default=None)
