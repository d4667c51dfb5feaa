"""How the cells of a sweep run: side by side on this machine, on the ranks of torchrun or srun, or as SLURM jobs."""

import math
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from gptexp.config.schema import AUTO, Config
from gptexp.distributed.ranks import launcher_rank
from gptexp.process.errors import EXIT_DIVERGED, EXIT_FAILED, ConfigError, InUseError, UserError, first_line
from gptexp.process.signals import at_parents_death
from gptexp.process.terminal import warn
from gptexp.process.words import counted
from gptexp.run.pool import (
    OUTPUT,
    Places,
    Process,
    Source,
    require_devices,
    resume_command,
    run_all,
    start_here,
    visible_gpus,
)
from gptexp.storage import run_dir
from gptexp.sweep.cells import PLUGINS, Cell

JOB = "job.json"  # in a cell's directory: the id of its job
JOBS = ".submitit"  # in the sweep's directory: submitit's own files
POLL_S = 1.0  # s: between two checks of a job or of its run
# submitit's parameters for every cluster. Others that a user may set need the cluster's name as a prefix.
COMMON_PARAMETERS = ("timeout_min", "cpus_per_task", "mem_gb")


class CellSource(Source[Cell], Protocol):
    """The interface of a sweeper that launchers use."""

    def claim(self, cell: Cell, runs: bool = False) -> None:
        """Reserve a cell, which may run as a job, until `ended`. Raises `InUseError` if another process runs it."""

    def begins(self, cell: Cell, where: str = "") -> int:
        """Announce a cell and prepare its directory; under torchrun or srun also train it. Returns the exit code."""

    def announce(self, cell: Cell, how: str) -> None:
        """Print the number and name of a cell, and how it runs."""


class CellLauncher(Launcher):
    """Runs each cell in new processes, several at once if there are GPUs; under torchrun or srun, on its ranks.

    In new processes, a cell that fails does not stop the others.
    """

    __module__ = PLUGINS
    among_ranks = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        raise NotImplementedError("gptexp's sweepers call `run`, which takes the cells one by one")

    def check(self, configs: Sequence[Config]) -> None:
        """Decide how many cells run at once. Raises `ConfigError` if they cannot run here."""
        parallel = configs[0].sweep.parallel
        self.among_ranks = launcher_rank() is not None
        if self.among_ranks:
            if parallel not in (AUTO, 1):
                raise ConfigError(f"sweep.parallel={parallel}: torchrun and srun run one cell at a time; leave it out")
            return
        require_devices(configs)
        self.room = self.places(configs)

    def places(self, configs: Sequence[Config]) -> Places:
        """Return how many cells run at once, and on which GPUs."""
        return side_by_side(configs)

    def run(self, cells: CellSource) -> int | None:
        """Run all cells. Returns the number of the signal that stopped the sweep, or None.

        Under torchrun or srun the ranks train one cell after another; a rank that fails or is stopped ends the sweep.
        """
        self.cells = cells
        if not self.among_ranks:
            return run_all(cells, self, self.room)
        while True:
            cell = cells.waiting.pop(0) if cells.waiting else cells.more()
            if cell is None:
                if not cells.elsewhere:
                    return None
                time.sleep(POLL_S)
                continue
            try:
                cells.claim(cell)
                code = cells.begins(cell)
            except InUseError:
                cells.set_aside(cell)
                continue
            if code not in (0, EXIT_DIVERGED):
                raise SystemExit(code)
            cells.ended(cell, code)
            cells.share_decisions()

    def begin(self, cell: Cell, gpus: Sequence[str]) -> None:
        """Prepare the directory of a cell; for `run_all`."""
        self.cells.claim(cell)
        self.cells.begins(cell, f" on GPU {', '.join(gpus)}" if gpus else "")

    def start(self, cell: Cell, gpus: Sequence[str], at_once: int) -> Process:
        """Start the processes of a cell; for `run_all`."""
        return start_here(cell, gpus, at_once)


