"""The highest rates of this machine for the matrix shapes of a model."""

from dataclasses import replace

import pytest
import torch

from gptexp.config.schema import ModelConfig
from gptexp.machine.ceilings import attention_ms, copy_bandwidth, gemm_rates, gemm_shapes
from gptexp.model.gpt import GPT
from gptexp.model.kernels import KERNELS

SMALL = ModelConfig(n_layer=3, n_head=2, n_embd=32, block_size=16, vocab_size=512)
GATED = replace(SMALL, norm="rmsnorm", position="rope", mlp="swiglu", n_kv_head=1, head_dim=24, tied=False)
CPU = torch.device("cpu")


@pytest.mark.parametrize("m", [SMALL, GATED], ids=["gpt2", "gated"])
def test_the_shapes_cover_all_matrices_of_a_model(m: ModelConfig) -> None:
    """Counts each matrix once. Positions are only looked up. A tied embedding is multiplied as lm_head."""
    with torch.device("meta"):
        model = GPT(m)
    looked_up = ("wpe.weight",) if m.tied else ("embed_tokens.weight",)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and name not in looked_up)
    shapes = gemm_shapes(m, tokens=7)
    assert all(rows == 7 for rows, _, _, _ in shapes.values())
    assert sum(inner * columns * count for _, inner, columns, count in shapes.values()) == matrices


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptexp.machine.ceilings.MEASURE_S", 0.02)


def test_the_models_rate_is_the_harmonic_mean_of_its_layers_rates() -> None:
    rates = gemm_rates(SMALL, 64, CPU, torch.float32)
    assert [*rates] == [*gemm_shapes(SMALL, 7), "model"]
    alone = [*rates.values()][:-1]
    assert 0 < min(alone) <= rates["model"] <= max(alone)
    flops = {name: rows * inner * columns * n for name, (rows, inner, columns, n) in gemm_shapes(SMALL, 64).items()}
    mean = sum(flops.values()) / sum(flops[name] / rates[name] for name in flops)  # the times add up
    assert rates["model"] == pytest.approx(mean, rel=1e-9)


def test_attention_kernels_that_a_cpu_does_not_have_are_none() -> None:
    measured = attention_ms(SMALL, 2, 16, CPU, torch.float32)
    assert tuple(measured) == tuple(KERNELS) == ("cudnn", "flash", "efficient", "math")
    assert [name for name, ms in measured.items() if ms is None] == ["cudnn", "efficient"]
    assert all(measured[name] for name in ("flash", "math"))


def test_copying_is_faster_than_100_mb_per_second() -> None:
    assert copy_bandwidth(CPU) > 1e8
