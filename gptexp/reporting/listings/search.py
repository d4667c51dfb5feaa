"""The search of `gptexp tune` in a sweep's directory, as its log tells it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptexp.config.budget import Budget
from gptexp.process.terminal import printable
from gptexp.storage import run_dir
from gptexp.storage.search_log import SearchLog

Place = tuple[tuple[str, ...], int]  # what tells an arm from the others, and a batch size in tokens
STOPPED = {  # why no further run is made -> in words
    "narrow": "narrow enough",
    "flat": "flat: any will do",
    "exhausted": "no run would help",
    "budget": "budget spent",
    "law": "by the law",
    "decided": "the arms' difference is known",
    "failed": "a run failed",
}
UNSETTLED = {"budget", "failed", "interrupted"}  # reasons that leave something to do


@dataclass(frozen=True)
class Decision:
    """A run that was chosen, and the width of the 95% interval at its place: before it, expected after it, and then.

    Widths are in octaves of the searched key; of a run that compares arms in nats of the loss at its best value. They
    are None where no optimum was bracketed.
    """

    number: int  # of the runs of the search, from 1
    cell: str
    place: Place
    lr: float
    seed: int
    why: str  # in words
    unit: str  # octaves or nats
    before: float | None
    expected: float | None
    after: float | None  # None also while it is not known
    is_newest: bool  # it has ended, and nothing was decided at its place since


@dataclass(frozen=True)
class SearchHistory:
    """What the commands of a search have decided."""

    key: str  # the number that is searched
    within: float  # octaves on each side at which the newest command stops
    compares: bool  # the newest command stops when the difference of the arms is known
    prior: dict[Place, float]  # the learning rates that it expected before any run
    spread: float  # standard deviation of `prior`, in octaves
    budget: Budget | None
    decisions: list[Decision]
    optima: dict[Place, tuple[float, float, float]]  # the best value and its 95% interval, if nothing has ended since
    stopped: dict[Place, str]  # why the newest command made no further run; empty while it goes on
    seconds: float  # of all commands
    tokens: int  # of all runs that were chosen

    @property
    def unit(self) -> str:
        """The unit of the widths that the newest command narrows."""
        return "nats" if self.compares else "octaves"

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to do for the newest command."""
        return bool(self.stopped) and {"narrow", "flat", "exhausted", "law", "decided"}.issuperset(
            self.stopped.values()
        )

    @property
    def spent(self) -> dict[str, float]:
        """Unit of a budget -> how much all commands have spent."""
        return {"seconds": self.seconds, "runs": len(self.decisions), "tokens": self.tokens}

    def stop_of(self, runs: Collection[str], batch: int) -> str:
        """Why no further run was made at a batch size of the arm with these runs; "" if it is not known."""
        arm = self.arm_of(runs)
        return "" if arm is None else self.stopped.get((arm, batch), "")

    def prior_of(self, runs: Collection[str]) -> dict[int, float]:
        """Batch size -> `prior` of the arm with these runs."""
        arm = self.arm_of(runs)
        return {batch: lr for (other, batch), lr in self.prior.items() if other == arm}

    def arm_of(self, runs: Collection[str]) -> tuple[str, ...] | None:
        """What tells the arm with these runs from the others; None if none of them was chosen."""
        return next((decision.place[0] for decision in self.decisions if decision.cell in runs), None)

    def knowing(self, newest: Mapping[Place, float]) -> "SearchHistory":
        """The history with the widths of now: the log has a width only when the next run is decided."""
        decisions = [
            replace(decision, after=newest.get(decision.place)) if decision.is_newest else decision
            for decision in self.decisions
        ]
        return replace(self, decisions=decisions)

    def widths(self, place: Place) -> list[tuple[int, float]]:
        """The number of each run at a place and the width after it, in `unit`, where both are known.

        If a width was known before the first of these runs, it is the first one, with the number of the run before.
        """
        there = [decision for decision in self.decisions if decision.place == place and decision.unit == self.unit]
        first = [(one.number - 1, one.before) for one in there[:1] if one.before is not None]
        return first + [(one.number, one.after) for one in there if one.after is not None]


