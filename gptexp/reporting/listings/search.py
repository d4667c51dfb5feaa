"""The search of `gptexp tune` in a sweep's directory, as its log tells it."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptexp.process.terminal import printable
from gptexp.storage.search_log import SearchLog

Place = tuple[tuple[str, ...], int]  # what tells an arm from the others, and a batch size in tokens


@dataclass(frozen=True)
class Decision:
    """A run that was chosen, and the width of the 95% interval of its batch size before it and as expected after it."""

    cell: str
    place: Place
    lr: float
    why: str
    octaves: float | None  # None: no optimum was bracketed
    expected_octaves: float | None


@dataclass(frozen=True)
class SearchHistory:
    """What the commands of a search have decided."""

    key: str  # the number that is searched
    within: float  # octaves on each side at which the newest command stops
    prior: dict[Place, float]  # the learning rates that it expected before any run
    spread: float  # standard deviation of `prior`, in octaves
    budget: str | None
    decisions: list[Decision]
    stopped: dict[Place, str]  # why the newest command made no further run; empty while it goes on
    seconds: float  # of all commands
    tokens: int  # of all runs that were chosen

    def stop_of(self, runs: Collection[str], batch: int) -> str:
        """Why no further run was made at a batch size of the arm with these runs; "" if it is not known."""
        arm = self._arm_of(runs)
        return "" if arm is None else self.stopped.get((arm, batch), "")

    def prior_of(self, runs: Collection[str]) -> dict[int, float]:
        """Batch size -> `prior` of the arm with these runs."""
        arm = self._arm_of(runs)
        return {batch: lr for (other, batch), lr in self.prior.items() if other == arm}

    def _arm_of(self, runs: Collection[str]) -> tuple[str, ...] | None:
        return next((decision.place[0] for decision in self.decisions if decision.cell in runs), None)


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
    chosen = [event for event in log.events if event["event"] == "choose"]
    decisions = [
        Decision(printable(event["cell"]), _place(event), float(event["lr"]), event["why"], event["octaves"],
                 event["expected_octaves"])
        for event in chosen
    ]  # fmt: skip
    tokens = sum(int(event["tokens"]) for event in chosen)
    prior = {_place(one): float(one["lr"]) for one in newest["prior"]}
    within, spread = float(newest["within"]), float(newest["spread"])
    return SearchHistory(
        str(newest["key"]), within, prior, spread, newest["budget"], decisions, stopped, log.seconds(), tokens
    )


def _place(event: dict[str, Any]) -> Place:
    return tuple(map(str, event["arm"])), int(event["batch"])
