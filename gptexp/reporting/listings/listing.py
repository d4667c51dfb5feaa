"""The rows of `gptexp ls`: one for each run and each sweep, read from few and small parts of their files."""

import difflib
import hashlib
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from gptexp.config.parts import is_part, name_of
from gptexp.config.paths import conf_dir
from gptexp.config.scaling import scaled_optim
from gptexp.config.schema import DataConfig, ModelConfig, fields_by_key, fields_of, fits_type, result_deciding
from gptexp.config.spelling import OF_USER
from gptexp.config.vocabulary import VOCAB_SIZES, padded
from gptexp.process.errors import ConfigError
from gptexp.process.words import shown, size_shown
from gptexp.reporting.listings.terminal_table import Column, print_table, texts_of
from gptexp.storage import run_dir, sweep_record
from gptexp.storage.divergence import counts_as_diverged
from gptexp.storage.inventory import bytes_on_disk, cells, find, is_sweep
from gptexp.storage.metrics_file import newest
from gptexp.storage.reader import open_bytes, parse_line, read_yaml

STATUSES = ("running", "damaged", "failed", "interrupted", "diverged", "completed")
T = TypeVar("T")
LONGEST_LINE = 1 << 16  # bytes of the first line of metrics.jsonl
VAL_LOSS = re.compile(rb'"event": "eval".*"val/loss": (\d[\d.e+-]*)[,}]')
SORTS: dict[str, Callable[["Row"], Any]] = {  # flag -> value; None comes last
    "date": lambda row: -datetime.fromisoformat(row.started).timestamp(),
    "name": lambda row: row.name,
    "lr": lambda row: row.lr,
    "batch": lambda row: row.total_batch_size,
    "loss": lambda row: row.val_loss,
    "size": lambda row: -row.size_bytes,
}
NARROWEST_NAME = 38  # characters of the names' column: a date, a time and a model, with the space beside them
# Columns that are left out first on a narrow terminal, in this order.
LEAST_NEEDED = ("note", "tags", "size", "started", "model", "tokens a step", "cells", "learning rate", "status")
# Keys of a model that a name like "gpt2" says nothing about.
NOT_SHAPE = ("dropout", "parametrisation", "base_n_embd", "base_n_head", "base_n_layer")
TEXT_COLUMNS = ("started", "model", "status", "tags", "note")


@dataclass(frozen=True)
class Row:
    """A run or a sweep.

    For a sweep, `val_loss` is the mean loss of its best cell, see `_best_cell`. Model, learning rate and batch size are
    those of the best cell; if there is none, those that all runs share.
    """

    kind: str  # "run" or "sweep"
    path: str  # the directory, for other commands
    name: str  # the path below the directory that is listed
    started: str  # local time, ISO 8601
    status: str  # one of `STATUSES`; of a sweep: "completed" if all cells are done and one is completed
    size_bytes: int  # on the disk
    model: str | None = None  # name of an option of the group model, else layers x heads x width
    lr: float | None = None  # peak learning rate
    total_batch_size: int | None = None  # tokens a step
    val_loss: float | None = None  # nats per token: final, or newest, validation loss; None for a diverged run
    tags: list[str] = field(default_factory=list)  # log.tags; of a sweep, those of all cells
    note: str | None = None  # log.note; of a sweep, that which all its runs share
    cells_done: int | None = None  # of a sweep: completed or diverged
    cells: int | None = None  # of a sweep: all, also those not started
    problem: str | None = None  # one line: what could not be read


def _cells_done(row: Row) -> str:
    return f"{row.cells_done}/{row.cells}" if row.kind == "sweep" else ""


