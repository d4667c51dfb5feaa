"""The kernels of scaled_dot_product_attention: where each is there, and which is taken."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptexp.errors import ConfigError
from gptexp.machine import compute_capability


@dataclass(frozen=True)
class Kernel:
    backend: SDPBackend
    devices: tuple[str, ...]
    float32_on: tuple[str, ...]  # where it takes float32 too


KERNELS = {
    "cudnn": Kernel(SDPBackend.CUDNN_ATTENTION, ("cuda",), ()),
    "flash": Kernel(SDPBackend.FLASH_ATTENTION, ("cuda", "cpu"), ("cpu",)),
    "efficient": Kernel(SDPBackend.EFFICIENT_ATTENTION, ("cuda",), ("cuda",)),
    "math": Kernel(SDPBackend.MATH, ("cuda", "cpu", "mps"), ("cuda", "cpu", "mps")),
}


def check_kernel(name: str, device: str, dtype: str) -> None:
    """Raise `ConfigError` unless `device` has the kernel and, there, it takes `dtype`."""
    there = {other: k for other, k in KERNELS.items() if device in k.devices}
    if name not in there:
        raise ConfigError(f"train.attention={name}: {device} has no such kernel; there are {', '.join(there)}")
    if dtype == "float32" and device not in KERNELS[name].float32_on:
        able = ", ".join(other for other, k in there.items() if device in k.float32_on)
        raise ConfigError(f"train.attention={name}: takes no float32 on {device}; use train.dtype=bfloat16, or {able}")


def best_kernel(device: torch.device, dtype: str) -> tuple[str, str]:
    """The kernel to begin with, and why."""
    if device.type != "cuda":
        return ("flash", "torch's kernel for CPUs") if device.type == "cpu" else ("math", "the only one here")
    if dtype == "float32":
        return "efficient", "the fastest that takes float32"
    if compute_capability(device) in (9, 10):
        return "cudnn", "the fastest on Hopper and Blackwell"
    return "flash", "the fastest before Hopper"


def attention_kernel(name: str, asked: bool, device: str) -> AbstractContextManager[object]:
    """Where attention runs on kernel `name`: on no other if it was `asked` for, else on the next that can do it.

    To be entered around whole steps: a checkpointed block computes its attention again in the backward pass.
    """
    if not asked and device != "cuda":
        return nullcontext()  # torch knows its own best there
    first = KERNELS[name].backend
    others = [] if asked else [k.backend for k in KERNELS.values() if k.backend != first]
    return sdpa_kernel([first, *others], set_priority=True)
