"""The kernels of causal attention: torch's, and one of large blocks for a CPU that computes products in bfloat16 fast.

torch's flash kernel for CPUs works on small tiles, on an AMD EPYC with avx512_bf16 at a third of the rate of large
products. Here all heads of a block of queries, or of keys, are one product, and compiled functions pass over its result
once: at 12 heads of 1,024 tokens it takes three quarters of flash's time. Like flash
(arXiv 2205.14135, appendix B), the forward pass keeps the output and one number per row, and the backward pass computes
the scores again. B batch, H heads, T time, D head size, Z = B·H.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptexp.model.compiler import compiled
from gptexp.model.loss import LOG2_E

BLOCK = 256  # queries or keys

Attention = Callable[..., Tensor]  # with the arguments of `scaled_dot_product_attention`


@dataclass(frozen=True)
class Kernel:
    backend: SDPBackend | None  # None: gptexp's own
    float32_on: tuple[str, ...]  # devices on which it supports float32


KERNELS = {
    "cudnn": Kernel(SDPBackend.CUDNN_ATTENTION, ()),
    "flash": Kernel(SDPBackend.FLASH_ATTENTION, ("cpu",)),
    "efficient": Kernel(SDPBackend.EFFICIENT_ATTENTION, ("cuda",)),
    "math": Kernel(SDPBackend.MATH, ("cuda", "cpu", "mps")),
    "blocked": Kernel(None, ("cpu",)),
}


def attention_kernel(name: str, asked: bool, device: str) -> AbstractContextManager[object]:
    """A context in which torch's attention uses kernel `name`. Unless it was `asked` for, others serve as fallback.

    It must contain the backward pass, because a checkpointed block recomputes its attention there.
    """
    first = KERNELS[name].backend
    # On a CPU torch tries flash first, whatever the order; and math needs no fallback.
    only = asked or (device, name) == ("cpu", "math")
    if first is None or (not only and device != "cuda"):
        return nullcontext()  # torch chooses the kernel, if it is to compute attention
    others = [] if only else [k.backend for k in KERNELS.values() if k.backend not in (None, first)]
    return sdpa_kernel([first, *others], set_priority=True)


def attention_function(kernel: str) -> Attention:
    """The function that computes attention with `kernel`, a value of `train.attention`."""
    return blocked_attention if kernel == "blocked" else F.scaled_dot_product_attention


def blocked_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """`scaled_dot_product_attention` of `q`, `k` and `v` (B, H, T, D), in blocks if it is causal and trained.

    Needs a compiler. Otherwise (no gradients, not causal, dropout) torch computes it with a kernel that it chooses.
    """
    trained = torch.is_grad_enabled() and any(z.requires_grad for z in (q, k, v))
    if dropout_p or not is_causal or not trained:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    # Contiguous once for both passes. In a compiled model the pass that adds their bias writes them so.
    q, k, v = (z.contiguous() for z in (q, k, v))
    out: Tensor = _forward(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)[0]
    return out


@torch.library.custom_op("gptexp::blocked_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, D), and log2 of the sums of exp(scores) (Z, T, 1), float32."""
    out, log_sum = _empty(q)
    q, k, v = (_flat(z) for z in (q, k, v))
    for first in range(0, q.shape[1], BLOCK):
        rows = slice(first, first + BLOCK)
        of_rows, log_sum[:, rows] = _of_queries(q[:, rows], k[:, : rows.stop], v[:, : rows.stop], scale)
        out[:, :, rows] = of_rows.view(out[:, :, rows].shape)
    return out, log_sum


def _empty(q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the results of `_forward`. The output lies in memory as (B, T, H, D), as a layer goes on with it."""
    b, h, t, d = q.shape
    return q.new_empty((b, t, h, d)).transpose(1, 2), q.new_empty((b * h, t, 1), dtype=torch.float32)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _empty(q)


@torch.library.custom_op("gptexp::blocked_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, qkv: list[Tensor], out: Tensor, log_sum: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `qkv`, the queries, keys and values, for the gradient `grad` of `out`."""
    shape, along = grad.shape, _flat((grad.float() * out).sum(-1, keepdim=True))
    grad, q, k, v = (_flat(z) for z in (grad, *qkv))
    # A block of keys has all rows from its own first on, so its gradients are complete, and only that of q is a sum.
    grad_q = torch.zeros_like(q, dtype=torch.float32)
    grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
    for first in range(0, q.shape[1], BLOCK):
        keys, rows = slice(first, first + BLOCK), slice(first, None)
        of_q, grad_k[:, keys], grad_v[:, keys] = _of_keys(
            grad[:, rows].contiguous(),
            q[:, rows].contiguous(),
            k[:, keys].contiguous(),
            v[:, keys],
            (log_sum[:, rows], along[:, rows]),
            scale,
        )
        grad_q[:, rows] += of_q
    return grad_q.to(q.dtype).view(shape), grad_k.view(shape), grad_v.view(shape)


@_backward.register_fake
def _(grad: Tensor, qkv: list[Tensor], out: Tensor, log_sum: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


@once_differentiable
def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *qkv, out, log_sum = ctx.saved_tensors
    return *_backward(grad, qkv, out, log_sum, ctx.scale), None


_forward.register_autograd(_gradient, setup_context=_keep)


def _flat(z: Tensor) -> Tensor:
    """(B, H, T, D) as (Z, T, D), contiguous."""
    return z.reshape(-1, *z.shape[2:]).contiguous()


def _of_queries(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output (Z, N, D) of N queries, and log2 of their sums of exp(scores) (Z, N, 1).

    The keys and values (Z, M, D) are those of all tokens up to the last query.
    """
    n = q.shape[1]
    scores = q @ k.mT
    scores[:, :, -n:] += torch.full((n, n), -math.inf, dtype=q.dtype).triu_(1)
    exps, total, log_sum = compiled(_exps, dynamic=True)(scores.flatten(0, 1), scale * LOG2_E)
    return exps.view(scores.shape) @ v / total.view(-1, n, 1), log_sum.view(-1, n, 1)


def _of_keys(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: tuple[Tensor, Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of M keys and values, and what these keys add to the gradient of the queries, which comes first.

    The N queries, with the gradient `grad` of their output (Z, N, D), are those of all tokens from the first key on.
    `sums`, each (Z, N, 1): log2 of the sums of exp(scores); the sum over D of the output times `grad`.
    """
    scores, of_exps = q @ k.mT, grad @ v.mT
    arguments = (z.flatten(0, 1) for z in (scores, of_exps, *sums))
    exps, of_scores = (z.view(scores.shape) for z in compiled(_gradients, dynamic=True)(*arguments, scale))
    for z in (exps, of_scores):
        z[:, : k.shape[1]].tril_()  # no query sees the keys after it
    return of_scores @ k, of_scores.mT @ q, exps.mT @ grad


# These get two dimensions, (Z·N, M), so that one graph serves nearly all sizes.


def _exps(scores: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(2^(scale·scores) divided by its row's maximum, the sums of the rows, log2 of the sums of 2^(scale·scores))."""
    largest = scores.amax(-1, keepdim=True).float()
    exps = ((scores.float() - largest) * scale).exp2().to(scores.dtype)
    total = exps.float().sum(-1, keepdim=True)
    return exps, total, largest * scale + total.log2()


def _gradients(scores: Tensor, of_exps: Tensor, log_sum: Tensor, along: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The softmax, and the gradient of `scores`, for the gradient `of_exps` of the softmax."""
    exps = (scores.float() * (scale * LOG2_E) - log_sum).exp2()
    return exps.to(scores.dtype), (exps * (of_exps.float() - along) * scale).to(scores.dtype)
