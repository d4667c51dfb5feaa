"""GPT-2 as Hugging Face's transformers stores it: the names and layouts of weights, and config.json.

transformers has `transformer.` in front of each name. The matrices of a block belong to a Conv1D, whose weight is
(in, out), the transpose of ours. lm_head is tied to wte and not stored. Files of the hub lack the prefix, and some hold
the causal masks (`attn.bias`, `attn.masked_bias`), which are no weights.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gptexp.config.schema import ModelConfig
from gptexp.process.errors import ConfigError
from gptexp.process.words import shown

PREFIX = "transformer."
LAYER_NORM_EPSILON = 1e-5  # torch's default, which `GPT` uses
_TRANSPOSED = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
_NO_WEIGHT = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight")


def to_transformers(weights: Mapping[str, Tensor], n_vocab: int) -> dict[str, Tensor]:
    """The weights of a `GPT` for transformers, with the first `n_vocab` rows of wte: the others are padding.

    A model without biases gets biases of zero, because transformers' GPT-2 always has them.
    """
    found = {}
    for name, weight in weights.items():
        if name == "lm_head.weight":
            continue
        if name == "wte.weight":
            weight = weight[:n_vocab]
        found[PREFIX + name] = (weight.T if _TRANSPOSED.fullmatch(name) else weight).contiguous()
        bias = name.removesuffix("weight") + "bias"
        if name.endswith("weight") and not name.startswith(("wte", "wpe")) and bias not in weights:
            found[PREFIX + bias] = torch.zeros(weight.shape[0])
    return found


def from_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of transformers' GPT-2 for a `GPT`, without lm_head."""
    found = {}
    for name, weight in weights.items():
        name = name.removeprefix(PREFIX)
        if not _NO_WEIGHT.fullmatch(name):
            found[name] = (weight.T if _TRANSPOSED.fullmatch(name) else weight).contiguous()
    return found


def config_json(model: ModelConfig, n_vocab: int, end_of_text: int | None) -> dict[str, Any]:
    """The content of config.json for a model whose tokenizer has `n_vocab` ids."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": n_vocab,
        "n_positions": model.block_size,
        "n_embd": model.n_embd,
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "activation_function": "gelu_new",  # the approximation by tanh
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.dropout,
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "initializer_range": 0.02,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


# What a `GPT` is, and transformers can be told to change. A config.json without a key has this value.
_FIXED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": LAYER_NORM_EPSILON,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


def model_config(content: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes, without dropout. Raises `ConfigError` for another architecture."""
    for key, expected in _FIXED.items():
        if content.get(key, expected) != expected:
            raise ConfigError(f"{key}={shown(content[key])}: gptexp's model has {expected}; give another GPT-2")
    inner = content.get("n_inner")
    if inner is not None and inner != 4 * content["n_embd"]:
        raise ConfigError(f"n_inner={shown(inner)}: gptexp's model has 4·n_embd = {4 * content['n_embd']}")
    sizes = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}  # its defaults
    values = {key: content.get(key, default) for key, default in sizes.items()}
    for key, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{key}={shown(value)}: must be a whole number above 0")
    return ModelConfig(block_size=values.pop("n_positions"), **values)
