"""The kernels of attention: the devices that have them, and the choice of one."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch.nn.attention import SDPBackend, sdpa_kernel

from gptexp.config.rules import missing_kernel
from gptexp.machine import cpu
from gptexp.machine.device import Device, compute_capability
from gptexp.process.errors import ConfigError


@dataclass(frozen=True)
class Kernel:
    backend: SDPBackend | None  # None: gptexp's own
    float32_on: tuple[str, ...]  # devices on which it supports float32


KERNELS = {
    "cudnn": Kernel(SDPBackend.CUDNN_ATTENTION, ()),
    "flash": Kernel(SDPBackend.FLASH_ATTENTION, ("cpu",)),
    "efficient": Kernel(SDPBackend.EFFICIENT_ATTENTION, ("cuda",)),
    "math": Kernel(SDPBackend.MATH, ("cuda", "cpu", "mps")),
    "blocked": Kernel(None, ("cpu",)),
}

# Tokens up to which compiled math attention is the fastest on a CPU, where the scores of a layer fit the caches. At 64
# tokens a step of `gptexp bench char` took 24 ms, and 27 with blocked attention; at 256 both take as long as the other.
# At 1,024 tokens, blocks with flash are 13% faster in float32.
SHORT = 256


def check_kernel(name: str, device: str, dtype: str, asked: bool, dropout: float) -> None:
    """Raise `ConfigError` unless `device` has the kernel, and it supports `dtype`, and `dropout` if it is `asked` for.

    If nobody asked for the kernel, torch computes dropout with another.
    """
    if missing := missing_kernel(name, device):
        raise ConfigError(missing)
    if dtype == "float32" and device not in KERNELS[name].float32_on:
        able = " or ".join(other for other, k in KERNELS.items() if device in k.float32_on)
        raise ConfigError(f"train.attention={name}: no float32 on {device}; use train.dtype=bfloat16 or {able}")
    if asked and dropout and device == "cpu" and name != "math":
        raise ConfigError(
            f"train.attention={name}: has no dropout on a CPU, and model.dropout={dropout:g}; use train.attention=auto"
        )


def best_kernel(device: Device, dtype: str, compiled: bool, seq_len: int, dropout: float) -> tuple[str, str]:
    """The fastest kernel for `dtype` and sequences of `seq_len` tokens, with the reason."""
    if device.type == "cpu":
        if compiled and seq_len <= SHORT:
            return "math", f"compiled, it is the fastest up to {SHORT} tokens"
        if compiled and dtype == "bfloat16" and not dropout and cpu.has_fast_bfloat16():
            return "blocked", "products of large blocks are faster than flash in bfloat16"
        return "flash", "torch's kernel for CPUs"
    if device.type != "cuda":
        return "math", "the only kernel for this device"
    if dtype == "float32":
        return "efficient", "the fastest kernel that supports float32"
    if compute_capability(device) in (9, 10):
        return "cudnn", "the fastest kernel on Hopper and Blackwell"
    return "flash", "the fastest kernel on GPUs older than Hopper"


def attention_kernel(name: str, asked: bool, device: str) -> AbstractContextManager[object]:
    """A context in which attention uses kernel `name`. Unless it was `asked` for, other kernels serve as fallback.

    It must contain the backward pass, because a checkpointed block recomputes its attention there.
    """
    first = KERNELS[name].backend
    # On a CPU torch tries flash first, whatever the order; and math needs no fallback.
    only = asked or (device, name) == ("cpu", "math")
    if first is None or (not only and device != "cuda"):
        return nullcontext()  # torch chooses the kernel, if it is to compute attention
    others = [] if only else [k.backend for k in KERNELS.values() if k.backend not in (None, first)]
    return sdpa_kernel([first, *others], set_priority=True)
