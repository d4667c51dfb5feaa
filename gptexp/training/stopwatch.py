"""Time spent training, without evaluation, checkpoints and other work between steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Measures laps, without the time spent in `paused`."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, or since the start."""
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the body from the current lap."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - before
