"""`train.profile`: a trace of a few steps, their costliest operations, and the shares of their time that train nothing.

The trace (one a rank, for https://ui.perfetto.dev) comes from torch's profiler, which slows the steps that it watches
and lengthens small operations most.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from gptexp.distributed import Rank
from gptexp.phases import StepTimer

SKIPPED, WARM_UP, TRACED = 5, 1, 3  # steps: those that compile and settle, the profiler's own, and those that count
COSTLIEST = 10
QUIET = "99"  # for the profiler's own log, which tells stderr when it starts and stops


class StepProfiler:
    """Watches steps from `first` until it has traced its few, or as many as a run of `steps` has left."""

    def __init__(self, directory: Path, rank: Rank, device: torch.device, first: int, steps: int) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
        self._directory, self._rank, self._on_gpu = directory, rank, device.type == "cuda"
        left = steps - first
        self._traced = max(1, min(TRACED, left - WARM_UP))
        self._skipped = max(0, min(SKIPPED, left - WARM_UP - self._traced))
        self._first = first + self._skipped + WARM_UP  # traced
        self._timers: list[StepTimer] = []
        self._steps = 0
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            schedule=schedule(wait=self._skipped, warmup=WARM_UP, active=self._traced, repeat=1),
            record_shapes=False,
        )
        self._profile.start()

    def step(self, timer: StepTimer) -> dict[str, Any] | None:
        """A step, timed by `timer`, is over. After the last traced one: what was found; else None."""
        if self._steps >= self._skipped + WARM_UP:
            self._timers.append(timer)
        self._steps += 1
        if len(self._timers) == self._traced:
            return self._found()
        self._profile.step()
        return None

    def give_up(self) -> str:
        """The run is over before all was traced: what to say."""
        self._profile.stop()
        return f"train.profile: no trace, the run ended before step {self._first + self._traced}"

    def _found(self) -> dict[str, Any]:
        self._profile.stop()
        last = self._first + self._traced - 1
        path = self._directory / f"steps-{self._first}-{last}-rank{self._rank.rank}.json.gz"
        self._directory.mkdir(exist_ok=True)
        self._profile.export_chrome_trace(str(path))
        return {"path": str(path), "shares": self._shares(), "operations": self._costliest()}

    def _shares(self) -> dict[str, float]:
        """Of the traced steps' time on this rank. Collectives may run beside other work."""
        phases = [timer.read() for timer in self._timers]
        total = sum(sum(of_step.values()) for of_step in phases)
        collectives = [
            (event.time_range.start, event.time_range.end)
            for event in self._profile.events() or ()
            if event.name.startswith("gloo:")
            or (event.device_type == DeviceType.CUDA and event.name.startswith("nccl"))
        ]
        return {
            "data": sum(of_step["data"] for of_step in phases) / total,
            "collectives": covered(collectives) / 1e3 / total,
            "optimizer": sum(of_step["optimizer"] for of_step in phases) / total,
        }

    def _costliest(self) -> list[dict[str, Any]]:
        """The operations that take the most time by themselves, on the device that works."""
        key = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        averages = [e for e in self._profile.key_averages() if not e.key.startswith("ProfilerStep")]
        total = sum(getattr(e, key) for e in averages)
        averages.sort(key=lambda e: getattr(e, key), reverse=True)
        return [
            {
                "name": e.key,
                "calls_per_step": e.count / self._traced,
                "ms_per_step": getattr(e, key) / 1e3 / self._traced,
                "share": getattr(e, key) / total,
            }
            for e in averages[:COSTLIEST]
        ]


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what (start, end) `intervals` cover together."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
