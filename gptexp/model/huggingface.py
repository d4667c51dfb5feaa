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


def from_nanogpt(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of nanoGPT's model for a `GPT`, without lm_head. `torch.compile` puts `_orig_mod.` before a name."""
    names = {name: name.removeprefix("_orig_mod.").removeprefix(PREFIX) for name in weights}
    return {ours: weights[name] for name, ours in names.items() if not _NO_WEIGHT.fullmatch(ours)}


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


def generation_config_json(end_of_text: int | None) -> dict[str, Any]:
    """The content of generation_config.json: generation ends at the end of a text."""
    return {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": end_of_text}
