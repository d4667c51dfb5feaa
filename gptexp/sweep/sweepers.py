"""Which cells a sweep has, and in which order: a grid, a random sample, or what Optuna asks for next.

A sweeper gives its cells out one by one to the launcher (gptexp.sweep.launchers), hears how each ended, says so, and
has a report written at the end, whatever happens.
"""

import itertools
import random
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.plugins import Plugins
from hydra.core.utils import run_job, setup_globals
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from gptexp import run_dir
from gptexp.config import memory_key, shown
from gptexp.errors import EXIT_DIVERGED, EXIT_FAILED, ConfigError, UserError
from gptexp.pool import OUTPUT
from gptexp.sweep import PLUGINS
from gptexp.sweep.cells import Cell, confounds, draft, record, settle
from gptexp.sweep.space import Axis, Interval, axes
from gptexp.terminal import say

if TYPE_CHECKING:
    from gptexp.sweep.launchers import CellLauncher


class CellSweeper(Sweeper):
    """A known list of cells; the base of all sweepers."""

    config: DictConfig

    def __init__(self, params: dict[str, Any] | None) -> None:
        self.params = params or {}
        self.cells: list[Cell] = []  # that there are, so far
        self.waiting: list[Cell] = []
        self.failed: list[Cell] = []
        self.begun = self.done = 0
        self.of = 0  # how many there are to run

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.task, self.config = hydra_context, task_function, config
        self.loader = hydra_context.config_loader
        launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        self.cell_launcher: CellLauncher = launcher
        self.directory = Path(config.hydra.sweep.dir)

    def combinations(self, space: Sequence[Axis]) -> list[list[str]]:
        """The overrides of each cell. Raises `ConfigError` for what this sweeper can't sweep."""
        raise NotImplementedError

    def count(self, combinations: Sequence[Sequence[str]]) -> int:
        """How many cells will run, if all goes well."""
        return len(combinations)

    def sweep(self, arguments: list[str]) -> None:
        """Run the cells; exits with 1 at the end if one failed, with 128 + its number after a signal."""
        from gptexp.compose import report_errors

        setup_globals()
        with report_errors():
            self.begin(axes(self.params, arguments, self.loader))
        stopped = None
        try:
            with report_errors():
                stopped = self.cell_launcher.run(self)
        finally:
            self._print_outcomes()
            _report(self.directory, self.cells)
        if stopped is not None:
            raise SystemExit(128 + stopped)
        if self.failed:
            print(f"gptexp: {len(self.failed)} of {len(self.cells)} cells failed", file=sys.stderr)
            raise SystemExit(EXIT_FAILED)

    def begin(self, space: Sequence[Axis]) -> None:
        """Find the cells, and which of them are still to run. Raises `ConfigError` before anything exists."""
        self.cells = self.compose(self.combinations(space))
        self.check(self.cells)
        self.record()
        self.waiting = [cell for cell in self.cells if not self.is_done(cell)]
        self.of = len(self.waiting)

    def compose(self, combinations: Sequence[Sequence[str]], of: int | None = None) -> list[Cell]:
        """The cells of these overrides. Raises `ConfigError` for all that are illegal at once."""
        drafts = draft(self.loader, self.config, combinations, of or len(combinations), len(self.cells))
        return settle(drafts, self.directory)

    def check(self, cells: Sequence[Cell]) -> None:
        """Raise `ConfigError` for what the launcher can't run; warn of what the sweep confounds."""
        configs = [cell.config for cell in cells]
        self.cell_launcher.check(configs)
        for line in confounds(configs):
            print(f"gptexp: warning: {line}", file=sys.stderr)

    def record(self) -> None:
        """Write sweep.json."""
        record(self.directory, self.config, self.cells, to_choose=0)

    def is_done(self, cell: Cell) -> bool:
        status = run_dir.status(cell.directory)
        if status in run_dir.DONE:
            say(f"--- {cell.name}: {status} before")
        return status in run_dir.DONE

    def more(self) -> Cell | None:
        """Another cell than those of `waiting`, once these are given out; None where there is none."""
        return None

    def announce(self, cell: Cell, how: str) -> None:
        self.begun += 1
        say(f"--- cell {self.begun} of {self.of} {how}: {cell.name}")

    def begins(self, cell: Cell, where: str = "") -> int:
        """Say so, and have Hydra make the cell's directory and call the task; the exit code that this gives.

        Raises `UserError` where the task refuses.
        """
        self.announce(cell, f"begins{where}")
        decided = _decided(self.directory, memory_key(cell.config))
        _share(decided, cell.directory / run_dir.EFFECTIVE)
        try:
            result = run_job(
                hydra_context=self.context,
                task_function=self.task,
                config=cell.composition,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
        except SystemExit as leaving:  # the task has said why; a cell costs itself only, but for ranks that wait
            if self.cell_launcher.among_ranks:
                raise
            raise UserError(f"not begun (exit code {leaving.code})") from None
        # Raises what the task did, which is a defect of gptexp: a cell that fails has an exit code.
        code: int = result.return_value
        return code

    def ended(self, cell: Cell, code: int) -> None:
        """Hear of a cell's exit code."""
        self.done += 1
        if code not in (0, EXIT_DIVERGED):
            self.failed.append(cell)
        if (cell.directory / OUTPUT).exists():  # else its own last line has just said so
            where = f"; {cell.directory / OUTPUT}" if cell in self.failed else ""
            say(f"--- {_outcome(cell)} ({self.done} of {self.of}){where}")

    def decided(self) -> bool:
        """Whether a first cell has decided what `auto` comes to on this machine; that is then shared."""
        shared = self.directory / run_dir.EFFECTIVE
        for cell in self.cells if not shared.exists() else ():
            with suppress(ConfigError):  # a damaged one: its cell will say so
                _share(run_dir.read_json(cell.directory / run_dir.EFFECTIVE), shared)
        return shared.exists()

    def _print_outcomes(self) -> None:
        """Status and final validation loss of every cell."""
        say(f"--- {len(self.cells)} cells in {self.directory}")
        say(*map(_outcome, self.cells))


class GridSweeper(CellSweeper):
    """All combinations of the swept values."""

    __module__ = PLUGINS

    def combinations(self, space: Sequence[Axis]) -> list[list[str]]:
        texts = []
        for axis in space:
            if isinstance(axis.among, Interval):
                raise ConfigError(
                    f"{axis.key}: a grid needs single values; write {axis.key}=a,b,c, or add hydra/sweeper=random or "
                    "optuna"
                )
            texts.append([axis.override(value) for value in axis.among])
        return [list(cell) for cell in itertools.product(*texts)]


class RandomSweeper(CellSweeper):
    """`n_cells` cells with values drawn at random, each from a generator of its own.

    A larger `n_cells` keeps the cells there are, and so does another key: what is drawn depends on the seed, the cell's
    number and the key.
    """

    __module__ = PLUGINS

    def __init__(self, params: dict[str, Any] | None, n_cells: Any, seed: Any) -> None:
        super().__init__(params)
        self.n_cells, self.seed = n_cells, seed

    def combinations(self, space: Sequence[Axis]) -> list[list[str]]:
        _whole_number("hydra.sweeper.n_cells", self.n_cells, 1)
        _whole_number("hydra.sweeper.seed", self.seed, 0)
        return [[axis.override(self._value(axis, number)) for axis in space] for number in range(self.n_cells)]

    def _value(self, axis: Axis, number: int) -> str:
        generator = random.Random(f"{self.seed}/{number}/{axis.key}")
        if isinstance(axis.among, Interval):
            return axis.among.text(axis.among.draw(generator))
        return generator.choice(axis.among)


class OptunaSweeper(CellSweeper):
    """`n_trials` cells chosen by Optuna's TPE sampler, each in the light of those that have ended.

    The study is kept in the sweep's directory, and gone on with. No cell is ended early for its loss: while the
    learning rate is still to decay, rankings change (arXiv 2509.02046).
    """

    __module__ = PLUGINS

    def __init__(self, params: dict[str, Any] | None, n_trials: Any, seed: Any) -> None:
        super().__init__(params)
        self.n_trials, self.seed = n_trials, seed

    def combinations(self, space: Sequence[Axis]) -> list[list[str]]:
        """Few that hold every value that can come up, of an interval both ends: to be checked, not to be run."""
        _whole_number("hydra.sweeper.n_trials", self.n_trials, 1)
        _whole_number("hydra.sweeper.seed", self.seed, 0)
        values = [
            axis.among if isinstance(axis.among, list) else [*map(axis.among.text, (axis.among.low, axis.among.high))]
            for axis in space
        ]
        return [
            [axis.override(of[min(number, len(of) - 1)]) for axis, of in zip(space, values, strict=True)]
            for number in range(max(map(len, values), default=0))
        ]

    def count(self, combinations: Sequence[Sequence[str]]) -> int:
        assert isinstance(self.n_trials, int)
        return self.n_trials

    def begin(self, space: Sequence[Axis]) -> None:
        from gptexp.sweep.study import Study

        if self.config.data.val_tokens == 0 and not self.config.data.val_path:
            raise ConfigError("data.val_tokens=0: Optuna needs a validation loss; hold some tokens out")
        self.check(self.compose(self.combinations(space), self.n_trials))
        self.directory.mkdir(parents=True, exist_ok=True)
        self.study = Study(self.directory, space, self.seed)
        self.of, self.asked, self.illegal = max(0, self.n_trials - self.study.completed), 0, 0
        self.running: dict[tuple[str, ...], Cell] = {}  # by its overrides
        self.trials: dict[Path, list[int]] = {}  # those of a cell that runs, by its directory
        self.record()

    def more(self) -> Cell | None:
        while self.asked < self.of:
            self.asked += 1
            number, overrides = self.study.ask()
            if (same := self.running.get(overrides)) is not None:  # among a few choices the same ones come up again
                self.trials[same.directory].append(number)
                continue
            [drafted] = draft(self.loader, self.config, [overrides], self.n_trials, len(self.cells))
            if drafted.problems:  # of values that are legal one by one
                print(f"gptexp: {drafted.title}: {drafted.problems[0]}", file=sys.stderr)
                self.study.refuse(number)
                self.illegal += 1
                continue
            [cell] = settle([drafted], self.directory)
            if cell.name not in [known.name for known in self.cells]:
                self.cells.append(cell)
            self.record()
            if self.is_done(cell):
                self.study.tell(number, cell)
                continue
            self.running[overrides], self.trials[cell.directory] = cell, [number]
            return cell
        return None

    def record(self) -> None:
        record(self.directory, self.config, self.cells, to_choose=self.of - self.asked)

    def sweep(self, arguments: list[str]) -> None:
        super().sweep(arguments)
        if self.illegal and self.illegal == self.asked:
            print("gptexp: nothing that Optuna chose can run; sweep values that go together", file=sys.stderr)
            raise SystemExit(EXIT_FAILED)

    def ended(self, cell: Cell, code: int) -> None:
        super().ended(cell, code)
        self.running = {overrides: other for overrides, other in self.running.items() if other is not cell}
        for number in self.trials.pop(cell.directory):
            self.study.tell(number, cell)


def _whole_number(key: str, value: Any, least: int) -> None:
    """Raise `ConfigError` for a value of Hydra's part of the config that is none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key}={shown(value)}: must be a whole number, {least} or above")


def _outcome(cell: Cell) -> str:
    try:
        summary = run_dir.read_json(cell.directory / run_dir.SUMMARY)
    except ConfigError:
        summary = {"status": "damaged"}
    loss = summary.get("final_val_loss")
    status = summary.get("status", "failed" if cell.directory.exists() else "not begun")
    return f"{status:<12} {f'val loss {loss:.4f}' if loss is not None else '':<16} {cell.name}"


def _report(directory: Path, cells: Sequence[Cell]) -> None:
    """What the runs show so far, in the sweep's directory and on wandb."""
    from gptexp.report import files_of_report

    files = files_of_report(directory)
    if files:
        say(f"--- {files[0]}")
        wandb = cells[0].config.log.wandb
        if wandb.mode != "disabled":
            from gptexp.loggers.wandb import log_report

            log_report(wandb, directory, directory.name, files)


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


OPTIONS: dict[str, tuple[type[CellSweeper], dict[str, Any]]] = {
    "grid": (GridSweeper, {"params": None}),
    "random": (RandomSweeper, {"params": None, "n_cells": 20, "seed": 0}),
    "optuna": (OptunaSweeper, {"params": None, "n_trials": 20, "seed": 0}),
}
