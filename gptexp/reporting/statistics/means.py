"""Which configs have a higher mean loss than the config with the lowest, by more than seeds cause.

Each config is compared with the lowest mean by Welch's t-test (1947, Biometrika 34:28). The lowest of k means is low by
chance too. So the largest statistic is compared with its distribution for k configs of equal mean, in which the lowest
is chosen as well (Games and Howell 1976, J. Educ. Stat. 1:113; Dunnett's test is for a config named in advance). Of k
equal configs, any is then called different in 5% of cases. Once the largest statistic is significant, the next is
compared with the distribution for the configs that are left (step-down; Westfall and Young 1993).

The distribution is simulated, with random numbers from a fixed seed. A few seeds hardly measure the noise. So each draw
takes variances from their posterior and simulates their measurement: a parametric bootstrap (Krishnamoorthy, Lu and
Mathew 2007, CSDA 51:5731). The prior of the variances is scaled inverse chi-squared (Smyth 2004, SAGMB 3:3). Only
configs with equal numbers of seeds share a prior. Otherwise a quiet config with 8 seeds would decide the noise of one
with 2. tests/reporting/test_means.py has the rates of false positives.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gptexp.reporting.statistics.forms import Array
from gptexp.reporting.statistics.noise import CONFIDENCE, LEVEL, seeds_needed

DRAWS = 9_999  # so that a p-value is a multiple of 1 / 10,000
ALLOWED = 500  # a statistic is significant if fewer draws than this are as large; 5% of DRAWS + 1
MIN_VARIANCE = 1e-12  # nats^2; smaller differences are rounding errors of float32
PRIOR_DOF = 2  # degrees of freedom of the prior of the variances
SHARED_DOF = 0.5  # weight, in degrees of freedom, of the usual variance: two seeds that agree by chance decide less
MARGIN = 0.2  # fewer degrees of freedom in the simulation; without it, 2 and 3 seeds have up to 8% false positives


@dataclass(frozen=True)
class Contrast:
    """A config against the one with the lowest mean loss."""

    difference: float  # nats; zero for the lowest
    p: float  # corrected for choosing the lowest of all configs
    significant_from: float  # nats: the difference above which it is significant
    seeds_needed: int | None  # per config, to show `difference` with power 0.8; None if it is significant or zero

    @property
    def is_significant(self) -> bool:
        return self.p <= LEVEL


def against_lowest(losses: Sequence[Sequence[float]]) -> list[Contrast] | None:
    """Compare each config with the lowest mean. `losses`: for each config the final losses of its seeds, in nats.

    A config with one run is taken to vary as much as another one, chosen at random. None if no config has two runs.
    """
    counts = np.array(list(map(len, losses)))
    if counts.max(initial=0) < 2:
        return None
    means = np.array([math.fsum(seeds) / len(seeds) for seeds in losses])
    variances = np.array([np.var(sorted(seeds), ddof=min(1, len(seeds) - 1)) for seeds in losses])
    order = np.lexsort((variances, counts, means))  # so that the result does not depend on the order of the configs
    contrasts = _contrasts(counts[order], means[order], np.maximum(variances[order], MIN_VARIANCE))
    return [contrasts[place] for place in np.argsort(order)]


def worse_than_lowest(lowest: Array, others: Array) -> set[int]:
    """The indices of those `others` whose mean is significantly above `lowest`, by joint draws of a posterior.

    `lowest`: (draws,), `others`: (draws, configs). This is the same step-down test. Its null distribution
    comes from the draws minus their means: the largest statistic of each draw, against the lowest in that draw.
    """
    draws = np.column_stack([lowest, others])
    middle, spread = draws.mean(axis=0), np.cov(draws.T)
    variance = spread.diagonal()
    errors = np.sqrt(np.maximum(variance[:, None] + variance - 2 * spread, MIN_VARIANCE))
    scores, around = (middle - middle[0]) / errors[0], draws - middle
    left = np.arange(len(middle))
    while True:
        centred = around[:, left]
        lowest_at = centred.argmin(axis=1)
        gaps = centred - np.take_along_axis(centred, lowest_at[:, None], axis=1)
        limit = np.quantile(np.max(gaps / errors[left[lowest_at]][:, left], axis=1), CONFIDENCE)
        is_above = scores[left] > limit
        if not is_above.any():
            return {number for number in range(others.shape[1]) if number + 1 not in left}
        left = left[~is_above]


@dataclass(frozen=True)
class _Means:
    """Means, their squared standard errors, and the degrees of freedom of these: (draws, configs)."""

    means: Array
    squares: Array
    dof: Array

    def against_lowest(self, configs: Sequence[int]) -> tuple[Array, Array, Array]:
        """The distances to the lowest mean of each draw, their squared standard errors and degrees of freedom.

        The degrees of freedom are Welch's, but the error that fewer seeds measure counts more. Otherwise two seeds that
        agree by chance would hide how little is known.
        """
        mean, square, dof = (values[:, configs] for values in (self.means, self.squares, self.dof))
        lowest_at = np.argmin(mean, axis=1)[:, None]
        mean_0, square_0, dof_0 = (np.take_along_axis(values, lowest_at, axis=1) for values in (mean, square, dof))
        weight, weight_0 = square * (1 + 8 / dof), square_0 * (1 + 8 / dof_0)
        share = weight / (weight + weight_0)
        return mean - mean_0, square + square_0, 1 / (share**2 / dof + (1 - share) ** 2 / dof_0)

    def largest(self, configs: Sequence[int]) -> Array:
        """The largest score of each draw, in ascending order."""
        gaps, squares, dof = self.against_lowest(configs)
        return np.sort(np.max(_wallace(dof) * np.log1p(gaps**2 / squares / dof), axis=1))


def _wallace(dof: Array) -> Array:
    """The factor that turns log(1 + t^2 / dof) into z^2, with z normal and as unlikely as t (1959, AMS 30:1124)."""
    return dof * ((8 * dof + 1) / (8 * dof + 3)) ** 2


def _contrasts(counts: Array, means: Array, variances: Array) -> list[Contrast]:
    """The contrasts of configs, which are given in ascending order of their means."""
    rng, shape = np.random.default_rng(0), (DRAWS, len(counts))
    drawn, normal = _posterior(counts, variances, rng), rng.standard_normal(shape)
    fewer = np.maximum(counts - 1 - MARGIN, MARGIN)
    null = _measured(normal * np.sqrt(drawn / counts), drawn * rng.chisquare(fewer, shape) / fewer, counts)
    measured = _measured(means[None], variances[None], counts)
    gaps, squares, dof = (values[0] for values in measured.against_lowest(range(len(counts))))
    scores = _wallace(dof) * np.log1p(gaps**2 / squares / dof)
    contrasts, p = {0: Contrast(0.0, 1.0, 0.0, None)}, 0.0
    one_run = measured.squares[0] * counts  # variance of one run
    left = [0, *sorted(range(1, len(counts)), key=lambda config: scores[config])]
    while len(left) > 1:
        largest = null.largest(left)
        limit = largest[-ALLOWED]
        is_tie = scores[left[-1]] <= limit
        for config in left[:0:-1] if is_tie else left[-1:]:
            p = max(p, 1 - np.searchsorted(largest, scores[config]) / (DRAWS + 1))
            least = math.sqrt(squares[config] * dof[config] * math.expm1(limit / _wallace(dof[config])))
            needed, gap = None, float(gaps[config])
            if is_tie and gap > 0:
                needed = seeds_needed(gap, float(one_run[0] + one_run[config]), len(counts) - 1)
                needed = max(needed, 1 + int(min(counts[0], counts[config])))  # the seeds that there are do not show it
            contrasts[config] = Contrast(gap, float(p), least, needed)
        left = left[:1] if is_tie else left[:-1]
    return [contrasts[config] for config in range(len(counts))]


def _measured(means: Array, variances: Array, counts: Array) -> _Means:
    """The means, with the variances that the statistic uses. `means`, `variances`: (draws, configs)."""
    mixed, dof = variances.copy(), np.broadcast_to(counts - 1.0, variances.shape).copy()
    for count in {*counts}:
        group, share = counts == count, SHARED_DOF / (SHARED_DOF + count - 1)
        usual = np.exp(np.log(variances[:, group]).mean(axis=1, keepdims=True))
        mixed[:, group] += share * (usual - variances[:, group])
    weights = (counts - 1) * mixed
    total, alone = weights.sum(axis=1, keepdims=True), counts == 1
    mixed[:, alone] = total / (counts - 1).sum()
    dof[:, alone] = total**2 / np.sum(weights * mixed, axis=1, keepdims=True)
    return _Means(means, mixed / counts, dof)


def _posterior(counts: Array, variances: Array, rng: np.random.Generator) -> Array:
    """Draws of the variances: (draws, configs). The log of the prior's scale has a flat prior."""
    drawn = np.empty((DRAWS, len(counts)))
    for count in np.unique(counts[counts > 1]):
        group = counts == count
        squares = (count - 1) * variances[group]
        scales = variances[group].mean() * np.exp(np.linspace(-16, 16, 257))[:, None]
        power = (PRIOR_DOF + count - 1) / 2
        logs = np.sum(PRIOR_DOF / 2 * np.log(scales) - power * np.log(PRIOR_DOF * scales + squares), axis=1)
        weights = np.exp(logs - logs.max())
        scale = rng.choice(scales[:, 0], (DRAWS, 1), p=weights / weights.sum())
        drawn[:, group] = (PRIOR_DOF * scale + squares) / rng.chisquare(2 * power, (DRAWS, len(squares)))
    others = rng.choice(np.flatnonzero(counts > 1), (DRAWS, np.sum(counts == 1)))
    drawn[:, counts == 1] = np.take_along_axis(drawn, others, axis=1)
    return drawn
