"""Arms of a sweep side by side: their laws, the batch sizes up to which each keeps its loss, and sizes of a model.

An arm has one optimum for each batch size. Here the optima of different arms are compared, as far as they have
intervals.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from scipy import special

from gptexp.reporting.analysis import Arm, label_of
from gptexp.reporting.curves import Optimum
from gptexp.reporting.law import Law
from gptexp.reporting.noise import CONFIDENCE, t_quantile

SIZES = {"model.n_embd": ("model.n_head",), "model.n_layer": ()}  # size of a model -> keys that may change with it


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% interval."""

    value: float
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Limit:
    """The batch size in tokens at which an arm falls behind. None: not up to `largest`, or not known that it does."""

    tokens: float | None
    low: float | None  # 95% interval
    high: float | None
    largest: int  # batch size with an optimum that has an interval


@dataclass(frozen=True)
class Transfer:
    """How the best learning rate changes with a size of the model, at one batch size."""

    key: str  # of the config: the size
    label: str  # of the arms, without the size; empty if there are no others
    batch: int  # tokens
    optima: dict[int, Optimum]  # size -> optimum
    factor: Interval  # of the best learning rate, from the smallest to the largest size


def exponent_gap(one: Law, other: Law, pairs: int = 1) -> Interval:
    """The exponent of `one` minus that of `other`, with an interval that holds all of `pairs` differences in 95%.

    If the pair was chosen among several, its interval is wider by Bonferroni's correction.
    """
    gap = one.exponent - other.exponent
    wider = special.ndtri(1 - (1 - CONFIDENCE) / (2 * pairs)) / special.ndtri((1 + CONFIDENCE) / 2)
    half = float(wider) * math.hypot(*((law.high - law.low) / 2 for law in (one, other)))
    return Interval(gap, gap - half, gap + half)


def clearest_gap(laws: Sequence[Law]) -> tuple[int, int, Interval]:
    """The numbers of the two of `laws` whose exponents differ most significantly, and their `exponent_gap`.

    Not those that differ most: their exponents may be known the least.
    """
    pairs = list(combinations(range(len(laws)), 2))
    gaps = {(one, other): exponent_gap(laws[one], laws[other], len(pairs)) for one, other in pairs}
    one, other = max(gaps, key=lambda pair: abs(gaps[pair].value) / (gaps[pair].high - gaps[pair].low))
    return one, other, gaps[one, other]


def falls_behind(optima: Mapping[int, Optimum], nats: float) -> Limit | None:
    """The batch size from which on the loss at the optimum is `nats` above the lowest at smaller batch sizes.

    Between two batch sizes it is interpolated over the logarithm; its interval follows from those of the losses. None
    with fewer than two optima.
    """
    sizes = sorted(optima)
    if len(sizes) < 2:
        return None
    gaps, halves = [], []
    for number, size in enumerate(sizes):
        base = min(sizes[: number + 1], key=lambda s: optima[s].loss)
        gap, half = (0.0, 0.0) if base == size else optima[size].above(optima[base])
        gaps.append(gap)
        halves.append(half)
    low = _crossing(sizes, [gap + half for gap, half in zip(gaps, halves, strict=True)], nats)
    high = _crossing(sizes, [gap - half for gap, half in zip(gaps, halves, strict=True)], nats)
    return Limit(_crossing(sizes, gaps, nats), low, high, sizes[-1])


def _crossing(sizes: Sequence[int], gaps: Sequence[float], nats: float) -> float | None:
    """Where `gaps`, which begin at 0, first reach `nats`."""
    for (size, gap), (next_size, next_gap) in pairwise(zip(sizes, gaps, strict=True)):
        if gap < nats <= next_gap:
            return float(size * (next_size / size) ** ((nats - gap) / (next_gap - gap)))
    return None


def transfers(arms: Sequence[Arm]) -> list[Transfer]:
    """For each size in which the arms differ, and all arms that are alike otherwise, how their optima change with it.

    At each batch size at which two or more of these arms have an optimum with an interval.
    """
    found = []
    for key, tied in SIZES.items():
        groups: dict[str, list[Arm]] = {}
        for arm in arms:
            if key in arm.choices:
                groups.setdefault(repr(_without(arm.choices, key, *tied)), []).append(arm)
        for members in groups.values():
            label = label_of(_without(members[0].choices, key, *tied), members[0].implied, members[0].runs[0])
            for batch in sorted({batch for arm in members for batch in arm.curves.optima}):
                by_size = {a.choices[key]: a for a in members if batch in a.curves.optima}
                if len(by_size) > 1:
                    found.append(_transfer(key, label, batch, dict(sorted(by_size.items()))))
    return found


def _without(choices: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in choices.items() if key not in keys}


def _transfer(key: str, label: str, batch: int, by_size: Mapping[int, Arm]) -> Transfer:
    optima = {size: arm.curves.optima[batch] for size, arm in by_size.items()}
    first, *_, last = by_size
    octaves = math.log2(optima[last].lr / optima[first].lr)
    sd = math.hypot(*(optima[size].sd_octaves or 0.0 for size in (first, last)))
    half = t_quantile(min(by_size[size].curves.noises[batch].dof for size in (first, last))) * sd
    factor = Interval(2.0**octaves, 2.0 ** (octaves - half), 2.0 ** (octaves + half))
    return Transfer(key, label, batch, optima, factor)
