"""Weights and configs of transformers' GPT-2, in both directions, against transformers itself."""

from typing import Any

import pytest
import torch

from gptexp.config.schema import ModelConfig
from gptexp.config.transformers_json import config_json, read_config_json
from gptexp.model.gpt import GPT
from gptexp.model.huggingface import from_nanogpt, from_transformers, to_transformers
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
        ({"n_inner": 0}, "n_mlp=0: must be a whole number above 0"),
        ({"n_layer": 0}, "n_layer=0: must be a whole number above 0"),
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
