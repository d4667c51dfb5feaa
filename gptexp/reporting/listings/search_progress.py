"""How far a search of `gptexp tune` is, from its log and its newest report. Nothing is fitted, so it takes no time."""

import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptexp.process.errors import ConfigError
from gptexp.process.words import counted, duration
from gptexp.reporting.listings.records import LR, Run, along, find_runs, of_arm, read_run
from gptexp.reporting.listings.search import Place, SearchHistory, search_of, stopped_in_words
from gptexp.storage import run_dir

REPORT = "report.json"
MOST_WIDTHS = 6  # in a line; of more the first one and the last ones are shown


@dataclass(frozen=True)
class Optimum:
    """The best value at a place, with its 95% interval, and within which values a run loses less than seeds differ."""

    lr: float
    low: float
    high: float
    loss_low: float | None = None
    loss_high: float | None = None
    tie_low: float | None = None
    tie_high: float | None = None


@dataclass(frozen=True)
class PlaceProgress:
    """What is known at one batch size of an arm."""

    arm: list[str]  # what tells it from the others
    total_batch_size: int  # tokens
    runs: int  # that have been chosen
    widths: list[float]  # of the 95% interval, in the order of the runs
    optimum: Optimum | None  # as of the newest decision or report; None if runs have ended since
    lowest_lr: float | None  # the value of the run with the lowest loss, whoever made it
    stopped: str  # why no further run is made; empty while the search goes on


@dataclass(frozen=True)
class SearchProgress:
    """The whole search."""

    history: SearchHistory
    places: list[PlaceProgress]

    def as_json(self) -> dict[str, Any]:
        history = self.history
        shared = {"key": history.key, "within": history.within, "unit": history.unit, "spent": history.spent}
        budget = asdict(history.budget) if history.budget is not None else None
        return {**shared, "budget": budget, "batch_sizes": [asdict(place) for place in self.places]}

    def lines(self) -> list[str]:
        """For the terminal."""
        history = self.history
        spent = f"{duration(history.seconds)} in {counted(len(history.decisions), 'run')}, {history.tokens:,} tokens"
        limit = f"of a budget of {history.budget}" if history.budget is not None else "without a budget"
        goal = "" if history.compares else f"; goal: {2 * history.within:g} octaves"
        name = "learning rate" if history.key == LR else history.key
        title = f"best {name} by tokens a step, and the width of its 95% interval{goal}"
        return ["", title, *(self._line(place) for place in self.places), f"spent: {spent}, {limit}"]

    def _line(self, place: PlaceProgress) -> str:
        name, unit = self.history.key.rpartition(".")[2], self.history.unit
        after = f"after {counted(place.runs, 'run')}"
        parts = []
        if place.widths:
            shown = [f"{width:.2g}" for width in place.widths]
            shown = shown if len(shown) <= MOST_WIDTHS else [shown[0], "…", *shown[-MOST_WIDTHS + 2 :]]
            parts.append(f"{' -> '.join(shown)} {unit} {after}")
        elif place.runs:
            parts.append(f"not bracketed yet {after}")
        elif place.optimum is None:
            parts.append("no runs yet")
        best = place.optimum
        if best is not None:
            parts.append(f"best {name} {best.lr:.3g} ({best.low:.3g} to {best.high:.3g})")
        elif place.lowest_lr is not None:
            parts.append(f"lowest loss at {name} {place.lowest_lr:.3g}")
        if place.stopped:
            parts.append(stopped_in_words(place.stopped, *((best.tie_low, best.tie_high) if best else (None, None))))
        arm = f" {' '.join(place.arm)}" if place.arm else ""
        return f"{place.total_batch_size:>11,}{arm}: {', '.join(parts)}"


def search_progress(directory: Path, read: Callable[[Path], Run] = read_run) -> SearchProgress | None:
    """The progress of the search in a sweep's directory; None if there is none. `read` may cache runs."""
    history = search_of(directory)
    if history is None:
        return None
    runs = {run.name: along(run, history.key) for run in find_runs(directory, read)}
    ended = {name for name, run in runs.items() if run.status in run_dir.DONE}
    known = {place: Optimum(*values) for place, values in history.optima.items()}
    optima = known | _reported(directory, history, ended)
    widths = {place: _width(optimum, history.compares) for place, optimum in optima.items()}
    history = history.knowing({place: width for place, width in widths.items() if width is not None})
    places = []
    for arm, batch in sorted({*history.prior, *(decision.place for decision in history.decisions)}):
        chosen = [decision.cell for decision in history.decisions if decision.place == (arm, batch)]
        arms = [of_arm(run.config) for name in chosen if (run := runs.get(name))][:1]
        there = [run for run in runs.values() if run.batch == batch and of_arm(run.config) in arms]
        losses = [(run.loss, run.lr) for run in there if run.loss is not None]
        of_place = [width for _, width in history.widths((arm, batch))]
        lowest = min(losses)[1] if losses else None
        optimum, stopped = optima.get((arm, batch)), history.stopped.get((arm, batch), "")
        places.append(PlaceProgress([*arm], batch, len(chosen), of_place, optimum, lowest, stopped))
    return SearchProgress(history, places)


def _width(optimum: Optimum, compares: bool) -> float | None:
    if not compares:
        return math.log2(optimum.high / optimum.low)
    return None if optimum.loss_low is None or optimum.loss_high is None else optimum.loss_high - optimum.loss_low


def _reported(directory: Path, history: SearchHistory, ended: Collection[str]) -> dict[Place, Optimum]:
    """The optima of the newest report, at the places of which it has all runs that have `ended`."""
    try:
        report = run_dir.read_json(directory / REPORT)
        known = {row["run"] for row in report["runs"] if row["status"] in run_dir.DONE}
        missing = {decision.place for decision in history.decisions if decision.cell in {*ended} - known}
        optima: dict[Place, Optimum] = {}
        for arm in report["arms"]:
            name = history.arm_of(arm["runs"])
            for curve in arm["curves"] if name is not None else ():
                if name is not None and curve["optimum"] is not None:
                    optima[name, curve["total_batch_size"]] = _optimum(curve["optimum"])
        for place, stopped in history.stopped.items():  # no run was made there
            rows = [row for row in report["answers"] if row["total_batch_size"] == place[1]]
            by_law = [row for row in rows if row["stopped"] == stopped == "law"]
            if len(by_law) == 1:
                optima.setdefault(place, _optimum(by_law[0]))
        return {place: optimum for place, optimum in optima.items() if place not in missing}
    except (ConfigError, KeyError, TypeError, ValueError):
        return {}


def _optimum(values: dict[str, Any]) -> Optimum:
    lr, low, high = (float(values[name]) for name in ("lr", "low", "high"))
    return Optimum(lr, low, high, *(values[name] for name in ("loss_low", "loss_high", "tie_low", "tie_high")))
