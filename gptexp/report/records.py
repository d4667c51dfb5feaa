"""Runs as their directories tell of them: config, summary, the course of the losses. Reads files and nothing else.

A directory may belong to a run that is being trained, was killed, or has been damaged: what can be read counts, and
what cannot is said.
"""

import json
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

from gptexp import run_dir
from gptexp.config import result_deciding
from gptexp.errors import ConfigError
from gptexp.noise_scale import Norms

STATUSES = ("completed", "diverged", "interrupted", "running", "failed")
POINTS = 512  # of a run's steps, at least, that are kept for its curve; twice that at most
STEP_EVENT = '"event": "step"'
KEPT_EVENT = re.compile(r'"event": "(eval|alert|fault|sample)"')


@dataclass(frozen=True)
class Point:
    """A moment of a run: after `step` updates, `tokens` tokens and `seconds` of training."""

    step: int
    tokens: int
    seconds: float
    loss: float | None  # nats per token; None: no number


@dataclass(frozen=True)
class Step(Point):
    """An optimizer update. What an older version did not log, or no number, is None."""

    lr: float | None
    grad_norm: float | None  # before clipping
    clip_fraction: float | None
    tokens_per_s: float
    mfu: float | None  # perf/mfu_palm
    noise_scale: float | None  # tokens, the run's own average
    cosine: float | None  # of two micro-batches' gradients
    norms: Norms | None  # from which other averages follow


@dataclass(frozen=True)
class Note:
    """Something that a run said: an alert, a fault, a sample."""

    kind: str
    step: int
    text: str


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
    seq_len: int = 1  # tokens
    train: list[Step] = field(default_factory=list)  # thinned
    val: list[Point] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    fingerprints: dict[int, str] = field(default_factory=dict)  # tokens -> hash of all that was read until then
    tokens_per_s: float | None = None  # median over the kept steps
    mfu: float | None = None  # the same, of perf/mfu_palm; None on a device whose peak nobody knows
    problem: str | None = None  # why it tells less than it should, in one line

    @property
    def is_measured(self) -> bool:
        """Whether it has told a gradient noise scale."""
        return any(step.noise_scale is not None for step in self.train)


def find_runs(directory: Path, read: "Callable[[Path], Run] | None" = None) -> list[Run]:
    """The run in `directory`, or those in the directories right below it, by name, as `read` (`read_run`) has them.

    Raises `ConfigError` where there is none.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; give a run or a sweep")
    found = [directory] if (directory / run_dir.CONFIG).exists() else []
    found = found or sorted(path.parent for path in directory.glob(f"*/{run_dir.CONFIG}"))
    if not found:
        raise ConfigError(f"{directory}: holds no run; give a run directory, or the directory of a sweep")
    return [(read or read_run)(path) for path in found]


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
        config.seq_len,
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


def _number(value: Any) -> float | None:
    """A number as JSON has it: null where it was none."""
    return None if value is None else float(value)


def _read_metrics(run: Run, path: Path) -> None:
    """Fill in the curves. Of many steps it parses every 2nd, 4th, …: cells of other batch sizes then meet in tokens."""
    if not path.is_file():
        return
    with path.open(errors="replace") as lines:
        steps = sum(STEP_EVENT in line for line in lines)
    stride = 1 << max(0, (steps // POINTS).bit_length() - 1)
    seen, done, seconds = 0, 0, 0.0
    with path.open(errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if STEP_EVENT in line:
                seen += 1
                if seen % stride:
                    continue
            elif not KEPT_EVENT.search(line):
                continue
            try:
                event = json.loads(line)
                step, tokens = int(event["step"]) + 1, int(event["tokens"])
                if event["event"] == "step":
                    seconds += (step - done) * float(event["perf/step_ms"]) / 1e3
                    done = step
                    run.train.append(_step(event, step, tokens, seconds, run))
                    run.fingerprints[tokens] = printable(str(event["data/fingerprint"]))
                elif event["event"] == "eval":
                    run.val.append(Point(step, tokens, seconds, _number(event["val/loss"])))
                else:
                    text = "\n".join(map(printable, str(event["text"]).split("\n")))
                    run.notes.append(Note(event["event"], step - 1, text))
            except (ValueError, KeyError, TypeError, OverflowError):
                if line.endswith("\n"):  # else it is being written
                    run.problem = printable(f"{path}: line {number} is no event of a run")
    if run.train:
        if run.status not in run_dir.DONE:  # summary.json is as old as the run's last start or stop
            run.summary |= {"steps": run.train[-1].step, "tokens": run.train[-1].tokens, "train_s": seconds}
        run.tokens_per_s = statistics.median(step.tokens_per_s for step in run.train)
    if shares := [step.mfu for step in run.train if step.mfu is not None]:
        run.mfu = statistics.median(shares)


def _step(event: dict[str, Any], step: int, tokens: int, seconds: float, run: Run) -> Step:
    small, big = _number(event.get("gns/small_sq_norm")), _number(event.get("gns/big_sq_norm"))
    norms = None
    if small is not None and big is not None:
        norms = Norms(small, big, int(event["gns/small_sequences"]), run.batch // run.seq_len)
        if not 0 < norms.small_sequences < norms.big_sequences:
            raise ValueError("a part is smaller than the whole")
    return Step(
        step,
        tokens,
        seconds,
        _number(event["train/loss"]),
        lr=_number(event.get("optim/lr")),
        grad_norm=_number(event.get("optim/grad_norm")),
        clip_fraction=_number(event.get("optim/clip_fraction")),
        tokens_per_s=float(event["perf/tokens_per_s"]),
        mfu=_number(event.get("perf/mfu_palm")),
        noise_scale=_number(event.get("gns/tokens")),
        cosine=_number(event.get("gns/cos")),
        norms=norms,
    )
