"""The choice of a value for every `auto` that affects training, made once per run and saved as effective.json.

A resumed run and every cell of a sweep reuse the choices. So neither the length of a cell nor other processes on the
machine change the bits of the result.
"""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

import torch

from gptexp.config.batch import legal_micro_batches
from gptexp.config.schema import AUTO, AdamWConfig, Config, fits_type, memory_key
from gptexp.config.vocabulary import VOCAB_SIZES, with_vocab_size
from gptexp.distributed.ranks import Rank, cores_per_rank, runs_at_once
from gptexp.machine.attention import attention_kernel, best_kernel, check_kernel
from gptexp.machine.device import (
    Device,
    compute_capability,
    device_name,
    free_memory,
    has_native_bfloat16,
    keep_freed_memory,
    medium_precision,
    missing_compiler,
    resolve_fused,
)
from gptexp.model.flops import flops_per_token
from gptexp.model.memory import Memory, StepShape, memory_estimate
from gptexp.process.errors import ConfigError
from gptexp.process.words import duration, shown
from gptexp.storage import run_dir
from gptexp.storage.init_from import choose_vocab_size

ForwardContext = Callable[[], AbstractContextManager[object]]
Source = Literal["asked", "decided", "saved"]
T = TypeVar("T")

# Names for the terminal, where the first column is 16 characters wide.
SHORT_NAMES = {
    "vocab_size": "vocabulary",
    "matmul_precision": "float32 matmul",
    "micro_batch_size": "micro-batch",
    "threads_per_rank": "threads",
}

ASKED = "asked for"  # the reason of a value from the config; older versions saved only reasons and no sources
# Largest relative error of a product that counts as float32. At 1,024²: 3e-7 in float32, 3e-3 in bfloat16.
FLOAT32_ERROR = 2e-6
FASTER = 1.1  # minimum speedup of a kernel; a smaller one is within the noise of the measurement
COMPILE_S = 35.0  # seconds of a first compilation on two cores: 25 to 45 s for 4 to 12 layers
CACHED_S = 5.0  # seconds of a compilation with a cached result, as in the other cells of a sweep
COMPILE_GAIN = 0.2  # share of an eager step's time that compilation saves on a CPU with fast matrix products
EAGER_FLOPS = 100e9  # FLOP/s per core of an eager step on a CPU with fast matrix products
USABLE = 0.85  # maximum share of the free memory that an estimate may use


@dataclass(frozen=True)
class Choice(Generic[T]):
    """The value of a key, with its origin."""

    value: T
    source: Source  # asked: from the config; decided: on this machine, now; saved: by an earlier start or another cell
    reason: str  # text for people


