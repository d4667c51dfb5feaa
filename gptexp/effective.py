"""What every `auto` comes to on this machine, decided once per run and written beside its config.

A resumed run, and every cell of a sweep, reuses the decision, so that neither the length of the remainder nor what
else runs on the machine changes a bit of the result.
"""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gptexp import run_dir
from gptexp.attention import attention_kernel, best_kernel, check_kernel
from gptexp.batch import legal_micro_batches, run_length
from gptexp.config import AUTO, Config, from_dict, memory_key
from gptexp.distributed import Rank, cores_per_rank, runs_at_once
from gptexp.errors import ConfigError
from gptexp.flops import flops_per_token
from gptexp.machine import (
    device_name,
    free_memory,
    has_native_bfloat16,
    keep_freed_memory,
    medium_precision,
    missing_compiler,
)
from gptexp.memory import Memory, memory_estimate
from gptexp.optim import resolve_fused

ForwardContext = Callable[[], AbstractContextManager[object]]

# For the terminal, whose column is 16 wide.
SHORT_NAMES = {"matmul_precision": "float32 matmul", "micro_batch_size": "micro-batch", "threads_per_rank": "threads"}

ASKED = "asked for"
ESTIMATED = "the largest that divides and, by estimate, fits"

FLOAT32_ERROR = 2e-6  # relative, of a product of 1,024: float32 gives 3e-7, bfloat16 3e-3
FASTER = 1.1  # a kernel that gains less gains nothing that can be told from noise
COMPILE_S = 35.0  # what a first compilation costs on two cores: 25 to 45 s at 4 to 12 layers
CACHED_S = 5.0  # and what is left of that for the other cells of a sweep, which find its result in the cache
COMPILE_GAIN = 0.2  # share of an eager step's time that the compiler takes away where products are fast
EAGER_FLOPS = 100e9  # per second and core, what an eager step gets of a CPU where products are fast
USABLE = 0.85  # share of a machine's memory that an estimate may fill


@dataclass(frozen=True)
class Effective:
    """The choices, and in `reasons` why each was made."""

    device: str  # cuda, mps or cpu
    device_name: str
    dtype: str  # of the autocast region: float32 or bfloat16
    matmul_precision: str  # of what stays float32, in torch's words: "high" is TF32
    attention: str  # kernel of scaled_dot_product_attention
    compile: bool
    loss: str  # plain or chunked
    fused: bool  # AdamW's kernel
    micro_batch_size: int  # sequences per rank and forward pass (B)
    memory_key: str  # of the config that the micro-batch size was chosen for
    threads_per_rank: int
    local_world_size: int  # ranks on a node, which share its cores
    reasons: dict[str, str]
    peak_flops_per_rank: float | None = None  # FLOP/s of matrix products, where log.mfu_peak has had it measured

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def described(self) -> list[tuple[str, str]]:
        """(short name, choice and reason) of each, for the terminal."""
        lines = []
        for key, why in self.reasons.items():
            value = getattr(self, key)
            shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
            lines.append((SHORT_NAMES.get(key, key), f"{shown}: {why}"))
        return lines


def load_effective(directory: Path) -> dict[str, Any]:
    """What a run decided, as `resolve` takes it; empty before it has. Raises `ConfigError` for anything else."""
    path = directory / run_dir.EFFECTIVE
    values = run_dir.read_json(path)
    try:
        if values:
            from_dict(values, Effective)
            peak = values.get("peak_flops_per_rank")
            if peak is not None and not 0 < peak < math.inf:
                raise ValueError(f"peak_flops_per_rank={peak} is no rate")
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: no decisions of a run ({error}); remove it, or start a new run") from None
    return values


