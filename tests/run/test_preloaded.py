"""A run that is forked from a preloaded process is as one with a new interpreter."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gptexp.process.signals import start_a_run
from gptexp.process.versions import PACKAGE
from gptexp.run.preloaded import Forked, Preloaded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux only")

# Prints what a program can know of its process, then waits for a signal, or ends as it is told.
PROGRAM = """
import json, os, signal, sys, threading, time
from gptexp.process.signals import StopRequest

stop = StopRequest()
stop.training = True
stop.install(ignore_sigint=False)
argv = open("/proc/self/cmdline", "rb").read().decode().rstrip("\\0").split("\\0")
known = {
    "name": __name__, "argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "command": argv[1:], "cwd": os.getcwd(),
    "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(), "environ": {**os.environ}, "stdin": sys.stdin.read(),
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGALRM)],
    "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])], "threads": threading.active_count(),
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:3], "buffered": sys.stdout.line_buffering,
    "preloaded": "wave" in sys.modules,
}
known["environ"].pop("LC_CTYPE", None)
print(json.dumps(known), flush=True)
print("to stderr", file=sys.stderr)
match sys.argv[1]:
    case "wait":
        while stop.reason() is None:
            time.sleep(0.01)
        sys.exit(100)
    case "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    case "raise":
        raise ValueError("a bug")
    case code:
        print("not flushed", end="")
        sys.exit(int(code))
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    (tmp_path / "a_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(PACKAGE.parent)]))
    return lambda how: [sys.executable, "-Pm", "a_program", how]


@pytest.fixture
def preloaded(command: Any) -> Iterator[Preloaded]:
    process = Preloaded(["wave"])
    yield process
    process.close()


Process = Forked | subprocess.Popen[bytes]


def forked(preloaded: Preloaded, command: list[str], output: Path, end: int = signal.SIGTERM) -> Forked:
    with output.open("ab") as file:
        limit = time.monotonic() + 60
        while (process := preloaded.fork(command, {**os.environ, "OWN": "1"}, file.fileno(), end)) is None:
            assert preloaded.is_alive
            assert time.monotonic() < limit
    return process


def started(command: list[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        return subprocess.Popen(
            command, env={**os.environ, "OWN": "1"}, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=start_a_run,
        )  # fmt: skip


def ended(process: Process) -> int:
    limit = time.monotonic() + 60
    while (code := process.poll()) is None:
        assert time.monotonic() < limit
        time.sleep(0.01)
    return code


@pytest.mark.parametrize(("how", "code"), [("0", 0), ("3", 3), ("kill", -9), ("raise", 1)])
def test_a_forked_process_sees_and_says_what_a_new_interpreter_does(
    preloaded: Preloaded, command: Callable[[str], list[str]], tmp_path: Path, how: str, code: int
) -> None:
    new, fork = tmp_path / "new", tmp_path / "fork"
    assert ended(started(command(how), new)) == ended(forked(preloaded, command(how), fork)) == code
    (known, *said), (known_too, *said_too) = new.read_text().splitlines(), fork.read_text().splitlines()
    assert json.loads(known_too).pop("preloaded")
    assert {**json.loads(known_too), "preloaded": False} == json.loads(known)
    assert said_too[-1] == said[-1]
    assert how == "raise" or said_too == said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_no_signal_is_lost(
    preloaded: Preloaded, command: Callable[[str], list[str]], tmp_path: Path, number: signal.Signals
) -> None:
    """It comes before the process handles signals."""
    process = forked(preloaded, command("wait"), tmp_path / "out")
    process.send_signal(number)
    assert ended(process) == 100
    process.send_signal(number)  # to no other process that may have its number now
    assert number.name in (tmp_path / "out").read_text()


def test_a_fork_outlives_the_preloaded_process(
    preloaded: Preloaded, command: Callable[[str], list[str]], tmp_path: Path
) -> None:
    process = forked(preloaded, command("wait"), tmp_path / "out")
    preloaded._process.kill()
    preloaded._process.wait()
    assert not preloaded.is_alive
    assert preloaded.fork(command("0"), os.environ, None, signal.SIGTERM) is None
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 100


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_sigkill_of_the_asking_process(
    command: Callable[[str], list[str]], tmp_path: Path, end: signal.Signals
) -> None:
    code = f"""
import os, signal, sys, time
from gptexp.run.preloaded import Preloaded
preloaded = Preloaded([])
while (process := preloaded.fork({command("wait")!r}, os.environ, 1, {int(end)})) is None:
    time.sleep(0.01)
print(preloaded._process.pid, process.pid, file=sys.stderr, flush=True)
time.sleep(60)
"""
    asking = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    assert asking.stderr is not None
    assert "argv" in asking.stdout.readline()  # the program runs
    pids = [int(word) for word in asking.stderr.readline().split()]
    family = [psutil.Process(pid) for pid in pids]
    asking.kill()
    asking.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert ("SIGTERM" in asking.stdout.read()) == (end == signal.SIGTERM)


def test_a_module_that_cannot_be_imported_forks_nothing(command: Callable[[str], list[str]]) -> None:
    preloaded = Preloaded(["no_such_module"])
    try:
        while preloaded.is_alive:
            assert preloaded.fork(command("0"), os.environ, None, signal.SIGTERM) is None
        assert preloaded.fork(command("0"), os.environ, None, signal.SIGTERM) is None
    finally:
        preloaded.close()


def test_a_process_with_threads_forks_nothing(command: Callable[[str], list[str]], tmp_path: Path) -> None:
    (tmp_path / "a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[60]).start()\n"
    )
    preloaded = Preloaded(["a_thread"])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            preloaded._process.wait(2)
        assert preloaded.fork(command("0"), os.environ, None, signal.SIGTERM) is None
    finally:
        preloaded.close()
