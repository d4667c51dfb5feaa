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
from gptexp.distributed import Rank, cores_per_rank
from gptexp.optim import resolve_fused

ASKED = "asked for"


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
    local_world_size: int  # ranks on a node, which share its cores
    reasons: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def resolve(cfg: Config, device: torch.device, rank: Rank, earlier: dict[str, Any] | None = None) -> Effective:
    """Decide; raises `ConfigError` where something asked for is not there.

    What the config asks for holds, always; an `auto` is what `earlier`, the saved decision of this run or sweep, says
    where that was made on the same kind of device, else decided now.
    """
    before = earlier if earlier and earlier["device"] == device.type else {}
    reasons: dict[str, str] = {}

    def choose(key: str, wanted: Any, auto: Any, why: str) -> Any:
        """`wanted` unless that is None, else the earlier choice, else `auto`."""
        if wanted is not None:
            reasons[key] = ASKED
            return wanted
        said = before.get("reasons", {}).get(key)
        if key not in before or said == ASKED:  # what another cell of the sweep was asked for is no decision
            reasons[key] = why
            return auto
        reasons[key] = said
        return before[key]

    bf16 = has_native_bfloat16(device)
    dtype = choose(
        "dtype",
        _unless_auto(cfg.train.dtype),
        "bfloat16" if bf16 else "float32",
        f"the {device.type} computes in it" if bf16 else f"this {device.type} has no bfloat16 arithmetic of its own",
    )
    on_gpu = device.type == "cuda"
    compiled = choose(
        "compile",
        {"on": True, "off": False, "auto": None}[cfg.train.compile],
        on_gpu,
        "it pays within minutes" if on_gpu else f"on this {device.type} it costs a short run more than it saves",
    )
    chunked = device.type == "cpu" and not compiled
    loss = choose(
        "loss",
        _unless_auto(cfg.train.loss),
        "chunked" if chunked else "plain",
        "no logits are kept" if chunked else "the compiler fuses it" if compiled else "fast enough here",
    )
    fused = choose(
        "fused",
        None if cfg.optim.fused == "auto" else resolve_fused(cfg.optim.fused, device),
        resolve_fused("auto", device),
        f"AdamW's kernel for {device.type}",
    )
    if before.get("local_world_size") != rank.local_world_size:
        before = {key: value for key, value in before.items() if key != "threads_per_rank"}
    threads = choose(
        "threads_per_rank", cfg.world.threads_per_rank, cores_per_rank(rank), "the node's cores shared out"
    )
    return Effective(
        device=device.type,
        device_name=device_name(device),
        dtype=dtype,
        compile=compiled,
        loss=loss,
        fused=fused,
        matmul_precision="high" if on_gpu else "highest",
        threads_per_rank=threads,
        local_world_size=rank.local_world_size,
        reasons=reasons,
    )


def _unless_auto(wanted: str) -> str | None:
    return None if wanted == "auto" else wanted


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
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call imports the compiler: a second
        torch.use_deterministic_algorithms(deterministic)


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
