"""The analysis in sentences. Each sentence follows from the intervals and tests alone."""

from collections.abc import Iterator
from statistics import fmean

from gptexp.config.metrics import Metric
from gptexp.process.terminal import printable
from gptexp.process.words import counted, listed
from gptexp.reporting.listings.records import Run
from gptexp.reporting.statistics.analysis import Analysis, Arm
from gptexp.reporting.statistics.law import SLOPES
from gptexp.reporting.statistics.noise import POWER, seeds_needed
from gptexp.reporting.statistics.noise_scale import FACTOR, at_the_end, in_words, lowest_measured
from gptexp.reporting.words.arms_in_words import arms_in_words
from gptexp.reporting.words.finding import (
    OF_LOWEST,
    Finding,
    Verdict,
    interval_of,
    nats_higher,
    seeds_in_words,
    sizes,
    tokens,
)
from gptexp.reporting.words.sharpness import sharpness_in_words
from gptexp.reporting.words.thresholds import BEHIND_NATS
from gptexp.storage import run_dir

CORRECTED = (
    "By the posterior of the curves, or by seeds that vary more than it allows; corrected for the number of cells."
)
USUALLY_CLIPPED = 0.5  # share of clipped steps above which the usual step is a clipped one
NEARLY_ALWAYS = 0.9  # from this share on, the norm of the gradients has nearly no effect; alerts begin there too
DIFFERENT_SHARES = 0.25  # difference of two shares; five standard errors of a share of a hundred steps


def verdict(analysis: Analysis, behind_nats: float = BEHIND_NATS) -> Verdict:
    """The findings: on the arms side by side, then arm by arm. `behind_nats`: see `arms.falls_behind`."""
    findings = [
        _labelled("", finding) for finding in (*_objective(analysis), *arms_in_words(analysis.arms, behind_nats))
    ]
    caveats = []
    for arm in analysis.arms:
        findings += [_labelled(arm.label, finding) for finding in _findings(arm)]
        caveats += [_labelled(arm.label, finding) for finding in _caveats(arm)]
    return Verdict([Finding(printable(f"Warning: {line}.")) for line in analysis.warnings], [], findings, caveats)


def _objective(analysis: Analysis) -> Iterator[Finding]:
    if (loss := analysis.objective) != Metric.VAL_LOSS:
        yield Finding(f"Every loss here is {loss}.")


def _labelled(label: str, finding: Finding) -> Finding:
    text = f"{label}: {finding.text}" if label else finding.text
    return Finding(printable(text), printable(finding.why))


def _findings(arm: Arm) -> Iterator[Finding]:
    for section in (_law, _best, _batch_sizes, _outliers, _diverged, _critical, sharpness_in_words):
        yield from section(arm)
    if len(arm.runs) == 1:
        yield from _noise_scale(arm)
        return
    for status in sorted({run.status for run in arm.runs} - {*run_dir.DONE}):
        count = sum(run.status == status for run in arm.runs)
        yield Finding(f"{status.capitalize()}: {counted(count, 'run')}; no fit or test uses their losses.")


def _caveats(arm: Arm) -> Iterator[Finding]:
    yield from _noise(arm)
    if len(arm.runs) > 1:
        yield from _noise_scale(arm)
    yield from _clipping(arm)
    schedule = arm.runs[0].config["schedule.name"]
    if len(arm.losses) > 1 and schedule != "constant":
        yield Finding(
            f"The learning rate decays (schedule={schedule}), so the loss in the middle of a run is not that of a "
            "shorter run: the critical batch size needs schedule=constant."
        )


def _law(arm: Arm) -> Iterator[Finding]:
    """The exponent, which of the usual rules it agrees with, and what limits the law."""
    law = arm.law
    if law is None:
        return
    admitted = [name for name, slope in SLOPES.items() if law.admits(slope)]
    refused = [name for name in SLOPES if name not in admitted]

    def rules(names: list[str]) -> str:
        texts = [f"'{name}' ({SLOPES[name]:g})" for name in names]
        return f"the rule{'s' if len(texts) > 1 else ''} {listed(texts)}"

    agrees = f"agrees with {rules(admitted)}" if admitted else "agrees with none of the usual rules"
    if not refused:
        agrees = f"is not known well enough to tell {rules(admitted)} apart"
    agrees += f" and not with {rules(refused)}" if admitted and refused else ""
    limits = {
        "Two points always lie on a line: a third batch size would test this law.": len(law.sizes) == 2,
        "The optima scatter around the fitted line more than their own intervals allow; the exponent's interval "
        "includes this scatter.": law.scatter,
        "In log-log the optima lie on a curve, not on a line: do not extrapolate this law.": law.bends,
    }
    yield Finding(
        f"The best learning rate is proportional to the batch size to the power {law.exponent:.2f} "
        f"({interval_of(law.low, law.high)}, {len(law.sizes)} batch sizes), which {agrees}.",
        " ".join(sentence for sentence, is_so in limits.items() if is_so),
    )


