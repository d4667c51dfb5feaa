"""Causal attention, also within windows and documents, and the choice of torch's kernel for it in a context.

Our own CPU kernel, made of products of blocks of 256 queries or keys, has been removed. On two cores of an Intel Xeon
with AMX (torch 2.13, heads of 64 numbers, forward and backward, least CPU time) it took 1.08 times flash's time in
bfloat16 at 256 tokens, 1.29 at 1,024 and 1.15 at 4,096, and 1.4 to 1.8 times in float32. On an AMD EPYC it was faster:
148 ms in place of 207 for a layer of GPT-2 124M with 4 × 1,024 tokens, 7% of a compiled step.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

QUERIES = 256  # in a chunk, where attention has a mask: only the keys that a chunk may see are read


@dataclass(frozen=True)
class Kernel:
    backend: SDPBackend
    float32_on: tuple[str, ...]  # devices on which it supports float32


KERNELS = {
    "cudnn": Kernel(SDPBackend.CUDNN_ATTENTION, ()),
    "flash": Kernel(SDPBackend.FLASH_ATTENTION, ("cpu",)),
    "efficient": Kernel(SDPBackend.EFFICIENT_ATTENTION, ("cuda",)),
    "math": Kernel(SDPBackend.MATH, ("cuda", "cpu", "mps")),
}


def attention_kernel(name: str, asked: bool, device: str) -> AbstractContextManager[object]:
    """A context in which attention uses kernel `name`. Unless it was `asked` for, other kernels serve as fallback.

    The context must contain the backward pass, because a checkpointed block recomputes its attention there.
    """
    first = KERNELS[name].backend
    # On a CPU torch tries flash first, whatever the order; and math needs no fallback.
    only = asked or (device, name) == ("cpu", "math")
    if not only and device != "cuda":
        return nullcontext()
    others = [] if only else [k.backend for k in KERNELS.values() if k.backend != first]
    return sdpa_kernel([first, *others], set_priority=True)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    dropout: float = 0.0,
    window: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Attention of each token to itself and to earlier tokens; returns (B, H, T, D).

    Queries are (B, H, T, D); keys and values may have fewer heads, each for as many successive heads of queries. The
    scale of q·k None is 1 / sqrt(D). `dropout` is a probability. A token sees at most the last `window` tokens, itself
    included, and none whose number in `documents` (B, T) differs from its own.
    """
    t, grouped = q.shape[2], q.shape[1] != k.shape[1]
    if documents is None and (window is None or window >= t):
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped
        )
    parts = []
    for first in range(0, t, QUERIES):
        end = min(first + QUERIES, t)
        start = 0 if window is None else max(0, first - window + 1)
        queries, keys = slice(first, end), slice(start, end)
        mask = _mask(queries, keys, window, documents, q.device)
        parts.append(
            F.scaled_dot_product_attention(
                q[:, :, queries], k[:, :, keys], v[:, :, keys], mask, dropout, scale=scale, enable_gqa=grouped
            )
        )
    return torch.cat(parts, dim=2)


def _mask(queries: slice, keys: slice, window: int | None, documents: Tensor | None, device: torch.device) -> Tensor:
    """Which keys these queries see: (queries, keys), or with documents (B, 1, queries, keys)."""
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    if documents is not None:
        mask = mask & (documents[:, None, queries, None] == documents[:, None, None, keys])
    return mask
