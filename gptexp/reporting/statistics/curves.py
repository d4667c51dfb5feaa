"""What the posterior says at each batch size: whether the learning rates bracket an optimum, where it is, its loss."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from statistics import fmean, stdev, variance
from typing import Any, Literal

import numpy as np
from scipy import special

from gptexp.process.words import counted
from gptexp.reporting.statistics.forms import Array
from gptexp.reporting.statistics.likelihood import OUTLYING, SMALLEST_SIGMA, Losses
from gptexp.reporting.statistics.means import against_lowest, worse_than_lowest
from gptexp.reporting.statistics.posterior import NARROWEST, Posterior, fit, interval

Cell = tuple[int, float]  # batch size in tokens, learning rate
Status = Literal["bracketed", "not bracketed", "flat", "jagged", "too few"]
Side = Literal["higher", "lower"]

OUTSIDE = 0.1  # an optimum is bracketed if it lies outside the grid with at most this probability
LIKELY = 0.5  # above this probability of an optimum on one side of the grid, runs should go on there
SURE_SIDE = 0.9  # if a side is at least this likely, two learning rates suffice to show where to go on
MOST_HUMPS = 0.25  # share of a batch size's learning rates; if more of them are humps, its losses are jagged
FAR_UP = 0.5  # share of the range of mean losses; cells where the curve lies higher are not compared with it
WILD = 2.0  # seeds that vary by more than so many times the curve's noise are judged without the curve
MISSED = 4.0  # standard errors beyond which a curve does not explain a cell
NOISIEST = 3.0  # of a seed's spread: the most noise that may explain how low the lowest loss is
# Of a seed's spread: within it, seeds alone place three losses in 95%. Of more losses fewer, 86% of five; but a margin
# that grows with their number costs a search more runs at noisy batch sizes, and its answers are no better.
RISE = 3.3
JUMP = 0.1  # nats: if the loss rises by more above a minimum, it may jump there
FLATTER = 0.5  # above a minimum, a plateau begins where the loss rises less steeply than this share of before
FALLEN = 0.5  # a loss was high by chance if, at the next higher learning rate, less than this share of it is left
SAME = 1.02  # learning rates within this ratio are one
SPACING = 2.0  # ratio from the only learning rate of a grid to the next ones on both sides
CLOSEST = 1.3  # between two learning rates within this ratio, another one says little
SCAN = 200  # number of learning rates at which a curve is evaluated
CENTRAL = 0.68  # probability of the narrower intervals: about one standard error on each side


@dataclass(frozen=True)
class Noise:
    """Standard deviation of one run's final loss over seeds at the best learning rate, in nats."""

    sigma: float
    dof: int  # seeds beyond the first that measure sigma; 0: sigma is assumed


@dataclass(frozen=True)
class Optimum:
    """The best learning rate, with 95% intervals. Losses in nats per token."""

    lr: float
    low: float
    high: float
    loss: float  # expected, of a run at the best learning rate
    loss_low: float
    loss_high: float
    tie_low: float  # from here to `tie_high`, the expected loss is within a seed's standard deviation of that at `lr`
    tie_high: float

    @property
    def octaves(self) -> float:
        """The width of the interval."""
        return math.log2(self.high / self.low)

    def is_within(self, octaves: float) -> bool:
        """Whether the interval is at most twice as wide: this many octaves on each side, on average."""
        return self.octaves <= 2 * octaves + 1e-9

    def holds(self, lr: float) -> bool:
        return self.low <= lr <= self.high


@dataclass(frozen=True)
class Outlier:
    """A run that hardly counts in the fit."""

    lr: float
    loss: float
    why: str


@dataclass(frozen=True)
class Curve:
    """The verdict on one batch size."""

    status: Status
    why: str  # the reason of the status
    noise: Noise
    best: float  # the learning rate with the lowest mean loss
    below: float = 0.0  # probability that the best learning rate is below the grid
    above: float = 0.0
    side: Side | None = None  # where to go on if it is not bracketed: the likely side, or that of the lowest loss
    optimum: Optimum | None = None  # given if bracketed
    outliers: list[Outlier] = field(default_factory=list)

    @property
    def noise_is_known(self) -> bool:
        return self.noise.dof > 0


