"""The table of runs: as values for scripts, as text for readers."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from gptexp.process.terminal import printable
from gptexp.reporting.listings.progress import in_words
from gptexp.reporting.listings.records import Run, scaled_keys, tokenizers
from gptexp.reporting.listings.terminal_table import Column


def _hours(run: Run) -> float | None:
    seconds = run.summary.get("train_s")
    return None if seconds is None else float(seconds) / 3600


def _tokens_per_parameter(run: Run) -> float | None:
    tokens, parameters = run.summary.get("tokens"), run.summary.get("parameters")
    return tokens / parameters if tokens and parameters else None


NAME = Column[Run]("run", "run", lambda run: run.name)
STATUS = Column[Run]("status", "status", lambda run: run.status, words=lambda run: in_words(run.status))
TOKENS = Column[Run]("tokens", "tokens", lambda run: run.summary.get("tokens"), ",d")
LOSS = Column[Run]("final_val_loss", "val loss", lambda run: run.loss, ".4f")
BITS = Column[Run]("bits_per_byte", "bits per byte", lambda run: run.bits_per_byte, ".4f")
SPEED = Column[Run]("tokens_per_s", "tokens/s", lambda run: run.tokens_per_s, ",.0f")
COLUMNS = (
    NAME,
    STATUS,
    Column[Run]("lr", "learning rate", lambda run: run.lr or None, ".4g"),
    Column[Run]("total_batch_size", "tokens a step", lambda run: run.batch or None, ","),
    Column[Run]("seed", "seed", lambda run: run.seed if run.config else None, "d"),
    Column[Run]("steps", "steps", lambda run: run.summary.get("steps"), ",d"),
    TOKENS,
    Column[Run]("tokens_per_parameter", "tokens/parameter", _tokens_per_parameter, ".3g"),
    LOSS,
    Column[Run]("final_val_loss_ema", "averaged", lambda run: run.summary.get("final_val_loss_ema"), ".4f"),
    BITS,
    SPEED,
    Column[Run]("mfu_palm", "MFU", lambda run: run.mfu, ".1%"),
    Column[Run]("train_h", "hours", _hours, ".3f"),
)


def columns_of(runs: Sequence[Run]) -> list[Column[Run]]:
    """`COLUMNS`, and one for each other metric: more validation texts, own metrics, scores."""
    return [*COLUMNS, *metric_columns(runs, of_steps=True)]


def metric_columns(runs: Sequence[Run], of_steps: bool = False) -> list[Column[Run]]:
    """A column for each other metric of evaluations, and `of_steps` if asked."""
    names = dict.fromkeys(name for run in runs for name in run.metrics if of_steps or not name.startswith("own/"))
    return [Column(printable(name), printable(name), partial(_metric, name), ".4f") for name in names]


def _metric(name: str, run: Run) -> float | None:
    return run.metrics.get(name)


def values(runs: Sequence[Run], config_keys: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each run: the keys of `columns_of`, `config_keys`, and those that are scaled with the batch size.

    A scaled key has two columns: as configured, for example `optim.beta2`, and as used, `effective_optim.beta2`.
    The effective learning rate is `lr`.
    """
    scaled, columns = scaled_keys(runs), columns_of(runs)
    configured = [*config_keys, *(f"optim.{key}" for key in scaled)]
    return [
        {column.key: column.value(run) for column in columns}
        | {key: run.config.get(key) for key in configured}
        | {f"effective_optim.{key}": run.optim.get(key) for key in scaled if key != "lr"}
        for run in runs
    ]


def informative(runs: Sequence[Run]) -> list[Column[Run]]:
    """The columns in which any run has a value, without those in which several runs agree; always the status.

    Bits per byte say nothing new about runs with one tokenizer.
    """
    columns = []
    for column in (*COLUMNS, *metric_columns(runs)):
        different = {column.value(run) for run in runs}
        is_new = len(different) > 1 or len(runs) == 1 or column is STATUS
        if different != {None} and is_new and (column is not BITS or len(tokenizers(runs)) > 1):
            columns.append(column)
    return columns
