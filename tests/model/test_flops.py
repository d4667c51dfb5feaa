"""Counts of parameters and FLOPs against the model on the meta device, torch's counter and published figures."""

from typing import Any

import pytest
import torch
import yaml

from gptexp.config.paths import conf_dir
from gptexp.config.schema import ModelConfig
from gptexp.model import flops
from gptexp.model.gpt import GPT
from gptexp.model.shapes import count_parameters


def model_config(name: str, **changes: object) -> ModelConfig:
    values = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text())["model"]
    return ModelConfig(**{"vocab_size": 50304, **values, **changes})


# Tied, with biases, for V = 50,257 and V = 50,304: GPT-2's published sizes; GPT-3's table 2.1 with context 2048.
PARAMETERS = {
    "gpt2": (124_439_808, 124_475_904),
    "gpt2_medium": (354_823_168, 354_871_296),
    "gpt2_large": (774_030_080, 774_090_240),
    "gpt2_xl": (1_557_611_200, 1_557_686_400),
    "gpt3_125m": (125_226_240, 125_262_336),
    "gpt3_350m": (355_871_744, 355_919_872),
    "gpt3_760m": (760_300_032, 760_372_224),
    "gpt3_1300m": (1_315_723_264, 1_315_819_520),
    "gpt3_2700m": (2_651_553_280, 2_651_673_600),
    "gpt3_6700m": (6_658_404_352, 6_658_596_864),
    "gpt3_13b": (12_853_386_240, 12_853_626_880),
    "gpt3_175b": (174_604_259_328, 174_604_836_864),
}
WITHOUT_BIAS = {
    "gpt2": (124_337_664, 124_373_760),
    "gpt2_medium": (354_551_808, 354_599_936),
    "gpt2_large": (773_521_920, 773_582_080),
    "gpt2_xl": (1_556_764_800, 1_556_840_000),
}


# The published number of parameters with the published vocabulary; OLMo's ladder does not count the embedding.
PUBLISHED = {
    "llama_124m": (50_304, 123_587_328),  # epfml/llm-baselines: "a 123.59M parameters model"
    "llama_350m": (32_000, 367_969_280),  # GaLore's log: "Total params: 367.97M"
    "llama_1b": (128_256, 1_235_814_400),  # meta-llama/Llama-3.2-1B
    "qwen3_0.6b": (151_936, 596_049_920),  # Qwen/Qwen3-0.6B
    "smollm2_135m": (49_152, 134_515_008),  # HuggingFaceTB/SmolLM2-135M
    "olmo2_190m": (100_352, 190_354_176 + 100_352 * 768),  # arXiv 2412.04403, table 1
    "nanochat_d12": (65_536, 2 * 65_536 * 768 + 12 * 12 * 768**2),  # the formula that gives d20 its 560,988,160
}


BYTES = {"bytes": 445_952, "llama_bytes": 446_080, "qwen3_bytes": 445_632, "modern_bytes": 446_144}


@pytest.mark.parametrize("name", BYTES)
def test_the_models_of_bytes_have_equally_many_parameters(name: str) -> None:
    assert (
        count_parameters(model_config(name, vocab_size=320)) == BYTES[name] == pytest.approx(BYTES["bytes"], rel=1e-3)
    )


def built_parameters(cfg: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(cfg).parameters())


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.e2e)])
def test_parameter_counts_equal_the_published_sizes(name: str, padded: bool) -> None:
    cfg = model_config(name, vocab_size=50304 if padded else 50257)
    assert built_parameters(cfg) == count_parameters(cfg) == PARAMETERS[name][padded]


@pytest.mark.parametrize("name", WITHOUT_BIAS)
@pytest.mark.parametrize("padded", [False, True])
def test_parameter_counts_are_exact_without_biases(name: str, padded: bool) -> None:
    cfg = model_config(name, vocab_size=50304 if padded else 50257, bias=False)
    assert built_parameters(cfg) == count_parameters(cfg) == WITHOUT_BIAS[name][padded]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_models_of_today_have_the_published_parameters(name: str) -> None:
    vocab_size, published = PUBLISHED[name]
    cfg = model_config(name, vocab_size=vocab_size)
    assert built_parameters(cfg) == count_parameters(cfg) == published


def test_twenty_layers_of_nanochat_have_the_number_that_it_prints() -> None:
    cfg = model_config("nanochat_d12", vocab_size=65_536, n_layer=20, n_embd=1280, n_head=10)
    assert count_parameters(cfg) == 560_988_160


