"""What this machine's CPU computes fast, by its make and instructions; settings of arithmetic and of glibc's allocator.

Nothing here is timed, so that the bits of a run do not depend on what else the machine does at its start.
"""

import ctypes
import platform
from functools import cache
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")
PROBE = 1024  # rows and columns of the matrices in `onednn_float32_error`
# Largest relative error of a product that counts as float32. At 1,024²: 3e-7 in float32, 3e-3 in bfloat16.
FLOAT32_ERROR = 2e-6


@cache
def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first core; empty on other systems."""
    if not CPUINFO.exists():
        return {}
    first, _, _ = CPUINFO.read_text().partition("\n\n")
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def fingerprint() -> str:
    """A text that is equal for CPUs of one model and visible instructions; a virtual machine may hide some of these."""
    about = _cpuinfo()
    named = [about.get(key, "") for key in ("vendor_id", "model name", "cpu family", "model", "stepping")]
    shown = sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True)
    return " ".join([platform.machine(), *named, *shown])


def has_native_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16; emulation is far slower than float32."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16") or has.get("bf16"))


def has_fast_bfloat16() -> bool:
    """Whether products in bfloat16 take less time than in float32.

    AMX and AMD's AVX-512 compute them two to four times as fast. Intel CPUs since Sapphire Rapids, known by their
    avx512_fp16, leave them to AMX; but virtual machines may hide AMX. Such a virtual machine reached 165 GFLOP/s in
    bfloat16 and 300 in float32, at every shape.
    """
    has = torch.cpu.get_capabilities()
    leaves_them_to_amx = _cpuinfo().get("vendor_id") == "GenuineIntel" and has.get("avx512_fp16")
    return bool(has_amx() or (has_native_bfloat16() and not leaves_them_to_amx))


def has_amx() -> bool:
    """Whether products in bfloat16 are computed in AMX's tiles, which small products fill badly."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def has_fast_onednn_float32() -> bool:
    """Whether oneDNN's float32 products (torch's matmul precision "medium") are faster than MKL's.

    MKL is slow on AMD: 200 GFLOP/s where oneDNN reaches 430 with AVX-512. On Intel both are equal for large matrices,
    and MKL is twice as fast for the small ones of a model of width 128.
    """
    return _cpuinfo().get("vendor_id") == "AuthenticAMD" and bool(torch.cpu.get_capabilities().get("avx512_f"))


@cache
def onednn_float32_error() -> float:
    """Relative error of a float32 product at matmul precision "medium".

    With AVX-512, oneDNN's kernel is as exact as MKL's. On a CPU with AMX it rounds to bfloat16. Neither is documented.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(PROBE, PROBE, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        return float(((a @ b).double() - exact).norm() / exact.norm())
    finally:
        torch.set_float32_matmul_precision(before)


def flush_denormals() -> None:
    """Compute with 0 in place of numbers below 1.2e-38, in this thread and in those that it starts later.

    A CPU takes a hundred times as long for such numbers. With a large learning rate, a few per cent of the gradients of
    attention are so small, and a step of 4 layers of width 128 took 58 ms in place of 31.
    """
    torch.set_flush_denormal(True)


def keep_freed_memory() -> None:
    """Configure glibc's malloc to keep freed memory; by default it maps every large buffer again.

    The page faults of new mappings took half of the time of a small model's step (mallopt(3): M_MMAP_MAX,
    M_TRIM_THRESHOLD, M_TOP_PAD). Other C libraries have no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, -1)  # never trims
        mallopt(m_top_pad, 256 << 20)
