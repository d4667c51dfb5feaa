"""The JSON files with which transformers describes a model, and the `ModelConfig` that they stand for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gptexp.config.rules import model_problems
from gptexp.config.schema import ModelConfig, from_dict
from gptexp.process.errors import ConfigError, first_line
from gptexp.process.words import listed, shown

CONFIG_JSON, GENERATION_CONFIG_JSON = "config.json", "generation_config.json"
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}  # `model.mlp` -> hidden_act
PARTIAL = "partial_rotary_factor"  # the share of a head's numbers that RoPE turns
_SAME = {"gelu_pytorch_tanh": "gelu_new"}  # the same function in torch's own kernel


@dataclass(frozen=True)
class Family:
    """A kind of model that transformers has, as its config.json describes it."""

    architecture: str
    # Key of `ModelConfig` -> the key of config.json, and transformers' default.
    sizes: Mapping[str, tuple[str, Any]]
    # What config.json can configure and `GPT` cannot. A key that config.json lacks has this value.
    fixed: Mapping[str, Any]
    # Key of `ModelConfig` -> the values that the block can have.
    block: Mapping[str, tuple[Any, ...]]


def _of_llama(defaults: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """The sizes of a block with Llama's names, with these `defaults` in place of Llama's."""
    known = {
        "n_layer": ("num_hidden_layers", 32), "n_head": ("num_attention_heads", 32), "n_embd": ("hidden_size", 4096),
        "block_size": ("max_position_embeddings", 2048), "vocab_size": ("vocab_size", 32000),
        "n_mlp": ("intermediate_size", 11008), "n_kv_head": ("num_key_value_heads", None),
        "head_dim": ("head_dim", None), "norm_eps": ("rms_norm_eps", 1e-6), "tied": ("tie_word_embeddings", False),
        "bias": ("attention_bias", False),
    }  # fmt: skip
    return {key: (theirs, defaults.get(theirs, default)) for key, (theirs, default) in known.items()}


_LLAMA = {
    "norm": ("rmsnorm",), "position": ("rope",), "mlp": tuple(_ACTIVATIONS), "logit_softcap": (None,),
}  # fmt: skip

FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            "n_layer": ("n_layer", 12), "n_head": ("n_head", 12), "n_embd": ("n_embd", 768),
            "block_size": ("n_positions", 1024), "vocab_size": ("vocab_size", 50257), "n_mlp": ("n_inner", None),
            "norm_eps": ("layer_norm_epsilon", 1e-5), "tied": ("tie_word_embeddings", True),
        },
        {
            "activation_function": "gelu_new",  # the approximation by tanh
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        {"logit_softcap": (None,)},
    ),
    "llama": Family(
        "LlamaForCausalLM",
        _of_llama({}),
        {},
        {**_LLAMA, "residual_norm": ("pre",), "qk_norm": ("none",), "window": (None,)},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _of_llama({"intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768,
                   "num_key_value_heads": 32, "head_dim": 128}),
        {},
        {**_LLAMA, "residual_norm": ("pre",), "qk_norm": ("head",), "bias": (False,)},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _of_llama({"vocab_size": 50304, "rms_norm_eps": 1e-5}),
        {},
        {**_LLAMA, "residual_norm": ("post",), "qk_norm": ("all",), "window": (None,), "bias": (False,)},
    ),
}  # fmt: skip


def family_of(m: ModelConfig) -> str:
    """The family that has the block of `m`. Raises `ConfigError` with the key that stands in the way."""
    likely = {"pre none": "llama", "pre head": "qwen3", "post all": "olmo2"}
    name = "gpt2" if m.is_gpt2 else likely.get(f"{m.residual_norm} {m.qk_norm}", "llama")
    for key, values in FAMILIES[name].block.items():
        value = getattr(m, key)
        if value not in values:
            allowed = " or ".join(shown(other) for other in values)
            rule = f"transformers' {FAMILIES[name].architecture}, the nearest of its models, has {allowed}"
            raise ConfigError(f"model.{key}={shown(value)}: {rule}; only gptexp can use this model", "not-exportable")
    if name == "llama" and m.n_embd % m.n_head:
        rule = f"transformers' Llama has an n_embd that is a multiple of it, and model.n_embd={m.n_embd} is not"
        raise ConfigError(f"model.n_head={m.n_head}: {rule}; only gptexp can use this model", "not-exportable")
    return name


def read_config_json(content: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes, without dropout. Raises `ConfigError` for another architecture.

    The vocabulary is not padded, not even from 50,257: rows added to a trained wte would have the logit 0. That is far
    above GPT-2's own logits, so the padding would get most of the probability.
    """
    name = content.get("model_type", "gpt2")
    if not isinstance(name, str) or name not in FAMILIES:
        raise _refusal("model_type", name, f"gptexp has {listed(list(FAMILIES))}")
    family = FAMILIES[name]
    for key, expected in family.fixed.items():
        value = content.get(key, expected)
        if value != expected and not (isinstance(value, str) and _SAME.get(value) == expected):
            raise _refusal(
                key, value, f"gptexp's {family.architecture} has {shown(expected)}; give a model that has it too"
            )
    values = {key: content.get(theirs, default) for key, (theirs, default) in family.sizes.items()}
    if name == "gpt2":
        return checked_model({"bias": True, **values})
    block = {key: allowed[0] for key, allowed in family.block.items()}
    return checked_model({**block, **values, **_rope(content), **_mlp(content, values), **_windows(name, content)})


