"""The gradient noise scale at the end of a run, with its confidence interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gptexp.config.noise_scale import Norms
from gptexp.reporting.listings.records import Run, Step
from gptexp.reporting.statistics.noise import t_quantile

END_RATIO = 0.2  # only this last part of a run counts, because the noise scale grows during training
BLOCKS = 10  # neighbouring steps are correlated; means over blocks of steps are nearly independent
FACTOR = 3.0  # two batch sizes agree if their ratio is smaller


@dataclass(frozen=True)
class EndScale:
    """The noise scale in tokens, with its 95% interval."""

    tokens: float
    low: float
    high: float | None  # None: unbounded, because the signal may be zero


def end_scale(norms: Sequence[Norms], seq_len: int) -> EndScale | None:
    """The mean noise divided by the mean signal of the measured steps.

    Returns None with fewer than `BLOCKS` steps, or if either mean is not positive.
    """
    if len(norms) < BLOCKS:
        return None
    blocks = np.array_split(np.array([(n.noise(), n.signal()) for n in norms]), BLOCKS)
    means = np.array([block.mean(axis=0) for block in blocks])
    noise, signal = means.mean(axis=0)
    if min(noise, signal) <= 0:
        return None
    low, high = ratio_interval(means[:, 0], means[:, 1])
    return EndScale(float(noise / signal) * seq_len, low * seq_len, None if high is None else high * seq_len)


def lowest_measured(runs: Sequence[Run]) -> Run | None:
    """The run with the lowest final loss among those that measured the noise scale; None if no run did.

    Runs with steps of one sequence cannot measure it. If no run has a final loss, the result is a run without one.
    """
    measured = [run for run in runs if any(step.noise_scale is not None for step in run.train)]
    return min(measured, key=lambda run: (run.loss is None, run.loss or 0.0), default=None)


def at_the_end(run: Run) -> EndScale | None:
    """`end_scale` of the last steps that the run has logged."""
    return end_scale([step.norms for step in _last_steps(run) if step.norms], run.seq_len)


def _last_steps(run: Run) -> list[Step]:
    last = run.train[-1].tokens if run.train else 0
    return [step for step in run.train if step.tokens > (1 - END_RATIO) * last]


def in_words(run: Run, whose: str = "") -> str:
    """The sentence about the noise scale of `run` in reports and at the end of the run."""
    scale = at_the_end(run)
    if scale is None:
        return f"The gradient noise scale{whose} cannot be estimated from the logged steps: train for longer."
    interval = f"{scale.low:,.0f} to {scale.high:,.0f}" if scale.high else f"{scale.low:,.0f} or more"
    sizes = sorted({step.batch for step in _last_steps(run)})
    size = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,} there"
    return (
        f"Over the last fifth of training the gradient noise scale{whose} is {scale.tokens:,.0f} tokens (95% interval "
        f"{interval}); a step has {size}."
    )


def ratio_interval(above: np.ndarray, below: np.ndarray) -> tuple[float, float | None]:
    """Fieller's 95% interval of the ratio of two positive means, from paired samples.

    It holds each ratio r for which mean(above - r below) does not differ significantly from 0. A negative lower end
    becomes 0; the upper end is None if it is infinite.
    """
    n = len(above)
    variances = np.cov(above, below)
    q = t_quantile(n - 1) ** 2 / n
    # The ends are the roots of a r^2 - 2 b r + c.
    a = float(below.mean() ** 2 - q * variances[1, 1])
    b = float(above.mean() * below.mean() - q * variances[0, 1])
    c = float(above.mean() ** 2 - q * variances[0, 0])
    root = math.sqrt(max(0.0, b * b - a * c))
    if a <= 0:
        return ((b - root) / a if a < 0 < c else 0.0), None
    return max(0.0, (b - root) / a), (b + root) / a
