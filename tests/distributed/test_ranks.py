"""The rank of this process by the variables of a launcher, and the exit of a rank's process."""

import os
import subprocess
import sys
import textwrap

import pytest

from gptexp.distributed.ranks import (
    Rank,
    cores_per_rank,
    launcher_rank,
    launcher_world_size,
    rendezvous,
    without_launcher,
)
from gptexp.process.errors import ConfigError

STEP = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_JOB_ID": "30017", "SLURM_CPUS_PER_TASK": "5",
}  # fmt: skip
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "one"}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_environment(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Rank(3, 8, 1, 2)),
        # An sbatch script is not a task of a job step.
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, None),
        (
            {
                "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7",
                "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "n1",
            },
            Rank(9, 16, 1, 8, by_srun=True),
        ),
    ],
)  # fmt: skip
def test_the_rank_is_read_from_the_launchers_variables(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: Rank | None
) -> None:
    set_environment(monkeypatch, env)
    assert launcher_rank() == expected
    assert launcher_world_size() == (expected.world_size if expected else None)


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "launcher-incomplete"),
        ({"SLURM_STEP_NUM_TASKS": "two", "SLURM_PROCID": "0"}, "launcher-incomplete"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "launcher-incomplete"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "launcher-mpi"),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, "launcher-mpi"),
    ],
)
def test_variables_that_make_no_rank_are_one_line(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], code: str
) -> None:
    """Of srun's, some may be left in an interactive shell; mpirun's would start as many equal runs."""
    set_environment(monkeypatch, env)
    with pytest.raises(ConfigError) as refused:
        launcher_rank()
    assert [problem.code for problem in refused.value.problems] == [code]


def test_a_process_that_is_no_rank_has_no_variable_of_mpi() -> None:
    left = without_launcher({"PMI_SIZE": "4", "PMI_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_SIZE": "2"})
    assert left == {}


def test_mpi_of_one_process_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"})
    assert launcher_rank() is None


def test_reading_the_rank_changes_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, STEP)
    before = dict(os.environ)
    assert launcher_rank() == launcher_rank() == Rank(3, 4, 1, 2, by_srun=True)
    assert dict(os.environ) == before


def test_a_process_that_is_no_rank_has_no_variable_of_torchrun() -> None:
    others = {"PATH": "/bin", "RANKS": "2", "MASTER_KEY": "x", "CUDA_VISIBLE_DEVICES": "1"}
    of_torchrun = {"GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    assert without_launcher({**others, **TORCHRUN, **dict.fromkeys(of_torchrun, "1")}) == others


def test_a_slurm_task_uses_the_cores_that_slurm_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, STEP)
    rank = launcher_rank()
    assert rank is not None
    assert cores_per_rank(rank, 1) == 5


def test_ranks_of_torchrun_in_a_slurm_job_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of torchrun inherit SLURM's variables from the sbatch script or task that starts it."""
    set_environment(monkeypatch, {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", **TORCHRUN})
    assert launcher_rank() == Rank(0, 2, 0, 1)
    assert cores_per_rank(Rank(0, 2, 0, 1), 1) == CORES
    assert cores_per_rank(Rank(0, 2 * CORES, 0, 2 * CORES), 1) == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("localhost", "localhost"), ("a,b", "a"), ("node[01-04,07],other", "node01"), ("n[3,5]-ib", "n3-ib")],
)
def test_under_srun_the_rendezvous_is_on_the_first_node(
    monkeypatch: pytest.MonkeyPatch, nodes: str, first: str
) -> None:
    set_environment(monkeypatch, {**STEP, "SLURM_STEP_NODELIST": nodes})
    place = rendezvous(Rank(3, 4, 1, 2, by_srun=True))
    assert place.startswith(f"tcp://{first}:")
    assert place.endswith("?rank=3&world_size=4")


def test_under_srun_the_port_of_a_job_is_unprivileged_and_not_ephemeral(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = set()
    for job in range(1, 200_000, 997):
        set_environment(monkeypatch, {**STEP, "SLURM_JOB_ID": f"{job}"})
        place = rendezvous(Rank(3, 4, 1, 2, by_srun=True))
        ports.add(int(place.partition("?")[0].rpartition(":")[2]))
    assert min(ports) >= 1024
    assert max(ports) < 32_768  # from there on Linux gives ports to outgoing connections
    assert len(ports) > 100


def test_under_srun_the_users_address_and_port_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, {**STEP, "MASTER_ADDR": "here", "MASTER_PORT": "4321"})
    assert rendezvous(Rank(3, 4, 1, 2, by_srun=True)).startswith("tcp://here:4321?")


def test_under_torchrun_the_rendezvous_comes_from_its_variables() -> None:
    assert rendezvous(Rank(0, 2, 0, 1)) == "env://"  # torch reads MASTER_ADDR and MASTER_PORT


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise OSError('no such disk')", 1, "OSError: no such disk"),
    ],
)
def test_a_rank_exits_with_its_own_code_and_flushes_its_output(end: str, code: int, said: str) -> None:
    """Its exit handlers run. The interpreter is not finalised, because other threads may still use it."""
    script = textwrap.dedent(f"""
        import atexit, sys
        from gptexp.distributed.ranks import ending_rank
        class Late:
            def __del__(self): print("finalised")
        late = Late()
        atexit.register(print, "handlers ran")
        with ending_rank():
            print("unflushed", end=" ")
            {end}
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "unflushed handlers ran\n")
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)
