"""Cells of a sweep as SLURM jobs, submitted and watched with submitit."""

import math
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gptexp.config.schema import AUTO, Config
from gptexp.distributed.ranks import launcher_rank
from gptexp.model.gpus import largest_of
from gptexp.process.errors import EXIT_FAILED, ConfigError, UserError, first_line
from gptexp.process.signals import at_parents_death
from gptexp.process.terminal import warn
from gptexp.process.words import counted
from gptexp.run.pool import OUTPUT, Places, Process, resume_command
from gptexp.storage import run_dir
from gptexp.sweep.cells import PLUGINS, Cell
from gptexp.sweep.launchers import CellLauncher

JOB = "job.json"  # in a cell's directory: the id and the number of tasks of its job
JOBS = ".submitit"  # in the sweep's directory: submitit's own files
POLL_S = 1.0  # s: between two checks of a job or of its run
ASK_S = 60  # s: longest time between two questions to SLURM for its queue
# submitit's parameters for every cluster. Others that a user may set need the cluster's name as a prefix.
COMMON_PARAMETERS = ("timeout_min", "cpus_per_task", "mem_gb", "stderr_to_stdout")


def spread(config: Config, nodes: int | None, tasks_per_node: int | None, gpus_per_node: int | None) -> tuple[int, int]:
    """The number of nodes of a cell's job, and of tasks on each; None: not given.

    On several nodes, or if a node has several tasks, each task is a rank. A single task starts all ranks of the cell.
    Raises `ConfigError` if the ranks of the cell cannot be spread like that.
    """
    ranks = config.world.size or 1
    most = gpus_per_node if gpus_per_node and _uses_gpus(config) else ranks  # on a node
    if nodes is None:
        given = tasks_per_node if tasks_per_node is not None and tasks_per_node > 1 else most
        nodes = math.ceil(ranks / max(1, given))
    tasks = tasks_per_node if tasks_per_node is not None else 1 if nodes == 1 else ranks // max(1, nodes)
    if (nodes, tasks) == (1, 1) or nodes * tasks == ranks:
        if ranks <= nodes * most:
            return nodes, tasks
        problem = f"{counted(ranks // nodes, 'rank')} on each node, which has {counted(most, 'GPU')}"
    elif tasks_per_node is None:
        problem = f"{counted(nodes, 'node')} cannot have the same number of ranks each"
    else:
        problem = f"hydra.launcher.nodes × tasks_per_node = {nodes} × {tasks} = {nodes * tasks} ranks"
    legal = [f"{ranks // n} × {n}" for n in range(min(most, ranks), 0, -1) if ranks % n == 0]
    raise ConfigError(
        f"world.size={ranks}: {problem}; use another world.size, or nodes × tasks_per_node = {', '.join(legal)}"
    )


def _uses_gpus(config: Config) -> bool:
    return config.train.device in ("auto", "cuda")


