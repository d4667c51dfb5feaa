"""Sweepers choose the cells of a sweep and their order: a grid, a random sample, or Optuna's choice.

The launcher (gptexp.sweep.launchers) takes one cell after another from its sweeper and passes each exit code back.
The sweeper prints the outcomes, and writes a report when the sweep ends, also after an error.
"""

import itertools
import random
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any

from filelock import BaseFileLock
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import DictConfig

from gptexp.config.fitted import fitted_warnings
from gptexp.config.schema import memory_key
from gptexp.process.errors import EXIT_DIVERGED, EXIT_FAILED, ConfigError, InUseError, UserError
from gptexp.process.signals import STOPPED
from gptexp.process.terminal import for_people, say, terminal_width, warn
from gptexp.process.words import counted, shown
from gptexp.run.harness import require_tasks
from gptexp.run.pool import OUTPUT
from gptexp.storage import run_dir
from gptexp.storage.sweep_record import MOST_CELLS
from gptexp.sweep.cells import PLUGINS, Cell, confounds, draft, record, settle
from gptexp.sweep.launchers import CellLauncher
from gptexp.sweep.space import Axis, Interval, spaces
from gptexp.sweep.study import Study

LOOK_S = 1.0  # s: between two looks at the locks of cells that run elsewhere


class CellSweeper(Sweeper):
    """The base of all sweepers. By default all cells are known at the start."""

    config: DictConfig

    def __init__(self, params: Any) -> None:
        self.params = params  # a mapping of keys to values; a grid also takes a list of mappings
        self.cells: list[Cell] = []  # all cells chosen so far
        self.waiting: list[Cell] = []
        self.elsewhere: list[Cell] = []  # cells that another command runs
        self.lock: IO[str] | None = None  # of the sweep; released when this process ends
        self.claims: dict[Path, BaseFileLock] = {}  # directory of a cell that this command runs -> its lock
        self.looked = 0.0  # s: when `more` last looked whether a cell elsewhere has ended
        self.failed: list[Cell] = []
        self.begun = self.done = self.total = 0  # cells of this command: started, ended, to run

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        self.context, self.task, self.config = hydra_context, task_function, config
        self.loader = hydra_context.config_loader
        launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        self.cell_launcher: CellLauncher = launcher
        self.directory = Path(config.hydra.sweep.dir)

    def combinations(self, spaces: Sequence[Sequence[Axis]]) -> list[list[str]]:
        """Return the overrides of each cell, for the space of each mapping of `params`.

        Raises `ConfigError` for what this sweeper cannot sweep.
        """
        raise NotImplementedError

    def count(self, combinations: Sequence[Sequence[str]]) -> int:
        """Return the number of cells, including those that are done."""
        return len(combinations)

    def sweep(self, arguments: list[str]) -> int:
        """Run the cells and write the report. Returns the exit code: 1 if a cell failed, 128 + N after signal N."""
        self.begin(spaces(self.params, arguments, self.loader))
        stopped = None
        try:
            stopped = self.cell_launcher.run(self)
        finally:
            say(f"--- {counted(len(self.cells), 'cell')} in {self.directory}")
            say(*map(_outcome, self.cells))
            if self.lock is not None:
                self.lock.close()  # the report says whether a command still runs the sweep
            _report(self.directory, self.cells)
        if stopped is not None:
            left = sum(_status(cell) not in run_dir.DONE for cell in self.cells) + self.to_choose()
            total = len(self.cells) + self.to_choose()
            warn(f"interrupted: {left} of {counted(total, 'cell')} left; repeat the command to go on")
            return 128 + stopped
        if self.failed:
            warn(f"{len(self.failed)} of {counted(len(self.cells), 'cell')} failed")
            return EXIT_FAILED
        return 0

    def begin(self, spaces: Sequence[Sequence[Axis]]) -> None:
        """Choose the cells and queue those that are not done. Raises `ConfigError` before any directory is made."""
        self.cells = self.compose(self.combinations(spaces))
        self.check(self.cells)
        self.lock = run_dir.lock_sweep(self.directory)
        self.record()
        self.waiting = [cell for cell in self.cells if not self.skips(cell)]
        self.total = len(self.waiting)

    def compose(self, combinations: Sequence[Sequence[str]]) -> list[Cell]:
        """Compose the cells of these overrides. Raises one `ConfigError` for all illegal cells."""
        return settle(draft(self.loader, self.config, combinations, self.count(combinations)), self.directory)

    def check(self, cells: Sequence[Cell]) -> None:
        """Raise `ConfigError` for cells that the launcher cannot run; warn of what makes their results doubtful."""
        configs = [cell.config for cell in cells]
        require_tasks(configs)
        self.cell_launcher.check(configs)
        of_law = dict.fromkeys(line for config in configs for line in fitted_warnings(config))
        for line in [*confounds(configs), *of_law]:
            warn(f"warning: {line}")

    def to_choose(self) -> int:
        """Return the number of further cells that the sweeper has yet to choose."""
        return 0

    def record(self) -> None:
        """Write sweep.json."""
        record(self.directory, self.config, self.cells, self.to_choose())

    def skips(self, cell: Cell) -> bool:
        """Print that the cell is done, if it is. Returns whether it is."""
        status = _status(cell)
        if status in run_dir.DONE:
            say(f"--- {cell.name}: already {status}")
        return status in run_dir.DONE

    def claim(self, cell: Cell, runs: bool = False) -> None:
        """Reserve a cell for this command until `ended`. Raises `InUseError` if another command runs or has run it.

        With `runs`, it runs as a job that no other command watches.
        """
        if not runs:
            run_dir.check_unlocked(cell.directory, run_dir.LOCKS)
        lock = run_dir.acquire(cell.directory, run_dir.SWEEP_LOCK)
        if run_dir.status(cell.directory) in run_dir.DONE:  # since this sweep began
            lock.release()
            raise InUseError(f"{cell.directory}: another command has completed it")
        self.claims[cell.directory] = lock

    def release(self, cell: Cell) -> None:
        if (lock := self.claims.pop(cell.directory, None)) is not None:
            lock.release()

    def set_aside(self, cell: Cell) -> None:
        self.release(cell)
        if run_dir.is_locked(cell.directory, run_dir.LOCKS):
            say(f"--- {cell.name}: running elsewhere; waiting for its end")
        self.elsewhere.append(cell)

    def more(self) -> Cell | None:
        """Return the next cell once `waiting` is empty; None if there is none now.

        Here only a cell that ran elsewhere, and was interrupted or failed there.
        """
        if not self.elsewhere or time.monotonic() - self.looked < LOOK_S:
            return None
        self.looked = time.monotonic()
        for cell in [cell for cell in self.elsewhere if not run_dir.is_locked(cell.directory, run_dir.LOCKS)]:
            self.elsewhere.remove(cell)
            if not self.skips(cell):
                return cell
            self.ended_elsewhere(cell)
        return None

    def ended_elsewhere(self, cell: Cell) -> None:
        """Record that another command has completed a cell."""

    def announce(self, cell: Cell, how: str) -> None:
        self.begun += 1
        say(f"--- cell {self.begun} of {self.total} {how}: {cell.name}")

    def begins(self, cell: Cell, where: str = "") -> int:
        """Announce the cell, let Hydra make its directory, and call the task there. Returns the task's exit code.

        Raises the task's `UserError`.
        """
        self.announce(cell, f"begins{where}")
        _share(_decided(self.directory, memory_key(cell.config)), cell.directory / run_dir.EFFECTIVE)

        def task(_: Any) -> Any:
            try:
                return self.task(cell.config, cell.composition)
            except UserError as error:  # returned, because Hydra prints a line of its own for a raised error
                return error

        subdir, context = "hydra.sweep.subdir", self.context
        with run_dir.storage(cell.directory):  # Hydra creates it and writes .hydra/
            result = run_job(task, cell.composition, "hydra.sweep.dir", job_subdir_key=subdir, hydra_context=context)
        if isinstance(result.return_value, UserError):
            raise result.return_value
        return int(result.return_value)

    def ended(self, cell: Cell, code: int) -> None:
        if code in STOPPED:
            run_dir.mark_interrupted(cell.directory)  # before its first step, a run writes no status
        self.release(cell)
        self.done += 1
        if code not in (0, EXIT_DIVERGED):
            self.failed.append(cell)
        if (cell.directory / OUTPUT).exists():  # otherwise the run itself has printed its outcome here
            where = f"; {cell.directory / OUTPUT}" if cell in self.failed else ""
            say(f"--- {_outcome(cell)} ({self.done} of {self.total}){where}")

    def share_decisions(self) -> bool:
        """Copy a cell's resolved `auto` values to the sweep's directory. Returns whether they are there."""
        shared = self.directory / run_dir.EFFECTIVE
        for cell in self.cells if not shared.exists() else ():
            with suppress(ConfigError):  # a damaged file: the cell's own run reports it
                _share(run_dir.read_json(cell.directory / run_dir.EFFECTIVE), shared)
        return shared.exists()


