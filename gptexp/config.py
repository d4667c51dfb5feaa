"""Every configuration key: its type, its default, the values it may take.

This is the one home of defaults; files under conf/ only name choices that differ from them. A rule that concerns a
single key stands on that key's line and is applied by `field_problems`; rules between keys are in check.py.

A key that counts steps (`*_steps`, `*_every`) is null unless given and wins over its twin in tokens when given: a
length in tokens means the same at every batch size, a length in steps does not.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

AUTO = "auto"  # let the machine decide; what it comes to is in effective.json
LIMIT = 2**63  # of every count: torch's and numpy's integers end there

Rule = tuple[Callable[[Any], bool], str]


def _ruled(default: Any, *rule: Rule) -> Any:
    return field(default=default, metadata={"rule": rule[0]} if rule else {})


def _choice(*values: str) -> Any:
    """A key that takes one of `values`; the first is the default."""
    return field(default=values[0], metadata={"choices": values})


def _limit(value: float) -> float:
    return LIMIT if isinstance(value, int) else math.inf


def _positive(default: Any) -> Any:
    return _ruled(default, (lambda v: 0 < v < _limit(v), "must be a finite number above 0 (a count: below 2^63)"))


def _not_negative(default: Any) -> Any:
    return _ruled(default, (lambda v: 0 <= v < _limit(v), "must be a finite number, 0 or above (a count: below 2^63)"))


def _ratio(default: float) -> Any:
    return _ruled(default, (lambda v: 0 <= v <= 1, "must lie in [0, 1]"))


def _below_one(default: float) -> Any:
    return _ruled(default, (lambda v: 0 <= v < 1, "must lie in [0, 1)"))


def _name(default: str | None) -> Any:
    """A key that names a directory or a project."""
    legal = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,80}")
    return _ruled(default, (lambda v: legal.fullmatch(v) is not None, "must be 1 to 80 of A-Z a-z 0-9 . _ -"))


@dataclass
class ModelConfig:
    """GPT-2's architecture: pre-norm, GELU(tanh), learned positions, wte tied to lm_head."""

    n_layer: int = _positive(12)  # blocks
    n_head: int = _positive(12)  # attention heads; divides n_embd
    n_embd: int = _positive(768)  # width of the residual stream
    block_size: int = _positive(1024)  # tokens: the longest sequence the model can see
    vocab_size: int = _positive(50304)  # tokens: GPT-2's 50,257 padded to a multiple of 128
    dropout: float = _below_one(0.0)  # probability; 0 for pretraining (one epoch does not overfit)
    bias: bool = True  # biases in the linear layers and LayerNorms, as GPT-2 has them


@dataclass
class OptimConfig:
    """AdamW as GPT-3 uses it (arXiv 2005.14165, appendix B)."""

    name: str = _choice("adamw")
    lr: float = _positive(6e-4)  # peak learning rate; each model file sets the one that suits its size
    beta1: float = _below_one(0.9)  # decay of the first moment
    beta2: float = _below_one(0.95)  # decay of the second moment
    eps: float = _positive(1e-8)  # added to the root of the second moment
    weight_decay: float = _not_negative(0.1)  # decoupled; on tensors of two or more dimensions only
    grad_clip: float = _not_negative(1.0)  # largest global gradient norm; 0: no clipping
    fused: str = _choice("auto", "on", "off")  # AdamW's fused kernel; auto: where the device has it


@dataclass
class ScheduleConfig:
    """Warm-up and decay of the learning rate, as factors of optim.lr."""

    name: str = _choice("cosine", "linear", "wsd", "constant", "inverse_sqrt")
    warmup_ratio: float = _ratio(0.1)  # of the run's tokens
    warmup_tokens: int | None = _not_negative(None)  # tokens; wins over warmup_ratio
    warmup_steps: int | None = _not_negative(None)  # steps; wins over warmup_tokens
    decay_tokens: int | None = _positive(None)  # tokens: where the decay ends; null: at the end of the run
    decay_steps: int | None = _positive(None)  # steps; wins over decay_tokens
    min_lr_ratio: float = _ratio(0.1)  # of optim.lr: where cosine, linear and wsd end
    cooldown_ratio: float = _ruled(0.2, (lambda v: 0 < v <= 1, "must lie in (0, 1]"))  # wsd: of the horizon, its end
    cooldown: str = _choice("linear", "1-sqrt")  # shape of wsd's last part (arXiv 2405.18392)