def _refusal(key: str, value: Any, rule: str) -> ConfigError:
    return ConfigError(f"{key}={shown(value)}: {rule}", "other-architecture")


def _rope(content: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's keys. transformers 5 writes them in rope_parameters, earlier versions side by side."""
    found = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise _refusal("rope_parameters", found, "must be a JSON object")
    theta = found.get("rope_theta", content.get("rope_theta", 10_000.0))
    kind = found.get("rope_type", found.get("type", "default"))
    for part in (found, content):
        if part.get(PARTIAL, 1) != 1:
            raise _refusal(PARTIAL, part[PARTIAL], "gptexp's RoPE turns all numbers of a head")
    scaling = {key: value for key, value in found.items() if key not in ("rope_type", "type", "rope_theta", PARTIAL)}
    if kind == "default" and scaling:
        raise _refusal(*next(iter(scaling.items())), "gptexp's RoPE has no such parameter")
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise _refusal("rope_type", kind, "gptexp has default and llama3")
    return {"rope_theta": theta, "rope_scaling": scaling}


def _mlp(content: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of the MLP. Its layers must have biases exactly if those of attention have."""
    kinds = {**{act: mlp for mlp, act in _ACTIVATIONS.items()}, "swish": "swiglu", "gelu_new": "geglu"}
    act = content.get("hidden_act", "silu")
    if not isinstance(act, str) or act not in kinds:
        raise _refusal("hidden_act", act, f"gptexp has {listed(list(_ACTIVATIONS.values()))}")
    if (bias := content.get("mlp_bias", False)) != values["bias"]:
        raise _refusal(
            "mlp_bias", bias, "gptexp has biases in all layers of a block or in none, and attention_bias differs"
        )
    return {"mlp": kinds[act]}


def _windows(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of windows. Raises `ConfigError` unless full attention comes in every n-th block, or in none."""
    kinds, window = content.get("layer_types"), content.get("sliding_window")
    if name != "qwen3" or not content.get("use_sliding_window") or window is None:
        return {"window": None}
    if not isinstance(kinds, list) or len(kinds) != content.get("num_hidden_layers", 32):
        raise _refusal("layer_types", kinds, "must be a list with a kind for each of num_hidden_layers")
    if others := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise _refusal("layer_types", others[0], "gptexp has full_attention and sliding_attention")
    full = [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"]
    every = full[0] if full else None
    if every == 1 and len(full) == len(kinds):
        return {"window": None}
    if full != (list(range(every, len(kinds) + 1, every)) if every else []):
        raise _refusal("layer_types", kinds, "gptexp has full attention in every n-th layer, or in none")
    return {"window": window, "window_every": every}


def checked_model(values: Mapping[str, Any]) -> ModelConfig:
    """The model with these values, which were read from a file. Raises `ConfigError` for values that are illegal."""
    try:
        model: ModelConfig = from_dict({**values}, ModelConfig)
    except ValueError as error:
        raise ConfigError(first_line(error), "wrong-type") from None
    if not isinstance(model.vocab_size, int):
        raise ConfigError(f"vocab_size={shown(model.vocab_size)}: must be a whole number above 0", "wrong-type")
    if found := model_problems(model):
        raise ConfigError(found)
    return model


def config_json(model: ModelConfig, n_vocab: int, end_of_text: int | None) -> dict[str, Any]:
    """The content of config.json for a model whose tokenizer has `n_vocab` ids.

    Raises `ConfigError` with the key that stands in the way if transformers has no such model.
    """
    name = family_of(model)
    family, full = FAMILIES[name], model.spelled_out()
    content = {
        **family.fixed,
        **{theirs: getattr(full, key) for key, (theirs, _) in family.sizes.items()},
        "vocab_size": n_vocab,
        "architectures": [family.architecture],
        "model_type": name,
        "initializer_range": 0.02,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": "float32",
    }
    if name == "gpt2":
        return content | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    content |= {
        "hidden_act": _ACTIVATIONS[model.mlp],
        "attention_dropout": model.dropout,
        "pad_token_id": None,
        "rope_theta": model.rope_theta,
        "rope_scaling": {"rope_type": "llama3", **_whole(model.rope_scaling)} if model.rope_scaling else None,
    }
    if name == "llama":
        content["mlp_bias"] = model.bias
    if model.window is not None:
        kinds = [
            "full_attention" if model.window_of(number) is None else "sliding_attention"
            for number in range(model.n_layer)
        ]
        content |= {"use_sliding_window": True, "sliding_window": model.window, "layer_types": kinds}
    return content


def _whole(scaling: Mapping[str, float]) -> dict[str, float]:
    """`scaling` with its number of tokens as an integer, which transformers wants."""
    return {key: int(value) if key.startswith("original") else value for key, value in scaling.items()}


def generation_config_json(end_of_text: int | None) -> dict[str, Any]:
    """The content of generation_config.json: generation ends at the end of a text."""
    return {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": end_of_text}
