"""Sweepers choose the cells of a sweep; `CellSweeper.execute` locks one cell, runs it and records how it ended.

The chosen cells are a grid, a random sample, or Optuna's (gptexp.sweep.study). A launcher (gptexp.sweep.launchers)
starts the process of a cell.
"""

import itertools
import random
import signal
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import DictConfig

from gptexp.config.fitted import fitted_warnings
from gptexp.config.schema import Config, LogConfig, memory_key
from gptexp.distributed.ranks import launcher_rank
from gptexp.process.cores import count_cores
from gptexp.process.errors import EXIT_DIVERGED, EXIT_FAILED, ConfigError, InUseError, UserError
from gptexp.process.fields import LIMIT, parse_count
from gptexp.process.imports import permanent
from gptexp.process.signals import STOPPED, collected
from gptexp.process.terminal import for_people, say, terminal_width, warn
from gptexp.process.words import counted, duration, shown
from gptexp.run.requirements import require_tasks
from gptexp.storage import run_dir
from gptexp.storage.sweep_record import MOST_CELLS
from gptexp.sweep.cells import PLUGINS, Cell, Compositions, confounds, decisions, draft_cells, record, settle
from gptexp.sweep.launchers import CellLauncher, Places, Process
from gptexp.sweep.space import Axis, Interval, spaces

if TYPE_CHECKING:
    from gptexp.reporting.page.report import Report  # imports scipy

POLL_S = 0.05  # s: between two looks at the running cells
LOOK_S = 1.0  # s: between two looks at the locks of cells that run elsewhere
ENDED = object()  # what `_advance` gets from a cell that has ended


