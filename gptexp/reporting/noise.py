"""How much one run's final loss varies over seeds: measured at each batch size, or usual for runs of a size and length.

Only seeds measure noise. What is left over by a fit to a few learning rates is misfit as much as noise.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special  # scipy.stats has the same functions under clearer names, but takes a second to import

CONFIDENCE = 0.95
LEVEL = 1 - CONFIDENCE  # of tests
POWER = 0.8
MIN_SIGMA = 1e-6  # nats; smaller differences are rounding errors of float32
SURE_DOF = 4  # degrees of freedom from which a noise is sure
NEAR = 2  # learning rates on each side of the best one whose seeds count
ON_THE_WALL = 1.0  # nats above the lowest mean, where training is unstable and seeds move far more than at the best
POOLED = 0.2  # p-value above which the noise of several batch sizes counts as equal

Losses = Mapping[float, Sequence[float]]  # learning rate -> the final loss of each seed, in nats per token

# Standard deviations over seeds, in nats: (parameters, training tokens, standard deviation).
USUAL_SPREADS = (
    # model=nano on `stdlib`: median over 50 cells of 3 seeds; over 26 others of 4, at high learning rates, it is 0.069.
    # Between 16,000 and 820,000 tokens it is 0.04 to 0.09, without a trend.
    (1.6e6, 1.6e4, 0.051),
    (7.2e6, 2.05e5, 0.026),  # 4 layers of width 128 on this package's `stdlib` corpus
    (1.24e8, 7e8, 0.005),  # modded-nanogpt, logs of 2024-11-19 at a loss of 3.28
    (1.24e8, 1.5e9, 0.002),  # modded-nanogpt, logs of 2025-01-16 to 2025-10
    (3.5e8, 3e9, 0.0007),  # modded-nanogpt, medium track, 19 runs
)
LARGEST_SPREAD = 0.12  # of shorter or smaller runs: root mean square of the same 50 cells


def usual_spread(parameters: float, tokens: float) -> float:
    """Return the standard deviation over seeds that runs of this size and length have had, in nats.

    Larger and longer runs usually vary less. So it is the smallest of the rows whose runs are no larger and no longer.
    """
    bounds = [sd for size, length, sd in USUAL_SPREADS if size <= parameters and length <= tokens]
    return min(bounds, default=LARGEST_SPREAD)


def t_quantile(dof: int) -> float:
    """Student's two-sided quantile at `CONFIDENCE`."""
    return float(special.stdtrit(dof, (1 + CONFIDENCE) / 2))


def f_tail(ratio: float, dof: int, dof_below: int) -> float:
    """P(F > `ratio`) for Fisher's F distribution with `dof` (numerator) and `dof_below` (denominator)."""
    return float(special.fdtrc(dof, dof_below, ratio))


@dataclass(frozen=True)
class Noise:
    """Standard deviation of one run's final loss over seeds, in nats, and the degrees of freedom of its estimate."""

    sigma: float
    dof: int
    batches: tuple[int, ...]  # batch sizes whose seeds it was estimated from, in tokens

    @property
    def is_sure(self) -> bool:
        """Whether enough seeds have measured it for a t-test to decide what is worse."""
        return self.dof >= SURE_DOF

    @property
    def t(self) -> float:
        """Student's two-sided quantile at `CONFIDENCE`."""
        return t_quantile(self.dof)


def ties(difference: float, one: Noise, n: int, other: Noise, m: int) -> bool:
    """Whether a t-test finds no significant `difference` between the means of `n` and of `m` runs."""
    return abs(difference) <= significant_from(one, n, other, m)


def significant_from(one: Noise, n: int, other: Noise, m: int) -> float:
    """The difference between the means of `n` and of `m` runs above which a t-test finds it significant, in nats.

    For unequal variances it takes the fewer degrees of freedom, so that it is rather too careful.
    """
    return t_quantile(min(one.dof, other.dof)) * math.sqrt(one.sigma**2 / n + other.sigma**2 / m)


def within_cells(cells: Iterable[Sequence[float]]) -> tuple[float, int]:
    """The sum of squared distances to the mean of each cell, and its degrees of freedom."""
    squares, dof = 0.0, 0
    for of_seeds in cells:
        squares += float(np.sum((np.asarray(of_seeds) - np.mean(of_seeds)) ** 2))
        dof += len(of_seeds) - 1
    return squares, dof


def _near_the_best(losses: Losses) -> list[Sequence[float]]:
    """The cells at the learning rates around the one with the lowest mean, without those on the wall."""
    lrs = sorted(losses)
    means = [float(np.mean(losses[lr])) for lr in lrs]
    best = means.index(min(means))
    near = range(max(0, best - NEAR), min(len(lrs), best + NEAR + 1))
    return [losses[lrs[i]] for i in near if means[i] - means[best] < ON_THE_WALL]


def measure(losses: Mapping[int, Losses]) -> dict[int, Noise]:
    """The noise of each batch size (tokens) at which a learning rate near the best one has two seeds.

    It is pooled over all of them if Bartlett's test (1937, Proc. R. Soc. A 160:268) finds no difference.
    """
    found: dict[int, Noise] = {}
    for batch, at_batch in losses.items():
        squares, dof = within_cells(_near_the_best(at_batch))
        if dof:
            found[batch] = Noise(max(MIN_SIGMA, math.sqrt(squares / dof)), dof, (batch,))
    if len(found) < 2 or _p_of_equal_variances(list(found.values())) < POOLED:
        return found
    dof = sum(noise.dof for noise in found.values())
    sigma = math.sqrt(sum(noise.dof * noise.sigma**2 for noise in found.values()) / dof)
    return dict.fromkeys(found, Noise(sigma, dof, tuple(found)))


def _p_of_equal_variances(groups: Sequence[Noise]) -> float:
    dof = sum(group.dof for group in groups)
    pooled = sum(group.dof * group.sigma**2 for group in groups) / dof
    statistic = dof * math.log(pooled) - sum(group.dof * math.log(group.sigma**2) for group in groups)
    correction = 1 + (sum(1 / group.dof for group in groups) - 1 / dof) / (3 * (len(groups) - 1))
    return float(special.chdtrc(len(groups) - 1, statistic / correction))


def seeds_needed(difference: float, sigma: float) -> int:
    """Seeds per cell that show a `difference` between two cells' mean losses with power 0.8 at the 5% level.

    Normal approximation: 2 (z_0.975 + z_0.8)^2 (sigma / difference)^2, rounded up.
    """
    z = float(special.ndtri((1 + CONFIDENCE) / 2) + special.ndtri(POWER))
    return max(1, math.ceil(2 * (z * sigma / difference) ** 2))
