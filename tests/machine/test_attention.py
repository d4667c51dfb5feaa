"""`train.attention`: the requested kernel runs, or is refused."""

from dataclasses import replace

import pytest
import torch

from gptexp.config.schema import Config
from gptexp.distributed.ranks import Rank
from gptexp.machine import cpu
from gptexp.machine.device import Device
from gptexp.machine.effective import Choice, Source, step_context
from gptexp.machine.resolve import resolve
from gptexp.model.gpus import UNKNOWN_GPU
from gptexp.process.errors import ConfigError

CPU, GPU = torch.device("cpu"), UNKNOWN_GPU


FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("source", ["asked", "decided"])
@pytest.mark.parametrize(("name", "is_flash"), [("flash", True), ("math", False), ("blocked", True)])
def test_the_chosen_kernel_of_torch_runs(source: Source, name: str, is_flash: bool) -> None:
    """Beside gptexp's own, torch chooses: validation then has flash."""
    q = torch.randn(1, 2, 8, 4)
    effective = replace(resolve(Config(), CPU, Rank()), attention=Choice(name, source, ""))
    with step_context(effective), torch.profiler.profile() as profile:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert (FLASH in {e.key for e in profile.key_averages()}) == is_flash


@pytest.mark.parametrize(
    ("fast", "compiled", "dtype", "seq_len", "dropout", "kernel"),
    [
        (True, True, "float32", 256, 0.0, "math"),
        (True, True, "float32", 257, 0.0, "flash"),
        (True, True, "bfloat16", 256, 0.0, "math"),
        (True, True, "bfloat16", 257, 0.0, "blocked"),
        (False, True, "bfloat16", 1024, 0.0, "flash"),  # a CPU with slow products in bfloat16
        (True, True, "bfloat16", 1024, 0.1, "flash"),  # gptexp's own kernel has no dropout
        (True, False, "bfloat16", 1024, 0.0, "flash"),  # it would be compiled, which a short run need not pay
    ],
)
def test_the_kernel_of_a_cpu(
    fast: bool, compiled: bool, dtype: str, seq_len: int, dropout: float, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_fast_bfloat16", lambda: fast)
    cfg = Config()
    cfg.model.block_size, cfg.model.dropout = seq_len, dropout
    cfg.train.compile, cfg.train.dtype = "on" if compiled else "off", dtype
    cfg.batch.total_batch_size = 8 * seq_len
    assert resolve(cfg, CPU, Rank()).attention.value == kernel


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


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("flash", GPU, "flash: no float32 on cuda; use train.dtype=bfloat16 or efficient"),
        ("cudnn", CPU, "train.attention=cudnn: cpu has no such kernel; use flash or math or blocked"),
    ],
)
def test_a_kernel_that_the_device_or_the_dtype_does_not_have_is_refused(
    name: str, device: Device, message: str
) -> None:
    cfg = Config()
    cfg.train.attention, cfg.train.dtype = name, "float32"
    with pytest.raises(ConfigError, match=message):
        resolve(cfg, device, Rank())
