"""What the posterior of a sweep says at each batch size: whether an optimum is bracketed, where it is, and its loss."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np

from gptexp.process.words import counted
from gptexp.reporting.statistics.forms import Array
from gptexp.reporting.statistics.likelihood import OUTLYING, SMALLEST_SIGMA, Losses
from gptexp.reporting.statistics.means import against_lowest, worse_than_lowest
from gptexp.reporting.statistics.posterior import NARROWEST, Posterior, fit, interval

Status = Literal["bracketed", "not bracketed", "flat", "jagged", "too few"]
Side = Literal["higher", "lower"]

OUTSIDE = 0.1  # probability of an optimum outside the grid up to which it is bracketed
LIKELY = 0.5  # probability
SURE_SIDE = 0.9  # probability of one side from which two learning rates show where to go on
MOST_HUMPS = 0.25  # of a batch size's learning rates; with more of them, it is jagged
FAR_UP = 0.5  # share of the range of mean losses; a run where the curve lies higher is no outlier
WILD = 2.0  # times the noise of the curve; seeds that vary more are judged without it
MISSED = 4.0  # standard errors between a curve and a cell from which the curve does not explain it
SPACING = 2.0  # ratio of learning rates next to a grid of only one
CLOSEST = 1.3  # ratio of two learning rates between which another one says little
SCAN = 200  # learning rates at which the curve is compared with its minimum
CENTRAL = 0.68  # the probability of a narrower interval, of about one standard error


@dataclass(frozen=True)
class Noise:
    """Standard deviation of one run's final loss over seeds at the best learning rate, in nats."""

    sigma: float
    dof: int  # seeds beyond the first that measure it; 0: it is assumed


@dataclass(frozen=True)
class Optimum:
    """The best learning rate. Intervals have 95%. Losses in nats per token."""

    lr: float
    low: float
    high: float
    loss: float  # expected, of a run at the best learning rate
    loss_low: float
    loss_high: float
    tie_low: float  # between this and `tie_high` a run is expected to lose less than one seed's spread against `lr`
    tie_high: float

    @property
    def octaves(self) -> float:
        """The width of the interval."""
        return math.log2(self.high / self.low)

    def is_within(self, octaves: float) -> bool:
        """Whether the interval has at most this many octaves on each side, on average."""
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
    """The losses at one batch size."""

    status: Status
    why: str  # the finding behind the status
    noise: Noise
    best: float  # the learning rate with the lowest mean loss
    below: float = 0.0  # probability that the best learning rate is below the grid
    above: float = 0.0
    side: Side | None = None  # where to go on, if it is not bracketed and one side is more likely than not
    optimum: Optimum | None = None  # given if bracketed
    outliers: list[Outlier] = field(default_factory=list)

    @property
    def noise_is_known(self) -> bool:
        return self.noise.dof > 0


