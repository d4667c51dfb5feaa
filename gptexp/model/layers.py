"""The layers of which blocks are made. B batch, T time, H heads, D head size."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptexp.config.schema import ModelConfig
from gptexp.model.attention import causal_attention


class Linear(nn.Linear):
    """`nn.Linear`, but a compiled model on a CPU adds the bias in an operation of its own.

    The compiler makes this addition part of the next pass over the result, whereas a product with a bias would first
    fill its result with the bias. (If `x` had two dimensions, the compiler would merge product and addition again.) On
    a GPU the compiler itself chooses between the two.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None or not x.is_cpu or not torch.compiler.is_compiling():
            return super().forward(x)
        y = F.linear(x, self.weight)
        return y + self.bias.to(y.dtype)  # autocast does not convert the operands of an addition


def lowered(x: Tensor) -> Tensor:
    """`x` in the type of autocast, where several linear layers read it: each would convert and keep it."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def widened(x: Tensor) -> Tensor:
    """`x` in float32, or in its own type if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` in the type of its input. The weights of a split model may have another type."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019, arXiv 1910.07467), in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def gelu(x: Tensor) -> Tensor:
    """GELU with tanh. A compiler gets it as x·σ(2u): tanh(u) = 2σ(2u) - 1, and σ takes a CPU half the time of tanh."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def build_norm(cfg: ModelConfig, size: int) -> nn.Module:
    """The norm of `cfg` over the last dimension, which has this size."""
    if cfg.norm == "rmsnorm":
        return RMSNorm(size, cfg.norm_eps, elementwise_affine=cfg.norm_weight)
    return LayerNorm(size, cfg.norm_eps, elementwise_affine=cfg.norm_weight, bias=cfg.bias)


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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None = None) -> Tensor:
        """Add the keys and values of T tokens, and attend with their queries to all so far, or the newest `window`.

        Queries are (B, H, T, D); keys and values may have fewer heads. The scale None is torch's default.
        """
        is_first = self.length == 0
        keys, values = self.append(k, v)
        with torch.autocast(q.device.type, enabled=False):  # it would convert all keys and values for each token
            if is_first:
                return causal_attention(q.to(keys.dtype), keys, values, scale, window=window)
            newest = slice(None if window is None else -window, None)
            # The queries that share a head of keys are its only queries: no mask, and no copies of the keys.
            grouped = q.to(keys.dtype).unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # (B, heads of keys, H / …, D)
            y = F.scaled_dot_product_attention(grouped, keys[:, :, newest], values[:, :, newest], scale=scale)
            return y.view(q.shape)
