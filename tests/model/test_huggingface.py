"""Weights and configs of transformers' models, in both directions, against transformers itself."""

import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gptexp.config.schema import ModelConfig
from gptexp.config.transformers_json import config_json, read_config_json
from gptexp.model.generate import Sampling, generate
from gptexp.model.gpt import GPT
from gptexp.model.huggingface import HEAD, from_nanogpt, from_transformers, to_transformers
from gptexp.process.errors import ConfigError

N_VOCAB = 90  # the rest of the 128 rows is padding


def built(bias: bool, **parametrisation: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 128}
    model = GPT(ModelConfig(**sizes, bias=bias, **parametrisation)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)  # far from the initial values, also the biases: a missing term changes the result
    return model


@pytest.mark.parametrize("parametrisation", ["standard", "mup", "completep"])
@pytest.mark.parametrize("bias", [True, False])
def test_transformers_computes_the_same_logits(bias: bool, parametrisation: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    base = {"standard": {}, "mup": {"base_n_embd": 16, "base_n_head": 4}}
    base["completep"] = {**base["mup"], "base_n_layer": 1}
    ours = built(bias, parametrisation=parametrisation, **base[parametrisation])
    theirs = GPT2LMHeadModel(GPT2Config(**config_json(ours.cfg, N_VOCAB, end_of_text=7))).eval()
    weights = to_transformers(ours.state_dict(), ours.cfg, N_VOCAB)
    found = theirs.load_state_dict(weights, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["lm_head.weight"], [])
    assert all(weight.is_contiguous() for weight in weights.values())
    x = torch.randint(N_VOCAB, (3, 24), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(theirs(x).logits, ours(x)[:, :, :N_VOCAB], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_a_model_of_transformers_computes_the_same_here(prefix: str) -> None:
    """With and without the prefix, and with the masks of the files on the hub."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=90, n_positions=24, n_embd=32, n_layer=2, n_head=4)).eval()
    saved = {prefix + k.removeprefix("transformer."): v for k, v in theirs.state_dict().items()}
    saved |= {f"{prefix}h.{n}.attn.bias": torch.ones(1, 1, 24, 24) for n in range(2)}
    ours = GPT(read_config_json(theirs.config.to_dict())).eval()
    weights = from_transformers(saved, ours.cfg)
    ours.load_state_dict({**weights, "lm_head.weight": weights["wte.weight"]})
    assert ours.cfg == ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=24, vocab_size=90)
    x = torch.randint(90, (3, 24), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-5, atol=1e-5)


def test_there_and_back_gives_the_same_weights() -> None:
    model = built(bias=True)
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    back = from_transformers(to_transformers(weights, model.cfg, model.cfg.resolved_vocab_size), model.cfg)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"activation_function": "relu"}, "activation_function=relu: gptexp's GPT2LMHeadModel has gelu_new"),
        ({"model_type": "mistral"}, "model_type=mistral: gptexp has gpt2, llama, qwen3 and olmo2"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"n_inner": 0}, "model.n_mlp=0: must be from 1"),
        ({"n_layer": 10**400}, "model.n_layer=1000"),
        ({"n_layer": None}, "n_layer=null"),
        ({"vocab_size": "auto"}, "vocab_size=auto"),
        ({"n_layer": 0}, "model.n_layer=0: must be from 1"),
        ({"vocab_size": "many"}, "vocab_size=many: must be a whole number above 0"),
    ],
)
def test_another_architecture_is_refused(change: dict[str, Any], why: str) -> None:
    content = config_json(ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=24), 90, 7)
    with pytest.raises(ConfigError, match=why):
        read_config_json({**content, **change})


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh"])
def test_both_names_of_the_approximation_by_tanh_are_read(name: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.linspace(-5, 5, 101)
    torch.testing.assert_close(ACT2FN[name](x), torch.nn.functional.gelu(x, approximate="tanh"))
    assert read_config_json({"activation_function": name}) == ModelConfig(vocab_size=50257)


def test_the_defaults_of_transformers_are_gpt2s() -> None:
    assert read_config_json({"model_type": "gpt2"}) == ModelConfig(vocab_size=50257)


@pytest.mark.parametrize(
    "name",
    [
        "module._orig_mod.transformer.h.0.ln_1.weight",
        "_orig_mod.module.h.0.ln_1.weight",
        "transformer._orig_mod.h.0.ln_1.weight",
        "_fsdp_wrapped_module.transformer.h.0._checkpoint_wrapped_module.ln_1.weight",
    ],
)
def test_the_names_of_wrappers_are_left_out(name: str) -> None:
    assert from_nanogpt({name: torch.ones(1)}, ModelConfig()).keys() == {"h.0.ln_1.weight"}


def any_model(family: str, seed: int) -> ModelConfig:
    """A model of `family`, with any values of the keys that the family leaves open."""
    draw = random.Random(f"{family} {seed}")
    n_head = draw.choice([2, 3, 4, 6])
    values: dict[str, Any] = {
        "n_layer": draw.choice([1, 2, 4]), "n_head": n_head, "n_embd": n_head * draw.choice([4, 8]), "block_size": 40,
        "vocab_size": 128, "norm": "rmsnorm", "position": "rope", "mlp": draw.choice(["swiglu", "geglu"]),
        "rope_theta": draw.choice([100.0, 1e4, 5e5]), "bias": family == "llama" and draw.random() < 0.5,
        "n_kv_head": draw.choice([n for n in range(1, n_head + 1) if n_head % n == 0]),
        "head_dim": draw.choice([None, 8, 16]), "n_mlp": draw.choice([None, 40]), "tied": draw.random() < 0.5,
        "norm_eps": draw.choice([1e-6, 1e-5]), "norm_weight": draw.random() < 0.7,
        "rope_scaling": draw.choice([None, WAVES]),
    }  # fmt: skip
    values |= {"qwen3": {"qk_norm": "head"}, "olmo2": {"qk_norm": "all", "residual_norm": "post"}}.get(family, {})
    if family == "qwen3" and draw.random() < 0.5:
        values |= {"window": 7, "window_every": draw.choice([None, 2])}
    if draw.random() < 0.4:
        values |= {"parametrisation": draw.choice(["mup", "completep"]), "base_n_embd": 8, "base_n_head": 1}
    return ModelConfig(**values)


WAVES = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16.0,
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2"])
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 23), marks=pytest.mark.e2e)])
def test_models_of_a_family_compute_the_same_in_both_directions(family: str, seeds: range) -> None:
    """Logits, and the most likely tokens one by one, with a cache here and there."""
    import transformers

    for seed in seeds:
        cfg = any_model(family, seed)
        torch.manual_seed(seed)
        ours = GPT(cfg).eval()
        with torch.no_grad():
            for p in ours.parameters():
                p.normal_(std=0.3)
        content = config_json(cfg, N_VOCAB, end_of_text=None)
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**content)).eval()
        assert [type(theirs).__name__] == content["architectures"]
        found = theirs.load_state_dict(to_transformers(ours.state_dict(), cfg, N_VOCAB), strict=False)
        assert (found.missing_keys, found.unexpected_keys) == ([HEAD] if cfg.tied else [], [])
        x = torch.randint(N_VOCAB, (2, 40), generator=torch.Generator().manual_seed(seed))
        expected = theirs(x).logits
        torch.testing.assert_close(ours(x)[..., :N_VOCAB], expected, rtol=1e-4, atol=1e-4)

        back = GPT(read_config_json(theirs.config.to_dict())).eval()
        weights = from_transformers(theirs.state_dict(), back.cfg)
        tied = {HEAD: weights["embed_tokens.weight"]} if cfg.tied else {}
        back.load_state_dict({**weights, **tied})
        torch.testing.assert_close(back(x), expected, rtol=1e-4, atol=1e-4)
        kept = ["parametrisation", "base_n_embd", "base_n_head", "norm_weight", "vocab_size"]
        kept += (
            ["window_every"] if cfg.window_every and cfg.window_every > cfg.n_layer else []
        )  # no block has its number
        reset = {key: getattr(cfg, key) for key in kept}
        assert replace(back.cfg.spelled_out(), **reset) == cfg.spelled_out()

        prompt = x[:1, :9]
        of_all = torch.ones_like(prompt)  # without this mask, id 0 would be padding
        out = theirs.generate(prompt, attention_mask=of_all, max_new_tokens=20, do_sample=False, pad_token_id=0)
        added = out[0, 9:].tolist()
        columns = generate(back, prompt[0].tolist(), N_VOCAB, None, 1, Sampling(20, temperature=0.0))
        assert [column[0] for column in columns] == added


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"mlp": "relu2"}, "model.mlp=relu2"),
        ({"norm": "layernorm"}, "model.norm=layernorm"),
        ({"position": "learned"}, "model.position=learned"),
        ({"logit_softcap": 30.0}, "model.logit_softcap=30"),
        ({"window": 8}, "model.window=8"),
        ({"residual_norm": "pre_post"}, "model.residual_norm=pre_post"),
        ({"qk_norm": "all"}, "model.qk_norm=all"),
        ({"qk_norm": "head", "bias": True}, "model.bias=true"),
        ({"n_head": 3, "head_dim": 8}, "model.n_head=3"),
    ],
)
def test_a_block_that_transformers_lacks_is_refused_with_the_key(change: dict[str, Any], key: str) -> None:
    llama = ModelConfig(n_head=4, n_embd=32, bias=False, norm="rmsnorm", position="rope", mlp="swiglu")
    with pytest.raises(ConfigError, match=re.escape(key)) as caught:
        config_json(replace(llama, **change), 90, None)
    assert caught.value.code == "not-exportable"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"hidden_act": "relu"}, "hidden_act=relu"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_type=yarn"),
        ({"num_key_value_heads": 3}, "n_head=4"),
        ({"rms_norm_eps": "small"}, "norm_eps=small"),
        ({"tie_word_embeddings": "no"}, "tied=no"),
        ({"rope_theta": -1}, "rope_theta=-1"),
        ({"rope_parameters": "x"}, "rope_parameters=x"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_act": ["silu"]}, "hidden_act="),
        ({"head_dim": 7}, "model.head_dim"),
        ({"hidden_size": 10**9}, "model.n_embd=1000000000"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2}}, "model.rope_scaling"),
        ({"model_type": ["llama"]}, "model_type="),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "layer_types": 3}, "layer_types=3"),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention"] * 11 + ["chunked_attention"],
            },
            "layer_types=chunked_attention",
        ),
    ],
)
def test_a_llama_that_gptexp_lacks_is_refused_with_the_key(change: dict[str, Any], key: str) -> None:
    llama = ModelConfig(n_head=4, n_embd=32, bias=False, norm="rmsnorm", position="rope", mlp="swiglu")
    with pytest.raises(ConfigError, match=re.escape(key)):
        read_config_json({**config_json(llama, 90, None), **change})


@pytest.mark.parametrize(
    ("act", "mlp"),
    [("silu", "swiglu"), ("swish", "swiglu"), ("gelu_new", "geglu"), ("gelu_pytorch_tanh", "geglu")],
)
def test_each_name_of_a_gate_is_read(act: str, mlp: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.linspace(-5, 5, 101)
    gate = F.silu(x) if mlp == "swiglu" else F.gelu(x, approximate="tanh")
    torch.testing.assert_close(ACT2FN[act](x), gate)
    assert read_config_json({"model_type": "llama", "hidden_act": act}).mlp == mlp


def test_the_defaults_of_transformers_are_read_where_a_file_leaves_them_out() -> None:
    import transformers

    for family in ("llama", "qwen3", "olmo2"):
        full = transformers.AutoConfig.for_model(family).to_dict()
        assert read_config_json({"model_type": family}).spelled_out() == read_config_json(full).spelled_out()