def _best(arm: Arm) -> Iterator[Finding]:
    """The cell with the lowest mean loss, and which others may be as good."""
    if arm.best is None or len(arm.means) < 2:
        return
    batch, lr = arm.best
    line = f"The lowest mean loss is that of learning rate {lr:.3g} at {tokens(batch)}"
    if not arm.curves.noise_is_known:
        yield Finding(f"{line}.")
    elif not arm.ties:
        yield Finding(f"{line}, and every other cell is significantly worse.", CORRECTED)
    else:
        cells = ", ".join(f"{lr:.3g} at {b:,}" for b, lr in sorted(arm.ties))
        others = f"{counted(len(arm.ties), 'other cell')} {'is' if len(arm.ties) == 1 else 'are'}"
        yield Finding(f"{line}; {others} not significantly worse.", f"Not significantly worse: {cells}. {CORRECTED}")


def _batch_sizes(arm: Arm) -> Iterator[Finding]:
    """The batch sizes against each other, each at its own best learning rate."""
    optima, losses = arm.curves.optima, arm.curves.best_losses
    if len(optima) > 1:
        best = min(optima, key=lambda batch: optima[batch].loss)
        gaps = (f"{tokens(b)} it is {nats_higher(losses[b] - losses[best], len(optima))}" for b in optima if b != best)
        text = f"Each at its own best learning rate, {tokens(best)} has the lowest loss."
        yield Finding(text, f"At {'; at '.join(gaps)}. {OF_LOWEST}")


def _outliers(arm: Arm) -> Iterator[Finding]:
    for run, outlier in arm.outliers:
        yield Finding(
            f"An outlier, which hardly counts: {run.name}, with a loss of {outlier.loss:.4f} at learning rate "
            f"{run.lr:g} and {tokens(run.batch)}.",
            f"{outlier.why[0].upper()}{outlier.why[1:]}. Run it again with another seed.",
        )


def _diverged(arm: Arm) -> Iterator[Finding]:
    batches: dict[tuple[float, ...], list[int]] = {}  # learning rates -> the batch sizes at which just these diverged
    for batch, lrs in arm.diverged.items():
        batches.setdefault(tuple(lrs), []).append(batch)
    for rates, where in batches.items():
        which = f"learning rate{'s' if len(rates) > 1 else ''} {', '.join(f'{lr:.3g}' for lr in rates)}"
        yield Finding(f"Training diverged at {which} at {sizes(where)} tokens a step.")


def _critical(arm: Arm) -> Iterator[Finding]:
    """The critical batch size, by the hyperbola and by the 20% rule."""
    c = arm.critical
    if len(arm.losses) < 2 or c is None:
        return
    whose = " of the averaged weights" if arm.averages else ""
    subject = f"To reach a loss{whose} of {arm.target_loss:.4f} the critical batch size"
    by = f"{subject} by the hyperbola (twice the fewest steps and tokens)"
    misfit = "The steps deviate significantly from that hyperbola: use the result of the 20% rule." if c.misfit else ""
    if c.status == "too few":
        yield Finding(f"{subject} by the hyperbola needs four batch sizes; this sweep has {len(c.steps)}.")
    elif (h := c.hyperbola) is not None:
        yield Finding(f"{by} is {tokens(h.tokens)} ({interval_of(h.low, h.high, ',.0f')}).", misfit)
    elif c.bound is not None:
        side = "least" if c.status == "lower bound only" else "most"
        yield Finding(f"{by} is at {side} {tokens(c.bound)} (95% bound); these runs show no more.", misfit)
    else:
        yield Finding(f"{by} cannot be estimated: the noise is larger than the effect of the batch size.", misfit)
    more = "; this is the largest that was run, so it is a lower bound" if c.twenty_percent_open else ""
    edge = (
        f"At {sizes(arm.at_an_edge)} tokens a step the learning rate that takes the fewest steps is the smallest or "
        "the largest that was run, and another may take fewer: widen the grid before you rely on this."
    )
    yield Finding(
        f"{subject} by the 20% rule (tokens at most 1.2 times the fewest) is {tokens(c.twenty_percent)}{more}.",
        edge if arm.at_an_edge else "",
    )


