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

SAFE_LOGIT = 60.0  # exp(±60) and a sum of 10^11 such are ordinary float32 numbers
LOG2_E = math.log2(math.e)
COMPILED_CHUNKS = 8
IGNORED = -1  # a target that counts for nothing: padding

Scratch = tuple[Tensor, Tensor] | None


def plain_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of the rows of `hidden` (N, C) under the head `weight` (V, C) and `targets` (N,); nats."""
    logits = F.linear(hidden, weight)  # (N, V)
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED)


class ChunkedCrossEntropy:
    """The same value and gradients as `plain_cross_entropy`, without the (N, V) logits in memory.

    Keeps the memory of one chunk's logits from call to call: fresh memory of that size costs more time in page faults
    than the logits in arithmetic, and leaves holes that fill with what lives longer.
    """

    def __init__(self) -> None:
        self._scratch: Scratch = None

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of the rows of `hidden` (N, C) under the head `weight` (V, C) and `targets` (N,); nats."""
        if torch.is_autocast_enabled(hidden.device.type):
            compute = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(compute), weight.to(compute)
        # Asked here: inside the function grad mode is always off, and needs_input_grad is set under no_grad too.
        loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, weight, targets, torch.is_grad_enabled(), self._logits(len(hidden), weight)
        )
        return loss

    def _logits(self, tokens: int, weight: Tensor) -> Scratch:
        """(R, V) in the compute type and in float32, one tensor where that is the same; None for a compiler."""
        if torch.compiler.is_compiling():
            return None
        shape = (chunk_rows(tokens, weight.device.type, compiled=False), len(weight))
        if self._scratch is None or (self._scratch[0].shape, self._scratch[0].dtype) != (shape, weight.dtype):
            self._scratch = None  # before the new one is there
            low = weight.new_empty(shape)
            self._scratch = (low, low.float())
        return self._scratch


def chunk_rows(tokens: int, device: str, compiled: bool) -> int:
    """How many rows of logits there are at a time: 100 MB in float32, on a GPU, to fill it, 800 MB.

    A compiler unrolls the loop over the chunks and takes 3 s for each: it gets few, each of more rows.
    """
    rows = min(tokens, 4096 if device == "cuda" else 512)
    return max(rows, math.ceil(tokens / COMPILED_CHUNKS)) if compiled else rows


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that does not fit a float."""
    return math.exp(loss) if loss < 700 else math.inf


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, needs_grad: bool, scratch: Scratch
    ) -> Tensor:
        counted = targets != IGNORED
        targets = targets.clamp(min=0)
        n = counted.sum()
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        # Cauchy-Schwarz bounds every logit. Where even the bound cannot overflow exp, the usual shift by the row's
        # largest logit, two passes over the logits, is not needed. On a GPU to ask would be to wait, and a compiled
        # graph cannot branch on the answer.
        unbounded = torch.compiler.is_compiling() or hidden.is_cuda
        shifted = unbounded or bool(hidden.norm(dim=1).max() * weight.norm(dim=1).max() > SAFE_LOGIT)
        rows = chunk_rows(len(hidden), hidden.device.type, torch.compiler.is_compiling())
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            into = None if grad_hidden is None or grad_weight is None else (grad_hidden[part], grad_weight)
            loss += _chunk(hidden[part], weight, targets[part, None], counted[part, None], shifted, into, scratch)
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden.div_(n), grad_weight.div_(n).to(weight.dtype))
        return loss / n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None, None


def _chunk(
    h: Tensor,
    weight: Tensor,
    y: Tensor,
    keep: Tensor,
    shifted: bool,
    into: tuple[Tensor, Tensor] | None,
    scratch: Scratch,
) -> Tensor:
    """Summed loss of the rows `h` (R, C) with targets `y` (R, 1), of which `keep` (R, 1) says which count.

    `into`: where to write the rows' gradient and to add the weight's; `scratch`: where to put the logits.
    """
    # In base 2, whose exp a CPU computes almost twice as fast: exp(z) = 2^(z · log2 e), and the factor goes to the
    # small side of the product. The result stays unnormalised: 1/sum is applied to the (R, C) sides of the two products
    # below and not to all V columns. Each saves a pass over the largest tensor there is.
    h_bits, narrow = h * LOG2_E, weight.dtype != torch.float32
    if scratch is None:
        low = h_bits @ weight.T
        logits = low.float()
    else:
        low = torch.mm(h_bits, weight.T, out=scratch[0][: len(h)])  # (R, V), in bits
        logits = scratch[1][: len(h)].copy_(low) if narrow else low
    if shifted:
        logits.sub_(logits.amax(-1, keepdim=True))
    of_target = logits.gather(1, y)
    exps = logits.exp2_()
    total = exps.sum(-1, keepdim=True)
    loss = ((total.log() - of_target / LOG2_E) * keep).sum()
    if into is None:
        return loss
    grad_hidden, grad_weight = into
    scale = keep / total
    if narrow:
        exps = low.copy_(exps)
    grad_hidden.copy_((exps @ weight) * scale - weight[y[:, 0]] * keep)
    if narrow:
        grad_weight += exps.T @ (h * scale).to(weight.dtype)
    else:
        grad_weight.addmm_(exps.T, h * scale)
    grad_weight.index_add_(0, y[:, 0], (h * keep).float(), alpha=-1)
    return loss
