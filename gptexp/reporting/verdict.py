"""The analysis in sentences. Each follows from the intervals and tests alone."""

from collections.abc import Collection, Iterator

from gptexp.process.terminal import printable
from gptexp.process.words import counted
from gptexp.reporting.analysis import Analysis, Arm
from gptexp.reporting.arms_in_words import arms_in_words
from gptexp.reporting.clipping import clipping_in_words
from gptexp.reporting.curves import Curve, Outlier
from gptexp.reporting.finding import BEHIND_NATS, Finding, Verdict, limits_of_law, nats_higher
from gptexp.reporting.law import SLOPES
from gptexp.reporting.noise import POWER, Noise, seeds_needed
from gptexp.reporting.noise_scale import FACTOR, at_the_end, in_words, lowest_measured
from gptexp.reporting.progress import is_unfinished
from gptexp.reporting.records import Run
from gptexp.reporting.sharpness import sharpness_in_words
from gptexp.storage import run_dir
from gptexp.storage.sweep_record import SweepRecord

MOST_SEEDS = 50  # a difference that takes more of them per cell is too small to matter


def verdict(analysis: Analysis, sweep: SweepRecord | None = None, behind_nats: float = BEHIND_NATS) -> Verdict:
    """The findings: on the arms side by side, then arm by arm. `behind_nats`: see `arms.falls_behind`."""
    sizes = {batch for arm in analysis.arms for batch in arm.losses}
    waiting = {batch for batch in sizes if sweep is not None and is_unfinished(sweep, analysis.runs, batch)}
    planned = {cell.values.get("optim.lr") for cell in sweep.cells.values()} if sweep is not None else set()
    found = Verdict([Finding(printable(f"Warning: {line}.")) for line in analysis.warnings], [], [], [])
    for finding in arms_in_words(analysis.arms, behind_nats):
        found.findings.append(Finding(printable(finding.text), printable(finding.why)))
    for arm in analysis.arms:
        found.answers.extend(
            _labelled(arm, finding) for finding in _answers(arm, waiting, arm.is_grid or len(planned) > 1)
        )
        found.findings.extend(_labelled(arm, finding) for finding in _findings(arm))
        found.caveats.extend(_labelled(arm, finding) for finding in _caveats(arm))
    if found.answers:
        found.answers.extend(_not_begun(analysis, sweep))
    return found


def _labelled(arm: Arm, finding: Finding) -> Finding:
    label = arm.label
    text = f"{label}: {finding.text}" if label else finding.text
    return Finding(printable(text), printable(finding.why), finding.badges)


def _answers(arm: Arm, waiting: Collection[int], is_grid: bool) -> Iterator[Finding]:
    """`waiting`: the batch sizes at which cells of the sweep still run or wait; `is_grid`: learning rates are swept."""
    if is_grid:
        for batch, curve in arm.curves.of.items():
            yield _answer(batch, curve, arm.losses[batch], batch in waiting)
    for batch, lrs in arm.all_diverged.items() if len(arm.runs) > 1 else ():
        at_every = f"training diverged at every learning rate that was run, from {min(lrs):g} on"
        yield Finding(f"At {tokens(batch)} {at_every}; run a lower one next.", badges=("edge",))


def _findings(arm: Arm) -> Iterator[Finding]:
    yield from _best(arm)
    yield from _outliers(arm)
    yield from _diverged(arm)
    for findings in (_law, _sizes, _critical):
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


def tokens(count: float) -> str:
    return f"{count:,.0f} tokens a step"


def _badges(c: Curve, lrs: Collection[float], is_waiting: bool) -> tuple[str, ...]:
    at_an_edge = c.status == "not bracketed" and c.best in (min(lrs), max(lrs))
    flat = "tied" if c.noise is not None else "unclear"
    shape = "edge" if at_an_edge else flat if c.status == "flat" else c.status
    noise = ("noise unknown",) if c.noise is None else ()
    return (shape, *noise, "so far") if is_waiting else (shape, *noise)


def _not_begun(analysis: Analysis, sweep: SweepRecord | None) -> Iterator[Finding]:
    """The batch sizes of the sweep of which no run has ended."""
    planned = {cell.total_batch_size for cell in sweep.cells.values()} if sweep is not None else set()
    ended = {batch for arm in analysis.arms for batch in (*arm.losses, *arm.diverged)}
    for batch in sorted(planned - ended):
        yield Finding(f"At {tokens(batch)} no run has ended yet.", badges=("too few", "so far"))