class CellSweeper(Sweeper):
    """The base of all sweepers. By default all cells are known at the start."""

    config: DictConfig
    launcher: CellLauncher
    learns = False  # whether it needs the results of cells to choose others well, and so runs one after the other
    is_search = False  # whether it decides by the results how many cells there are

    def __init__(self, params: Any) -> None:
        self.params = params  # a mapping of keys to values; a grid also takes a list of mappings
        self.cells: list[Cell] = []  # all cells chosen so far
        self.waiting: list[Cell] = []  # cells to start
        self.elsewhere: list[Cell] = []  # cells that another command runs
        self.looked = 0.0  # s of the monotonic clock: the last look at `elsewhere`
        self.free_gpus: list[str] = []
        self.failed: list[Cell] = []
        self.by_memory: dict[Any, dict[str, Any]] = {}  # memory key -> the `auto` values of a cell that has it
        self.report: Report | None = None  # at the end
        self.begun = self.done = self.total = 0  # cells of this command: started, ended, to run

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        self.context, self.task, self.config = hydra_context, task_function, config
        self.loader = hydra_context.config_loader
        self.compositions = Compositions(self.loader, config)
        plugins: Any = Plugins.instance()
        self.launcher = plugins.instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        self.launcher.prints_runs = not self.is_search  # its decisions would be lost among the lines of runs
        self.directory = Path(config.hydra.sweep.dir)
        self.on_ranks = launcher_rank() is not None  # ranks of torchrun or srun train the cells, one after the other

    @property
    def at_once(self) -> int:
        """Number of cells that run at once."""
        return self.places.at_once or 1

    # --- which cells: a sweeper overrides these ---
    def combinations(self, spaces: Sequence[Sequence[Axis]]) -> list[list[str]]:
        """Return the overrides of each cell, for the space of each mapping of `params`.

        Raises `ConfigError` for what this sweeper cannot sweep.
        """
        raise NotImplementedError

    def count(self, combinations: Sequence[Sequence[str]]) -> int:
        """Return the number of cells, including those that are done."""
        return len(combinations)

    def queue(self, cells: list[Cell], spaces: Sequence[Sequence[Axis]]) -> None:
        """Queue the composed `cells` that are not done."""
        self.cells = cells
        self.waiting = [cell for cell in cells if not self.skips(cell)]
        self.total = len(self.waiting)

    def choose(self) -> Cell | None:
        """Return one more cell when none waits; None if there is none now."""
        return None

    def to_choose(self) -> int:
        """Return the number of further cells that the sweeper has yet to choose."""
        return 0

    def title(self, cell: Cell) -> str:
        """Return what the lines on the terminal call a cell."""
        return cell.name

    def announcement(self, cell: Cell) -> str:
        """Return what the line says that announces a cell."""
        return self.title(cell)

    def learn(self, cell: Cell) -> None:
        """Use the result of a cell that has ended, here or under another command."""

    # --- the whole sweep ---
    def sweep(self, arguments: list[str]) -> int:
        """Run the cells and write the report. Returns the exit code: 1 if a cell failed, 128 + N after signal N.

        Raises `ConfigError` for illegal cells, before any directory is made.
        """
        axes, signals = spaces(self.params, arguments, self.loader), list[int]()
        combinations = self.combinations(axes)
        cells = settle(draft_cells(self.compositions, combinations, self.count(combinations)), self.directory)
        self.check(cells)
        lock = run_dir.lock_sweep(self.directory)
        self.queue(cells, axes)
        self.record()
        try:
            self.run(signals)
        finally:
            self.launcher.close()
            say(f"--- {counted(len(self.cells), 'cell')} in {self.directory}")
            say(*(_outcome(cell, cell.name) for cell in self.cells))
            lock.release()  # before the report, which says whether a command still runs it
            if any(cell.directory.exists() for cell in self.cells):  # else a signal came before the first
                self.report = _report(self.directory, cells[0].config.log)
        if signals:
            left = sum(_summary(cell).get("status") not in run_dir.DONE for cell in self.cells) + self.to_choose()
            total = len(self.cells) + self.to_choose()
            warn(f"interrupted: {left} of {counted(total, 'cell')} left; repeat the command to go on")
            return 128 + signals[0]
        if self.failed:
            warn(f"{len(self.failed)} of {counted(len(self.cells), 'cell')} failed")
            return EXIT_FAILED
        return 0

    def check(self, cells: Sequence[Cell]) -> None:
        """Raise `ConfigError` for cells that the launcher cannot run; warn of what makes their results doubtful."""
        configs = [cell.config for cell in cells]
        require_tasks(configs)
        self.launcher.check(configs)
        self.places = self.find_places(configs)
        self.free_gpus = list(self.places.gpus or [])
        self.warn_of_threads(configs)
        doubts = dict.fromkeys(line for config in configs for line in fitted_warnings(config))
        for line in [*confounds(configs), *doubts]:
            warn(f"warning: {line}")

    def find_places(self, configs: Sequence[Config]) -> Places:
        """The launcher's places. Without `sweep.parallel`, a CPU keeps the number with which the sweep began."""
        places = self.launcher.places(configs)
        if places.at_once is None and (self.learns or self.has_begun):
            return Places(self.began_with("runs_at_once"))
        return places

    @property
    def has_begun(self) -> bool:
        """Whether every `auto` is decided for all cells."""
        return (self.directory / run_dir.EFFECTIVE).exists()

    def began_with(self, key: str) -> int:
        """A number of the decisions for all cells. 1 in place of no number: the cells' runs report a damaged file."""
        number = run_dir.read_json(self.directory / run_dir.EFFECTIVE).get(key)
        return number if type(number) is int and number > 0 else 1

    def warn_of_threads(self, configs: Sequence[Config]) -> None:
        """Print a line if `sweep.parallel` differs from that with which the sweep began, so that its threads misfit."""
        given = any(config.world.threads_per_rank is not None for config in configs)
        here = self.launcher.shares_machine and not self.on_ranks and not self.places.gpus
        if not here or given or not self.has_begun or self.at_once == self.began_with("runs_at_once"):
            return
        threads = self.at_once * self.began_with("threads_per_rank") * max(config.world.size or 1 for config in configs)
        if threads != (cores := count_cores()):
            warn(
                f"warning: sweep.parallel={self.at_once}: the cells keep the threads with which the sweep began, "
                f"{counted(threads, 'thread')} on {counted(cores, 'core')}; others change the last digits of losses; "
                "for those, start another sweep.name"
            )

    def record(self) -> None:
        """Write sweep.json."""
        record(self.directory, self.config, self.cells, self.to_choose())

    def run(self, signals: list[int]) -> None:
        """Execute all cells, and wait for those that run elsewhere.

        The `handled` signals are added to `signals`. Each running cell gets them and saves a checkpoint, and no
        cell starts any more.
        """
        running: list[Iterator[None]] = []
        with nullcontext() if self.on_ranks else collected(signals):
            try:
                if self.places.at_once is None:
                    self.places = Places(self.try_places(signals))
                while True:
                    while not signals and len(running) < (self.at_once if self.share_decisions() else 1):
                        if (cell := self.next_cell(idle=not running)) is None:
                            break
                        running += _advance([self.execute(cell, signals)])
                    if not running and (signals or not self.elsewhere):
                        return
                    time.sleep(POLL_S)
                    running = _advance(running)
            except BaseException:
                signals.append(signal.SIGTERM)
                while running := _advance(running):
                    time.sleep(POLL_S)
                raise

    def to_run(self) -> list[Config]:
        """Return the configs of the cells that are not done, as far as they are known."""
        return [cell.config for cell in self.waiting]

    def try_places(self, signals: Sequence[int]) -> int:
        """Decide by a trial how many cells run at once, and what every `auto` of all cells becomes."""
        configs, begun = self.to_run(), time.monotonic()
        found = self.launcher.try_places(configs, lambda: bool(signals)) if configs else None
        if found is None:
            return 1
        for number, ratio in found.tried.items():
            took = f"by a trial of {duration(time.monotonic() - begun)}"
            say(f"--- {number} cells at once train {ratio:.2f} times as fast as {counted(number // 2, 'cell')}, {took}")
        if not self.share_decisions():  # another command may have begun the sweep meanwhile
            run_dir.write_json(self.directory / run_dir.EFFECTIVE, found.effective)
        return self.began_with("runs_at_once")

    def next_cell(self, idle: bool) -> Cell | None:
        """Remove and return the first waiting cell for which enough GPUs are free, else None.

        If the sweep is `idle` (no cell runs), it is the first cell in any case: its run reports the missing GPUs.
        """
        if not self.waiting and (cell := self.returned() or self.choose()) is not None:
            self.waiting.append(cell)
        fitting = [c for c in self.waiting if self.places.gpus is None or c.world_size <= len(self.free_gpus)]
        cell = next(iter(fitting or (self.waiting if idle else [])), None)
        if cell is not None:
            self.waiting.remove(cell)
        return cell

    def returned(self) -> Cell | None:
        """Return a cell that ran elsewhere, and was interrupted or failed there; None if there is none."""
        if not self.elsewhere or time.monotonic() - self.looked < LOOK_S:
            return None
        self.looked = time.monotonic()
        for cell in [cell for cell in self.elsewhere if not run_dir.is_locked(cell.directory, run_dir.LOCKS)]:
            self.elsewhere.remove(cell)
            if not self.skips(cell):
                return cell
            self.learn(cell)
        return None

    # --- one cell ---
    def execute(self, cell: Cell, signals: Sequence[int]) -> Generator[None, None, None]:
        """Lock a cell, run it and record how it ended; yield while it runs. Each of `signals` is passed on to it.

        A cell that another command runs is set aside. After an error that concerns only this cell, the cell has failed.
        """
        gpus = [self.free_gpus.pop(0) for _ in range(min(cell.world_size, len(self.free_gpus)))]
        try:
            process = self.launcher.earlier_job(cell)
            with self.claimed(cell, is_running=process is not None):
                try:
                    code = self.begin_cell(cell, gpus, process)
                    if signals:
                        code = 128 + signals[-1]
                    elif not self.on_ranks:
                        process = process or self.launcher.start(cell, gpus, self.at_once)
                        code = yield from _wait(process, signals)
                except InUseError:
                    raise
                except (OSError, UserError) as error:
                    if self.on_ranks:
                        raise
                    warn(f"{cell.directory}: {error}")
                    code = EXIT_FAILED
                self.end_cell(cell, code)
        except InUseError:
            if run_dir.is_locked(cell.directory, run_dir.LOCKS):
                say(f"--- {cell.name}: running elsewhere; waiting for its end")
            self.elsewhere.append(cell)
        finally:
            self.free_gpus.extend(gpus)

    def skips(self, cell: Cell) -> bool:
        """Return whether the cell is done. If so, print a line that says it."""
        status = _summary(cell).get("status")
        if status in run_dir.DONE:
            say(f"--- {cell.name}: already {status}")
        return status in run_dir.DONE

    @contextmanager
    def claimed(self, cell: Cell, is_running: bool = False) -> Iterator[None]:
        """Reserve a cell for this command. Raises `InUseError` if another command runs it or has completed it.

        `is_running`: it runs already, in a job that no other command watches.
        """
        if not is_running:
            run_dir.check_unlocked(cell.directory, run_dir.LOCKS)
        with run_dir.held(cell.directory, run_dir.SWEEP_LOCK):
            if run_dir.status(cell.directory) in run_dir.DONE:  # since this sweep began
                raise InUseError(f"{cell.directory}: another command has completed it")
            yield

    def begin_cell(self, cell: Cell, gpus: Sequence[str], job: object) -> int:
        """Announce a cell and, unless a `job` runs it, let Hydra make its directory and call the task there.

        On a launcher's ranks the task trains; elsewhere it saves the config. Returns the task's exit code. Raises
        the task's `UserError`.
        """
        self.begun += 1
        where = f" on GPU {', '.join(gpus)}" if gpus else self.launcher.where
        how = f"begins{where}" if job is None else f"runs as {job} of an earlier command"
        say(f"--- cell {self.begun} of {self.total} {how}: {self.announcement(cell)}")
        if job is not None:
            return 0
        self.take_decisions(cell)

        composition = cell.compose_named()

        def task(_: Any) -> Any:
            try:
                return self.task(cell.config, composition)
            except UserError as error:  # returned, because Hydra prints a line of its own for a raised error
                return error

        subdir, context = "hydra.sweep.subdir", self.context
        with run_dir.storage(cell.directory):  # Hydra creates it and writes .hydra/
            result = run_job(task, composition, "hydra.sweep.dir", job_subdir_key=subdir, hydra_context=context)
        if isinstance(result.return_value, UserError):
            raise result.return_value
        return int(result.return_value)

    def end_cell(self, cell: Cell, code: int) -> None:
        """Record the exit code of a cell, and print its outcome if its own output is elsewhere."""
        if self.on_ranks and code not in (0, EXIT_DIVERGED):  # the other ranks have left
            raise SystemExit(code)
        if code in STOPPED:
            run_dir.mark_interrupted(cell.directory)  # before its first step, a run writes no status
        self.done += 1
        if code not in (0, EXIT_DIVERGED):
            self.failed.append(cell)
        self.learn(cell)
        if (output := cell.directory / run_dir.OUTPUT).exists():
            where = f"; {output}" if cell in self.failed else ""
            say(f"--- {_outcome(cell, self.title(cell))} ({self.done} of {self.total}){where}")

    def share_decisions(self) -> bool:
        """Copy a cell's resolved `auto` values to the sweep's directory. Returns whether they are there."""
        if not self.has_begun and (auto_values := decisions(self.directory)):
            run_dir.write_json(self.directory / run_dir.EFFECTIVE, auto_values[0])
        return self.has_begun

    def take_decisions(self, cell: Cell) -> None:
        """If a cell has no resolved `auto` values, copy those of a cell with equal memory needs, else the sweep's own.

        The memory needs decide the micro-batch size. A sweep resolves all other values once, for all cells.
        """
        key, own = memory_key(cell.config), cell.directory / run_dir.EFFECTIVE
        if own.exists():
            return
        if key not in self.by_memory:  # reads those of all cells, of which there may be thousands
            self.by_memory = {values.get("memory_key"): values for values in reversed(decisions(self.directory))}
        if values := self.by_memory.get(key) or run_dir.read_json(self.directory / run_dir.EFFECTIVE):
            own.parent.mkdir(parents=True, exist_ok=True)
            run_dir.write_json(own, values)