class GridSweeper(CellSweeper):
    """All combinations of the swept values; of several mappings in `params`, those of each."""

    __module__ = PLUGINS

    def combinations(self, spaces: Sequence[Sequence[Axis]]) -> list[list[str]]:
        cells = [list(cell) for space in spaces for cell in itertools.product(*map(self._overrides, space))]
        return list({frozenset(cell): cell for cell in cells}.values())  # arguments can make cells of mappings equal

    @staticmethod
    def _overrides(axis: Axis) -> list[str]:
        if isinstance(axis.among, Interval):
            raise ConfigError(f"{axis.key}: a grid needs a list (1e-3,2e-3); or add hydra/sweeper=random or optuna")
        return [axis.override(value) for value in axis.among]


class RandomSweeper(CellSweeper):
    """`n_cells` cells with values drawn at random.

    A value depends only on the seed, the cell's number and the key. So a larger `n_cells` keeps the existing cells, and
    a further key keeps the values of the others.
    """

    __module__ = PLUGINS

    def __init__(self, params: Any, n_cells: Any, seed: Any) -> None:
        super().__init__(params)
        self.n_cells, self.seed = n_cells, seed

    def combinations(self, spaces: Sequence[Sequence[Axis]]) -> list[list[str]]:
        space = _one(spaces)
        _whole_number("hydra.sweeper.n_cells", self.n_cells, 1)
        _whole_number("hydra.sweeper.seed", self.seed, 0)
        return [[axis.override(self._value(axis, number)) for axis in space] for number in range(self.n_cells)]

    def _value(self, axis: Axis, number: int) -> str:
        generator = random.Random(f"{self.seed}/{number}/{axis.key}")
        if isinstance(axis.among, Interval):
            return axis.among.text(axis.among.draw(generator))
        return generator.choice(axis.among)


