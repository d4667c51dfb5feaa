"""Where the cells of a sweep run: in processes of this machine, side by side, or on the ranks of torchrun or srun."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from gptexp.config.schema import Config
from gptexp.distributed.ranks import AT_ONCE, launcher_rank
from gptexp.model.gpus import largest_of
from gptexp.process.errors import ConfigError
from gptexp.process.fields import AUTO
from gptexp.process.imports import permanent
from gptexp.process.signals import start_a_run
from gptexp.process.words import counted
from gptexp.run.own_process import resume_command
from gptexp.run.preloaded import Forked, Preloaded
from gptexp.run.requirements import require_devices
from gptexp.storage import run_dir
from gptexp.sweep.cells import PLUGINS, Cell
from gptexp.sweep.trial import Fastest, fastest, most_at_once


class Process(Protocol):
    """The process of a cell: a `subprocess.Popen`, a SLURM job, or actors of Ray."""

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""

    def send_signal(self, number: int) -> None:
        """Ask it to save a checkpoint and end."""


@dataclass(frozen=True)
class Places:
    """How many cells fit on the devices."""

    at_once: int | None  # None: on a CPU, which decides by a trial
    gpus: list[str] | None = None  # each cell gets one per rank; None: the cells share a CPU, or run elsewhere


class CellLauncher(Launcher):
    """Runs each cell in new processes of this machine, several at once if there are GPUs for them.

    A launcher starts single cells; `CellSweeper.run` decides when, and waits for them.
    """

    __module__ = PLUGINS
    where = ""  # where a cell runs, in the line that announces it
    shares_machine = True  # whether cells that run at once share the cores of this machine
    prints_runs = True  # whether a run that has the machine to itself prints to the terminal; else to a file of its own
    preloaded: Preloaded | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        raise NotImplementedError("gptexp's sweepers call `start`, with one cell")

    def check(self, configs: Sequence[Config]) -> None:
        """Raise `ConfigError` if the cells cannot run here."""
        parallel = configs[0].sweep.parallel
        if launcher_rank() is None:
            require_devices(configs)
        elif parallel not in (AUTO, 1):
            raise ConfigError(
                f"sweep.parallel={parallel}: torchrun and srun run one cell at a time; leave it out",
                "parallel-in-launcher",
            )

    def places(self, configs: Sequence[Config]) -> Places:
        """Return how many cells run at once, and this machine's GPUs if it has any.

        Raises `ConfigError` if `sweep.parallel` needs more GPUs than there are.
        """
        parallel, sizes = configs[0].sweep.parallel, [config.world.size or 1 for config in configs]
        devices = {config.train.device for config in configs}
        gpus = visible_gpus() if devices <= {"auto", "cuda"} and launcher_rank() is None else []
        if not gpus:
            can_try = sys.platform == "linux" and launcher_rank() is None and most_at_once(configs) > 1
            return Places(parallel if isinstance(parallel, int) else None if can_try else 1)
        fit = max(1, len(gpus) // max(sizes))
        if isinstance(parallel, int) and parallel > fit:
            raise ConfigError(
                f"sweep.parallel={parallel}: needs {counted(parallel * max(sizes), 'GPU')}, up to {max(sizes)} per "
                f"cell; visible GPUs: {len(gpus)}; use at most {fit}, or auto"
            )
        most = max(1, len(gpus) // min(sizes))  # an upper bound: a cell also waits until enough GPUs are free
        return Places(parallel if isinstance(parallel, int) else most, gpus)

    def earlier_job(self, cell: Cell) -> Process | None:
        """Return the job of an earlier command that still runs the cell. Local processes end with their command."""
        return None

    def start(self, cell: Cell, gpus: Sequence[str], at_once: int) -> Process:
        """Start or resume a cell whose directory is prepared, on these GPUs, as one of `at_once` cells."""
        environment = {**os.environ, AT_ONCE: str(at_once)}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        command = resume_command(cell.directory)
        is_shown = self.prints_runs and at_once == 1
        with nullcontext() if is_shown else (cell.directory / run_dir.OUTPUT).open("ab") as output:
            descriptor = output.fileno() if output else None
            if not gpus and (forked := self.forked(cell.config, command, environment, descriptor)) is not None:
                return forked
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches only this process, which forwards it
                preexec_fn=start_a_run,
            )

    def forked(
        self,
        config: Config,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int | None,
        end: int = signal.SIGTERM,
    ) -> Forked | None:
        """Fork a run from the preloaded process; None until it is ready.

        The parameters are those of `Preloaded.fork`. `config` is that of a cell.
        """
        if sys.platform != "linux" or config.sweep.cells == 1:  # libraries of macOS do not survive a fork
            return None
        return self.preload(config).fork(command, environment, output, end)

    def preload(self, config: Config) -> Preloaded:
        """Return the preloaded process, a new one if there is none."""
        if self.preloaded is None or not self.preloaded.is_alive:
            loggers = ["wandb.sdk.launch"] if config.log.wandb.mode != "disabled" else []
            self.preloaded = Preloaded(["gptexp.run.rank", *loggers])
        return self.preloaded

    def try_places(self, configs: Sequence[Config], is_over: Callable[[], bool]) -> Fastest | None:
        """Find out how many of the cells run fastest at once; None if `is_over`, or if that is not known."""

        def fork(directory: Path, at_once: int) -> Forked | None:
            environment = {**os.environ, AT_ONCE: str(at_once)}
            with directory.with_suffix(".log").open("wb") as output:
                return self.forked(configs[0], resume_command(directory), environment, output.fileno(), signal.SIGKILL)

        self.preload(configs[0])
        return fastest(configs, fork, is_over)

    def refuse_ranks(self, name: str) -> None:
        """Raise `ConfigError` on a rank of torchrun or srun, for a launcher that starts the ranks itself."""
        if launcher_rank() is not None:
            raise ConfigError(f"hydra/launcher={name}: starts the ranks itself; start it outside of torchrun and srun")

    def close(self) -> None:
        """Release what `check` and `start` have opened. No cell runs any more."""
        if self.preloaded is not None:
            self.preloaded.close()


def refuse_too_large(configs: Sequence[Config], kinds: Iterable[str]) -> None:
    """Raise `ConfigError` if a rank of a cell needs more memory than the largest of these kinds of GPU has.

    Refuses nothing if the memory of one kind is unknown.
    """
    if configs and (gpu := largest_of(kinds)) is not None:
        with permanent():
            from gptexp.machine import gpu_memory  # imports torch

        gpu_memory.refuse_too_large(configs, gpu)


def visible_gpus() -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them; empty without a GPU."""
    with permanent():
        import torch  # here, because a sweep's parent starts without torch

    count = torch.cuda.device_count()
    named = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    # CUDA ignores the names after the first invalid one.
    return (named or [str(number) for number in range(count)])[:count]
