"""Progress of a sweep's cells and the time they still need, from their run directories alone."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gptexp.process.terminal import printable
from gptexp.process.words import duration
from gptexp.reporting.listings.records import Run, find_runs, lr_scaling, read_run
from gptexp.storage import run_dir, sweep_record
from gptexp.storage.sweep_record import SweepRecord

NOT_STARTED = "left"  # status of a cell that has not started
STATES = ("running", "completed", "diverged", "interrupted", "failed", "damaged", NOT_STARTED)


@dataclass(frozen=True)
class Progress:
    """Progress of one cell. The tokens of a branch are those after the checkpoint that it continues."""

    name: str
    status: str  # one of `STATES`
    tokens: int  # trained on so far
    of_tokens: int  # length of the run; 0 if unknown
    loss: float | None  # the newest validation loss, in nats per token
    seconds_left: float | None  # of training; None while no cell has measured a speed
    problem: str | None = None  # one line: what of the cell could not be read
    branch: str | None = None  # RUN@STEP, the checkpoint of another run that it continues

    @property
    def share(self) -> float:
        return self.tokens / self.of_tokens if self.of_tokens else 0.0


def survey(directory: Path, read: Callable[[Path], Run] = read_run) -> list[Progress]:
    """Progress of every cell of a sweep, started or not, or of a single run.

    `read` reads a run directory; it may cache runs. Raises `ConfigError` if `directory` holds neither.
    """
    sweep = sweep_record.load(directory)
    planned = {printable(name): cell for name, cell in sweep.cells.items()} if sweep is not None else {}
    if sweep is not None and planned:
        runs = [read(directory / name) for name in sweep.cells if run_dir.is_run(directory / name)]
    else:
        runs = find_runs(directory, read)
    rates: dict[int, list[float]] = {}
    for run in [run for run in runs if run.summary.get("wall_s")] or runs:
        if rate := _rate(run):
            rates.setdefault(run.batch, []).append(rate)
    usual = statistics.median([rate for of_batch in rates.values() for rate in of_batch]) if rates else None

    def seconds_for(batch: int, tokens: int) -> float | None:
        rate = statistics.median(rates[batch]) if batch in rates else usual
        return tokens / rate if rate else None

    cells = []
    for run in [*runs, *not_started(directory, runs, sweep)]:
        cell = planned.get(run.name)
        length = (cell.tokens if cell is not None else run.of_tokens) - run.first_tokens
        tokens = max([p.tokens - run.first_tokens for p in (*run.train[-1:], *run.val[-1:])], default=0)
        if run.status == "completed":
            length = tokens  # an early stop ends a run before its planned length
        loss = run.val[-1].loss if run.val else None
        left = 0.0 if run.status in run_dir.DONE else seconds_for(run.batch, max(0, length - tokens))
        cells.append(Progress(run.name, run.status, tokens, length, loss, left, run.problem, run.branch))
    # Cells that Optuna has not chosen yet are assumed to be like the others.
    tokens = round(statistics.median(cell.of_tokens for cell in cells)) if cells else 0
    batch = round(statistics.median(run.batch for run in runs)) if runs else 0
    to_choose = sweep.to_choose if sweep is not None else 0
    cells += [Progress("to be chosen", NOT_STARTED, 0, tokens, None, seconds_for(batch, tokens))] * to_choose
    return sorted(cells, key=lambda cell: (STATES.index(cell.status), cell.name))


def not_started(directory: Path, runs: Sequence[Run], sweep: SweepRecord | None) -> list[Run]:
    """The cells of a sweep that have not started. Keys that were not swept come from `runs`, which have begun."""
    begun, planned = {run.name for run in runs}, []
    for name, cell in sweep.cells.items() if sweep is not None else ():
        if printable(name) not in begun:
            run = Run(printable(name), directory / name, NOT_STARTED, cell.values, batch=cell.total_batch_size)
            run.of_tokens, run.first_tokens = cell.tokens, cell.first_tokens
            with suppress(ValueError, TypeError):  # values that somebody edited
                config = {**(runs[0].config if runs else {}), **cell.values}
                run.lr = float(config.get("optim.lr", 0.0)) * lr_scaling(config, run.batch)
                run.seed = int(config.get("train.seed", 0))
            planned.append(run)
    return planned


def _rate(run: Run) -> float | None:
    """Tokens per second: including evaluations once a process of the run has ended, else of training alone."""
    if wall_s := run.summary.get("wall_s"):
        return float((run.summary.get("tokens", run.first_tokens) - run.first_tokens) / wall_s)
    return run.tokens_per_s


def is_unfinished(sweep: SweepRecord, runs: Sequence[Run], batch: int) -> bool:
    """Whether a cell of the sweep runs or waits at a batch size (tokens); `runs`: those that have begun."""
    statuses = {run.name: run.status for run in runs}
    planned = [name for name, cell in sweep.cells.items() if cell.total_batch_size == batch]
    planned_statuses = [statuses.get(printable(name), NOT_STARTED) for name in planned]
    begun_statuses = [run.status for run in runs if run.batch == batch]
    return not {"running", "interrupted", NOT_STARTED}.isdisjoint(planned_statuses + begun_statuses)


def ready_in(cells: Sequence[Progress]) -> float | None:
    """Seconds until all cells are done if as many run at once as now. None if a cell's `seconds_left` is None."""
    times = [cell.seconds_left for cell in cells if cell.status not in run_dir.DONE]
    if any(seconds is None for seconds in times):
        return None
    at_once = max(1, sum(cell.status == "running" for cell in cells))
    return max([sum(filter(None, times)) / at_once, *(s or 0.0 for s in times)], default=0.0)