class OptunaSweeper(CellSweeper):
    """`n_trials` cells chosen one by one by Optuna's TPE sampler, from the losses of the cells that have ended.

    The study is saved in the sweep's directory, and the next command continues it. No cell is stopped early because of
    its loss: rankings change while the learning rate decays (arXiv 2509.02046).
    """

    __module__ = PLUGINS

    def __init__(self, params: Any, n_trials: Any, seed: Any) -> None:
        super().__init__(params)
        self.n_trials, self.seed = n_trials, seed

    def combinations(self, spaces: Sequence[Sequence[Axis]]) -> list[list[str]]:
        """Return examples to check, not to run. Together they contain every value, and both ends of an interval."""
        space = _one(spaces)
        _whole_number("hydra.sweeper.n_trials", self.n_trials, 1, MOST_CELLS)
        _whole_number("hydra.sweeper.seed", self.seed, 0)
        texts = [
            axis.among if isinstance(axis.among, list) else [*map(axis.among.text, (axis.among.low, axis.among.high))]
            for axis in space
        ]
        return [
            [axis.override(values[min(number, len(values) - 1)]) for axis, values in zip(space, texts, strict=True)]
            for number in range(max(map(len, texts), default=0))
        ]

    def count(self, combinations: Sequence[Sequence[str]]) -> int:
        return int(self.n_trials)

    def begin(self, spaces: Sequence[Sequence[Axis]]) -> None:
        if self.config.data.val_tokens == 0 and self.config.data.val_ratio is None:
            raise ConfigError("data.val_tokens=0: Optuna needs a validation loss; set data.val_tokens above 0")
        self.check(self.compose(self.combinations(spaces)))
        self.lock = run_dir.lock_sweep(self.directory)
        self.study = Study(self.directory, _one(spaces), self.seed)
        self.total, self.asked, self.illegal = max(0, self.n_trials - self.study.completed), 0, 0
        self.running: dict[tuple[str, ...], Cell] = {}  # overrides -> the cell that runs with them
        self.trials: dict[Path, list[int]] = {}  # directory of a running cell -> the numbers of its trials
        self.record()

    def more(self) -> Cell | None:
        if (again := super().more()) is not None:
            return again
        while self.asked < self.total and self.study.wants(self.n_trials):
            self.asked += 1
            number, overrides = self.study.ask()
            if (same := self.running.get(overrides)) is not None:  # with few choices Optuna repeats some
                self.trials[same.directory].append(number)
                continue
            [drafted] = draft(self.loader, self.config, [overrides], self.n_trials, len(self.cells))
            if drafted.problems:  # each value is legal, their combination is not
                warn(f"{drafted.title}: {drafted.problems[0]}")
                self.study.refuse(number)
                self.illegal += 1
                continue
            [cell] = settle([drafted], self.directory)
            if cell.name not in [known.name for known in self.cells]:
                self.cells.append(cell)
            self.record()
            if self.skips(cell):
                self.study.tell(number, cell)
                continue
            self.running[overrides], self.trials[cell.directory] = cell, [number]
            return cell
        return None

    def to_choose(self) -> int:
        return self.total - self.asked

    def sweep(self, arguments: list[str]) -> int:
        code = super().sweep(arguments)
        if self.illegal and self.illegal == self.asked:
            warn("all combinations that Optuna chose are illegal; sweep values that fit together")
            return EXIT_FAILED
        return code

    def ended(self, cell: Cell, code: int) -> None:
        super().ended(cell, code)
        self.ended_elsewhere(cell)

    def ended_elsewhere(self, cell: Cell) -> None:
        self.running = {overrides: other for overrides, other in self.running.items() if other is not cell}
        for number in self.trials.pop(cell.directory, ()):
            self.study.tell(number, cell)