def side_by_side(configs: Sequence[Config]) -> Places:
    """Return how many cells run at once on this machine, and its GPUs if it has any.

    Raises `ConfigError` if `sweep.parallel` needs more GPUs than there are.
    """
    parallel, sizes = configs[0].sweep.parallel, [config.world.size or 1 for config in configs]
    devices = {config.train.device for config in configs}
    gpus = visible_gpus() if devices <= {"auto", "cuda"} else []
    if not gpus:
        return Places(parallel if isinstance(parallel, int) else 1)
    fit = max(1, len(gpus) // max(sizes))
    if isinstance(parallel, int) and parallel > fit:
        raise ConfigError(
            f"sweep.parallel={parallel}: needs {counted(parallel * max(sizes), 'GPU')}, up to {max(sizes)} per cell; "
            f"visible GPUs: {len(gpus)}; use at most {fit}, or auto"
        )
    most = max(1, len(gpus) // min(sizes))  # an upper bound: a cell also waits until enough GPUs are free
    return Places(parallel if isinstance(parallel, int) else most, gpus)


class SubmititLauncher(CellLauncher):
    """Runs each cell as a SLURM job, with submitit; with `cluster=local` as a local process, for trying it out.

    A job runs `gptexp resume` on the cell's directory, on one node. Shortly before its time limit the run saves a
    checkpoint and SLURM requeues the job. `sweep.parallel` limits how many jobs are submitted at once; by default
    all are, once the first cell has resolved every `auto` value. If this process ends before its jobs, the
    same command finds them again.
    """

    __module__ = PLUGINS

    def __init__(
        self, cluster: str, gpus_per_node: int | None = None, max_num_timeout: int | None = None, **parameters: Any
    ) -> None:
        self.cluster, self.gpus_per_node = cluster, gpus_per_node
        self.alive: dict[Path, Any] = {}  # cell's directory -> its unfinished job of an earlier command
        self.timeouts = {} if max_num_timeout is None else {f"{cluster}_max_num_timeout": max_num_timeout}
        given: Any = OmegaConf.to_container(OmegaConf.create(parameters))
        self.parameters = {
            key if key in COMMON_PARAMETERS else f"{cluster}_{key}": value
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
        self.room = self.places(configs)
        folder = Path(self.config.hydra.sweep.dir).absolute() / JOBS / "%j"
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=self.cluster, **self.timeouts)
            self.executor.update_parameters(nodes=1, tasks_per_node=1, **self.parameters)
        except (
            AssertionError,
            RuntimeError,
            NameError,
            TypeError,
            ValueError,
        ) as error:  # each mistake has its own type
            raise ConfigError(f"hydra.launcher: {first_line(error)}") from None

    def places(self, configs: Sequence[Config]) -> Places:
        parallel = configs[0].sweep.parallel
        if self.cluster != "local":
            return Places(parallel if isinstance(parallel, int) else max(1, len(configs)))
        if parallel not in (AUTO, 1):
            raise ConfigError(f"sweep.parallel={parallel}: submitit_local runs one cell at a time; leave it out")
        return Places(1)

    def begin(self, cell: Cell, gpus: Sequence[str]) -> None:
        """Prepare the directory of a cell, unless a job of an earlier command still uses it."""
        job = self._unfinished_job(cell)
        self.cells.claim(cell, runs=job is not None)
        if job is not None:
            self.alive[cell.directory] = job
            self.cells.announce(cell, f"runs as job {job.job_id} of an earlier command")
        else:
            self.cells.begins(cell, " as a job")

    def start(self, cell: Cell, gpus: Sequence[str], at_once: int) -> Process:
        """Submit a cell, or watch its job of an earlier command."""
        if cell.directory in self.alive:
            return Submitted(self.alive[cell.directory])
        uses_gpus = cell.config.train.device in ("auto", "cuda")
        gpus_per_node = self.gpus_per_node if self.gpus_per_node is not None else cell.world_size if uses_gpus else 0
        self.executor.update_parameters(name=cell.name, gpus_per_node=gpus_per_node)
        try:
            job = self.executor.submit(CellJob(cell.directory))
        except Exception as error:  # submitit's own, or one from the submit command
            raise UserError(f"not submitted: {first_line(error)} (sweep.parallel=N limits the jobs)") from None
        run_dir.write_json(cell.directory / JOB, {"id": job.job_id})
        return Submitted(job)

    def _unfinished_job(self, cell: Cell) -> Any:
        """Return the job that an earlier command submitted for `cell` if it is pending or running, else None."""
        from submitit import SlurmJob

        number = run_dir.read_json(cell.directory / JOB).get("id")
        if number is None or self.cluster == "local":  # a local job ends with the process that submitted it
            return None
        job: Any = SlurmJob(self.executor.folder, str(number))
        return None if job.done(force_check=True) else job


class CellJob:
    """The body of a job: start or resume the run of a cell. submitit pickles it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        with (self.directory / OUTPUT).open("ab") as output:
            self.run = subprocess.Popen(
                resume_command(self.directory), stdout=output, stderr=subprocess.STDOUT, preexec_fn=_in_run_process
            )
        # Not `wait`: it holds a lock, so `poll` in `checkpoint`, a signal handler, would never see the exit.
        while (code := self.run.poll()) is None:
            time.sleep(POLL_S)
        return code

    def checkpoint(self) -> Any:
        """Stop the run with a checkpoint, and resubmit it. submitit calls this shortly before the time limit."""
        from submitit.helpers import DelayedSubmission

        assert self.run is not None
        self.run.send_signal(signal.SIGUSR1)
        while self.run.poll() is None:
            time.sleep(POLL_S)
        return DelayedSubmission(CellJob(self.directory))


def _in_run_process() -> None:
    """Ignore SIGUSR2, SLURM's warning of the time limit: the parent handles it. Die with the parent."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    at_parents_death(signal.SIGTERM)


class Submitted:
    """A submitit job with the interface of a process, for `run_all`."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.polled = -math.inf
        self.cancelled: int | None = None  # the signal for which the job was cancelled

    def poll(self) -> int | None:
        if time.monotonic() - self.polled < POLL_S:
            return None
        self.polled = time.monotonic()
        if not self.job.done():
            return None
        if self.cancelled is not None:
            return 128 + self.cancelled
        try:
            code: int = self.job.result()
        except Exception as error:  # the job's own, or submitit's if the job never began or was killed
            warn(f"job {self.job.job_id}: {first_line(error)}")
            return EXIT_FAILED
        return code

    def send_signal(self, number: int) -> None:
        """Cancel the job: SLURM then sends SIGTERM to its processes, and SIGKILL after KillWait seconds."""
        self.cancelled = number
        self.job.cancel(check=False)  # an error for a job that has just ended must not keep the others running

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(POLL_S)
        return code
