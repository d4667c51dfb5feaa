"""Runs under torchrun or srun: rank 0 composes the config and sends it to the other ranks through the store."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from conftest import ROOT, events, runs, summary, wait_for
from real_runs import begun

from gptexp.command import leader
from gptexp.command.leader import Leader
from gptexp.config.schema import Config, DataConfig
from gptexp.data.prepare import find_corpus, prepare, tokens_dir
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
    """Run `torchrun -m gptexp.train …` with two ranks in `tmp_path`."""

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [*command, "gptexp.train", *argv], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180
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


@pytest.mark.e2e
@pytest.mark.parametrize("of_rank", [0, 1])
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


# --- SLURM -----------------------------------------------------------------------------------------------------------


def srun(directory: Path, overrides: list[str], *envs: dict[str, str]) -> list[tuple[int, str]]:
    """Simulate a job step with one task for each of `envs`; (exit code, stderr) of each task."""
    step = {
        "SLURM_STEP_NUM_TASKS": str(len(envs)),
        "SLURM_STEP_TASKS_PER_NODE": str(len(envs)),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "PYTHONPATH": str(ROOT),
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "gptexp.train", *overrides], cwd=directory, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **step, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), **env},
        )
        for i, env in enumerate(envs)
    ]  # fmt: skip
    errors = [task.communicate(timeout=120)[1] for task in tasks]
    return [(task.returncode, error) for task, error in zip(tasks, errors, strict=True)]


@pytest.mark.e2e
def test_ranks_whose_data_differ_from_rank_0_are_refused(tiny: list[str], tmp_path: Path, corpus: Path) -> None:
    """Two nodes have separate token caches, and that of one holds the tokens of another text."""
    text = tmp_path / "text.txt"
    text.write_text(corpus.read_text())
    apart = {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    nodes = [{**apart, "GPTEXP_CACHE": str(tmp_path / f"cache{i}")} for i in range(2)]
    data = DataConfig(name="text", path=[str(text)], cache_dir=nodes[1]["GPTEXP_CACHE"])
    stale, _ = prepare(data)
    text.write_text(corpus.read_text().replace("cat", "cow"))
    stale.rename(tokens_dir(find_corpus(data), data))
    done = srun(tmp_path, [*tiny, "data.path=text.txt"], *nodes)
    assert [code for code, _ in done] == [3, 3], done
    assert all("rank 1: its data differs from that of rank 0" in error for _, error in done)


@pytest.mark.slow
def test_each_task_of_a_slurm_job_step_is_a_rank(tiny: list[str], tmp_path: Path) -> None:
    done = srun(tmp_path, tiny, {}, {})
    assert [code for code, _ in done] == [0, 0], done
    [directory] = runs(tmp_path)
    assert summary(directory)["world_size"] == 2


@pytest.mark.slow
def test_a_process_outside_of_a_job_step_trains_on_one_rank(tiny: list[str], tmp_path: Path) -> None:
    script = {**os.environ, "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gptexp.train", *tiny, "hydra.run.dir=alone"]
    done = subprocess.run(command, cwd=tmp_path, env=script, timeout=120, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "alone")["world_size"] == 1


SRUN = """
    import os, signal, subprocess, sys, time
    command = [text for text in sys.argv[1:] if not text.startswith("--")]
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"}
    tasks = [
        subprocess.Popen(command, env={**os.environ, **step, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)})
        for i in range(2)
    ]
    signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
    told = False
    while any(task.poll() is None for task in tasks):
        if not told and any(task.poll() for task in tasks):  # --kill-on-bad-exit
            told = [task.terminate() for task in tasks if task.poll() is None] or True
        time.sleep(0.005)
    sys.exit(max(code if code >= 0 else 128 - code for code in (task.returncode for task in tasks)))
"""
SCONTROL = """
    import pathlib, sys
    if sys.argv[1] == "requeue":
        pathlib.Path("requeued").write_text(sys.argv[2])
    else:
        print("localhost")
"""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_a_slurm_job_is_requeued_at_its_time_limit_and_continues(tiny: list[str], tmp_path: Path) -> None:
    """Runs launch/slurm.sbatch with stand-ins for srun and scontrol."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
        (tools / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = str(free.getsockname()[1] - 20000 if free.getsockname()[1] < 40000 else 1234)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    job_env = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "localhost", "SLURM_CPUS_PER_TASK": "1"}
    env = {**os.environ, **job_env, "PATH": path, "PYTHONPATH": str(ROOT)}
    options = ["train.max_steps=300", "train.save_every=0", "train.eval_every=0"]
    command = ["bash", str(ROOT / "launch" / "slurm.sbatch"), *tiny, *options]
    directory = tmp_path / "outputs" / f"slurm-{job}"

    first = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    wait_for(begun(directory), first)
    [step] = [
        int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline")
        if f"{tools}/srun".encode() in _read(path) and path.parent.name != str(first.pid)
    ]  # fmt: skip
    asked = time.monotonic()
    os.kill(step, signal.SIGUSR1)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 138, err
    assert time.monotonic() - asked < 10
    assert (tmp_path / "requeued").read_text() == job
    assert summary(directory)["status"] == "interrupted"
    stopped_at = summary(directory)["steps"]

    (tmp_path / "requeued").unlink()
    again = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    assert not (tmp_path / "requeued").exists()
    assert 4 <= stopped_at < 300
    assert [e["step"] for e in events(directory, "step")] == list(range(300))
