"""Norms and cosine of single micro-batches' gradients, taken before any averaging. For the gradient noise scale."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gptexp.distributed.sharding import Parameters
from gptexp.training.norms import block_norms, dot, norm_of_norms, total_norm


class SmallGradients:
    """Measures this rank's gradients of the mean loss of a step's first micro-batch, and of the second if there is one.

    After the first of several backward passes, `grad` holds the first gradient and is simply read. But the second
    gradient is added to `grad`, and in a step with only one pass DDP replaces the first gradient with the reduced one.
    In these two cases hooks read each tensor's gradient before it is accumulated or reduced.

    If the ranks have split the parameters, no rank keeps a whole gradient: hooks read both, and there is no cosine.

    Make one for each model: its hooks stay for the life of the parameters.
    """

    def __init__(self, model: nn.Module, parameters: Parameters) -> None:
        self._parameters = parameters
        self._reduced_by_ddp = isinstance(model, DistributedDataParallel)
        # The first gradient of each parameter. Nothing writes to it before the hooks of the second pass have read it.
        self._first: list[Tensor | None] = []
        self._norms: list[Tensor] = []
        self._product: Tensor | None = None
        # To set hooks anew takes longer than to call them in the backward passes that they do not measure.
        self._has_hooks = self._measures = False
        self._block_norms: list[Tensor] = []  # of each tensor's gradient in the pass that hooks measure
        self._products: list[Tensor] = []

    def _measure(self, number: int, gradient: Tensor) -> None:
        """The hook of parameter `number`."""
        if self._measures:
            self._block_norms.append(block_norms(gradient.float()))  # gradients of a split model may be bfloat16
            if self._first and (first := self._first[number]) is not None:
                self._products.append(dot(first, gradient))

    @contextmanager
    def __call__(self, micro_step: int, divisor: int) -> Iterator[None]:
        """Context for the backward pass of a micro-step's loss divided by `divisor`."""
        if micro_step > 1:
            yield
            return
        # DDP is used with `MeanReduction`, whose divisor is the number of backward passes.
        by_hooks = micro_step == 1 or self._parameters.split or (self._reduced_by_ddp and divisor == 1)
        if by_hooks and not self._has_hooks:
            self._parameters.watch(self._measure)
            self._has_hooks = True
        self._block_norms, self._products, self._measures = [], [], by_hooks
        try:
            yield
        finally:
            self._measures = False
        if micro_step == 0:
            self._norms, self._product = [], None
            if not self._parameters.split:
                self._first = [p.grad for p in self._parameters.named.values()]
        elif self._first:
            self._product = torch.stack(self._products).sum() * divisor**2
        if by_hooks:
            norm = norm_of_norms(torch.stack([norm_of_norms(norms) for norms in self._block_norms]))
            self._first = []
        else:
            norm = total_norm([gradient for gradient in self._first if gradient is not None])
        self._norms.append(norm * divisor)

    def measured(self) -> Tensor:
        """Return mean squared norm and cosine of the newest step, shape (2,); with only one gradient, cosine NaN."""
        squares = torch.stack(self._norms).square()
        if self._product is None:
            return torch.stack([squares.mean(), torch.full_like(squares[0], math.nan)])
        return torch.stack([squares.mean(), self._product / squares.prod().sqrt()])
