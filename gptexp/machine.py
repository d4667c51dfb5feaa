"""What this machine has: its device's name and arithmetic, free memory, and glibc's allocator told to keep memory."""

import ctypes
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

PROBE = 1024  # rows and columns of the matrices that are multiplied to learn how
CGROUP, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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


def compute_capability(device: torch.device) -> int:
    """Of a GPU, the major number: 8 for Ampere, 9 for Hopper, 10 for Blackwell. One not here is taken for Ampere."""
    return torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else 8


def missing_compiler(device: torch.device) -> str | None:
    """What torch.compile would lack on this machine; None if nothing."""
    if device.type == "cuda":
        if find_spec("triton") is None:
            return "Triton is not installed"
        return None if compute_capability(device) >= 7 else "Triton compiles for no GPU older than Volta"
    wanted = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return None if shutil.which(wanted) else f"{wanted}, the C++ compiler it needs, is not installed"


def compile_options() -> dict[str, bool]:
    """For torch.compile: that vector instructions run, as torch's own kernels show, without a trial.

    The trial, whether a program with them can be compiled and loaded, costs 3 s of a cold start and half a second of
    a warm one. With AVX-512, torch still makes others, for what some CPUs have besides.
    """
    return {"cpp.vec_isa_ok": True} if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else {}


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed; only the caching allocator's own error has a type.

    The CPU's allocator, the libraries' own (cuBLAS), CUDA's loading of a kernel and the compiler's benchmarks raise
    RuntimeErrors that say so.
    """
    signs = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)


def release_memory() -> None:
    """Give back what torch keeps of a GPU's memory that nobody uses."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


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


def free_memory(device: torch.device) -> int | None:
    """Bytes that this device's processes may still take; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None
    if device.type != "cpu":
        return None
    import psutil

    return max(0, min([psutil.virtual_memory().available, *_left_in_cgroups()]))


def _left_in_cgroups() -> Iterator[int]:
    """Bytes left under each limit that this process lives under, a container's or a SLURM job's (cgroup v2)."""
    if not OWN_CGROUP.exists():
        return
    unified = [line[3:] for line in OWN_CGROUP.read_text().splitlines() if line.startswith("0::")]
    for path in unified:
        own = CGROUP / path.strip("/")
        for group in (own, *own.parents):
            if not group.is_relative_to(CGROUP) or not (group / "memory.max").exists():
                continue
            limit = (group / "memory.max").read_text().strip()
            if limit.isdigit():  # and not "max"
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                # What is cached of files counts as used, and goes as soon as somebody needs the room.
                used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
                yield int(limit) - used


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
        mallopt(m_trim_threshold, -1)  # never
        mallopt(m_top_pad, 256 << 20)