@dataclass(frozen=True)
class Curves:
    """The curves of all batch sizes of an arm."""

    losses: dict[int, dict[float, list[float]]]  # batch size in tokens -> learning rate -> final loss of each seed
    diverged: dict[int, list[float]]  # batch size -> learning rates
    usual_spread: float  # nats: the prior of the noise
    posterior: Posterior | None  # of the batch sizes with two learning rates or more; None if there is none

    @cached_property
    def of(self) -> dict[int, Curve]:
        """Batch size in tokens -> curve."""
        return {batch: self._judged(batch) for batch in self.losses}

    @cached_property
    def optima(self) -> dict[int, Optimum]:
        """Batch size in tokens -> optimum, for the batch sizes at which it is bracketed."""
        return {batch: curve.optimum for batch, curve in self.of.items() if curve.optimum is not None}

    @cached_property
    def noise_is_known(self) -> bool:
        """Whether seeds have measured the noise at any batch size."""
        return any(curve.noise_is_known for curve in self.of.values())

    @cached_property
    def means(self) -> dict[tuple[int, float], float]:
        """(Batch size, learning rate) -> mean loss, in which a run far from the others of its cell hardly counts."""
        return {
            (batch, lr): float(np.average(sorted(self.losses[batch][lr]), weights=weights))
            for batch in self.losses
            for lr, weights in self._weights(batch).items()
        }

    @cached_property
    def octaves(self) -> dict[int, Array]:
        """Batch size in tokens -> draws of log2 of the best learning rate, where it is bracketed."""
        return {batch: p.m[:, p.column[batch]] for batch in self.optima if (p := self.posterior) is not None}

    @cached_property
    def best_losses(self) -> dict[int, Array]:
        """Batch size in tokens -> draws of the loss at the best learning rate, where it is bracketed."""
        return {batch: p.c[:, p.column[batch]] for batch in self.optima if (p := self.posterior) is not None}

    def cell_losses(self, cells: Sequence[tuple[int, float]]) -> Array:
        """Draws of the expected losses of cells (batch size, learning rate), shape (draws, number of cells)."""
        assert self.posterior is not None
        return np.hstack([self.posterior.loss(batch, [math.log2(lr)]) for batch, lr in cells])

    def worse(self, cells: Sequence[tuple[int, float]], than: tuple[int, float]) -> set[tuple[int, float]]:
        """Those of `cells` whose loss is significantly higher than that of the cell `than`.

        Corrected for choosing the lowest of them. Where a batch size has no curve, or seeds vary more than the noise of
        the curve, cells are judged by their seeds alone (`means.against_lowest`), else by the posterior
        (`means.worse_than_lowest`). A curve has one minimum, so a cell is worse too if one between it and the best cell
        of its batch size is. At the batch size of `than`, a learning rate that may be the best one is not among them.
        """
        optimum = self.optima.get(than[0])
        cells = [
            (batch, lr) for batch, lr in cells if not (batch == than[0] and optimum is not None and optimum.holds(lr))
        ]
        off = not self._follows_curve(*than)
        by_seeds = [cell for cell in cells if (off or not self._follows_curve(*cell)) and cell in self.means]
        by_curve = [cell for cell in cells if cell not in by_seeds]
        chosen = set()
        if by_seeds and (contrasts := against_lowest([self.losses[b][lr] for b, lr in (than, *by_seeds)])) is not None:
            is_lowest = contrasts[0].difference == 0
            chosen = {cell for cell, found in zip(by_seeds, contrasts[1:], strict=True)
                      if is_lowest and found.is_significant}  # fmt: skip
        if by_curve:
            draws = self.cell_losses([than, *by_curve])
            chosen |= {by_curve[number] for number in worse_than_lowest(draws[:, 0], draws[:, 1:])}
        return chosen | {cell for cell in cells if any(self._is_beyond(cell, worse) for worse in chosen)}

    def _is_beyond(self, cell: tuple[int, float], other: tuple[int, float]) -> bool:
        """Whether `cell` lies on the same side of the best cell as `other`, further away and higher, on a curve."""
        (batch, lr), (of, nearer) = cell, other
        best = self.of[of].best
        is_further = lr < nearer < best or lr > nearer > best
        return batch == of and is_further and self.means[cell] > self.means[other] and self.of[of].status != "jagged"

    def _follows_curve(self, batch: int, lr: float) -> bool:
        """Whether a curve says what the loss is: not where seeds vary more than its noise, are off it or count less."""
        seeds = self.losses[batch].get(lr, [])
        if self.posterior is None or not self.has(batch) or len(seeds) < 2:
            return self.has(batch)
        if abs(self._misses[batch].get(lr, 0.0)) > MISSED:
            return False
        noise = float(np.median(self.posterior.noise(batch, [math.log2(lr)])))
        return bool(self._weights(batch)[lr].mean() >= OUTLYING) and stdev(seeds) < WILD * noise

    def inside(self, batch: int, low: float, high: float) -> float:
        """The probability that the best learning rate lies between `low` and `high`."""
        assert self.posterior is not None
        m = self.posterior.m[:, self.posterior.column[batch]]
        return float(((m >= math.log2(low)) & (m <= math.log2(high))).mean())

    def lowest(self, batch: int) -> float:
        """The lowest loss of the curve inside the grid; without a curve, the lowest mean."""
        curve, lrs = self.of[batch], np.log2(sorted(self.losses[batch]))
        if self.posterior is None or not self.has(batch) or curve.status == "jagged":
            return self.means[batch, curve.best]
        return float(np.median(self.posterior.loss(batch, np.linspace(lrs[0], lrs[-1], SCAN)).min(axis=1)))

    def has(self, batch: int) -> bool:
        """Whether the batch size has a curve: two learning rates or more."""
        return self.posterior is not None and batch in self.posterior.column

    def _weights(self, batch: int) -> dict[float, Array]:
        lrs = sorted(self.losses[batch])
        if self.posterior is None or not self.has(batch):
            return {lr: np.ones(len(self.losses[batch][lr])) for lr in lrs}
        return dict(zip(lrs, self.posterior.cells.weights[self.posterior.column[batch]], strict=True))

    def _judged(self, batch: int) -> Curve:
        at_batch = self.losses[batch]
        lrs = sorted(at_batch)
        dof = sum(len(of_seeds) - 1 for of_seeds in at_batch.values())
        if self.posterior is None or not self.has(batch):
            sigma = stdev(at_batch[lrs[0]]) if dof else self.usual_spread
            why = "1 learning rate completed, and a lowest point needs three"
            return Curve("too few", why, Noise(max(sigma, SMALLEST_SIGMA), dof), lrs[0])
        posterior, j = self.posterior, self.posterior.column[batch]
        m, x = posterior.m[:, j], np.log2(lrs)
        best = lrs[posterior.cells.lowest[j]]
        # A learning rate that diverged above the lowest loss ends the grid: it is known to be too large. But if the
        # optimum is likely to lie above all that completed, no loss near it is known.
        limit = float(posterior.cells.limit[j])
        is_between = limit - x[-1] > math.log2(CLOSEST) and float(np.median(m)) > x[-1]
        is_closed = math.isfinite(limit) and not is_between
        top = limit + NARROWEST if is_closed else float(x[-1])
        below, above = float((m < x[0]).mean()), float((m > top).mean())
        sigma = float(np.median(posterior.noise(batch, [float(np.median(m.clip(x[0], x[-1])))])))
        noise = Noise(sigma, dof)
        misses = self._misses[batch]
        outliers = self._outliers(batch, misses)

        lowest_end: Side | None = "lower" if best == lrs[0] else "higher" if best == lrs[-1] and not is_closed else None
        likelier: Side = "higher" if above > below else "lower"
        side = likelier if max(below, above) > LIKELY else lowest_end

        def judged(status: Status, why: str, optimum: Optimum | None = None) -> Curve:
            named = outliers if status != "jagged" else []  # there, no curve tells them from the others
            onwards = side if optimum is None else None
            return Curve(status, why, noise, best, below, above, onwards, optimum, named)

        bad = [lr for lr in self.diverged.get(batch, ()) if lr < best]
        if bad:
            return judged("jagged", f"training diverged at {min(bad):g}, below the best learning rate {best:g}")
        if self._humps(batch) > MOST_HUMPS * len(lrs):
            return judged("jagged", "the loss falls and rises more than once, by more than seeds explain")
        if misses.get(best, 0.0) > MISSED:
            return judged("jagged", f"no curve explains how low the loss at {best:g} is")
        if len(lrs) < 3 and max(below, above) < SURE_SIDE:
            return judged("too few", f"{counted(len(lrs), 'learning rate')} completed, and a lowest point needs three")
        is_inside = below + above <= OUTSIDE
        low, high = interval(m)
        if is_inside and lowest_end is None and not low < x[0] < top < high:
            why = f"it lies inside the grid with a probability of {1 - below - above:.1%}"
            return judged("bracketed", why, self._optimum(batch, sigma))
        heights = posterior.loss(batch, x).max(1) - posterior.c[:, j]
        beyond = ((below, f"below {lrs[0]:g}"), (above, f"above {2**top:.3g}"))
        outside = " and ".join(f"{where} with a probability of {share:.0%}" for share, where in beyond if share >= 0.01)
        why = f"the optimum is {outside}"
        if is_inside:
            why = "no run beyond shows that it rises" if lowest_end else "its interval is as wide as the grid"
        if lowest_end:
            why = f"the loss is lowest at {best:g}, the end of the grid; {why}"
        if np.median(heights) < 2 * sigma:
            means = [self.means[batch, lr] for lr in lrs]
            height = max(means) - min(means)
            return judged("flat", f"the losses differ by {height:.2g} nats, and seeds move each by {sigma:.2g}; {why}")
        return judged("not bracketed", why)

    def _optimum(self, batch: int, sigma: float) -> Optimum:
        assert self.posterior is not None
        posterior, j = self.posterior, self.posterior.column[batch]
        m, c = posterior.m[:, j], posterior.c[:, j]
        low, high = interval(m, narrowest=NARROWEST)
        centre = float(np.median(m))
        lrs = sorted(self.losses[batch])
        x = np.linspace(math.log2(lrs[0]), math.log2(lrs[-1]), SCAN)
        lost = np.median(posterior.loss(batch, x) - posterior.loss(batch, [centre]), axis=0) > sigma
        loss_low, loss_high = interval(c)
        return Optimum(
            lr=2**centre,
            low=2**low,
            high=2**high,
            loss=float(np.median(c)),
            loss_low=loss_low,
            loss_high=loss_high,
            tie_low=2 ** float(min(max(x[lost & (x < centre)], default=x[0]), centre)),
            tie_high=2 ** float(max(min(x[lost & (x > centre)], default=x[-1]), centre)),
        )

    @cached_property
    def _misses(self) -> dict[int, dict[float, float]]:
        """Batch size in tokens -> learning rate -> standard errors, see `_missed_at`."""
        return {batch: self._missed_at(batch) for batch in self.losses if self.has(batch)}

    def _missed_at(self, batch: int) -> dict[float, float]:
        """By how many standard errors the curve lies above the mean loss of each cell that is not far up.

        Only its own noise may part it from a cell that hardly counts, which has not moved the curve, and from the best
        one, whose loss is shown as the answer.
        """
        assert self.posterior is not None
        lrs = sorted(self.losses[batch])
        best = lrs[self.posterior.cells.lowest[self.posterior.column[batch]]]
        x = np.log2(lrs)
        curve, noise = self.posterior.loss(batch, x), np.median(self.posterior.noise(batch, x), axis=0)
        middle, spread = np.median(curve, axis=0), curve.std(axis=0)
        means = sorted(fmean(self.losses[batch][lr]) for lr in lrs)
        far_up = middle.min() + FAR_UP * (means[max(1, len(means) - 2)] - means[0])  # the highest may be an outlier
        found = {}
        for i, lr in enumerate(lrs):
            of_seeds = self.losses[batch][lr]
            if middle[i] > far_up:
                continue  # no form is expected to hold there
            sigma = max(float(noise[i]), stdev(of_seeds) if len(of_seeds) > 1 else 0.0)
            counts = self._weights(batch)[lr].mean() >= OUTLYING and lr != best
            error = math.hypot(float(spread[i]) * counts, sigma / math.sqrt(len(of_seeds)))
            found[lr] = (float(middle[i]) - fmean(of_seeds)) / error
        return found

    def _humps(self, batch: int) -> int:
        """Learning rates whose loss is above those of a lower and of a higher one, by more than seeds explain."""
        assert self.posterior is not None
        lrs = sorted(self.losses[batch])
        cells = [self.losses[batch][lr] for lr in lrs]
        means = np.array([fmean(of_seeds) for of_seeds in cells])
        noise = np.median(self.posterior.noise(batch, np.log2(lrs)), axis=0)
        spreads = [max(float(sd), stdev(cell) if len(cell) > 1 else 0.0) for sd, cell in zip(noise, cells, strict=True)]
        margins = MISSED * np.array(spreads) / np.sqrt([len(cell) for cell in cells])
        highest = means + margins
        return sum(
            means[i] - margins[i] > max(highest[:i].min(), highest[i + 1 :].min()) for i in range(1, len(lrs) - 1)
        )

    def _outliers(self, batch: int, misses: Mapping[float, float]) -> list[Outlier]:
        found = []
        for lr, weights in self._weights(batch).items():
            of_seeds = sorted(self.losses[batch][lr])
            is_far = abs(misses.get(lr, 0.0)) > MISSED and (len(of_seeds) == 1 or weights.mean() < OUTLYING)
            for loss, weight in zip(of_seeds, weights, strict=True):
                if is_far:
                    found.append(Outlier(lr, loss, "no curve through its neighbours explains its loss"))
                elif weight < OUTLYING * weights.max():
                    others = fmean(other for other, w in zip(of_seeds, weights, strict=True) if w > weight)
                    found.append(Outlier(lr, loss, f"other seeds of its cell have a loss of {others:.4f}"))
        return found


