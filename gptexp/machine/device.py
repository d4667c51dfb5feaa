"""Properties of this machine's devices, free memory, and the choice of a device."""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from gptexp.distributed.ranks import Rank
from gptexp.machine import cpu
from gptexp.model.gpus import Gpu
from gptexp.process.errors import ConfigError
from gptexp.process.words import counted

Device = torch.device | Gpu  # of this machine, or of another one that a run is planned for

CGROUP, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def device_name(device: Device) -> str:
    """The product name of a GPU, the architecture and vector instructions of a CPU, else the type of the device."""
    if isinstance(device, Gpu):
        return device.name
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        return f"{platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}"
    return device.type


def has_native_bfloat16(device: Device) -> bool:
    """Whether the hardware has bfloat16 arithmetic; emulation is far slower than float32."""
    if isinstance(device, Gpu):
        return device.capability >= 8
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and cpu.has_native_bfloat16()


def compute_capability(device: Device) -> int:
    """Major compute capability of a GPU: 8 Ampere and Ada, 9 Hopper, 10 Blackwell."""
    return device.capability if isinstance(device, Gpu) else torch.cuda.get_device_capability(device)[0]


def missing_compiler(device: Device) -> str | None:
    """The reason why torch.compile does not work on the machine of `device`; None if it works."""
    if isinstance(device, Gpu):
        return None
    if device.type == "cuda":
        if find_spec("triton") is None:
            return "Triton is not installed"
        return None if compute_capability(device) >= 7 else "Triton does not support GPUs older than Volta"
    wanted = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if (compiler := shutil.which(wanted)) is None:
        return f"the C++ compiler {wanted} is not installed"
    needed = (compiler, torch.__file__, sysconfig.get_path("include"))
    return next((f"{path}: {why}" for path in needed if (why := why_uncompilable(path))), None)


def why_uncompilable(path: str) -> str | None:
    """The reason why torch's C++ compilation fails with this path in it; None if it does not.

    torch builds a command line without quotes, and then splits it as a shell does.
    """
    return (
        "torch.compile takes no path with a space, a quote or a backslash" if set(path) & set(" \t\r\n'\"\\") else None
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the error is a failed allocation.

    Only torch's caching allocator has its own type of error. The CPU's allocator, cuBLAS, the loading of CUDA kernels
    and the compiler's benchmarks raise RuntimeErrors with one of these messages.
    """
    messages = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(message in str(error) for message in messages)


def free_memory(device: Device) -> int | None:
    """Bytes of memory that processes on this device can still allocate; None if unknown."""
    if isinstance(device, Gpu):
        return device.memory_bytes
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    return max(0, min([psutil.virtual_memory().available, *_left_in_cgroups()]))


def _left_in_cgroups() -> Iterator[int]:
    """Yield the free bytes under each memory limit of this process, by a container or a SLURM job (cgroup v2)."""
    if not OWN_CGROUP.exists():
        return
    unified = [line[3:] for line in OWN_CGROUP.read_text().splitlines() if line.startswith("0::")]
    for path in unified:
        own = CGROUP / path.strip("/")
        for group in (own, *own.parents):
            if not group.is_relative_to(CGROUP) or not (group / "memory.max").exists():
                continue
            limit = (group / "memory.max").read_text().strip()
            if limit.isdigit():  # "max": no limit
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                # The page cache counts as used, but the kernel frees it on demand.
                used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
                yield int(limit) - used


def check_device(wanted: str, rank: Rank) -> str:
    """The type of the device of `rank`: `wanted`; for "auto" the first available of cuda, mps (only one rank) and cpu.

    Raises `ConfigError` if the wanted device is missing, or if there are more ranks than GPUs on the node.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(k for k in available if available[k]) if wanted == "auto" else wanted
    if kind == "mps" and rank.world_size > 1 and wanted == "auto":
        kind = "cpu"
    if not available[kind]:
        raise ConfigError(f"train.device={kind}: no {kind} device is visible to this process; use train.device=cpu")
    if kind == "cuda" and rank.local_rank >= torch.cuda.device_count() and not _sees_only_its_gpu(rank):
        raise ConfigError(
            f"world.size={rank.world_size}: local rank {rank.local_rank} has no GPU, because this node has "
            f"{counted(torch.cuda.device_count(), 'GPU')}; start at most that many ranks per node, or use "
            "train.device=cpu"
        )
    return kind


def pick_device(wanted: str, rank: Rank) -> torch.device:
    """The device of this rank, checked by `check_device`. A GPU becomes the current device of the process."""
    kind = check_device(wanted, rank)
    if kind != "cuda":
        return torch.device(kind)
    if _sees_only_its_gpu(rank):
        return torch.device("cuda", 0)
    torch.cuda.set_device(rank.local_rank)
    return torch.device("cuda", rank.local_rank)


def _sees_only_its_gpu(rank: Rank) -> bool:
    """Whether srun has made only one GPU visible to this task."""
    return rank.by_srun and torch.cuda.device_count() == 1


def resolve_fused(wanted: str, device: Device) -> bool:
    """Whether to use AdamW's fused kernel. Raises `ConfigError` if it is "on" and the device has none."""
    available = device.type in _get_fused_kernels_supported_devices()
    if wanted == "on" and not available:
        raise ConfigError(f"optim.fused=on: AdamW has no fused kernel for {device.type}; use optim.fused=auto")
    return available and wanted != "off"
