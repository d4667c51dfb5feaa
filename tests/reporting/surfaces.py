"""Arms on which a method looks for the best learning rate of each batch size, and what is known of the true one.

- Tables: real runs. The best learning rate is estimated from those runs that a method did not take, or read by eye.
- Synthetic arms: the truth is known.

Learning rates are passed as such, and compared as log2 of them, in octaves. Losses are final losses in nats.
"""

import csv
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import numpy as np
from calibration import FORMS, KINDS, Kind
from test_real_curves import library as real_curves

from gptexp.reporting.statistics.noise import usual_spread

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Cells = dict[float, list[float | None]]  # learning rate -> final loss of each seed; None: diverged

# The curve that is fitted to real runs. Over a wider range it agrees better with itself, but worse with fits to other
# runs near the minimum, so a misfit sets in; with another skew the two differ on average.
SKEW = 0.5  # per octave: one octave too high costs 1.4 times one too low
REACH = 1.25  # octaves from the lowest loss
LARGEST_ERROR = 0.25  # octaves: a reference with a larger standard deviation is none
DIVERGED = 4.5  # nats: a run of Step Law's table that ends above this has diverged
GRID = np.arange(-2.25, 2.5, 0.5)  # octaves from the prior: the grid of an arm that runs any learning rate
PRIOR = 0.85  # octaves: standard deviation of Step Law's formula around the best learning rate


class Run(NamedTuple):
    batch: int
    lr: float
    seed: int
    loss: float | None  # None: diverged


class Reference(NamedTuple):
    """The range that holds log2 of the best learning rate, and the standard deviation of its ends, in octaves."""

    low: float
    high: float
    sd: float = 0.0


class Surface(Protocol):
    """An arm: several batch sizes, runs of equal length."""

    @property
    def name(self) -> str: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...  # tokens a step

    @property
    def tokens(self) -> float: ...  # of a run

    @property
    def usual_spread(self) -> float: ...  # nats: the standard deviation over seeds that such runs usually have

    @property
    def seeds(self) -> int | None: ...  # of each cell; None: any number

    @property
    def flat(self) -> bool: ...  # no learning rate is better than another

    def rates(self, batch: int) -> tuple[float, ...] | None: ...  # learning rates that can be run; None: any

    def prior(self, batch: int) -> float: ...  # the learning rate at which a method begins

    def run(self, batch: int, lr: float, seed: int) -> float | None: ...  # final loss; None: diverged

    def reference(self, batch: int, taken: Collection[Run]) -> Reference | None: ...  # None: the rest does not show it

    def regret(self, batch: int, lr: float) -> float: ...  # nats above the lowest expected loss


class Fit(NamedTuple):
    optimum: float  # log2 of the learning rate
    height: float  # nats: a of the curve, about its height one octave from the minimum
    unit_sd: float  # standard deviation of the optimum in octaves, if that of each loss is the height


def fit_minimum(losses: Mapping[float, float], skew: float = SKEW, reach: float = REACH) -> Fit | None:
    """Fit a curve of fixed skew to the losses within `reach` octaves of the lowest one, by least squares.

    The LINEX curve y = c + (2a/s^2)(e^{s(x-m)} - 1 - s(x-m)) of known skew s is linear in 1, u and
    (2/s^2)(e^{su} - 1 - su), u = x - x0; a parabola is its limit at s = 0. `losses`: by log2 of the learning rate.
    None: the lowest is at an end, fewer than three are within reach, or the minimum is not among these.
    Three to five losses are too few for robust weights; how far single ones mislead is in `effective_noise`.
    """
    x = np.array(sorted(losses))
    y = np.array([losses[value] for value in x])
    if len(x) < 3 or not 0 < y.argmin() < len(x) - 1:
        return None
    start = x[y.argmin()]
    near = np.abs(x - start) <= reach
    if near.sum() < 3:
        return None
    u = x[near] - start
    design = np.stack([np.ones_like(u), u, 2 * (np.expm1(skew * u) - skew * u) / skew**2 if skew else u**2], axis=1)
    (_, slope, height), *_ = np.linalg.lstsq(design, y[near])
    if height <= 0 or (turn := 1 - slope * skew / (2 * height)) <= 0:
        return None
    optimum = start + (math.log(turn) / skew if skew else -slope / (2 * height))
    if not x[near][0] <= optimum <= x[near][-1]:
        return None
    gradient = np.array([0, -1, slope / height]) / 2
    unit_sd = math.sqrt(gradient @ np.linalg.inv(design.T @ design) @ gradient)
    return Fit(float(optimum), float(height * turn), unit_sd)