class SubmititLauncher(CellLauncher):
    """Runs each cell as a SLURM job, with submitit; with `cluster=local` as a local process, for trying it out.

    A job runs `gptexp resume` on the cell's directory: on one node once, on several as every rank. Shortly before its
    time limit the run saves a checkpoint and SLURM requeues the job. `sweep.parallel` limits how many jobs are
    submitted at once; by default all are, once the first cell has resolved every `auto` value. If this process ends
    before its jobs, the same command finds them again.
    """

    __module__ = PLUGINS

    def __init__(
        self,
        cluster: str,
        submitit_folder: str | None = None,
        name: str | None = None,
        nodes: int | None = None,
        tasks_per_node: int | None = None,
        gpus_per_node: int | None = None,
        max_num_timeout: int | None = None,
        array_parallelism: int | None = None,
        **parameters: Any,
    ) -> None:
        self.cluster, self.folder, self.name = cluster, submitit_folder, name
        self.nodes, self.tasks_per_node, self.gpus_per_node = nodes, tasks_per_node, gpus_per_node
        self.array_parallelism = array_parallelism
        self.alive: dict[Path, Any] = {}  # cell's directory -> its unfinished job of an earlier command
        self.timeouts = {} if max_num_timeout is None else {f"{cluster}_max_num_timeout": max_num_timeout}
        given: Any = OmegaConf.to_container(OmegaConf.create(parameters))
        self.given = {key: value for key, value in given.items() if value is not None}
        self.parameters = {
            key if key in COMMON_PARAMETERS else f"{cluster}_{key}": value for key, value in self.given.items()
        }

    def check(self, configs: Sequence[Config]) -> None:
        if launcher_rank() is not None:
            raise ConfigError("hydra/launcher=submitit_…: submits jobs itself; start it outside of torchrun and srun")
        try:
            import submitit
        except ImportError:
            raise ConfigError("hydra/launcher=submitit_…: not installed; pip install 'gptexp[slurm]'") from None
        if self.array_parallelism is not None:
            raise ConfigError(
                f"hydra.launcher.array_parallelism={self.array_parallelism}: each cell is a job of its own; use "
                f"sweep.parallel={self.array_parallelism}"
            )
        if self.folder is not None and "%j" not in self.folder:
            raise ConfigError(f"hydra.launcher.submitit_folder={self.folder}: needs %j, the number of the job")
        self.room = self.places(configs)
        folder = Path(self.folder or f"{self.config.hydra.sweep.dir}/{JOBS}/%j").absolute()
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=self.cluster, **self.timeouts)
            shape = {"nodes": self.nodes, "tasks_per_node": self.tasks_per_node, "gpus_per_node": self.gpus_per_node}
            self.executor.update_parameters(name=self.name, **shape, **self.parameters)
            if self.cluster == "slurm":
                self._complete_for_slurm()
        except (
            AssertionError,
            RuntimeError,
            NameError,
            TypeError,
            ValueError,
        ) as error:  # each mistake has its own type
            raise ConfigError(f"hydra.launcher: {first_line(error)}") from None
        for config in configs:
            self._check_shape(*self._spread(config))
        if self.cluster == "slurm" and any(_uses_gpus(config) for config in configs):
            from gptexp.machine.gpu_memory import refuse_too_large  # it imports torch

            if (gpu := largest_of(self._gpu_kinds())) is not None:
                refuse_too_large(configs, gpu)

    def _gpu_kinds(self) -> set[str]:
        """The kinds of GPU that jobs may get, as SLURM calls them: that of `gres`, else those of the partition."""
        partition = self.given.get("partition")
        if (offered := self.given.get("gres")) is None:
            command = ["sinfo", "--noheader", "--format=%P %G", *([f"--partition={partition}"] if partition else [])]
            try:
                done = subprocess.run(command, capture_output=True, text=True)
            except OSError:
                return set()
            # A star marks the partition of jobs that name none.
            offered = "\n".join(line for line in done.stdout.splitlines() if partition or "* " in line)
        return set(re.findall(r"\bgpu:([^:,( ]+)", str(offered)))

    def _spread(self, config: Config) -> tuple[int, int]:
        return spread(config, self.nodes, self.tasks_per_node, self.gpus_per_node)

    def _check_shape(self, nodes: int, tasks: int) -> None:
        """Raise `ConfigError` for options that do not fit jobs whose tasks are ranks."""
        if nodes * tasks == 1:
            return
        if self.cluster == "local":
            raise ConfigError(
                f"hydra.launcher.tasks_per_node={tasks}: with submitit_local a cell is one task; leave it out"
            )
        if not self.given.get("use_srun", True):
            raise ConfigError("hydra.launcher.use_srun=false: srun starts the ranks of cells on several nodes")
        if (gpus := self.given.get("gpus_per_task", 1)) != 1:
            raise ConfigError(
                f"hydra.launcher.gpus_per_task={gpus}: each of the {nodes * tasks} tasks is a rank, which uses one "
                "GPU; use 1"
            )

    def _complete_for_slurm(self) -> None:
        """Complete submitit's parameters, and have it ask squeue for the state of a job.

        submitit asks sacct, which needs an accounting database. Without one, it would not see that a job has ended
        without a result.
        """
        from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

        class QueueWatcher(SlurmInfoWatcher):
            def _make_command(self) -> list[str]:
                return ["squeue", "--me", "--noheader", "--format=%A"]

            def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
                waits_or_runs = (string.decode() if isinstance(string, bytes) else string).split()
                return {job: {"State": "RUNNING" if job in waits_or_runs else "COMPLETED"} for job in self._registered}

        SlurmJob.watcher = QueueWatcher(ASK_S)
        # Some clusters requeue no job that does not ask for it.
        more: dict[str, Any] = {
            "slurm_additional_parameters": {"requeue": True, **self.given.get("additional_parameters", {})}
        }
        if (
            cpus := self.given.get("cpus_per_task")
        ) is not None:  # current versions of srun do not read it from the job
            more["slurm_srun_args"] = [f"--cpus-per-task={cpus}", *self.given.get("srun_args", [])]
        self.executor.update_parameters(**more)

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
        nodes, tasks = self._spread(cell.config)
        self.executor.update_parameters(
            name=self.name or cell.name, nodes=nodes, tasks_per_node=tasks, gpus_per_node=self._gpus(cell, nodes)
        )
        try:
            job = self.executor.submit(CellJob(cell.directory))
        except Exception as error:  # submitit's own, or one from the submit command
            raise UserError(f"not submitted: {first_line(error)} (sweep.parallel=N limits the jobs)") from None
        run_dir.write_json(cell.directory / JOB, {"id": job.job_id, "tasks": nodes * tasks})
        return Submitted(job)

    def _gpus(self, cell: Cell, nodes: int) -> int | None:
        """GPUs of a job on each node, by default one for each rank; None if other options ask for them."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        if not _uses_gpus(cell.config):
            return 0
        return None if {"gpus_per_task", "gres"} & self.given.keys() else cell.world_size // nodes

    def _unfinished_job(self, cell: Cell) -> Any:
        """Return the job that an earlier command submitted for `cell` if it is pending or running, else None."""
        from submitit import SlurmJob

        saved = run_dir.read_json(cell.directory / JOB)
        number = saved.get("id")
        if number is None or self.cluster == "local":  # a local job ends with the process that submitted it
            return None
        job: Any = SlurmJob(self.executor.folder, str(number), tasks=range(saved.get("tasks", 1)))
        return None if job.done(force_check=True) else job


class CellJob:
    """A task of a job: start or resume the run of a cell, as one of its ranks if there are several tasks.

    submitit pickles it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        from submitit import JobEnvironment

        task = JobEnvironment()
        task.paths.result_pickle.unlink(missing_ok=True)  # of an earlier attempt, if SLURM has requeued the job
        # The output of other tasks than the first is in submitit's own files, one for each.
        with (self.directory / OUTPUT).open("ab") if task.global_rank == 0 else nullcontext() as output:
            self.run = subprocess.Popen(
                resume_command(self.directory),
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                preexec_fn=_in_run_process,
            )
        # Not `wait`: it holds a lock, so `poll` in `checkpoint`, a signal handler, would never see the exit.
        while (code := self.run.poll()) is None:
            time.sleep(POLL_S)
        return code

    def checkpoint(self) -> Any:
        """Stop the run with a checkpoint, and resubmit it. submitit calls this shortly before the time limit.

        Only the first task calls it. Rank 0 stops the other ranks, and their tasks end with them.
        """
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
            code: int = self.job.results()[0]
        except Exception as error:  # the job's own, or submitit's if the job never began or was killed
            warn(f"job {self.job.job_id}: {first_line(error)}")
            return EXIT_FAILED
        return code

    def send_signal(self, number: int) -> None:
        """Cancel the job: SLURM then sends SIGTERM to its processes, and SIGKILL after KillWait seconds."""
        self.cancelled = number
        self.job.cancel(check=False)  # an error for a job that has just ended must not keep the others running
        self.job.watcher.register_job(self.job.job_id)  # ask often again: a job that had not begun leaves no result

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(POLL_S)
        return code
