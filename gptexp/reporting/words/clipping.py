"""Whether clipping of gradients may have a part in how the best learning rate depends on the batch size."""

from collections.abc import Iterator
from statistics import fmean

from gptexp.reporting.listings.records import Run
from gptexp.reporting.statistics.analysis import Arm
from gptexp.reporting.words.finding import Finding

USUALLY_CLIPPED = 0.5  # share of clipped steps above which the usual step is a clipped one
NEARLY_ALWAYS = 0.9  # from which the norm of the gradients has nearly no effect; alerts of runs begin there too
DIFFERENT_SHARES = 0.25  # difference of two shares; five standard errors of a share of a hundred steps


def share_clipped(run: Run) -> float | None:
    """The share of the steps after the warm-up that were clipped; None without a logged step."""
    shares = [s.clip_fraction for s in run.train if s.tokens > run.warmup_tokens and s.clip_fraction is not None]
    return fmean(shares) if shares else None


def clipping_in_words(arm: Arm) -> Iterator[Finding]:
    """Yield a caveat if most steps are clipped at the smallest or the largest batch size, and not as many at the other.

    Or nearly all at both. The squared norm of a gradient is |G|² + tr S / B on average, so small batches are clipped
    more often: part of what looks like an effect of the batch size may be one of clipping.
    """
    shares = {}
    for batch, runs in arm.at_best_lr.items():
        of_runs = [share for run in runs if (share := share_clipped(run)) is not None]
        if of_runs:
            shares[batch] = fmean(of_runs)
    if len(shares) < 2:
        return
    small, large = min(shares), max(shares)
    low, high = sorted((shares[small], shares[large]))
    if low >= NEARLY_ALWAYS:
        means = "The updates come from gradients of nearly equal norm, and the best learning rates belong to these."
    elif high > USUALLY_CLIPPED and high - low >= DIFFERENT_SHARES:
        means = "Clipping changes with the batch size, and may have a part in how the best learning rate does."
    else:
        return
    yield Finding(
        f"At the best learning rates {shares[small]:.0%} of the steps after the warm-up are clipped at {small:,} "
        f"tokens a step and {shares[large]:.0%} at {large:,}.",
        f"{means} Compare with an arm that has optim.grad_clip=0, which clips nothing.",
    )