def resolve(cfg: Config, device: torch.device, rank: Rank, earlier: dict[str, Any] | None = None) -> Effective:
    """Decide; raises `ConfigError` where something asked for is not there.

    What the config asks for holds, always; an `auto` is what `earlier`, the saved decision of this run or sweep, says
    where that was made on the same kind of device, else decided now.
    """
    before = earlier if earlier and earlier["device"] == device.type else {}
    reasons: dict[str, str] = {}

    def choose(key: str, wanted: Any, auto: Callable[[], tuple[Any, str]], holds: bool = True) -> Any:
        """`wanted` unless that is None, else the earlier choice if it `holds`, else what `auto` says."""
        if wanted is not None:
            value, reasons[key] = wanted, ASKED
        elif key in before and holds and before["reasons"].get(key) != ASKED:
            value, reasons[key] = before[key], before["reasons"][key]
        else:  # nothing earlier, or what another cell of the sweep was asked for, which is no decision
            value, reasons[key] = auto()
        return value

    train, kind = cfg.train, device.type
    dtype = choose("dtype", _unless_auto(train.dtype), lambda: _dtype(device))
    precision = choose("matmul_precision", _unless_auto(train.matmul_precision), lambda: _matmul_precision(device))
    same_dtype = before.get("dtype") == dtype  # what follows from another cell's does not hold here
    attention = choose("attention", _unless_auto(train.attention), lambda: best_kernel(device, dtype), same_dtype)
    check_kernel(attention, kind, dtype)
    wanted_compile = {"on": True, "off": False, AUTO: None}[train.compile]
    compiled = choose("compile", wanted_compile, lambda: _compile(cfg, device, rank, dtype, precision), same_dtype)
    same_graph = same_dtype and before.get("compile") == compiled
    loss = choose("loss", _unless_auto(train.loss), lambda: _loss(kind, dtype, compiled), same_graph)
    wanted_fused = None if cfg.optim.fused == AUTO else resolve_fused(cfg.optim.fused, device)
    fused = choose("fused", wanted_fused, lambda: (resolve_fused(AUTO, device), f"AdamW's kernel for {kind}"))
    same_node = before.get("local_world_size") == rank.local_world_size  # its ranks share cores and memory
    threads = choose(
        "threads_per_rank",
        1 if train.reduction == "tree" else cfg.world.threads_per_rank,
        lambda: (cores_per_rank(rank), "the node's cores shared out"),
        same_node,
    )
    needs = memory_key(cfg)
    largest = Effective(
        device=kind,
        device_name=device_name(device),
        dtype=dtype,
        matmul_precision=precision,
        attention=attention,
        compile=compiled,
        loss=loss,
        fused=fused,
        micro_batch_size=cfg.batch.total_batch_size // (cfg.seq_len * rank.world_size),
        memory_key=needs,
        threads_per_rank=threads,
        local_world_size=rank.local_world_size,
        reasons=reasons,
        peak_flops_per_rank=before.get("peak_flops_per_rank") if same_dtype and same_node else None,
    )
    size = choose(
        "micro_batch_size",
        cfg.batch.asked_micro_batch_size,
        lambda: _micro_batch_size(cfg, largest, device, rank),
        same_graph and same_node and before.get("memory_key") == needs,
    )
    return replace(largest, micro_batch_size=size, reasons=reasons)


def estimate(cfg: Config, effective: Effective, world_size: int) -> Memory:
    """What a rank's tensors will take."""
    return memory_estimate(
        cfg.model,
        micro_batch_size=effective.micro_batch_size,
        seq_len=cfg.seq_len,
        grad_accum_steps=cfg.batch.total_batch_size // (effective.micro_batch_size * cfg.seq_len * world_size),
        world_size=world_size,
        device=effective.device,
        dtype=effective.dtype,
        compiled=effective.compile,
        loss=effective.loss,
        activation_checkpointing=cfg.train.activation_checkpointing,
        tree=cfg.train.reduction == "tree",
    )


def _unless_auto(wanted: str) -> str | None:
    return None if wanted == AUTO else wanted


def _dtype(device: torch.device) -> tuple[str, str]:
    if has_native_bfloat16(device):
        return "bfloat16", f"the {device.type} computes in it"
    return "float32", f"this {device.type} has no bfloat16 arithmetic of its own"


