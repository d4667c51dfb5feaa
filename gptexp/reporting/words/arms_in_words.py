"""What the report says of the arms of a sweep side by side."""

import math
from collections.abc import Iterator, Sequence

from gptexp.process.words import listed
from gptexp.reporting.statistics.analysis import Arm
from gptexp.reporting.statistics.arms import Limit, Transfer, clearest_gap, falls_behind, transfers
from gptexp.reporting.statistics.law import independent_difference
from gptexp.reporting.words.finding import OF_LOWEST, Finding, interval_of, nats_higher, tokens


def arms_in_words(arms: Sequence[Arm], behind_nats: float) -> Iterator[Finding]:
    """Yield the findings on several arms; none on a single one."""
    if len(arms) < 2:
        return
    yield from _exponents(arms)
    yield from _losses(arms)
    yield from _behind(arms, behind_nats)
    yield from map(_transfer, transfers(arms))


def _exponents(arms: Sequence[Arm]) -> Iterator[Finding]:
    fitted = [arm for arm in arms if arm.law is not None]
    clearest = clearest_gap([arm.curves.octaves for arm in fitted])
    if clearest is None:
        return
    one, other, gap = clearest
    pairs = math.comb(len(fitted), 2)
    corrected = f", corrected for {pairs} pairs" if pairs > 1 else ""
    differ = "do not differ significantly" if 0 in gap else "differ"
    yield Finding(
        f"The exponents of {fitted[one].label} and {fitted[other].label} {differ}: their difference is {gap.value:.2f} "
        f"({interval_of(gap.low, gap.high)}{corrected}).",
        "The difference is that of the ratio of their best learning rates at the batch sizes of both, so a curve that "
        "they share has no part in it.",
    )


def _losses(arms: Sequence[Arm]) -> Iterator[Finding]:
    """Compare the arms at each batch size, each at its own best learning rate."""
    for batch in sorted({batch for arm in arms for batch in arm.curves.optima}):
        known = {arm.label: arm.curves for arm in arms if batch in arm.curves.optima}
        others = [arm.label for arm in arms if batch in arm.losses and arm.label not in known]
        missing = [f"{listed(others)} {'has' if len(others) == 1 else 'have'} no bracketed optimum"] if others else []
        if len(known) > 1:
            best = min(known, key=lambda label: known[label].optima[batch].loss)
            losses = {label: curves.best_losses[batch] for label, curves in known.items()}
            gaps = [f"{label} is {nats_higher(independent_difference(losses[label], losses[best]), len(losses))}"
                    for label in losses if label != best]  # fmt: skip
            yield Finding(f"At {tokens(batch)} {best} has the lowest loss: {'; '.join(gaps + missing)}.", OF_LOWEST)
        elif missing:
            yield Finding(f"At {tokens(batch)} the arms cannot be compared: {missing[0]}.")


def _behind(arms: Sequence[Arm], nats: float) -> Iterator[Finding]:
    limits = [(arm.label, falls_behind(arm.curves.best_losses, nats)) for arm in arms]
    described = "; ".join(f"{label}: {_limit(limit)}" for label, limit in limits if limit is not None)
    if described:
        yield Finding(
            f"The batch size at which an arm falls {nats:g} nats behind its own lowest loss at smaller ones: "
            f"{described}.",
            "Each batch size counts at its own best learning rate; between two of them the batch size is interpolated. "
            "Losses that may be equal to the lowest are averaged with it.",
        )


def _limit(limit: Limit) -> str:
    if limit.tokens is None:
        perhaps = f", perhaps from {limit.low:,.0f} on" if limit.low is not None else ""
        return f"not up to {tokens(limit.largest)}{perhaps}"
    interval = f"{limit.low:,.0f} " + (f"to {limit.high:,.0f}" if limit.high is not None else "or more")
    return f"{tokens(limit.tokens)} (95% interval {interval})"


def _transfer(t: Transfer) -> Finding:
    first, *_, last = t.optima
    start, f = (f"{t.label}: from" if t.label else "From"), t.factor
    moves = "does not move significantly: it changes" if 1 in f else "moves"
    return Finding(
        f"{start} {t.key}={first} to {last} the best learning rate at {tokens(t.batch)} {moves} by a factor of "
        f"{f.value:.2f} ({interval_of(f.low, f.high)}).",
        "It is " + ", ".join(f"{o.lr:.3g} at {size}" for size, o in t.optima.items()) + ".",
    )
