"""What the numbers say, in sentences that follow from the intervals and from nothing else."""

import math

from gptexp import run_dir
from gptexp.report.analysis import Analysis, Arm
from gptexp.report.curves import Curve
from gptexp.report.law import SLOPES
from gptexp.report.noise import seeds_needed
from gptexp.report.noise_scale import FACTOR, at_the_end


def verdict(analysis: Analysis) -> list[str]:
    """One sentence or two a finding, arm by arm."""
    lines = [f"Warning: {line}." for line in analysis.warnings]
    for arm in analysis.arms:
        prefix = f"{label(arm)}: " if label(arm) else ""
        lines += [prefix + line for line in _of_arm(arm)]
    return lines


def label(arm: Arm) -> str:
    """What sets an arm apart, in few words."""
    return ", ".join(f"{key}={value}" for key, value in arm.choices.items())


def _of_arm(arm: Arm) -> list[str]:
    lines = [_at(batch, curve) for batch, curve in arm.curves.of.items()] if arm.is_grid else []
    if arm.curves.skewed:
        lines.append(
            "The curves are skewed: a parabola over many learning rates would misplace the optimum, so each fit takes "
            f"the {arm.curves.width} nearest to the lowest loss."
        )
    lines += [*_law(arm), *_sizes(arm), *_best(arm), *_noise(arm), *_critical(arm), *_noise_scale(arm)]
    failed = sorted({run.status for run in arm.runs} - {*run_dir.DONE})
    for status in failed if len(arm.runs) > 1 else ():
        names = [run.name for run in arm.runs if run.status == status]
        lines.append(f"{status.capitalize()}: {len(names)} of {len(arm.runs)} runs; they take no part in this.")
    for batch, lrs in sorted(arm.diverged.items()):
        lines.append(f"At {tokens(batch)} a run diverged at learning rate {', '.join(f'{lr:.3g}' for lr in lrs)}.")
    return lines


def tokens(count: float) -> str:
    return f"{count:,.0f} tokens a step"


def _at(batch: int, c: Curve) -> str:
    if c.optimum is not None:
        o = c.optimum
        return (
            f"At {tokens(batch)} the best learning rate is {o.lr:.3g} (95% interval {o.low:.3g} to {o.high:.3g}), with "
            f"a loss of {o.loss:.4f}; from {o.tie_low:.3g} to {o.tie_high:.3g} one run cannot be told from one there."
        )
    if c.tied is not None:
        low, high = c.tied
        return (
            f"At {tokens(batch)} the loss is flat within noise from {low:.3g} to {high:.3g}: {c.why}, and no optimum "
            "can be named."
        )
    if c.status == "too few":
        return f"At {tokens(batch)} nothing can be said of the optimum: {c.why}."
    extend = f"; extend the grid to {c.extend:.3g}" if c.extend else ""
    return f"At {tokens(batch)} the optimum is not bracketed: {c.why}{extend}."


def _law(arm: Arm) -> list[str]:
    law = arm.law
    if law is None:
        return []
    admitted = [name for name, slope in SLOPES.items() if law.admits(slope)]
    refused = [name for name in SLOPES if name not in admitted]

    def rules(names: list[str]) -> str:
        return " and ".join(f"'{name}' ({SLOPES[name]:g})" for name in names)

    agrees = f"agrees with the rule {rules(admitted)}" if admitted else "agrees with none of the usual rules"
    lines = [
        f"The best learning rate grows with the batch size to the power {law.exponent:.2f} (95% interval {law.low:.2f} "
        f"to {law.high:.2f}, {len(law.sizes)} batch sizes): that {agrees}"
        + (f" and not with {rules(refused)}." if admitted and refused else ".")
    ]
    if len(law.sizes) == 2:
        lines.append("Two batch sizes lie on some line whatever the truth is: a third one would test it.")
    if law.scatter:
        lines.append("The optima scatter about that line more than their own intervals allow; its interval is widened.")
    if law.bends:
        lines.append("In log-log the optima lie on a curve, not on a line: do not extrapolate.")
    return lines


def _sizes(arm: Arm) -> list[str]:
    """Which batch size is best at its own optimum."""
    optima = arm.curves.optima
    if len(optima) < 2 or arm.curves.noise is None:
        return []
    best = min(optima, key=lambda batch: optima[batch].loss)
    lines = []
    for batch, o in optima.items():
        if batch != best:
            gap = o.loss - optima[best].loss
            spread = arm.curves.noise.t * math.hypot(o.loss_sd, optima[best].loss_sd)
            lines.append(
                f"{tokens(batch)}: {gap:.4f} ± {spread:.4f} nats above {tokens(best)}, each at its own optimum"
                + (" (within noise)." if gap <= spread else ".")
            )
    return lines


