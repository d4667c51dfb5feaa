"""The layers of which blocks are made. B batch, T time, H heads, D head size."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptexp.config.schema import ModelConfig


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