COLUMNS = (
    Column[Row]("started", "started", lambda row: row.started, words=lambda row: row.started[:16].replace("T", " ")),
    Column[Row]("name", "name", lambda row: row.name),
    Column[Row]("model", "model", lambda row: row.model),
    Column[Row]("lr", "learning rate", lambda row: row.lr, ".4g"),
    Column[Row]("total_batch_size", "tokens a step", lambda row: row.total_batch_size, ","),
    Column[Row]("status", "status", lambda row: row.status),
    Column[Row]("cells", "cells", lambda row: row.cells, words=_cells_done),
    Column[Row]("val_loss", "val loss", lambda row: row.val_loss, ".4f"),
    Column[Row]("size_bytes", "size", lambda row: row.size_bytes, words=lambda row: size_shown(row.size_bytes)),
    Column[Row]("tags", "tags", lambda row: ", ".join(row.tags)),
    Column[Row]("note", "note", lambda row: row.note),
)


@dataclass(frozen=True)
class Listed:
    """A row, and what else is known of the run, or of the cells of the sweep."""

    row: Row
    config: str = "{}"  # of a run: dotted key -> value, as JSON
    cell: str = ""  # of a run: equal for runs that differ only in their seed
    seed: int = 0
    counts_as_diverged: bool = False  # of a run, see `counts_as_diverged`
    cells: list["Listed"] = field(default_factory=list)  # of a sweep


Read = Callable[[Path, str], Listed]


def list_runs(directory: Path, read: Read | None = None) -> list[Listed]:
    """The runs and sweeps below `directory`. If it is a sweep: its cells; if it is a run: itself. Raises `ConfigError`.

    `read` returns the row of a run, given its directory and its name; it may cache rows.
    """
    read = read or read_row
    run_dir.require_directory(directory, "a directory with runs")
    if run_dir.is_run(directory):
        return [read(directory, directory.name)]
    if is_sweep(directory):
        return [read(path, path.name) for path in cells(directory)]
    paths = [(path, str(path.relative_to(directory))) for path in find(directory)]
    return [_sweep(path, name, read) if is_sweep(path) else read(path, name) for path, name in paths]


def read_row(path: Path, name: str) -> Listed:
    """The row of a run."""
    damaged = Row("run", str(path), name, _started(path), "damaged", bytes_on_disk(path))
    try:
        config, summary = run_dir.load_resolved(path), run_dir.read_summary(path)
    except ConfigError as error:
        return Listed(replace(damaged, problem=str(error)))
    status = run_dir.present_status(path, summary)
    loss: float | None = summary.get("final_val_loss")
    if status == "diverged":  # the loss before the divergence is no result
        loss = None
    elif status in ("running", "failed") or loss is None:  # summary.json is only written when a run starts or stops
        last = newest(path / run_dir.METRICS, VAL_LOSS)
        loss = loss if last is None else float(last[1])
    row = replace(
        damaged,
        model=model_name(config.model),
        lr=scaled_optim(config).lr,
        total_batch_size=config.batch.total_batch_size,
        status=status,
        val_loss=loss,
        tags=config.log.tags,
        note=config.log.note,
    )
    deciding = result_deciding(config)
    cell = repr({**deciding, "train.seed": None, "text": summary.get("data_hash")})
    return Listed(
        row,
        config=json.dumps(run_dir.finite({key: value for key, _, value in fields_of(config)})),
        cell=hashlib.sha256(cell.encode(errors="surrogateescape")).hexdigest(),
        seed=config.train.seed,
        counts_as_diverged=status in run_dir.DONE and counts_as_diverged(status, loss, deciding),
    )


