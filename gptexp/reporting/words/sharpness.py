"""What measured sharpness shows: during training against AdamW's threshold, at the end against the batch size."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

import numpy as np

from gptexp.process.words import counted
from gptexp.reporting.listings.records import Run, Sharpness
from gptexp.reporting.statistics.analysis import Arm
from gptexp.reporting.statistics.arms import Interval
from gptexp.reporting.statistics.noise import t_quantile
from gptexp.reporting.words.finding import Finding, interval_of, tokens

COMPARED_FROM = 0.5  # share of the training after which measurements are compared with the threshold
CLOSE = 1.25  # a sharpness lies at its threshold if their ratio, or its inverse, is at most this


def at_the_end(run: Run) -> Sharpness | None:
    """The sharpness of the final weights; None if it was not measured."""
    last = run.sharpness[-1] if run.sharpness else None
    return last if last is not None and run.status == "completed" and last.step == run.summary.get("steps") else None


def at_best_lr(arm: Arm) -> dict[int, list[tuple[Run, Sharpness]]]:
    """Batch size -> the runs at its best learning rate, with their final sharpness; those without one are left out."""
    by_batch = {batch: [(run, last) for run in runs if (last := at_the_end(run)) is not None]
                for batch, runs in arm.at_best_lr.items()}  # fmt: skip
    return {batch: measured for batch, measured in by_batch.items() if measured}


def trend(values: Sequence[tuple[int, float]]) -> Interval | None:
    """The exponent of a power law through (batch size, sharpness) of single runs, by least squares of the logarithms.

    None with fewer than three runs, or a single batch size.
    """
    x, y = (np.log2([pair[i] for pair in values]) for i in (0, 1))
    if len(values) < 3 or np.ptp(x) == 0:
        return None
    x = x - x.mean()
    exponent = float(x @ y / (x @ x))
    residuals = y - y.mean() - exponent * x
    dof = len(values) - 2
    half = t_quantile(dof) * math.sqrt(float(residuals @ residuals) / dof / float(x @ x))
    return Interval(exponent, exponent - half, exponent + half)


def share_of_threshold(run: Run) -> float | None:
    """The median ratio of the preconditioned sharpness to its threshold, over the later measurements of a run."""
    last = run.sharpness[-1].tokens if run.sharpness else 0
    later = [(s.preconditioned, s.threshold) for s in run.sharpness if s.tokens > COMPARED_FROM * last]
    shares = [value / limit for value, limit in later if value is not None and limit is not None and limit > 0]
    return median(shares) if shares else None


def sharpness_in_words(arm: Arm) -> Iterator[Finding]:
    """Yield the findings on the runs at the best learning rates, or on the only run."""
    measured = at_best_lr(arm)
    if len(arm.runs) == 1:
        yield from _against_threshold(arm.runs, "")
    else:
        runs = [run for members in measured.values() for run, _ in members]
        yield from _against_threshold(runs, " of the runs at the best learning rate of their batch size")
    yield from _over_batch_sizes(measured)


def _against_threshold(runs: Sequence[Run], whose: str) -> Iterator[Finding]:
    shares = [share for run in runs if (share := share_of_threshold(run)) is not None]
    if not shares:
        return
    low, high = min(shares), max(shares)
    where = "at its threshold in some runs only"
    if low >= 1 / CLOSE and high <= CLOSE:
        where = "at its threshold"
    elif high < 1 / CLOSE:
        where = "below its threshold"
    elif low > CLOSE:
        where = "above its threshold"
    times = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
    yield Finding(
        f"Over the second half of training the preconditioned sharpness{whose} lies {where}: it is {times} times that.",
        "Above the threshold AdamW is unstable, at the learning rate of the step (arXiv 2207.14484).",
    )


def _over_batch_sizes(measured: Mapping[int, Sequence[tuple[Run, Sharpness]]]) -> Iterator[Finding]:
    values = {batch: [last.hessian for _, last in members if last.hessian is not None and last.hessian > 0]
              for batch, members in sorted(measured.items())}  # fmt: skip
    values = {batch: known for batch, known in values.items() if known}
    if len(values) < 2:
        return
    (small, *_, large), means = values, {batch: fmean(known) for batch, known in values.items()}
    subject = "Plain sharpness at the end of training, at the best learning rate of each batch size,"
    ends = f"from {means[small]:.4g} at {tokens(small)} to {means[large]:.4g} at {large:,}"
    runs = [(batch, value) for batch, known in values.items() for value in known]
    exponent = trend(runs)
    if exponent is None:
        why = "Two runs say nothing of how much of this is chance: add seeds, or a third batch size."
        yield Finding(f"{subject} goes {ends}.", why)
        return
    verb = "rises" if exponent.low > 0 else "falls" if exponent.high < 0 else "does not rise significantly"
    yield Finding(
        f"{subject} {verb} with the batch size in this sweep: {ends}.",
        f"It is proportional to the batch size to the power {exponent.value:.2f} "
        f"({interval_of(exponent.low, exponent.high)}, {counted(len(runs), 'run')}).",
    )
