"""A request to stop: a flag that a signal or the clock raises and the loop reads between steps.

And the signals that go with a process's children: when it ends, and when it is ended.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# In the order of the flags that the ranks exchange; `time` is train.max_minutes.
REASONS = ("SIGINT", "SIGUSR1", "SIGTERM", "time")
EXIT_CODES = {"SIGINT": 130, "SIGUSR1": 138, "SIGTERM": 143, "time": 0}

DEADLINE = "GPTEXP_DEADLINE"  # of the system's monotonic clock, in seconds; a launcher's for all attempts of its ranks

# A terminal and a launcher may both pass on one Ctrl-C; what arrives this soon is the same request.
SAME_REQUEST_S = 1.0


def at_parents_death(number: int) -> None:
    """Have Linux send this process signal `number` when its parent ends, however that ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number, 0, 0, 0)


def ignore_stops() -> None:
    """Once all is saved and ranks only leave: a signal that still arrives has nothing left to stop."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `SystemExit`, so that `finally` clauses run; for code that started processes."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def deadline_after(max_minutes: float | None) -> float:
    """What `DEADLINE` is for a limit that begins now; infinity for none."""
    return time.monotonic() + 60 * max_minutes if max_minutes is not None else float("inf")


class StopRequest:
    """The first SIGINT, SIGUSR1 or SIGTERM asks for a stop after the running step, a second leaves at once.

    Before training has begun there is nothing to save, and the first leaves at once.
    """

    def __init__(self) -> None:
        self._asked: str | None = None
        self._asked_at = 0.0
        self.deadline = float("inf")  # of the monotonic clock, s
        self.spare_s = 0.0  # what must be left before the deadline: for a step and a checkpoint
        self.training = False  # whether there is a step to finish and something to save

    def limit(self, max_minutes: float | None) -> None:
        """Ask for a stop once `max_minutes` have passed, from now or from when `DEADLINE` was set; None: never."""
        self.deadline = float(os.environ.get(DEADLINE) or deadline_after(max_minutes))

    def install(self, ignore_sigint: bool) -> None:
        """Handle the signals from here on; a rank that gptexp launched leaves Ctrl-C to its parent."""
        for name in ("SIGINT", "SIGUSR1", "SIGTERM"):
            signal.signal(getattr(signal, name), self.on_signal)
        if ignore_sigint:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.training:
            os._exit(128 + number)
        if self._asked is None:
            self._asked, self._asked_at = signal.Signals(number).name, now
            os.write(2, f"gptexp: {self._asked}: stopping after this step; again to leave at once\n".encode())
        elif now - self._asked_at > SAME_REQUEST_S:
            os._exit(128 + number)

    def reason(self) -> str | None:
        """Why this process should stop, if it should."""
        if self._asked is None and time.monotonic() + self.spare_s > self.deadline:
            return "time"
        return self._asked

    def flags(self) -> list[float]:
        """One number per reason, 1 where it was asked for: sums over ranks tell every rank the same."""
        return [float(self.reason() == name) for name in REASONS]
