"""The choice of a value for every `auto`, by rules.

No rule times anything, so equal machines choose alike; only micro-batch size and reduce_every depend on free memory.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TypeVar

from gptexp.config.batch import legal_micro_batches
from gptexp.config.parts import is_part, name_of
from gptexp.config.rules import missing_kernel
from gptexp.config.schema import ATTENTION_DEVICES, Config, memory_key
from gptexp.config.vocabulary import VOCAB_SIZES, with_vocab_size
from gptexp.distributed.ranks import Rank, cores_per_rank, runs_at_once
from gptexp.machine import cpu
from gptexp.machine.device import (
    Device,
    compute_capability,
    device_name,
    free_memory,
    has_native_bfloat16,
    missing_compiler,
    resolve_fused,
)
from gptexp.machine.effective import ASKED, Choice, Effective
from gptexp.model.flops import flops_per_token
from gptexp.model.kernels import DROPOUT, FLOAT32, GROUPS, KERNELS, MASKS
from gptexp.model.memory import Memory, StepShape, memory_estimate
from gptexp.process.errors import ConfigError
from gptexp.process.fields import AUTO
from gptexp.process.words import duration, listed
from gptexp.storage.init_from import choose_vocab_size

T = TypeVar("T")

COMPILE_S = 35.0  # seconds of a first compilation on two cores: 25 to 45 s for 4 to 12 layers
CACHED_S = 5.0  # seconds of a compilation with a cached result, as in the other cells of a sweep
COMPILE_GAIN = 0.2  # share of an eager step's time that compilation saves on a CPU with fast matrix products
EAGER_FLOPS = 100e9  # FLOP/s per core of an eager step on a CPU with fast matrix products
USABLE = 0.85  # maximum share of the free memory that an estimate may use
# With AMX, a model of at most this width and sequence length and with few ids loses more by converting its weights than
# bfloat16 gains. Time in float32 divided by that in bfloat16, by width × length (forward and backward pass, 384 ids,
# eager, two cores of an Intel Xeon with amx_bf16, torch 2.13, least CPU time): 128 × 64: 0.7 to 0.8; 128 × 256: 1.1;
# 128 × 1,024: 1.2; 192 × 256: 1.3; 256 × 256: 1.7; 384 × 256: 1.7; 512 × 256: 2.1.
NARROW, BRIEF, FEW_IDS = 128, 128, 4096
# Up to this many tokens compiled math attention is the fastest on a CPU: the scores of a layer fit its caches.
SHORT = 256
SMALL_VOCABULARY = 1024  # up to this many ids, whole logits take less time than chunks


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
    at_once = before.runs_at_once if before else runs_at_once()
    same_node = before if before and before.local_world_size == rank.local_world_size else None
    dtype, precision, compiled = _arithmetic(cfg, device, before, rank.world_size * cores_per_rank(rank, at_once))
    same_dtype = before if before and before.dtype.value == dtype.value else None
    same_graph = same_dtype if same_dtype and same_dtype.compile.value == compiled.value else None
    attention, loss = _kernels(cfg, device, same_graph, dtype.value, compiled.value)
    threads = _choose(
        1 if cfg.train.reduction == "tree" else cfg.world.threads_per_rank,
        same_node.threads_per_rank if same_node else None,
        lambda: (cores_per_rank(rank, at_once), _sharing(at_once)),
    )
    effective = Effective(
        device=device.type,
        device_name=device_name(device),
        n_vocab=n_vocab,
        vocab_size=vocab_size,
        dtype=dtype,
        matmul_precision=precision,
        attention=attention,
        compile=compiled,
        loss=loss,
        fused=_fused(cfg, device, before),
        threads_per_rank=threads,
        micro_batch_size=Choice(1, "decided", ""),  # a placeholder: the choice needs the values of the others
        memory_key=key,
        local_world_size=rank.local_world_size,
        runs_at_once=at_once,
        peak_flops_per_rank=same_node.peak_flops_per_rank if same_node and same_dtype else None,
    )
    same_memory = same_node if same_node and same_node.memory_key == key else None
    saved_size = same_graph.micro_batch_size if same_graph and same_memory else None
    saved_every = same_memory.reduce_every if same_memory else None
    return _with_sizes(cfg, effective, device, rank, saved_size, saved_every)


def _sharing(at_once: int) -> str:
    others = f" and by the {at_once} runs that share them" if at_once > 1 else ""
    return f"the node's cores divided by its ranks{others}"


def _arithmetic(
    cfg: Config, device: Device, before: Effective | None, cores: int
) -> tuple[Choice[str], Choice[str], Choice[bool]]:
    """dtype, matmul_precision and compile; `cores`: those of all ranks."""
    train = cfg.train
    dtype = _choose(train.dtype, before.dtype if before else None, lambda: _dtype(cfg, device))
    precision = _choose(
        train.matmul_precision, before.matmul_precision if before else None, lambda: _matmul_precision(device)
    )
    compiled = _choose(
        {"on": True, "off": False, AUTO: None}[train.compile],
        before.compile if before and before.dtype.value == dtype.value else None,
        lambda: _compile(cfg, device, cores, dtype.value, precision.value),
    )
    return dtype, precision, compiled


def _kernels(
    cfg: Config, device: Device, before: Effective | None, dtype: str, compiled: bool
) -> tuple[Choice[str], Choice[str]]:
    """attention and loss. `before` has the saved choices for the same dtype and compilation."""
    attention = _choose(
        cfg.train.attention,
        before.attention if before else None,
        lambda: _best_kernel(cfg, device, dtype, compiled),
    )
    if missing := missing_kernel(attention.value, device.type):
        raise ConfigError(missing)
    if attention.value == "flex":
        _check_flex(cfg, compiled)
    elif attention.source == "asked":
        _check_kernel(cfg, attention.value, device.type, dtype)
    loss = _choose(cfg.train.loss, before.loss if before else None, lambda: _loss(cfg, device.type, dtype, compiled))
    return attention, loss


def _fused(cfg: Config, device: Device, before: Effective | None) -> Choice[bool]:
    if not hasattr(cfg.optim, "fused"):
        # "asked", so that a cell of the sweep with AdamW does not take it over.
        return Choice(False, "asked", f"gptexp uses no fused kernel for {cfg.optim.name}")
    available = resolve_fused(cfg.optim.fused, device)
    return _choose(
        None if cfg.optim.fused == AUTO else available,
        before.fused if before else None,
        lambda: (available, f"AdamW has {'a' if available else 'no'} fused kernel for {device.type}"),
    )


def _with_sizes(
    cfg: Config,
    effective: Effective,
    device: Device,
    rank: Rank,
    saved_size: Choice[int] | None,
    saved_every: str | None,
) -> Effective:
    """`effective` with its micro-batch size and `reduce_every`, which need the other choices."""
    size = _choose(
        cfg.batch.asked_micro_batch_size, saved_size, lambda: _micro_batch_size(cfg, effective, device, rank)
    )
    effective = replace(effective, micro_batch_size=size)
    if cfg.world.sharding != "full" or rank.world_size == 1:
        return effective
    every = cfg.world.reduce_every
    if every == AUTO:
        every = saved_every or _reduce_every(cfg, effective, device, rank)
    return replace(effective, reduce_every=every)


def estimate(cfg: Config, effective: Effective, world_size: int) -> Memory:
    """Estimate the memory of one rank's tensors. If world.reduce_every is open: the smallest estimate."""
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
        attention=effective.attention.value,
        activation_checkpointing=cfg.train.recomputed_every,
        tree=cfg.train.reduction == "tree",
        averaged=cfg.train.ema_half_life_tokens is not None,
        sharding=cfg.world.sharding,
        comm=cfg.world.comm,
        z_loss=cfg.train.z_loss > 0,
        document_mask=cfg.data.document_mask,
        reduce_every=effective.reduce_every or cfg.world.reduce_every.replace(AUTO, "micro_step"),
    )
    return memory_estimate(with_vocab_size(cfg, effective.vocab_size.value).model, cfg.optim, step)


