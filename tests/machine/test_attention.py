"""`train.attention`: the requested kernel runs, or is refused."""

from dataclasses import replace

import pytest
import torch

from gptexp.config.schema import Config
from gptexp.distributed.ranks import Rank
from gptexp.machine import cpu
from gptexp.machine.effective import Choice, step_context
from gptexp.machine.resolve import resolve
from gptexp.model.gpus import UNKNOWN_GPU
from gptexp.process.errors import ConfigError

CPU, GPU = torch.device("cpu"), UNKNOWN_GPU


@pytest.mark.parametrize("name", ["flash", "math"])
def test_the_requested_kernel_runs(name: str) -> None:
    q = torch.randn(1, 2, 8, 4)
    cfg = Config()
    cfg.train.attention = name
    with step_context(resolve(cfg, CPU, Rank())), torch.profiler.profile() as profile:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    used = {e.key for e in profile.key_averages()}
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in used) == (name == "flash")


def test_the_chosen_kernel_runs_although_nobody_asked_for_it() -> None:
    q, cfg = torch.randn(1, 2, 8, 4), Config()
    for name in ("flash", "math"):
        effective = replace(resolve(cfg, CPU, Rank()), attention=Choice(name, "decided", ""))
        with step_context(effective), torch.profiler.profile() as profile:
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        used = {e.key for e in profile.key_averages()}
        assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in used) == (name == "flash")


@pytest.mark.parametrize(
    ("compiled", "dtype", "seq_len", "dropout", "kernel"),
    [
        (True, "float32", 256, 0.0, "math"),
        (True, "float32", 257, 0.0, "flash"),
        (True, "bfloat16", 256, 0.0, "math"),
        (True, "bfloat16", 257, 0.0, "blocked"),
        (True, "bfloat16", 1024, 0.1, "flash"),  # gptexp's own kernel has no dropout
        (False, "bfloat16", 1024, 0.0, "flash"),  # it would be compiled, which a short run need not pay
    ],
)
def test_the_kernel_of_a_cpu(
    compiled: bool, dtype: str, seq_len: int, dropout: float, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_fast_bfloat16", lambda: True)
    cfg = Config()
    cfg.model.block_size, cfg.model.dropout = seq_len, dropout
    cfg.train.compile, cfg.train.dtype = "on" if compiled else "off", dtype
    cfg.batch.total_batch_size = 8 * seq_len
    assert resolve(cfg, CPU, Rank()).attention.value == kernel


def test_a_cpu_with_slow_products_in_bfloat16_has_none_of_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_fast_bfloat16", lambda: False)
    cfg = Config()
    cfg.train.compile, cfg.train.dtype, cfg.model.block_size = "on", "bfloat16", 1024
    assert resolve(cfg, CPU, Rank()).attention.value == "flash"


@pytest.mark.parametrize("name", ["flash", "blocked"])
def test_a_kernel_without_dropout_is_refused_if_the_model_has_it(name: str) -> None:
    cfg = Config()
    cfg.model.dropout = 0.1
    assert resolve(cfg, CPU, Rank()).attention.value == "flash"  # torch then computes it with math
    cfg.train.attention = name
    message = rf"train.attention={name}: has no dropout on a CPU, and model.dropout=0.1; use train.attention=auto"
    with pytest.raises(ConfigError, match=message):
        resolve(cfg, CPU, Rank())


def test_a_saved_kernel_without_dropout_is_chosen_anew_for_a_model_that_got_dropout() -> None:
    cfg = Config()
    cfg.train.compile = "off"
    earlier = replace(resolve(cfg, CPU, Rank()), attention=Choice("blocked", "decided", "measured"))
    assert resolve(cfg, CPU, Rank(), earlier).attention.value == "blocked"
    cfg.model.dropout = 0.1
    assert resolve(cfg, CPU, Rank(), earlier).attention.value == "flash"


def test_gptexps_own_kernel_leaves_the_choice_of_torchs_to_torch() -> None:
    """Validation, which it does not compute, then has flash."""
    q, cfg = torch.randn(1, 2, 8, 4), Config()
    cfg.train.attention = "blocked"
    with step_context(resolve(cfg, CPU, Rank())), torch.profiler.profile() as profile:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in {e.key for e in profile.key_averages()}


def test_a_kernel_that_does_not_support_the_dtype_is_refused() -> None:
    cfg = Config()
    cfg.train.attention, cfg.train.dtype = "flash", "float32"
    with pytest.raises(
        ConfigError,
        match=r"flash: no float32 on cuda; use train.dtype=bfloat16 or efficient",
    ):
        resolve(cfg, GPU, Rank())


def test_a_kernel_that_the_device_does_not_have_is_refused() -> None:
    cfg = Config()
    cfg.train.attention = "cudnn"
    with pytest.raises(
        ConfigError, match=r"train.attention=cudnn: cpu has no such kernel; use flash or math or blocked"
    ):
        resolve(cfg, CPU, Rank())
