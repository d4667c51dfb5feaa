"""The numbers of a training step: reduced over all ranks on the devices, copied to the host without waiting."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gptexp.distributed.group import all_reduce_sum, rank_index, world_size
from gptexp.process.signals import REASONS

POLL_S = 1e-4  # s: between two checks whether a GPU is done


class StepTimeout(RuntimeError):
    """The numbers of a step were not available in time."""


@dataclass(frozen=True)
class Numbers:
    """The numbers of a step over all ranks, equal on all of them."""

    loss: float  # mean, nats per token
    grad_norm: float  # global, before clipping
    finite: bool  # whether the weights were updated
    asked: str | None  # the reason to stop, one of `REASONS`
    fingerprint: int  # sum over the ranks, modulo 2^64
    small_sq_norm: float  # mean squared norm of one micro-batch's gradient; 0: not measured
    cosine: float  # mean over the ranks, of two micro-batches' gradients; NaN: a rank has only one
    work_ms: list[float]  # of each rank; empty: not asked for


class StepReport:
    """The numbers of a step while a GPU still computes them. *Collective.*

    Creating it queues the reduction and the copy to the host; `read` waits for them. One small all-reduce of float32
    carries everything: the loss, the two numbers of `small_gradients`, whether the gradient norm is non-finite, one
    flag per reason to stop, the fingerprint as eight bytes, whose sums over the ranks are exact integers, and in a step
    that is logged the `work_ms` of each rank, in an element of its own.
    """

    def __init__(
        self,
        loss: Tensor,
        grad_norm: Tensor,
        fingerprint: int,
        stop_flags: list[float],
        small_gradients: Tensor | None = None,
        work_ms: float | None = None,
    ) -> None:
        ranks = world_size()
        host = torch.tensor([*stop_flags, *fingerprint.to_bytes(8, "little")], dtype=torch.float32)
        if work_ms is not None:
            work = torch.zeros(ranks)
            work[rank_index()] = work_ms
            host = torch.cat([host, work])
        if loss.is_cuda:
            host = host.pin_memory()
        norm = grad_norm.detach().reshape(1).float()
        bad_norm = norm.isfinite().logical_not().float()
        small = norm.new_zeros(2) if small_gradients is None else small_gradients
        mean_shares = torch.cat([loss.reshape(1), small]) / ranks
        reduced = all_reduce_sum(torch.cat([mean_shares, bad_norm, host.to(loss.device, non_blocking=True)]))
        self.finite = reduced[0].isfinite() & (reduced[3] == 0)  # 0-dim, on the device: equal on all ranks
        values = torch.cat([norm, reduced])
        self._event: torch.cuda.Event | None = None
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
        grad_norm, loss, small, cosine, bad_norms, *rest = self._values.tolist()
        flags, limbs, work = rest[: len(REASONS)], rest[len(REASONS) :][:8], rest[len(REASONS) + 8 :]
        asked = next((name for name, flag in zip(REASONS, flags, strict=True) if flag), None)
        fingerprint = sum(int(limb) << (8 * i) for i, limb in enumerate(limbs)) % 2**64
        return Numbers(loss, grad_norm, math.isfinite(loss) and not bad_norms, asked, fingerprint, small, cosine, work)
