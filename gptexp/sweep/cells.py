"""The cells of a sweep: composed, checked and named, and what the sweep's directory says of them.

A cell's directory is found by a hash of all that decides its result, and of the swept keys that do not: issued again
the same sweep finds its cells, a wider one those that it shares, and so does a single value of a key swept before.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, open_dict

from gptexp import run_dir
from gptexp.batch import run_length
from gptexp.check import in_steps
from gptexp.config import Config, fields_of, result_deciding
from gptexp.errors import ConfigError, UserError
from gptexp.sweep import PLUGINS
from gptexp.sweep.space import swept_keys

READABLE_CHARS = 80  # of a directory's name, before the hash


@dataclass(frozen=True)
class Draft:
    """A combination of swept values, composed and checked."""

    composition: DictConfig
    values: dict[str, str]  # of the swept keys, as typed
    config: Config | None  # None where it is illegal
    problems: list[str]

    @property
    def title(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())


@dataclass(frozen=True)
class Cell:
    """One point of a sweep, and the directory that it has or will have."""

    composition: DictConfig
    config: Config
    directory: Path  # absolute
    values: dict[str, str]

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def world_size(self) -> int:
        return self.config.world.size or 1

    def length(self) -> dict[str, int]:
        """Batch size and length of the run, in tokens."""
        total, train = self.config.batch.total_batch_size, self.config.train
        steps, _ = run_length(train.max_tokens, train.max_steps, total)
        return {"total_batch_size": total, "tokens": steps * total}


def draft(
    loader: ConfigLoader, config: DictConfig, combinations: Sequence[Sequence[str]], of: int, first: int = 0
) -> list[Draft]:
    """Compose and check each combination of overrides, the `first`-th and on of `of` cells.

    Raises `ConfigError` where there is none.
    """
    from gptexp.compose import refuse_foreign_code, to_config

    if not combinations:
        raise ConfigError("the sweep has no cells; give at least one value of each swept key")
    swept = swept_keys(config)
    drafts = []
    for number, overrides in enumerate(combinations, first):
        composition = loader.load_sweep_config(config, list(overrides))
        values = {key: value for key, _, value in (text.partition("=") for text in overrides) if key in swept}
        with open_dict(composition):
            composition.hydra.job.id = f"{number}"
            composition.hydra.job.num = number
            composition.hydra.sweep.dir = config.hydra.sweep.dir
            composition.sweep.name = config.sweep.name
            composition.sweep.cells = of
        checked, problems = None, list[str]()
        try:
            refuse_foreign_code(composition, config)  # which was looked at before Hydra began
            checked = to_config(composition, overrides)
        except ConfigError as error:
            problems = error.problems
        drafts.append(Draft(composition, values, checked, problems))
    return drafts


def settle(drafts: Sequence[Draft], directory: Path) -> list[Cell]:
    """Name the cells; may tokenise a corpus to learn what they are called.

    Raises `ConfigError` for all that are illegal at once.
    """
    refuse_illegal([(drafted.title, drafted.problems) for drafted in drafts])
    cells: dict[str, Cell] = {}  # two ways to write a value are one cell
    for drafted in drafts:
        assert drafted.config is not None
        name = cell_name(drafted.config, drafted.values, directory)
        run_dir.check_same(directory / name, drafted.config)
        with open_dict(drafted.composition):
            drafted.composition.hydra.sweep.subdir = name
        path = (directory / name).absolute()
        cells.setdefault(name, Cell(drafted.composition, drafted.config, path, drafted.values))
    return list(cells.values())


def refuse_illegal(cells: Sequence[tuple[str, list[str]]]) -> None:
    """Raise `ConfigError` for all cells, given by title, that have problems: a line for each problem."""
    problems: dict[str, list[str]] = {}  # line -> the cells it is true of
    for title, lines in cells:
        for line in lines:
            problems.setdefault(line, []).append(title)
    if problems:
        raise ConfigError([_of_cells(line, of, len(cells)) for line, of in problems.items()])


def _of_cells(line: str, cells: list[str], total: int) -> str:
    """A problem's line with the cells that have it."""
    if len(cells) == total:
        return f"{line} (all {total} cells)" if total > 1 else line
    more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
    return f"{line} (cell {cells[0]}{more})"