class GridSweeper(CellSweeper):
    """All combinations of the swept values, within each mapping of `params`."""

    __module__ = PLUGINS

    def combinations(self, spaces: Sequence[Sequence[Axis]]) -> list[list[str]]:
        cells = [list(cell) for space in spaces for cell in itertools.product(*map(self._overrides, space))]
        return list({frozenset(cell): cell for cell in cells}.values())  # arguments can make mappings share cells

    @staticmethod
    def _overrides(axis: Axis) -> list[str]:
        if isinstance(axis.among, Interval):
            rule = "a grid needs a list (1e-3,2e-3); or add hydra/sweeper=random or optuna"
            raise ConfigError(f"{axis.key}: {rule}", "interval-in-grid")
        return [axis.override(value) for value in axis.among]


class RandomSweeper(CellSweeper):
    """`n_cells` cells with values drawn at random.

    A value depends only on the seed, the cell's number and the key. So a larger `n_cells` keeps the existing cells, and
    a further key keeps the values of the others.
    """

    __module__ = PLUGINS

    def __init__(self, params: Any, n_cells: Any, seed: Any) -> None:
        super().__init__(params)
        self.n_cells = whole_number("hydra.sweeper.n_cells", n_cells, 1, MOST_CELLS)
        self.seed = whole_number("hydra.sweeper.seed", seed, 0, LIMIT - 1)

    def combinations(self, spaces: Sequence[Sequence[Axis]]) -> list[list[str]]:
        space = one_space(spaces)
        return [[axis.override(self._value(axis, number)) for axis in space] for number in range(self.n_cells)]

    def _value(self, axis: Axis, number: int) -> str:
        generator = random.Random(f"{self.seed}/{number}/{axis.key}")
        if isinstance(axis.among, Interval):
            return axis.among.text(axis.among.draw(generator))
        return generator.choice(axis.among)


