"""Where the time of a step goes: marks between its phases, on the clock of the device that works."""

import time

import torch

PHASES = ("data", "forward", "backward", "clip", "optimizer")


class StepTimer:
    """Splits one step. `mark(phase)` says that a phase ends here; it queues an event on a GPU and waits for nothing.

    On a GPU the phases are those of the device: `data` is how long it idled because the host was late.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, torch.cuda.Event | float]] = []
        self.mark("start")

    def mark(self, phase: str) -> None:
        """`phase` has lasted since the mark before."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def read(self) -> dict[str, float]:
        """Milliseconds of each phase, micro-steps added up; waits until a GPU is past the last mark."""
        total = dict.fromkeys(PHASES, 0.0)
        if isinstance(last := self._marks[-1][1], torch.cuda.Event):
            last.synchronize()
        for (_, before), (phase, now) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(now, float):
                assert isinstance(before, float)
                total[phase] += 1e3 * (now - before)
            else:
                assert not isinstance(before, float)
                total[phase] += before.elapsed_time(now)
        return total


def exposed_reduce_ms(model: torch.nn.Module) -> float:
    """How long DDP's backward pass waited for its reduction, when DDP last measured it; 0 without DDP.

    The rest of the reduction runs beside the backward pass and costs nothing. DDP measures the first ten steps and
    every hundredth, and tells of one when the next begins.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return 0.0
    measured = model._get_ddp_logging_data()
    spent, beside = measured.get("backward_comm_time", 0), measured.get("backward_compute_comm_overlap_time", 0)
    return float(max(0, spent - beside)) / 1e6
