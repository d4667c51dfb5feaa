"""Locks on files, which say whether a process is alive: those of the file system (flock), or a stand-in.

Some network file systems have no flock. There each holder of a lock has a marker, a file beside the locked one, whose
name says which process it is. A marker counts while that process is alive, or, on another machine, while its time is
renewed. A process first writes its own marker and then looks for others, so two never hold a lock at once; both may
have to try again.
"""

import errno
import fcntl
import hashlib
import math
import os
import random
import secrets
import socket
import threading
import time
from contextlib import suppress
from glob import escape
from pathlib import Path
from types import TracebackType
from typing import Self

from gptexp.process.terminal import warn

POLL_S = 0.05  # between two attempts to take a lock
BEAT_S = 10.0  # between two renewals of a marker
STALE_S = 60.0  # age at which a marker of another machine no longer counts
START_S = 10.0  # difference of two readings of a process's start, at most; the clock may have been set in between
HELD = (BlockingIOError, PermissionError)  # errors of flock if another process holds the lock
NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
SAID = "GPTEXP_NO_FLOCK"  # environment: a process above this one has printed the line about it


class Lock:
    """A lock that this process holds, until `release` or the end of a `with` block."""

    def __init__(self, handle: int, marker: Path | None = None) -> None:
        self._handle, self._marker, self._released = handle, marker, threading.Event()
        if marker is not None:
            threading.Thread(target=self._renew, name="lock", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        if not self._released.is_set():
            self._released.set()
            if self._marker is not None:
                self._marker.unlink(missing_ok=True)
            os.close(self._handle)

    def _renew(self) -> None:
        while self._marker is not None and not self._released.wait(BEAT_S):
            with suppress(OSError):
                os.utime(self._marker)  # to the time of the file system, which all machines see


def take(path: Path, alone: bool = True, timeout_s: float = math.inf) -> Lock:
    """Lock the file `path`, which is created if it is missing, `alone` or shared with others that share it.

    Raises `TimeoutError` if others hold it for `timeout_s`, else `OSError`.
    """
    end = time.monotonic() + timeout_s
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)  # again, because `gptexp rm` may have removed it
        if (lock := _try(path, alone)) is not None:
            return lock
        if time.monotonic() > end:
            raise TimeoutError(f"{path} is locked")
        time.sleep(POLL_S * random.uniform(1, 2))


def is_taken(path: Path, alone: bool = False) -> bool:
    """Whether a process holds the lock `path` alone; with `alone`, also whether one shares it."""
    # NFS needs O_RDWR for LOCK_EX. LOCK_SH: two such questions at once do not answer each other.
    flags, operation = (os.O_RDWR, fcntl.LOCK_EX) if alone else (os.O_RDONLY, fcntl.LOCK_SH)
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # the file is missing, not accessible or a link
        return False
    try:
        fcntl.flock(handle, operation | fcntl.LOCK_NB)
    except HELD:
        return True
    except OSError:
        return any(_is_alive(marker, time.time()) for marker in _markers(path, alone))
    finally:
        os.close(handle)
    return False


def _try(path: Path, alone: bool) -> Lock | None:
    """Take the lock `path`; None if others hold it. Raises `OSError`."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if os.fstat(handle).st_nlink:  # else `gptexp rm` has removed the file
            return Lock(handle)
    except HELD:
        pass
    except OSError as error:
        if error.errno not in NO_FLOCK:
            os.close(handle)
            raise
        if (marker := _mark(path, alone, os.strerror(error.errno))) is not None:
            return Lock(handle, marker)
    os.close(handle)
    return None


def _mark(path: Path, alone: bool, why: str) -> Path | None:
    """Take the lock `path` by a marker, and return it; None if others hold the lock. Raises `OSError`."""
    if SAID not in os.environ:
        os.environ[SAID] = "1"
        warn(
            f"{path.parent}: its file system has no locks ({why}); files that are renewed every {BEAT_S:g} s stand in, "
            f"and after SIGKILL a run on another machine counts as running for {STALE_S:g} s"
        )
    pid, kind = os.getpid(), "alone" if alone else "shared"
    marker = path.with_name(f"{path.name}.{kind}-{_machine()}-{pid}-{_started(pid):.0f}-{secrets.token_hex(4)}")
    marker.touch(exist_ok=False)
    others = [other for other in _markers(path, alone) if other != marker]
    now = marker.stat().st_mtime  # by the clock of the file system, not of this machine
    if any(_is_alive(other, now) for other in others):
        marker.unlink(missing_ok=True)
        return None
    for dead in others:
        dead.unlink(missing_ok=True)
    return marker


def _markers(path: Path, alone: bool) -> list[Path]:
    """The markers that prevent the lock `path`, `alone` or shared."""
    return [*path.parent.glob(f"{escape(path.name)}.{'*' if alone else 'alone'}-*-*-*-*")]


def _is_alive(marker: Path, now: float) -> bool:
    """Whether the process of `marker` lives at the Unix time `now`, in s."""
    machine, pid, start = marker.name.split("-")[-4:-1]
    try:
        if machine == _machine():
            return abs(_started(int(pid)) - float(start)) < START_S
        return now - marker.stat().st_mtime < STALE_S
    except (OSError, ValueError):
        return False


def _machine() -> str:
    """A name for the processes that see each other: those of one machine, or of one container."""
    space = ""
    with suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return hashlib.sha256(f"{socket.gethostname()} {space}".encode()).hexdigest()[:8]


def _started(pid: int) -> float:
    """Unix time at which a process began, in s; NaN without a live one."""
    import psutil  # not needed where the file system has locks

    try:
        process = psutil.Process(pid)
        return math.nan if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return math.nan
