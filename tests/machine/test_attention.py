"""`train.attention`: the requested kernel runs, or is refused."""

from dataclasses import replace

import pytest
import torch

from gptexp.config.schema import Config
from gptexp.distributed.ranks import Rank
from gptexp.machine.device import Device
from gptexp.machine.effective import Choice, Source, step_context
from gptexp.machine.resolve import resolve
from gptexp.model.gpus import GPUS, UNKNOWN_GPU
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
    message = r"flash: on cpu it has no dropout, which model.dropout=0.1 needs; use math or auto"
    with pytest.raises(ConfigError, match=message):
        resolve(cfg, CPU, Rank())


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("flash", GPU, "flash: on cuda it has no float32, which train.dtype=float32 needs; use efficient or math"),
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


def _on_gpu(n_kv_head: int | None, window: int | None, dtype: str) -> Config:
    cfg = Config()
    cfg.model.n_kv_head, cfg.model.window, cfg.train.dtype = n_kv_head, window, dtype
    return cfg


@pytest.mark.parametrize(
    ("gpu", "n_kv_head", "window", "dtype", "kernel"),
    [
        ("h100", None, None, "bfloat16", "cudnn"),
        ("h100", 4, 128, "bfloat16", "cudnn"),
        ("h100", None, 128, "float32", "efficient"),
        ("h100", 4, None, "float32", "math"),
        ("a100", 4, None, "bfloat16", "flash"),
        ("a100", None, 128, "bfloat16", "efficient"),
        ("a100", 4, 128, "bfloat16", "cudnn"),
        ("a100", 4, 128, "float32", "math"),
    ],
)
def test_the_kernel_of_a_gpu_has_what_the_run_needs(
    gpu: str, n_kv_head: int | None, window: int | None, dtype: str, kernel: str
) -> None:
    """By torch's checks (sdp_utils.cpp): flash takes no mask, efficient no groups, float32 needs efficient or math."""
    cfg = _on_gpu(n_kv_head, window, dtype)
    assert resolve(cfg, GPUS[gpu], Rank()).attention.value == kernel
    cfg.train.attention = kernel
    assert resolve(cfg, GPUS[gpu], Rank()).attention.value == kernel


@pytest.mark.parametrize(
    ("kernel", "n_kv_head", "window", "dtype", "message"),
    [
        ("flash", None, 128, "bfloat16", "no masks, which model.window=128 needs; use cudnn or efficient or math or"),
        ("efficient", 4, None, "bfloat16", "grouped queries, which model.n_kv_head=4 needs; use cudnn or flash or"),
        ("flash", None, 128, "float32", "no float32, .* and masks, .* needs; use efficient or math or auto"),
    ],
)
def test_a_kernel_of_a_gpu_that_lacks_what_the_run_needs_is_refused(
    kernel: str, n_kv_head: int | None, window: int | None, dtype: str, message: str
) -> None:
    cfg = _on_gpu(n_kv_head, window, dtype)
    cfg.train.attention = kernel
    with pytest.raises(ConfigError, match=message) as refused:
        resolve(cfg, UNKNOWN_GPU, Rank())
    assert refused.value.code == "no-such-kernel"