def _sweep(path: Path, name: str, read: Read) -> Listed:
    problem, planned, to_choose, listed = None, set[str](), 0, list[Listed]()
    try:
        listed = [read(cell, cell.name) for cell in cells(path)]
        if (record := sweep_record.load(path)) is not None:
            planned, to_choose = set(record.cells), record.to_choose
    except ConfigError as error:
        problem = str(error)
    rows = [cell.row for cell in listed]
    count = Counter(row.status for row in rows)
    total = len(planned | {row.name for row in rows}) + to_choose
    done = sum(count[status] for status in run_dir.DONE)
    if problem is not None:
        status = "damaged"
    elif run_dir.is_swept(path):  # also between two cells
        status = "running"
    else:
        at_the_end = "interrupted" if not total or done < total else "completed" if count["completed"] else "diverged"
        status = next((status for status in ("running", "damaged", "failed") if count[status]), at_the_end)
    best = _best_cell(listed)
    alike = best or rows
    row = Row(
        "sweep",
        str(path),
        name,
        min((row.started for row in rows), default=_started(path)),
        status,
        _own_bytes(path, rows) + sum(row.size_bytes for row in rows),
        model=_common(row.model for row in alike),
        lr=_common(row.lr for row in alike),
        total_batch_size=_common(row.total_batch_size for row in alike),
        val_loss=_mean_loss(best) if best else None,
        tags=sorted({tag for row in rows for tag in row.tags}),
        note=_common(row.note for row in rows),
        cells_done=done,
        cells=total,
        problem=problem or next((row.problem for row in rows if row.problem), None),
    )
    return Listed(row, cells=listed)


def _common(values: Iterable[T]) -> T | None:
    """The value that all have; None if they differ."""
    different = set(values)
    return different.pop() if len(different) == 1 else None


def _best_cell(runs: Sequence[Listed]) -> list[Row]:
    """The completed runs of the cell with the lowest mean loss, one for each seed; empty if no cell has a loss.

    A report has the same best cell, unless it leaves out runs that no curve explains: those are not known here. Both
    leave out cells with a diverged seed.
    """
    losses: dict[str, dict[int, Row]] = defaultdict(dict)
    for run in runs:
        if run.row.status == "completed" and run.row.val_loss is not None:
            losses[run.cell][run.seed] = run.row
    diverged = {run.cell for run in runs if run.counts_as_diverged}
    complete = [[*of_seeds.values()] for cell, of_seeds in losses.items() if cell not in diverged]
    return min(complete, key=_mean_loss, default=[])


def _mean_loss(rows: Sequence[Row]) -> float:
    return math.fsum(row.val_loss or 0.0 for row in rows) / len(rows)


def _own_bytes(sweep: Path, cells: Sequence[Row]) -> int:
    """Bytes of a sweep's files outside its cells, whose sizes are known."""
    own, names = 0, {cell.name for cell in cells}
    with suppress(OSError):
        for path in sweep.iterdir():
            own += path.lstat().st_blocks * 512
            if path.name not in names and path.is_dir() and not path.is_symlink():
                own += bytes_on_disk(path)
    return own


def _started(path: Path) -> str:
    """Time of the run's first event, which a copy of the run keeps; without one, that of the directory."""
    unreadable = suppress(OSError, ValueError, TypeError, KeyError, OverflowError)
    with unreadable, open_bytes(path / run_dir.METRICS) as lines:
        return _local_time(parse_line(lines.readline(LONGEST_LINE))["time"])
    with suppress(OSError):
        return _local_time(os.lstat(path).st_mtime)
    return _local_time(0)


def _local_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def model_name(model: ModelConfig) -> str:
    """The name of the option of the group `model` with these sizes; without one, layers x heads x width."""
    return model_option(model) or f"{model.n_layer}x{model.n_head}x{model.n_embd}"


def model_option(model: ModelConfig) -> str | None:
    """The option of the group `model` that differs at most in the dropout and the parametrisation."""
    if is_part(model):
        return name_of(model)
    own = _shape(model)
    return next((name for name, (_, shape) in _known_models().items() if shape == own), None)


def nearest_model(model: ModelConfig) -> tuple[str | None, list[str]]:
    """The option of the group `model` from which the model differs in the fewest keys of its shape, and these keys.

    If an option says the same in other words, there are none. Without any option: None, and no keys.
    """
    if (same := model_option(model)) is not None:
        return same, []
    keys = [f.name for f in fields(ModelConfig) if f.name not in NOT_SHAPE]
    changed = {
        name: [key for key in keys if getattr(known, key) != getattr(model, key)]
        for name, (known, _) in _known_models().items()
    }
    return min(changed.items(), key=lambda item: len(item[1]), default=(None, []))


