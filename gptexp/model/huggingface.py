"""Models as Hugging Face's transformers stores them: the names and layouts of weights.

transformers has `transformer.` in front of each name of GPT-2, and `model.` in front of the others' but for lm_head.
The matrices of GPT-2's block belong to a Conv1D, whose weight is (in, out), the transpose of ours. A head that is tied
to the embedding is not stored. Files of the hub may lack the prefix, and some hold the causal masks (`attn.bias`,
`attn.masked_bias`) or RoPE's frequencies, which are no weights.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gptexp.config.schema import ModelConfig
from gptexp.config.transformers_json import family_of
from gptexp.model.parametrisation import attention_scale, output_factor, residual_factor
from gptexp.model.shapes import BLOCK_NORMS, every_parameter, names_of

PREFIXES = ("transformer.", "model.")
HEAD = "lm_head.weight"
_TRANSPOSED = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
_WRAPPERS = re.compile(r"\b(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_NO_WEIGHT = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|.*rotary_emb\.inv_freq")


def as_standard(weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Weights with which a `GPT` of the standard parametrisation computes the same as `model` with `weights`.

    A factor goes into the last weights that it can go into: that of attention into the queries or their norm, that of
    the branches into the matrix or the norm at their end, that of the logits into the final norm, because the head, the
    other candidate, may also be the embedding. Norms get the weights that they lack.
    """
    scale = attention_scale(model)
    query = 1.0 if scale is None else scale * model.head_size**0.5
    full = {**weights, **({} if model.norm_weight else _ones(model, weights))}
    after = [norm for norm in BLOCK_NORMS[model.residual_norm][1::2] if norm and not model.is_gpt2]
    of_branch = [f".{norm}." for norm in after] or [".c_proj.", ".o_proj.", ".down_proj."]
    of_query = ".q_norm." if model.qk_norm != "none" else ".q_proj."
    converted = {}
    for name, weight in full.items():
        if name.startswith(f"{names_of(model).norm}."):
            weight = output_factor(model) * weight
        elif any(part in name for part in of_branch):
            weight = residual_factor(model) * weight
        elif query != 1 and ".attn.c_attn." in name:
            weight = torch.cat([query * weight[: model.n_embd], weight[model.n_embd :]])
        elif query != 1 and of_query in name:
            weight = query * weight
        converted[name] = weight
    return converted


def _ones(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that the norms of `model` lack: each is 1."""
    like = next(iter(weights.values()))
    with_norms = every_parameter(replace(model, norm_weight=True))
    return {
        name: like.new_ones(shape) for name, shape in with_norms if name not in weights and name.endswith("norm.weight")
    }


def to_transformers(weights: Mapping[str, Tensor], model: ModelConfig, n_vocab: int) -> dict[str, Tensor]:
    """The weights of a `GPT` of `model` for transformers, with the first `n_vocab` ids: the others are padding.

    transformers' models are of the standard parametrisation, and its GPT-2 always has biases: those that `model` lacks
    are zero. Raises `ConfigError` if transformers has no such model.
    """
    is_gpt2, names, converted = family_of(model) == "gpt2", names_of(model), dict[str, Tensor]()
    for name, weight in as_standard(weights, model).items():
        if name == HEAD and model.tied:
            continue
        if name in (HEAD, f"{names.tokens}.weight"):
            weight = weight[:n_vocab]
        stored = name if name == HEAD else PREFIXES[not is_gpt2] + name
        converted[stored] = (weight.T if _TRANSPOSED.fullmatch(name) else weight).contiguous()
        bias = name.removesuffix("weight") + "bias"
        looked_up = name == HEAD or name.startswith((names.tokens, names.positions))
        if is_gpt2 and name.endswith("weight") and not looked_up and bias not in weights:
            converted[PREFIXES[0] + bias] = torch.zeros(weight.shape[0])
    return converted


def from_transformers(weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The weights of transformers' model for a `GPT` of `model`, without a head that is tied to the embedding.

    Nothing is copied. Raises `ValueError` if the head of a tied model differs from the embedding.
    """
    return {
        name: weight.T if _TRANSPOSED.fullmatch(name) and weight.dim() == 2 else weight
        for name, weight in from_nanogpt(weights, model).items()
    }


def from_nanogpt(weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The weights of nanoGPT's model for a `GPT` of `model`. Raises `ValueError` as `from_transformers` does.

    Wrappers' parts of a name are left out: `_orig_mod.` of `torch.compile`, `module.` of DDP, and others of torch.
    """
    converted: dict[str, Tensor] = {}
    for name, weight in weights.items():
        plain = _WRAPPERS.sub("", name)
        for prefix in PREFIXES:
            plain = plain.removeprefix(prefix)
        if plain in converted:
            raise ValueError(f"has the weight {plain} twice, also as {name}; give another model")
        if not _NO_WEIGHT.fullmatch(plain):
            converted[plain] = weight
    embedding = f"{names_of(model).tokens}.weight"
    head = converted.pop(HEAD, None) if model.tied else None
    if head is not None and not torch.equal(head, converted.get(embedding, head)):
        raise ValueError(
            f"{HEAD} differs from {embedding}, and its config says that they are one matrix; give another model"
        )
    return converted
