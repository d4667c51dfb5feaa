"""Combination of a step's gradients over micro-steps and ranks (`train.reduction`)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gptexp.distributed.ranks import Rank


class Reduction(Protocol):
    """Combines the gradients of a step's micro-steps over all ranks. Built by `build_reduction`."""

    keeps_gradients: bool  # whether the gradients' memory must be kept until the next step

    def __call__(self, micro_step: int, grad_accum_steps: int) -> AbstractContextManager[int]:
        """Enter the context of one micro-step's forward and backward pass. *Collective.*

        Yields the divisor of the micro-step's loss. After the last of `grad_accum_steps`, `grad` of every parameter
        is the gradient of the mean loss of the step.
        """
        ...


def build_reduction(kind: str, model: nn.Module, rank: Rank, every_micro_step: bool = False) -> Reduction:
    """Build the reduction `kind`. For "mean" over several ranks, `model` must be wrapped in DDP, or split by FSDP2.

    `every_micro_step` is for a split model: the ranks then hold no whole gradients between micro-steps.
    """
    if kind == "tree":
        return TreeReduction(model, rank)
    if isinstance(model, DistributedDataParallel) or rank.world_size == 1:
        return MeanReduction(model if isinstance(model, DistributedDataParallel) else None)
    return SplitReduction(model, every_micro_step)


class MeanReduction:
    """Each rank accumulates its gradients; DDP averages them over the ranks in the last micro-step."""

    def __init__(self, ddp: DistributedDataParallel | None) -> None:
        self._ddp = ddp
        # DDP's gradients are views of its buckets. If they were set to None, new gradients would be allocated beside
        # the buckets and copied into them.
        self.keeps_gradients = ddp is not None

    @contextmanager
    def __call__(self, micro_step: int, grad_accum_steps: int) -> Iterator[int]:
        if self._ddp is not None:
            # Only the last micro-step's backward pass reduces. DDP reads the flag in the forward pass.
            self._ddp.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        yield grad_accum_steps


class SplitReduction:
    """FSDP2 averages the gradients over the ranks, and each rank keeps its rows.

    It averages in every micro-step, or only in the last one: until then each rank keeps whole gradients.
    """

    keeps_gradients = False

    def __init__(self, model: nn.Module, every_micro_step: bool) -> None:
        self._model: Any = model  # an FSDPModule
        self._every_micro_step = every_micro_step

    @contextmanager
    def __call__(self, micro_step: int, grad_accum_steps: int) -> Iterator[int]:
        self._model.set_requires_gradient_sync(self._every_micro_step or micro_step == grad_accum_steps - 1)
        yield grad_accum_steps


class TreeReduction:
    """Sums the gradients of a step's M micro-batches along one binary tree. The bits are the same at any world size W.

    A float sum depends on its order. Here only the micro-batches determine the order: neighbours are added, then
    neighbouring pairs, and so on. A rank's contiguous run of M / W micro-batches is one subtree. The ranks' sums are
    added by recursive doubling (Thakur, Rabenseifner and Gropp 2005, section 4), which continues the same tree.
    M and W are powers of two. Holds up to log2(M / W) + 1 copies of the gradients, and two more while ranks exchange.
    """

    keeps_gradients = False

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._rank = rank
        self._sums: list[list[torch.Tensor]] = []  # of completed subtrees that wait for a neighbour, largest first

    @contextmanager
    def __call__(self, micro_step: int, grad_accum_steps: int) -> Iterator[int]:
        if micro_step == 0:
            self._sums = []
        yield grad_accum_steps * self._rank.world_size
        total = []
        for p in self._parameters:
            assert p.grad is not None
            total.append(p.grad)
            p.grad = None
        done = micro_step + 1
        for _ in range((done & -done).bit_length() - 1):  # one completed subtree for each time that 2 divides `done`
            total = [a.add_(b) for a, b in zip(self._sums.pop(), total, strict=True)]
        self._sums.append(total)
        if done == grad_accum_steps:
            [total] = self._sums
            self._sums = []
            if self._rank.world_size > 1:
                _add_over_ranks(total, self._rank)
            for p, gradient in zip(self._parameters, total, strict=True):
                p.grad = gradient


def _add_over_ranks(gradients: list[torch.Tensor], rank: Rank) -> None:
    """Replace this rank's sum by the sum over all ranks. In round k, ranks 2^k apart exchange their sums."""
    mine = torch.cat([g.reshape(-1) for g in gradients])
    theirs = torch.empty_like(mine)
    distance = 1
    while distance < rank.world_size:
        peer = rank.rank ^ distance
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]):
            work.wait()
        mine += theirs  # a + b and b + a are equal to the last bit
        distance *= 2
    # Copied into separate tensors: in a view, vectorised kernels may add in an order that depends on where it begins.
    for gradient, part in zip(gradients, mine.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
