"""Stop requests from signals and from the time limit, and the signals between a process and its children.

A request sets a flag. The training loop reads the flag between steps.
"""

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gptexp.process.terminal import as_command, leave_terminal, show_cursor, warn_at_once

# Reason of a stop -> exit code, in the order of the flags that the ranks exchange. `time` is train.max_minutes.
EXIT_CODES = {"SIGINT": 130, "SIGHUP": 129, "SIGUSR1": 138, "SIGTERM": 143, "time": 0}
REASONS = tuple(EXIT_CODES)
HANDLED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM)
STOPPED = tuple(128 + number for number in HANDLED)  # exit codes of a process that a signal has stopped

DEADLINE = "GPTEXP_DEADLINE"  # environment: seconds of the monotonic clock; a launcher sets it for all its attempts
PARENT = "GPTEXP_PARENT"  # environment: process id of the launcher, for the ranks that it starts

# Seconds. A terminal and a launcher may both pass on one Ctrl-C; signals closer together than this are one request.
SAME_REQUEST_S = 1.0


def handled() -> list[signal.Signals]:
    """The signals to handle here: those of `HANDLED`, but SIGHUP only if nohup does not ignore it."""
    return [n for n in HANDLED if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def before_training(directory: Path | None) -> str:
    """The message if a signal ends a run before its first step. `directory` is the run's, once it has one."""
    again = "" if directory is None else f"; {as_command(['resume', str(directory)])} starts it"
    return f"interrupted before the first step{again}"


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def at_parents_death(number: int) -> None:
    """Have Linux send signal `number` to this process when its parent ends for any reason."""
    pr_set_pdeathsig = 1
    _prctl(pr_set_pdeathsig, number)


@contextmanager
def adopting() -> Iterator[None]:
    """Make each descendant of this process whose parent ends meanwhile a child of this process."""
    pr_set_child_subreaper = 36
    _prctl(pr_set_child_subreaper, 1)
    try:
        yield
    finally:
        _prctl(pr_set_child_subreaper, 0)


def die_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Have Linux send signal `number` to this process when process `parent` ends; exit now if it has ended already."""
    at_parents_death(number)
    if os.getppid() != parent:
        os._exit(128 + number)


def ignore_stops() -> None:
    """Ignore all but SIGINT. Call it after the last save, when only the exit of the process is left."""
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def start_a_run() -> None:
    """A `preexec_fn` for a process that has a `StopRequest`: the process dies with its parent and loses no signal.

    The signals are blocked until `install`. Otherwise Python would print a traceback for an early SIGINT.
    """
    at_parents_death(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)


@contextmanager
def collected(signals: list[int]) -> Iterator[None]:
    """Append the `handled` signals to `signals` when they come, in place of what they do otherwise."""
    last = -math.inf

    def add(number: int, _frame: FrameType | None) -> None:
        nonlocal last
        if number == signal.SIGHUP:
            leave_terminal()
        if time.monotonic() - last >= SAME_REQUEST_S:
            last = time.monotonic()
            signals.append(number)

    before = {number: signal.signal(number, add) for number in handled()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Raise `SystemExit` on SIGTERM and SIGHUP, so that `finally` clauses can end the processes that were started."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    ending = [number for number in handled() if number in (signal.SIGTERM, signal.SIGHUP)]
    before = {number: signal.signal(number, leave) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def deadline_after(max_minutes: float | None) -> float:
    """The monotonic time in seconds at which `max_minutes` from now have passed; infinity for None."""
    return time.monotonic() + 60 * max_minutes if max_minutes is not None else float("inf")


class StopRequest:
    """Records the first of the `HANDLED` signals; the loop then stops after the running step.

    A second signal ends the process at once. Before training has begun there is nothing to save, so even the first
    signal ends the process at once.
    """

    def __init__(self) -> None:
        self._signal: str | None = None  # name of the first signal
        self._received_at = 0.0
        self.deadline = float("inf")  # seconds of the monotonic clock
        self.spare_s = 0.0  # time that a step and a checkpoint need: the run stops this long before the deadline
        self.training = False  # whether there is a step to finish and something to save, see `begin`
        self.announces = True  # whether it prints a line when the first signal comes
        self.promise = "the run stops after this step"
        self.directory: Path | None = None  # of the run, once it has a saved config
        self.record: Callable[[], object] = lambda: None  # writes that the run was interrupted, before an exit at once
        self._silent = False

    def limit(self, max_minutes: float | None) -> None:
        """Set the deadline: $GPTEXP_DEADLINE if it is set, else `max_minutes` from now; None: no limit."""
        self.deadline = float(os.environ.get(DEADLINE) or deadline_after(max_minutes))

    def install(self, ignore_sigint: bool) -> None:
        """Handle the signals from now on. A rank that gptexp launched ignores SIGINT: its parent handles Ctrl-C.

        Until training begins, the other signals end such a rank without a Python handler, which would not run while C++
        code waits for other ranks. As these have ended too, the wait would last until the parent kills the rank.
        """
        self._silent = ignore_sigint
        for number in handled():
            signal.signal(number, signal.SIG_DFL if ignore_sigint else self.on_signal)
        if ignore_sigint:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def begin(self) -> None:
        """From now on there is a step to finish and something to save."""
        self.training = True
        if self._silent:
            for number in handled():
                if number != signal.SIGINT:
                    signal.signal(number, self.on_signal)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            leave_terminal()
        if not self.training:
            self.leave(number, before_training(self.directory))
        if self._signal is None:
            self._signal, self._received_at = signal.Signals(number).name, now
            if self.announces:
                warn_at_once(f"{self._signal}: {self.promise}; repeat the signal to stop at once")
        elif now - self._received_at > SAME_REQUEST_S:
            self.leave(number, "interrupted at once; steps after the newest checkpoint are lost")

    def leave(self, number: int, why: str) -> NoReturn:
        """End the process now, because of a signal. An exception would not do: libraries catch it."""
        if not self._silent:
            warn_at_once(f"{signal.Signals(number).name}: {why}")
            show_cursor()
        with suppress(Exception):
            self.record()
        os._exit(128 + number)

    def reason(self) -> str | None:
        """The reason for which this process should stop now, one of `REASONS`, or None."""
        if self._signal is None and time.monotonic() + self.spare_s > self.deadline:
            return "time"
        return self._signal

    def flags(self) -> list[float]:
        """One number per reason, 1 if it applies. Summed over the ranks, they give every rank the same answer."""
        return [float(self.reason() == name) for name in REASONS]
