"""The block of today, with Llama's names of parameters (Touvron et al. 2023, arXiv 2302.13971).

Each part is chosen once, when the block is built: RMSNorm or LayerNorm, before or after a branch; rotated queries and
keys; grouped queries; a window; a gated MLP or a plain one. config/schema.py gives the sources. B batch, T time,
C n_embd, H n_head, D head size.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptexp.config.schema import ModelConfig
from gptexp.model.attention import Context, attend
from gptexp.model.layers import Linear, build_norm, gelu, lowered, widened
from gptexp.model.parametrisation import attention_scale, residual_factor
from gptexp.model.shapes import BLOCK_NORMS


def rotation(cfg: ModelConfig) -> Tensor:
    """RoPE's cosines and sines, (2, T, 1, D/2): at position t, pair i turns by t · theta^(-2i/D) (arXiv 2104.09864)."""
    # On the CPU, also where a model is built without memory, and in float64, which not every device has.
    even = torch.arange(0, cfg.head_size, 2, dtype=torch.float64, device="cpu")
    frequencies = cfg.rope_theta ** (-even / cfg.head_size)  # radians per token
    if cfg.rope_scaling is not None:
        frequencies = stretched(frequencies, **cfg.rope_scaling)
    angles = torch.arange(cfg.block_size, device="cpu")[:, None, None] * frequencies  # (T, 1, D/2)
    return torch.stack([angles.cos(), angles.sin()]).to(torch.get_default_dtype())


def stretched(
    frequencies: Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Tensor:
    """Llama 3.1's frequencies for a longer context: waves that the original context held less than once are stretched.

    Waves that it held `high_freq_factor` times or more stay, those that it held `low_freq_factor` times or less are
    `factor` times as long, and between them the change is gradual.
    """
    times = original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((times - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + D/2}) of `x` (B, T, H, D) by the angles whose (cos, sin) is `turn` (2, T, 1, D/2)."""
    a, b = widened(x).chunk(2, dim=-1)
    cos, sin = turn
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def keep(x: Tensor, _: None) -> Tensor:
    """What takes the place of `rotate` in a model without RoPE."""
    return x


class Attention(nn.Module):
    """Each of the `kv_heads` heads of keys and values serves H / kv_heads successive heads of queries."""

    def __init__(self, cfg: ModelConfig, window: int | None) -> None:
        super().__init__()
        d, queries, keys = cfg.head_size, cfg.n_head * cfg.head_size, cfg.kv_heads * cfg.head_size
        self.d, self.window, self.scale, self.dropout = d, window, attention_scale(cfg), cfg.dropout
        self.q_proj = Linear(cfg.n_embd, queries, bias=cfg.bias)
        self.k_proj = Linear(cfg.n_embd, keys, bias=cfg.bias)
        self.v_proj = Linear(cfg.n_embd, keys, bias=cfg.bias)
        self.o_proj = Linear(queries, cfg.n_embd, bias=cfg.bias)
        sizes = {"none": (None, None), "head": (d, d), "all": (queries, keys)}[cfg.qk_norm]
        self.q_norm, self.k_norm = (nn.Identity() if size is None else build_norm(cfg, size) for size in sizes)
        self.rows = (1, -1) if cfg.qk_norm == "all" else (-1, d)  # of a token's queries: what a norm is over
        self.rotate: Callable[[Tensor, Any], Tensor] = rotate if cfg.position == "rope" else keep

    def forward(self, x: Tensor, context: Context) -> Tensor:
        b, t, _ = x.shape
        x = lowered(x)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)  # (B, T, H·D), fewer heads for k and v
        q, k = self.q_norm(q.view(b, t, *self.rows)), self.k_norm(k.view(b, t, *self.rows))
        q, k, v = (z.view(b, t, -1, self.d) for z in (q, k, v))  # (B, T, H, D)
        q, k = self.rotate(q, context.turn), self.rotate(k, context.turn)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))  # (B, H, T, D)
        y = attend(q, k, v, context, self.scale, self.dropout if self.training else 0.0, self.window)  # (B, T, H·D)
        return F.dropout(self.o_proj(y), self.dropout, self.training)


def relu2(x: Tensor) -> Tensor:
    """The square of ReLU (So et al. 2021, arXiv 2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "relu2": relu2, "swiglu": F.silu, "geglu": gelu}


class PlainMLP(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.dropout, self.activation = cfg.dropout, ACTIVATIONS[cfg.mlp]
        self.up_proj = Linear(cfg.n_embd, cfg.mlp_size, bias=cfg.bias)
        self.down_proj = Linear(cfg.mlp_size, cfg.n_embd, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.up_proj(x))  # (B, T, mlp_size)
        return F.dropout(self.down_proj(x), self.dropout, self.training)


class GatedMLP(nn.Module):
    """A gate times a second product: SwiGLU and GEGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.dropout, self.activation = cfg.dropout, ACTIVATIONS[cfg.mlp]
        self.gate_proj = Linear(cfg.n_embd, cfg.mlp_size, bias=cfg.bias)
        self.up_proj = Linear(cfg.n_embd, cfg.mlp_size, bias=cfg.bias)
        self.down_proj = Linear(cfg.mlp_size, cfg.n_embd, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = lowered(x)
        x = self.activation(self.gate_proj(x)) * self.up_proj(x)  # (B, T, mlp_size)
        return F.dropout(self.down_proj(x), self.dropout, self.training)


class LlamaBlock(nn.Module):
    """x + norm(attention(norm(x))), then the same with the MLP; where there is no norm, the identity."""

    def __init__(self, cfg: ModelConfig, number: int) -> None:
        """`number` is that of the block, from 0: some blocks may have no window."""
        super().__init__()
        names = BLOCK_NORMS[cfg.residual_norm]
        self.norms = tuple(build_norm(cfg, cfg.n_embd) if name else nn.Identity() for name in names)
        for name, norm in zip(names, self.norms, strict=True):
            if name:
                self.add_module(name, norm)
        self.self_attn = Attention(cfg, cfg.window_of(number))
        self.mlp = GatedMLP(cfg) if cfg.has_gate else PlainMLP(cfg)
        self.residual_factor = residual_factor(cfg)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        y = after_attention(self.self_attn(before_attention(x), context))
        x = torch.add(x, y, alpha=self.residual_factor)
        return torch.add(x, after_mlp(self.mlp(before_mlp(x))), alpha=self.residual_factor)