def test_every_model_file_is_tested_and_sets_a_learning_rate() -> None:
    names = {path.stem for path in (conf_dir() / "model").glob("*.yaml")}
    assert names == PARAMETERS.keys() | PUBLISHED.keys() | {*BYTES, "from_init", "nano", "mini"}
    for name in names:
        assert yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text())["optim"]["lr"] > 0


@pytest.mark.parametrize(
    "block",
    [
        {},
        {"tied": False},
        {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu"},
        {"norm": "rmsnorm", "position": "rope", "mlp": "geglu", "n_kv_head": 2, "head_dim": 24, "tied": False,
         "qk_norm": "head", "residual_norm": "pre_post"},
        {"position": "none", "mlp": "relu2", "mlp_ratio": 3.0, "n_kv_head": 1, "qk_norm": "all"},
    ],
)  # fmt: skip
def test_flops_equal_those_of_torchs_counter(block: dict[str, Any]) -> None:
    """torch's counter over one forward and backward pass counts full attention scores, and 2 FLOPs a multiply-add."""
    from torch.utils.flop_counter import FlopCounterMode

    cfg = ModelConfig(n_layer=3, n_head=4, n_embd=64, block_size=32, vocab_size=256, bias=False, **block)
    model = GPT(cfg)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(tokens, tokens).backward()
    palm, causal = flops.flops_per_token(cfg, 32)
    # The closed form also counts the weights of the norms. This is the only difference.
    norms = 6 * sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert counter.get_total_flops() == (palm - norms) * tokens.numel()
    assert palm - causal == 6 * cfg.n_layer * cfg.n_head * cfg.head_size * 32


def test_a_window_is_counted_pair_by_pair() -> None:
    m = ModelConfig(n_layer=3, n_head=2, n_embd=32, block_size=50, vocab_size=64, window=7, window_every=3)
    palm, causal = flops.flops_per_token(m, 50)
    assert palm == 6 * flops.multiplied_parameters(m) + 12 * 32 * (7 + 7 + 50)
    seen = sum(sum(1 for key in range(50) if query - 7 < key <= query) for query in range(50)) / 50
    full = sum(query + 1 for query in range(50)) / 50
    exact = 12 * 32 * (2 * seen + full)
    assert causal - 6 * flops.multiplied_parameters(m) == pytest.approx(exact, rel=0.03)  # half of the diagonal


def test_flops_per_token_of_gpt2_equal_those_of_nanogpt() -> None:
    assert flops.flops_per_token(model_config("gpt2"), 1024)[0] / 1e6 == pytest.approx(855.4, abs=0.1)


def test_the_peak_of_an_unknown_device_or_dtype_is_none() -> None:
    assert flops.peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
    assert flops.peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
    assert flops.peak_flops("NVIDIA GeForce RTX 9999", "bfloat16") is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H200", 989.4e12), ("NVIDIA B200", 2250e12), ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GB200", None), ("NVIDIA L40", None), ("NVIDIA H100 PCIe", None),
    ],
)  # fmt: skip
def test_a_peak_is_that_of_the_part_with_exactly_this_name(name: str, peak: float | None) -> None:
    assert flops.peak_flops(name, "bfloat16") == peak


def test_utilisation_is_a_share_of_the_peak_of_all_devices() -> None:
    cfg = model_config("gpt2")
    eight = flops.utilisation(cfg, 1024, "NVIDIA H100 80GB HBM3", "bfloat16", 8, None)
    assert eight.parameters_counted == 124_475_904 - 1024 * 768  # all but wpe
    assert eight.peak_flops_per_s == 8 * 989.4e12
    palm, causal = eight.mfu(8 * 470_000)  # 470,000 tokens/s on one H100
    assert palm == pytest.approx(0.406, abs=0.001)
    assert causal == pytest.approx(palm * (855.4 - 6 * 12 * 768 * 1024 / 1e6) / 855.4, rel=1e-3)


def test_utilisation_of_an_unknown_device_is_none_and_proposes_a_measurement() -> None:
    unknown = flops.utilisation(model_config("gpt2"), 1024, "x86_64 CPU", "float32", 2, None)
    assert unknown.mfu(1e6) == (None, None)
    assert "log.mfu_peak=measured" in unknown.peak_source


def test_a_measured_peak_replaces_a_published_one() -> None:
    measured = flops.utilisation(model_config("gpt2"), 1024, "x86_64 CPU", "float32", 2, 1e12)
    assert measured.mfu(1e12 / measured.flops_per_token_palm)[0] == pytest.approx(1.0)
