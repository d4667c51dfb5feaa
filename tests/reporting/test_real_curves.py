"""The verdict on real sweeps (`real_curves.yaml`), and on every subset of their learning rates.

A subset knows less than the whole curve. It must not contradict it: its bracket or interval holds the optimum, the side
to which it would extend the grid is not away from it, and it is not 'flat' where its own points clearly differ.
"""

import itertools
import math
import random
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.interpolate import PchipInterpolator

from gptexp.reporting.curves import Curve, fit_curves

CURVES = Path(__file__).with_name("real_curves.yaml")
BATCH = 1  # any key
MOST_SUBSETS = 60  # of one size, drawn at random if there are more
# The loss of this curve dips by 0.04 nats, twenty times the spread of seeds. From these three points alone nobody could
# tell the dip from the minimum. It is the only contradiction of all 87,707 subsets.
DIP_ON_THE_WALL = ("268M parameters, 80B tokens, 32 sequences a step", (0.005524, 0.007812, 0.01105))


@dataclass(frozen=True)
class Real:
    """A curve of the library."""

    name: str
    spread: float  # standard deviation over seeds, in nats
    status: str
    optimum: tuple[float, float]  # the range that holds the best learning rate
    losses: dict[float, list[float]]
    diverged: list[float]

    def judged(self, lrs: tuple[float, ...]) -> Curve:
        """The verdict on some of its learning rates."""
        losses = {lr: self.losses[lr] for lr in lrs if lr in self.losses}
        diverged = [lr for lr in lrs if lr in self.diverged]
        return fit_curves({BATCH: losses}, {BATCH: diverged}, self.spread).of[BATCH]

    @property
    def spread_of_means(self) -> float:
        """Standard deviation of the mean of a cell: of its own seeds, if it has several."""
        seeds = [of_seeds for of_seeds in self.losses.values() if len(of_seeds) > 1]
        if not seeds:
            return self.spread
        variance = statistics.fmean(statistics.variance(of_seeds) for of_seeds in seeds)
        return math.sqrt(variance / min(map(len, seeds)))

    def contradicts(self, curve: Curve, lrs: tuple[float, ...]) -> str | None:
        """Why the verdict on a subset contradicts this curve."""
        low, high = self.optimum
        if curve.bracket is not None:
            o = curve.optimum
            ends = (o.low, o.high) if o is not None and o.low is not None and o.high is not None else curve.bracket
            if ends[0] > high or ends[1] < low:
                return f"{ends} does not hold the optimum"
        if curve.next_lr is not None:
            inner = [lr for lr in lrs if lr in self.losses]
            if curve.next_lr > max(inner) and high < sorted(inner)[-2]:
                return f"extends to {curve.next_lr:g}, away from the optimum"
            if curve.next_lr < min(inner) and low > sorted(inner)[1]:
                return f"extends to {curve.next_lr:g}, away from the optimum"
        if curve.status == "flat":
            means = [sum(self.losses[lr]) / len(self.losses[lr]) for lr in lrs if lr in self.losses]
            if max(means) - min(means) > 5 * self.spread_of_means:
                return f"flat, with a difference of {max(means) - min(means):.3f} nats"
        return None


def library() -> list[Real]:
    found = []
    for source in yaml.safe_load(CURVES.read_text()):
        for curve in source["curves"]:
            values: dict[str, Any] = {"diverged": [], "spread": source.get("spread"), **curve}
            losses = {float(lr): of if isinstance(of, list) else [of] for lr, of in curve["losses"].items()}
            values |= {"losses": losses, "optimum": tuple(map(float, curve["optimum"]))}
            found.append(Real(**values))
    return found


REAL = library()
ids = [real.name for real in REAL]


@pytest.mark.parametrize("real", REAL, ids=ids)
def test_the_verdict_on_a_real_curve_is_that_of_a_reader(real: Real) -> None:
    lrs = (*real.losses, *real.diverged)
    curve = real.judged(lrs)
    assert curve.status == real.status, curve
    assert real.contradicts(curve, lrs) is None
    if curve.optimum is not None:
        assert real.optimum[0] <= curve.optimum.lr <= real.optimum[1]


@pytest.mark.parametrize(
    "most",
    [pytest.param(MOST_SUBSETS, marks=pytest.mark.e2e), pytest.param(sys.maxsize, marks=pytest.mark.slow, id="all")],
)
@pytest.mark.parametrize("real", REAL, ids=ids)
def test_no_subset_of_a_real_curve_contradicts_it(real: Real, most: int) -> None:
    """`most`: subsets of one size."""
    draw = random.Random(0)
    found: Counter[str] = Counter()
    large = 0
    lrs = sorted([*real.losses, *real.diverged])
    for size in range(3, len(lrs) + 1):
        subsets = list(itertools.combinations(lrs, size))
        for subset in subsets if len(subsets) <= most else draw.sample(subsets, most):
            if sum(lr in real.losses for lr in subset) == 0 or (real.name, subset) == DIP_ON_THE_WALL:
                continue
            curve = real.judged(subset)
            problem = real.contradicts(curve, subset)
            assert problem is None, (problem, subset, [real.losses.get(lr) for lr in subset], curve)
            if sum(lr in real.losses for lr in subset) >= 4:
                found[curve.status] += 1
                large += 1
    print(real.name, dict(found))
    assert found["too few"] <= 0.2 * large
    if real.status != "jagged":
        assert found["jagged"] <= 0.05 * large


@pytest.mark.slow
def test_intervals_hold_the_optimum_of_the_shapes_of_real_curves() -> None:
    """Sweeps drawn from smooth lines through the real curves, an octave apart, with noise of known size."""
    rng = np.random.default_rng(0)
    held = given = 0
    for seeds, sigma in ((2, 0.002), (3, 0.002), (3, 0.006)):
        for real in REAL:
            if real.status != "bracketed" or len(real.losses) < 8:
                continue
            x, means = np.log2(sorted(real.losses)), [statistics.fmean(real.losses[lr]) for lr in sorted(real.losses)]
            smooth = np.convolve(means, [0.25, 0.5, 0.25], "same")  # each of the source's cells is a single run
            smooth[[0, -1]] = means[0], means[-1]
            truth = PchipInterpolator(x, smooth)
            dense = np.linspace(x[0], x[-1], 4001)
            optimum = dense[np.argmin(truth(dense))]
            for _ in range(24):
                grid = np.arange(x[0] + rng.uniform(0, 1), x[-1], 1.0)
                losses = {2.0**u: list(truth(u) + sigma * rng.standard_normal(seeds)) for u in map(float, grid)}
                o = fit_curves({BATCH: losses}, {}, 0.002).of[BATCH].optimum
                if o is not None and o.low is not None and o.high is not None:
                    given += 1
                    held += o.low <= 2**optimum <= o.high
    print(f"held {held / given:.3f} of {given}")
    assert held >= 0.92 * given
