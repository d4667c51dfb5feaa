"""Cells of a sweep as SLURM jobs, submitted and watched with submitit."""

import math
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gptexp.config.schema import Config
from gptexp.process.errors import EXIT_DIVERGED, EXIT_FAILED, ConfigError, UserError, first_line
from gptexp.process.fields import AUTO
from gptexp.process.terminal import warn
from gptexp.storage import run_dir
from gptexp.sweep.cell_job import CellJob
from gptexp.sweep.cells import PLUGINS, Cell
from gptexp.sweep.job_options import check_options, gpu_kinds, gpus_of_node, shape, uses_gpus
from gptexp.sweep.launchers import CellLauncher, Places, refuse_too_large

JOB = "job.json"  # in a cell's directory: the id of its job, and the folder of submitit's files
JOBS = ".submitit"  # in the sweep's directory: submitit's own files
POLL_S = 1.0  # s: between two checks of a job
ASK_S = 60  # s: longest time between two questions to SLURM for its queue
RESULT_S = 5.0  # s: how long a shared file system may hide the result of a job that has left the queue
CODES = {"completed": 0, "diverged": EXIT_DIVERGED}  # exit codes of runs by status
# submitit's parameters for every cluster. Others that a user may set need the cluster's name as a prefix.
COMMON_PARAMETERS = ("timeout_min", "mem_gb", "stderr_to_stdout")
# Options that submitit does not get as they are: some are no parameters, others depend on the ranks of a cell.
OTHERS = ("submitit_folder", "max_num_timeout", "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task")


class SubmititLauncher(CellLauncher):
    """Runs each cell as a SLURM job, with submitit; with `cluster=local` as a local process, for trying it out.

    A job runs `gptexp resume` on the cell's directory: on one node once, on several as every rank. Shortly before its
    time limit the run saves a checkpoint and SLURM requeues the job. `sweep.parallel` limits how many jobs are
    submitted at once; by default all are, once the first cell has resolved every `auto` value. If this process ends
    before its jobs, the same command finds them again.
    """

    __module__ = PLUGINS
    where = " as a job"
    shares_machine = False

    def __init__(self, cluster: str, name: str | None = None, **options: Any) -> None:
        self.cluster, self.name = cluster, name
        given: Any = OmegaConf.to_container(OmegaConf.create(options))
        self.options = {key: value for key, value in given.items() if value is not None}

    def check(self, configs: Sequence[Config]) -> None:
        self.refuse_ranks("submitit_…")
        try:
            import submitit
        except ImportError:
            raise ConfigError("hydra/launcher=submitit_…: not installed; pip install 'gptexp[slurm]'") from None
        self.places(configs)
        folder = self.options.get("submitit_folder", f"{self.config.hydra.sweep.dir}/{JOBS}/%j")
        timeouts = self.options.get("max_num_timeout")
        own = {} if timeouts is None else {f"{self.cluster}_max_num_timeout": timeouts}
        parameters = {
            key if key in COMMON_PARAMETERS else f"{self.cluster}_{key}": value
            for key, value in self.options.items()
            if key not in OTHERS
        }
        try:
            self.executor = submitit.AutoExecutor(folder=Path(folder).absolute(), cluster=self.cluster, **own)
            self.executor.update_parameters(name=self.name, **parameters)
            if self.cluster == "slurm":
                self._complete_for_slurm()
        except (AssertionError, RuntimeError, NameError, TypeError, ValueError) as error:  # for different mistakes
            raise ConfigError(f"hydra.launcher: {first_line(error)}") from None
        on_gpus = [config for config in configs if uses_gpus(config)]
        if self.cluster == "slurm" and on_gpus:
            refuse_too_large(on_gpus, gpu_kinds(self.options))

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
        more = self.options.get("additional_parameters", {})
        if not {"no-requeue", "no_requeue"} & more.keys():  # some clusters requeue no job that does not ask for it
            self.executor.update_parameters(slurm_additional_parameters={"requeue": True, **more})

    def places(self, configs: Sequence[Config]) -> Places:
        """Places for all cells, or `sweep.parallel` places. Raises `ConfigError` for options that do not fit the cells.

        `gptexp plan` calls this too, on machines that may have neither submitit nor SLURM.
        """
        check_options(self.cluster, self.options)
        for config in configs:
            shape(self.cluster, self.options, config)
        parallel = configs[0].sweep.parallel
        if self.cluster != "local":
            return Places(parallel if isinstance(parallel, int) else max(1, len(configs)))
        if parallel not in (AUTO, 1):
            raise ConfigError(f"sweep.parallel={parallel}: submitit_local runs one cell at a time; leave it out")
        return Places(1)

    def earlier_job(self, cell: Cell) -> "Submitted | None":
        """Return the job that an earlier command submitted for `cell` if it is pending or running, else None."""
        from submitit import SlurmJob

        saved = run_dir.read_json(cell.directory / JOB)
        number = saved.get("id")
        if number is None or self.cluster == "local":  # a local job ends with the process that submitted it
            return None
        job: Any = SlurmJob(saved.get("folder", self.executor.folder), str(number))
        return None if job.watcher.is_done(job.job_id, mode="force") else Submitted(job, cell.directory)

    def start(self, cell: Cell, gpus: Sequence[str], at_once: int) -> "Submitted":
        """Submit a cell."""
        nodes, tasks = shape(self.cluster, self.options, cell.config)
        parameters: dict[str, Any] = {"gpus_per_node": gpus_of_node(self.options, cell.config, nodes)}
        if (cpus := self.options.get("cpus_per_task")) is not None:  # per rank: one task may start several ranks
            parameters["cpus_per_task"] = cpus * cell.world_size // (nodes * tasks)
            if self.cluster == "slurm":  # current versions of srun do not read it from the job
                own = self.options.get("srun_args", [])
                parameters["slurm_srun_args"] = [f"--cpus-per-task={parameters['cpus_per_task']}", *own]
        self.executor.update_parameters(name=self.name or cell.name, nodes=nodes, tasks_per_node=tasks, **parameters)
        try:
            job = self.executor.submit(CellJob(cell.directory))
        except Exception as error:  # submitit's own, or one from the submit command
            raise UserError(f"not submitted: {_with_fix(first_line(error), parameters['gpus_per_node'])}") from None
        run_dir.write_json(cell.directory / JOB, {"id": job.job_id, "folder": str(self.executor.folder)})
        return Submitted(job, cell.directory)


