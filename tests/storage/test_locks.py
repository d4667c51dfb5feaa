"""Locks with flock, and on a file system without it."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import summary, wait_for
from real_runs import begun

from gptexp.storage import locks
from gptexp.storage.locks import is_taken, take

Start = Callable[..., subprocess.Popen[str]]
Sabotage = Callable[[str, str], dict[str, str]]


@pytest.fixture(params=["flock", *(errno.errorcode[number] for number in locks.NO_FLOCK)])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether flock works, or the error that it raises."""
    name: str = request.param

    def refuse(*_: object) -> None:
        number = getattr(errno, name)
        raise OSError(number, os.strerror(number))

    monkeypatch.setenv(locks.SAID, "1")
    if name != "flock":
        monkeypatch.setattr(fcntl, "flock", refuse)
    return name


def is_refused(path: Path, alone: bool) -> bool:
    try:
        take(path, alone, timeout_s=0).release()
    except TimeoutError:
        return True
    return False


@pytest.mark.usefixtures("file_system")
@pytest.mark.parametrize("held_alone", [True, False])
@pytest.mark.parametrize("wanted_alone", [True, False])
def test_a_lock_is_held_alone_or_shared_until_it_is_released(
    tmp_path: Path, held_alone: bool, wanted_alone: bool
) -> None:
    path = tmp_path / "folder" / ".lock"
    with take(path, held_alone):
        assert is_taken(path) == held_alone
        assert is_taken(path, alone=True)
        assert is_refused(path, wanted_alone) == (held_alone or wanted_alone)
    assert not is_taken(path, alone=True)
    assert not is_refused(path, wanted_alone)
    assert [file.name for file in path.parent.iterdir()] == [".lock"]


@pytest.mark.usefixtures("file_system")
def test_no_two_hold_a_lock_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "POLL_S", 0.002)
    holders, most = list[int](), list[int]()

    def work(number: int) -> None:
        for _ in range(5):
            with take(tmp_path / ".lock"):
                holders.append(number)
                time.sleep(0.001)
                most.append(len(holders))
                holders.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 20


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of a lock which this process has taken where there is no flock, and still renews."""
    monkeypatch.setenv(locks.SAID, "1")
    monkeypatch.setattr(locks, "BEAT_S", 0.05)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    take(tmp_path / ".lock")  # until this process ends
    [path] = tmp_path.glob(".lock.alone-*")
    return path


def test_a_marker_of_a_process_that_has_ended_counts_no_more(marker: Path) -> None:
    lock = marker.with_name(".lock")
    child = subprocess.Popen(["sleep", "100"])
    started = round(locks._started(child.pid))
    dead = marker.with_name(f".lock.alone-{locks._machine()}-{child.pid}-{started}-00000000")
    marker.rename(dead)
    assert is_taken(lock)
    reused = dead.rename(dead.with_name(dead.name.replace(str(started), str(started - 100))))
    assert not is_taken(lock), "another process has that number now"
    reused.rename(dead)
    child.kill()
    end = time.monotonic() + 10
    while is_taken(lock):  # its parent has not asked for its exit code yet
        assert time.monotonic() < end
    child.wait()
    take(lock, timeout_s=0).release()
    assert not dead.exists()


def test_a_marker_of_another_machine_counts_while_it_is_renewed(marker: Path) -> None:
    lock = marker.with_name(".lock")
    old = time.time() - 2 * locks.STALE_S
    os.utime(marker, (old, old))
    deadline = time.monotonic() + 10
    while marker.stat().st_mtime < time.time() - 10:
        assert time.monotonic() < deadline, "its holder does not renew it"
        time.sleep(0.01)
    foreign = marker.with_name(marker.name.replace(locks._machine(), "01234567"))
    marker.rename(foreign)
    assert is_taken(lock)
    os.utime(foreign, (old, old))
    assert not is_taken(lock)


@pytest.mark.slow
def test_without_flock_runs_and_sweeps_are_seen_and_protected(
    start: Start, sabotage: Sabotage, long_run: list[str], tiny: list[str], tmp_path: Path
) -> None:
    no_flock = "def flock(*_): raise OSError(37, 'No locks available')\nm.fcntl.flock = flock"
    env = sabotage("gptexp.storage.locks", no_flock)

    def run(*argv: str) -> tuple[int, str, str]:
        process = start(*argv, env=env)
        out, err = process.communicate(timeout=200)
        assert "Traceback" not in err
        return process.returncode, out, err

    def listed() -> list[str]:
        _, out, _ = run("ls", "--json", str(tmp_path / "runs"))
        return [row["status"] for row in json.loads(out)]

    directory = tmp_path / "runs" / "out"
    options = [*long_run[:-1], f"hydra.run.dir={directory}", "world.size=2", "train.save_every=2"]
    training = start("train", *options, env=env)
    wait_for(begun(directory), training)
    assert listed() == ["running"]
    assert run("resume", str(directory))[0] == run("rm", "--yes", str(directory))[0] == 2
    training.send_signal(signal.SIGTERM)
    _, err = training.communicate(timeout=100)
    assert err.count("has no locks") == 1
    training = start("resume", str(directory), env=env)
    steps = summary(directory)["steps"]
    wait_for(begun(directory, steps + 3), training)
    training.kill()
    training.wait()
    end = time.monotonic() + 60
    while listed() == ["running"]:  # the ranks notice that their parent has died
        assert time.monotonic() < end
    assert listed() in (["interrupted"], ["failed"])
    assert run("rm", "--yes", str(directory))[0] == 0
    assert not directory.exists()

    code, _, err = run("train", "-m", *tiny, "train.seed=1,2", "sweep.name=grid")
    assert (code, err.count("has no locks")) == (0, 1)
    assert not [file for file in (tmp_path / "outputs/grid").rglob(".lock*") if "alone" in file.name]
