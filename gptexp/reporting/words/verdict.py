"""The analysis in sentences. Each follows from the intervals and tests alone."""

from collections.abc import Iterator

from gptexp.process.terminal import printable
from gptexp.process.words import counted, listed
from gptexp.reporting.statistics.analysis import Analysis, Arm
from gptexp.reporting.statistics.law import SLOPES
from gptexp.reporting.statistics.noise import POWER, seeds_needed
from gptexp.reporting.statistics.noise_scale import FACTOR, at_the_end, in_words, lowest_measured
from gptexp.reporting.words.arms_in_words import arms_in_words
from gptexp.reporting.words.clipping import clipping_in_words
from gptexp.reporting.words.finding import BEHIND_NATS, OF_LOWEST, Finding, Verdict, limits_of_law, nats_higher
from gptexp.reporting.words.sharpness import sharpness_in_words
from gptexp.storage import run_dir

MOST_SEEDS = 50  # a difference that takes more of them per cell is too small to matter


def verdict(analysis: Analysis, behind_nats: float = BEHIND_NATS) -> Verdict:
    """The findings: on the arms side by side, then arm by arm. `behind_nats`: see `arms.falls_behind`."""
    found = Verdict([Finding(printable(f"Warning: {line}.")) for line in analysis.warnings], [], [], [])
    for finding in arms_in_words(analysis.arms, behind_nats):
        found.findings.append(Finding(printable(finding.text), printable(finding.why)))
    for arm in analysis.arms:
        found.findings.extend(_labelled(arm, finding) for finding in _findings(arm))
        found.caveats.extend(_labelled(arm, finding) for finding in _caveats(arm))
    return found


def _labelled(arm: Arm, finding: Finding) -> Finding:
    label = arm.label
    text = f"{label}: {finding.text}" if label else finding.text
    return Finding(printable(text), printable(finding.why), finding.badges)


def _findings(arm: Arm) -> Iterator[Finding]:
    for findings in (_law, _best, _sizes, _outliers, _diverged, _critical):
        yield from findings(arm)
    yield from sharpness_in_words(arm)
    if len(arm.runs) == 1:
        yield from _noise_scale(arm)
    unfinished = sorted({run.status for run in arm.runs} - {*run_dir.DONE})
    for status in unfinished if len(arm.runs) > 1 else ():
        count = sum(run.status == status for run in arm.runs)
        yield Finding(f"{status.capitalize()}: {counted(count, 'run')}; no fit or test uses their losses.")


def _diverged(arm: Arm) -> Iterator[Finding]:
    batches: dict[tuple[float, ...], list[str]] = {}  # learning rates -> the batch sizes at which just these diverged
    for batch, lrs in sorted(arm.diverged.items()):
        batches.setdefault(tuple(sorted(lrs)), []).append(f"{batch:,}")
    for rates, sizes in batches.items():
        which = f"learning rate{'s' if len(rates) > 1 else ''} {', '.join(f'{lr:.3g}' for lr in rates)}"
        yield Finding(f"Training diverged at {which} at {', '.join(sizes)} tokens a step.")


def _caveats(arm: Arm) -> Iterator[Finding]:
    yield from _noise(arm)
    if len(arm.runs) > 1:
        yield from _noise_scale(arm)
    yield from clipping_in_words(arm)
    schedule = arm.runs[0].config["schedule.name"]
    if len(arm.losses) > 1 and schedule != "constant":
        yield Finding(
            f"The learning rate decays (schedule={schedule}), so the loss in the middle of a run is not that of a "
            "shorter run: the critical batch size needs schedule=constant."
        )


CORRECTED = (
    "By the posterior of the curves, or by seeds that vary more than it allows; corrected for the number of cells."
)


def tokens(count: float) -> str:
    return f"{count:,.0f} tokens a step"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _outliers(arm: Arm) -> Iterator[Finding]:
    for run, outlier in arm.outliers:
        yield Finding(
            f"An outlier, which hardly counts: {run.name}, with a loss of {outlier.loss:.4f} at learning rate "
            f"{run.lr:g} and {tokens(run.batch)}.",
            f"{_sentence(outlier.why)} Run it again with another seed.",
        )


def _law(arm: Arm) -> Iterator[Finding]:
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
    yield Finding(
        f"The best learning rate is proportional to the batch size to the power {law.exponent:.2f} (95% interval "
        f"{law.low:.2f} to {law.high:.2f}, {len(law.sizes)} batch sizes), which {agrees}.",
        " ".join(sentence for _, sentence in limits_of_law(law)),
    )


def _sizes(arm: Arm) -> Iterator[Finding]:
    """Compare the batch sizes, each at its own best learning rate."""
    optima = arm.curves.optima
    if len(optima) < 2:
        return
    best = min(optima, key=lambda batch: optima[batch].loss)
    losses = arm.curves.best_losses
    gaps = [f"at {tokens(b)} it is {nats_higher(losses[b] - losses[best], len(optima))}" for b in optima if b != best]
    text = f"Each at its own best learning rate, {tokens(best)} has the lowest loss."
    yield Finding(text, f"{_sentence('; '.join(gaps))} {OF_LOWEST}")


