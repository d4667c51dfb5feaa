"""A request to stop: a flag that a signal or the clock raises and the loop reads between steps."""

import os
import signal
import time
from types import FrameType

# In the order of the flags that the ranks exchange; `time` is train.max_minutes.
REASONS = ("SIGINT", "SIGUSR1", "SIGTERM", "time")
EXIT_CODES = {"SIGINT": 130, "SIGUSR1": 138, "SIGTERM": 143, "time": 0}

# A terminal and a launcher may both pass on one Ctrl-C; what arrives this soon is the same request.
SAME_REQUEST_S = 1.0


class StopRequest:
    """The first SIGINT, SIGUSR1 or SIGTERM asks for a stop after the running step, a second leaves at once."""

    def __init__(self) -> None:
        self._asked: str | None = None
        self._asked_at = 0.0
        self._started = time.monotonic()
        self._deadline = float("inf")

    def limit(self, max_minutes: float | None) -> None:
        """Ask for a stop once `max_minutes` have passed since this object was made; None: never."""
        if max_minutes is not None:
            self._deadline = self._started + 60 * max_minutes

    def install(self, ignore_sigint: bool) -> None:
        """Handle the signals from here on; a rank that gptexp launched leaves Ctrl-C to its parent."""
        for name in ("SIGINT", "SIGUSR1", "SIGTERM"):
            signal.signal(getattr(signal, name), self.on_signal)
        if ignore_sigint:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked is None:
            self._asked, self._asked_at = signal.Signals(number).name, now
        elif now - self._asked_at > SAME_REQUEST_S:
            os._exit(128 + number)

    def reason(self) -> str | None:
        """Why this process should stop, if it should."""
        if self._asked is None and time.monotonic() > self._deadline:
            return "time"
        return self._asked

    def flags(self) -> list[float]:
        """One number per reason, 1 where it was asked for: sums over ranks tell every rank the same."""
        return [float(self.reason() == name) for name in REASONS]
