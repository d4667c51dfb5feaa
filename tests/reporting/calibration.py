"""Sweeps with a known best learning rate, and how often the intervals of the posterior hold it.

    python tests/reporting/calibration.py kinds [--sweeps 500] [--kinds kink "2 seeds"]
    python tests/reporting/calibration.py law [--sweeps 500]
    python tests/reporting/calibration.py arms [--sweeps 500]

`kinds` prints for each kind of truth: how often an interval is given and holds the truth, its median width in octaves,
and the width that a fit of the true form would have. `law` and `arms` print the same of exponents and of the difference
of two arms' exponents.
"""

import argparse
import math
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gptexp.reporting.statistics.curves import fit_curves
from gptexp.reporting.statistics.law import fit_law, fit_ratio
from gptexp.reporting.statistics.likelihood import Losses
from gptexp.reporting.statistics.posterior import NARROWEST

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Form = Callable[..., Array]  # (octaves from the minimum, shape parameters...) -> height

USUAL = 0.03  # nats: the usual spread that every fit is given, which is not the true one
FIRST_BATCH = 1024


def linex(u: Array, k: float) -> Array:
    return 2 * (np.expm1(k * u) - k * u) / k**2


def sides(u: Array, below: Array, above: Array) -> Array:
    return np.where(u < 0, below, above)


FORMS: dict[str, Form] = {
    "quadratic": lambda u: u**2,
    "linex": linex,
    "kink": lambda u, ratio: sides(u, u**2, ratio * u**2),
    "powers": lambda u, below, above: sides(u, np.abs(u) ** below, np.abs(u) ** above),
    "power and wall": lambda u, below: sides(u, np.abs(u) ** below, u**2 * (1 + u**2)),
    "quartic": lambda u, flat: u**4 + flat * u**2,
    "hyperbola": lambda u, k: 2 * (np.sqrt(1 + k * u**2) - 1),
    "wall": lambda u, steep: u**2 + steep * np.maximum(0, u - 1) ** 3,
    "saturating": lambda u, top: sides(u, u**2, top * (1 - np.exp(-(u**2) / top * 2))),
    "abs": lambda u, ratio: np.abs(u) * np.where(u > 0, ratio, 1.0),
}


@dataclass(frozen=True)
class Kind:
    """A kind of sweep. Losses and noise in nats, learning rates in octaves."""

    form: str = "quadratic"
    shape: tuple[float, ...] = ()  # parameters of the form
    height: float = 0.02  # of the curve where the form is 1
    sigma: float = 0.006  # standard deviation of a run at the best learning rate
    seeds: int = 3
    middle_only: bool = False  # seeds at the three middle learning rates only
    rates: int = 7
    step: float = 1.0  # between learning rates
    sizes: int = 4  # batch sizes, a factor of two apart
    exponent: float | None = None  # of the law on which the optima lie; None: anywhere on the grid
    heavy_tails: bool = False  # Student's t with three degrees of freedom
    missing: float = 0.0  # share of the cells
    outliers: float = 0.0  # share of the runs, 0.3 to 1.5 nats above their cell
    rise: float = 0.0  # of log2 of the noise per octave
    last: float = 1.0  # factor of the noise at the largest batch size
    cells_differ: float = 0.0  # standard deviation of log2 of the noise between cells
    heights_differ: float = 1.0  # largest factor of the height between batch sizes
    shapes_differ: float = 0.0  # largest difference of the shape parameters of a batch size