def _answer(batch: int, c: Curve, lrs: Collection[float], is_waiting: bool) -> Finding:
    at, o, badges = f"At {tokens(batch)}", c.optimum, _badges(c, lrs, is_waiting)
    if o is not None and o.low is not None:
        return Finding(
            f"{at} the best learning rate is {o.lr:.3g} (95% interval {o.low:.3g} to {o.high:.3g}).",
            f"Its loss is {o.loss:.4f}. A run at any learning rate from {o.tie_low:.3g} to {o.tie_high:.3g} does not "
            f"differ significantly from one at {o.lr:.3g}.",
            badges,
        )
    if o is not None and c.bracket is not None:
        low, high = c.bracket
        return Finding(
            f"{at} the best learning rate is near {o.lr:.2g}, between {low:g} and {high:g}.",
            f"{_sentence(c.why)} An interval needs a second seed.",
            badges,
        )
    if c.tied is not None:
        low, high = c.tied
        if c.noise is None:
            text = (
                f"{at} the losses from {low:g} to {high:g} cannot be told apart without seeds, so no optimum is given."
            )
        else:
            text = f"{at} the loss is flat from {low:g} to {high:g}, so no optimum is given."
        return Finding(text, _sentence(c.why), badges)
    if c.status == "too few":
        return Finding(f"{at} nothing can be said of the best learning rate: {c.why}.", badges=badges)
    if c.status == "jagged":
        return Finding(f"{at} no optimum is given: {c.why}.", badges=badges)
    then = "run more seeds next" if c.next_lr is None else f"run {c.next_lr:.3g} next"
    if is_waiting:
        then = "other cells at this batch size still run or wait"
    return Finding(f"{at} the best learning rate is not bracketed: {c.why}; {then}.", badges=badges)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _outliers(arm: Arm) -> Iterator[Finding]:
    again = "Run it again with another seed."
    cells: dict[tuple[int, float], list[tuple[Run, Outlier]]] = {}
    for run, outlier in arm.left_out:
        cells.setdefault((run.batch, run.lr), []).append((run, outlier))
    for (batch, lr), left_out in cells.items():
        at = f"at learning rate {lr:g} and {tokens(batch)}"
        if len(left_out) == 1:
            [(run, outlier)] = left_out
            yield Finding(
                f"Left out: {run.name}, with a loss of {outlier.loss:.4f} {at}.", f"{_sentence(outlier.why)} {again}"
            )
            continue
        losses = [outlier.loss for _, outlier in left_out]
        yield Finding(
            f"Left out: {counted(len(losses), 'run')} {at}, with losses from {min(losses):.4f} to {max(losses):.4f}.",
            f"Seeds there differ far more than elsewhere, so their mean says little. {again}",
        )


def _law(arm: Arm) -> Iterator[Finding]:
    law = arm.law
    if law is None:
        return
    admitted = [name for name, slope in SLOPES.items() if law.admits(slope)]
    refused = [name for name in SLOPES if name not in admitted]

    def rules(names: list[str]) -> str:
        return " and ".join(f"'{name}' ({SLOPES[name]:g})" for name in names)

    agrees = f"agrees with the rule {rules(admitted)}" if admitted else "agrees with none of the usual rules"
    why = [f"This exponent {agrees}" + (f" and not with {rules(refused)}." if admitted and refused else ".")]
    why += [sentence for _, sentence in limits_of_law(law)]
    yield Finding(
        f"The best learning rate is proportional to the batch size to the power {law.exponent:.2f} (95% interval "
        f"{law.low:.2f} to {law.high:.2f}, {len(law.sizes)} batch sizes).",
        " ".join(why),
    )


def _sizes(arm: Arm) -> Iterator[Finding]:
    """Compare the batch sizes, each at its own best learning rate."""
    optima = arm.curves.optima
    if len(optima) < 2:
        return
    best = min(optima, key=lambda batch: optima[batch].loss)
    gaps = [
        f"at {tokens(batch)} it is {nats_higher(*o.above(optima[best]))}"
        for batch, o in optima.items()
        if batch != best
    ]
    text = f"Each at its own best learning rate, {tokens(best)} has the lowest loss."
    yield Finding(text, _sentence("; ".join(gaps)))


def _best(arm: Arm) -> Iterator[Finding]:
    if arm.best is None or len(arm.means) < 2:
        return
    batch, lr = arm.best
    line = f"The lowest mean loss is that of learning rate {lr:.3g} at {tokens(batch)}"
    tested = [cell for cell in arm.means if cell != arm.best and arm.curves.ties(cell, arm.best) is not None]
    if not tested:
        yield Finding(f"{line}.")
    elif not arm.ties:
        known = "" if len(tested) == len(arm.means) - 1 else " whose noise is known"
        yield Finding(f"{line}, and every other cell{known} is significantly worse.")
    else:
        cells = ", ".join(f"{lr:.3g} at {b:,}" for b, lr in sorted(arm.ties))
        does = "does" if len(arm.ties) == 1 else "do"
        count = counted(len(arm.ties), "other cell")
        yield Finding(f"{line}; {count} {does} not differ significantly from it.", f"Not different: {cells}.")


def _noise(arm: Arm) -> Iterator[Finding]:
    unknown = [batch for batch in arm.curves.of if batch not in arm.curves.noises]
    if unknown and len(arm.means) > 1:
        where = f" at {', '.join(f'{b:,}' for b in unknown)} tokens a step" if arm.curves.noises else ""
        is_measured = arm.curves.usual_spread in [noise.sigma for noise in arm.curves.noises.values()]
        runs = "Runs at other batch sizes of this sweep" if is_measured else "Runs of this size and length"
        yield Finding(
            f"Noise unknown{where}: no learning rate has two seeds, so nothing is said about ties, 95% intervals or "
            "numbers of seeds.",
            f"{runs} have had a standard deviation of {arm.curves.usual_spread:.2g} nats over seeds; a difference "
            "counts as clear if it is five times that.",
        )
    means = sorted(arm.means.values())
    for noise in dict.fromkeys(arm.curves.noises.values()):
        at = f" at {', '.join(f'{b:,}' for b in noise.batches)} tokens a step" if len(arm.curves.of) > 1 else ""
        needed = f"A difference of 0.01 nats between two cells needs {_seeds(0.01, noise)} to be significant"
        if (
            arm.best is not None
            and arm.best[0] in noise.batches
            and len(means) > 1
            and (gap := means[1] - means[0]) > 0
        ):
            needed += f", that between the best and the next cell ({gap:.4f}) needs {_seeds(gap, noise)}"
        yield Finding(
            f"The final loss of one run{at} has a standard deviation of {noise.sigma:.4f} nats over seeds "
            f"({counted(noise.dof, 'degree')} of freedom).",
            f"{needed} (power {POWER:g}).",
        )


def _seeds(difference: float, noise: Noise) -> str:
    """The seeds that show a difference, in words."""
    return f"{seeds_in_words(seeds_needed(difference, noise.sigma))} per cell"


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
