"""What a rank makes of its launcher's environment, and how its process ends."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from gptexp.distributed import Rank, _first_host, agree, cores_per_rank, launcher_rank, pick_device
from gptexp.errors import ConfigError

STEP = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_JOB_ID": "30017", "SLURM_CPUS_PER_TASK": "5",
}  # fmt: skip
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What `launcher_rank` itself sets is taken back afterwards."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_a_task_of_a_job_step_is_a_rank(environment: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        environment.setenv(name, value)
    for _ in range(2):  # the variables it sets itself do not make it another one
        rank = launcher_rank()
        assert rank == Rank(3, 4, 1, 2, by_srun=True)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("node07", "30017")
    assert rank is not None
    assert cores_per_rank(rank) == 5


def test_torchrun_shares_out_the_cores_also_inside_a_job(environment: pytest.MonkeyPatch) -> None:
    """An sbatch script, or one task a node, has SLURM's variables too; torchrun's ranks inherit them."""
    for name, value in {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}.items():
        environment.setenv(name, value)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        environment.setenv(name, value)
    environment.setenv("TORCHELASTIC_RUN_ID", "one")
    rank = launcher_rank()
    assert rank == Rank(0, 2, 0, 1)
    assert cores_per_rank(Rank(0, 2, 0, 1)) == CORES
    assert cores_per_rank(Rank(0, 2 * CORES, 0, 2 * CORES)) == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("localhost", "localhost"), ("a,b", "a"), ("node[01-04,07],other", "node01"), ("n[3,5]-ib", "n3-ib")],
)
def test_rank_0_runs_on_the_first_node(nodes: str, first: str) -> None:
    assert _first_host(nodes) == first


@pytest.mark.parametrize(("by_srun", "device"), [(True, 0), (False, None)])
def test_only_srun_shows_each_rank_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, by_srun: bool, device: int | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    second = Rank(1, 2, 1, 2, by_srun)
    if device is None:
        with pytest.raises(ConfigError, match="local rank 1 has no GPU, this node has 1"):
            pick_device("cuda", second)
    else:
        assert pick_device("cuda", second) == torch.device("cuda", device)


def test_what_rank_0_refuses_is_refused() -> None:
    def refuse() -> None:
        raise ConfigError("no")

    assert agree(lambda: 3, Rank(), None) == 3
    with pytest.raises(ConfigError, match="no"):
        agree(refuse, Rank(), None)


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise OSError('no such disk')", 1, "OSError: no such disk"),
    ],
)
def test_a_rank_leaves_with_its_own_exit_code_and_everything_said(end: str, code: int, said: str) -> None:
    """Its exit handlers run; the interpreter, which other threads may still use, is not taken apart."""
    script = textwrap.dedent(f"""
        import atexit, sys
        from gptexp.distributed import leaving
        class Late:
            def __del__(self): print("taken apart")
        late = Late()
        atexit.register(print, "handlers ran")
        with leaving():
            print("unflushed", end=" ")
            {end}
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "unflushed handlers ran\n")
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)