@dataclass
class BatchConfig:
    """One optimizer step's tokens and how they are cut: total = B * T * world.size * grad_accum_steps."""

    total_batch_size: int = _positive(8192)  # tokens per optimizer step, over all ranks
    micro_batch_size: int | str = _ruled(
        8, (lambda v: v == AUTO or (isinstance(v, int) and 0 < v < LIMIT), "must be a whole number above 0, or auto")
    )  # sequences per rank and forward pass (B); auto: the most that divide and fit
    seq_len: int | None = _positive(None)  # tokens per sequence (T); null: model.block_size

    @property
    def asked_micro_batch_size(self) -> int | None:
        """The micro-batch where it is a number; None: auto."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else None


@dataclass
class WorldConfig:
    """The processes of one run."""

    size: int | None = _positive(None)  # ranks in all; null: what the launcher says, else 1
    backend: str = _choice("auto", "nccl", "gloo")  # auto: nccl on GPUs, gloo on CPU
    threads_per_rank: int | None = _positive(None)  # CPU threads; null: the node's cores shared out among its ranks
    timeout_s: float = _ruled(
        600.0, (lambda v: 0 < v <= 1e6, "must be above 0, at most 1000000")
    )  # seconds a rank waits for the others, in a collective or for a step's numbers, before it gives up
    max_restarts: int = _not_negative(0)  # times that gptexp's own launcher starts failed ranks anew


@dataclass
class DataConfig:
    """Text, tokenizer, order and validation set."""

    name: str = _choice("stdlib", "shakespeare", "text")
    path: Any = None  # data=text: a file, a glob, or a list of them
    tokenizer: str = _choice("gpt2", "r50k_base", "p50k_base", "p50k_edit")  # tiktoken encodings that fit 16 bits
    order: str = _choice("shuffled", "sequential")  # shuffled: without replacement, anew each epoch
    val_tokens: int = _not_negative(8192)  # tokens held out, rounded to whole windows; 0: no validation
    val_path: Any = None  # a file, a glob or a list of them to validate on instead; nothing is held out then
    max_tokens: int | None = _positive(None)  # use only the first N tokens of the corpus
    cache_dir: str | None = None  # token cache; null: $GPTEXP_CACHE, else the user's cache directory


@dataclass
class TrainConfig:
    """Length, cadence, numerics."""

    max_tokens: int = _positive(409_600)  # training tokens; the run ends with the step that reaches them
    max_steps: int | None = _positive(None)  # steps; wins over max_tokens
    eval_every_tokens: int | None = _not_negative(None)  # null: ten times a run; 0: only at the end
    eval_every: int | None = _not_negative(None)  # steps; wins over eval_every_tokens
    save_every_tokens: int | None = _not_negative(None)  # null: ten times a run; 0: only at the end
    save_every: int | None = _not_negative(None)  # steps; wins over save_every_tokens
    keep_last: int = _not_negative(2)  # newest checkpoints kept; 0: all
    keep_every_tokens: int = _not_negative(0)  # kept too: the first checkpoint at or after each multiple; 0: none
    keep_every: int | None = _not_negative(None)  # steps; wins over keep_every_tokens
    keep_best: bool = True  # kept too: the checkpoint of the lowest validation loss
    nonfinite: str = _choice("stop", "skip", "rollback")  # of a step whose loss or gradient is no number: end as
    # diverged, leave its update out, or go back to the newest checkpoint and on with the data behind it
    divergence_nats: float | None = _positive(1.0)  # a run has diverged whose smoothed loss stays so far above its
    # lowest for a hundredth of the run; null: only once the loss is no number
    reduction: str = _choice("mean", "tree")  # of the gradients: DDP's; tree: the same bits at any world size
    log_every: int = _positive(1)  # steps
    max_minutes: float | None = _positive(None)  # stop after a checkpoint once this long has passed
    seed: int = _ruled(
        1337, (lambda v: 0 <= v < LIMIT, "must lie in [0, 2^63)")
    )  # of initial weights, data order and dropout
    deterministic: bool = False  # torch's deterministic algorithms (slower; bit-equal repeats on GPUs)
    dtype: str = _choice("auto", "float32", "bfloat16")  # auto: bfloat16 where the hardware computes in it
    matmul_precision: str = _choice("auto", "highest", "high", "medium")  # of float32, torch's names; high: TF32
    attention: str = _choice("auto", "cudnn", "flash", "efficient", "math")  # torch's kernels; asked for: that only
    compile: str = _choice("auto", "on", "off")  # torch.compile; auto: on GPUs, on a CPU for runs long enough
    loss: str = _choice("auto", "plain", "chunked")  # chunked: no logits kept; auto: on a CPU, but for compiled bf16
    activation_checkpointing: bool = False  # keep only each block's input and compute the rest again: less memory
    device: str = _choice("auto", "cpu", "cuda", "mps")
    profile: bool = False  # trace a few steps with torch's profiler and say where their time goes


@dataclass
class WandbConfig:
    mode: str = _choice("auto", "online", "offline", "disabled")  # auto: online if a key is found, else offline
    project: str = _name("gptexp")
    group: str | None = None  # null: the sweep's name
    name: str | None = None  # null: model, learning rate and batch
    tags: list[str] = field(default_factory=list)
    artifacts: bool = False  # upload the newest checkpoint too when the run ends


@dataclass
class LogConfig:
    progress: str = _choice("auto", "bar", "lines", "json", "off")  # auto: a bar on a terminal, lines elsewhere
    sample_tokens: int = _not_negative(48)  # tokens of the sample printed after the run; 0: none
    mfu_peak: str = _choice("auto", "measured")  # auto: of the data sheet, where known; measured: of matrix products
    noise_scale: str = _choice("auto", "on", "off")  # the gradient noise scale, of logged steps; auto: where it shows
    noise_half_life_tokens: int | None = _positive(None)  # tokens; null: 1% of the run, 4 steps at least
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class SweepConfig:
    name: str | None = _name(None)  # directory under outputs/; null: a hash of the config without the swept keys
    cells: int = _positive(1)  # set by multirun: how many there are, to share what the first compilation costs
    parallel: int | str = _ruled(
        AUTO, (lambda v: v == AUTO or (isinstance(v, int) and 0 < v < LIMIT), "must be a whole number above 0, or auto")
    )  # cells that run side by side, each on GPUs of its own; auto: as many as there are GPUs for, one on a CPU


@dataclass
class Config:
    """The whole of one run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    init_from: str | None = None  # a run directory: start a new run from its newest weights

    @property
    def seq_len(self) -> int:
        """T: tokens per sequence."""
        return self.batch.seq_len or self.model.block_size