class BatchFit:
    """The posterior at one batch size, with the losses that it was fitted to."""

    def __init__(self, curves: "Curves", posterior: Posterior, batch: int) -> None:
        self.posterior, self.batch, self.losses = posterior, batch, curves.near[batch]
        self.diverged, self.plateau = curves.diverged.get(batch, []), curves.plateaus[batch]
        self.spread = curves.spread(batch)
        j, cells = posterior.column[batch], posterior.cells
        self.lrs, self.x = list(self.losses), np.log2(list(self.losses))
        self.octaves, self.best_losses = posterior.m[:, j], posterior.c[:, j]  # draws, as in `Curves`
        if math.isfinite(limit := float(cells.limit[j])):  # no loss just below it is known
            last = posterior.loss(batch, self.x[-1:])[:, 0]
            self.best_losses = np.where(self.octaves > self.x[-1], last, self.best_losses)
        self.best = self.lrs[cells.lowest[j]]  # the learning rate with the lowest mean loss
        self.weights = dict(zip(self.lrs, cells.weights[j], strict=True))  # lr -> weights of its runs, by rising loss
        self.means = {lr: float(np.average(sorted(self.losses[lr]), weights=w)) for lr, w in self.weights.items()}
        # The lowest learning rate above the best one that diverged or lies on a plateau is too large, so it ends the
        # grid. But if runs diverged, and the optimum seems to lie between it and the highest one that completed, no
        # loss near the optimum is known.
        centre = float(np.median(self.octaves))
        is_between = not self.plateau and limit - self.x[-1] > math.log2(CLOSEST) and centre > self.x[-1]
        is_closed = math.isfinite(limit) and not is_between
        self.top = limit + NARROWEST if is_closed else float(self.x[-1])  # log2 of the upper end of the grid
        self.below = float((self.octaves < self.x[0]).mean())  # probability that the optimum is below the grid
        self.above = float((self.octaves > self.top).mean())
        self.open_end: Side | None = None  # where the loss is lowest, if that is an end of the grid
        if self.best == self.lrs[0]:
            self.open_end = "lower"
        elif self.best == self.lrs[-1] and not is_closed:
            self.open_end = "higher"
        place = float(np.median(self.octaves.clip(self.x[0], self.x[-1])))
        self.sigma = float(np.median(posterior.noise(batch, [place])))  # the noise at the best learning rate, in nats

    def curve(self) -> Curve:
        """The verdict."""
        status, why = self._status()
        optimum = self._optimum() if status == "bracketed" else None
        side = self.open_end
        if max(self.below, self.above) > LIKELY:
            side = "higher" if self.above > self.below else "lower"
        outliers = self._outliers() if status != "jagged" else []  # no curve tells which runs are outliers
        noise = Noise(self.sigma, sum(len(seeds) - 1 for seeds in self.losses.values()))
        side = side if optimum is None else None
        return Curve(status, why, noise, self.best, self.below, self.above, side, optimum, outliers)

    def _status(self) -> tuple[Status, str]:
        """The status and the reason for it."""
        below, above, best = self.below, self.above, self.best
        if bad := [lr for lr in self.diverged if lr < best]:
            return "jagged", f"training diverged at {min(bad):g}, below the best learning rate {best:g}"
        if self._humps() > MOST_HUMPS * len(self.lrs):
            return "jagged", "the loss falls and rises more than once, by more than seeds explain"
        if self.misses.get(best, 0.0) > MISSED:
            return "jagged", f"no curve explains how low the loss at {best:g} is"
        tried = len(self.lrs) + len(self.plateau)
        if tried < 3 and max(below, above) < SURE_SIDE:
            return "too few", f"{counted(tried, 'learning rate')} completed, and a lowest point needs three"
        is_inside = below + above <= OUTSIDE
        low, high = interval(self.octaves)
        if is_inside and self.open_end is None and not low < self.x[0] < self.top < high:
            return "bracketed", f"it lies inside the grid with a probability of {1 - below - above:.1%}"
        beyond = ((below, f"below {self.lrs[0]:g}"), (above, f"above {2**self.top:.3g}"))
        outside = " and ".join(f"{where} with a probability of {share:.0%}" for share, where in beyond if share >= 0.01)
        why = f"the optimum is {outside}"
        if is_inside:
            why = "no run beyond shows that it rises" if self.open_end else "its interval is as wide as the grid"
        if self.open_end:
            why = f"the loss is lowest at {best:g}, the end of the grid; {why}"
        heights = self.posterior.loss(self.batch, self.x).max(1) - self.best_losses
        if np.median(heights) < 2 * self.sigma:
            height = max(self.means.values()) - min(self.means.values())
            return "flat", f"the losses differ by {height:.2g} nats, and seeds move each by {self.sigma:.2g}; {why}"
        return "not bracketed", why

    def _optimum(self) -> Optimum:
        low, high = interval(self.octaves, narrowest=NARROWEST)
        centre = float(np.median(self.octaves))
        if math.isfinite(self.posterior.cells.limit[self.posterior.column[self.batch]]):
            centre = min(centre, float(self.x[-1]))  # between this learning rate and the limit, training may diverge
        x = np.linspace(self.x[0], self.x[-1], SCAN)
        lost = np.median(self.posterior.loss(self.batch, x) - self.posterior.loss(self.batch, [centre]), axis=0)
        is_worse = lost > self.sigma
        loss_low, loss_high = interval(self.best_losses)
        return Optimum(
            lr=2**centre,
            low=2 ** min(low, centre),
            high=2**high,
            loss=float(np.median(self.best_losses)),
            loss_low=loss_low,
            loss_high=loss_high,
            tie_low=2 ** float(min(max(x[is_worse & (x < centre)], default=x[0]), centre)),
            tie_high=2 ** float(max(min(x[is_worse & (x > centre)], default=x[-1]), centre)),
        )

    @cached_property
    def _sigmas(self) -> list[float]:
        """The noise at each learning rate: that of the curve, or that of its seeds if they vary more."""
        noise = np.median(self.posterior.noise(self.batch, self.x), axis=0)
        return [max(float(sigma), stdev(seeds) if len(seeds) > 1 else 0.0)
                for sigma, seeds in zip(noise, self.losses.values(), strict=True)]  # fmt: skip

    @cached_property
    def misses(self) -> dict[float, float]:
        """By how many standard errors the curve lies above the mean loss of each cell that is not far up (`FAR_UP`).

        The standard error contains the curve's uncertainty and the cell's noise, or only the noise: for cells that
        hardly count, because they have not moved the curve, and for the best cell, whose loss is shown as the answer.
        The fit can take a single low loss for noise, so the noise of a single best run is bounded here.
        """
        draws = self.posterior.loss(self.batch, self.x)
        curve, spread = np.median(draws, axis=0), draws.std(axis=0)
        means = sorted(map(fmean, self.losses.values()))
        far_up = curve.min() + FAR_UP * (means[max(1, len(means) - 2)] - means[0])  # the highest may be an outlier
        misses = {}
        for i, (lr, seeds) in enumerate(self.losses.items()):
            if curve[i] > far_up:
                continue  # no form is expected to hold there
            counts = self.weights[lr].mean() >= OUTLYING and lr != self.best
            is_single = lr == self.best and len(seeds) == 1
            sigma = min(self._sigmas[i], NOISIEST * self.spread) if is_single else self._sigmas[i]
            error = math.hypot(float(spread[i]) * counts, sigma / math.sqrt(len(seeds)))
            misses[lr] = (float(curve[i]) - fmean(seeds)) / error
        return misses

    def _humps(self) -> int:
        """The number of learning rates with a lower loss somewhere on both sides, by more than seeds explain."""
        means = np.array(list(map(fmean, self.losses.values())))
        margins = MISSED * np.array(self._sigmas) / np.sqrt(list(map(len, self.losses.values())))
        highest = means + margins
        return sum(
            means[i] - margins[i] > max(highest[:i].min(), highest[i + 1 :].min()) for i in range(1, len(means) - 1)
        )

    def _outliers(self) -> list[Outlier]:
        outliers = []
        for lr, weights in self.weights.items():
            seeds = sorted(self.losses[lr])
            is_far = abs(self.misses.get(lr, 0.0)) > MISSED and (len(seeds) == 1 or weights.mean() < OUTLYING)
            for loss, weight in zip(seeds, weights, strict=True):
                if is_far:
                    outliers.append(Outlier(lr, loss, "no curve through its neighbours explains its loss"))
                elif weight < OUTLYING * weights.max():
                    others = fmean(other for other, w in zip(seeds, weights, strict=True) if w > weight)
                    outliers.append(Outlier(lr, loss, f"other seeds of its cell have a loss of {others:.4f}"))
        return outliers

    def explains(self, lr: float) -> bool:
        """Whether the curve explains the loss: not if seeds vary more than its noise, miss it or hardly count."""
        seeds = self.losses.get(lr, [])
        if len(seeds) < 2:
            return True
        if abs(self.misses.get(lr, 0.0)) > MISSED:
            return False
        noise = float(np.median(self.posterior.noise(self.batch, [math.log2(lr)])))
        return bool(self.weights[lr].mean() >= OUTLYING) and stdev(seeds) < WILD * noise

    def inside(self, low: float, high: float) -> float:
        """The probability that the best learning rate lies between `low` and `high`."""
        return float(((self.octaves >= math.log2(low)) & (self.octaves <= math.log2(high))).mean())


