"""The gradient noise scale that a run ended with, and how well it is known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gptexp.noise_scale import Norms
from gptexp.report.noise import t_quantile
from gptexp.report.records import Run

END = 0.2  # of a run: it grows all the while
BLOCKS = 10  # neighbouring steps are not independent; blocks of them nearly are
FACTOR = 3.0  # two batch sizes closer than this agree


@dataclass(frozen=True)
class EndScale:
    """In tokens, with its 95% interval; without an upper end where the signal may be zero."""

    tokens: float
    low: float
    high: float | None


def end_scale(norms: Sequence[Norms], seq_len: int) -> EndScale | None:
    """From the measured steps of a run's end: mean noise over mean signal. None where too few, or no signal, show."""
    if len(norms) < BLOCKS:
        return None
    blocks = np.array_split(np.array([(n.noise(), n.signal()) for n in norms]), BLOCKS)
    means = np.array([block.mean(axis=0) for block in blocks])
    noise, signal = means.mean(axis=0)
    if min(noise, signal) <= 0:
        return None
    low, high = ratio_interval(means[:, 0], means[:, 1])
    return EndScale(float(noise / signal) * seq_len, low * seq_len, None if high is None else high * seq_len)


def at_the_end(run: Run) -> EndScale | None:
    """`end_scale` of what a run has measured so far."""
    last = run.train[-1].tokens if run.train else 0
    return end_scale([s.norms for s in run.train if s.norms and s.tokens > (1 - END) * last], run.seq_len)


def ratio_interval(above: np.ndarray, below: np.ndarray) -> tuple[float, float | None]:
    """Fieller's 95% interval of the ratio of two positive means, from pairs: each r at which above - r below may be 0.

    From 0 where the lower end is negative; None for an upper end that is infinite.
    """
    n = len(above)
    variances = np.cov(above, below)
    q = t_quantile(n - 1) ** 2 / n
    a = float(below.mean() ** 2 - q * variances[1, 1])
    b = float(above.mean() * below.mean() - q * variances[0, 1])
    c = float(above.mean() ** 2 - q * variances[0, 0])
    root = math.sqrt(max(0.0, b * b - a * c))
    if a <= 0:
        return ((b - root) / a if a < 0 < c else 0.0), None
    return max(0.0, (b - root) / a), (b + root) / a
