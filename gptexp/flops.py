"""Counts: parameters, floating-point operations. Closed forms, no torch.

Training FLOPs per token: 6·N for the matrix products (Kaplan et al., arXiv 2001.08361: two per parameter forward,
four backward) plus the attention scores. `palm` counts the full T × T scores (PaLM, arXiv 2204.02311, appendix B),
`causal` the half below the diagonal that a causal kernel computes. N leaves out wpe, which is looked up and never
multiplied, and counts wte once, for lm_head.
"""

from gptexp.config import ModelConfig


def count_parameters(m: ModelConfig) -> int:
    """All parameters, the tied head once."""
    per_block = 12 * m.n_embd**2 + (13 if m.bias else 2) * m.n_embd
    final_norm = (2 if m.bias else 1) * m.n_embd
    return (m.vocab_size + m.block_size) * m.n_embd + m.n_layer * per_block + final_norm


def flops_per_token(m: ModelConfig, seq_len: int) -> tuple[int, int]:
    """Training FLOPs per token, forward and backward: (palm, causal)."""
    n = count_parameters(m) - m.block_size * m.n_embd
    scores = m.n_layer * m.n_embd * seq_len
    return 6 * n + 12 * scores, 6 * n + 6 * scores


# Dense bfloat16 FLOP/s without sparsity, from NVIDIA's data sheets; SXM parts.
PEAK_FLOPS = {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12, "H800": 989.4e12}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """What one device could do per second at best; None where it is not known, rather than a wrong number."""
    if dtype != "bfloat16" or "PCIe" in device_name or "NVL" in device_name:
        return None
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)
