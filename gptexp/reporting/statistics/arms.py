"""Arms of a sweep side by side: their laws, the batch sizes up to which each keeps its loss, and sizes of a model.

An arm has one optimum for each batch size. Here the bracketed optima of different arms are compared.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from scipy import special

from gptexp.reporting.statistics.analysis import Arm, label_of
from gptexp.reporting.statistics.curves import Curves, Optimum
from gptexp.reporting.statistics.forms import Array
from gptexp.reporting.statistics.law import fit_ratio, independent_difference
from gptexp.reporting.statistics.likelihood import SMALLEST_SIGMA
from gptexp.reporting.statistics.noise import CONFIDENCE
from gptexp.reporting.statistics.posterior import interval, middle

SIZES = {"model.n_embd": ("model.n_head",), "model.n_layer": ()}  # size of a model -> keys that may change with it

# Losses count as equal above this p-value. In simulations of flat and of rising losses, others biased `Limit` more.
EQUAL_P = 0.3
QUANTILE = float(special.ndtri((1 + CONFIDENCE) / 2))  # half of a 95% interval in standard errors


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
    """The batch size in tokens at which an arm falls behind; None: not up to `largest`."""

    tokens: float | None
    low: float | None  # 95% interval; an end is None if it lies above `largest`
    high: float | None
    largest: int  # batch size at which the arm has an optimum


@dataclass(frozen=True)
class Transfer:
    """How the best learning rate changes with a size of the model, at one batch size."""

    key: str  # of the config: the size
    label: str  # of the arms, without the size; empty if nothing else tells them from other arms
    batch: int  # tokens
    optima: dict[int, Optimum]  # size -> optimum
    factor: Interval  # of the best learning rate, from the smallest to the largest size


def clearest_gap(arms: Sequence[Mapping[int, Array]]) -> tuple[int, int, Interval] | None:
    """The two arms, by number, whose exponents differ most significantly, and the difference.

    Arms are given by the draws of their optima, see `law.fit_law`.

    These need not be the arms that differ most, whose exponents may be known the least. As the pair is chosen among
    several, its interval is wider by Bonferroni's correction. None if no two arms have two batch sizes in common.
    """
    pairs = list(combinations(range(len(arms)), 2))
    gaps = {}
    for one, other in pairs:
        if (ratio := fit_ratio(arms[one], arms[other])) is not None:
            low, high = interval(ratio.lines[:, 0], 1 - (1 - CONFIDENCE) / len(pairs))
            gaps[one, other] = Interval(ratio.exponent, min(low, ratio.low), max(high, ratio.high))
    clearest = max(gaps, key=lambda pair: abs(gaps[pair].value) / (gaps[pair].high - gaps[pair].low), default=None)
    return (*clearest, gaps[clearest]) if clearest is not None else None


def falls_behind(losses: Mapping[int, Array], nats: float) -> Limit | None:
    """The first batch size at which the loss at the optimum is `nats` above the `_lowest` loss at smaller ones.

    `losses`: batch size -> joint draws. Between two batch sizes the loss is interpolated over their logarithm. The
    interval of the result follows from those of the losses. None with fewer than two batch sizes.
    """
    sizes = sorted(losses)
    if len(sizes) < 2:
        return None
    segments = []
    for number, ends in enumerate(pairwise(sizes), 1):
        lowest, base = _lowest([losses[size] for size in sizes[:number]])
        gaps = [(size, float(np.median(losses[size])) - base, middle(losses[size] - lowest)[1]) for size in ends]
        segments.append(gaps)
    tokens, low, high = (_crossing(segments, nats, sign) for sign in (0, 1, -1))
    return Limit(tokens, low, high, sizes[-1])


def _lowest(draws: Sequence[Array]) -> tuple[Array, float]:
    """Draws of the lowest loss, and the mean of the losses that may be equal to it, weighted by precision.

    The lowest of several equal losses is too low by chance. So the next higher ones are averaged with it, as long as a
    chi-squared test takes them all for equal (p-value above `EQUAL_P`). Because the losses decide which ones are
    averaged, the mean counts as no more certain than the lowest loss alone.
    """
    rising = sorted(draws, key=lambda loss: float(np.median(loss)))
    losses, half_widths = np.transpose([middle(loss) for loss in rising])
    sds = np.maximum(half_widths / QUANTILE, SMALLEST_SIGMA)
    base = losses[0]
    for count in range(2, len(losses) + 1):
        mean = np.average(losses[:count], weights=sds[:count] ** -2)
        if special.chdtrc(count - 1, np.sum(((losses[:count] - mean) / sds[:count]) ** 2)) <= EQUAL_P:
            break
        base = mean
    return rising[0], float(base)


def _crossing(segments: Iterable[Sequence[tuple[int, float, float]]], nats: float, sign: int) -> float | None:
    """The batch size at which a gap plus `sign` times half of its interval first reaches `nats`.

    `segments`: two neighbouring batch sizes each, as (size, gap, half of the gap's interval).
    """
    for (size, *start), (next_size, *end) in segments:
        gap, next_gap = (value + sign * half for value, half in (start, end))
        if next_gap >= nats:
            share = (nats - gap) / (next_gap - gap) if gap < nats else 0.0
            return float(size * (next_size / size) ** share)
    return None


def transfers(arms: Sequence[Arm]) -> list[Transfer]:
    """How the optima change with each size of the model in which arms differ, among arms that are otherwise alike.

    There is one result for each batch size at which two or more of these arms have a bracketed optimum.
    """
    transfers = []
    for key, tied in SIZES.items():
        groups: dict[str, list[tuple[Any, str, Curves]]] = {}  # choices without the size -> size, label, curves
        for arm in arms:
            if key in arm.choices:
                others = {other: value for other, value in arm.choices.items() if other not in (key, *tied)}
                label = label_of(others, arm.implied, arm.runs[0])
                groups.setdefault(repr(others), []).append((arm.choices[key], label, arm.curves))
        for members in groups.values():
            for batch in sorted({batch for *_, curves in members for batch in curves.optima}):
                by_size = {size: curves for size, _, curves in members if batch in curves.optima}
                if len(by_size) > 1:
                    transfers.append(_transfer(key, members[0][1], batch, dict(sorted(by_size.items()))))
    return transfers


def _transfer(key: str, label: str, batch: int, by_size: Mapping[int, Curves]) -> Transfer:
    first, *_, last = (curves.octaves[batch] for curves in by_size.values())
    octaves = independent_difference(last, first)
    low, high = interval(octaves)
    factor = Interval(2.0 ** float(np.median(octaves)), 2.0**low, 2.0**high)
    return Transfer(key, label, batch, {size: curves.optima[batch] for size, curves in by_size.items()}, factor)
