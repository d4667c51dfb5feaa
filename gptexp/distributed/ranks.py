"""The rank of this process, and the exit of a rank's process.

No torch. No other file reads RANK, WORLD_SIZE and the other variables of launchers.
"""

import atexit
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from gptexp.process.cores import count_cores
from gptexp.process.errors import EXIT_FAILED, ConfigError, UserError

AT_ONCE = "GPTEXP_AT_ONCE"  # environment: number of runs that share this machine; a sweep sets it
_LAUNCHERS = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|SLURM_(PROCID|STEP_NUM_TASKS)|PMI_(SIZE|RANK))$|"
    r"TORCHELASTIC_|OMPI_COMM_WORLD_|MV2_COMM_WORLD_"
)
_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # of Open MPI, MPICH, MVAPICH
CAUSE_FIRST_S = 2.0  # seconds that a failed rank waits, so that the launcher sees its failure before its peers'


@dataclass(frozen=True)
class Rank:
    """One process of a run: `rank` in [0, world_size), `local_rank` in [0, local_world_size) on its node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    by_srun: bool = False  # started as a task of a SLURM job step, which may have only a share of the cores and GPUs

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs, saves and prints."""
        return self.rank == 0


def launcher_rank() -> Rank | None:
    """The rank that torchrun, gptexp's launcher or srun assigned to this process; None without a launcher.

    Raises `ConfigError` if the variables of a launcher are incomplete, or those of mpirun.
    """
    try:
        return _launcher_rank()
    except UserError:
        raise
    except (KeyError, ValueError) as error:
        rule = f"the variables of a launcher (torchrun, srun) are incomplete or damaged: {error}"
        fix = "start all ranks with it, or unset RANK, WORLD_SIZE, SLURM_STEP_NUM_TASKS and SLURM_PROCID"
        raise ConfigError(f"{rule}; {fix}", "launcher-incomplete") from None


def _launcher_rank() -> Rank | None:
    task = _srun_task(os.environ)
    env = {**task, **os.environ}
    if "RANK" not in env or "WORLD_SIZE" not in env:
        for name in _OF_MPI:
            if int(env.get(name) or 1) > 1:
                rule = "mpirun starts processes that know nothing of each other"
                fix = "start ranks with torchrun or srun, or one process with world.size"
                raise ConfigError(f"{name}={env[name]}: {rule}; {fix}", "launcher-mpi")
        return None
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    # If a task has started torchrun, the ranks differ from the tasks, or TORCHELASTIC_RUN_ID is set.
    by_srun = (env["RANK"], env["WORLD_SIZE"]) == (task.get("RANK"), task.get("WORLD_SIZE"))
    return Rank(
        rank,
        world_size,
        local_rank=int(env.get("LOCAL_RANK", 0)),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", world_size)),
        by_srun=by_srun and "TORCHELASTIC_RUN_ID" not in env,
    )


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a process that is no rank: with a launcher's variables, libraries in it would join the ranks."""
    return {name: value for name, value in environ.items() if not _LAUNCHERS.match(name)}


def rank_variables(rank: Rank, address: str, port: int) -> dict[str, str]:
    """The variables that make a process `rank`, as torchrun sets them; rank 0 hosts the store at this address."""
    return {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(rank.local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def launcher_world_size() -> int | None:
    """Number of ranks that the launcher has started; None without a launcher."""
    rank = launcher_rank()
    return rank.world_size if rank is not None else None


def requeues() -> int:
    """How often SLURM has started the job of this process again."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _srun_task(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of a task of a SLURM job step under torchrun's names; empty for any other process.

    A job step must have several tasks, because an sbatch script also has SLURM_NTASKS and SLURM_PROCID=0.
    """
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) < 2 or "SLURM_PROCID" not in env:
        return {}
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": re.split(r"[(,]", env["SLURM_STEP_TASKS_PER_NODE"])[0],
    }


def rendezvous(rank: Rank) -> str:
    """The address of the ranks' store, as torch's `init_method`.

    torchrun sets MASTER_ADDR and MASTER_PORT, which torch reads. Under srun the first node of the job step hosts the
    store, at a port derived from the job's number, below the ports of outgoing connections on Linux (from 32,768).
    """
    env = os.environ
    if not rank.by_srun:
        return "env://"
    address = env.get("MASTER_ADDR") or _first_host(env["SLURM_STEP_NODELIST"])
    port = env.get("MASTER_PORT") or 20000 + int(env["SLURM_JOB_ID"]) % 12000
    return f"tcp://{address}:{port}?rank={rank.rank}&world_size={rank.world_size}"


def _first_host(node_list: str) -> str:
    """The first node of a list in SLURM's notation: `node01` for `node[01-04,07],other`. Rank 0 runs there."""
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", node_list)
    assert found is not None, node_list
    return "".join(part or "" for part in found.groups())


def cores_per_rank(rank: Rank, at_once: int) -> int:
    """Number of CPU cores for each rank of this node, which `at_once` runs share."""
    if rank.by_srun and "SLURM_CPUS_PER_TASK" in os.environ:
        return int(os.environ["SLURM_CPUS_PER_TASK"])
    return max(1, count_cores() // (rank.local_world_size * at_once))


def runs_at_once() -> int:
    """Number of runs that share this machine, including this one."""
    return int(os.environ.get(AT_ONCE) or 1)


@contextmanager
def ending_rank(report: bool = True) -> Iterator[None]:
    """Run the body as the last part of a rank's process, then end the process without finalising the interpreter.

    A gloo thread that frees a tensor during finalisation would abort the process and hide its exit code.
    A rank that fails waits `CAUSE_FIRST_S` before it ends. Its peers fail within milliseconds of its end, and the
    launcher must see the cause first.

    With `report=False` no traceback is printed: the launcher reads the error from a file and prints it once.
    """
    code = 0
    try:
        yield
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        if report:
            traceback.print_exc()
        time.sleep(CAUSE_FIRST_S)
        code = EXIT_FAILED
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