def smooth(losses: Mapping[float, float], at: Array) -> Array:
    """Loss by a local parabola with tricube weights of 1.5 octaves; with few points near, by straight lines.

    Beyond the first and the last loss it is constant. `at`: log2 of learning rates.
    """
    x = np.array(sorted(losses))
    y = np.array([losses[value] for value in x])
    at = np.clip(at, x[0], x[-1])
    found = np.interp(at, x, y)
    for i, value in enumerate(at):
        u = x - value
        weights = np.clip(1 - (np.abs(u) / 1.5) ** 3, 0, None) ** 1.5  # the square root of tricube's
        if (weights > 0).sum() >= 4:
            found[i] = np.linalg.lstsq(np.vander(u, 3) * weights[:, None], y * weights)[0][-1]
    return found


@dataclass(frozen=True)
class Table:
    """An arm of real runs.

    The error of a reference comes from `noise`, the effective standard deviation of a loss as a share of the curve's
    height, as it propagates to the minimum of the fitted curve.
    """

    name: str
    cells: dict[int, Cells]
    priors: dict[int, float]
    usual_spread: float
    noise: float = 0.0
    read: dict[int, Reference] = field(default_factory=dict)  # where a reader sees the optimum
    flat: bool = False
    tokens: float = 1.0
    every: int = 1  # 2: a method can run every other learning rate, from the `first`; the rest serve as reference
    first: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.cells)

    @property
    def seeds(self) -> int:
        return min(len(losses) for cells in self.cells.values() for losses in cells.values())

    def rates(self, batch: int) -> tuple[float, ...]:
        return tuple(sorted(self.cells[batch])[self.first :: self.every])

    def prior(self, batch: int) -> float:
        return self.priors[batch]

    def run(self, batch: int, lr: float, seed: int) -> float | None:
        return self.cells[batch][lr][seed]

    def means(self, batch: int, taken: Collection[Run] = ()) -> dict[float, float]:
        """Mean loss by log2 of the learning rate, of the runs not `taken`. A rate with one that diverged has none."""
        used = {(run.lr, run.seed) for run in taken if run.batch == batch}
        left = {
            lr: [loss for seed, loss in enumerate(losses) if (lr, seed) not in used]
            for lr, losses in self.cells[batch].items()
        }
        return {math.log2(lr): fmean(of) for lr, of in left.items() if of and None not in of}  # type: ignore[arg-type]

    def reference(self, batch: int, taken: Collection[Run]) -> Reference | None:
        if batch in self.read:
            return self.read[batch]
        fit = fit_minimum(self.means(batch, taken))
        if fit is None or fit.unit_sd * self.noise > LARGEST_ERROR:
            return None
        return Reference(fit.optimum, fit.optimum, fit.unit_sd * self.noise)

    def regret(self, batch: int, lr: float) -> float:
        means = self.means(batch)
        at, *others = smooth(means, np.array([math.log2(lr), *np.linspace(min(means), max(means), 100)]))
        return float(at - min(at, *others))


def halves(table: Table, batch: int) -> tuple[Fit, Fit] | None:
    """The minimum from every other learning rate, and from the others: two references without a common run."""
    rates = table.rates(batch)
    taken = [[Run(batch, lr, seed, None) for lr in rates[i::2] for seed in range(table.seeds)] for i in (0, 1)]
    even, odd = (fit_minimum(table.means(batch, half)) for half in taken)
    return (even, odd) if even and odd else None


def effective_noise(tables: Sequence[Table]) -> float:
    """The standard deviation of a loss, as a share of the curve's height, by which half grids differ as they do.

    If that of each loss is k heights, the optima of two disjoint halves differ by a value with the variance
    k^2 (v1 + v2), v1 and v2 those for one height. k^2 is the mean of difference^2 / (v1 + v2) over all batch sizes. In
    Step Law's table these ratios have the tails of a normal distribution; those for a k in nats have long ones. k holds
    noise and the misfit in which halves differ, not a misfit that both have.
    """
    pairs = [pair for table in tables for batch in table.sizes if (pair := halves(table, batch))]
    return math.sqrt(fmean((a.optimum - b.optimum) ** 2 / (a.unit_sd**2 + b.unit_sd**2) for a, b in pairs))


