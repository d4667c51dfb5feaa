"""gptexp's own launcher: signals to the parent or to a rank, ranks that fail or are killed, restarts."""

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, events, processes_of, signal_rank, summary, wait_for
from real_runs import begun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gptexp.process.errors import EXIT_DIVERGED, DataError, InUseError, PartError, UnavailableError, UserError
from gptexp.run import launch
from gptexp.run.launch import START_ANEW

Start = Callable[..., subprocess.Popen[str]]
Sabotage = Callable[[str, str], dict[str, str]]


# --- in this process -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "expected", "restarts"),
    [
        ([0], 0, 0),
        ([EXIT_DIVERGED], EXIT_DIVERGED, 0),  # it would diverge again
        ([143], 143, 0),  # it was stopped by a signal
        ([1, 0], 0, 1),
        ([1, 1, 1], 1, 2),
        ([START_ANEW, START_ANEW, START_ANEW, 0], 0, 0),
        ([START_ANEW, 1, START_ANEW, 1, 0], 0, 2),
    ],
)
def test_a_run_is_restarted_only_after_a_failure(
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
        (
            {0: (1, "LostRankError: rank 1: its process has ended", 5), 1: (-9, "", 7)},
            1,
        ),  # the agent noticed rank 1 late
        ({0: (1, "LostRankError: rank 1: its process has ended", 5), 1: (1, "ValueError: its own", 4)}, 1),
        ({0: (1, "ValueError: its own", 5), 1: (-9, "", 7)}, 0),  # the agent killed rank 1, which did not exit
        ({0: (1, "LostRankError: rank 2: its process has ended", 5), 1: (-15, "", 7), 2: (-11, "", 8)}, 2),
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


@pytest.mark.parametrize("kind", [UserError, DataError, UnavailableError, InUseError, PartError])
def test_an_error_for_the_user_has_no_traceback_and_the_exit_code_of_its_kind(
    kind: type[UserError], capsys: pytest.CaptureFixture[str]
) -> None:
    error = kind("a.txt: gone")
    message = {"message": f"{kind.__name__}: {error}", "extraInfo": {"py_callstack": "Traceback"}}
    assert launch._report(1, error.exit_code, message) == error.exit_code
    assert capsys.readouterr().err.splitlines() == [f"gptexp: {'config error: ' * (kind is InUseError)}a.txt: gone"]


# --- signals to real ranks -------------------------------------------------------------------------------------------

SPLIT = ["world.sharding=full"]


@pytest.mark.parametrize(
    ("name", "rank", "own"),
    [
        pytest.param("SIGTERM", None, SPLIT, marks=pytest.mark.e2e),
        pytest.param("SIGUSR1", None, [], marks=pytest.mark.slow),
        pytest.param("SIGTERM", 1, [], marks=pytest.mark.e2e),
        pytest.param("SIGUSR1", 0, SPLIT, marks=pytest.mark.slow),
        pytest.param("SIGTERM", None, [], marks=pytest.mark.slow),
        pytest.param("SIGINT", None, [], marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_parent_or_to_one_rank_stops_two_ranks(
    start: Start, long_run: list[str], tmp_path: Path, name: str, rank: int | None, own: list[str]
) -> None:
    directory, number = tmp_path / "out", getattr(signal, name)
    process = start("train", *long_run, *own, "world.size=2", start_new_session=True)
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
    saved = directory / "checkpoints" / f"step-{summary(directory)['steps']:08d}"
    assert (saved / "manifest.json").exists()
    assert (saved / "model-00002-of-00002.safetensors").exists() == (own == SPLIT)
    assert processes_of(directory) == []


@pytest.mark.e2e
@pytest.mark.parametrize("nohup", [True, False])
def test_the_end_of_a_terminal_stops_two_ranks_unless_nohup_says_otherwise(
    start: Start, long_run: list[str], tmp_path: Path, nohup: bool
) -> None:
    """torch's agent alone would replace the ignored signal, and end the ranks without a checkpoint."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)  # children inherit it
    try:
        process = start("train", *long_run, "world.size=2", start_new_session=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(begun(tmp_path / "out"), process)
    process.send_signal(signal.SIGHUP)
    if nohup:
        time.sleep(2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (143 if nohup else 129), err
    assert "Traceback" not in err
    assert summary(tmp_path / "out")["status"] == "interrupted"
    assert (tmp_path / f"out/checkpoints/step-{summary(tmp_path / 'out')['steps']:08d}/manifest.json").exists()


@pytest.mark.e2e
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_terminal_is_closed_saves(long_run: list[str], tmp_path: Path, ranks: int) -> None:
    """Each write to it fails then, also that of the progress bar."""
    master, terminal = pty.openpty()

    def before() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # this process may run under nohup

    process = subprocess.Popen(
        [sys.executable, "-m", "gptexp", "train", *long_run, f"world.size={ranks}", "log.progress=auto"],
        cwd=tmp_path, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, preexec_fn=before,
    )  # fmt: skip
    os.close(terminal)
    closing = threading.Event()
    reader = threading.Thread(target=drained, args=(master, closing), daemon=True)
    reader.start()
    wait_for(begun(tmp_path / "out"), process)
    closing.set()
    reader.join(5)
    os.close(master)
    assert process.wait(60) == 129
    assert summary(tmp_path / "out")["status"] == "interrupted"
    assert (tmp_path / f"out/checkpoints/step-{summary(tmp_path / 'out')['steps']:08d}/manifest.json").exists()


def drained(master: int, closing: threading.Event) -> None:
    """Read what a terminal shows, until it is `closing`, so that its writer does not wait."""
    while not closing.is_set():
        if select.select([master], [], [], 0.1)[0]:
            os.read(master, 4096)


@pytest.mark.e2e
def test_ctrl_c_during_tokenisation_leaves_no_process_or_cache(start: Start, tiny: list[str], tmp_path: Path) -> None:
    """One rank tokenises the standard library and the other waits for it. Neither has anything to save."""
    cache = tmp_path / "cache"
    overrides = [*tiny, "data=stdlib", "data.path=null", f"data.cache_dir={cache}", "hydra.run.dir=out"]
    process = start("train", *overrides, "world.size=2", start_new_session=True)
    wait_for(lambda: any(cache.glob("*.tmp")), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert processes_of(tmp_path / "out") == []
    assert not list(cache.glob("*/manifest.json"))


@pytest.mark.slow
def test_a_second_signal_exits_at_once(start: Start, sabotage: Sabotage, long_run: list[str], tmp_path: Path) -> None:
    """The second signal arrives while rank 0 saves for a minute."""
    directory = tmp_path / "out"
    env = sabotage(
        "gptexp.storage.checkpoint", "import time\ndef begin(*a):\n    time.sleep(60)\nm.begin_to_save = begin"
    )
    process = start("train", *long_run, "world.size=2", env=env, start_new_session=True)
    wait_for(begun(directory), process)
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    again = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - again < 5
    deadline = time.monotonic() + 75  # the ranks get SIGTERM when their parent ends, and one of them is saving
    while processes_of(directory) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(directory) == []


@pytest.mark.e2e
def test_a_killed_parent_leaves_no_rank_running(start: Start, long_run: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "out"
    process = start("train", *long_run, "world.size=2")
    wait_for(begun(directory), process)
    assert len(processes_of(directory)) == 2
    process.kill()
    deadline = time.monotonic() + 60
    while (left := processes_of(directory)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for number in left:
        os.kill(number, signal.SIGKILL)
    assert left == []
    assert summary(directory)["status"] == "interrupted"  # the ranks saved before they exited


# --- ranks that fail or are killed -----------------------------------------------------------------------------------


@pytest.mark.e2e
def test_a_killed_rank_ends_the_run_and_is_named(start: Start, long_run: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "out"
    process = start("train", *long_run, "world.size=2")
    wait_for(begun(directory), process)
    signal_rank(directory, 1, signal.SIGKILL)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "rank 1 failed (exit code -9): killed by SIGKILL" in err
    assert processes_of(directory) == []


@pytest.mark.e2e
def test_an_unexpected_error_in_one_rank_is_printed_once(start: Start, sabotage: Sabotage, tiny: list[str]) -> None:
    """Rank 1 raises in the middle of training; rank 0 only sees that the connection is gone."""
    code = """
    import os
    if os.environ.get("RANK") == "1":
        plain, calls = m.fingerprint, 0
        def fingerprint(rows):
            global calls
            calls += 1
            if calls == 5:
                raise RuntimeError("a defect")
            return plain(rows)
        m.fingerprint = fingerprint
    """
    process = start("train", *tiny, "world.size=2", env=sabotage("gptexp.data.loader", code))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.count("Traceback") == 1, err
    assert "gptexp: rank 1 failed (exit code 1): RuntimeError: a defect" in err


@pytest.mark.slow
def test_the_error_of_one_rank_is_reported_instead_of_the_end_of_the_others(
    start: Start, sabotage: Sabotage, long_run: list[str]
) -> None:
    """Rank 1 finds truncated data. Rank 0 ignores SIGTERM, as in a collective of NCCL, and is killed."""
    code = """
    import os, signal, time
    plain, calls = m._Loop.queue_step, 0
    def queue_step(self):
        global calls
        calls += 1
        if calls == 5 and os.environ.get("RANK") == "1":
            from gptexp.process.errors import DataError
            raise DataError("tokens-00000.bin: truncated during the run")
        if calls == 5 and os.environ.get("RANK") == "0":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            time.sleep(300)
        return plain(self)
    m._Loop.queue_step = queue_step
    """
    process = start("train", *long_run, "world.size=2", env=sabotage("gptexp.training.loop", code))
    _, err = process.communicate(timeout=150)
    assert process.returncode == 3, err
    assert "gptexp: tokens-00000.bin: truncated during the run" in err
    assert "SIGKILL" not in err


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_and_is_named(start: Start, long_run: list[str], tmp_path: Path) -> None:
    """The rank does not react to SIGTERM either. torch's agent kills it after half a minute."""
    directory = tmp_path / "out"
    process = start("train", *long_run, "world.size=2", "world.timeout_s=4")
    wait_for(begun(directory), process)
    signal_rank(directory, 1, signal.SIGSTOP)
    stopped = time.monotonic()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1, err
    assert "gptexp: rank 1: no answer for world.timeout_s=4 s" in err
    assert "Traceback" not in err
    assert time.monotonic() - stopped < 4 + 5 + 30 + 15
    assert processes_of(directory) == []


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.e2e)]
)
def test_a_run_with_a_killed_rank_is_restarted_up_to_max_restarts(
    start: Start, tiny: list[str], tmp_path: Path, world_size: int
) -> None:
    directory = tmp_path / "out"
    options = ["train.max_steps=120", "train.save_every=10", "train.eval_every=0", "hydra.run.dir=out"]
    process = start("train", *tiny, *options, f"world.size={world_size}", "world.max_restarts=1")
    wait_for((directory / "checkpoints" / "step-00000010").exists, process)
    signal_rank(directory, world_size - 1, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "gptexp: restart 1 of 1" in err
    assert summary(directory)["status"] == "completed"
    assert [e["step"] for e in events(directory, "step")] == list(range(120))


@pytest.mark.slow
def test_ranks_that_torchrun_restarts_connect_again(tiny: list[str], tmp_path: Path) -> None:
    """torch 2.13 gives each attempt the store of the previous one, with its old addresses (pytorch#135712)."""
    directory = tmp_path / "out"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
        "-m", "gptexp.train",
    ]  # fmt: skip
    options = ["train.max_steps=120", "train.save_every=10", "train.eval_every=0", "hydra.run.dir=out"]
    process = subprocess.Popen(
        [*command, *tiny, *options], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        wait_for((directory / "checkpoints" / "step-00000010").exists, process)
        [rank] = [
            int(p.parent.name) for p in Path("/proc").glob("[0-9]*/environ")
            if _has(p, b"RANK=1") and _has(p, b"TORCHELASTIC_RUN_ID") and _parent(p) == process.pid
        ]  # fmt: skip
        os.kill(rank, signal.SIGKILL)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert summary(directory)["status"] == "completed"


def _has(environ: Path, variable: bytes) -> bool:
    try:
        return any(entry.startswith(variable) for entry in environ.read_bytes().split(b"\0"))
    except OSError:
        return False


def _parent(environ: Path) -> int:
    return int(environ.with_name("stat").read_text().rpartition(")")[2].split()[1])
