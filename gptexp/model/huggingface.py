"""GPT-2 as Hugging Face's transformers stores it: the names and layouts of weights.

transformers has `transformer.` in front of each name. The matrices of a block belong to a Conv1D, whose weight is
(in, out), the transpose of ours. lm_head is tied to wte and not stored. Files of the hub lack the prefix, and some hold
the causal masks (`attn.bias`, `attn.masked_bias`), which are no weights.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from gptexp.config.schema import ModelConfig
from gptexp.model.parametrisation import attention_scale, output_factor, residual_factor

PREFIX = "transformer."
TIED = "lm_head.weight"
_TRANSPOSED = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
_WRAPPERS = re.compile(r"\b(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


def as_standard(weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Weights with which a `GPT` of the standard parametrisation computes the same as `model` with `weights`.

    The factor of attention goes into the queries, that of the branches into c_proj, and that of the logits into ln_f,
    because wte, the other candidate, is also the embedding.
    """
    scale = attention_scale(model)
    query_factor = 1.0 if scale is None else scale * (model.n_embd / model.n_head) ** 0.5
    converted = dict(weights)
    for name, weight in weights.items():
        if ".attn.c_attn." in name and query_factor != 1:
            converted[name] = torch.cat([query_factor * weight[: model.n_embd], weight[model.n_embd :]])
        elif ".c_proj." in name:
            converted[name] = residual_factor(model) * weight
        elif name.startswith("ln_f."):
            converted[name] = output_factor(model) * weight
    return converted


def to_transformers(weights: Mapping[str, Tensor], model: ModelConfig, n_vocab: int) -> dict[str, Tensor]:
    """The weights of a `GPT` of `model` for transformers, with the first `n_vocab` rows of wte: the others are padding.

    transformers' GPT-2 is the standard parametrisation, and always has biases: those that `model` lacks are zero.
    """
    converted = {}
    for name, weight in as_standard(weights, model).items():
        if name == TIED:
            continue
        if name == "wte.weight":
            weight = weight[:n_vocab]
        converted[PREFIX + name] = (weight.T if _TRANSPOSED.fullmatch(name) else weight).contiguous()
        bias = name.removesuffix("weight") + "bias"
        if name.endswith("weight") and not name.startswith(("wte", "wpe")) and bias not in weights:
            converted[PREFIX + bias] = torch.zeros(weight.shape[0])
    return converted


def from_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of transformers' GPT-2 for a `GPT`, without lm_head. Raises `ValueError` if it is not tied to wte.

    Nothing is copied.
    """
    return {
        name: weight.T if _TRANSPOSED.fullmatch(name) and weight.dim() == 2 else weight
        for name, weight in from_nanogpt(weights).items()
    }


def from_nanogpt(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of nanoGPT's model for a `GPT`, without lm_head. Raises `ValueError` if it is not tied to wte.

    Wrappers' parts of a name are left out: `_orig_mod.` of `torch.compile`, `module.` of DDP, and others of torch.
    """
    converted: dict[str, Tensor] = {}
    for name, weight in weights.items():
        plain = _WRAPPERS.sub("", name).removeprefix(PREFIX)
        if plain in converted:
            raise ValueError(f"has the weight {plain} twice, also as {name}; give another model")
        if not _MASK.fullmatch(plain):
            converted[plain] = weight
    head = converted.pop(TIED, None)
    if head is not None and not torch.equal(head, converted.get("wte.weight", head)):
        raise ValueError(
            f"{TIED} differs from wte.weight, and gptexp's GPT-2 has one matrix for both; give another model"
        )
    return converted
