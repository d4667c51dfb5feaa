"""How cells are run: side by side on this machine, by the ranks of a launcher, or each as a job of SLURM."""

import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from gptexp import run_dir
from gptexp.config import AUTO, Config
from gptexp.distributed import launcher_rank
from gptexp.errors import EXIT_FAILED, ConfigError, UserError, first_line
from gptexp.pool import OUTPUT, Process, resume_command, run_all, visible_gpus
from gptexp.signals import at_parents_death
from gptexp.sweep import PLUGINS
from gptexp.sweep.cells import Cell

if TYPE_CHECKING:
    from gptexp.sweep.sweepers import CellSweeper

JOB = "job.json"  # in a cell's directory: its job
JOBS = ".submitit"  # what submitit keeps of its jobs, in the sweep's directory
POLL_S = 1.0  # how often a job looks at its run


class CellLauncher(Launcher):
    """Runs cells in processes of their own, side by side where there are devices; one that fails costs itself only."""

    __module__ = PLUGINS
    among_ranks = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        raise NotImplementedError("sweepers of gptexp give their cells out one by one, to `run`")

    def check(self, configs: Sequence[Config]) -> None:
        """Decide how many of such cells run at once. Raises `ConfigError` where so many cannot."""
        parallel = configs[0].sweep.parallel
        self.among_ranks = launcher_rank() is not None
        if self.among_ranks and parallel not in (AUTO, 1):
            raise ConfigError(f"sweep.parallel={parallel}: under a launcher all ranks train one cell; leave it out")
        self.at_once, self.gpus = (1, None) if self.among_ranks else self.places(configs)

    def places(self, configs: Sequence[Config]) -> tuple[int, list[str] | None]:
        """How many such cells run at once, and the GPUs they share out, if they do."""
        return side_by_side(configs)

    def run(self, sweep: "CellSweeper") -> int | None:
        """Run the cells that `sweep` gives out; the number of the signal that ended it, or None."""
        if self.among_ranks:
            while (cell := sweep.waiting.pop(0) if sweep.waiting else sweep.more()) is not None:
                sweep.ended(cell, sweep.begins(cell))
                sweep.decided()
            return None

        def begins(cell: Cell, own: Sequence[str]) -> None:
            sweep.begins(cell, f" on GPU {', '.join(own)}" if own else "")

        return run_all(sweep.waiting, sweep.more, self.at_once, self.gpus, sweep.decided, begins, sweep.ended)