def _called(device: Device) -> str:
    """The device as a sentence names it: the GPU by its product name, or `this CPU`."""
    return f"the {device_name(device)}" if device.type == "cuda" else f"this {device.type.upper()}"


def _dtype(cfg: Config, device: Device) -> tuple[str, str]:
    name = _called(device)
    if not has_native_bfloat16(device):
        return "float32", f"{name} has no bfloat16 arithmetic"
    if device.type == "cpu" and not cpu.has_fast_bfloat16():
        return "float32", f"{name} computes products faster in float32 than in bfloat16"
    small = cfg.model.n_embd <= NARROW and cfg.seq_len <= BRIEF and cfg.model.resolved_vocab_size < FEW_IDS
    if device.type == "cpu" and cpu.has_amx() and small:
        return "float32", "with AMX, the products of so small a model gain nothing from bfloat16"
    return "bfloat16", f"{name} has bfloat16 arithmetic"


def _matmul_precision(device: Device) -> tuple[str, str]:
    if device.type == "cuda":
        has_it = compute_capability(device) >= 8
        return (
            "high",
            f"TF32 for float32 products{'' if has_it else f'; {_called(device)} has none and computes exactly'}",
        )
    if device.type != "cpu" or not cpu.has_fast_onednn_float32():
        return "highest", "this machine has no faster float32 kernel"
    error = cpu.onednn_float32_error()
    if error > cpu.FLOAT32_ERROR:
        return "highest", f"oneDNN's kernel has a relative error of {error:.1e}, too large for float32"
    return "medium", f"oneDNN's float32 kernel is faster on this CPU; relative error {error:.1e}"