@dataclass(frozen=True)
class Effective:
    """The choices of one run."""

    device: str  # cuda, mps or cpu
    device_name: str
    n_vocab: int  # ids of the tokenizer for which vocab_size was chosen
    vocab_size: Choice[int]  # rows of wte
    dtype: Choice[str]  # float32, or bfloat16 by autocast
    matmul_precision: Choice[str]  # of products in float32, torch's names; "high" is TF32
    attention: Choice[str]  # kernel of scaled_dot_product_attention
    compile: Choice[bool]
    loss: Choice[str]  # plain or chunked
    fused: Choice[bool]  # AdamW's kernel
    threads_per_rank: Choice[int]
    micro_batch_size: Choice[int]  # sequences per rank and forward pass (B)
    memory_key: str  # of the config for which the micro-batch size was chosen
    local_world_size: int  # ranks per node, which share its cores
    peak_flops_per_rank: float | None = None  # FLOP/s of matrix products, if measured for log.mfu_peak

    @property
    def choices(self) -> dict[str, Choice[Any]]:
        """The choices by key, in the order in which they were made."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Choice)}

    def to_dict(self) -> dict[str, Any]:
        """The content of effective.json: plain values, with `reasons` and `sources` by key."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self)},
            **{key: choice.value for key, choice in self.choices.items()},
            "reasons": {key: choice.reason for key, choice in self.choices.items()},
            "sources": {key: choice.source for key, choice in self.choices.items()},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Effective":
        """The inverse of `to_dict`; `sources` may be missing. Raises `ValueError` for wrong keys or types."""
        # In an older version the config of every run had a number.
        if not {"vocab_size", "n_vocab"} & values.keys():
            values = {**values, "n_vocab": 0, "vocab_size": 0, "reasons": {**values["reasons"], "vocab_size": ASKED}}
        reasons, sources = values["reasons"], values.get("sources", {})
        known = {f.name: f.type for f in fields(cls)}
        if unknown := sorted(values.keys() - known.keys() - {"reasons", "sources"}):
            raise ValueError(f"unknown key '{unknown[0]}'; another version of gptexp may have saved it")
        rebuilt: dict[str, Any] = {}
        for key, kind in known.items():
            value = values.get(key) if key == "peak_flops_per_rank" else values[key]
            is_choice = getattr(kind, "__origin__", None) is Choice
            if not fits_type(value, get_args(kind)[0] if is_choice else kind):
                raise ValueError(f"{key}={shown(value)}: wrong type")
            if is_choice:
                reason = str(reasons[key])
                source = sources.get(key, "asked" if reason == ASKED else "decided")
                if source not in get_args(Source):
                    raise ValueError(f"sources.{key}={shown(source)}: must be one of {', '.join(get_args(Source))}")
                value = Choice(value, source, reason)
            rebuilt[key] = value
        return cls(**rebuilt)

    def described(self) -> list[tuple[str, str]]:
        """(short name, value with reason) of each choice, for the terminal."""
        lines = []
        for key, choice in self.choices.items():
            value = {True: "on", False: "off"}[choice.value] if isinstance(choice.value, bool) else choice.value
            lines.append((SHORT_NAMES.get(key, key), f"{value}: {choice.reason}"))
        return lines


def load_effective(directory: Path) -> Effective | None:
    """Load the choices of a run directory; None if the file is missing. Raises `ConfigError` for a damaged file."""
    path = directory / run_dir.EFFECTIVE
    values = run_dir.read_json(path)
    if not values:
        return None
    try:
        effective = Effective.from_dict(values)
        peak = effective.peak_flops_per_rank
        if peak is not None and not 0 < peak < math.inf:
            raise ValueError(f"peak_flops_per_rank={peak}: must be finite and above 0")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: not the saved choices of a run ({error}); remove it, or start a new run") from None
    return effective


def save_effective(directory: Path, effective: Effective) -> None:
    run_dir.write_json(directory / run_dir.EFFECTIVE, effective.to_dict())


def _choose(asked: T | None, saved: Choice[T] | None, decide: Callable[[], tuple[T, str]]) -> Choice[T]:
    """The value in the config unless it is None or "auto", else the saved one, else a new decision.

    A saved value that came from the config of an earlier start, or of another cell of the sweep, is not used.
    """
    if asked is not None and asked != AUTO:
        return Choice(asked, "asked", ASKED)
    if saved is not None and saved.source != "asked":
        return Choice(saved.value, "saved", saved.reason)
    value, reason = decide()
    return Choice(value, "decided", reason)