KINK = Kind("kink", (5.0,), height=0.01)
LINEX = Kind("linex", (0.7,))
MIRRORED = Kind("linex", (-0.7,))
KINDS = {
    "quadratic": Kind(),
    "quadratic, sigma 0.003": Kind(sigma=0.003),
    "quadratic, sigma 0.02": Kind(sigma=0.02),
    "linex": LINEX,
    "linex, sigma 0.01": replace(LINEX, sigma=0.01),
    "steep linex": Kind("linex", (1.4,)),
    "mirrored": MIRRORED,
    "mirrored, sigma 0.01": replace(MIRRORED, sigma=0.01),
    "kink": KINK,
    "kink, sigma 0.01": replace(KINK, sigma=0.01),
    "kink mirrored": Kind("kink", (0.2,), height=0.05),
    "powers 1.5 and 2": Kind("powers", (1.5, 2.0)),
    "powers 1.5 and 2, sigma 0.01": Kind("powers", (1.5, 2.0), sigma=0.01),
    "powers 2 and 1.5": Kind("powers", (2.0, 1.5)),
    "power and wall": Kind("power and wall", (1.5,)),
    "quartic": Kind("quartic", (0.2,)),
    "hyperbola": Kind("hyperbola", (2.0,)),
    "wall": Kind("wall", (2.0,)),
    "saturating": Kind("saturating", (6.0,)),
    "abs": Kind("abs", (1.0,)),
    "noise rises": Kind(rise=0.5),
    "noise rises, steep linex": Kind("linex", (1.4,), rise=0.5, sigma=0.01),
    "noise x6 at the largest": Kind(last=6.0),
    "noise x6 at the largest, linex": replace(LINEX, last=6.0),
    "cells differ": Kind(cells_differ=0.5, sigma=0.01),
    "heavy tails": Kind(heavy_tails=True),
    "heavy tails, linex": replace(LINEX, heavy_tails=True, sigma=0.01),
    "heavy tails, mirrored": replace(MIRRORED, heavy_tails=True, sigma=0.01),
    "outliers": Kind(outliers=0.04),
    "outliers, linex, 2 seeds": replace(LINEX, outliers=0.04, seeds=2, sigma=0.01),
    "missing": Kind(missing=0.2),
    "missing, linex": replace(LINEX, missing=0.2, sigma=0.01),
    "2 seeds": Kind(seeds=2),
    "2 seeds, linex": replace(LINEX, seeds=2, sigma=0.01),
    "5 seeds": Kind(seeds=5),
    "5 seeds, kink": replace(KINK, seeds=5, sigma=0.01),
    "seeds at the middle": Kind(middle_only=True),
    "seeds at the middle, linex": replace(LINEX, middle_only=True, sigma=0.01),
    "3 rates": Kind(rates=3),
    "4 rates, linex": replace(LINEX, rates=4),
    "5 rates, linex": replace(LINEX, rates=5, sigma=0.01),
    "7 rates a factor sqrt(2) apart": Kind(step=0.5),
    "12 rates a factor sqrt(2) apart": replace(LINEX, rates=12, step=0.5),
    "5 rates a factor 4 apart": Kind(rates=5, step=2.0),
    "4 rates a factor 4 apart, linex": replace(LINEX, rates=4, step=2.0),
    "1 batch size": replace(LINEX, sizes=1, sigma=0.01),
    "2 batch sizes": replace(LINEX, sizes=2),
    "8 batch sizes": replace(LINEX, sizes=8, sigma=0.01, seeds=2),
    "heights differ": replace(LINEX, heights_differ=2.0),
    "skews differ": replace(LINEX, shapes_differ=0.7, sigma=0.01),
}


class Truth(NamedTuple):
    """What is true at one batch size."""

    optimum: float  # log2 of the best learning rate
    height: float
    shape: tuple[float, ...]
    x: Array  # log2 of the learning rates
    precision: Array  # of the mean loss at each


Sweep = tuple[dict[int, Losses], list[Truth]]


