"""`train.attention`: the requested kernel runs, or is refused."""

import pytest
import torch

from gptexp.config.schema import Config
from gptexp.distributed.ranks import Rank
from gptexp.machine.effective import step_context
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
    with pytest.raises(ConfigError, match=r"train.attention=cudnn: cpu has no such kernel; use flash or math"):
        resolve(cfg, CPU, Rank())