@dataclass(frozen=True)
class Curves:
    """The curves of all batch sizes of an arm, see `analysis.Arm`."""

    losses: dict[int, dict[float, list[float]]]  # batch size in tokens -> learning rate -> final loss of each seed
    diverged: dict[int, list[float]]  # batch size -> learning rates
    usual_spread: float  # nats: the prior of the noise

    @cached_property
    def posterior(self) -> Posterior | None:
        """Of the batch sizes with two learning rates or more; None if there is none."""
        several = tuple(
            (batch, tuple((lr, tuple(sorted(seeds))) for lr, seeds in at_batch.items()))
            for batch, at_batch in self.near.items()
            if len(at_batch) > 1
        )
        sizes = sorted({*self.losses, *self.diverged})
        limits = tuple((b, (*self.diverged.get(b, ()), *self.plateaus.get(b, ())[:1])) for b in sizes)
        return _posterior(several, limits, self.usual_spread) if several else None

    @cached_property
    def plateaus(self) -> dict[int, list[float]]:
        """Batch size -> the learning rates on a plateau far above the minimum, rising; empty if there is none.

        There training is unstable, and no form holds: the loss jumps, and then stays about the same over octaves. So a
        plateau tells only that the minimum is below it. It begins, if losses that are worse for sure lie on both sides
        of the lowest one, at the first such above it after which the loss rises less than half as steeply. One after
        which it falls by more than half of its height was high by chance, and a jump is of 0.1 nats or more.
        """
        return {batch: self._plateau(batch) for batch in self.losses}

    def _plateau(self, batch: int) -> list[float]:
        worse, means, best = self.worse_rates(batch), self.plain_means[batch], self.lowest_rate(batch)
        if not worse or not min(worse) < best < max(worse):
            return []
        steepest = 0.0
        for lr, following in itertools.pairwise(lr for lr in means if lr >= best):
            slope = (means[following] - means[lr]) / math.log2(following / lr)
            height, left = means[lr] - means[best], means[following] - means[best]
            if lr in worse and height > JUMP and left > FALLEN * height and slope < FLATTER * steepest:
                return [other for other in means if other >= lr]
            steepest = max(steepest, slope)
        return []

    @cached_property
    def plain_means(self) -> dict[int, dict[float, float]]:
        """Batch size -> learning rate -> mean loss, to which all seeds count the same."""
        return {batch: {lr: fmean(seeds) for lr, seeds in losses.items()} for batch, losses in self.losses.items()}

    def lowest_rate(self, batch: int) -> float:
        """The learning rate with the lowest of `plain_means`."""
        means = self.plain_means[batch]
        return min(means, key=means.__getitem__)

    @cached_property
    def near(self) -> dict[int, dict[float, list[float]]]:
        """The losses that a curve is fitted to: without `plateaus`."""
        return {batch: {lr: seeds for lr, seeds in losses.items() if lr not in self.plateaus[batch]}
                for batch, losses in self.losses.items()}  # fmt: skip

    def worse_rates(self, batch: int) -> list[float]:
        """The learning rates whose mean loss is higher than the lowest one by more than seeds explain (`RISE`)."""
        losses, means = self.losses[batch], self.plain_means[batch]
        best, margin = self.lowest_rate(batch), RISE * self.spread(batch)
        error = {lr: margin * math.sqrt((1 / len(losses[best]) + 1 / len(losses[lr])) / 2) for lr in losses}
        return [lr for lr, mean in means.items() if mean - means[best] > error[lr]]

    def spread(self, batch: int) -> float:
        """The standard deviation over seeds, in nats: the usual one, as far as the seeds here allow it.

        Only seeds at the lowest loss and below measure it, because above, noise can be ten times as large.
        """
        cells = self.seeds_below(batch)
        dof = sum(len(seeds) - 1 for seeds in cells)
        if not dof:
            return self.usual_spread
        measured = math.sqrt(sum((len(seeds) - 1) * variance(seeds) for seeds in cells) / dof)
        most = measured * math.sqrt(dof / (2 * special.gammaincinv(dof / 2, (1 - CENTRAL) / 2)))
        return max(min(max(measured, self.usual_spread), float(most)), SMALLEST_SIGMA)

    def seeds_below(self, batch: int) -> list[list[float]]:
        """The cells of several seeds at the learning rate with the lowest mean loss, and below."""
        losses = self.losses.get(batch, {})
        return [seeds for lr, seeds in losses.items() if len(seeds) > 1 and lr <= self.lowest_rate(batch)]

    @cached_property
    def fits(self) -> dict[int, BatchFit]:
        """Batch size -> fit, for the batch sizes with two learning rates or more."""
        if (posterior := self.posterior) is None:
            return {}
        return {batch: BatchFit(self, posterior, batch) for batch in posterior.cells.sizes}

    @cached_property
    def by_batch(self) -> dict[int, Curve]:
        """Batch size -> curve."""
        fits = self.fits
        return {b: fits[b].curve() if b in fits else self._of_one_rate(b) for b in self.losses}

    def _of_one_rate(self, batch: int) -> Curve:
        [(lr, seeds)] = self.losses[batch].items()
        sigma = stdev(seeds) if len(seeds) > 1 else self.usual_spread
        why = "1 learning rate completed, and a lowest point needs three"
        return Curve("too few", why, Noise(max(sigma, SMALLEST_SIGMA), len(seeds) - 1), lr)

    @cached_property
    def optima(self) -> dict[int, Optimum]:
        """Batch size -> optimum, for the batch sizes at which it is bracketed."""
        return {batch: curve.optimum for batch, curve in self.by_batch.items() if curve.optimum is not None}

    @cached_property
    def noise_is_known(self) -> bool:
        """Whether seeds have measured the noise at any batch size, see `spread`."""
        return any(self.seeds_below(batch) for batch in self.losses)

    @cached_property
    def means(self) -> dict[Cell, float]:
        """Mean loss of each cell; a run far from the others of its cell hardly counts."""
        means: dict[Cell, float] = {}
        for batch, losses in self.losses.items():
            weighted = self.fits[batch].means if batch in self.fits else {}
            means |= {(batch, lr): weighted.get(lr, float(np.mean(sorted(losses[lr])))) for lr in losses}
        return means

    @property
    def octaves(self) -> dict[int, Array]:
        """Batch size -> draws of log2 of the best learning rate, where it is bracketed."""
        return {batch: self.fits[batch].octaves for batch in self.optima}

    @property
    def best_losses(self) -> dict[int, Array]:
        """Batch size -> draws of the loss at the best learning rate, where it is bracketed."""
        return {batch: self.fits[batch].best_losses for batch in self.optima}

    def cell_losses(self, cells: Sequence[Cell]) -> Array:
        """Draws of the expected losses of cells, shape (draws, number of cells). A plateau lies above as measured."""
        return np.hstack([self._cell_loss(batch, lr) for batch, lr in cells])

    def _cell_loss(self, batch: int, lr: float) -> Array:
        fitted = self.fits[batch]
        last = min(lr, fitted.lrs[-1]) if fitted.plateau else lr
        known = np.log2([fitted.lrs[-1], *fitted.plateau])
        means = [self.means[batch, rate] for rate in (fitted.lrs[-1], *fitted.plateau)]
        above = float(np.interp(math.log2(lr), known, means)) - means[0]
        return fitted.posterior.loss(batch, [math.log2(last)]) + above

    def worse(self, cells: Sequence[Cell], than: Cell) -> set[Cell]:
        """The `cells` whose loss is significantly higher than that of the cell `than`.

        The tests are corrected for choosing the lowest cell. Cells that a curve explains are compared by the posterior
        (`means.worse_than_lowest`), others by seeds alone (`means.against_lowest`). If no curve explains `than`, seeds
        judge all. A curve has one minimum, so a cell is also worse if a worse one lies between it and the best one of
        its batch size. At the batch size of `than`, no learning rate in the interval of the optimum is worse.
        """
        optimum = self.optima.get(than[0])
        cells = [c for c in cells if not (c[0] == than[0] and optimum is not None and optimum.holds(c[1]))]
        is_off = not self._explains(than)
        by_seeds = [cell for cell in cells if (is_off or not self._explains(cell)) and cell in self.means]
        by_curve = [cell for cell in cells if cell not in by_seeds]
        chosen = set()
        if by_seeds and (contrasts := against_lowest([self.losses[b][lr] for b, lr in (than, *by_seeds)])) is not None:
            is_lowest = contrasts[0].difference == 0
            chosen = {cell for cell, contrast in zip(by_seeds, contrasts[1:], strict=True)
                      if is_lowest and contrast.is_significant}  # fmt: skip
        if by_curve:
            draws = self.cell_losses([than, *by_curve])
            chosen |= {by_curve[number] for number in worse_than_lowest(draws[:, 0], draws[:, 1:])}
        return chosen | {cell for cell in cells if any(self._is_beyond(cell, worse) for worse in chosen)}

    def _explains(self, cell: Cell) -> bool:
        return cell[0] in self.fits and self.fits[cell[0]].explains(cell[1])

    def _is_beyond(self, cell: Cell, other: Cell) -> bool:
        """Whether `other` is lower than `cell` and lies between it and the best cell, on a curve with one minimum."""
        (batch, lr), (other_batch, nearer), best = cell, other, self.by_batch[other[0]].best
        is_further = lr < nearer < best or lr > nearer > best
        is_higher = batch == other_batch and is_further and self.means[cell] > self.means[other]
        return is_higher and self.by_batch[batch].status != "jagged"

    def lowest(self, batch: int) -> float:
        """The lowest loss of the curve inside the grid; without a curve, the lowest mean."""
        curve = self.by_batch[batch]
        if batch not in self.fits or curve.status == "jagged":
            return self.means[batch, curve.best]
        fitted = self.fits[batch]
        return float(np.median(fitted.posterior.loss(batch, np.linspace(fitted.x[0], fitted.x[-1], SCAN)).min(axis=1)))


