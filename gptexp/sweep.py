"""Hydra's multirun: a grid sweeper that composes and checks every cell first, and a launcher that runs them.

Registered in code (`compose.register`), as plugins of Hydra must otherwise live in a package of their own.
"""

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from gptexp import run_dir
from gptexp.batch import run_length
from gptexp.check import in_steps
from gptexp.config import AUTO, Config, fields_of, memory_key, result_deciding
from gptexp.distributed import launcher_rank
from gptexp.errors import EXIT_DIVERGED, EXIT_FAILED, ConfigError, UserError, first_line
from gptexp.pool import OUTPUT, Job, run_all, visible_gpus
from gptexp.terminal import say

# The name under which Hydra finds this module: it instantiates plugins of packages below hydra_plugins only.
PLUGINS = "hydra_plugins.gptexp"


class GridSweeper(Sweeper):
    """All combinations of the swept values, named (`hydra.sweeper.params`) or given on the command line."""

    __module__ = PLUGINS

    def __init__(self, params: dict[str, str] | None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from hydra.core.plugins import Plugins

        self.config = config
        self.loader = hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the grid; what the command line gives wins over `params` of the same key."""
        texts = [f"{key}={value}" for key, value in self.params.items()]
        overrides = OverridesParser.create(config_loader=self.loader).parse_overrides([*texts, *arguments])
        [cells] = BasicSweeper.split_arguments(overrides, max_batch_size=None)
        assert self.launcher is not None
        return [self.launcher.launch(cells, initial_job_idx=0)]


@dataclass
class Cell:
    """One point of a sweep: its composition, and the directory that its values and all that decides its result name."""

    composition: DictConfig
    config: Config
    directory: Path
    values: dict[str, str]  # of the swept keys, as typed

    @property
    def name(self) -> str:
        return self.directory.name

    def length(self) -> dict[str, int]:
        """Batch size and length of the run, in tokens."""
        total, train = self.config.batch.total_batch_size, self.config.train
        steps, _ = run_length(train.max_tokens, train.max_steps, total)
        return {"total_batch_size": total, "tokens": steps * total}


class CellLauncher(Launcher):
    """Runs cells in processes of their own, side by side where there are devices; one that fails costs itself only."""

    __module__ = PLUGINS

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose and check all cells, then run those that are not done. Exits with 1 at the end if one failed."""
        from gptexp.compose import report_errors

        setup_globals()
        with report_errors():
            cells = self._compose(job_overrides, initial_job_idx)
            among_ranks = launcher_rank() is not None
            if among_ranks and cells[0].config.sweep.parallel not in (AUTO, 1):
                raise ConfigError(
                    f"sweep.parallel={cells[0].config.sweep.parallel}: under a launcher all ranks train one cell; "
                    "leave it out"
                )
            at_once, gpus = (1, None) if among_ranks else _side_by_side(cells)
            self._record(cells)
        for line in _confounds(cells):
            print(f"gptexp: warning: {line}", file=sys.stderr)
        failed: list[Cell] = []
        stopped = None
        try:
            left = [cell for cell in cells if not self._is_done(cell)]
            if among_ranks:
                self._run_among_the_ranks(left, failed)
            else:
                stopped = self._run(left, at_once, gpus, failed)
        finally:
            self._print_outcomes(cells)
            _report(self._directory)
        if stopped is not None:
            raise SystemExit(128 + stopped)
        if failed:
            print(f"gptexp: {len(failed)} of {len(cells)} cells failed", file=sys.stderr)
            raise SystemExit(EXIT_FAILED)
        return []

    @property
    def _directory(self) -> Path:
        return Path(self.config.hydra.sweep.dir)

    def _is_done(self, cell: Cell) -> bool:
        status = run_dir.status(cell.directory)
        if status in run_dir.DONE:
            say(f"--- {cell.name}: {status} before")
        return status in run_dir.DONE

    def _run(self, cells: list[Cell], at_once: int, gpus: list[str] | None, failed: list[Cell]) -> int | None:
        """In processes of their own; the signal that ended it, or None."""
        left = {cell.directory.absolute(): cell for cell in cells}
        done = 0

        def decided() -> bool:
            shared = self._directory / run_dir.EFFECTIVE
            for cell in cells if not shared.exists() else ():
                with suppress(ConfigError):  # a damaged one: its cell will say so
                    _share(run_dir.read_json(cell.directory / run_dir.EFFECTIVE), shared)
            return shared.exists()

        def begins(job: Job, own: Sequence[str]) -> None:
            cell = left[job.directory]
            on = f" on GPU {', '.join(own)}" if own else ""
            say(f"--- cell {list(left).index(job.directory) + 1} of {len(left)} begins{on}: {cell.name}")
            self._prepare(cell)

        def ended(job: Job, code: int) -> None:
            nonlocal done
            done += 1
            cell = left[job.directory]
            if code not in (0, EXIT_DIVERGED):
                failed.append(cell)
            if at_once > 1:
                where = f"; {cell.directory / OUTPUT}" if cell in failed else ""
                say(f"--- {_outcome(cell)} ({done} of {len(left)}){where}")

        jobs = [Job(directory, cell.config.world.size or 1) for directory, cell in left.items()]
        return run_all(jobs, at_once, gpus, decided, begins, ended)

    def _run_among_the_ranks(self, cells: list[Cell], failed: list[Cell]) -> None:
        """One after the other, by all ranks of a launcher."""
        for number, cell in enumerate(cells, 1):
            say(f"--- cell {number} of {len(cells)} begins: {cell.name}")
            if self._prepare(cell) not in (0, EXIT_DIVERGED):
                failed.append(cell)
            _share(run_dir.read_json(cell.directory / run_dir.EFFECTIVE), self._directory / run_dir.EFFECTIVE)

    def _prepare(self, cell: Cell) -> Any:
        """Have Hydra make the cell's directory and call the task; what that gives."""
        _share(_decided(self._directory, memory_key(cell.config)), cell.directory / run_dir.EFFECTIVE)
        result = run_job(
            hydra_context=self.context,
            task_function=self.task,
            config=cell.composition,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        return result.return_value  # raises what the task did: a defect of gptexp, as a cell fails by its exit code

    def _record(self, cells: list[Cell]) -> None:
        """Write sweep.json: the cells there are now, and those of earlier, narrower grids."""
        path = self._directory / run_dir.SWEEP
        swept = swept_keys(self.config)
        keys = {text: text.lstrip("+~").partition("=")[0] for text in self.config.hydra.overrides.task}
        fixed = [text for text, key in keys.items() if key not in (*swept, "sweep", "sweep.name")]
        known = run_dir.read_json(path).get("cells", {})
        new = {cell.name: {"values": cell.values, **cell.length()} for cell in cells}
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep = {"name": self.config.sweep.name, "overrides": fixed}
        run_dir.write_json(path, {**sweep, "cells": {**known, **new}})

    def _print_outcomes(self, cells: list[Cell]) -> None:
        """Status and final validation loss of every cell."""
        say(f"--- {len(cells)} cells in {self._directory}")
        say(*map(_outcome, cells))

    def _compose(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[Cell]:
        """Every cell, checked; raises `ConfigError` for all that are illegal at once."""
        from gptexp.compose import refuse_foreign_code, to_config

        if not job_overrides:
            raise ConfigError("the grid has no cells; give at least one value of each swept key")
        swept = swept_keys(self.config)
        composed: list[tuple[DictConfig, Config, dict[str, str]]] = []
        problems: dict[str, list[str]] = {}  # line -> the cells it is true of
        for number, overrides in enumerate(job_overrides, first):
            composition = self.context.config_loader.load_sweep_config(self.config, list(overrides))
            values = {key: value for key, _, value in (text.partition("=") for text in overrides) if key in swept}
            try:
                refuse_foreign_code(composition, self.config)  # which was looked at before Hydra began
                config = to_config(composition, overrides)
            except ConfigError as error:
                of = " ".join(f"{key}={value}" for key, value in values.items())
                for line in error.problems:
                    problems.setdefault(line, []).append(of)
                continue
            with open_dict(composition):
                composition.hydra.job.id = f"{number}"
                composition.hydra.job.num = number
                composition.hydra.sweep.dir = self.config.hydra.sweep.dir
                composition.sweep.name = self.config.sweep.name
                composition.sweep.cells = len(job_overrides)
            composed.append((composition, config, values))
        if problems:
            raise ConfigError([_of_cells(line, of, len(job_overrides)) for line, of in problems.items()])
        # Only now, with every cell legal, may a corpus be tokenised to learn what its cells are called.
        cells = []
        for composition, config, values in composed:
            name = cell_name(config, values)
            run_dir.check_free(self._directory / name, config)
            with open_dict(composition):
                composition.hydra.sweep.subdir = name
            cells.append(Cell(composition, config, self._directory / name, values))
        return cells


def _side_by_side(cells: list[Cell]) -> tuple[int, list[str] | None]:
    """How many cells run at once, and the GPUs they share out; None on a CPU."""
    parallel, ranks = cells[0].config.sweep.parallel, max(cell.config.world.size or 1 for cell in cells)
    devices = {cell.config.train.device for cell in cells}
    gpus = visible_gpus() if devices <= {"auto", "cuda"} else []
    if not gpus:
        return (parallel if isinstance(parallel, int) else 1), None
    fit = max(1, len(gpus) // ranks)
    most = max(1, len(gpus) // min(cell.config.world.size or 1 for cell in cells))  # the free GPUs decide
    if isinstance(parallel, int) and parallel > fit:
        raise ConfigError(
            f"sweep.parallel={parallel}: so many cells of {ranks} GPUs need {parallel * ranks}, and {len(gpus)} are "
            f"visible; use at most {fit}, or auto"
        )
    return (parallel if isinstance(parallel, int) else most), gpus


def _confounds(cells: list[Cell]) -> list[str]:
    """What changes with the batch size, beside it, where cells differ in that."""
    if len({cell.config.batch.total_batch_size for cell in cells}) < 2:
        return []
    return sorted({line for cell in cells for line in in_steps(result_deciding(cell.config))})


def _outcome(cell: Cell) -> str:
    summary = run_dir.read_json(cell.directory / run_dir.SUMMARY)
    loss = summary.get("final_val_loss")
    status = summary.get("status", "failed" if cell.directory.exists() else "not begun")
    return f"{status:<12} {f'val loss {loss:.4f}' if loss is not None else '':<16} {cell.name}"


def _report(directory: Path) -> None:
    """What the runs show so far; a report that fails is a line, and the runs are what they are."""
    from gptexp.report import PAGE, write_report

    try:
        write_report(directory)
        say(f"--- {directory / PAGE}")
    except Exception as error:
        print(f"gptexp: no report: {type(error).__name__}: {first_line(error)}", file=sys.stderr)


def _decided(sweep_dir: Path, key: str) -> dict[str, Any]:
    """What a cell begins with: the sweep's decisions, by preference with a micro-batch size found for its needs."""
    of_cells = (run_dir.read_json(path) for path in sorted(sweep_dir.glob(f"*/{run_dir.EFFECTIVE}")))
    same = (effective for effective in of_cells if effective.get("memory_key") == key)
    return next(same, run_dir.read_json(sweep_dir / run_dir.EFFECTIVE))


def _share(effective: dict[str, Any], target: Path) -> None:
    """Let `target` begin with these decisions, unless it has its own: a sweep decides once for its cells."""
    if effective and not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        run_dir.write_json(target, effective)


def _of_cells(line: str, cells: list[str], total: int) -> str:
    """A problem's line with the cells that have it."""
    if len(cells) == total:
        return f"{line} (all {total} cells)" if total > 1 else line
    more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
    return f"{line} (cell {cells[0]}{more})"


def swept_keys(config: DictConfig) -> list[str]:
    """The keys that a multirun varies, in the order given: the command line wins over the sweeper's `params`."""
    params = config.hydra.sweeper.get("params") or {}
    texts = [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
    parser = OverridesParser.create()
    overrides = {override.key_or_group: override for override in map(parser.parse_override, texts)}
    return [key for key, override in overrides.items() if override.is_sweep_override()]


def cell_name(config: Config, swept: dict[str, str]) -> str:
    """Directory of a cell: its swept values readably, and a hash of all that decides the result and of them.

    Values count as composed, so 6e-4 and 0.0006 are one cell; the text counts as its tokens, wherever it lies.
    """
    composed = {key: value for key, _, value in fields_of(config)}
    # Groups and paths as they were typed: an option's name, and not the folders that lead to a file.
    as_typed = ("data.path", "data.val_path")
    values = {key: text if key in as_typed else composed.get(key, text) for key, text in swept.items()}
    identity = {**result_deciding(config), "data": _data_identity(config), "swept": values}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:8]
    readable = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
    return re.sub(r"[^A-Za-z0-9._=,-]", "_", f"{readable[:80]}-{digest}" if readable else digest)


def _data_identity(config: Config) -> str:
    """The hash of the tokens; of text that cannot be read, its path: that cell will say what is wrong."""
    from gptexp.data.prepare import data_hash

    try:
        return data_hash(config.data)
    except UserError:
        return f"{config.data.path} {config.data.val_path}"


def name_sweep(config: DictConfig) -> None:
    """Give an unnamed sweep the name that the same or a widened grid will have again; refuse another launcher.

    It depends on which keys are swept, not on their values, and on the value of every other key that decides results.
    """
    from gptexp.compose import job_of

    for part in ("launcher", "sweeper"):
        target = config.hydra[part]._target_
        if "joblib" in target:
            raise ConfigError(
                "hydra/launcher=joblib: not supported, it cannot end a cell gracefully; use sweep.parallel=N"
            )
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