def _matmul_precision(device: torch.device) -> tuple[str, str]:
    if device.type == "cuda":
        return "high", "TF32, where the GPU has it, for what stays float32"
    if device.type != "cpu" or not torch.cpu.get_capabilities().get("avx512_f"):
        return "highest", "no other float32 kernel is faster here"
    error, speed = medium_precision()
    if error > FLOAT32_ERROR:
        return "highest", f"oneDNN would round, to a relative error of {error:.1e}"
    if speed < FASTER:
        return "highest", f"oneDNN's float32 kernel is {speed:.2f} times as fast here"
    return "medium", f"oneDNN's float32 kernel, {speed:.1f} times as fast at a relative error of {error:.1e}"


def _compile(cfg: Config, device: torch.device, rank: Rank, dtype: str, precision: str) -> tuple[bool, str]:
    """Whether the time saved is worth the wait; on a GPU, where a step is two times as fast, nearly always."""
    if device.type not in ("cuda", "cpu"):
        return False, f"torch compiles little for {device.type}"
    if missing := missing_compiler(device):
        return False, missing
    if device.type == "cuda":
        return True, "takes a minute or two, and a step is about twice as fast"
    if dtype == "float32" and precision == "highest":
        return False, "slow float32 products are nearly all of a step, and it makes none of them faster"
    steps, _ = run_length(cfg.train.max_tokens, cfg.train.max_steps, cfg.batch.total_batch_size)
    per_token, _ = flops_per_token(cfg.model, cfg.seq_len)
    eager_s = steps * cfg.batch.total_batch_size * per_token / (rank.world_size * cores_per_rank(rank) * EAGER_FLOPS)
    cells = cfg.sweep.cells
    saved_s, cost_s = COMPILE_GAIN * eager_s * cells, COMPILE_S + CACHED_S * (cells - 1)
    of = "the whole run" if cells == 1 else f"all {cells} cells"
    return saved_s > cost_s, f"saves about {saved_s:,.0f} s of {of} and costs {cost_s:,.0f} s"


def _loss(kind: str, dtype: str, compiled: bool) -> tuple[str, str]:
    if kind == "cpu" and (dtype == "float32" or not compiled):
        return "chunked", "no logits are kept"
    return "plain", "the compiler fuses it" if compiled else "fast enough here"


def _micro_batch_size(cfg: Config, effective: Effective, device: torch.device, rank: Rank) -> tuple[int, str]:
    memory = free_memory(device)
    if memory is None:
        return 1, "how much memory there is is not known"
    usable = USABLE * memory / (rank.local_world_size * runs_at_once() if device.type == "cpu" else 1)

    def fits(size: int) -> bool:
        return estimate(cfg, replace(effective, micro_batch_size=size), rank.world_size).peak <= usable

    sizes = legal_micro_batches(cfg.batch.total_batch_size, cfg.seq_len, rank.world_size)
    return next(filter(fits, sizes), 1), ESTIMATED


def apply(effective: Effective, deterministic: bool = False) -> None:
    """Set this process up; call it before the first large tensor is made."""
    torch.set_num_threads(effective.threads_per_rank)
    torch.set_float32_matmul_precision(effective.matmul_precision)
    if effective.device == "cpu":
        keep_freed_memory()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call imports the compiler: a second
        torch.use_deterministic_algorithms(deterministic)


def forward_context(effective: Effective) -> ForwardContext:
    """A factory of what each forward pass runs in: autocast, or nothing."""
    if effective.dtype == "float32":
        return nullcontext
    return partial(torch.autocast, effective.device, dtype=torch.bfloat16)


def step_context(effective: Effective) -> AbstractContextManager[object]:
    """What whole steps run in, entered once: the choice of attention's kernel."""
    return attention_kernel(effective.attention, effective.reasons["attention"] == ASKED, effective.device)
