"""`gptexp status DIR`: how far the cells of a sweep are, and when they will be done. Reads files only."""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from gptexp import run_dir
from gptexp.batch import run_length
from gptexp.errors import ConfigError

if TYPE_CHECKING:
    from gptexp.report.records import Run

STATES = ("running", "completed", "diverged", "interrupted", "failed", "damaged", "left")


@dataclass(frozen=True)
class Progress:
    """One cell."""

    name: str
    status: str  # one of `STATES`; "left": not begun
    tokens: int  # trained on so far
    of_tokens: int  # in all; 0 where nothing says
    loss: float | None  # the newest validation loss, in nats per token
    seconds_left: float | None  # of training; None: no cell has shown how fast it would go

    @property
    def share(self) -> float:
        """Of its tokens."""
        return self.tokens / self.of_tokens if self.of_tokens else 0.0


def survey(directory: Path, read: "Callable[[Path], Run] | None" = None) -> list[Progress]:
    """Every cell of a sweep, also those not begun; of a single run, that. Raises `ConfigError` for neither.

    `read` reads a run; one that remembers them spares reading those that have not changed.
    """
    from gptexp.report.records import find_runs, printable, read_run

    read = read or read_run
    sweep = run_dir.read_json(directory / run_dir.SWEEP)
    planned = sweep.get("cells", {})
    runs = {run.name: run for run in find_runs(directory, read)} if not planned else {}
    for name in planned:
        if (directory / name / run_dir.CONFIG).exists():
            runs[printable(name)] = read(directory / name)
    rates: dict[int, list[float]] = {}
    for run in runs.values():
        if run.tokens_per_s:
            rates.setdefault(run.batch, []).append(run.tokens_per_s)
    usual = statistics.median([rate for of_batch in rates.values() for rate in of_batch]) if rates else None

    def left(batch: int, tokens: int) -> float | None:
        rate = statistics.median(rates[batch]) if batch in rates else usual
        return tokens / rate if rate else None

    def progress(run: "Run") -> Progress:
        of = planned.get(run.name, {}).get("tokens") or _length(run)
        tokens = max([p.tokens for p in (*run.train[-1:], *run.val[-1:])], default=0)
        loss = run.val[-1].loss if run.val else None
        over = run.status in run_dir.DONE
        return Progress(run.name, run.status, tokens, of, loss, 0.0 if over else left(run.batch, max(0, of - tokens)))

    begun = [progress(run) for run in runs.values()]
    rest = [
        Progress(printable(name), "left", 0, cell["tokens"], None, left(cell["total_batch_size"], cell["tokens"]))
        for name, cell in planned.items()
        if printable(name) not in runs
    ]
    # Of cells that Optuna has yet to choose nothing is known, but that they are like those it has chosen.
    tokens = round(statistics.median([cell.of_tokens for cell in (*begun, *rest)])) if begun or rest else 0
    batch = round(statistics.median([run.batch for run in runs.values()])) if runs else 0
    chosen = [Progress("to be chosen", "left", 0, tokens, None, left(batch, tokens))] * sweep.get("to_choose", 0)
    return sorted([*begun, *rest, *chosen], key=lambda p: (STATES.index(p.status), p.name))


def _length(run: "Run") -> int:
    if not run.config:
        return 0
    steps, _ = run_length(run.config["train.max_tokens"], run.config["train.max_steps"], run.batch)
    return steps * run.batch


def ready_in(cells: list[Progress]) -> float | None:
    """Seconds until all cells are done, as many side by side as run now; None where no cell shows how fast they go."""
    times = [cell.seconds_left for cell in cells if cell.status not in run_dir.DONE]
    if any(seconds is None for seconds in times):
        return None
    at_once = max(1, sum(cell.status == "running" for cell in cells))
    return max([sum(filter(None, times)) / at_once, *(s or 0.0 for s in times)], default=0.0)


def seconds_shown(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def in_all(cells: list[Progress]) -> str:
    """How many cells are how far, and when all will be done."""
    seconds = ready_in(cells)
    counts = Counter(cell.status for cell in cells)
    said = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    if all(cell.status in run_dir.DONE for cell in cells):
        when = "all done"
    elif seconds is None:
        when = "no cell has shown yet how fast they go"
    else:
        when = f"done in about {seconds_shown(seconds)}"
        if len(cells) > 1:
            when += ", as they run now" if counts["running"] else ", one after the other, once started again"
    return f"{len(cells)} cells: {said}; {when}" if len(cells) > 1 else f"{cells[0].status}; {when}"


def main(argv: list[str] | None = None) -> None:
    """Say how far the cells of a sweep are: done, running, failed, left, and when all will be done."""
    parser = argparse.ArgumentParser(prog="gptexp status", description=main.__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="a sweep's directory, or a run's")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    args = parser.parse_args(argv)
    if not args.directory.is_dir():
        raise ConfigError(f"{args.directory}: no such directory; give a sweep or a run")
    cells = survey(args.directory)
    if args.json:
        print(json.dumps({"cells": [asdict(cell) for cell in cells], "ready_in_s": ready_in(cells)}, indent=1))
        return
    for cell in cells:
        loss = f"val loss {cell.loss:.4f}" if cell.loss is not None else ""
        share = f"{cell.share:4.0%}" if cell.of_tokens else ""
        print(f"{cell.status:<12}{share:<6}{loss:<17}{cell.name}")
    print(in_all(cells))


if __name__ == "__main__":
    from gptexp.cli import run_verb

    run_verb(main)
