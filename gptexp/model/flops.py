"""Closed forms of the number of parameters and floating-point operations, and MFU. No torch.

Training FLOPs per token: 6·N for the matrix products (Kaplan et al., arXiv 2001.08361: two per parameter forward,
four backward) plus the attention scores. `palm` counts the full T × T scores (PaLM, arXiv 2204.02311, appendix B),
`causal` the half below the diagonal, which a causal kernel computes. N excludes embeddings, which are never multiplied,
and counts the head, also if it is the embedding of tokens.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from gptexp.config.parts import is_part
from gptexp.config.schema import ModelConfig
from gptexp.model.gpus import gpu_of
from gptexp.model.shapes import count_parameters, names_of, parameter_shapes


def multiplied_parameters(m: ModelConfig) -> int:
    """N: the number of parameters without embeddings, which are not multiplied, but with the head.

    All parameters of a model of the user's own, whose embeddings are not known.
    """
    if is_part(m):
        return count_parameters(m)
    tokens, positions, *_ = names_of(m)
    looked_up = {f"{positions}.weight", *(() if m.tied else (f"{tokens}.weight",))}
    return sum(math.prod(shape) * count for name, shape, count in parameter_shapes(m) if name not in looked_up)


def flops_per_token(m: ModelConfig, seq_len: int) -> tuple[int, int]:
    """Training FLOPs per token, forward and backward, as (palm, causal).

    Within a window w, palm counts w keys for each token; a causal kernel computes w - w² / 2T of them on average.
    """
    if is_part(m):
        return (6 * count_parameters(m),) * 2
    n, width = multiplied_parameters(m), m.n_head * m.head_size
    windows = [min(m.window_of(number) or seq_len, seq_len) for number in range(m.n_layer)]
    palm = 12 * width * sum(windows)
    causal = 12 * width * sum(2 * seq_len * w - w * w for w in windows) // (2 * seq_len)
    return 6 * n + palm, 6 * n + causal


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of one device, or None if it is unknown."""
    gpu = gpu_of(device_name)
    return gpu.peak_flops if gpu is not None and dtype == "bfloat16" else None


@dataclass(frozen=True)
class Utilisation:
    """The constants from which the MFU of a run is computed."""

    parameters_counted: int  # N
    flops_per_token_palm: int
    flops_per_token_causal: int
    peak_flops_per_s: float | None  # sum over all ranks' devices; None: unknown, and MFU is null
    peak_source: str

    def mfu(self, tokens_per_s: float) -> tuple[float | None, float | None]:
        """Model FLOPs utilisation, as (palm, causal)."""
        if self.peak_flops_per_s is None:
            return None, None
        share = tokens_per_s / self.peak_flops_per_s
        return self.flops_per_token_palm * share, self.flops_per_token_causal * share

    def to_dict(self) -> dict[str, Any]:
        """The fields and the formulas, for a run's metadata."""
        return {
            "formula_palm": "(6 N + 12 n_head head_dim · sum over layers of w) tokens_per_s / peak",
            "formula_causal": "(6 N + 6 n_head head_dim · sum over layers of w (2 - w / seq_len)) tokens_per_s / peak",
            "w": "the window of a layer, or seq_len",
            **asdict(self),
        }


def utilisation(
    m: ModelConfig, seq_len: int, device_name: str, dtype: str, world_size: int, measured: float | None
) -> Utilisation:
    """Build the `Utilisation` of a run. `measured` is the peak of all ranks in FLOP/s; None: from the data sheet."""
    per_device = peak_flops(device_name, dtype)
    if measured is not None:
        peak, source = measured, "rate of matrix products at the model's own shapes, measured at the start"
    elif per_device is not None:
        peak, source = per_device * world_size, f"data sheet: {per_device / 1e12:g} TFLOP/s of dense {dtype} a device"
    else:
        peak, source = None, f"unknown for {device_name} in {dtype}; log.mfu_peak=measured measures one"
    return Utilisation(multiplied_parameters(m), *flops_per_token(m, seq_len), peak, source)