def resolve(
    cfg: Config, device: Device, rank: Rank, earlier: Effective | None = None, n_vocab: int | None = None
) -> Effective:
    """Choose a value for every `auto`. `earlier` holds the saved choices of this run or sweep.

    Values in the config take precedence over `earlier`, which is used only for the same type of device. `n_vocab` is
    the number of ids of the tokenizer; None: that of a tokenizer in `VOCAB_SIZES`. Raises `ConfigError` for a value in
    the config that this machine does not support.
    """
    n_vocab = VOCAB_SIZES.get(cfg.data.tokenizer, 0) if n_vocab is None else n_vocab
    same_tokenizer = earlier is not None and earlier.n_vocab == n_vocab
    vocab_size = _choose(
        cfg.model.vocab_size if isinstance(cfg.model.vocab_size, int) else None,
        earlier.vocab_size if earlier is not None and same_tokenizer else None,
        lambda: choose_vocab_size(cfg, n_vocab),
    )
    key, cfg = memory_key(cfg), with_vocab_size(cfg, vocab_size.value)
    before = earlier if earlier is not None and earlier.device == device.type else None
    saved = before.choices if before else {}
    train, kind = cfg.train, device.type

    dtype = _choose(train.dtype, saved.get("dtype"), lambda: _dtype(device))
    precision = _choose(train.matmul_precision, saved.get("matmul_precision"), lambda: _matmul_precision(device))
    # The saved choices, if the dtype is the same; `for_graph`: if compilation is too.
    for_dtype = saved if before and before.dtype.value == dtype.value else {}
    attention = _choose(train.attention, for_dtype.get("attention"), lambda: best_kernel(device, dtype.value))
    check_kernel(attention.value, kind, dtype.value)
    compiled = _choose(
        {"on": True, "off": False, AUTO: None}[train.compile],
        for_dtype.get("compile"),
        lambda: _compile(cfg, device, rank, dtype.value, precision.value),
    )
    for_graph = for_dtype if before and before.compile.value == compiled.value else {}
    loss = _choose(train.loss, for_graph.get("loss"), lambda: _loss(kind, dtype.value, compiled.value))
    # "asked", so that a cell of the sweep with AdamW does not take it over.
    fused = Choice(False, "asked", f"gptexp uses no fused kernel for {cfg.optim.name}")
    if isinstance(cfg.optim, AdamWConfig):
        fused = _choose(
            None if cfg.optim.fused == AUTO else resolve_fused(cfg.optim.fused, device),
            saved.get("fused"),
            lambda: _fused(device),
        )
    same_node = before is not None and before.local_world_size == rank.local_world_size
    threads = _choose(
        1 if train.reduction == "tree" else cfg.world.threads_per_rank,
        saved.get("threads_per_rank") if same_node else None,
        lambda: (cores_per_rank(rank), "the node's cores divided by its ranks"),
    )
    effective = Effective(
        device=kind,
        device_name=device_name(device),
        n_vocab=n_vocab,
        vocab_size=vocab_size,
        dtype=dtype,
        matmul_precision=precision,
        attention=attention,
        compile=compiled,
        loss=loss,
        fused=fused,
        threads_per_rank=threads,
        micro_batch_size=Choice(1, "decided", ""),  # a placeholder: the choice needs the values of the others
        memory_key=key,
        local_world_size=rank.local_world_size,
        peak_flops_per_rank=before.peak_flops_per_rank if before and for_dtype and same_node else None,
    )
    size = _choose(
        cfg.batch.asked_micro_batch_size,
        for_graph.get("micro_batch_size") if before and same_node and before.memory_key == key else None,
        lambda: _micro_batch_size(cfg, effective, device, rank),
    )
    return replace(effective, micro_batch_size=size)


def estimate(cfg: Config, effective: Effective, world_size: int) -> Memory:
    """Estimate the memory of one rank's tensors."""
    size = effective.micro_batch_size.value
    step = StepShape(
        micro_batch_size=size,
        seq_len=cfg.seq_len,
        grad_accum_steps=cfg.batch.total_batch_size // (size * cfg.seq_len * world_size),
        world_size=world_size,
        device=effective.device,
        dtype=effective.dtype.value,
        compiled=effective.compile.value,
        loss=effective.loss.value,
        activation_checkpointing=cfg.train.activation_checkpointing,
        tree=cfg.train.reduction == "tree",
        averaged=cfg.train.ema_half_life_tokens is not None,
    )
    return memory_estimate(with_vocab_size(cfg, effective.vocab_size.value).model, cfg.optim, step)


def _called(device: Device) -> str:
    """The device in a sentence: a GPU by its name."""
    return f"the {device_name(device)}" if device.type == "cuda" else f"this {device.type}"


def _dtype(device: Device) -> tuple[str, str]:
    name = _called(device)
    if has_native_bfloat16(device):
        return "bfloat16", f"{name} has bfloat16 arithmetic"
    return "float32", f"{name} has no bfloat16 arithmetic"


