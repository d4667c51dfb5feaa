"""Everything that a report shows of a run or a sweep, as files, on the terminal or as a live page."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gptexp.process.terminal import printable
from gptexp.reporting.analysis import Analysis, analyse
from gptexp.reporting.answers import Answer, answers_of
from gptexp.reporting.figures import figures
from gptexp.reporting.finding import BEHIND_NATS, WITHIN, Verdict
from gptexp.reporting.overview import Overview, overview
from gptexp.reporting.progress import Progress, is_going_on, survey
from gptexp.reporting.proposals import Proposal, proposals
from gptexp.reporting.records import Run, find_runs, read_run
from gptexp.reporting.vega_lite import Figure
from gptexp.reporting.verdict import verdict
from gptexp.storage import sweep_record
from gptexp.storage.sweep_record import SweepRecord


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
    further: list[Proposal]  # to run next
    figures: list[Figure]


def build_report(
    directory: Path, read: Callable[[Path], Run] = read_run, behind_nats: float = BEHIND_NATS, within: float = WITHIN
) -> Report:
    """The report of the run or the sweep in `directory`; `read` reads a run directory, and may cache runs.

    `behind_nats`: see `arms.falls_behind`; `within`: see `proposals`.

    Raises `ConfigError` if `directory` holds neither.
    """
    read = cache(read)  # for progress and results
    sweep = sweep_record.load(directory)
    cells = survey(directory, read)
    goes_on = is_going_on(directory, cells)
    analysis = analyse(printable(directory.resolve().name), find_runs(directory, read))
    further = proposals(analysis, sweep, within) if sweep is not None else []
    return Report(
        directory,
        analysis,
        cells,
        sweep,
        goes_on,
        overview(directory, analysis, cells, sweep, goes_on),
        answers_of(analysis, sweep, further, within),
        verdict(analysis, behind_nats),
        further,
        figures(analysis),
    )
