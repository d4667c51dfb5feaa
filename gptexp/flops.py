"""Counts: parameters, floating-point operations. Closed forms, no torch.

Training FLOPs per token: 6·N for the matrix products (Kaplan et al., arXiv 2001.08361: two per parameter forward,
four backward) plus the attention scores. `palm` counts the full T × T scores (PaLM, arXiv 2204.02311, appendix B),
`causal` the half below the diagonal that a causal kernel computes. N leaves out wpe, which is looked up and never
multiplied, and counts wte once, for lm_head.
"""

from dataclasses import asdict, dataclass
from typing import Any

from gptexp.config import ModelConfig


def count_parameters(m: ModelConfig) -> int:
    """All parameters, the tied head once."""
    per_block = 12 * m.n_embd**2 + (13 if m.bias else 2) * m.n_embd
    final_norm = (2 if m.bias else 1) * m.n_embd
    return (m.vocab_size + m.block_size) * m.n_embd + m.n_layer * per_block + final_norm


def multiplied_parameters(m: ModelConfig) -> int:
    """N: all but wpe."""
    return count_parameters(m) - m.block_size * m.n_embd


def flops_per_token(m: ModelConfig, seq_len: int) -> tuple[int, int]:
    """Training FLOPs per token, forward and backward: (palm, causal)."""
    n = multiplied_parameters(m)
    scores = m.n_layer * m.n_embd * seq_len
    return 6 * n + 12 * scores, 6 * n + 6 * scores


# Dense bfloat16 FLOP/s without sparsity, from NVIDIA's data sheets; SXM parts.
PEAK_FLOPS = {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12, "H800": 989.4e12}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """What one device could do per second at best; None where it is not known, rather than a wrong number."""
    if dtype != "bfloat16" or "PCIe" in device_name or "NVL" in device_name:
        return None
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)


@dataclass(frozen=True)
class Utilisation:
    """What a run's MFU is made of."""

    parameters_counted: int  # N
    flops_per_token_palm: int
    flops_per_token_causal: int
    peak_flops_per_s: float | None  # of all ranks' devices together; None: unknown, so MFU is null
    peak_source: str

    def mfu(self, tokens_per_s: float) -> tuple[float | None, float | None]:
        """Model FLOPs utilisation: (palm, causal)."""
        if self.peak_flops_per_s is None:
            return None, None
        share = tokens_per_s / self.peak_flops_per_s
        return self.flops_per_token_palm * share, self.flops_per_token_causal * share

    def to_dict(self) -> dict[str, Any]:
        """With the formulas, for a run's metadata."""
        return {
            "formula_palm": "(6 N + 12 n_layer n_embd seq_len) tokens_per_s / peak",
            "formula_causal": "(6 N + 6 n_layer n_embd seq_len) tokens_per_s / peak",
            **asdict(self),
        }


def utilisation(
    m: ModelConfig, seq_len: int, device_name: str, dtype: str, world_size: int, measured: float | None
) -> Utilisation:
    """Against what was `measured` on all ranks together, where that was asked for, else against the data sheet."""
    one = peak_flops(device_name, dtype)
    if measured is not None:
        peak, source = measured, "rate of matrix products at the model's own shapes, measured at the start"
    elif one is not None:
        peak, source = one * world_size, f"data sheet: {one / 1e12:g} TFLOP/s of dense {dtype} a device"
    else:
        peak, source = None, f"unknown for {device_name} in {dtype}; log.mfu_peak=measured measures one"
    return Utilisation(multiplied_parameters(m), *flops_per_token(m, seq_len), peak, source)
