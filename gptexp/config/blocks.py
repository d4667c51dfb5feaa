"""A model's block in words. No torch."""

from gptexp.config.parts import TARGET, is_part
from gptexp.config.schema import ModelConfig
from gptexp.process.words import counted

_MLPS = {"gelu": "GELU", "relu2": "ReLU²", "swiglu": "SwiGLU", "geglu": "GEGLU"}
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
_PLACES = {"pre": "", "post": " after the branches", "pre_post": " before and after the branches"}


def in_words(m: ModelConfig) -> str:
    """How the model differs from GPT-2: `RoPE, RMSNorm, SwiGLU of 2,048, …`; empty for GPT-2."""
    if is_part(m):
        return f"{getattr(m, TARGET)}, which gptexp knows as a whole"
    if m.is_gpt2:
        parts = [f"MLP of {m.mlp_size:,}" if m.mlp_size != 4 * m.n_embd else ""]
    else:
        theta = f" (theta {m.rope_theta:,.15g}{', scaled' if m.rope_scaling else ''})"
        full = range(m.window_every or 1, m.n_layer + 1, m.window_every or 1)
        besides = f" (none in block {', '.join(map(str, full))})" if m.window_every else ""
        parts = [
            {"rope": f"RoPE{theta}", "learned": "learned positions", "none": "no positions"}[m.position],
            f"{_NORMS[m.norm]}{'' if m.norm_weight else ' without weights'}{_PLACES[m.residual_norm]}",
            {"none": "", "head": "norm of each query and key", "all": "norm of queries and keys"}[m.qk_norm],
            f"{_MLPS[m.mlp]} of {m.mlp_size:,}",
            counted(m.kv_heads, "head") + " of keys" if m.kv_heads != m.n_head else "",
            f"heads of {m.head_size}" if m.head_size * m.n_head != m.n_embd else "",
            f"window of {m.window:,}{besides}" if m.window is not None else "",
        ]
    parts.append("" if m.tied else "untied head")
    parts.append(f"logits below {m.logit_softcap:g}" if m.logit_softcap is not None else "")
    return ", ".join(part for part in parts if part)
