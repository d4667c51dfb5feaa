"""Everything that a report shows of a run or a sweep, as files, on the terminal or as a live page."""

from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gptexp.process.terminal import as_command, printable
from gptexp.process.words import counted, shown
from gptexp.reporting.charts.figures import figures
from gptexp.reporting.charts.pictures import Drawing
from gptexp.reporting.charts.vega_lite import Figure
from gptexp.reporting.listings.frames import load_sweep
from gptexp.reporting.listings.progress import Progress, is_going_on, survey, time_left
from gptexp.reporting.listings.records import LR, Run, along, find_runs, read_run
from gptexp.reporting.listings.search import Place, SearchHistory, search_of
from gptexp.reporting.page.overview import Overview, overview
from gptexp.reporting.statistics.analysis import Analysis, analyse
from gptexp.reporting.statistics.law import Law
from gptexp.reporting.words.answers import Answer, answers_of
from gptexp.reporting.words.finding import Verdict
from gptexp.reporting.words.proposals import Proposal, merged, proposals
from gptexp.reporting.words.thresholds import BEHIND_NATS, WITHIN
from gptexp.reporting.words.verdict import verdict
from gptexp.storage import run_dir, sweep_record
from gptexp.storage.sweep_record import SweepRecord

if TYPE_CHECKING:
    from gptexp.reporting.listings.frames import DataFrame

Part = TypeVar("Part")


@dataclass(frozen=True)
class Report:
    """The content of a report. Its texts are printable."""

    directory: Path
    analysis: Analysis
    cells: list[Progress]
    sweep: SweepRecord | None
    goes_on: bool  # a process works on it, see `is_going_on`
    overview: Overview
    answers: list[Answer]
    verdict: Verdict
    further: list[Proposal]  # what to run next
    figures: list[Figure]
    search: SearchHistory | None = None  # of `gptexp tune`

    @property
    def objective(self) -> str:
        """The validation loss that the report is about."""
        return self.analysis.objective

    @property
    def laws(self) -> dict[str, Law]:
        """The law of each arm that has one: label, empty for the only arm, -> learning rate over the batch size."""
        return {arm.label: arm.law for arm in self.analysis.arms if arm.law is not None}

    def to_pandas(self) -> "DataFrame":
        """A row for each run, see `load_sweep`."""
        return load_sweep(self.directory)

    def _repr_html_(self) -> str:
        """The answers and the first figure, for a notebook."""
        keys = ("arm", "total_batch_size", "status", "lr", "low", "high", "loss", "wanted")
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(shown(getattr(answer, key)))}</td>' for key in keys)}</tr>"
            for answer in self.answers
        )
        head = "".join(f"<th>{key}</th>" for key in keys)
        pictures = (self.directory / "pictures" / f"{figure.key}.png" for figure in self.figures)
        image = next((path.read_bytes() for path in pictures if path.is_file()), b"")
        picture = f'<img width="640" src="data:image/png;base64,{b64encode(image).decode()}">' if image else ""
        return f"<table><tr>{head}</tr>{rows}</table>{picture}"

    @property
    def tab_title(self) -> str:
        """The title of the browser's tab: the progress, and what runs."""
        share = "" if self.overview.is_done else f"{self.overview.share:.0%} "
        return f"{share}{self.overview.title} · gptexp"

    @property
    def to_continue(self) -> list[tuple[str, list[str]]]:
        """How to go on with an unfinished sweep: in words and, if it has stopped, as commands, the newest last."""
        waiting = sum(cell.status not in run_dir.DONE for cell in self.cells)
        if self.goes_on and waiting:
            left = " ".join(filter(None, time_left(self.cells, self.goes_on)))
            cells = f"{counted(waiting, 'cell')} still to finish"
            return [] if self.further else [(f"Nothing yet: {cells}, time left {left}. Their results will tell.", [])]
        if self.sweep is None or not self.sweep.commands or not waiting:
            return []
        stopped = f"The sweep has stopped with {counted(waiting, 'cell')} left."
        if len(self.sweep.commands) == 1 or self.search is not None:
            how = "Its command goes on with them:"
        else:  # sweep.json does not say which command has which cells, and lacks earlier cells that never began
            how = (
                "Several commands made it, the newest is the last one. Each goes on with its own cells, and runs no "
                "cell again that is done:"
            )
        commands = self.sweep.commands if self.search is None else self.sweep.commands[-1:]
        return [(f"{stopped} {how}", list(map(as_command, commands)))]


def key_of(search: SearchHistory | None) -> str:
    """The key whose best value a report is about."""
    return search.key if search is not None else LR


def about(key: str, part: Part) -> Part:
    """A part of a report with the name of `key` in place of "learning rate"; see `records.along`."""
    if key == LR:
        return part
    changed: Any = part
    if isinstance(part, str):
        changed = part.replace("learning rates", f"values of {key}").replace("learning rate", key)
    elif isinstance(part, list):
        changed = [about(key, item) for item in part]
    elif isinstance(part, dict):
        changed = {name: about(key, item) for name, item in part.items()}
    elif is_dataclass(part) and not isinstance(part, type):
        changed = replace(part, **{field.name: about(key, getattr(part, field.name)) for field in fields(part)})
    return cast(Part, changed)


def _widths(search: SearchHistory, analysis: Analysis) -> dict[Place, float]:
    """The width of the interval of each arm and batch size, as a search counts it, where an optimum is bracketed."""
    widths = {}
    for arm in analysis.arms:
        name = search.arm_of({run.name for run in arm.runs})
        for batch, optimum in arm.curves.optima.items() if name is not None else ():
            width = optimum.loss_high - optimum.loss_low if search.compares else optimum.octaves
            widths[name or (), batch] = width
    return widths


def build_report(
    directory: Path,
    given: Callable[[Path], Run] = read_run,
    behind_nats: float = BEHIND_NATS,
    within: float | None = None,
    objective: str | None = None,
    drawing: Drawing | None = None,
) -> Report:
    """The report of the run or the sweep in `directory`; `given` reads a run directory, and may cache runs.

    `behind_nats`: see `arms.falls_behind`; `within`: see `proposals`; None is that of the search, if there was one.
    `objective`: the validation loss that the report is about; None: that of the newest run (`sweep.objective`).
    `drawing` begins to draw the figures while the rest is computed.

    Raises `ConfigError` if `directory` holds neither.
    """
    search = search_of(directory)
    key = key_of(search)
    read = cache(lambda path: along(given(path), key))  # progress and results read each run once
    recorded = sweep_record.load(directory)
    sweep = recorded and sweep_record.placed(recorded, directory)
    cells = survey(directory, read)
    goes_on = is_going_on(directory, cells)
    analysis = analyse(printable(directory.resolve().name), find_runs(directory, read, objective))
    if within is None:
        within = search.within if search is not None else WITHIN
    if search is not None:
        search = search.knowing(_widths(search, analysis))

    def ready(figure: Figure) -> None:
        if drawing is not None:
            drawing.add(figure.key, about(key, figure).spec)

    drawn = about(key, figures(analysis, search, ready))
    further = about(key, proposals(analysis, sweep, within, search)) if sweep is not None else []
    return Report(
        directory,
        analysis,
        cells,
        sweep,
        goes_on,
        overview(directory, analysis, cells, recorded, goes_on),
        answers_of(analysis, sweep, further, within, search),
        about(key, verdict(analysis, behind_nats)),
        merged(further),
        drawn,
        search,
    )