def draw(rng: np.random.Generator, kind: Kind) -> Sweep:
    """A sweep, and the truth at each batch size. The grids follow a square-root law."""
    sweep: dict[int, Losses] = {}
    truths = []
    for j in range(kind.sizes):
        span = np.arange(kind.rates) - (kind.rates - 1) / 2
        x = (span + rng.uniform(-0.5, 0.5)) * kind.step + 0.5 * j
        optimum = 0.5 * j + rng.uniform(-1, 1) * min(1.5, (kind.rates - 2) / 2 * kind.step)
        if kind.exponent is not None:
            optimum = kind.exponent * (j - (kind.sizes - 1) / 2)
            x = span * kind.step + round(optimum / kind.step) * kind.step
        inside = 0.501 * kind.step  # an answer is due where the optimum lies this far inside the grid
        optimum = min(max(optimum, x[0] + inside), x[-1] - inside)
        height = kind.height * kind.heights_differ ** rng.uniform(-1, 1)
        shape = tuple(value + kind.shapes_differ * rng.uniform(-1, 1) for value in kind.shape)
        curve = 3 - 0.01 * j + height * FORMS[kind.form](x - optimum, *shape)
        sigma = kind.sigma * (kind.last if j == kind.sizes - 1 else 1.0) * 2 ** (kind.rise * (x - optimum))
        sigma = sigma * 2 ** (kind.cells_differ * rng.standard_normal(len(x)))
        on = (rng.random(len(x)) >= kind.missing) | (np.arange(len(x)) == np.abs(x - optimum).argmin())
        middle = np.abs(np.arange(kind.rates) - kind.rates // 2) <= 1
        seeds = np.where(middle | (not kind.middle_only), kind.seeds, 1)
        cells = {}
        for i in np.flatnonzero(on):
            noise = rng.standard_t(3, seeds[i]) / math.sqrt(3) if kind.heavy_tails else rng.standard_normal(seeds[i])
            outlying = (rng.random(seeds[i]) < kind.outliers) * rng.uniform(0.3, 1.5, seeds[i])
            cells[2.0 ** x[i]] = list(map(float, curve[i] + sigma[i] * noise + outlying))
        sweep[FIRST_BATCH * 2**j] = cells
        truths.append(Truth(optimum, height, shape, x[on], seeds[on] / sigma[on] ** 2))
    return sweep, truths


def covariance(kind: Kind, truths: Sequence[Truth]) -> Array:
    """Of the optima, if the true form is fitted: from Fisher's information.

    Shape parameters are those of one batch size if they differ between batch sizes, else they are shared.
    """
    form, sizes, shapes, step = FORMS[kind.form], len(truths), len(kind.shape), 1e-4
    own = kind.shapes_differ > 0
    information = np.zeros((3 * sizes + shapes * (sizes if own else 1),) * 2)
    for j, truth in enumerate(truths):
        u = truth.x - truth.optimum
        slopes = np.zeros((len(u), len(information)))
        slopes[:, j] = truth.height * (form(u - step, *truth.shape) - form(u + step, *truth.shape)) / (2 * step)
        slopes[:, sizes + j] = 1
        slopes[:, 2 * sizes + j] = form(u, *truth.shape)
        for i in range(shapes):
            moved = [[v + sign * step * (k == i) for k, v in enumerate(truth.shape)] for sign in (1, -1)]
            slopes[:, 3 * sizes + shapes * j * own + i] = (
                truth.height * (form(u, *moved[0]) - form(u, *moved[1])) / (2 * step)
            )
        information += slopes.T @ (slopes * truth.precision[:, None])
    return np.asarray(np.linalg.pinv(information)[:sizes, :sizes])


def oracle_widths(kind: Kind, truths: Sequence[Truth]) -> Array:
    """Widths of the 95% intervals of a fit of the true form, but no narrower than `NARROWEST`."""
    return np.maximum(3.92 * np.sqrt(np.diag(covariance(kind, truths))), NARROWEST)


@dataclass
class Tally:
    """Intervals of one kind. `low`, `high` and `oracle` (widths) are of those that are given."""

    due: int
    truth: Array
    low: Array
    high: Array
    oracle: Array

    @property
    def held(self) -> Array:
        return np.asarray((self.low <= self.truth) & (self.truth <= self.high))

    @property
    def width(self) -> float:
        return float(np.median(self.high - self.low))

    @property
    def ratio(self) -> float:
        return float(self.width / np.median(self.oracle))

    def __str__(self) -> str:
        above, below = (self.truth > self.high).mean(), (self.truth < self.low).mean()
        return (f"given {len(self.low) / self.due:.3f} of {self.due:4d}, held {self.held.mean():.3f} "
                f"(above {above:.3f}, below {below:.3f}), width {self.width:.3f}, oracle {np.median(self.oracle):.3f}, "
                f"ratio {self.ratio:.2f}")  # fmt: skip


Rows = list[tuple[float, float, float, float]]  # truth, low, high and the oracle's width of each interval that is given


def tally(rows_of: Callable[[str, int], Rows], name: str, sweeps: int, pool_map: Any = map) -> Tally:
    """The intervals of so many sweeps of a kind. `rows_of`: `optima`, `exponents` or `differences`."""
    rows = [row for rows in pool_map(partial(rows_of, name), range(sweeps)) for row in rows]
    return Tally(sweeps * (KINDS[name].sizes if name in KINDS else 1), *np.array(rows, float).reshape(-1, 4).T)


def _generator(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, sum(map(ord, name))])


