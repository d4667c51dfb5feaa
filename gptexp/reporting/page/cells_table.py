"""The table of runs on a page: swept values, progress, losses, and what to do with each run."""

from collections.abc import Sequence
from dataclasses import dataclass

from gptexp.process.terminal import as_command
from gptexp.process.words import duration, shown
from gptexp.reporting.listings.progress import not_started
from gptexp.reporting.listings.records import Run, tokenizers
from gptexp.reporting.listings.table import BITS, LOSS, NAME, SPEED, STATUS, TOKENS, informative, metric_columns
from gptexp.reporting.listings.terminal_table import Column
from gptexp.reporting.page.overview import link_to
from gptexp.reporting.page.report import Report
from gptexp.storage import run_dir

KEPT = ("lr", "total_batch_size", "seed")  # columns that come first in each table of runs, before other swept keys


def _train_s(run: Run) -> float | None:
    return run.summary.get("train_s")


def _newest_loss(run: Run) -> float | None:
    return run.loss if run.loss is not None or not run.val else run.val[-1].loss


def _newest_loss_in_words(run: Run) -> str:
    loss = _newest_loss(run)
    return "" if loss is None else f"{loss:.4f}{' so far' if run.loss is None else ''}"


TIME = Column[Run]("time", "time", _train_s, words=lambda r: "" if (s := _train_s(r)) is None else duration(s))
NEWEST_LOSS = Column[Run](LOSS.key, LOSS.title, _newest_loss, words=_newest_loss_in_words)
BEST_LOSS = Column[Run]("best_val_loss", "best val loss", lambda run: run.best_loss, ".4f")
MINOR = ("seed", "gap", BITS.key, TOKENS.key, SPEED.key, TIME.key)  # left out on a phone


@dataclass(frozen=True)
class Row:
    """A cell of the sweep. If it has not started, `run` holds only what was planned."""

    run: Run
    share: float  # share of its tokens that are done
    is_best: bool
    link: str  # relative address of its page, for a live page
    commands: list[tuple[str, str]]  # what the command does, the command


@dataclass(frozen=True)
class CellsTable:
    columns: list[Column[Run]]
    rows: list[Row]


def cells_table(report: Report, is_live: bool = False) -> CellsTable | None:
    """A row for each cell of a sweep, started or not; None for a single run."""
    runs = [*report.analysis.runs, *not_started(report.directory, report.analysis.runs, report.sweep)]
    if report.sweep is None and len(runs) == 1:
        return None
    keys = report.analysis.differing
    runs.sort(key=lambda run: ([str(run.config.get(key)) for key in keys], run.batch, run.lr, run.seed))
    lowest = min((run.loss for run in runs if run.loss is not None), default=None)

    def above_lowest(run: Run) -> float | None:
        return None if run.loss is None or lowest is None else run.loss - lowest

    losses = [NEWEST_LOSS, STATUS, Column("gap", "above lowest", above_lowest, ".4f")]
    columns = [
        *(column for column in informative(runs) if column.key in KEPT),
        *map(_key_column, keys, _titles(keys)),
        *(losses if lowest is not None else [STATUS]),
        *([BITS] if len(tokenizers(runs)) > 1 else []),
        *metric_columns(runs),
        *(column for column in (SPEED, TIME) if any(column.value(run) for run in runs)),
    ]
    shares = {cell.name: cell.share for cell in report.cells}
    best = {run.name for run in report.analysis.best_runs}
    rows = [
        Row(run, shares.get(run.name, 0.0), run.name in best, link_to(run.directory.name), commands(run, is_live))
        for run in runs
    ]
    return CellsTable(columns, rows)


def results_table(runs: Sequence[Run]) -> CellsTable:
    """A row for each of `runs`, in their order: its name and its results."""
    results = (LOSS, BEST_LOSS, BITS, *metric_columns(runs), STATUS, TOKENS, SPEED, TIME)
    columns = [NAME, *(column for column in results if any(column.value(run) is not None for run in runs))]
    columns = [NEWEST_LOSS if column is LOSS else column for column in columns]
    rows = [Row(run, run.share, False, link_to(run.directory.name), commands(run)) for run in runs]
    return CellsTable(columns, rows)


def _key_column(key: str, title: str) -> Column[Run]:
    def value(run: Run) -> str | None:
        return None if run.config.get(key) is None else shown(run.config[key])

    return Column(key, title, value)


def _titles(keys: Sequence[str]) -> list[str]:
    """The last part of each key if no other key ends so, else the whole key."""
    last = [key.rpartition(".")[2] for key in keys]
    return [key if last.count(part) > 1 or part == "name" else part for key, part in zip(keys, last, strict=True)]


def commands(run: Run, is_live: bool = False) -> list[tuple[str, str]]:
    """What can be done with a run: in words, and as a command, with an absolute path because the page may be moved."""
    if run.status in ("interrupted", "failed"):
        verbs = {"resume": "Continue from its newest checkpoint"}
    elif run.status in run_dir.DONE:
        verbs = {"sample": "Generate text", "evaluate": "Evaluate it again, or on other text (--data FILE)"}
    elif run.status == "running" and not is_live:
        verbs = {"watch": "Watch it"}
    else:
        verbs = {}
    return [(what, as_command([verb, str(run.directory.absolute())])) for verb, what in verbs.items()]