def fit_curves(losses: Mapping[int, Losses], diverged: Mapping[int, Sequence[float]], usual_spread: float) -> Curves:
    """The curves of all batch sizes of one arm, fitted together once they are asked for.

    `losses`: batch size -> losses of completed runs; `diverged`: batch size -> learning rates that diverged;
    `usual_spread`: standard deviation over seeds that such runs have had, in nats.
    """
    ordered = {b: {lr: list(seeds) for lr, seeds in sorted(by_lr.items())} for b, by_lr in sorted(losses.items())}
    ended = {batch: sorted(lrs) for batch, lrs in sorted(diverged.items())}
    return Curves(ordered, ended, usual_spread)


@lru_cache(maxsize=16)
def _posterior(losses: tuple[Any, ...], diverged: tuple[Any, ...], usual_spread: float) -> Posterior:
    """The posterior of losses as tuples of pairs. It is cached, because a live page asks for it repeatedly."""
    return fit({batch: dict(at_batch) for batch, at_batch in losses}, dict(diverged), usual_spread)


def one_step_outside(lrs: Sequence[float]) -> tuple[float, float]:
    """One learning rate below and one above a rising grid, as far from its ends as the next ones inside."""
    if len(lrs) < 2:
        return lrs[0] / SPACING, lrs[0] * SPACING
    return lrs[0] ** 2 / lrs[1], lrs[-1] ** 2 / lrs[-2]