def _shape(model: ModelConfig) -> ModelConfig:
    """The model with all sizes given, and with the defaults of all keys of `NOT_SHAPE`."""
    return replace(model.spelled_out(), **{key: getattr(ModelConfig, key) for key in NOT_SHAPE})


@cache
def _known_models() -> dict[str, tuple[ModelConfig, ModelConfig]]:
    """Option of the group `model` -> the model as its file has it, and its shape."""
    known = {}
    for file in sorted((conf_dir() / "model").glob("*.yaml")):
        with suppress(OSError, ValueError, TypeError, KeyError):  # a wrong file in the user's copy of conf/
            content = read_yaml(file)
            vocab_size = padded(VOCAB_SIZES[content.get("data", {}).get("tokenizer", DataConfig.tokenizer)])
            model = ModelConfig(**{"vocab_size": vocab_size, **content["model"]})
            known[file.stem] = model, _shape(model)
    return known


@dataclass(frozen=True)
class Filter:
    """Which rows are shown: all conditions must hold."""

    statuses: Collection[str]  # one of these; empty: any
    tags: Collection[str]  # all of these
    where: Sequence[tuple[str, str]]  # dotted key, text of its value

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a key that no config has, or a value that its key cannot have."""
        known = fields_by_key()
        for key, text in self.where:
            if key.startswith(OF_USER):
                continue
            if key not in known:
                last = [other for other in known if other.split(".")[-1] == key.split(".")[-1]]
                close = last or difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean '{close[0]}'?" if close else "gptexp train --help lists all keys"
                raise ConfigError(f"--where {shown(f'{key}={text}')}: unknown key '{shown(key)}'; {hint}")
            kind = known[key].type
            if not any(fits_type(value, kind) for value in (_value(text), text, [text])):
                raise ConfigError(
                    f"--where {shown(f'{key}={text}')}: must be of type {getattr(kind, '__name__', kind)}"
                )

    def shows(self, listed: Listed) -> bool:
        """Whether a row is shown. For a sweep, one of its cells must have all values of `where`."""
        row = listed.row
        return (
            (not self.statuses or row.status in self.statuses)
            and set(self.tags) <= {*row.tags}
            and (not self.where or any(map(self._holds, listed.cells or [listed])))
        )

    def _holds(self, run: Listed) -> bool:
        config = parse_line(run.config.encode())
        config |= {f"{OF_USER}{key}": value for key, value in config.get("user", {}).items()}
        return all(key in config and _equals(config[key], text) for key, text in self.where)


def _value(text: str) -> Any:
    """The value that a text on the command line stands for."""
    named = {"null": None, "true": True, "false": False}
    if text in named:
        return named[text]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _equals(value: Any, text: str) -> bool:
    if isinstance(value, list):
        return text in value
    parsed = _value(text)
    return value == text or (value == parsed and isinstance(value, bool) == isinstance(parsed, bool))


def ordered(rows: Sequence[Row], by: str, reverse: bool) -> list[Row]:
    """Sort rows: the newest, the lowest loss, the largest size first. Those without a value come last."""
    value = SORTS[by]
    with_value = sorted((row for row in rows if value(row) is not None), key=value, reverse=reverse)
    return with_value + [row for row in rows if value(row) is None]


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps(run_dir.finite([asdict(row) for row in rows]), indent=1)


def print_rows(rows: Sequence[Row], width: int | None) -> None:
    """Print a table of rows on lines of `width` characters; None: of any length."""
    print_table(texts_of(COLUMNS, rows), ("name",), TEXT_COLUMNS, LEAST_NEEDED, width, NARROWEST_NAME)
