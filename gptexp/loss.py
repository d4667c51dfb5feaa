"""The head's cross-entropy: plain, or chunked so that no logits are kept.

The head of a small GPT-2 costs more than its blocks, and its logits more memory than all the rest: 8,192 tokens ·
50,304 ids · 4 bytes are 1.6 GB, written and read several times. The chunked loss makes a few hundred rows of logits
at a time, takes their loss and their gradients at once, and forgets them. It computes what
`cross_entropy(hidden @ weight.T, targets)` computes, the sum over rows in float32 whatever the compute type.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 512  # of logits at a time: 100 MB in float32
SAFE_LOGIT = 60.0  # exp(±60) and a sum of 10^11 such are ordinary float32 numbers
LOG2_E = math.log2(math.e)
IGNORED = -1  # a target that counts for nothing: padding


def plain_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of the rows of `hidden` (N, C) under the head `weight` (V, C) and `targets` (N,); nats."""
    logits = F.linear(hidden, weight)  # (N, V)
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED)


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same value and gradients as `plain_cross_entropy`, without the (N, V) logits in memory."""
    if torch.is_autocast_enabled(hidden.device.type):
        compute = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(compute), weight.to(compute)
    # Asked here: inside the function grad mode is always off, and needs_input_grad is set under no_grad too.
    loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, torch.is_grad_enabled()
    )
    return loss


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that does not fit a float."""
    return math.exp(loss) if loss < 700 else math.inf


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, needs_grad: bool) -> Tensor:
        counted = targets != IGNORED
        targets = targets.clamp(min=0)
        n = counted.sum()
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        # Cauchy-Schwarz bounds every logit. Where even the bound cannot overflow exp, the usual shift by the row's
        # largest logit, two passes over the logits, is not needed. On a GPU to ask would be to wait.
        shifted = hidden.is_cuda or bool(hidden.norm(dim=1).max() * weight.norm(dim=1).max() > SAFE_LOGIT)
        for first in range(0, len(hidden), ROWS):
            part = slice(first, first + ROWS)
            h, y, keep = hidden[part], targets[part, None], counted[part, None]
            # In base 2, whose exp a CPU computes almost twice as fast: exp(z) = 2^(z · log2 e), and the factor goes to
            # the small side of the product. The result stays unnormalised: 1/sum is applied to the (rows, C) sides of
            # the two products below and not to all V columns. Each saves a pass over the largest tensor there is.
            logits = ((h * LOG2_E) @ weight.T).float()  # (rows, V), in bits
            if shifted:
                logits.sub_(logits.amax(-1, keepdim=True))
            of_target = logits.gather(1, y)
            exps = logits.exp2_()
            total = exps.sum(-1, keepdim=True)
            loss += ((total.log() - of_target / LOG2_E) * keep).sum()
            if grad_hidden is None or grad_weight is None:
                continue
            scale = keep / total
            exps = exps.to(weight.dtype)
            grad_hidden[part] = (exps @ weight) * scale - weight[y[:, 0]] * keep
            if weight.dtype == torch.float32:
                grad_weight.addmm_(exps.T, h * scale)
            else:
                grad_weight += exps.T @ (h * scale).to(weight.dtype)
            grad_weight.index_add_(0, y[:, 0], (h * keep).float(), alpha=-1)
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden.div_(n), grad_weight.div_(n).to(weight.dtype))
        return loss / n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None