def lines_of(cells: Sequence[Progress]) -> list[str]:
    """For the terminal: a line for each cell, and one for those that are yet to be chosen."""
    lines = Counter(map(line_of, cells))
    return [line if count == 1 else f"{line} ({count} cells)" for line, count in lines.items()]


def line_of(cell: Progress) -> str:
    """A line for the terminal."""
    loss = f"val loss {cell.loss:.4f}" if cell.loss is not None else ""
    share = f"{cell.share:4.0%}" if cell.of_tokens else ""
    branch = f"  (from {cell.branch})" if cell.branch else ""
    problem = f"  ({cell.problem})" if cell.problem else ""
    return f"{in_words(cell.status):<12}{share:<6}{loss:<17}{cell.name}{branch}{problem}"


def in_words(status: str) -> str:
    return "not started" if status == NOT_STARTED else status


def is_going_on(directory: Path, cells: Sequence[Progress]) -> bool:
    """Whether a process works on the run or the sweep in `directory`, also if it is between two cells."""
    return any(cell.status == "running" for cell in cells) or run_dir.is_swept(directory)


def time_left(cells: Sequence[Progress], goes_on: bool) -> tuple[str, str]:
    """The time until all cells are done, and the condition of this estimate; ("", "all done") if they are.

    `goes_on`: see `is_going_on`.
    """
    seconds = ready_in(cells)
    if all(cell.status in run_dir.DONE for cell in cells):
        return "", "all done"
    if seconds is None:
        return "unknown", "until a cell has logged a step"
    if len(cells) == 1:
        return duration(seconds), "" if goes_on else "after a restart"
    return duration(seconds), "if as many run at once as now" if goes_on else "after a restart, one cell at a time"


def by_status(cells: Sequence[Progress]) -> list[str]:
    """The number of cells of each status that occurs, for example "2 running"."""
    counts = Counter(cell.status for cell in cells)
    return [f"{counts[state]} {in_words(state)}" for state in STATES if counts[state]]


def in_all(cells: Sequence[Progress], goes_on: bool) -> str:
    """One line: the number of cells by status, and the time until all are done. `goes_on`: see `is_going_on`."""
    left, condition = time_left(cells, goes_on)
    when = f"time left: {left} {condition}".strip() if left else condition
    if len(cells) == 1:
        return f"{cells[0].status}; {when}"
    first, *others = by_status(cells)
    number, status = first.split(" ", 1)
    statuses = ", ".join([f"{number} of {len(cells)} cells {status}", *others])  # there are at least two
    return f"{statuses}; {when}"
