"""The numbers of a training step: reduced over all ranks on the devices, copied to the host without waiting."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gptexp.distributed.group import begin_all_reduce, rank_index, world_size
from gptexp.process.fields import MOST_RANKS
from gptexp.process.signals import REASONS

POLL_S = 1e-4  # s: between two checks whether a GPU is done


class StepTimeout(RuntimeError):
    """The numbers of a step were not available in time."""


class Work(NamedTuple):
    """The time for which the ranks worked on a step, without waiting for each other."""

    sum_ms: float  # summed over the ranks
    slowest_ms: float
    slowest_rank: int


@dataclass(frozen=True)
class Numbers:
    """The numbers of a step over all ranks, equal on all of them."""

    loss: float  # mean, nats per token
    grad_norm: float  # global, before clipping
    finite: bool  # whether loss and norm are
    asked: str | None  # a rank's reason to stop, one of `REASONS`; None: go on
    fingerprint: int  # sum over the ranks, modulo 2^64
    small_sq_norm: float  # mean squared norm of one micro-batch's gradient; 0: not measured
    cosine: float  # between two micro-batches' gradients, mean over the ranks; NaN: a rank has only one
    work: Work | None  # None: not asked for


class SlowestRank:
    """The slowest rank in an earlier step, in which this rank worked for `work_ms`. *Collective.*

    Creating it begins an all-reduce that finds the largest of one integer per rank: its microseconds · `MOST_RANKS` +
    its number. A step creates it first, so that the result is there when the step's other numbers are.
    """

    def __init__(self, work_ms: float, device: torch.device) -> None:
        self.own_ms = work_ms
        packed = torch.tensor([round(1e3 * work_ms) * MOST_RANKS + rank_index()])
        if device.type == "cuda":
            packed = packed.pin_memory()
        self._reduced = begin_all_reduce(packed.to(device, non_blocking=True), dist.ReduceOp.MAX)

    def read(self) -> Tensor:
        """Return the milliseconds and the rank, on the device."""
        packed = self._reduced()
        return torch.cat([packed // MOST_RANKS / 1e3, packed % MOST_RANKS]).float()


class StepReport:
    """The numbers of a step while a GPU still computes them. *Collective.*

    Creating it begins the reduction, which takes place while the gradient is clipped; then `complete` waits for it and
    queues the copy to the host, and `read` waits for the copy. One small float32 all-reduce, of one size for any number
    of ranks, carries: the loss; the two numbers of `small_gradients`; one flag per reason to stop; the fingerprint as
    eight bytes (their sums over the ranks are exact integers); and, in a logged step, this rank's work. The norm of the
    gradient needs no reduction: all ranks have the same gradient.
    """

    finite: Tensor  # whether loss and norm are finite; 0-dim, bool, on the device, equal on all ranks
    _values: Tensor
    _event: torch.cuda.Event | None = None
    own: Mapping[str, float | Tensor] = MappingProxyType({})  # `Probe.own`

    def __init__(
        self,
        loss: Tensor,
        fingerprint: int,
        stop_flags: list[float] | None = None,  # one for each of `REASONS`: 1 if this rank has it, else 0
        small_gradients: Tensor | None = None,
        slowest: SlowestRank | None = None,
    ) -> None:
        work_ms = [] if slowest is None else [slowest.own_ms]
        stop_flags = stop_flags or [0.0] * len(REASONS)
        host = torch.tensor([*stop_flags, *fingerprint.to_bytes(8, "little"), *work_ms], dtype=torch.float32)
        if loss.is_cuda:
            host = host.pin_memory()
        small = loss.new_zeros(2) if small_gradients is None else small_gradients
        mean_shares = torch.cat([loss.reshape(1), small]) / world_size()
        numbers = torch.cat([mean_shares, host.to(loss.device, non_blocking=True)])
        self._reduced = begin_all_reduce(numbers, dist.ReduceOp.SUM)
        self._slowest = slowest

    def complete(self, grad_norm: Tensor) -> None:
        """Add the norm of the gradient, 0-dim, and queue the copy to the host."""
        reduced, norm = self._reduced(), grad_norm.detach().float()
        self.finite = 0 * reduced[0] * norm == 0  # fewer operations than `isfinite` of both
        values = torch.cat([norm.reshape(1), reduced, *([] if self._slowest is None else [self._slowest.read()])])
        if values.is_cuda:
            self._values = torch.empty(values.shape, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = values

    def read(self, timeout_s: float = math.inf) -> Numbers:
        """Wait for the numbers. Raises `StepTimeout` if the GPU, or a rank that it waits for, takes longer.

        On a CPU the numbers are available at once: there the collective itself raises an error after a timeout.
        """
        deadline = time.monotonic() + timeout_s
        while self._event is not None and not self._event.query():
            if time.monotonic() > deadline:
                raise StepTimeout(f"the numbers of a step did not arrive within {timeout_s:g} s")
            time.sleep(POLL_S)
        grad_norm, loss, small, cosine, *rest = self._values.tolist()
        flags, limbs, of_work = rest[: len(REASONS)], rest[len(REASONS) :][:8], rest[len(REASONS) + 8 :]
        work = Work(of_work[0], of_work[1], int(of_work[2])) if of_work else None
        asked = next((name for name, flag in zip(REASONS, flags, strict=True) if flag), None)
        fingerprint = sum(int(limb) << (8 * i) for i, limb in enumerate(limbs)) % 2**64
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        return Numbers(loss, grad_norm, finite, asked, fingerprint, small, cosine, work)
