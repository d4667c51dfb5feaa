"""`train.attention`: the requested kernel runs, or is refused."""

from dataclasses import replace

import pytest
import torch

from gptexp.config.schema import Config
from gptexp.distributed.ranks import Rank
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
        (True, "bfloat16", 64, 0.0, "blocked"),
        (True, "bfloat16", 1024, 0.0, "blocked"),
        (True, "bfloat16", 1024, 0.1, "flash"),  # gptexp's own kernel has no dropout
        (False, "bfloat16", 64, 0.0, "flash"),  # it would be compiled, which a short run need not pay
    ],
)
def test_the_kernel_of_a_cpu(compiled: bool, dtype: str, seq_len: int, dropout: float, kernel: str) -> None:
    cfg = Config()
    cfg.model.block_size, cfg.model.dropout = seq_len, dropout
    cfg.train.compile, cfg.train.dtype = "on" if compiled else "off", dtype
    cfg.batch.total_batch_size = 8 * seq_len
    assert resolve(cfg, CPU, Rank()).attention.value == kernel


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