def _compile(cfg: Config, device: Device, cores: int, dtype: str, precision: str) -> tuple[bool, str]:
    """Whether compilation saves more time than it takes. On a GPU it nearly always does: a step is twice as fast."""
    if is_part(cfg.model):
        return False, f"whether model={name_of(cfg.model)} compiles is unknown; train.compile=on tries it"
    if device.type not in ("cuda", "cpu"):
        return False, f"torch.compile is incomplete for {device.type}"
    if missing := missing_compiler(device):
        return False, missing
    if device.type == "cuda":
        return True, "compilation takes one to two minutes; a step is then about twice as fast"
    if dtype == "float32" and precision == "highest":
        return False, "float32 products take most of a step, and compilation does not speed them up"
    cells = cfg.sweep.cells
    saved_s, cost_s = COMPILE_GAIN * eager_s(cfg, cores), COMPILE_S + CACHED_S * (cells - 1)
    runs = "the whole run" if cells == 1 else f"all {cells} cells"
    saved, cost = duration(saved_s), duration(cost_s)
    return saved_s > cost_s, f"estimate: compilation saves {saved} of {runs} and takes {cost}"


def eager_s(cfg: Config, cores: int) -> float:
    """Estimated seconds of all cells of the run or sweep, not compiled, on a CPU with fast matrix products."""
    steps, _ = cfg.run_length
    per_token, _ = flops_per_token(cfg.model, cfg.seq_len)
    tokens = cfg.sweep.cells * cfg.batch.step_sizes.tokens_after(steps)
    return tokens * per_token / (cores * EAGER_FLOPS)


def _needs(cfg: Config, dtype: str) -> dict[str, str]:
    """What the run needs of a kernel, with the setting that needs it."""
    m, masked = cfg.model, cfg.data.document_mask
    mask = "data.document_mask=true" if masked else f"model.window={m.window}"
    needs = {
        FLOAT32: ("train.dtype=float32", dtype == "float32"),
        MASKS: (mask, masked or (m.window is not None and m.window < cfg.seq_len)),
        GROUPS: (f"model.n_kv_head={m.kv_heads}", m.kv_heads != m.n_head),
        DROPOUT: (f"model.dropout={m.dropout:g}", m.dropout > 0),
    }
    return {need: setting for need, (setting, is_needed) in needs.items() if is_needed}


def _lacking(name: str, device: str, needs: Collection[str]) -> list[str]:
    return [need for need in KERNELS[name].lacks.get(device, ()) if need in needs]


def _check_kernel(cfg: Config, name: str, device: str, dtype: str) -> None:
    """Raise `ConfigError` unless the kernel, which was asked for and has no fallback, has all that the run needs."""
    needs = _needs(cfg, dtype)
    if lacking := _lacking(name, device, needs):
        here = [other for other in KERNELS if device in ATTENTION_DEVICES[other]]
        able = " or ".join([*(other for other in here if not _lacking(other, device, needs)), AUTO])
        what = " and ".join(f"{need}, which {needs[need]} needs" for need in lacking)
        line = f"train.attention={name}: on {device} it has no {what}; use {able}"
        raise ConfigError(line, "no-such-kernel")


