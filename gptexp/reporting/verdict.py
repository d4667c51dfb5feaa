"""The analysis in sentences. Each follows from the intervals and tests alone."""

import math
from collections.abc import Iterator

from gptexp.config.schema import counted
from gptexp.reporting.analysis import Analysis, Arm
from gptexp.reporting.curves import Curve
from gptexp.reporting.law import SLOPES
from gptexp.reporting.noise import POWER, seeds_needed
from gptexp.reporting.noise_scale import FACTOR, at_the_end
from gptexp.storage import run_dir


def verdict(analysis: Analysis) -> list[str]:
    """One or two sentences for each finding, arm by arm."""
    lines = [f"Warning: {line}." for line in analysis.warnings]
    for arm in analysis.arms:
        label = ", ".join(f"{key}={value}" for key, value in arm.choices.items())
        lines += [f"{label}: {line}" if label else line for line in _of_arm(arm)]
    return lines


def _of_arm(arm: Arm) -> Iterator[str]:
    if arm.is_grid:
        yield from (_optimum(batch, curve) for batch, curve in arm.curves.of.items())
    yield from _outliers(arm)
    for findings in (_law, _sizes, _best, _noise, _critical, _noise_scale):
        yield from findings(arm)
    unfinished = sorted({run.status for run in arm.runs} - {*run_dir.DONE})
    for status in unfinished if len(arm.runs) > 1 else ():
        names = [run.name for run in arm.runs if run.status == status]
        yield f"{status.capitalize()}: {len(names)} of {len(arm.runs)} runs; no fit or test uses their losses."
    for batch, lrs in sorted(arm.diverged.items()):
        rates = f"learning rate{'s' if len(lrs) > 1 else ''} {', '.join(f'{lr:.3g}' for lr in lrs)}"
        yield f"At {tokens(batch)} training diverged at {rates}."


def tokens(count: float) -> str:
    return f"{count:,.0f} tokens a step"


def _optimum(batch: int, c: Curve) -> str:
    at, o = f"At {tokens(batch)}", c.optimum
    if o is not None and o.low is not None:
        return (
            f"{at} the best learning rate is {o.lr:.3g} (95% interval {o.low:.3g} to {o.high:.3g}), with a loss of "
            f"{o.loss:.4f}; a run at any learning rate from {o.tie_low:.3g} to {o.tie_high:.3g} does not differ "
            f"significantly from one at {o.lr:.3g}."
        )
    if o is not None and c.bracket is not None:
        low, high = c.bracket
        return (
            f"{at} the best learning rate is near {o.lr:.2g}, between {low:g} and {high:g}, whose losses are clearly "
            "higher; an interval needs a second seed."
        )
    if c.tied is not None:
        low, high = c.tied
        return f"{at} the loss is flat from {low:g} to {high:g}: {c.why}, so no optimum is given."
    if c.status == "too few":
        return f"{at} nothing can be said of the best learning rate: {c.why}."
    if c.status == "jagged":
        return f"{at} no optimum is given: {c.why}."
    then = "run more seeds" if c.next_lr is None else f"run {c.next_lr:.3g}"
    return f"{at} the best learning rate is not bracketed: {c.why}; {then} next."


def _outliers(arm: Arm) -> Iterator[str]:
    for run, outlier in arm.left_out:
        yield (
            f"Left out: {run.name}, with a loss of {outlier.loss:.4f} at learning rate {outlier.lr:g} and "
            f"{tokens(run.batch)}: {outlier.why}. Run it again with another seed."
        )


def _law(arm: Arm) -> Iterator[str]:
    law = arm.law
    if law is None:
        return
    admitted = [name for name, slope in SLOPES.items() if law.admits(slope)]
    refused = [name for name in SLOPES if name not in admitted]

    def rules(names: list[str]) -> str:
        return " and ".join(f"'{name}' ({SLOPES[name]:g})" for name in names)

    agrees = f"agrees with the rule {rules(admitted)}" if admitted else "agrees with none of the usual rules"
    yield (
        f"The best learning rate is proportional to the batch size to the power {law.exponent:.2f} (95% interval "
        f"{law.low:.2f} to {law.high:.2f}, {len(law.sizes)} batch sizes). This exponent {agrees}"
        + (f" and not with {rules(refused)}." if admitted and refused else ".")
    )
    if len(law.sizes) == 2:
        yield "Two points always lie on a line: a third batch size would test this law."
    if law.scatter:
        yield (
            "The optima scatter around the fitted line more than their own intervals allow; the exponent's interval "
            "includes this scatter."
        )
    if law.bends:
        yield "In log-log the optima lie on a curve, not on a line: do not extrapolate this law."


def _sizes(arm: Arm) -> Iterator[str]:
    """Compare the batch sizes, each at its own best learning rate."""
    optima = arm.curves.optima
    if len(optima) < 2:
        return
    best = min(optima, key=lambda batch: optima[batch].loss)
    for batch, o in optima.items():
        if batch != best:
            gap = o.loss - optima[best].loss
            spread = math.hypot(o.loss_half_width or 0.0, optima[best].loss_half_width or 0.0)
            end = " (within noise)." if gap <= spread else "."
            yield (
                f"At {tokens(batch)} the loss is {gap:.4f} ± {spread:.4f} nats above that at {tokens(best)}, each at "
                f"its own optimum{end}"
            )


