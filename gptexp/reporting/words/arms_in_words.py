"""What the report says of the arms of a sweep side by side."""

import math
from collections.abc import Iterator, Sequence

from gptexp.process.words import listed
from gptexp.reporting.statistics.analysis import Arm
from gptexp.reporting.statistics.arms import Limit, Transfer, clearest_gap, falls_behind, transfers
from gptexp.reporting.statistics.law import SLOPES, Law, independent_difference
from gptexp.reporting.words.finding import OF_LOWEST, Finding, limits_of_law, nats_higher


def arms_in_words(arms: Sequence[Arm], behind_nats: float) -> Iterator[Finding]:
    """Yield the findings on several arms; none on a single one."""
    if len(arms) < 2:
        return
    yield from _laws(arms)
    yield from _losses(arms)
    yield from _behind(arms, behind_nats)
    for transfer in transfers(arms):
        yield _transfer(transfer)


def _laws(arms: Sequence[Arm]) -> Iterator[Finding]:
    laws = [(arm, arm.law) for arm in arms if arm.law is not None]
    if len(laws) < 2:
        return
    described = "; ".join(f"{arm.label} {_follows(law)}" for arm, law in laws)
    yield Finding(f"The best learning rate over the batch size, arm by arm: {described}.")
    clearest = clearest_gap([arm.curves.octaves for arm, _ in laws])
    if clearest is None:
        return
    one, other, gap = clearest
    pairs = math.comb(len(laws), 2)
    chosen = f", corrected for {pairs} pairs" if pairs > 1 else ""
    interval = f"{gap.value:.2f} (95% interval {gap.low:.2f} to {gap.high:.2f}{chosen})"
    differ = "do not differ significantly" if 0 in gap else "differ"
    yield Finding(
        f"The exponents of {laws[one][0].label} and {laws[other][0].label} {differ}: their difference is {interval}.",
        "It is that of the ratio of their best learning rates at the batch sizes of both, so a curve that they share "
        "has no part in it.",
    )


def _follows(law: Law) -> str:
    admitted = [f"'{name}'" for name, slope in SLOPES.items() if law.admits(slope)]
    limits = " and ".join(few_words for few_words, _ in limits_of_law(law))
    verb = "agrees with" if limits or len(admitted) > 1 else "follows"
    rules = " and ".join(admitted) or "none of the usual rules"
    exponent = f"exponent {law.exponent:.2f} ({law.low:.2f} to {law.high:.2f})"
    return f"{verb} {rules}, {exponent}" + (f", but {limits}" if limits else "")


def _losses(arms: Sequence[Arm]) -> Iterator[Finding]:
    """Compare the arms at each batch size, each at its own best learning rate."""
    for batch in sorted({batch for arm in arms for batch in arm.curves.optima}):
        losses = {arm.label: arm.curves.best_losses[batch] for arm in arms if batch in arm.curves.optima}
        others = [arm.label for arm in arms if batch in arm.losses and arm.label not in losses]
        open_ = [f"{listed(others)} {'has' if len(others) == 1 else 'have'} no bracketed optimum"] if others else []
        if len(losses) < 2:
            if open_:
                yield Finding(f"At {batch:,} tokens a step the arms cannot be compared: {open_[0]}.")
            continue
        best = min((arm for arm in arms if arm.label in losses), key=lambda arm: arm.curves.optima[batch].loss).label
        gaps = [f"{label} is {nats_higher(independent_difference(of_arm, losses[best]), len(losses))}"
                for label, of_arm in losses.items() if label != best]  # fmt: skip
        yield Finding(f"At {batch:,} tokens a step {best} has the lowest loss: {'; '.join(gaps + open_)}.", OF_LOWEST)


def _behind(arms: Sequence[Arm], nats: float) -> Iterator[Finding]:
    limits = [(arm, limit) for arm in arms if (limit := falls_behind(arm.curves.best_losses, nats)) is not None]
    if not limits:
        return
    described = "; ".join(f"{arm.label}: {_limit(limit)}" for arm, limit in limits)
    yield Finding(
        f"The batch size at which an arm falls {nats:g} nats behind its own lowest loss at smaller ones: {described}.",
        "Each batch size counts at its own best learning rate; between two of them the batch size is interpolated. "
        "Losses that may be equal to the lowest are averaged with it.",
    )


def _limit(limit: Limit) -> str:
    if limit.tokens is None:
        perhaps = f", perhaps from {limit.low:,.0f} on" if limit.low is not None else ""
        return f"not up to {limit.largest:,} tokens a step{perhaps}"
    interval = f"{limit.low:,.0f} " + (f"to {limit.high:,.0f}" if limit.high is not None else "or more")
    return f"{limit.tokens:,.0f} tokens a step (95% interval {interval})"


def _transfer(t: Transfer) -> Finding:
    first, *_, last = t.optima
    of = f"{t.label}: from" if t.label else "From"
    f = t.factor
    moves = "does not move significantly: it changes" if 1 in f else "moves"
    return Finding(
        f"{of} {t.key}={first} to {last} the best learning rate at {t.batch:,} tokens a step {moves} by a factor of "
        f"{f.value:.2f} (95% interval {f.low:.2f} to {f.high:.2f}).",
        "It is " + ", ".join(f"{o.lr:.3g} at {size}" for size, o in t.optima.items()) + ".",
    )
