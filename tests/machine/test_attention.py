"""`train.attention`: the requested kernel runs, or is refused."""

from dataclasses import replace

import pytest
import torch

from gptexp.config.schema import Config
from gptexp.distributed.ranks import Rank
from gptexp.machine.device import Device
from gptexp.machine.effective import Choice, Source, step_context
from gptexp.machine.resolve import resolve
from gptexp.model.gpus import UNKNOWN_GPU
from gptexp.process.errors import ConfigError

CPU, GPU = torch.device("cpu"), UNKNOWN_GPU


FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("source", ["asked", "decided"])
@pytest.mark.parametrize(("name", "is_flash"), [("flash", True), ("math", False)])
def test_the_chosen_kernel_of_torch_runs(source: Source, name: str, is_flash: bool) -> None:
    q = torch.randn(1, 2, 8, 4)
    effective = replace(resolve(Config(), CPU, Rank()), attention=Choice(name, source, ""))
    with step_context(effective), torch.profiler.profile() as profile:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert (FLASH in {e.key for e in profile.key_averages()}) == is_flash


@pytest.mark.parametrize(
    ("compiled", "seq_len", "kernel"), [(True, 256, "math"), (True, 257, "flash"), (False, 64, "flash")]
)
def test_the_kernel_of_a_cpu(compiled: bool, seq_len: int, kernel: str) -> None:
    cfg = Config()
    cfg.model.block_size, cfg.train.compile = seq_len, "on" if compiled else "off"
    cfg.batch.total_batch_size = 8 * seq_len
    assert resolve(cfg, CPU, Rank()).attention.value == kernel


def test_a_kernel_without_dropout_is_refused_if_the_model_has_it() -> None:
    cfg = Config()
    cfg.model.dropout = 0.1
    assert resolve(cfg, CPU, Rank()).attention.value == "flash"  # torch then computes it with math
    cfg.train.attention = "flash"
    message = r"train.attention=flash: has no dropout on a CPU, and model.dropout=0.1; use train.attention=auto"
    with pytest.raises(ConfigError, match=message):
        resolve(cfg, CPU, Rank())


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("flash", GPU, "flash: no float32 on cuda; use train.dtype=bfloat16 or efficient"),
        ("cudnn", CPU, "train.attention=cudnn: cpu has no such kernel; use flash or math"),
    ],
)
def test_a_kernel_that_the_device_or_the_dtype_does_not_have_is_refused(
    name: str, device: Device, message: str
) -> None:
    cfg = Config()
    cfg.train.attention, cfg.train.dtype = name, "float32"
    with pytest.raises(ConfigError, match=message):
        resolve(cfg, device, Rank())
