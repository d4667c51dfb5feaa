"""A row for each run: as values for scripts, as text for people."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gptexp.report.records import Run


@dataclass(frozen=True)
class Column:
    """`of` gives a run's value, None where it does not tell; `form` says how it is shown, under `title`."""

    key: str
    title: str
    of: Callable[[Run], Any]
    form: str


def _hours(run: Run) -> float | None:
    seconds = run.summary.get("train_s")
    return None if seconds is None else float(seconds) / 3600


def _tokens_per_parameter(run: Run) -> float | None:
    tokens, parameters = run.summary.get("tokens"), run.summary.get("parameters")
    return tokens / parameters if tokens and parameters else None


COLUMNS = (
    Column("run", "run", lambda run: run.name, ""),
    Column("status", "status", lambda run: run.status, ""),
    Column("lr", "learning rate", lambda run: run.lr or None, ".4g"),
    Column("total_batch_size", "tokens a step", lambda run: run.batch or None, ","),
    Column("seed", "seed", lambda run: run.seed if run.config else None, "d"),
    Column("steps", "steps", lambda run: run.summary.get("steps"), ",d"),
    Column("tokens", "tokens", lambda run: run.summary.get("tokens"), ",d"),
    Column("tokens_per_parameter", "tokens/parameter", _tokens_per_parameter, ".3g"),
    Column("final_val_loss", "val loss", lambda run: run.loss, ".4f"),
    Column("tokens_per_s", "tokens/s", lambda run: run.tokens_per_s, ",.0f"),
    Column("mfu_palm", "MFU", lambda run: run.mfu, ".1%"),
    Column("train_h", "hours", _hours, ".3f"),
)


def values(runs: Sequence[Run], apart: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each run under the keys of `COLUMNS`, and of the config's keys that set arms `apart`."""
    return [
        {**{column.key: column.of(run) for column in COLUMNS}, **{key: run.config.get(key) for key in apart}}
        for run in runs
    ]


def shown(runs: Sequence[Run], all_of_them: bool = True) -> tuple[list[str], list[list[str]]]:
    """Titles and texts of the columns that some run has a value in; else only of those in which runs differ."""

    def tells(column: Column) -> bool:
        found = {column.of(run) for run in runs}
        return found != {None} and (all_of_them or len(found) > 1 or len(runs) == 1 or column.key == "status")

    def text(value: Any, form: str) -> str:
        return "" if value is None else format(value, form)

    columns = [column for column in COLUMNS if tells(column)]
    return [column.title for column in columns], [[text(c.of(run), c.form) for c in columns] for run in runs]
