"""The time of a step and of its phases, with CUDA events on a GPU and the host's clock elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from gptexp.config.metrics import Metric

PHASES = (Metric.DATA_MS, Metric.FORWARD_MS, Metric.BACKWARD_MS, Metric.CLIP_MS, Metric.OPTIMIZER_MS)


class StepTimer:
    """Times the phases of one step. On a GPU, `mark` queues an event and does not wait.

    On a GPU the phases are those of the device: `data` is how long it was idle because the host was late.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Metric | None, torch.cuda.Event | float]] = []
        self.mark(None)

    def mark(self, phase: Metric | None) -> None:
        """End `phase`, which began at the previous mark."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def read(self) -> dict[str, float]:
        """Return the ms of each phase, summed over micro-steps. Waits until a GPU has reached the last mark."""
        total: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        if isinstance(last := self._marks[-1][1], torch.cuda.Event):
            last.synchronize()
        for (_, before), (phase, now) in pairwise(self._marks):
            assert phase is not None
            if isinstance(now, float):
                assert isinstance(before, float)
                total[phase] += 1e3 * (now - before)
            else:
                assert not isinstance(before, float)
                total[phase] += before.elapsed_time(now)
        return total


def exposed_reduce_ms(model: torch.nn.Module) -> float:
    """Return how long DDP's backward pass waited for the reduction when DDP last measured it; 0 without DDP.

    The rest of the reduction overlaps with the backward pass. DDP measures the first ten steps and every hundredth,
    and publishes a measurement when the next step begins.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return 0.0
    measured = model._get_ddp_logging_data()
    total_ns, hidden_ns = measured.get("backward_comm_time", 0), measured.get("backward_compute_comm_overlap_time", 0)
    return float(max(0, total_ns - hidden_ns)) / 1e6


class Stopwatch:
    """Measures laps of training, without the time spent in `paused`: evaluation, checkpoints and other work."""

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