# Keys that change where, how fast or how often something is done, but not which weights come out (the micro-batch
# changes their rounding and, with dropout, which values are dropped).
IRRELEVANT_TO_RESULT = (
    "world",
    "log",
    "sweep",
    "data.path",  # what the text is counts, not where: the run compares the tokens themselves
    "data.val_path",
    "data.cache_dir",
    "batch.micro_batch_size",
    "train.device",
    "train.activation_checkpointing",
    "train.eval_every_tokens",
    "train.eval_every",
    "train.save_every_tokens",
    "train.save_every",
    "train.keep_last",
    "train.keep_every_tokens",
    "train.keep_every",
    "train.keep_best",
    "train.log_every",
    "train.max_minutes",
    "train.profile",
)


# Keys that a step's tensors have their sizes from.
DECIDING_MEMORY = ("model", "batch", "world.size", "train.dtype", "train.compile", "train.loss",
                   "train.activation_checkpointing", "train.reduction")  # fmt: skip


def fields_of(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yield (dotted key, field, value) for every leaf of a config dataclass."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f, value


def field_problems(config: Config) -> dict[str, str]:
    """For each key whose value breaks the rule on its own line, a line that says so."""
    lines = {key: field_problem(key, f, value) for key, f, value in fields_of(config)}
    return {key: line for key, line in lines.items() if line}


def field_problem(key: str, f: dataclasses.Field[Any], value: Any, typed: str | None = None) -> str | None:
    """What is wrong with one value of the right type, as a line; `typed` is how the user wrote it."""
    given = f"{key}={shown(value) if typed is None else typed}"
    choices = f.metadata.get("choices")
    if choices and value not in choices:
        return f"{given}: must be one of {', '.join(choices)}"
    if "rule" in f.metadata and value is not None:
        holds, rule = f.metadata["rule"]
        if not holds(value):
            return f"{given}: {rule}"
    return None


def shown(value: Any) -> str:
    """A value as one would type it, cut where it is long."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain dictionaries and lists, ready for YAML and JSON."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], cls: type[Any] = Config) -> Any:
    """Rebuild a `cls` from what `to_dict` gave; an unknown key or a value of another type raises `ValueError`."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if not isinstance(values, dict):
        raise ValueError(f"a saved {cls.__name__} holds keys and values, not {shown(values)}")
    if unknown := sorted(values.keys() - fields.keys()):
        raise ValueError(f"unknown key '{unknown[0]}' in a saved {cls.__name__}; was it written by another version?")
    for name, value in values.items():
        if not dataclasses.is_dataclass(fields[name].type) and not _fits(value, fields[name].type):
            raise ValueError(
                f"{name}={shown(value)} in a saved {cls.__name__}: not the type it had; write 6.0e-4 for 6e-4"
            )
    return cls(
        **{
            name: from_dict(value, fields[name].type) if dataclasses.is_dataclass(fields[name].type) else value  # type: ignore[arg-type]
            for name, value in values.items()
        }
    )


def _fits(value: Any, annotation: Any) -> bool:
    """Whether `value` is of an annotated type of a config key; a whole number is a float too."""
    if annotation is Any:
        return True
    kinds = getattr(annotation, "__args__", ()) if isinstance(annotation, UnionType) else (annotation,)
    kinds = tuple(getattr(kind, "__origin__", kind) for kind in kinds)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


def result_deciding(config: Config) -> dict[str, Any]:
    """Dotted keys and values of everything that decides which weights come out."""
    # A rollback leads to a checkpoint: then it counts when there is one.
    also = ("train.save_every", "train.save_every_tokens") if config.train.nonfinite == "rollback" else ()
    return {key: value for key, _, value in fields_of(config) if key in also or not _is_in(key, IRRELEVANT_TO_RESULT)}


def memory_key(config: Config) -> str:
    """Equal for runs whose steps need the same memory, so that a micro-batch size found for one serves the other."""
    deciding = {key: value for key, _, value in fields_of(config) if _is_in(key, DECIDING_MEMORY)}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]


def _is_in(key: str, names: tuple[str, ...]) -> bool:
    """Whether `key` is one of `names`, keys or groups."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