def cell_name(config: Config, swept: dict[str, str], directory: Path) -> str:
    """Directory of a cell below `directory`: its swept values readably, and the hash; or the one that has that hash.

    Values count as composed, so 6e-4 and 0.0006 are one cell; the text counts as its tokens, wherever it lies.
    """
    composed, deciding = {key: value for key, _, value in fields_of(config)}, result_deciding(config)
    # Groups and paths as they were typed: an option's name, and not the folders that lead to a file.
    as_typed = ("data.path", "data.val_path")
    values = {key: text if key in as_typed else composed.get(key, text) for key, text in swept.items()}
    others = {key: value for key, value in values.items() if key not in deciding}
    identity = {**deciding, "data": _data_identity(config), "swept": others}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:8]
    if known := sorted(
        path.name for path in directory.glob(f"*{digest}") if re.fullmatch(f"(.*-)?{digest}", path.name)
    ):
        return known[0]
    readable = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
    name = f"{readable[:READABLE_CHARS]}-{digest}" if readable else digest
    return re.sub(r"[^A-Za-z0-9._=,-]", "_", name)


def _data_identity(config: Config) -> str:
    """The hash of the tokens; of text that cannot be read, its path: that cell will say what is wrong."""
    from gptexp.data.prepare import data_hash

    try:
        return data_hash(config.data)
    except UserError:
        return f"{config.data.path} {config.data.val_path}"


def confounds(configs: Sequence[Config]) -> list[str]:
    """What changes with the batch size, beside it, where cells differ in that."""
    if len({config.batch.total_batch_size for config in configs}) < 2:
        return []
    return sorted({line for config in configs for line in in_steps(result_deciding(config))})


def record(directory: Path, config: DictConfig, cells: Sequence[Cell], to_choose: int) -> None:
    """Write sweep.json: the cells that there are now or that an earlier command has begun, and how to run more.

    `to_choose`: how many there will be beside them.
    """
    path = directory / run_dir.SWEEP
    known = run_dir.read_json(path).get("cells", {})
    begun = {name: of for name, of in known.items() if (directory / name / run_dir.CONFIG).exists()}
    new = {cell.name: {"values": cell.values, **cell.length()} for cell in cells}
    directory.mkdir(parents=True, exist_ok=True)
    sweep = {"name": config.sweep.name, "overrides": fixed_arguments(config), "to_choose": to_choose}
    run_dir.write_json(path, {**sweep, "cells": {**begun, **new}})


def fixed_arguments(config: DictConfig) -> list[str]:
    """What of the command line holds for all cells, so that a command for other cells begins with it."""
    swept = {*swept_keys(config), "sweep.name", "hydra.mode"}
    given = [*config.hydra.overrides.task, *config.hydra.overrides.hydra]
    keys = {text: text.lstrip("+~").partition("=")[0] for text in given}
    own = next((s.path for s in config.hydra.runtime.config_sources if s.provider == "command-line"), None)
    folder = ["--config-dir", own] if own else []
    kept = [k for k in keys if keys[k] not in swept and not keys[k].startswith(("hydra/sweeper", "hydra.sweeper"))]
    return [*folder, *kept]


def name_sweep(config: DictConfig) -> None:
    """Give an unnamed sweep the name that the same or a widened grid will have again; refuse what is not ours.

    It depends on which keys are swept, not on their values, and on the value of every other key that decides results.
    """
    from gptexp.compose import job_of

    for part in ("launcher", "sweeper"):
        target = config.hydra[part]._target_
        if not target.startswith(f"{PLUGINS}."):
            raise ConfigError(
                f"hydra/{part}={config.hydra.runtime.choices[f'hydra/{part}']}: not supported; leave it out"
            )
    if config.sweep.name is not None:
        return
    swept = sorted(swept_keys(config))
    fixed = {
        k: v for k, v in result_deciding(job_of(config)).items() if k not in swept and k.split(".")[0] not in swept
    }
    if "model" in swept:
        fixed.pop("optim.lr", None)  # comes with the model
    identity = json.dumps({**fixed, "swept": swept, "data": [config.data.path, config.data.val_path]}, default=str)
    with open_dict(config):
        config.sweep.name = f"sweep-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
