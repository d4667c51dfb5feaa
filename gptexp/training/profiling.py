"""`train.profile`: a trace of a few steps, their most expensive operations, and the time lost to data and collectives.

Each rank writes a trace of torch's profiler, for https://ui.perfetto.dev. The profiler slows the steps that it traces,
and small operations the most.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from gptexp.config.metrics import Metric
from gptexp.distributed.ranks import Rank
from gptexp.training.phases import StepTimer

SKIPPED = 5  # steps before the profiler starts; they include compiling
WARM_UP = 1  # steps that the profiler discards
TRACED = 3  # steps
COSTLIEST = 10  # operations to list
QUIET = "99"  # level of the profiler's own log, which otherwise prints on stderr when it starts and stops


class StepProfiler:
    """Traces `TRACED` steps soon after step `first`, or fewer if the run of `steps` steps ends before that."""

    def __init__(self, directory: Path, rank: Rank, device: torch.device, first: int, steps: int) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
        self._directory, self._rank, self._on_gpu = directory, rank, device.type == "cuda"
        left = steps - first
        self._traced = max(1, min(TRACED, left - WARM_UP))
        self._skipped = max(0, min(SKIPPED, left - WARM_UP - self._traced))
        self._first = first + self._skipped + WARM_UP  # the first step that is traced
        self._timers: list[StepTimer] = []
        self._steps = 0
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            schedule=schedule(wait=self._skipped, warmup=WARM_UP, active=self._traced, repeat=1),
        )
        self._profile.start()

    def step(self, timer: StepTimer) -> dict[str, Any] | None:
        """Record the end of a step, timed by `timer`. Returns the result after the last traced step, else None."""
        if self._steps >= self._skipped + WARM_UP:
            self._timers.append(timer)
        self._steps += 1
        if len(self._timers) < self._traced:
            self._profile.step()
            return None
        self._profile.stop()
        last = self._first + self._traced - 1
        path = self._directory / f"steps-{self._first}-{last}-rank{self._rank.rank}.json.gz"
        self._directory.mkdir(exist_ok=True)
        self._profile.export_chrome_trace(str(path))
        return {"path": str(path), "shares": self._shares(), "operations": self._costliest()}

    def give_up(self) -> str:
        """Stop the profiler because the run ends too early. Returns the warning."""
        self._profile.stop()
        return f"train.profile=true: no trace, because the run ended before step {self._first + self._traced}"

    def _shares(self) -> dict[str, float]:
        """Return shares of the traced steps' time on this rank. Collectives may overlap with other work."""
        steps_ms = [timer.read() for timer in self._timers]
        total_ms = sum(sum(phases.values()) for phases in steps_ms)
        collectives = [
            (event.time_range.start, event.time_range.end)
            for event in self._profile.events() or ()
            if event.name.startswith("gloo:")
            or (event.device_type == DeviceType.CUDA and event.name.startswith("nccl"))
        ]
        return {
            "data": sum(phases[Metric.DATA_MS] for phases in steps_ms) / total_ms,
            "collectives": covered(collectives) / 1e3 / total_ms,
            "optimizer": sum(phases[Metric.OPTIMIZER_MS] for phases in steps_ms) / total_ms,
        }

    def _costliest(self) -> list[dict[str, Any]]:
        """Return the operations with the longest self time, that is, without the operations that they call."""
        key = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"  # µs
        averages = [(getattr(e, key), e) for e in self._profile.key_averages() if not e.key.startswith("ProfilerStep")]
        total_us = sum(us for us, _ in averages)
        averages.sort(key=lambda pair: pair[0], reverse=True)
        return [
            {
                "name": e.key,
                "calls_per_step": e.count / self._traced,
                "ms_per_step": us / 1e3 / self._traced,
                "share": us / total_us,
            }
            for us, e in averages[:COSTLIEST]
        ]


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (start, end) intervals."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
