"""Steps without a line in metrics.jsonl, because somebody cut, edited or deleted the file."""

from collections.abc import Sequence
from itertools import chain, pairwise

from gptexp.process.words import counted


def missing_steps(logged: Sequence[int], end: int, log_every: int, first: int = 0) -> list[range]:
    """Return the ranges of steps from `first` to before `end` that should have a line and have none.

    `logged` holds the steps that have one, in the order of the lines. A run may have been resumed with another
    `train.log_every`. So a distance between two lines counts as regular if a neighbouring distance is as large, and of
    two equal gaps with one line between them, neither is found.
    """
    due = -(-first // log_every) * log_every  # the first logged step; a branch may begin between two logged steps
    if not logged:
        return [range(first, end)] if end > due else []
    distances = [after - before for before, after in pairwise(chain(logged, [end]))]
    lead = max(due - first, distances[0] - 1 if first else 0)
    gaps = [range(first, logged[0])] if logged[0] - first > lead else []
    regular = max(log_every, 1)
    for number in [number for number, distance in enumerate(distances) if distance > regular]:
        distance, neighbours = distances[number], distances[max(0, number - 1) : number + 2]
        if neighbours.count(distance) == 1 and distance == max(neighbours):
            gaps.append(range(logged[number] + 1, logged[number] + distance))
    return gaps


def described(gaps: Sequence[range]) -> str:
    """The gaps in one line, at most three of them. Steps are counted from 1, as everywhere in text for people."""
    parts = [f"{gap.start + 1} to {gap.stop}" if gap.stop - gap.start > 1 else f"{gap.stop}" for gap in gaps[:3]]
    more = f" and {counted(len(gaps) - 3, 'further gap')}" if len(gaps) > 3 else ""
    steps = "step" if len(gaps) == 1 and " " not in parts[0] else "steps"
    return f"no line for {steps} {', '.join(parts)}{more}: the file may have been cut"