def fit_curves(losses: Mapping[int, Losses], diverged: Mapping[int, Sequence[float]], usual_spread: float) -> Curves:
    """Fit all batch sizes of one arm.

    `losses`: batch size -> losses of completed runs; `diverged`: batch size -> learning rates that diverged;
    `usual_spread`: standard deviation over seeds that such runs have had, in nats.
    """
    copied = {b: {lr: list(of_seeds) for lr, of_seeds in sorted(at.items())} for b, at in sorted(losses.items())}
    ended = {batch: sorted(lrs) for batch, lrs in sorted(diverged.items())}
    several = tuple(
        (batch, tuple((lr, tuple(sorted(of_seeds))) for lr, of_seeds in at_batch.items()))
        for batch, at_batch in copied.items()
        if len(at_batch) > 1
    )
    of_several = tuple((batch, tuple(lrs)) for batch, lrs in ended.items())
    posterior = _fitted(several, of_several, usual_spread) if several else None
    return Curves(copied, ended, usual_spread, posterior)


@lru_cache(maxsize=16)
def _fitted(losses: tuple[Any, ...], diverged: tuple[Any, ...], usual_spread: float) -> Posterior:
    """The posterior of losses as tuples of pairs. A live page asks for it again and again."""
    return fit({batch: dict(at_batch) for batch, at_batch in losses}, dict(diverged), usual_spread)


def one_step_outside(lrs: Sequence[float]) -> tuple[float, float]:
    """The learning rates below and above a grid of rising ones, as far from its ends as the next ones inside."""
    if len(lrs) < 2:
        return lrs[0] / SPACING, lrs[0] * SPACING
    return lrs[0] ** 2 / lrs[1], lrs[-1] ** 2 / lrs[-2]
