"""What the losses at one batch size say before anything is fitted: where they fall, and whether a lowest point is
enclosed by worse ones. A cell that no curve through its neighbours explains is named.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from gptexp.reporting.noise import LEVEL, Losses, Noise, f_tail, t_quantile, within_cells

CLEAR = 5.0  # standard deviations of a run: a larger difference is clear, even if the deviation is only a usual one
NEVER_FLAT = 1.0  # nats: learning rates that differ by so much are not flat, whatever the noise
TREND = 5  # losses that fall, or rise, all the way: noise orders five of them in one of 60 sweeps
# Of two possible outliers one is named if leaving it out leaves less than this share of the roughness that leaving out
# the other leaves.
DECISIVE = 0.5

Status = Literal["bracketed", "not bracketed", "flat", "too few", "jagged"]


@dataclass(frozen=True)
class Points:
    """Mean final losses by rising learning rate, and the noise that judges their differences."""

    lrs: tuple[float, ...]
    means: tuple[float, ...]
    counts: tuple[int, ...]  # runs
    noise: Noise | None
    usual: float  # standard deviation over seeds that such runs have had, in nats

    @property
    def sure_noise(self) -> Noise | None:
        """The noise, if enough seeds have measured it."""
        return self.noise if self.noise is not None and self.noise.is_sure else None

    @property
    def sigma(self) -> float:
        """The standard deviation that decides what is clear: measured, unless from too few seeds."""
        if self.sure_noise is not None:
            return self.sure_noise.sigma
        return self.usual if self.noise is None else max(self.noise.sigma, self.usual)

    @property
    def best(self) -> int:
        """The index of the lowest mean."""
        return min(range(len(self.means)), key=lambda i: self.means[i])

    @property
    def height(self) -> float:
        """The difference between the highest and the lowest mean, in nats."""
        return max(self.means) - min(self.means)

    def clear_margin(self, i: int, j: int) -> float:
        """A difference between two means that is clear without a test: five standard deviations of single runs."""
        return CLEAR * self.sigma * math.sqrt((1 / self.counts[i] + 1 / self.counts[j]) / 2)

    def is_worse(self, i: int, j: int) -> bool:
        """Whether point `i` is worse than point `j`: by a t-test, or clearly if too few seeds measure the noise."""
        margin = self.clear_margin(i, j)
        if (noise := self.sure_noise) is not None:
            margin = noise.t * noise.sigma * math.sqrt(1 / self.counts[i] + 1 / self.counts[j])
        return self.means[i] - self.means[j] > margin

    def without(self, i: int) -> "Points":
        """The points but for point `i`."""
        return self._only([j for j in range(len(self.lrs)) if j != i])

    def below(self, limit: float) -> "Points":
        """The points at learning rates below `limit`."""
        return self._only([j for j, lr in enumerate(self.lrs) if lr < limit])

    def _only(self, kept: Sequence[int]) -> "Points":
        return replace(
            self,
            lrs=tuple(self.lrs[j] for j in kept),
            means=tuple(self.means[j] for j in kept),
            counts=tuple(self.counts[j] for j in kept),
        )


@dataclass(frozen=True)
class Shape:
    """What the points say."""

    status: Status
    below: float | None = None  # the nearest learning rate below the best one that is worse
    above: float | None = None  # the nearest above

    @property
    def bracket(self) -> tuple[float, float] | None:
        """The learning rates between which the minimum lies, if worse ones enclose it."""
        if self.status != "bracketed" or self.below is None or self.above is None:
            return None
        return self.below, self.above


def points_of(losses: Losses, noise: Noise | None, usual: float) -> Points:
    lrs = tuple(sorted(losses))
    means = tuple(float(np.mean(losses[lr])) for lr in lrs)
    return Points(lrs, means, tuple(len(losses[lr]) for lr in lrs), noise, usual)


def shape_of(points: Points) -> Shape:
    """Judge points without outliers."""
    if len(points.lrs) < 3:
        return Shape("too few")
    if _is_flat(points):
        return _trend(points) or Shape("flat")
    if not _has_one_minimum(points):
        return Shape("jagged")
    best = points.best
    worse = [i for i in range(len(points.lrs)) if points.is_worse(i, best)]
    below = max((points.lrs[i] for i in worse if i < best), default=None)
    above = min((points.lrs[i] for i in worse if i > best), default=None)
    if below is None and above is None and points.height < NEVER_FLAT:
        return Shape("flat")
    return Shape("not bracketed" if below is None or above is None else "bracketed", below, above)


def _trend(points: Points) -> Shape | None:
    """Not bracketed, if the losses fall or rise all the way; else None."""
    if len(points.means) < TREND:
        return None
    if all(left > right for left, right in pairwise(points.means)):
        return Shape("not bracketed", below=points.lrs[0])
    if all(left < right for left, right in pairwise(points.means)):
        return Shape("not bracketed", above=points.lrs[-1])
    return None


def _is_flat(points: Points) -> bool:
    """One-way analysis of variance; without a sure noise, whether any two points clearly differ."""
    best = points.best
    worst = max(range(len(points.means)), key=lambda i: points.means[i])
    if points.height >= NEVER_FLAT:
        return False
    if (noise := points.sure_noise) is None:
        return points.height <= points.clear_margin(worst, best)
    means, counts, dof = np.array(points.means), np.array(points.counts), len(points.means) - 1
    between = float(np.sum(counts * (means - np.average(means, weights=counts)) ** 2)) / dof
    return f_tail(between / noise.sigma**2, dof, noise.dof) > LEVEL


def _has_one_minimum(points: Points) -> bool:
    """Whether the loss falls up to the best point, and from there never comes back down more than half of its rise.

    Far above the best learning rate training is unstable, and smaller ups and downs mean little.
    """
    best, means = points.best, points.means
    for j in range(1, best):
        i = min(range(j), key=lambda i: means[i])
        if means[j] - means[i] > points.clear_margin(i, j):
            return False
    for k in range(best + 2, len(means)):
        j = max(range(best + 1, k), key=lambda j: means[j])
        if means[j] - means[k] > max(points.clear_margin(j, k), means[k] - means[best]):
            return False
    return True


def outlier(points: Points) -> float | None:
    """The learning rate of the one point without which the others make a curve; None if there is none, or several.

    Only a cell of a single run can be an outlier: several seeds that agree are a finding.
    """
    if len(points.lrs) < 4:
        return None
    if _has_one_minimum(points):
        is_alone = points.counts[points.best] == 1
        return points.lrs[points.best] if is_alone and (_is_a_spike(points) or _falls_too_far(points)) else None
    candidates = []
    for i in range(len(points.lrs)):
        rest = points.without(i)
        if points.counts[i] == 1 and _has_one_minimum(rest):
            candidates.append((_roughness(rest), i))
    candidates.sort()
    if not candidates:
        return None
    if len(candidates) > 1 and candidates[0][0] > DECISIVE * candidates[1][0] - 1e-12:
        return None
    return points.lrs[candidates[0][1]]


def _is_a_spike(points: Points) -> bool:
    """Whether the lowest point lies clearly below the lines through its neighbours, where no convex curve passes."""
    best, means = points.best, points.means
    if not 2 <= best <= len(means) - 3:
        return False
    x = [math.log2(lr) for lr in points.lrs]
    depths = []
    for side in (-1, 1):
        near, far = best + side, best + 2 * side
        line = means[near] + (means[near] - means[far]) * (x[best] - x[near]) / (x[near] - x[far])
        depths.append(line - means[best])
    around = [means[i] for i in range(best - 2, best + 3) if i != best]
    return min(depths) > max(points.clear_margin(best, best), (max(around) - min(around)) / 2)


def _falls_too_far(points: Points) -> bool:
    """Whether the loss drops to the lowest point by far more than the slowing fall towards it explains.

    Above the lowest point, where training may be unstable, the losses must fall towards it all the way.
    """
    best, means = points.best, points.means
    x = [math.log2(lr) for lr in points.lrs]
    for side in (-1, 1):
        if not 0 <= best + 3 * side < len(means):
            continue
        near, far, farther = (best + n * side for n in (1, 2, 3))
        slope, earlier = ((means[j] - means[i]) / abs(x[j] - x[i]) for i, j in ((near, far), (far, farther)))
        expected = max(0.0, slope) * abs(x[near] - x[best])
        depth = means[near] - means[best] - expected
        is_slowing = slope <= earlier and (side < 0 or slope >= 0)
        if is_slowing and depth > max(points.clear_margin(best, best), 2 * expected):
            return True
    return False


def _roughness(points: Points) -> float:
    """How far the points lie from the chords of their neighbours, in sum."""
    x, means, total = np.log2(points.lrs), points.means, 0.0
    for i in range(1, len(means) - 1):
        share = (x[i] - x[i - 1]) / (x[i + 1] - x[i - 1])
        total += abs(means[i] - means[i - 1] - share * (means[i + 1] - means[i - 1]))
    return total


def outlying_seed(losses: Losses, usual: float) -> tuple[float, float] | None:
    """The run whose loss is far from that of the other seeds of its cell: (learning rate, loss), or None.

    Far is five standard deviations of the other runs over their seeds, and of the `usual` ones. Of two seeds, the one
    that is farther from the median of all runs counts.
    """
    median = float(np.median([loss for of_seeds in losses.values() for loss in of_seeds]))
    all_squares, all_dof = within_cells(losses.values())
    found: list[tuple[float, float, float, float]] = []
    for lr, of_seeds in losses.items():
        squares_here, _ = within_cells([of_seeds])
        for number, loss in enumerate(of_seeds):
            others = [*of_seeds[:number], *of_seeds[number + 1 :]]
            if not others or all_dof == 1:
                continue
            squares = max(0.0, all_squares - squares_here + within_cells([others])[0])
            sigma = max(math.sqrt(squares / (all_dof - 1)), usual) * math.sqrt(1 + 1 / len(others))
            distance = abs(loss - float(np.mean(others))) / sigma
            if distance > max(CLEAR, t_quantile(all_dof - 1)):
                found.append((round(distance, 6), abs(loss - median), lr, loss))
    return max(found)[2:] if found else None