def _best(arm: Arm) -> Iterator[str]:
    if arm.best is None or len(arm.means) < 2:
        return
    batch, lr = arm.best
    line = f"The lowest mean loss is that of learning rate {lr:.3g} at {tokens(batch)}"
    tested = [cell for cell in arm.means if cell != arm.best and arm.curves.ties(cell, arm.best) is not None]
    if not tested:
        yield f"{line}."
    elif not arm.ties:
        known = "" if len(tested) == len(arm.means) - 1 else " whose noise is known"
        yield f"{line}, and every other cell{known} is significantly worse."
    else:
        cells = ", ".join(f"{lr:.3g} at {b:,}" for b, lr in sorted(arm.ties))
        count = f"{len(arm.ties)} other cells do" if len(arm.ties) > 1 else "1 other cell does"
        yield f"{line}; {count} not differ significantly from it: {cells}."


def _noise(arm: Arm) -> Iterator[str]:
    unknown = [batch for batch in arm.curves.of if batch not in arm.curves.noises]
    if unknown and len(arm.means) > 1:
        where = f" at {', '.join(f'{b:,}' for b in unknown)} tokens a step" if arm.curves.noises else ""
        yield (
            f"Noise unknown{where}: no learning rate has two seeds, so nothing is said about ties, 95% intervals or "
            "numbers of seeds. Runs of this size and length have had a standard deviation of "
            f"{arm.curves.usual_spread:.2g} nats over seeds; a difference counts as clear if it is five times that."
        )
    means = sorted(arm.means.values())
    for noise in dict.fromkeys(arm.curves.noises.values()):
        at = f" at {', '.join(f'{b:,}' for b in noise.batches)} tokens a step" if len(arm.curves.of) > 1 else ""
        needed = f"A difference of 0.01 nats between two cells needs {_seeds(0.01, noise.sigma)} to be significant"
        if (
            arm.best is not None
            and arm.best[0] in noise.batches
            and len(means) > 1
            and (gap := means[1] - means[0]) > 0
        ):
            needed += f", that between the best and the next cell ({gap:.4f}) needs {_seeds(gap, noise.sigma)}"
        yield (
            f"The final loss of one run{at} has a standard deviation of {noise.sigma:.4f} nats over seeds "
            f"({counted(noise.dof, 'degree')} of freedom). {needed} (power {POWER:g})."
        )


def _seeds(difference: float, sigma: float) -> str:
    """The seeds that show a difference, in words."""
    return f"{counted(seeds_needed(difference, sigma), 'seed')} per cell"


def _critical(arm: Arm) -> Iterator[str]:
    schedule, c = arm.runs[0].config["schedule.name"], arm.critical
    if len(arm.losses) > 1 and schedule != "constant":
        yield (
            f"The learning rate decays (schedule={schedule}), so the loss in the middle of a run is not that of a "
            "shorter run: the critical batch size needs schedule=constant."
        )
    if len(arm.losses) < 2 or c is None:
        return
    at = f"To reach a loss of {arm.target_loss:.4f} the critical batch size"
    method = "by the hyperbola (twice the fewest steps and tokens)"
    if c.status == "too few":
        yield f"{at} by the hyperbola needs four batch sizes; this sweep has {len(c.steps)}."
    elif c.hyperbola is not None:
        low, high = c.hyperbola.low, c.hyperbola.high
        yield f"{at} {method} is {tokens(c.hyperbola.tokens)} (95% interval {low:,.0f} to {high:,.0f})."
    elif c.bound is not None:
        side = "least" if c.status == "lower bound only" else "most"
        yield f"{at} {method} is at {side} {tokens(c.bound)} (95% bound); these runs show no more."
    else:
        yield f"{at} {method} cannot be estimated: the noise is larger than the effect of the batch size."
    more = "; this is the largest that was run, so it is a lower bound" if c.twenty_percent_open else ""
    yield f"{at} by the 20% rule (tokens at most 1.2 times the fewest) is {tokens(c.twenty_percent)}{more}."
    if arm.at_an_edge:
        yield (
            f"At {', '.join(f'{batch:,}' for batch in arm.at_an_edge)} tokens a step the learning rate that takes the "
            "fewest steps is the smallest or the largest that was run, and another may take fewer: widen the grid "
            "before you rely on this."
        )
    if c.misfit:
        yield "The steps deviate significantly from that hyperbola: use the result of the 20% rule."


def _noise_scale(arm: Arm) -> Iterator[str]:
    """Compare the noise scale of the run with the lowest loss with its batch size and with the critical batch size."""
    measured = [run for run in arm.runs if any(step.noise_scale is not None for step in run.train)]
    if not measured:
        return
    run = min(measured, key=lambda run: (run.loss is None, run.loss or 0.0))
    of_run = "" if len(arm.runs) == 1 else f" of {run.name}"
    scale = at_the_end(run)
    if scale is None:
        yield f"The gradient noise scale{of_run} cannot be estimated from the logged steps: train for longer."
        return
    interval = f"{scale.low:,.0f} to {scale.high:,.0f}" if scale.high else f"{scale.low:,.0f} or more"
    yield (
        f"Over the last fifth of training the gradient noise scale{of_run} is {scale.tokens:,.0f} tokens (95% interval "
        f"{interval}); a step has {run.batch:,}."
    )
    if arm.critical is not None and arm.critical.hyperbola is not None:
        ratio = arm.critical.hyperbola.tokens / scale.tokens
        agrees = "agree within" if 1 / FACTOR <= ratio <= FACTOR else "do not agree within"
        yield f"The measured critical batch size is {ratio:.2g} times that: the two {agrees} a factor of {FACTOR:g}."