def _matmul_precision(device: Device) -> tuple[str, str]:
    if device.type == "cuda":
        has_it = compute_capability(device) >= 8
        return (
            "high",
            f"TF32 for float32 products{'' if has_it else f'; {_called(device)} has none and computes exactly'}",
        )
    if device.type != "cpu" or not torch.cpu.get_capabilities().get("avx512_f"):
        return "highest", "this machine has no faster float32 kernel"
    error, speed = medium_precision()
    if error > FLOAT32_ERROR:
        return "highest", f"oneDNN's kernel has a relative error of {error:.1e}, too large for float32"
    if speed < FASTER:
        return "highest", f"oneDNN's float32 kernel is only {speed:.2f} times as fast"
    return "medium", f"oneDNN's float32 kernel is {speed:.1f} times as fast; relative error {error:.1e}"


def _fused(device: Device) -> tuple[bool, str]:
    fused = resolve_fused(AUTO, device)
    return fused, f"AdamW has {'a' if fused else 'no'} fused kernel for {device.type}"


def _compile(cfg: Config, device: Device, rank: Rank, dtype: str, precision: str) -> tuple[bool, str]:
    """Whether compilation saves more time than it takes. On a GPU it nearly always does: a step is twice as fast."""
    if device.type not in ("cuda", "cpu"):
        return False, f"torch.compile is incomplete for {device.type}"
    if missing := missing_compiler(device):
        return False, missing
    if device.type == "cuda":
        return True, "compilation takes one to two minutes; a step is then about twice as fast"
    if dtype == "float32" and precision == "highest":
        return False, "slow float32 products take most of a step, and compilation does not speed them up"
    steps, _ = cfg.run_length
    per_token, _ = flops_per_token(cfg.model, cfg.seq_len)
    tokens = cfg.batch.step_sizes.tokens_after(steps)
    eager_s = tokens * per_token / (rank.world_size * cores_per_rank(rank) * EAGER_FLOPS)
    cells = cfg.sweep.cells
    saved_s, cost_s = COMPILE_GAIN * eager_s * cells, COMPILE_S + CACHED_S * (cells - 1)
    runs = "the whole run" if cells == 1 else f"all {cells} cells"
    saved, cost = duration(saved_s), duration(cost_s)
    return saved_s > cost_s, f"estimate: compilation saves {saved} of {runs} and takes {cost}"


def _loss(kind: str, dtype: str, compiled: bool) -> tuple[str, str]:
    if kind == "cpu" and (dtype == "float32" or not compiled):
        return "chunked", "keeps no logits in memory"
    return "plain", "the compiler fuses the loss" if compiled else "fast enough on this device"


def _micro_batch_size(cfg: Config, effective: Effective, device: Device, rank: Rank) -> tuple[int, str]:
    memory = free_memory(device)
    if memory is None:
        return 1, "the free memory is unknown"
    usable = USABLE * memory / (rank.local_world_size * runs_at_once() if device.type == "cpu" else 1)

    def fits(size: int) -> bool:
        tried = replace(effective, micro_batch_size=Choice(size, "decided", ""))
        return estimate(cfg, tried, rank.world_size).peak <= usable

    sizes = legal_micro_batches(cfg.batch.step_sizes.quantum, cfg.seq_len, rank.world_size)
    size = next(filter(fits, sizes), None)
    if size is None:
        return 1, "the smallest; by estimate not even this fits into memory"
    return size, "the largest that divides the step and fits into memory, by estimate"


def apply(effective: Effective, deterministic: bool = False) -> None:
    """Configure torch and the allocator. Call it before the first large tensor is allocated."""
    torch.set_num_threads(effective.threads_per_rank.value)
    torch.set_float32_matmul_precision(effective.matmul_precision.value)
    if effective.device == "cpu":
        keep_freed_memory()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call imports the compiler, which takes 1 s
        torch.use_deterministic_algorithms(deterministic)


def forward_context(effective: Effective) -> ForwardContext:
    """Factory of the context of each forward pass: autocast for bfloat16, else an empty context."""
    if effective.dtype.value == "float32":
        return nullcontext
    return partial(torch.autocast, effective.device, dtype=torch.bfloat16)


def step_context(effective: Effective) -> AbstractContextManager[object]:
    """Context of whole steps, which selects the attention kernel. It is entered once."""
    return attention_kernel(effective.attention.value, effective.attention.source == "asked", effective.device)