def _noise(arm: Arm) -> Iterator[Finding]:
    """Where the noise is unknown, and how many seeds a difference takes where it is known."""
    curves = arm.curves
    unknown = [batch for batch, curve in curves.by_batch.items() if not curve.noise_is_known]
    if unknown and len(arm.means) > 1:
        where = f" at {sizes(unknown)} tokens a step" if curves.noise_is_known else ""
        assumed = (
            "The noise there is taken from the other batch sizes."
            if curves.noise_is_known
            else "Runs of this size and length have had a standard deviation of about "
            f"{curves.usual_spread:.2g} nats over seeds; intervals assume that, within a factor of 7."
        )
        yield Finding(f"Noise unknown{where}: no learning rate has two seeds.", assumed)
    sigmas = {batch: curves.by_batch[batch].noise.sigma for batch in curves.optima if batch not in unknown}
    if sigmas:
        at = ", ".join(f"about {sigma:.2g} nats at {batch:,}" for batch, sigma in sigmas.items())
        needed = (f"{seeds_in_words(seeds_needed(0.01, 2 * sigma**2))} at {b:,}" for b, sigma in sigmas.items())
        yield Finding(
            f"One run at the best learning rate has a final loss with a standard deviation over seeds of {at} tokens a "
            "step.",
            f"For a difference of 0.01 nats to be significant, two cells need {', '.join(needed)} (power {POWER:g}).",
        )


def _noise_scale(arm: Arm) -> Iterator[Finding]:
    """The noise scale of the run with the lowest loss, beside its batch size and the critical batch size."""
    run = lowest_measured(arm.runs)
    if run is None:
        return
    scale, why = at_the_end(run), ""
    if scale is not None and arm.critical is not None and arm.critical.hyperbola is not None:
        ratio = arm.critical.hyperbola.tokens / scale.tokens
        agrees = "agree within" if 1 / FACTOR <= ratio <= FACTOR else "do not agree within"
        why = f"The measured critical batch size is {ratio:.2g} times that: the two {agrees} a factor of {FACTOR:g}."
    yield Finding(in_words(run, "" if len(arm.runs) == 1 else f" of {run.name}"), why)


def _clipping(arm: Arm) -> Iterator[Finding]:
    """A caveat if most steps are clipped at one end of the batch sizes and fewer at the other, or nearly all at both.

    The squared norm of a gradient is |G|² + tr S / B on average, so small batches are clipped more often: what looks
    like an effect of the batch size may in part be one of clipping.
    """
    shares = {}
    for batch, runs in arm.at_best_lr.items():
        if measured := [share for run in runs if (share := _share_clipped(run)) is not None]:
            shares[batch] = fmean(measured)
    if len(shares) < 2:
        return
    small, large = min(shares), max(shares)
    low, high = sorted((shares[small], shares[large]))
    if low >= NEARLY_ALWAYS:
        meaning = "The updates come from gradients of nearly equal norm, and the best learning rates belong to these."
    elif high > USUALLY_CLIPPED and high - low >= DIFFERENT_SHARES:
        meaning = "Clipping changes with the batch size, and may have a part in how the best learning rate does."
    else:
        return
    yield Finding(
        f"At the best learning rates {shares[small]:.0%} of the steps after the warm-up are clipped at {small:,} "
        f"tokens a step and {shares[large]:.0%} at {large:,}.",
        f"{meaning} Compare with an arm that has optim.grad_clip=0, which clips nothing.",
    )


def _share_clipped(run: Run) -> float | None:
    """The share of the steps after the warm-up that were clipped; None without a logged step."""
    shares = [s.clip_fraction for s in run.train if s.tokens > run.warmup_tokens and s.clip_fraction is not None]
    return fmean(shares) if shares else None