def _best(arm: Arm) -> list[str]:
    if arm.best is None or len(arm.means) < 2:
        return []
    batch, lr = arm.best
    line = f"The lowest loss is that of learning rate {lr:.3g} at {tokens(batch)}"
    if arm.curves.noise is None:
        return [f"{line}; without a second seed nothing says which others tie with it."]
    if not arm.ties:
        return [f"{line}, and no other cell ties with it."]
    cells = ", ".join(f"{lr:.3g} at {b:,}" for b, lr in sorted(arm.ties))
    count = f"{len(arm.ties)} other cell{'s' if len(arm.ties) > 1 else ''}"
    return [f"{line}; {count} cannot be told from it: {cells}."]


def _noise(arm: Arm) -> list[str]:
    noise = arm.curves.noise
    if noise is None:
        return []
    needed = f"a difference of 0.01 nats takes {seeds_needed(0.01, noise.sigma)} seeds of each of two cells"
    means = sorted(arm.means.values())
    if len(means) > 1 and (gap := means[1] - means[0]) > 0:
        needed += f", that of the best from the next ({gap:.4f}) {seeds_needed(gap, noise.sigma):,}"
    return [
        f"One run's final loss varies by {noise.sigma:.4f} nats ({noise.dof} degrees of freedom, from {noise.source}); "
        f"to show {needed}."
    ]


def _critical(arm: Arm) -> list[str]:
    if len(arm.losses) < 2:
        return []
    if arm.schedule != "constant":
        return [
            f"The learning rate decays (schedule={arm.schedule}), so a loss midway is not that of a shorter run: the "
            "critical batch size needs schedule=constant."
        ]
    c = arm.critical
    if c is None:
        return []
    at = f"To reach a loss of {arm.target_loss:.4f} the critical batch size"
    more = "; that is the largest that was run, so a lower bound" if c.twenty_percent_open else ""
    twenty = f"{at} by the 20% rule (tokens at most 1.2 times the fewest) is {tokens(c.twenty_percent)}{more}."
    if c.status == "too few":
        return [f"{at} by the hyperbola needs four batch sizes, not {len(c.steps)}.", twenty, *_edges(arm)]
    if c.hyperbola is not None:
        h = c.hyperbola
        found = f"is {tokens(h.tokens)} (95% interval {h.low:,.0f} to {h.high:,.0f})"
    elif c.bound is None:
        found = "can be anything: the noise is larger than what the batch size does"
    else:
        found = (
            f"is {tokens(c.bound)} or {'more' if c.status == 'lower bound only' else 'less'} (95%); no more can be said"
        )
    lines = [f"{at} by the hyperbola (twice the fewest steps and tokens) {found}.", twenty, *_edges(arm)]
    if c.misfit:
        lines.append("The steps do not lie on that hyperbola: take the 20% rule's number.")
    return lines


def _noise_scale(arm: Arm) -> list[str]:
    """Of the run with the lowest loss, or the only one: beside its batch size, and the critical one if measured."""
    measured = [run for run in arm.runs if run.is_measured]
    if not measured:
        return []
    run = min(measured, key=lambda run: (run.loss is None, run.loss or 0.0))
    of = "" if len(arm.runs) == 1 else f" of {run.name}"
    scale = at_the_end(run)
    if scale is None:
        return [f"The gradient noise scale{of} cannot be told from what was measured: train for longer."]
    interval = f"{scale.low:,.0f} to {scale.high:,.0f}" if scale.high else f"{scale.low:,.0f} or more"
    lines = [
        f"Over the last fifth of training the gradient noise scale{of} is {scale.tokens:,.0f} tokens (95% interval "
        f"{interval}); a step has {run.batch:,}."
    ]
    if arm.critical is not None and arm.critical.hyperbola is not None:
        ratio = arm.critical.hyperbola.tokens / scale.tokens
        agrees = "agree within" if 1 / FACTOR <= ratio <= FACTOR else "do not agree within"
        lines.append(
            f"The critical batch size measured is {ratio:.2g} times that: the two {agrees} a factor {FACTOR:g}."
        )
    return lines


def _edges(arm: Arm) -> list[str]:
    if not arm.at_an_edge:
        return []
    sizes = ", ".join(f"{batch:,}" for batch in arm.at_an_edge)
    return [
        f"At {sizes} tokens a step the fastest learning rate is the smallest or the largest that was run, and another "
        "may take fewer steps: widen the grid before you rely on this."
    ]
