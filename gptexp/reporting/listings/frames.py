"""Runs and sweeps as pandas tables, for notebooks and scripts."""

from collections.abc import Iterator, Mapping
from itertools import chain, groupby, islice
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gptexp.config.metrics import Metric
from gptexp.config.schema import fields_of
from gptexp.process.errors import ConfigError
from gptexp.process.fields import LIMIT
from gptexp.reporting.listings.records import AXES, Run, differing_keys, find_runs
from gptexp.reporting.listings.table import columns_of, values
from gptexp.storage import run_dir, sweep_record
from gptexp.storage.reader import open_bytes, parse_line

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame  # others take it from here

Array = npt.NDArray[Any]
ROWS_AT_ONCE = 1_000  # their dicts fit in a core's cache
COUNTS = ("step", "tokens")
FINGERPRINT = Metric.DATA_FINGERPRINT.value  # the only metric that is text
DTYPES = {**dict.fromkeys(COUNTS, np.int64), FINGERPRINT: object}  # of other metrics float


def load_metrics(directory: Path | str) -> "DataFrame":
    """Return the curves of a run: one row for each step that it has logged, in order. No row is left out.

    The columns are the metrics (gptexp/loggers/README.md) that the run has: `step` and `tokens` as integers,
    `data/fingerprint` as text, the others as floats. A value that was not logged or not finite is NaN. An evaluation
    and a measured sharpness are in the row of their step. `val/loss` is NaN in the rows between, so a line through it
    needs `dropna`; `plot(x="tokens", y=["train/loss", "val/loss"], style=".")` draws every value as a point.

    `step` counts from 0, as in metrics.jsonl. Reports show `step + 1`, the number of completed steps.
    `tokens` are those of all completed steps.

    Raises `ConfigError` if metrics.jsonl is missing or damaged, or if pandas is not installed.
    """
    pandas = _pandas()
    path = Path(directory) / run_dir.METRICS
    rows, parts = _rows(path), []
    try:
        while chunk := list(islice(rows, ROWS_AT_ONCE)):
            parts.append(_columns(chunk))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the directory of a run") from None
    if not parts:
        raise ConfigError(f"{path}: no step has been logged yet")
    lengths = [len(part["step"]) for part in parts]

    def joined(name: str) -> Array:
        of_parts = [part.pop(name, None) for part in parts]  # which frees memory
        return np.concatenate(
            [_missing(name, n) if of_part is None else of_part for of_part, n in zip(of_parts, lengths, strict=True)]
        )

    names = [*dict.fromkeys(chain.from_iterable(parts))]
    return pandas.DataFrame({name: joined(name) for name in names}, copy=False)


def load_sweep(directory: Path | str) -> "DataFrame":
    """Return one row for each run of a sweep, whatever its status, in the order of their names.

    The columns are those of the report's cells.csv (lr, total_batch_size, seed, final_val_loss, …, the keys of the
    config in which the runs differ, and those that are scaled with the batch size), the other swept keys, `problem`
    (what of the run could not be read) and `directory`. A cell that has not started has no row; `gptexp status` counts
    these.

    Raises `ConfigError` if there is no run, if sweep.json is damaged, or if pandas is not installed.
    """
    pandas = _pandas()
    directory = Path(directory)
    runs, sweep = find_runs(directory), sweep_record.load(directory)
    differing = differing_keys(runs)
    known = {*AXES, *differing}
    rows = []
    for run, row in zip(runs, values(runs, differing), strict=True):
        cell = sweep.cells.get(run.directory.name) if sweep is not None else None
        swept = {key: text for key, text in cell.values.items() if key not in known} if cell is not None else {}
        rows.append({**row, **_composed(run, swept), "problem": run.problem, "directory": run.directory})
    frame = pandas.DataFrame(rows)
    numbers = [column.key for column in columns_of(runs) if column.form]
    return frame.astype({key: float for key in numbers if frame[key].dtype == object})


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise ConfigError("pandas is not installed: pip install 'gptexp[pandas]'") from None
    return pandas


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The metrics of each logged step, with those of its evaluation and sharpness, which follow it in the file."""
    row: dict[str, Any] = {}
    with open_bytes(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                metrics = _metrics(parse_line(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                if not line.endswith(b"\n"):  # it is still being written
                    break
                raise ConfigError(f"{path}: line {number} is not a valid event; remove it") from None
            if row and metrics and metrics["step"] == row["step"]:
                row = {**metrics, **row}
            elif metrics:
                if row:
                    yield row
                row = metrics
    if row:
        yield row


def _metrics(event: dict[str, Any]) -> dict[str, Any]:
    """The metrics of an event; empty for one without metrics. Raises an error if one has a wrong type."""
    if event.pop("event") not in ("step", "eval", "sharpness"):
        return {}
    text = event.pop(FINGERPRINT, None)
    if not {*map(type, event.values())} <= {int, float, NoneType} or not isinstance(text, str | None):
        raise TypeError("neither a number nor the fingerprint")
    step, tokens = event["step"], event["tokens"]
    if not (type(step) is type(tokens) is int and 0 <= step < LIMIT and 0 <= tokens < LIMIT):
        raise ValueError("not a count")
    if text is not None:
        event[FINGERPRINT] = text
    return event


def _columns(rows: list[dict[str, Any]]) -> dict[str, Array]:
    """The values of `rows` by metric. It turns all rows at once that have the same metrics, as nearly all have."""
    columns: dict[str, Array] = {}
    start = 0
    for names, group in groupby(rows, tuple):
        alike = list(group)
        stop = start + len(alike)
        # A float would round a large count.
        of_metric: dict[str, Any] = {name: [row.pop(name) for row in alike] for name in names if name in DTYPES}
        floats = np.fromiter(chain.from_iterable(map(dict.values, alike)), float).reshape(len(alike), -1)
        of_metric |= zip(alike[0], floats.T, strict=True)
        for name in names:
            if name not in columns:
                columns[name] = _missing(name, len(rows))
            columns[name][start:stop] = of_metric[name]
        start = stop
    return columns


def _missing(name: str, rows: int) -> Array:
    """A column of a metric that was not logged."""
    return np.full(rows, 0 if name in COUNTS else np.nan, DTYPES.get(name, float))


def _composed(run: Run, swept: Mapping[str, Any]) -> dict[str, Any]:
    """`swept` with values from the run's config. The choice of a config group is no key there, and stays as it is."""
    if not swept or not run.config:
        return {**swept}
    config = {key: value for key, _, value in fields_of(run_dir.load_resolved(run.directory))}
    return {key: config.get(key, text) for key, text in swept.items()}