def _with_fix(error: str, gpus: int | None) -> str:
    """What sbatch says, with the option that may help."""
    if "limit" in error.lower():
        return f"{error} (sweep.parallel=N limits the jobs)"
    if gpus != 0 and ("gres" in error.lower() or "node configuration" in error.lower()):
        return f"{error} (train.device=cpu asks for no GPU)"
    return error


class Submitted:
    """A submitit job with the interface of a process."""

    def __init__(self, job: Any, directory: Path) -> None:
        self.job = job.task(0)  # the results of the other tasks do not matter
        self.directory = directory  # the run's
        self.polled = -math.inf
        self.cancelled: int | None = None  # the signal for which the job was cancelled
        self.failed = False  # whether its result is a failure, and it may still be in SLURM's queue
        self.left = math.inf  # s of the monotonic clock: when it was first seen to have left the queue without a result

    def __str__(self) -> str:
        return f"job {self.job.job_id}"

    def poll(self) -> int | None:
        if time.monotonic() - self.polled < POLL_S:
            return None
        self.polled = time.monotonic()
        if not self.job.done():
            return None
        outcome, result = self._result()
        if (outcome, result) == ("success", 0):
            return 0
        if self.job.state in ("RUNNING", "UNKNOWN"):  # SLURM may have requeued it, for example to preempt it
            if not self.failed:
                self.failed = True
                self._ask_often()
            return None
        with suppress(ConfigError):  # a damaged file
            if (code := CODES.get(run_dir.status(self.directory) or "")) is not None:
                return code
        if self.cancelled is not None:
            return 128 + self.cancelled
        if outcome == "success":
            return int(result)
        self.left = min(self.left, self.polled)
        if outcome is None and self.polled - self.left < RESULT_S:
            return None
        warn(f"{self}: {self._why(result)}")
        return EXIT_FAILED

    def _result(self) -> tuple[str | None, Any]:
        """The result of the first task: "success" and an exit code, or "error" and a traceback; None without one."""
        from submitit.core.utils import pickle_load

        try:
            result: tuple[str, Any] = pickle_load(self.job.paths.result_pickle)
            return result
        except (OSError, EOFError):
            return None, None

    def _why(self, trace: str | None) -> str:
        """Why the job has ended without an exit code of its run."""
        if trace is not None:
            line = trace.strip().splitlines()[-1]
            if "timed-out too many times" in line:
                return "requeued hydra.launcher.max_num_timeout times after its time limit; the same command continues"
            return line.partition(": ")[2] or line  # without the type of the error
        why = f"ended without a result ({self._state()})"
        logs = [path for path in (self.job.paths.stderr, self.job.paths.stdout) if path.exists()]
        if not logs:
            return f"{why}, and has not written {self.job.paths.stdout}: do its nodes see that folder?"
        return f"{why}; see {logs[0]}"

    def _state(self) -> str:
        """The state of a job that has left the queue, such as TIMEOUT."""
        try:
            shown = subprocess.run(["scontrol", "show", "job", self.job.job_id], capture_output=True, text=True).stdout
        except OSError:  # a process of this machine
            return str(self.job.state)
        state = re.search(r"JobState=(\w+)", shown)
        return f"{state[1] if state else 'unknown'} by scontrol show job"

    def _ask_often(self) -> None:
        """Let submitit's watcher ask SLURM within seconds, and not once in `ASK_S`."""
        self.job.watcher.register_job(self.job.job_id)

    def send_signal(self, number: int) -> None:
        """Cancel the job: SLURM then sends SIGTERM to its processes, and SIGKILL after KillWait seconds."""
        self.cancelled = number
        self.job.cancel(check=False)  # an error for a job that has just ended must not keep the others running
        self._ask_often()  # a job that had not begun leaves no result