def one_space(spaces: Sequence[Sequence[Axis]]) -> Sequence[Axis]:
    if len(spaces) > 1:
        raise ConfigError(
            "hydra.sweeper.params: a list of mappings needs hydra/sweeper=grid; give one mapping", "grid-of-several"
        )
    return spaces[0]


def whole_number(key: str, value: Any, least: int, most: int) -> int:
    """Return `value` as a count: Hydra's own keys have no schema. Raises `ConfigError` unless `least` to `most`."""
    try:
        count = parse_count(str(value))
    except ValueError as error:
        raise ConfigError(f"{key}={shown(value)}: {error}", "wrong-type") from None
    if not least <= count <= most:
        raise ConfigError(f"{key}={shown(value)}: must be from {least} to {most:,}", "out-of-range")
    return count


def _advance(cells: Sequence[Iterator[None]]) -> list[Iterator[None]]:
    """Let each cell take its next step. Returns the cells that go on."""
    return [cell for cell in cells if next(cell, ENDED) is not ENDED]


def _wait(process: Process, signals: Sequence[int]) -> Generator[None, None, int]:
    """Pass on each of `signals` to a process until it ends. Returns its exit code."""
    sent = 0
    while (code := process.poll()) is None:
        for number in signals[sent:]:
            process.send_signal(number)
        sent = len(signals)
        yield
    return code


def _summary(cell: Cell) -> dict[str, Any]:
    """Return the cell's summary. A damaged one is reported by the cell's own run."""
    try:
        return run_dir.read_summary(cell.directory)
    except ConfigError:
        return {"status": "damaged"}


def _outcome(cell: Cell, title: str) -> str:
    summary = _summary(cell)
    loss = summary.get("final_val_loss")
    status = run_dir.present_status(cell.directory, summary) if cell.directory.exists() else "not started"
    return f"{status:<12} {f'val loss {loss:.4f}' if loss is not None else '':<16} {title}"


def _report(directory: Path, log: LogConfig) -> "Report | None":
    """Write the sweep's report, print its answer, and upload it to wandb. Returns None if it failed."""
    from gptexp.reporting.page.write import report_or_warning, show  # imports scipy

    written = report_or_warning(directory)
    if written is None:
        return None
    report, files = written
    if report.answers:
        with redirect_stdout(for_people()):
            show(report, terminal_width())
    say(f"--- {files[0]}")
    if log.wandb.mode != "disabled":
        with permanent():
            from gptexp.loggers.wandb import log_report  # imports torch

        log_report(log, directory, directory.name, files)
    return report