def side_by_side(configs: Sequence[Config]) -> tuple[int, list[str] | None]:
    """How many such cells run at once, and the GPUs they share out; None on a CPU.

    Raises `ConfigError` where so many as asked for cannot.
    """
    parallel, sizes = configs[0].sweep.parallel, [config.world.size or 1 for config in configs]
    devices = {config.train.device for config in configs}
    gpus = visible_gpus() if devices <= {"auto", "cuda"} else []
    if not gpus:
        return (parallel if isinstance(parallel, int) else 1), None
    fit = max(1, len(gpus) // max(sizes))
    if isinstance(parallel, int) and parallel > fit:
        raise ConfigError(
            f"sweep.parallel={parallel}: so many cells of {max(sizes)} GPUs need {parallel * max(sizes)}, and "
            f"{len(gpus)} are visible; use at most {fit}, or auto"
        )
    most = max(1, len(gpus) // min(sizes))  # the free GPUs decide
    return (parallel if isinstance(parallel, int) else most), gpus


class SubmititLauncher(CellLauncher):
    """Runs each cell as a job of SLURM, by submitit; with `cluster=local` as a process, to try it out.

    A job is `gptexp resume` on the cell's directory, on one node. When its time runs out it saves, and SLURM takes it
    up again. `sweep.parallel` is how many jobs are submitted at once: on auto all, and the queue decides, but for the
    first, which decides for the others what `auto` comes to. Jobs that outlive this process are found again.
    """

    __module__ = PLUGINS

    def __init__(
        self, cluster: str, gpus_per_node: int | None = None, max_num_timeout: int | None = None, **parameters: Any
    ) -> None:
        self.cluster, self.gpus_per_node = cluster, gpus_per_node
        self.timeouts = {} if max_num_timeout is None else {f"{cluster}_max_num_timeout": max_num_timeout}
        given: Any = OmegaConf.to_container(OmegaConf.create(parameters))
        self.parameters = {
            key if key in OF_ALL_CLUSTERS else f"{cluster}_{key}": value
            for key, value in given.items()
            if value is not None
        }

    def check(self, configs: Sequence[Config]) -> None:
        if launcher_rank() is not None:
            raise ConfigError("hydra/launcher=submitit_…: submits jobs itself; start it outside of torchrun and srun")
        try:
            import submitit
        except ImportError:
            raise ConfigError("hydra/launcher=submitit_…: not installed; pip install 'gptexp[slurm]'") from None
        self.at_once, _ = self.places(configs)
        folder = Path(self.config.hydra.sweep.dir).absolute() / JOBS / "%j"
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=self.cluster, **self.timeouts)
            self.executor.update_parameters(nodes=1, tasks_per_node=1, **self.parameters)
        except (AssertionError, RuntimeError, NameError, TypeError, ValueError) as error:  # as it comes
            raise ConfigError(f"hydra.launcher: {first_line(error)}") from None

    def places(self, configs: Sequence[Config]) -> tuple[int, None]:
        parallel = configs[0].sweep.parallel
        if self.cluster != "local":
            return (parallel if isinstance(parallel, int) else max(1, len(configs))), None
        if parallel not in (AUTO, 1):
            raise ConfigError(
                f"sweep.parallel={parallel}: hydra/launcher=submitit_local runs one at a time; leave either out"
            )
        return 1, None

    def run(self, sweep: "CellSweeper") -> int | None:
        alive: dict[Path, Any] = {}  # jobs of an earlier command, by their cells

        def begins(cell: Cell, _: Sequence[str]) -> None:
            if (job := self._alive(cell)) is not None:
                alive[cell.directory] = job
                sweep.announce(cell, f"is job {job.job_id}, of an earlier command")
            else:
                sweep.begins(cell, " as a job")

        def submit(cell: Cell, _: Sequence[str], __: int) -> Process:
            if cell.directory in alive:
                return Submitted(alive[cell.directory])
            uses_gpus = cell.config.train.device in ("auto", "cuda")
            gpus = self.gpus_per_node if self.gpus_per_node is not None else cell.world_size if uses_gpus else 0
            self.executor.update_parameters(name=cell.name, gpus_per_node=gpus)
            try:
                job = self.executor.submit(CellJob(cell.directory))
            except Exception as error:  # submitit's own, or what the command for it raised
                raise UserError(
                    f"not submitted: {first_line(error)} (sweep.parallel=N submits no more than N at once)"
                ) from None
            run_dir.write_json(cell.directory / JOB, {"id": job.job_id})
            return Submitted(job)

        return run_all(sweep.waiting, sweep.more, self.at_once, None, sweep.decided, begins, sweep.ended, submit)

    def _alive(self, cell: Cell) -> Any:
        """The job that an earlier command submitted for `cell`, if it still waits or runs."""
        from submitit import SlurmJob

        number = run_dir.read_json(cell.directory / JOB).get("id")
        if number is None or self.cluster == "local":  # whose jobs are children of whoever submitted them
            return None
        job: Any = SlurmJob(self.executor.folder, str(number))
        return None if job.done(force_check=True) else job


class CellJob:
    """What a job does: begin the run of a cell, or go on with it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        with (self.directory / OUTPUT).open("ab") as output:
            self.run = subprocess.Popen(
                resume_command(self.directory), stdout=output, stderr=subprocess.STDOUT, preexec_fn=_as_part_of_a_job
            )
        # Not `wait`: that would keep `checkpoint`, which a signal's handler calls, from waiting in its turn.
        while (code := self.run.poll()) is None:
            time.sleep(POLL_S)
        return code

    def checkpoint(self) -> Any:
        """Called by submitit when the time is nearly over: the run saves, and goes on in the job that comes next."""
        from submitit.helpers import DelayedSubmission

        assert self.run is not None
        self.run.send_signal(signal.SIGUSR1)
        while self.run.poll() is None:
            time.sleep(POLL_S)
        return DelayedSubmission(CellJob(self.directory))


def _as_part_of_a_job() -> None:
    """In the run's process: SLURM gives the signal that time is nearly over to it too, and `CellJob` answers for it."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    at_parents_death(signal.SIGTERM)


class Submitted:
    """A job of submitit, as `run_all` sees processes."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.looked = -math.inf
        self.cancelled: int | None = None

    def poll(self) -> int | None:
        now = time.monotonic()
        if now - self.looked < POLL_S:
            return None
        self.looked = now
        if not self.job.done():
            return None
        if self.cancelled is not None:
            return 128 + self.cancelled
        try:
            code: int = self.job.result()
        except Exception as error:  # the job's own, or submitit's where it never began or was killed
            print(f"gptexp: job {self.job.job_id}: {first_line(error)}", file=sys.stderr)
            return EXIT_FAILED
        return code

    def send_signal(self, number: int) -> None:
        """Whichever it was: SLURM gives SIGTERM to all that runs in a job, and KillWait seconds to save."""
        self.cancelled = number
        self.job.cancel(check=False)  # one that has just ended is no reason to leave the others running

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(POLL_S)
        return code


# As submitit calls them, for whichever cluster; what else there is, it wants to hear of which.
OF_ALL_CLUSTERS = ("timeout_min", "cpus_per_task", "mem_gb")

OPTIONS: dict[str, tuple[type[CellLauncher], dict[str, Any]]] = {
    "cells": (CellLauncher, {}),
    "submitit_local": (SubmititLauncher, {"cluster": "local", "timeout_min": 60}),
    "submitit_slurm": (
        SubmititLauncher,
        {
            "cluster": "slurm",
            "timeout_min": 60,
            "signal_delay_s": 120,  # before that: for the checkpoint
            "max_num_timeout": 100,  # how often a job is taken up again
            "gpus_per_node": None,  # null: as many as the cell has ranks
            "cpus_per_task": None,
            "mem_gb": None,
            "partition": None,
            "account": None,
            "qos": None,
            "constraint": None,
            "setup": None,
            "additional_parameters": None,
        },
    ),
}