def optima(name: str, seed: int) -> Rows:
    kind = KINDS[name]
    sweep, truths = draw(_generator(name, seed), kind)
    found = fit_curves(sweep, {}, USUAL).optima
    widths = oracle_widths(kind, truths)
    return [(truth.optimum, math.log2(found[batch].low), math.log2(found[batch].high), width)
            for batch, truth, width in zip(sweep, truths, widths, strict=True) if batch in found]  # fmt: skip


def exponent_width(kind: Kind, truths: Sequence[Truth]) -> float:
    """Of the 95% interval of the exponent, by generalised least squares of a fit of the true form."""
    design = np.vander(np.arange(len(truths)), 2)
    precision = design.T @ np.linalg.inv(covariance(kind, truths)) @ design
    return float(3.92 * np.sqrt(np.linalg.inv(precision)[0, 0]))


LAWS = {
    f"{sizes} sizes, exponent {exponent}, {name}": replace(kind, sizes=sizes, exponent=exponent)
    for sizes in (3, 4, 6)
    for exponent, name, kind in (
        (0.5, "quadratic", Kind(sigma=0.003)),
        (0.5, "linex", replace(LINEX, sigma=0.01)),
        (0.0, "kink", KINK),
        (1.0, "heavy tails", replace(LINEX, heavy_tails=True)),
        (0.5, "skews differ", replace(LINEX, shapes_differ=0.5)),
    )
}


def exponents(name: str, seed: int) -> Rows:
    kind = LAWS[name]
    sweep, truths = draw(_generator(name, seed), kind)
    law = fit_law(fit_curves(sweep, {}, USUAL).octaves)
    return [(kind.exponent or 0.0, law.low, law.high, exponent_width(kind, truths))] if law else []


ARMS = {
    f"difference {difference}, {name}": (replace(kind, sizes=5, exponent=0.5), difference)
    for difference in (0.0, 0.2)
    for name, kind in (
        ("quadratic, sigma 0.003", Kind(sigma=0.003)),
        ("linex, sigma 0.01", replace(LINEX, sigma=0.01)),
    )
}


def differences(name: str, seed: int) -> Rows:
    kind, difference = ARMS[name]
    rng = _generator(name, seed)
    kinds = [replace(kind, exponent=0.5 + difference), kind]
    drawn = [draw(rng, of_arm) for of_arm in kinds]
    one, other = (fit_curves(sweep, {}, USUAL).octaves for sweep, _ in drawn)
    ratio = fit_ratio(one, other)
    width = math.hypot(*(exponent_width(k, truths) for k, (_, truths) in zip(kinds, drawn, strict=True)))
    return [(difference, ratio.low, ratio.high, width)] if ratio else []


def main() -> None:
    parser = argparse.ArgumentParser(description="How often intervals hold the truth.")
    parser.add_argument("what", choices=["kinds", "law", "arms"])
    parser.add_argument("--sweeps", type=int, default=500, help="of each kind")
    parser.add_argument("--kinds", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    kinds, rows_of = {"kinds": (KINDS, optima), "law": (LAWS, exponents), "arms": (ARMS, differences)}[args.what]
    tallies = []
    with multiprocessing.Pool(args.processes) as pool:
        for name in kinds:
            if any(part in name for part in args.kinds):
                found = tally(rows_of, name, args.sweeps, partial(pool.imap_unordered, chunksize=2))
                tallies.append(found)
                excluded = ((found.low > 0) | (found.high < 0)).mean()
                power = f", zero excluded {excluded:.3f}" if args.what == "arms" else ""
                print(f"{name:34s} {found}{power}", flush=True)
    held = np.concatenate([found.held for found in tallies])
    ratios = [found.ratio for found in tallies]
    print(f"all: held {held.mean():.4f} of {len(held)}; median ratio {np.median(ratios):.2f}")


if __name__ == "__main__":
    main()
