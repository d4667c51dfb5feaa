"""Signals and failures through the launchers: gptexp's own, and SLURM's with commands that do what theirs do."""

import json
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

import pytest
import torch.distributed as dist
from conftest import ROOT, events, processes_of, signal_rank, summary, wait_for
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gptexp import launch, train
from gptexp.config import Config
from gptexp.distributed import Rank
from gptexp.errors import EXIT_DIVERGED
from gptexp.launch import START_ANEW
from gptexp.train import Leader

Start = Callable[..., subprocess.Popen[str]]
Sabotage = Callable[[str, str], dict[str, str]]


def begun(directory: Path, steps: int = 4) -> Callable[[], bool]:
    return lambda: (directory / "metrics.jsonl").exists() and len(events(directory, "step")) >= steps


@pytest.mark.parametrize(
    ("name", "rank"),
    [("SIGUSR1", None), ("SIGTERM", 1), pytest.param("SIGINT", None, marks=pytest.mark.slow)],
)
def test_a_signal_to_the_parent_or_to_one_rank_stops_two_ranks(
    start: Start, long_run: list[str], tmp_path: Path, name: str, rank: int | None
) -> None:
    directory, number = tmp_path / "out", getattr(signal, name)
    process = start("train", *long_run, "world.size=2", start_new_session=True)
    wait_for(begun(directory), process)
    asked = time.monotonic()
    if rank is None:
        process.send_signal(number)
    else:
        signal_rank(directory, rank, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert time.monotonic() - asked < 10
    assert summary(directory)["status"] == "interrupted"
    assert (directory / "checkpoints" / f"step-{summary(directory)['steps']:08d}" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("codes", "expected", "restarts"),
    [
        ([0], 0, 0),
        ([EXIT_DIVERGED], EXIT_DIVERGED, 0),  # would diverge again
        ([143], 143, 0),  # was asked to stop
        ([1, 0], 0, 1),
        ([1, 1, 1], 1, 2),
        ([START_ANEW, START_ANEW, START_ANEW, 0], 0, 0),
        ([START_ANEW, 1, START_ANEW, 1, 0], 0, 2),
    ],
)
def test_only_a_failure_is_a_reason_to_start_again(
    codes: list[int],
    expected: int,
    restarts: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    left, deadlines = iter(codes), set()

    def once(directory: Path, world_size: int, deadline: float) -> int:
        deadlines.add(deadline)
        return next(left)

    monkeypatch.setattr(launch, "_launch", once)
    assert launch.launch(tmp_path, 2, max_restarts=2, max_minutes=5.0) == expected
    assert list(left) == []
    assert len(deadlines) == 1
    assert capsys.readouterr().err.count("gptexp: restart ") == restarts


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ({0: (1, "LostRankError: rank 1: gone", 5), 1: (-9, "", 7)}, 1),  # the agent looked late
        ({0: (1, "LostRankError: rank 1: gone", 5), 1: (1, "ValueError: its own", 4)}, 1),
        ({0: (1, "ValueError: its own", 5), 1: (-9, "", 7)}, 0),  # the agent killed rank 1 for not leaving
        ({0: (1, "LostRankError: rank 2: gone", 5), 1: (-15, "", 7), 2: (-11, "", 8)}, 2),
    ],
)
def test_the_rank_that_failed_first_is_found(
    failures: dict[int, tuple[int, str, int]], cause: int, tmp_path: Path
) -> None:
    found = {}
    for rank, (exit_code, message, moment) in failures.items():
        file = tmp_path / str(rank)
        if message:
            file.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": str(moment)}}}))
        found[rank] = ProcessFailure(rank, 100 + rank, exit_code, str(file))
        found[rank].timestamp = moment
    assert launch._cause(ChildFailedError("gptexp.run", found)) == (cause, found[cause])


def test_rank_0_stays_until_the_others_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under srun the store is in its process, and would be gone with it."""
    store = dist.HashStore()
    monkeypatch.setattr("gptexp.distributed.connect", lambda: store)
    leader = Leader(Rank(0, 3))
    threads = [threading.Timer(seconds, store.add, ("left", 1)) for seconds in (0.2, 0.6)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    leader.finish()
    assert 0.5 < time.monotonic() - began < 5
    monkeypatch.setattr(train, "LEAVE_S", 0.3)
    Leader(Rank(0, 4)).finish()  # of ranks that have died it hears nothing
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("code", "stops"), [(138, False), (0, True), (1, True)])
def test_a_rank_that_was_stopped_leaves_with_its_code_whatever_srun_sends_then(
    code: int, stops: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gptexp.run.run", lambda *_: code)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        assert train.run_job_as(Rank(0, 2), dist.HashStore(), 0, Config(), tmp_path) == code
        assert [signal.getsignal(number) != signal.SIG_IGN for number in before] == [stops] * 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(start: Start, sabotage: Sabotage, long_run: list[str], tmp_path: Path) -> None:
    """While rank 0 saves for a minute."""
    directory = tmp_path / "out"
    env = sabotage("gptexp.checkpoint", "import time\nplain = m.save\ndef save(*a):\n    time.sleep(60)\nm.save = save")
    process = start("train", *long_run, "world.size=2", env=env, start_new_session=True)
    wait_for(begun(directory), process)
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    again = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - again < 5
    deadline = time.monotonic() + 75  # the ranks hear of their parent's end, and one of them is busy
    while processes_of(directory) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(directory) == []


@pytest.mark.slow
def test_of_a_user_error_on_one_rank_the_others_end_is_no_cause(
    start: Start, sabotage: Sabotage, long_run: list[str], tmp_path: Path
) -> None:
    """Rank 1 finds its data cut short; rank 0, deaf to SIGTERM as in a collective of NCCL's, is killed by the agent."""
    code = """
    import os, signal, time
    plain, calls = m._Loop.step, 0
    def step(self):
        global calls
        calls += 1
        if calls == 5 and os.environ.get("RANK") == "1":
            from gptexp.errors import DataError
            raise DataError("tokens-00000.bin: was cut short while in use")
        if calls == 5 and os.environ.get("RANK") == "0":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            time.sleep(300)
        return plain(self)
    m._Loop.step = step
    """
    process = start("train", *long_run, "world.size=2", env=sabotage("gptexp.trainer", code))
    _, err = process.communicate(timeout=150)
    assert process.returncode == 3, err
    assert "gptexp: tokens-00000.bin: was cut short while in use" in err
    assert "SIGKILL" not in err


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
def test_a_slurm_job_is_requeued_at_its_time_limit_and_goes_on(tiny: list[str], tmp_path: Path) -> None:
    """launch/slurm.sbatch itself, with an srun and a scontrol that do what theirs do."""
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
    [srun] = [
        int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline")
        if f"{tools}/srun".encode() in _read(path) and path.parent.name != str(first.pid)
    ]  # fmt: skip
    asked = time.monotonic()
    os.kill(srun, signal.SIGUSR1)
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