def _best(arm: Arm) -> Iterator[Finding]:
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
        is_ = "is" if len(arm.ties) == 1 else "are"
        count = counted(len(arm.ties), "other cell")
        yield Finding(
            f"{line}; {count} {is_} not significantly worse.", f"Not significantly worse: {cells}. {CORRECTED}"
        )


def _noise(arm: Arm) -> Iterator[Finding]:
    unknown = [batch for batch, curve in arm.curves.of.items() if not curve.noise_is_known]
    if unknown and len(arm.means) > 1:
        where = f" at {', '.join(f'{b:,}' for b in unknown)} tokens a step" if arm.curves.noise_is_known else ""
        borrowed = (
            "The noise there is taken from the other batch sizes."
            if arm.curves.noise_is_known
            else "Runs of this size and length have had a standard deviation of about "
            f"{arm.curves.usual_spread:.2g} nats over seeds; intervals assume that, within a factor of 2.7."
        )
        yield Finding(f"Noise unknown{where}: no learning rate has two seeds.", borrowed)
    known = {
        batch: curve.noise.sigma
        for batch, curve in arm.curves.of.items()
        if curve.noise_is_known and curve.optimum is not None
    }
    if known:
        at = ", ".join(f"about {sigma:.2g} nats at {batch:,}" for batch, sigma in known.items())
        needed = (f"{seeds_in_words(seeds_needed(0.01, 2 * sigma**2))} at {b:,}" for b, sigma in known.items())
        yield Finding(
            f"One run at the best learning rate has a final loss with a standard deviation over seeds of {at} tokens a "
            "step.",
            f"For a difference of 0.01 nats to be significant, two cells need {', '.join(needed)} (power {POWER:g}).",
        )


def seeds_in_words(needed: int) -> str:
    """A number of seeds, up to the most that anybody would run."""
    return counted(needed, "seed") if needed <= MOST_SEEDS else f"more than {MOST_SEEDS} seeds"


def _critical(arm: Arm) -> Iterator[Finding]:
    c = arm.critical
    if len(arm.losses) < 2 or c is None:
        return
    whose = " of the averaged weights" if arm.averages else ""
    at = f"To reach a loss{whose} of {arm.target_loss:.4f} the critical batch size"
    method = "by the hyperbola (twice the fewest steps and tokens)"
    misfit = "The steps deviate significantly from that hyperbola: use the result of the 20% rule." if c.misfit else ""
    if c.status == "too few":
        yield Finding(f"{at} by the hyperbola needs four batch sizes; this sweep has {len(c.steps)}.")
    elif c.hyperbola is not None:
        low, high = c.hyperbola.low, c.hyperbola.high
        found = f"{tokens(c.hyperbola.tokens)} (95% interval {low:,.0f} to {high:,.0f})"
        yield Finding(f"{at} {method} is {found}.", misfit)
    elif c.bound is not None:
        side = "least" if c.status == "lower bound only" else "most"
        bound = f"{tokens(c.bound)} (95% bound); these runs show no more"
        yield Finding(f"{at} {method} is at {side} {bound}.", misfit)
    else:
        yield Finding(
            f"{at} {method} cannot be estimated: the noise is larger than the effect of the batch size.", misfit
        )
    more = "; this is the largest that was run, so it is a lower bound" if c.twenty_percent_open else ""
    edge = (
        f"At {', '.join(f'{batch:,}' for batch in arm.at_an_edge)} tokens a step the learning rate that takes the "
        "fewest steps is the smallest or the largest that was run, and another may take fewer: widen the grid "
        "before you rely on this."
    )
    yield Finding(
        f"{at} by the 20% rule (tokens at most 1.2 times the fewest) is {tokens(c.twenty_percent)}{more}.",
        edge if arm.at_an_edge else "",
    )


def _noise_scale(arm: Arm) -> Iterator[Finding]:
    """Compare the noise scale of the run with the lowest loss with its batch size and with the critical batch size."""
    run = lowest_measured(arm.runs)
    if run is None:
        return
    of_run = "" if len(arm.runs) == 1 else f" of {run.name}"
    scale = at_the_end(run)
    why = ""
    if scale is not None and arm.critical is not None and arm.critical.hyperbola is not None:
        ratio = arm.critical.hyperbola.tokens / scale.tokens
        agrees = "agree within" if 1 / FACTOR <= ratio <= FACTOR else "do not agree within"
        why = f"The measured critical batch size is {ratio:.2g} times that: the two {agrees} a factor of {FACTOR:g}."
    yield Finding(in_words(run, of_run), why)