def step_law(path: Path) -> list[Table]:
    """The arms of a table of Step Law's dense runs (arXiv 2503.04715), one for each number of parameters and tokens."""
    arms: dict[tuple[float, float], dict[int, Cells]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            cells = arms.setdefault((float(row["parameters"]), float(row["tokens"])), {})
            loss = float(row["loss"])
            at = cells.setdefault(int(row["tokens_per_step"]), {})
            at[float(row["lr"])] = [loss if loss <= DIVERGED else None]
    tables = [
        Table(
            f"{parameters / 1e6:.0f}M parameters, {tokens / 1e9:g}B tokens", dict(sorted(cells.items())),
            dict.fromkeys(cells, 1.79 * parameters**-0.713 * tokens**0.307), usual_spread(parameters, tokens),
            tokens=tokens,
        )
        for (parameters, tokens), cells in arms.items()
    ]  # fmt: skip
    noise = effective_noise(tables)
    return [replace(table, noise=noise) for table in tables]


def every_other_rate(tables: Sequence[Table]) -> list[Table]:
    """These arms, each twice, with every other learning rate: the others are a reference whatever a method runs."""
    return [replace(table, every=2, first=first) for table in tables for first in (0, 1)]


def library() -> list[Table]:
    """The curves of real_curves.yaml, each an arm of one batch size, with the range that a reader gives its optimum.

    And the sweep of real_sweep.csv, an arm of three.
    """
    tables = []
    for real in real_curves():
        x = [math.log2(lr) for lr in real.losses]
        low, high = (math.log2(value) if value else -math.inf for value in real.optimum)
        middle = (max(low, min(x)) + min(high, max(x))) / 2
        cells: Cells = {lr: list(losses) for lr, losses in real.losses.items()}
        seeds = min(map(len, cells.values()))
        cells |= {lr: [None] * seeds for lr in real.diverged}
        prior = middle + PRIOR * np.random.default_rng([1, *real.name.encode()]).standard_normal()
        tables.append(
            Table(
                real.name, {1: cells}, {1: 2**prior}, real.spread, read={1: Reference(low, high)},
                flat=real.status == "flat",
            )
        )  # fmt: skip
    return [*tables, real_sweep()]


def real_sweep() -> Table:
    """The first sweep of a new user, with seeds: runs are short and vary much, so the optima are read by eye."""
    cells: dict[int, Cells] = {}
    with Path(__file__).with_name("real_sweep.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            at = cells.setdefault(int(row["total_batch_size"]), {})
            at.setdefault(float(row["lr"]), []).append(float(row["final_val_loss"]))
    middle = {batch: 2.0 ** fmean(map(math.log2, at)) for batch, at in cells.items()}
    ranges = {1024: (0.004, 0.016), 4096: (0.002, 0.016), 16384: (0.002, 0.016)}
    read = {batch: Reference(math.log2(low), math.log2(high)) for batch, (low, high) in ranges.items()}
    return Table("sweep of a new user", cells, middle, usual_spread(74_688, 1_000_448), read=read)


@dataclass(frozen=True)
class Synthetic:
    """An arm whose truth is known. Octaves and nats; all but `kind` and `seed` by batch size."""

    name: str
    kind: Kind
    seed: int
    optima: dict[int, float]
    heights: dict[int, float]
    shapes: dict[int, tuple[float, ...]]
    limits: dict[int, float]  # above the optimum; beyond, a run diverges
    priors: dict[int, float]
    usual_spread: float
    tokens: float = 1.0
    seeds: None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.optima)

    @property
    def flat(self) -> bool:
        return self.kind.height == 0

    def rates(self, batch: int) -> None:
        return None

    def prior(self, batch: int) -> float:
        return float(2 ** self.priors[batch])

    def run(self, batch: int, lr: float, seed: int) -> float | None:
        kind, u = self.kind, math.log2(lr) - self.optima[batch]
        if u > self.limits[batch]:
            return None
        cell = [self.seed, batch, round(1e6 * (u + 100))]
        rng = np.random.default_rng([*cell, seed])
        spread = kind.sigma * 2 ** (kind.rise * u) * (kind.last if batch == self.sizes[-1] else 1)
        spread *= 2 ** (kind.cells_differ * np.random.default_rng(cell).standard_normal())
        noise = rng.standard_t(3) / math.sqrt(3) if kind.heavy_tails else rng.standard_normal()
        outlying = rng.uniform(0.3, 1.5) if rng.random() < kind.outliers else 0.0
        return float(3 + self.regret(batch, lr) + spread * noise + outlying)

    def regret(self, batch: int, lr: float) -> float:
        u = np.array([math.log2(lr) - self.optima[batch]])
        return self.heights[batch] * float(FORMS[self.kind.form](u, *self.shapes[batch])[0])

    def reference(self, batch: int, taken: Collection[Run]) -> Reference | None:
        return None if self.flat else Reference(self.optima[batch], self.optima[batch])


class Crossing(Synthetic):
    """An arm whose learning curves cross as GPT-2's did under Muon (modded-nanogpt, track 3, lr 0.025 and 0.035).

    There the lower rate led by 0.020 nats at 7.5% of the run, 0.014 at 45%, 0.008 at 75%, 0.002 at 90%, and was behind
    from 97% on. A parabola of that height (0.011 nats at one octave) has such losses if its minimum lies so far below.
    """

    def loss_at(self, batch: int, lr: float, seed: int, share: float) -> float | None:
        """The loss of a run at this share of its length."""
        below = np.interp(share, [0.075, 0.45, 0.75, 0.9, 0.97, 1], [2.07, 1.52, 0.98, 0.43, 0.2, 0])
        end = self.run(batch, lr, seed)
        if end is None:
            return None
        moved = self.regret(batch, lr * 2**below) - self.regret(batch, lr)
        return float(end + moved + 4 * (1 - share) ** 2)


SYNTHETIC_KINDS = (
    "quadratic", "linex", "steep linex", "mirrored", "kink", "powers 1.5 and 2", "wall", "saturating",
    "noise rises, steep linex", "heavy tails, linex", "outliers", "skews differ",
)  # fmt: skip
SYNTHETIC_SIZES = tuple(2**exponent for exponent in (13, 15, 17, 19))


def synthetic(name: str, kind: Kind, seed: int, off: float | None = None) -> Synthetic:
    """An arm whose optima lie on a bent law like Step Law's, with a scatter of 0.15 octaves.

    Half of the arms diverge from 1 to 1.5 octaves above the optimum. `off`: octaves from the optimum to the prior;
    None: drawn with the standard deviation `PRIOR`, half of its variance common to the arm.
    """
    rng = np.random.default_rng([seed, *name.encode()])
    x = np.log2(SYNTHETIC_SIZES) - np.mean(np.log2(SYNTHETIC_SIZES))
    optima = -9 + rng.uniform(-1, 1) + 0.3 * x - 0.095 * x**2 + 0.15 * rng.standard_normal(len(x))
    drawn = PRIOR / math.sqrt(2) * (rng.standard_normal() + rng.standard_normal(len(x)))
    limits = (1 if rng.random() < 0.5 else 3) + rng.uniform(0, 0.5, len(x))
    heights = kind.height * kind.heights_differ ** rng.uniform(-1, 1, len(x))
    shapes = [tuple(value + kind.shapes_differ * rng.uniform(-1, 1) for value in kind.shape) for _ in x]
    priors = optima + (drawn if off is None else off)

    def by_size(values: Any) -> dict[int, Any]:
        return dict(zip(SYNTHETIC_SIZES, values, strict=True))

    return (Crossing if name == "crossing" else Synthetic)(
        f"{name} {seed}", kind, seed, by_size(optima), by_size(heights), by_size(shapes), by_size(limits),
        by_size(priors), kind.sigma * math.exp(0.5 * rng.standard_normal()),
    )  # fmt: skip


def of_noise(seed: int, ratio: float, offs: Sequence[float | None] = (None,)) -> list[Synthetic]:
    """An arm of each kind; `ratio`: of a run's standard deviation to the height of the curve at one octave."""
    kinds = {name: replace(KINDS[name], sigma=ratio * KINDS[name].height) for name in SYNTHETIC_KINDS}
    return [synthetic(name, kind, seed, off) for name, kind in kinds.items() for off in offs]


def flat(seed: int) -> list[Synthetic]:
    return [
        synthetic("flat", Kind(height=0, sigma=sigma, heavy_tails=heavy), seed)
        for sigma in (0.001, 0.006, 0.03)
        for heavy in (False, True)
    ]


def crossing(seed: int) -> list[Synthetic]:
    kinds = [Kind(height=0.011, sigma=sigma) for sigma in (0.001, 0.002)]
    return [synthetic("crossing", kind, 3 * seed + i) for kind in kinds for i in range(3)]


TABLES: dict[str, Callable[[int], Sequence[Surface]]] = {  # by the number of the repeat
    "library": lambda _: library(),
    **{f"noise {ratio:g}": partial(of_noise, ratio=ratio) for ratio in (0.05, 0.2, 0.5, 2)},
    "prior off by 3": partial(of_noise, ratio=0.2, offs=(-3, 3)),
    "flat": flat,
    "crossing": crossing,
}
