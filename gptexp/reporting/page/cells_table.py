"""The table of a sweep's cells on its page: swept values, progress, losses, and what to do with each cell."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from gptexp.process.terminal import as_command, printable
from gptexp.process.words import duration, shown
from gptexp.reporting.listings.progress import in_words, not_started
from gptexp.reporting.listings.records import Run
from gptexp.reporting.listings.table import BITS, COLUMNS, Column, chosen, tokenizers
from gptexp.reporting.page.overview import link_to
from gptexp.reporting.page.report import Report
from gptexp.storage import run_dir

KEPT = ("lr", "total_batch_size", "seed")  # columns of `COLUMNS` before those of other swept keys
NAME, STATUS, LOSS, TOKENS, SPEED = (
    next(column for column in COLUMNS if column.key == key)
    for key in ("run", "status", "final_val_loss", "tokens", "tokens_per_s")
)
TIME = Column("time", "time", lambda run: run.summary.get("train_s"), "")
BEST_LOSS = Column("best_val_loss", "best val loss", lambda run: run.best_loss, ".4f")
MINOR = ("seed", "gap", BITS.key, TOKENS.key, SPEED.key, TIME.key)  # left out on a phone


@dataclass(frozen=True)
class Entry:
    """One field of the table."""

    text: str
    value: float | str = ""  # to sort by; empty ones come last


@dataclass(frozen=True)
class Row:
    """A cell of the sweep. `run` of one that has not started holds only what was planned."""

    run: Run
    entries: list[Entry]  # one for each column
    share: float  # of its tokens that are done
    is_best: bool
    link: str  # relative address of its page, for a live page
    commands: list[tuple[str, str]]  # what the command does, the command


@dataclass(frozen=True)
class CellsTable:
    columns: list[Column]
    rows: list[Row]


def cells_table(report: Report, is_live: bool = False) -> CellsTable | None:
    """A row for each cell of a sweep, started or not; None for a single run."""
    runs = [*report.analysis.runs, *not_started(report.directory, report.analysis.runs, report.sweep)]
    if report.sweep is None and len(runs) == 1:
        return None
    keys = report.analysis.differing
    runs.sort(key=lambda run: ([str(run.config.get(key)) for key in keys], run.batch, run.lr, run.seed))
    winners = {run.name for run in report.analysis.best_runs}
    lowest = min((run.loss for run in runs if run.loss is not None), default=None)
    gap = Column("gap", "above lowest", lambda run: None if run.loss is None else run.loss - (lowest or 0.0), ".4f")
    columns = [
        *(column for column in chosen(runs, all_of_them=False) if column.key in KEPT),
        *(Column(key, title, partial(_config_value, key), "") for key, title in zip(keys, _titles(keys), strict=True)),
        *([LOSS, STATUS, gap] if lowest is not None else [STATUS]),
        *([BITS] if len(tokenizers(runs)) > 1 else []),
        *(column for column in (SPEED, TIME) if any(column.value(run) for run in runs)),
    ]
    shares = {cell.name: cell.share for cell in report.cells}
    rows = [
        Row(
            run,
            [_entry(column, run) for column in columns],
            shares.get(run.name, 0.0),
            is_best=run.name in winners,
            link=link_to(run.directory.name),
            commands=commands(run, is_live),
        )
        for run in runs
    ]
    return CellsTable(columns, rows)


def results_table(runs: Sequence[Run]) -> CellsTable:
    """A row for each of `runs`, in their order: its name and its results."""
    results = (LOSS, BEST_LOSS, BITS, STATUS, TOKENS, SPEED, TIME)
    columns = [NAME, *(column for column in results if any(map(column.value, runs)))]
    trained = [run.summary.get("tokens", run.first_tokens) - run.first_tokens for run in runs]
    shares = [tokens / (run.of_tokens - run.first_tokens) for run, tokens in zip(runs, trained, strict=True)]
    rows = [
        Row(
            run,
            [_entry(column, run) for column in columns],
            share,
            is_best=False,
            link=link_to(run.directory.name),
            commands=commands(run),
        )
        for run, share in zip(runs, shares, strict=True)
    ]
    return CellsTable(columns, rows)


def _titles(keys: Sequence[str]) -> list[str]:
    """The last part of each key if no other key ends so, else the whole key."""
    last = [key.rpartition(".")[2] for key in keys]
    return [key if last.count(part) > 1 or part == "name" else part for key, part in zip(keys, last, strict=True)]


def commands(run: Run, is_live: bool = False) -> list[tuple[str, str]]:
    """What can be done with a run: in words, and as a command. The page may be read in another directory."""
    if run.status in ("interrupted", "failed"):
        verbs = {"resume": "Continue from its newest checkpoint"}
    elif run.status in run_dir.DONE:
        verbs = {"sample": "Generate text", "evaluate": "Evaluate it again, or on other text (--data FILE)"}
    elif run.status == "running" and not is_live:
        verbs = {"watch": "Watch it"}
    else:
        verbs = {}
    return [(what, as_command([verb, str(run.directory.absolute())])) for verb, what in verbs.items()]


def _config_value(key: str, run: Run) -> str | None:
    value = run.config.get(key)
    return None if value is None else printable(shown(value))


def _entry(column: Column, run: Run) -> Entry:
    value, text = column.value(run), column.text(run)
    if column is STATUS:
        text = in_words(run.status)
    elif column is TIME and value is not None:
        text = duration(value)
    elif column is LOSS and value is None and run.val and run.val[-1].loss is not None:
        value = run.val[-1].loss
        text = f"{value:.4f} so far"
    return Entry(text, "" if value is None else value)
