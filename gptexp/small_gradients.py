"""How long single micro-batches' gradients are, and how far two of them agree, before anything is averaged."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class SmallGradients:
    """Measures this rank's gradients of the mean loss of a step's first micro-batch, and of its second if there is one.

    After the first of several backward passes `grad` holds the first: reading it once is all that this costs. The
    second is added to it, and where DDP reduces in the only backward pass the first is gone too soon: there hooks see
    each tensor's gradient before it is added to or reduced with any other.
    """

    def __init__(self, model: nn.Module, grad_accum_steps: int) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._reduced_at_once = isinstance(model, DistributedDataParallel) and grad_accum_steps == 1
        self._first: list[Tensor | None] = []  # of each parameter, once it is there; nobody writes to it before the
        # hooks of the second backward pass have read it
        self._norms: list[Tensor] = []
        self._product: Tensor | None = None

    @contextmanager
    def __call__(self, micro_step: int, divisor: int) -> Iterator[None]:
        """What the backward pass of a micro-step's loss over `divisor` runs in."""
        if micro_step > 1:
            yield
            return
        norms, products = list[Tensor](), list[Tensor]()

        def see(number: int, gradient: Tensor) -> None:
            norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))
            if micro_step == 1 and (first := self._first[number]) is not None:
                products.append(torch.vdot(first.flatten(), gradient.flatten()).float())

        by_hooks = micro_step == 1 or self._reduced_at_once
        hooks = [p.register_hook(partial(see, number)) for number, p in enumerate(self._parameters) if by_hooks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if micro_step == 0:
            self._norms, self._product = [], None
            self._first = [] if by_hooks else [p.grad for p in self._parameters]
        else:
            self._product = torch.stack(products).sum() * divisor**2
            self._first = []
        norm = torch.linalg.vector_norm(torch.stack(norms)) if by_hooks else self._norm_of_first()
        self._norms.append(norm * divisor)

    def measured(self) -> Tensor:
        """Of the newest step, (2,): mean squared norm, and cosine of the two; NaN where there was only one."""
        squares = torch.stack(self._norms).square()
        if self._product is None:
            return torch.stack([squares.mean(), torch.full_like(squares[0], math.nan)])
        return torch.stack([squares.mean(), self._product / squares.prod().sqrt()])

    def _norm_of_first(self) -> Tensor:
        return nn.utils.get_total_norm([gradient for gradient in self._first if gradient is not None])