def search_of(directory: Path) -> SearchHistory | None:
    """The search in a sweep's directory; None if there is none, or if its log is not one of `gptexp tune`."""
    log = SearchLog(directory)
    if not any(event["event"] == "start" for event in log.events):
        return None
    try:
        return _search(log)
    except (KeyError, TypeError, ValueError):
        return None


def _search(log: SearchLog) -> SearchHistory:
    starts = [number for number, event in enumerate(log.events) if event["event"] == "start"]
    newest = log.events[starts[-1]]
    stopped: dict[Place, str] = {}
    for event in log.events[starts[-1] :]:
        if event["event"] == "stop":
            stopped = {_place(one): printable(str(one["why"])) for one in event["stopped"]}
    decisions = list(_decisions(log.events))
    optima: dict[Place, tuple[float, float, float]] = {}
    for event in log.events:
        if event["event"] == "end":
            optima = {}
        elif "optima" in event:
            optima = {_place(one): (float(one["lr"]), float(one["low"]), float(one["high"])) for one in event["optima"]}
    return SearchHistory(
        key=str(newest["key"]),
        within=float(newest["within"]),
        compares=bool(newest.get("compare")),
        prior={_place(one): float(one["lr"]) for one in newest["prior"]},
        spread=float(newest["spread"]),
        budget=None if newest["budget"] is None else Budget(**newest["budget"]),
        decisions=decisions,
        optima=optima,
        stopped=stopped,
        seconds=log.seconds(),
        tokens=sum(int(event["tokens"]) for event in log.events if event["event"] == "choose"),
    )


def _decisions(events: Sequence[dict[str, Any]]) -> Iterator[Decision]:
    compares, number = False, 0
    for index, event in enumerate(events):
        if event["event"] == "start":
            compares = bool(event.get("compare"))
        if event["event"] != "choose":
            continue
        number += 1
        end, place = _end_of(event["cell"], events, index), _place(event)
        following = events[end:] if end is not None else []
        later = [other for other in following if other["event"] == "choose" and _place(other) == place]
        yield Decision(
            number=number,
            cell=printable(event["cell"]),
            place=place,
            lr=float(event["lr"]),
            seed=int(event["seed"]),
            why=why_in_words(event["why"], event["repeat"]),
            unit="nats" if compares else "octaves",
            before=_width(event["width"]),
            expected=_width(event["expected_width"]),
            after=_width(later[0]["width"]) if later else None,
            is_newest=end is not None and not later,
        )


def _end_of(cell: str, events: Sequence[dict[str, Any]], chosen: int) -> int | None:
    """The index of the event after which the result of a cell was known; None if it is not known yet.

    After a kill the log lacks an end, and the next command reads the result when it starts.
    """
    ends = [
        index
        for index, event in enumerate(events)
        if index > chosen and event["event"] == "end" and event["cell"] == cell and event["status"] in run_dir.DONE
    ]
    if ends:
        return ends[0]
    failed = any(event["event"] == "end" and event["cell"] == cell for event in events[chosen:])
    starts = [index for index, event in enumerate(events) if index > chosen and event["event"] == "start"]
    return starts[-1] if starts and not failed else None


def why_in_words(why: str, repeat: int) -> str:
    """Why a run is made. `repeat`: how many runs its learning rate had before it."""
    return {
        "first": "the first run there",
        "bracket": "is the loss lower there?",
        "noise": "another seed, to measure the noise",
        "form": "between the others, to tell the form of the curve",
        "narrow": "another seed, to narrow the interval" if repeat else "to narrow the interval",
    }[why]


def stopped_in_words(stopped: str, low: float | None, high: float | None) -> str:
    """Why no further run is made. `low` and `high`: within these a run loses less than a seed's spread."""
    if stopped == "flat" and low is not None and high is not None:
        return f"flat: any of {low:.2g} to {high:.2g} will do"
    return STOPPED.get(stopped, stopped)


def _place(event: dict[str, Any]) -> Place:
    return tuple(printable(str(text)) for text in event["arm"]), int(event["batch"])


def _width(value: Any) -> float | None:
    return None if value is None else float(value)
