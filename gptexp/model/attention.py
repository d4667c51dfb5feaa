"""Causal attention: within windows and documents, and with the keys of earlier tokens in a cache.

B batch, T time, H heads, D head size. Keys and values may have fewer heads, each for as many successive heads of
queries. The scale None is torch's default, 1 / sqrt(D).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

QUERIES = 256  # in a chunk, where attention has a mask: only the keys that a chunk may see are read

Masks = Sequence[Tensor] | BlockMask


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float = 0.0, masks: Masks | None = None
) -> Tensor:
    """Attention of the queries (B, H, T, D) of all tokens to themselves and to earlier tokens; returns the same shape.

    `masks` are those of `build_masks` or, without dropout, `build_block_mask`; None: a token sees all earlier ones.
    `dropout` is a probability.
    """
    is_grouped = q.shape[1] != k.shape[1]
    if isinstance(masks, BlockMask):
        y: Tensor = flex_attention(q, k, v, block_mask=masks, scale=scale, enable_gqa=is_grouped)
        return y
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scale, "enable_gqa": is_grouped}
    if masks is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    parts, end = [], 0
    for mask in masks:
        first, end = end, end + mask.shape[-2]
        keys = slice(end - mask.shape[-1], end)
        seen = k[:, :, keys], v[:, :, keys], mask.to(q.dtype)
        parts.append(F.scaled_dot_product_attention(q[:, :, first:end], *seen, **options))
    return torch.cat(parts, dim=2)


def chunks(t: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield the chunks of `t` queries: the first key that one of them sees, the first query, and the end of both."""
    for first in range(0, t, QUERIES):
        yield 0 if window is None else max(0, first - window + 1), first, min(first + QUERIES, t)


def build_masks(t: int, window: int | None, documents: Tensor | None, like: Tensor) -> list[Tensor] | None:
    """What each chunk of queries adds to its scores: 0, and minus infinity for keys that a query does not see.

    A token sees at most the last `window` tokens, itself included, and none whose number in `documents` (B, T) differs
    from its own. A mask is (queries, keys), or with documents (B, 1, queries, keys), in the type of `like` and on its
    device; its keys end where its queries do. None: every earlier token is seen, which needs no mask.
    """
    if documents is None and (window is None or window >= t):
        return None
    masks, position = [], torch.arange(t, device=like.device)
    for start, first, end in chunks(t, window):
        queries, keys = slice(first, end), slice(start, end)
        distance = position[queries, None] - position[keys]
        seen = (distance >= 0) & (distance < (window or t))
        if documents is not None:
            seen = seen & (documents[:, None, queries, None] == documents[:, None, None, keys])
        masks.append(torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, -torch.inf))
    return masks


def build_block_mask(t: int, window: int | None, documents: Tensor | None, like: Tensor) -> BlockMask | None:
    """The mask of `build_masks` for FlexAttention, which reads only the blocks of 128 keys that some query may see."""
    if documents is None and (window is None or window >= t):
        return None

    def is_seen(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (query - key < (window or t))
        return seen if documents is None else seen & (documents[row, query] == documents[row, key])

    rows = None if documents is None else documents.shape[0]
    return create_block_mask(is_seen, rows, None, t, t, device=like.device)


class LayerCache:
    """Keys and values of all tokens so far in one attention layer, for generation.

    It has room for `capacity` tokens of each of `rows` texts. The first tokens, the prompt, come at once and may be one
    text that all rows share; each later call adds one token a row.

    On a CPU they are kept in float32: torch's attention of one query with 256 keys takes 0.03 ms, and 0.25 in bfloat16;
    with 1,000 keys 0.13 and 1.1. So a token after 1,000 others takes four texts 39 ms and not 75, one text 24 and not
    32 (GPT-2 124M with weights in bfloat16, one core of an AMD EPYC, torch 2.13).
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity, self.length = rows, capacity, 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values (B, H, T, D) of T tokens. Returns those of all tokens so far, (B, H, length, D)."""
        b, h, t, d = k.shape
        if self.length and t > 1:
            raise ValueError(f"{t} tokens after {self.length} in the cache: add one at a time, or use a new cache")
        if not self.length:  # autocast decides the type of the keys, so the memory is allocated here
            dtype = torch.float32 if k.is_cpu else k.dtype
            self.keys, self.values = (z.new_empty(self.rows, h, self.capacity, d, dtype=dtype) for z in (k, v))
        start, self.length = self.length, self.length + t
        self.keys[:, :, start : self.length] = k  # one shared text fills all rows
        self.values[:, :, start : self.length] = v
        return self.keys[:b, :, : self.length], self.values[:b, :, : self.length]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, masks: Masks | None, window: int | None
    ) -> Tensor:
        """Add the keys and values of T tokens, and attend with their queries to all so far, or the newest `window`."""
        is_first = self.length == 0
        keys, values = self.append(k, v)
        with torch.autocast(q.device.type, enabled=False):  # it would convert all keys and values for each token
            if is_first:
                return causal_attention(q.to(keys.dtype), keys, values, scale, masks=masks)
            newest = slice(None if window is None else -window, None)
            # The queries that share a head of keys are its only queries: no mask, and no copies of the keys.
            grouped = q.to(keys.dtype).unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # (B, heads of keys, H / …, D)
            y = F.scaled_dot_product_attention(grouped, keys[:, :, newest], values[:, :, newest], scale=scale)
            return y.reshape(q.shape)


class Context(NamedTuple):
    """What a block needs beside the residual stream."""

    turn: Tensor | None = None  # RoPE's cosines and sines at the tokens' positions, (2, T, 1, D / 2); None: no RoPE
    masks: Mapping[int | None, Masks | None] = {}  # a block's window -> its masks, which its blocks share
    cache: LayerCache | None = None


def attend(
    q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float | None, dropout: float, window: int | None = None
) -> Tensor:
    """Attention in a block, with the cache if there is one; returns (B, T, H · D)."""
    masks = context.masks.get(window)
    if context.cache is None:
        y = causal_attention(q, k, v, scale, dropout, masks)
    else:
        y = context.cache.attend(q, k, v, scale, masks, window)
    return y.transpose(1, 2).flatten(2)
