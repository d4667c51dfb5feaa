"""Runs under a launcher, here torchrun: rank 0 composes the config and sends it to the others through the store."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from conftest import ROOT, e2e_then_slow, events, runs, summary, wait_for
from real_runs import begun

from gptexp.command import leader
from gptexp.command.leader import Leader
from gptexp.config.schema import Config
from gptexp.distributed.ranks import Rank
from gptexp.process.signals import StopRequest
from gptexp.run.job import Job

# --- in this process -------------------------------------------------------------------------------------------------


def test_rank_0_waits_until_the_other_ranks_have_exited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under srun the store is in the process of rank 0, and ends with it."""
    store = dist.HashStore()
    monkeypatch.setattr("gptexp.command.leader.connect", lambda rank: store)
    of_three = Leader(StopRequest(), Rank(0, 3))
    threads = [threading.Timer(seconds, store.add, ("left", 1)) for seconds in (0.2, 0.6)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    of_three.finish()
    assert 0.5 < time.monotonic() - began < 5


def test_rank_0_stops_waiting_for_ranks_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr("gptexp.command.leader.connect", lambda rank: store)
    monkeypatch.setattr(leader, "LEAVE_S", 0.3)
    began = time.monotonic()
    Leader(StopRequest(), Rank(0, 4)).finish()
    assert 0.2 < time.monotonic() - began < 5


@pytest.mark.parametrize(("code", "stops"), [(138, False), (0, True), (1, True)])
def test_a_stopped_rank_ignores_further_signals(
    code: int, stops: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """srun terminates tasks that have not exited yet. The exit code must remain that of the stop."""
    monkeypatch.setattr("gptexp.command.leader.run", lambda job: code)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        done = leader._run_published(StopRequest(), Rank(0, 2), dist.HashStore(), 0, Config(), tmp_path)
        assert done == code
        assert [signal.getsignal(number) != signal.SIG_IGN for number in before] == [stops] * 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.e2e
def test_a_rank_that_waits_for_others_says_so_and_heeds_signals(start: Any, tiny: list[str]) -> None:
    """An interactive shell of SLURM has the variables of a task, of which there is only one process."""
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    here = {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "127.0.0.1"}
    process = start("train", *tiny, "world.size=2", "hydra.run.dir=out", env={**os.environ, **step, **here})
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "waits for 1 other rank" in line
    assert "unset SLURM_STEP_NUM_TASKS" in line
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 143


def test_between_two_jobs_a_signal_ends_a_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its loop, which would read a request to stop, has ended. A request that came too late for it still counts."""
    stop = StopRequest()

    def trained(job: Job) -> int:
        job.stop.training = True
        return 0

    monkeypatch.setattr("gptexp.command.leader.run", trained)
    assert leader._run_published(stop, Rank(0, 2), dist.HashStore(), 0, Config(), tmp_path) == 0
    assert not stop.training
    stop.training = True
    stop.on_signal(signal.SIGINT, None)
    assert leader._run_published(stop, Rank(0, 2), dist.HashStore(), 0, Config(), tmp_path) == 130


# --- torchrun --------------------------------------------------------------------------------------------------------


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `torchrun -m gptexp.train …`, or another verb, with two ranks in `tmp_path`."""

    def run(*argv: str, verb: str = "train") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [*command, f"gptexp.{verb}", *argv], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180
        )

    return run


def two_agents(directory: Path, overrides: list[str]) -> list[subprocess.Popen[str]]:
    """Start torchrun twice in `directory`, as on two nodes, with one rank each."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test", "-m", "gptexp.train", *overrides,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]


@pytest.mark.e2e
def test_two_torchrun_agents_train_one_run_in_one_directory(tiny: list[str], tmp_path: Path) -> None:
    agents = two_agents(tmp_path, tiny)
    outputs = [agent.communicate(timeout=180) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    [directory] = runs(tmp_path)
    assert summary(directory)["world_size"] == 2
    assert summary(directory)["status"] == "completed"
    assert [e["step"] for e in events(directory, "step")] == list(range(4))
    assert len(list((tmp_path / "outputs").glob("*/*"))) == 1


@pytest.mark.parametrize("of_rank", e2e_then_slow([0, 1]))
def test_a_run_whose_torchrun_agent_is_killed_is_interrupted_and_resumes(
    gptexp: Callable[..., subprocess.CompletedProcess[str]], long_run: list[str], tmp_path: Path, of_rank: int
) -> None:
    """No rank is left without an agent, whose end nobody would see."""
    agents = two_agents(tmp_path, long_run)
    try:
        wait_for(begun(tmp_path / "out"), agents[0])
        ranks = {int(p.environ()["RANK"]): p for agent in agents for p in psutil.Process(agent.pid).children()}
        killed = next(agent for agent in agents if agent.pid == ranks[of_rank].ppid())
        killed.kill()
        [other] = [agent for agent in agents if agent is not killed]
        _, err = other.communicate(timeout=120)
        assert other.returncode == 1, err
        psutil.wait_procs(ranks.values(), timeout=60)
        assert not any(process.is_running() for process in ranks.values())
        assert "in finish" not in err + killed.communicate()[1]  # no traceback of rank 0
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    assert summary(tmp_path / "out")["status"] == "interrupted"
    done = summary(tmp_path / "out")["steps"]
    assert [event["step"] for event in events(tmp_path / "out", "step")] == list(range(done))
    resumed = gptexp("train", *long_run, "world.size=2", "train.max_minutes=0.0001")
    assert resumed.returncode == 0, resumed.stderr
    assert summary(tmp_path / "out")["steps"] > done


@pytest.mark.e2e
def test_torchrun_trains_every_cell_of_a_multirun_with_all_ranks(
    torchrun: Callable[..., subprocess.CompletedProcess[str]], tiny: list[str], tmp_path: Path
) -> None:
    swept = torchrun("-m", *tiny, "train.seed=1,2")
    assert swept.returncode == 0, swept.stderr
    assert [summary(d)["world_size"] for d in runs(tmp_path)] == [2, 2]


@pytest.mark.e2e
def test_torchrun_resumes_a_run_with_all_ranks(
    torchrun: Callable[..., subprocess.CompletedProcess[str]], tiny: list[str], tmp_path: Path
) -> None:
    stopped = torchrun(*tiny, "train.max_steps=100", "train.max_minutes=0.0001", "hydra.run.dir=out")
    assert stopped.returncode == 0, stopped.stderr
    done = summary(tmp_path / "out")["steps"]
    again = torchrun("out", verb="resume")
    assert again.returncode == 0, again.stderr
    assert summary(tmp_path / "out")["steps"] > done
    assert summary(tmp_path / "out")["world_size"] == 2


@pytest.mark.e2e
def test_under_torchrun_the_config_is_printed_once(
    torchrun: Callable[..., subprocess.CompletedProcess[str]], tiny: list[str], tmp_path: Path
) -> None:
    asked = torchrun("--cfg", "job", *tiny)
    assert (asked.returncode, asked.stdout.count("n_layer: 1")) == (0, 1)
    assert runs(tmp_path) == []


@pytest.mark.e2e
def test_a_world_size_that_differs_from_torchruns_is_refused(
    torchrun: Callable[..., subprocess.CompletedProcess[str]], tiny: list[str], tmp_path: Path
) -> None:
    wrong = torchrun(*tiny, "world.size=4")
    assert wrong.returncode != 0
    assert "world.size=4: the launcher started 2 ranks" in wrong.stderr
    assert runs(tmp_path) == []
