"""How long one micro-batch's gradient is, before it is added to or averaged with any other."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class LocalGradient:
    """Measures this rank's gradient of the mean loss of a step's first micro-batch, wherever that can be seen.

    After the first of several backward passes it is what `grad` holds: reading it once is all that this costs. Where
    the only backward pass reduces as it goes, hooks see each tensor's gradient before DDP does.
    """

    def __init__(self, model: nn.Module, grad_accum_steps: int) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._reduced_at_once = isinstance(model, DistributedDataParallel) and grad_accum_steps == 1
        self.sq_norm: Tensor | None = None  # 0-dim, of the newest pass; squared

    @contextmanager
    def __call__(self, divisor: int) -> Iterator[None]:
        """What the backward pass of the loss over `divisor` runs in."""
        seen: list[Tensor] = []

        def see(gradient: Tensor) -> None:
            seen.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))

        hooks = [p.register_hook(see) for p in self._parameters] if self._reduced_at_once else []
        yield
        for hook in hooks:
            hook.remove()
        if self._reduced_at_once:
            norm = torch.linalg.vector_norm(torch.stack(seen))
        else:
            norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        self.sq_norm = (norm * divisor).square()
