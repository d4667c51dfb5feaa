"""The JSON files with which transformers describes a GPT-2, and the `ModelConfig` that they stand for."""

from collections.abc import Mapping
from typing import Any

from gptexp.config.schema import ModelConfig
from gptexp.process.errors import ConfigError
from gptexp.process.words import shown

CONFIG_JSON, GENERATION_CONFIG_JSON = "config.json", "generation_config.json"
# Properties that every `GPT` has and that transformers can configure. A key that config.json lacks has this value.
_FIXED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",  # the approximation by tanh
    "layer_norm_epsilon": 1e-5,  # torch's default, which `GPT` uses
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
_SAME = {"gelu_pytorch_tanh": "gelu_new"}  # the same function in torch's own kernel
# The key of `ModelConfig` -> the key of config.json, and transformers' default.
_SIZES = {
    "n_layer": ("n_layer", 12),
    "n_head": ("n_head", 12),
    "n_embd": ("n_embd", 768),
    "block_size": ("n_positions", 1024),
    "vocab_size": ("vocab_size", 50257),
}


def read_config_json(content: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes, without dropout. Raises `ConfigError` for another architecture.

    The vocabulary is not padded, not even from 50,257: rows added to a trained wte would have the logit 0. That is far
    above GPT-2's own logits, so the padding would get most of the probability.
    """
    for key, expected in _FIXED.items():
        value = content.get(key, expected)
        if value != expected and not (isinstance(value, str) and _SAME.get(value) == expected):
            rule = f"gptexp's GPT-2 has {shown(expected)}; give a model that has it too"
            raise ConfigError(f"{key}={shown(value)}: {rule}", "other-architecture")
    sizes = {key: content.get(theirs, default) for key, (theirs, default) in _SIZES.items()}
    inner = content.get("n_inner")
    if inner is not None and inner != 4 * sizes["n_embd"]:
        rule = f"gptexp's GPT-2 has 4·n_embd = {4 * sizes['n_embd']}"
        raise ConfigError(f"n_inner={shown(inner)}: {rule}", "other-architecture")
    return checked_model(sizes, bias=True)


def checked_model(sizes: Mapping[str, Any], bias: Any) -> ModelConfig:
    """The model with these values, which were read from a file. Raises `ConfigError` for values that are illegal."""
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{key}={shown(value)}: must be a whole number above 0", "out-of-range")
    if sizes["n_embd"] % sizes["n_head"]:
        rule = f"not divisible by n_head={sizes['n_head']}"
        raise ConfigError(f"n_embd={sizes['n_embd']}: {rule}", "heads-not-divisible")
    if not isinstance(bias, bool):
        raise ConfigError(f"bias={shown(bias)}: must be true or false", "wrong-type")
    return ModelConfig(bias=bias, **sizes)


def config_json(model: ModelConfig, n_vocab: int, end_of_text: int | None) -> dict[str, Any]:
    """The content of config.json for a model whose tokenizer has `n_vocab` ids."""
    sizes = {theirs: getattr(model, key) for key, (theirs, _) in _SIZES.items()}
    return {
        **_FIXED,
        **sizes,
        "vocab_size": n_vocab,
        "architectures": ["GPT2LMHeadModel"],
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.dropout,
        "initializer_range": 0.02,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": "float32",
    }


def generation_config_json(end_of_text: int | None) -> dict[str, Any]:
    """The content of generation_config.json: generation ends at the end of a text."""
    return {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": end_of_text}
