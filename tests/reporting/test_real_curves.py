"""The verdict on real sweeps (`real_curves.yaml`), and on every subset of their learning rates.

A subset knows less than the whole curve. It must not contradict it: its interval holds a learning rate that may be the
best, and the side on which it expects the optimum is not away from it.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from gptexp.reporting.statistics.curves import Curve, fit_curves

CURVES = Path(__file__).with_name("real_curves.yaml")
BATCH = 1  # any key
SURE = 0.9  # probability


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
        return fit_curves({BATCH: losses}, {BATCH: diverged}, self.spread).by_batch[BATCH]

    def contradicts(self, curve: Curve, lrs: tuple[float, ...]) -> str | None:
        """Why the verdict on a subset contradicts this curve."""
        low, high = self.optimum
        if (o := curve.optimum) is not None and (o.low > high or o.high < low):
            return f"{o.low:g} to {o.high:g} holds no learning rate that may be the best"
        inner = [lr for lr in lrs if lr in self.losses]
        if curve.above > SURE and high < min(inner[-2:]):
            return "the optimum is not above"
        if curve.below > SURE and low > max(inner[:2]):
            return "the optimum is not below"
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


@pytest.mark.e2e
def test_the_verdict_on_real_curves_is_that_of_a_reader() -> None:
    """Where a reader sees an optimum, the point lies where the reader sees it. Where none is seen, there may be one."""
    seen, given = 0, 0
    for real in REAL:
        lrs = (*real.losses, *real.diverged)
        curve = real.judged(lrs)
        assert real.contradicts(curve, lrs) is None, real.name
        if real.status == "bracketed":
            assert curve.status in ("bracketed", "not bracketed"), (real.name, curve)
            seen, given = seen + 1, given + (curve.optimum is not None)
            if curve.optimum is not None:
                assert real.optimum[0] <= curve.optimum.lr <= real.optimum[1], real.name
        if real.status == "too few":
            assert curve.optimum is None, real.name
    assert given >= 0.85 * seen


@pytest.mark.parametrize(
    ("most", "every"),
    [pytest.param(1, 4, marks=pytest.mark.e2e), pytest.param(60, 1, marks=pytest.mark.slow)],
)
def test_few_subsets_of_real_curves_contradict_them(most: int, every: int) -> None:
    """`most`: subsets of one size; `every`: curves, of which one is taken.

    A 95% interval misses now and then, so a few of the subsets do.
    """
    draw = random.Random(0)
    total, wrong, jagged = 0, Counter[str](), 0
    for real in REAL[::every]:
        lrs = sorted([*real.losses, *real.diverged])
        for size in range(3, len(lrs) + 1):
            subsets = list(itertools.combinations(lrs, size))
            for subset in subsets if len(subsets) <= most else draw.sample(subsets, most):
                if sum(lr in real.losses for lr in subset) == 0:
                    continue
                curve = real.judged(subset)
                total += 1
                jagged += curve.status == "jagged" and real.status != "jagged"
                if (problem := real.contradicts(curve, subset)) is not None:
                    wrong[f"{real.name}: {problem}"] += 1
    print(total, dict(wrong), jagged)
    assert wrong.total() <= 0.05 * total
    assert jagged <= 0.05 * total