def _one(spaces: Sequence[Sequence[Axis]]) -> Sequence[Axis]:
    if len(spaces) > 1:
        raise ConfigError("hydra.sweeper.params: a list of mappings needs hydra/sweeper=grid; give one mapping")
    return spaces[0]


def _whole_number(key: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise `ConfigError` unless `value` is an integer from `least` to `most`: Hydra's own keys have no schema here."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key}={shown(value)}: must be a whole number, {least} or above")
    if most is not None and value > most:
        raise ConfigError(f"{key}={shown(value)}: must be at most {most}")


def _status(cell: Cell) -> str | None:
    """Return the status in the cell's summary; None for a damaged file, which the cell's own run reports."""
    try:
        return run_dir.status(cell.directory)
    except ConfigError:
        return None


def _outcome(cell: Cell) -> str:
    try:
        summary = run_dir.read_summary(cell.directory)
    except ConfigError:
        summary = {"status": "damaged"}
    loss = summary.get("final_val_loss")
    status = summary.get("status", "failed" if cell.directory.exists() else "not started")
    return f"{status:<12} {f'val loss {loss:.4f}' if loss is not None else '':<16} {cell.name}"


def _report(directory: Path, cells: Sequence[Cell]) -> None:
    """Write the sweep's report, print its answer, and upload it to wandb."""
    from gptexp.reporting.page.write import report_or_warning, show  # imports scipy

    written = report_or_warning(directory)
    if written is None:
        return
    report, files = written
    if report.answers:
        with redirect_stdout(for_people()):
            show(report, terminal_width())
    say(f"--- {files[0]}")
    log = cells[0].config.log
    if log.wandb.mode != "disabled":
        from gptexp.loggers.wandb import log_report  # imports torch

        log_report(log, directory, directory.name, files)


def _decided(sweep_dir: Path, key: str) -> dict[str, Any]:
    """Return the resolved `auto` values that a cell starts with.

    Prefers those of a cell with equal memory needs, so that the micro-batch size fits; else the sweep's own.
    """
    for path in sorted(sweep_dir.glob(f"*/{run_dir.EFFECTIVE}")):
        with suppress(ConfigError):  # a damaged file: that cell's own run reports it
            effective = run_dir.read_json(path)
            if effective.get("memory_key") == key:
                return effective
    return run_dir.read_json(sweep_dir / run_dir.EFFECTIVE)


def _share(effective: dict[str, Any], target: Path) -> None:
    """Write the resolved `auto` values to `target` unless it exists: a sweep resolves them once for all cells."""
    if effective and not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        run_dir.write_json(target, effective)
