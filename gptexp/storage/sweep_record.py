"""sweep.json, in the directory of a sweep: all cells, started or not, and the settings that they share."""

import itertools
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gptexp.config.metrics import Metric
from gptexp.config.paths import OUTPUTS
from gptexp.config.schema import from_dict
from gptexp.process.errors import ConfigError
from gptexp.process.fields import LIMIT
from gptexp.process.words import shown
from gptexp.storage import run_dir

SWEEP_DIR = "hydra.sweep.dir="  # an override
MOST_CELLS = 1_000_000  # in a sweep whose cells are chosen one by one


@dataclass(frozen=True)
class PlannedCell:
    """A cell, as it was planned."""

    values: dict[str, Any]  # swept key -> its value as typed
    total_batch_size: int  # tokens
    tokens: int  # length of the run
    first_tokens: int = 0  # how many of these lie before the checkpoint that the cell branches from


@dataclass(frozen=True)
class SweepRecord:
    """The content of sweep.json."""

    name: str
    overrides: list[str]  # command-line arguments that all cells share
    to_choose: int = 0  # number of further cells that the sweeper has yet to choose
    cells: dict[str, PlannedCell] = field(default_factory=dict)  # name of the directory -> cell
    commands: list[list[str]] = field(default_factory=list)  # arguments of gptexp that began or widened it, newest last
    objective: str = Metric.VAL_LOSS.value  # the loss that the newest command minimises (sweep.objective)


def save(directory: Path, record: SweepRecord) -> None:
    run_dir.write_json(directory / run_dir.SWEEP, asdict(record))


def load(directory: Path) -> SweepRecord | None:
    """Read sweep.json; None if there is none. Raises `ConfigError` if it is not the record of a sweep."""
    path = directory / run_dir.SWEEP
    values = run_dir.read_json(path)
    if not values:
        return None
    try:
        cells = {name: from_dict(cell, PlannedCell) for name, cell in values.pop("cells", {}).items()}
        record: SweepRecord = from_dict({**values, "cells": cells}, SweepRecord)
        _check(record)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not the record of a sweep ({error}); remove it, and start the sweep again to write it"
        ) from None
    place = directory.absolute()  # its name in outputs/ may have been changed since
    return replace(record, name=place.name) if place.parent == OUTPUTS.absolute() else record


def placed(record: SweepRecord, directory: Path) -> SweepRecord:
    """The record with commands that go on where the sweep is now; those of one in outputs/ do so by its name."""
    place = directory.absolute()
    if place.parent == OUTPUTS.absolute():
        return record
    here = f'{SWEEP_DIR}"{place}"'

    def with_place(arguments: list[str]) -> list[str]:
        return [*(text for text in arguments if not text.startswith(SWEEP_DIR)), here]

    return replace(record, overrides=with_place(record.overrides), commands=list(map(with_place, record.commands)))


def _check(record: SweepRecord) -> None:
    """Raise `ValueError` for a value that no sweep has."""
    if not 0 <= record.to_choose <= MOST_CELLS:
        raise ValueError(f"to_choose={record.to_choose}: must lie in [0, {MOST_CELLS}]")
    for text in itertools.chain(record.overrides, *record.commands):
        if not isinstance(text, str):
            raise ValueError(f"an override or an argument is not text: {shown(text)}")
    for name, cell in record.cells.items():
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise ValueError(f"{shown(name)} is not the name of a directory in it")
        for key, value in (("total_batch_size", cell.total_batch_size), ("tokens", cell.tokens)):
            if not 0 < value < LIMIT:
                raise ValueError(f"{key}={value} of {shown(name)}: must be above 0, below 2^63")
        if not 0 <= cell.first_tokens < cell.tokens:
            raise ValueError(f"first_tokens={cell.first_tokens} of {shown(name)}: must be below tokens={cell.tokens}")
