"""What this machine has: its device's name and arithmetic, free memory, and glibc's allocator told to keep memory."""

import ctypes
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

PROBE = 1024  # rows and columns of the matrices that are multiplied to learn how
CGROUP = Path("/sys/fs/cgroup")


def device_name(device: torch.device) -> str:
    """What the maker calls it, as far as torch knows."""
    if device.type == "cuda" and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        return f"{platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}"
    return device.type


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16 itself; emulation is far slower than float32.

    A GPU that is not here, for which somebody plans, is taken to be no older than 2020.
    """
    if device.type == "cuda":
        return not torch.cuda.is_available() or bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        has = torch.cpu.get_capabilities()
        return bool(has.get("avx512_bf16") or has.get("amx_bf16") or has.get("bf16"))
    return False


def is_hopper(device: torch.device) -> bool:
    """Whether it is an H100 or one of its kin, whose attention cuDNN computes fastest."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9


def medium_precision() -> tuple[float, float]:
    """(relative error, speed against "highest") of this CPU's float32 products at matmul precision "medium".

    "medium" lets oneDNN multiply. Where it has a float32 kernel for AVX-512 that is as exact as any and twice as fast;
    where the CPU multiplies bfloat16 in tiles (AMX) it rounds to that. Neither is documented, so it is measured.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(PROBE, PROBE, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        slow = _seconds(a, b)
        torch.set_float32_matmul_precision("medium")
        error = float(((a @ b).double() - exact).norm() / exact.norm())
        return error, slow / _seconds(a, b)
    finally:
        torch.set_float32_matmul_precision(before)


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of one product, the median of five after a first that is not counted."""
    taken = []
    for _ in range(6):
        started = time.perf_counter()
        a @ b
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def memory_bytes(device: torch.device) -> int | None:
    """All of a GPU's memory, or what a CPU's processes may still take; None where neither is known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory if torch.cuda.is_available() else None
    if device.type != "cpu":
        return None
    import psutil

    available = int(psutil.virtual_memory().available)
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"  # a container's, or a job's under SLURM
    if limit.exists() and used.exists() and (most := limit.read_text().strip()).isdigit():
        available = min(available, int(most) - int(used.read_text()))
    return max(0, available)


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep what is freed: it maps every large buffer anew otherwise.

    The page faults of fresh mappings were half of a small model's step (mallopt(3): M_MMAP_MAX, M_TRIM_THRESHOLD,
    M_TOP_PAD). Other C libraries have no such call.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_top_pad, 256 << 20)
