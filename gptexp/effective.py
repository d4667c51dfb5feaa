"""What every `auto` comes to on this machine, decided once per run and written beside its config.

A resumed run, and every cell of a sweep, reuses the decision, so that neither the length of the remainder nor what
else runs on the machine changes a bit of the result.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from gptexp.config import Config
from gptexp.distributed import Rank
from gptexp.optim import resolve_fused


@dataclass(frozen=True)
class Effective:
    """The choices, and in `reasons` why each was made."""

    device: str  # cuda, mps or cpu
    device_name: str
    dtype: str  # of the autocast region: float32 or bfloat16
    compile: bool
    loss: str  # plain or chunked
    fused: bool  # AdamW's kernel
    matmul_precision: str  # of what stays float32: "high" is TF32
    threads_per_rank: int
    micro_batch_size: int
    seq_len: int
    reasons: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def resolve(cfg: Config, device: torch.device, rank: Rank) -> Effective:
    """Decide; raises `ConfigError` where something asked for is not there."""
    reasons: dict[str, str] = {}

    def choose(key: str, wanted: str, auto: tuple[str, str]) -> str:
        """What was asked for, or `auto`'s (value, reason)."""
        value, reason = auto
        reasons[key] = reason if wanted == "auto" else "asked for"
        return value if wanted == "auto" else wanted

    native_bf16 = has_native_bfloat16(device)
    dtype = choose(
        "dtype",
        cfg.train.dtype,
        ("bfloat16", f"{device.type} computes in it")
        if native_bf16
        else ("float32", f"this {device.type} has no bfloat16 arithmetic of its own"),
    )
    compiled = choose(
        "compile",
        cfg.train.compile,
        ("on", "a GPU: compiling pays within minutes")
        if device.type == "cuda"
        else ("off", f"on {device.type} compiling costs a short run more than it saves"),
    )
    loss = choose(
        "loss",
        cfg.train.loss,
        ("chunked", "nothing is compiled: no logits are kept")
        if device.type == "cpu" and compiled == "off"
        else ("plain", "the compiler fuses it" if compiled == "on" else f"fast enough on {device.type}"),
    )
    fused = resolve_fused(cfg.optim.fused, device)
    reasons["fused"] = "asked for" if cfg.optim.fused != "auto" else f"{device.type} has {'it' if fused else 'none'}"
    cores = _cores()
    threads = cfg.world.threads_per_rank or max(1, cores // rank.local_world_size)
    reasons["threads_per_rank"] = (
        "asked for" if cfg.world.threads_per_rank else f"{cores} cores for {rank.local_world_size} ranks"
    )
    return Effective(
        device=device.type,
        device_name=device_name(device),
        dtype=dtype,
        compile=compiled == "on",
        loss=loss,
        fused=fused,
        matmul_precision="high" if device.type == "cuda" else "highest",
        threads_per_rank=threads,
        micro_batch_size=cfg.batch.micro_batch_size,
        seq_len=cfg.batch.seq_len or cfg.model.block_size,
        reasons=reasons,
    )


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16 itself; emulation is far slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        has = torch.cpu.get_capabilities()
        return bool(has.get("avx512_bf16") or has.get("amx_bf16") or has.get("bf16"))
    return False


def device_name(device: torch.device) -> str:
    """What the maker calls it, as far as torch knows."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        return f"{platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}"
    return device.type


def apply(effective: Effective, deterministic: bool = False) -> None:
    """Set this process up; call it before the first large tensor is made."""
    torch.set_num_threads(effective.threads_per_rank)
    torch.set_float32_matmul_precision(effective.matmul_precision)
    if effective.device == "cpu":
        _keep_freed_memory()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def make_autocast(effective: Effective, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A factory of the forward pass's precision context; does nothing in float32."""
    if effective.dtype == "float32":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


def _keep_freed_memory() -> None:
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
