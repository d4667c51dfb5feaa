"""The table of runs: as values for scripts, as text for readers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gptexp.reporting.listings.records import Run, scaled_keys


@dataclass(frozen=True)
class Column:
    """A column of the table; `value` returns None if the run does not have it."""

    key: str
    title: str
    value: Callable[[Run], Any]
    form: str  # format specification

    def text(self, run: Run) -> str:
        value = self.value(run)
        return "" if value is None else format(value, self.form)


def _hours(run: Run) -> float | None:
    seconds = run.summary.get("train_s")
    return None if seconds is None else float(seconds) / 3600


def _tokens_per_parameter(run: Run) -> float | None:
    tokens, parameters = run.summary.get("tokens"), run.summary.get("parameters")
    return tokens / parameters if tokens and parameters else None


BITS = Column("bits_per_byte", "bits per byte", lambda run: run.bits_per_byte, ".4f")
LOSS_EMA = Column("final_val_loss_ema", "averaged", lambda run: run.summary.get("final_val_loss_ema"), ".4f")
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
    LOSS_EMA,
    BITS,
    Column("tokens_per_s", "tokens/s", lambda run: run.tokens_per_s, ",.0f"),
    Column("mfu_palm", "MFU", lambda run: run.mfu, ".1%"),
    Column("train_h", "hours", _hours, ".3f"),
)


def values(runs: Sequence[Run], config_keys: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each run: the keys of `COLUMNS`, `config_keys`, and those that are scaled with the batch size.

    Each of the latter has its configured value, as `optim.beta2`, and the effective one, as `effective_optim.beta2`.
    The effective learning rate is `lr`.
    """
    scaled = scaled_keys(runs)
    configured = [*config_keys, *(f"optim.{key}" for key in scaled)]
    return [
        {column.key: column.value(run) for column in COLUMNS}
        | {key: run.config.get(key) for key in configured}
        | {f"effective_optim.{key}": run.optim.get(key) for key in scaled if key != "lr"}
        for run in runs
    ]


def chosen(runs: Sequence[Run], all_of_them: bool = True) -> list[Column]:
    """The columns that any run has a value in.

    Without `all_of_them` it omits those in which several runs agree, except the status. Bits per byte say nothing new
    about runs with one tokenizer.
    """
    columns = []
    for column in COLUMNS:
        if column is BITS and len(tokenizers(runs)) < 2:
            continue
        found = {column.value(run) for run in runs}
        if found != {None} and (all_of_them or len(found) > 1 or len(runs) == 1 or column.key == "status"):
            columns.append(column)
    return columns


def tokenizers(runs: Sequence[Run]) -> set[str]:
    """The tokenizers of the runs whose config can be read. One that has not started has only its swept keys."""
    return {run.config["data.tokenizer"] for run in runs if "data.tokenizer" in run.config}


def shown(runs: Sequence[Run], all_of_them: bool = True) -> list[tuple[str, list[str]]]:
    """The title of each of the `chosen` columns, with a text for each run."""
    return [(column.title, [column.text(run) for run in runs]) for column in chosen(runs, all_of_them)]