def _check_flex(cfg: Config, compiled: bool) -> None:
    """Raise `ConfigError` unless the model can use FlexAttention: compiled, with masks, and without dropout.

    With world.sharding=full only the blocks are compiled, and the mask is made outside them: not compiled, it takes 12
    bytes for each pair of tokens.
    """
    reasons = {
        "is for a compiled model; use train.compile=on": not compiled,
        "is for a model that is compiled as a whole; use world.sharding=optimizer": cfg.world.sharding == "full",
        "is for masks; set model.window or data.document_mask=true": not (cfg.model.window or cfg.data.document_mask),
        f"has no dropout, and model.dropout={cfg.model.dropout:g}; use model.dropout=0": cfg.model.dropout > 0,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"train.attention=flex: {reason}, or train.attention=auto")


def _best_kernel(cfg: Config, device: Device, dtype: str, compiled: bool) -> tuple[str, str]:
    """The fastest kernel that has what the run needs, with the reason. For dropout torch takes another, if it must."""
    if device.type == "cpu":
        if compiled and cfg.seq_len <= SHORT:
            return "math", f"compiled, it is the fastest up to {SHORT} tokens"
        return "flash", "torch's kernel for CPUs"
    if device.type != "cuda":
        return "math", "the only kernel for this device"
    is_new = compute_capability(device) in (9, 10)
    fastest = ("cudnn", "flash", "efficient", "math") if is_new else ("flash", "efficient", "cudnn", "math")
    needs = [need for need in _needs(cfg, dtype) if need != DROPOUT]
    name = next(name for name in fastest if not _lacking(name, "cuda", needs))
    on = "Hopper and Blackwell" if is_new else "GPUs older than Hopper"
    return name, f"the fastest kernel on {on}{f' with {listed(needs)}' if needs else ''}"


def _loss(cfg: Config, kind: str, dtype: str, compiled: bool) -> tuple[str, str]:
    if is_part(cfg.model):
        return "plain", "the model gives logits"
    if kind != "cpu" and compiled and cfg.world.sharding == "full":
        return "chunked", "keeps no logits in memory; of a split model only the blocks are compiled"
    if kind != "cpu":
        return "plain", "the compiler fuses the loss" if compiled else "fast enough on this device"
    if cfg.model.resolved_vocab_size <= SMALL_VOCABULARY:
        return "plain", "the logits of so small a vocabulary are no more than other activations"
    if compiled and dtype == "bfloat16":
        return "fused", "keeps no logits in memory, and compiles the passes over them"
    return "chunked", "keeps no logits in memory"


def _usable_memory(device: Device, rank: Rank) -> float | None:
    """Bytes that a rank may use by estimate; None if unknown."""
    memory = free_memory(device)
    if memory is None:
        return None
    return USABLE * memory / (rank.local_world_size * runs_at_once() if device.type == "cpu" else 1)


def _micro_batch_size(cfg: Config, effective: Effective, device: Device, rank: Rank) -> tuple[int, str]:
    usable = _usable_memory(device, rank)
    if usable is None:
        return 1, "the free memory is unknown"

    def fits(size: int) -> bool:
        tried = replace(effective, micro_batch_size=Choice(size, "decided", ""))
        return estimate(cfg, tried, rank.world_size).peak <= usable

    sizes = legal_micro_batches(cfg.batch.step_sizes.quantum, cfg.seq_len, rank.world_size)
    size = next(filter(fits, sizes), None)
    if size is None:
        return 1, "the smallest; by estimate not even this fits into memory"
    return size, "the largest that divides the step and fits into memory, by estimate"


def _reduce_every(cfg: Config, effective: Effective, device: Device, rank: Rank) -> str:
    """`step` if the memory suffices: it sends least, but keeps whole gradients until the end of a step."""
    usable = _usable_memory(device, rank)
    once = estimate(cfg, replace(effective, reduce_every="step"), rank.world_size)
    return "step" if usable is None or once.peak <= usable else "micro_step"
