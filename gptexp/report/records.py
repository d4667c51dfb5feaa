"""Runs as their directories tell of them: config, summary, the course of the losses. Reads files and nothing else.

A directory may belong to a run that is being trained, was killed, or has been damaged: what can be read counts, and
what cannot is said.
"""

import json
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

from gptexp import run_dir
from gptexp.config import result_deciding
from gptexp.errors import ConfigError

STATUSES = ("completed", "diverged", "interrupted", "running", "failed")
POINTS = 512  # of a run's steps, at least, that are kept for its curve; twice that at most
STEP_EVENT, EVAL_EVENT = '"event": "step"', '"event": "eval"'
STEP = re.compile(r'"step": (\d+)')


@dataclass(frozen=True)
class Point:
    """A moment of a run: after `step` updates, `tokens` tokens and `seconds` of training."""

    step: int
    tokens: int
    seconds: float
    loss: float | None  # nats per token; None: no number


@dataclass
class Run:
    """One run directory. Losses in nats per token."""

    name: str
    directory: Path
    status: str  # of summary.json; "running" while a process holds its lock, "damaged" where nothing tells
    config: dict[str, Any]  # dotted key -> value, of everything that decides the result
    batch: int = 0  # tokens of a step, over all ranks
    lr: float = 0.0  # peak learning rate
    seed: int = 0
    loss: float | None = None  # the final validation loss of a completed run
    summary: dict[str, Any] = field(default_factory=dict)
    train: list[Point] = field(default_factory=list)  # thinned
    val: list[Point] = field(default_factory=list)
    fingerprints: dict[int, str] = field(default_factory=dict)  # tokens -> hash of all that was read until then
    tokens_per_s: float | None = None  # median over the kept steps
    mfu: float | None = None  # the same, of perf/mfu_palm; None on a device whose peak nobody knows
    problem: str | None = None  # why it tells less than it should, in one line


def find_runs(directory: Path) -> list[Run]:
    """The run in `directory`, or those in the directories right below it, by name. Raises `ConfigError` for none."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; give a run or a sweep")
    found = [directory] if (directory / run_dir.CONFIG).exists() else []
    found = found or sorted(path.parent for path in directory.glob(f"*/{run_dir.CONFIG}"))
    if not found:
        raise ConfigError(f"{directory}: holds no run; give a run directory, or the directory of a sweep")
    return [read_run(path) for path in found]


def read_run(directory: Path) -> Run:
    """What the files of a run say."""
    try:
        config = run_dir.load_config(directory)
        summary = _of_their_types(run_dir.read_json(directory / run_dir.SUMMARY))
    except ConfigError as error:
        return Run(printable(directory.name), directory, "damaged", {}, problem=printable(str(error)))
    status = str(summary.get("status", "failed"))
    if status not in STATUSES:
        status = "damaged"
    if run_dir.is_locked(directory):
        status = "running"
    elif status == "running":
        status = "failed"  # its process is gone, and did not say why
    loss = summary.get("final_val_loss")
    run = Run(
        printable(directory.name),
        directory,
        status,
        result_deciding(config),
        config.batch.total_batch_size,
        config.optim.lr,
        config.train.seed,
        float(loss) if status == "completed" and isinstance(loss, int | float) else None,
        summary,
    )
    try:
        _read_metrics(run, directory / run_dir.METRICS)
    except OSError as error:
        run.problem = printable(f"{directory / run_dir.METRICS}: cannot be read ({error.strerror})")
    return run


def printable(text: str) -> str:
    """Without what could move a terminal's cursor, or what XML has no place for."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _of_their_types(summary: dict[str, Any]) -> dict[str, Any]:
    """The values of a summary that are what a run writes there."""
    kinds: dict[str, type | UnionType] = {
        "status": str, "final_val_loss": int | float, "steps": int, "tokens": int, "train_s": int | float,
        "data_hash": str, "parameters": int, "world_size": int, "device": str, "git_commit": str,
    }  # fmt: skip
    kept = {key: value for key, value in summary.items() if key in kinds and isinstance(value, kinds[key])}
    return {key: printable(value) if isinstance(value, str) else value for key, value in kept.items()}


def _loss(value: Any) -> float | None:
    """A loss as JSON has it: null where it was no number."""
    return None if value is None else float(value)


def _read_metrics(run: Run, path: Path) -> None:
    """Fill in the curves. Of many steps it parses every 2nd, 4th, …: cells of other batch sizes then meet in tokens."""
    if not path.is_file():
        return
    with path.open(errors="replace") as lines:
        steps = sum(STEP_EVENT in line for line in lines)
    stride = 1 << max(0, (steps // POINTS).bit_length() - 1)
    done, seconds = 0, 0.0
    rates: list[float] = []
    shares: list[float] = []
    with path.open(errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            is_step, at = STEP_EVENT in line, STEP.search(line)
            if at is None or (is_step and (int(at[1]) + 1) % stride) or not (is_step or EVAL_EVENT in line):
                continue
            try:
                event = json.loads(line)
                step, tokens = int(event["step"]) + 1, int(event["tokens"])
                if is_step:
                    seconds += (step - done) * float(event["perf/step_ms"]) / 1e3
                    done = step
                    run.train.append(Point(step, tokens, seconds, _loss(event["train/loss"])))
                    run.fingerprints[tokens] = printable(str(event["data/fingerprint"]))
                    rates.append(float(event["perf/tokens_per_s"]))
                    if (share := event.get("perf/mfu_palm")) is not None:
                        shares.append(float(share))
                else:
                    run.val.append(Point(step, tokens, seconds, _loss(event["val/loss"])))
            except (ValueError, KeyError, TypeError, OverflowError):
                if line.endswith("\n"):  # else it is being written
                    run.problem = printable(f"{path}: line {number} is no event of a run")
    if rates:
        run.tokens_per_s = statistics.median(rates)
    if shares:
        run.mfu = statistics.median(shares)
