"""The rules that concern several configuration keys.

They are checked before torch is imported and before a file is created. Each problem is one line with the value, the
rule and the fix, and has the code of its rule. A rule stops silently where it reads a key whose own value is invalid.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from gptexp.config import batch, parts, paths
from gptexp.config.fitted import fitted_problems
from gptexp.config.metrics import Metric, of_text
from gptexp.config.noise_scale import LIKE_BATCH, needing_noise_scale, why_unmeasured
from gptexp.config.scaling import scaled_decay_rates, scaled_optim
from gptexp.config.schedule import resolve_schedule
from gptexp.config.schema import (
    ATTENTION_DEVICES,
    HELLASWAG,
    OF_ANY_MODEL,
    Config,
    ModelConfig,
    every_key,
    field_problems,
    parts_of,
)
from gptexp.config.vocabulary import CHARS, NAMES, VOCAB_SIZES, padded, padding_multiple
from gptexp.optim import OPTIMIZERS, optimizers_that
from gptexp.optim.base import OptimConfig, TwoMomentsConfig
from gptexp.process.errors import ConfigError, Problem
from gptexp.process.fields import AUTO, LIMIT
from gptexp.process.words import counted, shown

Rule = Callable[[Config, int], Iterator[Problem]]  # (config, number of ranks) -> problems

NEEDS_END = "tasks of lm_eval need a tokenizer with an end of text, unlike chars; use another data.tokenizer"
RAMP = ("batch.ramp_from_tokens", "batch.ramp_tokens", "batch.ramp_quantum_tokens")
LENGTHS_IN_STEPS = {
    "train.max_steps": "the number of training tokens",
    "schedule.warmup_steps": "the number of warm-up tokens",
    "schedule.decay_steps": "the number of decay tokens",
}
TOKENIZER_RULE = f"must be one of {', '.join(NAMES)}, or the path of a tokenizer.json"
FACTORS_TRIED = 1000  # of a schedule of the user's own, before the run starts
MOST_QUANTA = 10_000  # most quanta in a step: a ramp may have a level for each

# The keys of model.rope_scaling, in transformers' names.
ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

# Keys that are read only if another key has one of these values. Otherwise they must have their defaults.
READ_UNDER = {
    "data.path": ("data.name", ("text", "hf", "tokens")),
    "data.format": ("data.name", ("tokens",)),
    "data.subset": ("data.name", ("hf",)),
    "data.split": ("data.name", ("hf",)),
    "data.mix": ("data.name", ("text", "hf")),
    "data.text_column": ("data.name", ("text", "hf")),
    "data.encoding": ("data.name", ("text",)),
    "data.separator": ("data.name", ("text",)),
    "model.rope_theta": ("model.position", ("rope",)),
    "model.rope_scaling": ("model.position", ("rope",)),
    "model.base_n_embd": ("model.parametrisation", ("mup", "completep")),
    "model.base_n_head": ("model.parametrisation", ("mup", "completep")),
    "model.base_n_layer": ("model.parametrisation", ("completep",)),
}
# Keys that need gptexp's own blocks -> their values that do not.
OF_BLOCKS: dict[str, tuple[Any, ...]] = {
    "model.parametrisation": ("standard",), "world.sharding": ("none", "optimizer"), "init_from": (None,),
    "train.attention": (AUTO,), "train.loss": (AUTO, "plain"), "train.activation_checkpointing": (False,),
    "train.sharpness_every_tokens": (0,), "data.document_mask": (False,),
}  # fmt: skip
OF_TEXT = ("data.text_column", "data.encoding", "data.separator")  # how the files of a text are read


class _InvalidKey(Exception):
    """A rule has read a key whose own value is invalid."""


def check(cfg: Config, world_size: int) -> None:
    """Raise `ConfigError` with every problem of a run of `cfg` on `world_size` ranks."""
    if violations := problems(cfg, world_size):
        raise ConfigError(violations)


def problems(cfg: Config, world_size: int) -> list[Problem]:
    """Every problem of `cfg`: first of single keys, then by the rules between keys."""
    invalid = field_problems(cfg)
    lines = [*invalid.values(), *(ramp_problems := _broken((_ramp,), cfg, world_size, invalid))]
    # A wrong ramp has no step sizes. Rules that need them must not read its keys.
    return lines + _broken(RULES, cfg, world_size, [*invalid, *(RAMP if ramp_problems else ())])


def saved_problems(cfg: Config) -> list[Problem]:
    """Problems that make a saved config useless on any machine: of single keys; if none, by `RULES_OF_SAVED`."""
    return [*field_problems(cfg).values()] or _broken(RULES_OF_SAVED, cfg, 1, ())


def _broken(rules: Collection[Rule], cfg: Config, world_size: int, invalid: Collection[str]) -> list[Problem]:
    """The problems that `rules` find in `cfg`. A rule stops where it reads an invalid key."""
    guarded, lines = _guarded(cfg, invalid) if invalid else cfg, list[Problem]()
    for rule in rules:
        try:
            for problem in rule(guarded, world_size):
                lines.append(problem)
        except _InvalidKey:
            continue
    return lines


def _refuse_to_read(_: Any) -> None:
    raise _InvalidKey


def _guarded(section: Any, invalid: Collection[str], prefix: str = "") -> Any:
    """A copy of a config, or of a section, that raises `_InvalidKey` where an invalid key is read."""
    cls, values = type(section), dict(vars(section))
    for name, value in values.items():
        if is_dataclass(value):
            values[name] = _guarded(value, invalid, f"{prefix}{name}.")
    wrong = {key.removeprefix(prefix) for key in invalid} & values.keys()
    guarded: Any = object.__new__(type(cls.__name__, (cls,), dict.fromkeys(wrong, property(_refuse_to_read))))
    vars(guarded).update(values)
    return guarded


def _refusal(cfg: Config, key: str, code: str, rule: str) -> Problem:
    """The problem that the value of `key` breaks `rule`; `code` is the rule's."""
    return Problem(code, f"{key}={shown(attrgetter(key)(cfg))}: {rule}")


def confounds_of(values: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each key in `values` (dotted key -> value) that confounds a comparison of batch sizes."""
    for key, what in LENGTHS_IN_STEPS.items():
        if values.get(key) is not None:
            yield f"{key}={values[key]} counts steps, so {what} differs between batch sizes; give it in tokens"
    if (ramp := values.get("batch.ramp_tokens")) is not None:
        yield f"batch.ramp_tokens={ramp}: the steps grow, so a run has not one batch size; leave out the ramp"
    if (name := values.get("optim.name")) and (why := OPTIMIZERS.get(name, OptimConfig).step_dependence):
        yield f"optim={name}: {why}, so updates differ between batch sizes; use another optimizer"
    noise, decay = values.get("optim.gradient_noise"), values.get("optim.gradient_noise_decay")
    if noise and decay and values.get("optim.gradient_noise_decay_tokens") is None:
        yield (
            f"optim.gradient_noise_decay={decay:g} counts steps, so the noise after a number of tokens differs between "
            "batch sizes; give optim.gradient_noise_decay_tokens"
        )


def _noise(cfg: Config, world_size: int) -> Iterator[Problem]:
    size = cfg.batch.asked_micro_batch_size or 1  # the ranks resolve `auto` later
    needed_by = needing_noise_scale(cfg)
    if needed_by and cfg.log.noise_scale == "off":
        rule = f"{needed_by} needs the noise scale; leave out one of them"
        yield _refusal(cfg, "log.noise_scale", "noise-scale-off", rule)
    elif needed_by and (why := why_unmeasured(cfg, size, world_size)):
        yield Problem("noise-scale-not-measurable", f"{needed_by}: {why}")
    noise, like, total = cfg.optim.gradient_noise, cfg.optim.gradient_noise_like_batch, cfg.batch.total_batch_size
    if like is None:
        return
    if noise:
        rule = f"is another noise than optim.gradient_noise={noise:g}; leave out one of them"
        yield _refusal(cfg, LIKE_BATCH, "two-gradient-noises", rule)
    if not cfg.seq_len <= like <= total:
        rule = f"must lie between a sequence of {cfg.seq_len} tokens and batch.total_batch_size={total}"
        yield _refusal(cfg, LIKE_BATCH, "noise-batch-out-of-range", rule)


def _unread(cfg: Config, _: int) -> Iterator[Problem]:
    defaults = {key: default for key, _, default, _ in every_key()}
    for key, (other, values) in READ_UNDER.items():
        if key in OF_TEXT and cfg.data.name != "tokens" and (cfg.data.val_path is not None or cfg.data.validation):
            continue  # these are text, too
        if parts.takes(attrgetter(key.rpartition(".")[0])(cfg), key.rpartition(".")[2]):
            continue
        if attrgetter(other)(cfg) not in values and attrgetter(key)(cfg) != defaults[key]:
            group = "data" if other == "data.name" else other
            readers = " or ".join(f"{group}={value}" for value in values)
            yield _refusal(cfg, key, "key-not-read", f"only {readers} reads it; use that, or leave it out")


def model_problems(model: ModelConfig) -> list[Problem]:
    """The problems of a model that was read from a file, whatever the run."""
    cfg = Config(model=model, init_from="a file")
    return [*field_problems(cfg).values()] or _broken((_model,), cfg, 1, ())


def _parts(cfg: Config, _: int) -> Iterator[Problem]:
    for group, section in parts_of(cfg):
        yield from parts.problems_of(partial(parts.bound, group, section))


def _own_model(cfg: Config, _: int) -> Iterator[Problem]:
    """What gptexp can do with its own blocks only, and the keys of these."""
    if not parts.is_part(cfg.model):
        return
    target = f"model={parts.name_of(cfg.model)}"
    for key, allowed in OF_BLOCKS.items():
        if attrgetter(key)(cfg) not in allowed:
            yield _refusal(cfg, key, "needs-own-blocks", f"is for gptexp's blocks, unlike {target}; leave it out")
    if cfg.optim.name == "muon":
        yield _refusal(cfg, "optim.name", "needs-own-blocks", f"knows the matrices of gptexp's blocks, not of {target}")
    if cfg.batch.micro_batch_size == AUTO:
        rule = f"the memory of {target} is unknown, so it cannot be chosen; give a number"
        yield _refusal(cfg, "batch.micro_batch_size", "needs-own-blocks", rule)
    if {*cfg.train.eval_tasks} - {HELLASWAG}:
        rule = f"tasks of lm_eval need a model that can be exported, unlike {target}; leave them out"
        yield _refusal(cfg, "train.eval_tasks", "needs-own-blocks", rule)
    for f in fields(ModelConfig):
        value = getattr(cfg.model, f.name)
        is_given = f.name in OF_ANY_MODEL or parts.takes(cfg.model, f.name)
        if not is_given and value != f.default:
            yield _refusal(cfg, f"model.{f.name}", "key-not-read", f"{target} does not take it; leave it out")


def _model(cfg: Config, _: int) -> Iterator[Problem]:
    m = cfg.model
    if parts.is_part(m):
        return
    if m.n_embd % m.n_head and m.head_dim is None:
        below = m.n_embd // m.n_head * m.n_head
        nearest = f"{below} or {below + m.n_head}" if below else m.n_head
        rule = f"not divisible by model.n_head={m.n_head}; nearest: {nearest}; or set model.head_dim"
        yield _refusal(cfg, "model.n_embd", "heads-not-divisible", rule)
    if m.n_head % m.kv_heads:
        divisors = [n for n in range(1, m.n_head + 1) if m.n_head % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - m.kv_heads))
        rule = f"model.n_head={m.n_head} is not a multiple of it; nearest: {nearest}"
        yield _refusal(cfg, "model.n_kv_head", "kv-heads-not-divisible", rule)
    if m.position == "rope" and m.head_size % 2:
        rule = f"turns pairs of numbers, and a head has {m.head_size}; use an even model.head_dim"
        yield _refusal(cfg, "model.position", "head-size-odd", rule)
    if m.rope_scaling is not None and (wrong := _wrong_rope_scaling(m.rope_scaling)):
        yield _refusal(cfg, "model.rope_scaling", "not-a-rope-scaling", wrong)
    if m.window is None and m.window_every is not None:
        yield _refusal(cfg, "model.window_every", "key-not-read", "only model.window reads it; set that too")
    if m.window is not None and m.window >= m.block_size and cfg.init_from is None:
        rule = f"model.block_size={m.block_size} fits into it, so it hides nothing; use a smaller one, or leave it out"
        yield _refusal(cfg, "model.window", "window-too-long", rule)
    if m.window is not None and m.window_every is not None and not 2 <= m.window_every <= max(2, m.n_layer):
        rule = f"must be from 2 to model.n_layer={m.n_layer}, so that some blocks have the window and some do not"
        yield _refusal(cfg, "model.window_every", "out-of-range", rule)
    width, heads = m.base_n_embd or m.n_embd, m.base_n_head or m.n_head
    if m.head_dim is None and width % heads and (m.base_n_embd, m.base_n_head) != (None, None):
        rule = f"not divisible by the {counted(heads, 'head')} of the base; set base_n_head"
        yield Problem("base-heads-not-divisible", f"model.base_n_embd={width}: {rule}")


def _sequence(cfg: Config, _: int) -> Iterator[Problem]:
    m, t = cfg.model, cfg.seq_len
    if t > m.block_size:
        rule = f"longer than model.block_size={m.block_size}; use that, or model.block_size={t}"
        yield _refusal(cfg, "batch.seq_len", "sequence-too-long", rule)
    ids = VOCAB_SIZES.get(cfg.data.tokenizer)
    if ids is not None and isinstance(m.vocab_size, int) and m.vocab_size < ids:
        rule = f"smaller than the {ids:,} ids of data.tokenizer={cfg.data.tokenizer}"
        fix = f"use auto ({padded(ids)}, a multiple of {padding_multiple(ids)})"
        yield _refusal(cfg, "model.vocab_size", "vocabulary-too-small", f"{rule}; {fix}")


def _wrong_rope_scaling(scaling: Any) -> str | None:
    if not isinstance(scaling, dict) or {*scaling} != {*ROPE_SCALING}:
        return f"must have the keys {', '.join(ROPE_SCALING)}"
    if not all(map(_is_positive, scaling.values())):
        return "each value must be a number above 0, below 2^63"
    if not float(scaling[ROPE_SCALING[-1]]).is_integer():
        return f"{ROPE_SCALING[-1]} must be a whole number"
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        return "low_freq_factor must be below high_freq_factor"
    return None


def _parametrisation(cfg: Config, _: int) -> Iterator[Problem]:
    chosen, optim = cfg.model.parametrisation, cfg.optim
    if parts.is_part(cfg.model):
        return
    if chosen != "standard" and not optim.is_like_adam:
        rule = f"its learning rates are for updates like Adam's, unlike those of optim={optim.name}"
        fix = f"use {optimizers_that('is_like_adam')}"
        yield _refusal(cfg, "model.parametrisation", "parametrisation-of-adam", f"{rule}; {fix}")
    if cfg.model.head_dim is not None and cfg.model.base_n_head is not None:
        rule = f"heads of the base have model.head_dim={cfg.model.head_dim} numbers, however many there are"
        yield _refusal(cfg, "model.base_n_head", "key-not-read", f"{rule}; leave it out")
    if chosen != "standard" and cfg.model.base_n_embd is None:
        rule = (
            f"model.parametrisation={chosen} corrects for how much wider a model is than a base; set "
            "model.base_n_embd, the width of the model whose learning rate is known"
        )
        yield _refusal(cfg, "model.base_n_embd", "base-missing", rule)
    elif chosen != "standard" and cfg.model.n_mlp is not None and cfg.model.base_n_embd != cfg.model.n_embd:
        ratio = f"{cfg.model.n_mlp / cfg.model.n_embd:.12g}"  # enough digits to give n_mlp back
        rule = f"the base's MLP would be as wide; give model.mlp_ratio={ratio} in its place, which keeps the proportion"
        yield _refusal(cfg, "model.n_mlp", "mlp-not-in-proportion", rule)


def _tokenizer(cfg: Config, _: int) -> Iterator[Problem]:
    name = cfg.data.tokenizer
    if name == CHARS and cfg.data.document_mask:
        rule = "documents are told apart by an end of text, which data.tokenizer=chars lacks; use another"
        yield _refusal(cfg, "data.document_mask", "mask-without-end", rule)
    if name not in NAMES and not paths.is_file(Path(name)):
        yield _refusal(cfg, "data.tokenizer", "no-such-tokenizer", f"no such file; {TOKENIZER_RULE}")
    if name == CHARS and {*cfg.train.eval_tasks} - {HELLASWAG}:
        yield _refusal(cfg, "train.eval_tasks", "tasks-without-end", NEEDS_END)


def _saved_tokenizer(cfg: Config, _: int) -> Iterator[Problem]:
    name = cfg.data.tokenizer
    if name not in NAMES and not Path(name).is_absolute():  # the run has a copy of the file
        yield _refusal(cfg, "data.tokenizer", "no-such-tokenizer", TOKENIZER_RULE)


def _ramp(cfg: Config, _: int) -> Iterator[Problem]:
    chosen = [key for key in RAMP if attrgetter(key)(cfg) is not None]
    if not chosen:
        return
    if missing := [key for key in RAMP[:2] if key not in chosen]:
        rule = f"a ramp needs {' and '.join(missing)} too; give both, or leave it out"
        yield _refusal(cfg, chosen[0], "ramp-incomplete", rule)
        return
    sizes, key = cfg.batch.step_sizes, _quantum_key(cfg)
    total = f"batch.total_batch_size={sizes.total:,}"
    if sizes.start >= sizes.total:
        yield _refusal(cfg, RAMP[0], "ramp-does-not-grow", f"must be below {total}, to which steps grow")
    elif sizes.total % sizes.quantum or sizes.start % sizes.quantum:
        start = "" if key == RAMP[0] else f"{RAMP[0]}={sizes.start:,} and "
        near = batch.nearest_divisors(_multiple_of_quantum(cfg), sizes.quantum)
        rule = f"must divide {start}{total}; nearest: {batch.either([n for n in near if n < sizes.total])}"
        yield Problem("ramp-not-divisible", f"{key}={sizes.quantum:,}: {rule}")
    elif sizes.total // sizes.quantum > MOST_QUANTA:
        rule = f"less than 1/{MOST_QUANTA:,} of {total}; give a larger {RAMP[2]}"
        yield Problem("ramp-too-fine", f"{key}={sizes.quantum:,}: {rule}")


def _quantum_key(cfg: Config) -> str:
    """The key that sets the quantum of a ramp."""
    return RAMP[2 if cfg.batch.ramp_quantum_tokens is not None else 0]


def _multiple_of_quantum(cfg: Config) -> int:
    """The tokens that the quantum of a ramp must divide."""
    sizes = cfg.batch.step_sizes
    return sizes.total if _quantum_key(cfg) == RAMP[0] else math.gcd(sizes.start, sizes.total)


def _batch(cfg: Config, world_size: int) -> Iterator[Problem]:
    size, sizes, t = cfg.batch.asked_micro_batch_size or 1, cfg.batch.step_sizes, cfg.seq_len
    try:
        batch.plan_batch(sizes.total, size, t, world_size)
    except ConfigError as error:
        yield from error.problems
        return
    if sizes.quantum % (micro_step := size * t * world_size):
        multiple = _multiple_of_quantum(cfg)
        near = batch.nearest_divisors(multiple // micro_step, sizes.quantum // micro_step)
        legal = [n * micro_step for n in near if multiple % micro_step == 0 and n * micro_step < sizes.total]
        fixes = [f"nearest: {batch.either(legal)}"] if legal else []
        if sizes.quantum % (t * world_size) == 0:
            near = batch.nearest_divisors(sizes.quantum // (t * world_size), size)
            fixes.append(f"nearest micro_batch_size: {batch.either(near)}")
        yield Problem(
            "quantum-not-divisible",
            f"{_quantum_key(cfg)}={sizes.quantum:,} tokens, of which each step of the ramp is a multiple, is not "
            f"divisible by micro_batch_size·seq_len·world_size = {size}·{t}·{world_size} = {micro_step:,}; "
            f"{'; '.join(fixes) or 'use fewer ranks, or smaller micro-batches'}",
        )


def _intervals(cfg: Config, _: int) -> Iterator[Problem]:
    for key in ("train.eval_every", "train.save_every", "train.keep_every"):
        if attrgetter(key)(cfg) is not None and cfg.batch.ramp_tokens is not None:
            rule = f"counts steps, and the steps of a ramp differ in size; give {key}_tokens"
            yield _refusal(cfg, key, "interval-in-steps", rule)


def _tree(cfg: Config, world_size: int) -> Iterator[Problem]:
    if cfg.train.reduction != "tree":
        return
    total, size, t = cfg.batch.total_batch_size, cfg.batch.asked_micro_batch_size, cfg.seq_len
    if cfg.world.threads_per_rank not in (None, 1):
        rule = "train.reduction=tree needs one thread per rank; leave it out"
        yield _refusal(cfg, "world.threads_per_rank", "tree-needs-one-thread", rule)
    if cfg.batch.ramp_tokens is not None:
        rule = "micro-batches of each step must be a power of two, and in a ramp they are not; leave out one"
        yield _refusal(cfg, "train.reduction", "tree-with-ramp", rule)
    elif not batch.is_power_of_two(world_size):
        rule = f"the number of ranks must be a power of two, not {world_size}; use world.size=1, 2, 4 or 8"
        yield _refusal(cfg, "train.reduction", "tree-needs-power-of-two", rule)
    elif total % ((size or 1) * t * world_size) == 0:
        sequences = total // (t * world_size)
        legal = [s for s in batch.legal_micro_batches(total, t, world_size) if batch.is_power_of_two(sequences // s)]
        fix = f"use batch.micro_batch_size={' or '.join(map(str, legal[:4]))}"
        if size is None:
            rule = f"train.reduction=tree needs a number, because its result depends on the size; {fix}"
            yield _refusal(cfg, "batch.micro_batch_size", "tree-needs-micro-batch", rule)
        elif size not in legal:
            rule = f"micro-batches of a step must be a power of two, not {total // (size * t)}; {fix}"
            yield _refusal(cfg, "train.reduction", "tree-needs-power-of-two", rule)


def _ranks(cfg: Config, world_size: int) -> Iterator[Problem]:
    if cfg.train.device == "mps" and world_size > 1:
        rule = f"supports only one rank, not {world_size}; use world.size=1"
        yield _refusal(cfg, "train.device", "one-rank-on-mps", rule)
    if cfg.world.comm != "float32" and world_size == 1:
        rule = "one rank sends no gradients, and would train as with float32; use more ranks, or leave it out"
        yield _refusal(cfg, "world.comm", "comm-of-one-rank", rule)
    if cfg.world.comm != "float32" and cfg.train.reduction == "tree":
        rule = "train.reduction=tree promises equal bits at every number of ranks; leave out one of them"
        yield _refusal(cfg, "world.comm", "comm-with-tree", rule)


def sharding_problems(cfg: Config, world_size: int) -> Iterator[Problem]:
    """A line for each setting that `world.sharding` does not support."""
    sharding, optim = cfg.world.sharding, cfg.optim
    if sharding == "none" or world_size == 1:  # one rank has everything
        return
    chosen = f"world.sharding={sharding}"
    if cfg.train.reduction == "tree":
        rule = f"adds whole gradients, and with {chosen} they are not; use world.sharding=none"
        yield _refusal(cfg, "train.reduction", "sharding-with-tree", rule)
    if sharding == "optimizer" and not optim.may_split_parameters:
        rule = f"optim={optim.name} is not one optimizer that updates each parameter by itself"
        fix = "use another, or world.sharding=none"
        yield _refusal(cfg, "world.sharding", "sharding-of-optimizer", f"{rule}; {fix}")
    if sharding != "full":
        return
    if not optim.may_split_rows:
        rule = f"optim={optim.name} updates whole matrices, and each rank has some rows of them"
        fix = f"use {optimizers_that('may_split_rows')}, or world.sharding=optimizer"
        yield _refusal(cfg, "world.sharding", "sharding-of-matrices", f"{rule}; {fix}")
    for key in ("train.eval_tasks", "train.evaluations", "train.sharpness_every_tokens", "log.metrics"):
        if attrgetter(key)(cfg):
            rule = f"needs the whole model on one rank, unlike {chosen}; measure it after the run"
            yield _refusal(cfg, key, "needs-whole-model", rule)


def missing_kernel(name: str, device: str) -> Problem | None:
    """The problem if `device` does not have the attention kernel `name`, else None."""
    if device in ATTENTION_DEVICES[name]:
        return None
    available = " or ".join(other for other, devices in ATTENTION_DEVICES.items() if device in devices)
    return Problem("no-such-kernel", f"train.attention={name}: {device} has no such kernel; use {available}")


def _machine(cfg: Config, _: int) -> Iterator[Problem]:
    device, attention = cfg.train.device, cfg.train.attention
    if cfg.world.backend == "nccl" and device in ("cpu", "mps"):
        rule = f"needs CUDA devices, not train.device={device}; use gloo or auto"
        yield _refusal(cfg, "world.backend", "nccl-needs-cuda", rule)
    if AUTO not in (attention, device) and (missing := missing_kernel(attention, device)):
        yield missing
    if cfg.log.tensorboard:
        package = find_spec("tensorboard")
        if package is None or package.origin is None:  # a folder of that name in the working directory is no package
            rule = "not installed; pip install 'gptexp[tensorboard]'"
            yield _refusal(cfg, "log.tensorboard", "package-missing", rule)
    folder = cfg.data.cache_dir  # an existing folder may be read-only
    if folder and not Path(folder).is_dir() and (why := paths.why_not_creatable(Path(folder))):
        yield _refusal(cfg, "data.cache_dir", "not-creatable", f"{why}; choose another")


def _lengths(cfg: Config, _: int) -> Iterator[Problem]:
    steps, run_tokens = cfg.run_length
    if cfg.train.profile and steps < 2:
        rule = "the profiler skips the first step, and this run has only one; lengthen the run"
        yield _refusal(cfg, "train.profile", "profile-of-one-step", rule)
    if cfg.schedule.begin_tokens and cfg.branch_from is None:
        rule = "only a run that continues another one begins its schedule later; leave it out, or use continue_from"
        yield _refusal(cfg, "schedule.begin_tokens", "begin-not-taken", rule)
    if cfg.schedule.begin_tokens >= run_tokens:
        return  # `branching.history_problems` says so
    if cfg.schedule.peak_ratio < cfg.schedule.min_lr_ratio and cfg.schedule.name in ("cosine", "linear", "wsd"):
        rule = f"below schedule.min_lr_ratio={cfg.schedule.min_lr_ratio:g}, to which the learning rate decays"
        yield _refusal(cfg, "schedule.peak_ratio", "peak-below-minimum", f"{rule}; lower that")
    schedule = resolve_schedule(cfg, run_tokens)
    run_tokens -= schedule.begin_tokens
    warmup, decay, key = schedule.warmup_tokens, schedule.decay_tokens, length_key(cfg, "warmup")
    if warmup >= run_tokens:
        rule = (
            f"the warm-up of {warmup:,} tokens is not shorter than the run of {run_tokens:,} tokens, so the learning "
            "rate would not reach its peak; shorten the warm-up or lengthen the run"
        )
        yield _refusal(cfg, key, "warmup-too-long", rule)
    if cfg.schedule.name == "inverse_sqrt" and warmup == 0:
        yield _refusal(cfg, key, "warmup-missing", "inverse_sqrt needs a warm-up; set schedule.warmup_ratio above 0")
    if parts.is_part(cfg.schedule) and not parts.problems_of(partial(parts.bound, "schedule", cfg.schedule)):
        steps_tried = range(0, run_tokens, max(1, run_tokens // FACTORS_TRIED))
        yield from parts.problems_of(lambda: [schedule.lr_factor(tokens, 1) for tokens in steps_tried])
    key = length_key(cfg, "decay")
    ends_early = key != "schedule.decay_ratio" or cfg.schedule.decay_ratio < 1  # else `warmup-too-long` covers it
    if cfg.schedule.name in ("cosine", "linear", "wsd") and ends_early and decay <= warmup:
        rule = (
            f"the decay ends at {decay:,} tokens, not after the warm-up of {warmup:,} tokens; lengthen the decay or "
            "shorten the warm-up"
        )
        yield _refusal(cfg, key, "decay-too-short", rule)


def length_key(cfg: Config, part: str) -> str:
    """The key that sets the length of a part of the schedule: the first of steps, tokens and ratio that is given."""
    keys = (f"schedule.{part}_{unit}" for unit in ("steps", "tokens", "ratio"))
    return next(key for key in keys if attrgetter(key)(cfg) is not None)


def _optimizer(cfg: Config, _: int) -> Iterator[Problem]:
    name, package = cfg.optim.name, cfg.optim.needs
    averages = f"optim={name} averages weights"
    if package is not None and find_spec(package) is None:
        rule = f"needs the package {package}; run: pip install 'gptexp[optim]'"
        yield Problem("package-missing", f"optim={name}: {rule}")
    if cfg.optim.averages_weights and cfg.schedule.name != "constant":
        rule = f"{averages} in place of a decay; use constant"
        yield _refusal(cfg, "schedule.name", "decay-with-schedulefree", rule)
    if cfg.optim.averages_weights and cfg.train.ema_half_life_tokens is not None:
        rule = f"{averages} by itself; leave out one of them"
        yield _refusal(cfg, "train.ema_half_life_tokens", "average-with-schedulefree", rule)


_NEEDED_BY = {("lr", "power"): "exponent", ("lr", "surge"): "noise_scale_tokens"}


def _scaling(cfg: Config, _: int) -> Iterator[Problem]:
    optim, refused = cfg.optim, list[Problem]()

    def refuse(code: str, rule: str) -> None:
        refused.append(_refusal(cfg, f"scaling.{key}", code, rule))

    for key, chosen in cfg.scaling.rules.items():
        if cfg.scaling.reference_tokens is None:
            rule = "give scaling.reference_tokens, the batch size at which the optimizer's keys hold"
            refuse("reference-missing", rule)
        if (needed := _NEEDED_BY.get((key, chosen))) and getattr(cfg.scaling, needed) is None:
            refuse("scaling-incomplete", f"needs scaling.{needed}; give it")
        if key == "betas" and not scaled_decay_rates(optim, chosen):
            refuse("nothing-to-scale", f"optim={optim.name} has no decay rate of an average to scale; use none")
        if key == "betas" and isinstance(optim, TwoMomentsConfig) and (tokens := optim.beta2_half_life_tokens):
            rule = f"optim.beta2_half_life_tokens={tokens} fixes the half-life of beta2 already; leave out one of them"
            refuse("half-life-given-twice", rule)
        if key == "eps" and not hasattr(optim, "eps"):
            refuse("nothing-to-scale", f"optim={optim.name} has no eps; use none")
        if key == "weight_decay" and not optim.has_timescale:
            refuse("nothing-to-scale", f"optim={optim.name} scales its updates to the size of the weights; use none")
    yield from refused or _scaled_values(cfg)


def _scaled_values(cfg: Config) -> Iterator[Problem]:
    """A line for each value that the rules scale out of its legal range."""
    total, reference = cfg.batch.total_batch_size, cfg.scaling.reference_tokens
    at_total, code = f"at {total:,} tokens a step", "scaled-out-of-range"
    try:
        scaled = scaled_optim(cfg)
    except OverflowError:
        rule = f"the learning rate {at_total} is too large; use another rule"
        yield _refusal(cfg, "scaling.lr", code, rule)
        return
    for name in cfg.optim.decay_rates:
        rate, scaled_rate = getattr(cfg.optim, name), getattr(scaled, name)
        if 0 <= scaled_rate < 1:
            continue
        if cfg.scaling.betas == "none":
            rule = f"too long for a batch size of {total:,} tokens: beta2 would be {scaled_rate:g}; use a shorter one"
            yield _refusal(cfg, "optim.beta2_half_life_tokens", code, rule)
            continue
        fix = ""
        if scaled_rate < 0 and reference is not None:
            fix = f"; use at most {math.floor(reference / (1 - rate)):,}, or scaling.betas=half_life"
        rule = f"{name}={rate:g} would be {scaled_rate:.3g} {at_total}{fix}"
        yield _refusal(cfg, "scaling.betas", code, rule)
    for name in ("lr", "eps"):
        if not 0 < (value := getattr(scaled, name, 1.0)) < math.inf:
            yield _refusal(cfg, f"scaling.{name}", code, f"optim.{name} would be {value:g} {at_total}")


def _paths(cfg: Config, _: int) -> Iterator[Problem]:
    texts = {f"data.validation.{name}": path for name, path in cfg.data.validation.items()}
    for key, value in ({key: attrgetter(key)(cfg) for key in ("data.path", "data.val_path")} | texts).items():
        if value is None or (key == "data.path" and (cfg.data.name == "hf" or parts.takes(cfg.data, "path"))):
            continue
        if not paths.is_path_list(value):
            yield _refusal(cfg, key, "not-a-path", "must be a file, a glob or a list of them")
            continue
        yield from _missing(cfg, key, paths.path_list(value))


def _missing(cfg: Config, key: str, patterns: list[str]) -> Iterator[Problem]:
    """A line for each pattern without a file, unless the whole text is gone and the cache has its tokens."""
    missing = [pattern for pattern in patterns if not paths.exists(pattern)]
    if cfg.data.name == "tokens":
        missing = [pattern for pattern in missing if not Path(pattern).is_dir()]
    if missing and not paths.remembered_key(paths.cache_dir(cfg.data.cache_dir), patterns, cfg.data.reading):
        for pattern in missing:
            yield Problem("no-such-file", f"{key}={shown(pattern)}: {paths.no_files(pattern)}")


def _corpus(cfg: Config, _: int) -> Iterator[Problem]:
    d, code = cfg.data, "corpus-missing"
    if d.name == "text" and d.path is None and d.mix is None:
        rule = "data=text needs text to read; give data.path=FILE, a glob or a list"
        yield _refusal(cfg, "data.path", code, rule)
    if d.name == "hf" and d.mix is None and not paths.is_hub_name(d.path):
        yield _refusal(cfg, "data.path", code, "data=hf needs the name of a data set; give data.path=OWNER/NAME")
    if d.name == "tokens" and d.path is None:
        rule = "data=tokens needs token files; give data.path=FOLDER, a file, a glob or a list"
        yield _refusal(cfg, "data.path", code, rule)
    if d.path is not None and d.mix is not None:
        rule = f"names the sources in place of data.path={shown(d.path)}; leave out one of them"
        yield _refusal(cfg, "data.mix", "mix-with-path", rule)


def _mix(cfg: Config, _: int) -> Iterator[Problem]:
    d, key = cfg.data, "data.mix"
    if d.mix is None:
        return
    if not isinstance(d.mix, dict) or not d.mix or not all(_is_positive(weight) for weight in d.mix.values()):
        rule = "must map paths to weights above 0, for example data.mix='{a.txt: 0.7, b.txt: 0.3}'"
        yield _refusal(cfg, key, "not-a-mix", rule)
        return
    if d.order == "sequential":
        rule = "data.order=sequential would read one source after the other; use data.order=shuffled"
        yield _refusal(cfg, key, "mix-in-sequence", rule)
    if d.tokenizer == CHARS:
        rule = "data.tokenizer=chars would number the characters of each source anew; use data.tokenizer=bytes"
        yield _refusal(cfg, key, "mix-of-chars", rule)
    if d.val_split == "tail":
        rule = "data.val_split=tail would hold out the last source alone; use data.val_split=spread"
        yield _refusal(cfg, key, "mix-with-tail", rule)
    source_of: dict[Path, str] = {}
    for source in d.mix:
        if d.name == "hf" and not paths.is_hub_name(source):
            rule = "data=hf needs the names of data sets; give OWNER/NAME for each"
            yield Problem("corpus-missing", f"{key}={shown(source)}: {rule}")
        if d.name != "text":
            continue
        yield from _missing(cfg, key, [source])
        for file in paths.matching_files(source):
            if (other := source_of.setdefault(file, source)) != source:
                rule = f"{file} is in {shown(other)} and in {shown(source)}; give each file to one source"
                yield _refusal(cfg, key, "mix-overlaps", rule)
                return


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LIMIT


def _validation(cfg: Config, _: int) -> Iterator[Problem]:
    d, t = cfg.data, cfg.seq_len
    if (d.val_ratio is None or d.validation) and d.val_tokens and batch.count_val_windows(d.val_tokens, t) == 0:
        rule = f"rounds to 0 windows of seq_len={t}; use {t} or more, or 0 for none"
        yield _refusal(cfg, "data.val_tokens", "validation-too-short", rule)
    if d.max_tokens is not None and d.max_tokens <= t:
        rule = f"less than a window of seq_len+1 = {t + 1}; use that or more"
        yield _refusal(cfg, "data.max_tokens", "corpus-too-short", rule)
    if d.max_tokens is not None and d.val_ratio is None and d.val_path is None and d.val_tokens >= d.max_tokens:
        rule = f"must be below data.max_tokens={d.max_tokens}; or set data.val_path"
        yield _refusal(cfg, "data.val_tokens", "validation-too-long", rule)
    for key in (
        "train.eval_tasks", "train.evaluations", "train.stop_at_loss", "train.patience_tokens", "data.val_path",
        "data.validation",
    ):  # fmt: skip
        if attrgetter(key)(cfg) and not d.validates:
            rule = "data.val_tokens=0 turns validation off; leave out one of them"
            yield _refusal(cfg, key, "validation-off", rule)
    own_text = f"data.val_path={shown(d.val_path)} is the validation text, and nothing is held out of the corpus"
    if d.val_path is not None and d.val_split == "tail":
        yield _refusal(cfg, "data.val_split", "validation-given-twice", f"{own_text}; leave out one of them")
    if d.val_path is not None and d.val_ratio is not None:
        fix = "leave out one of them, and give data.val_tokens"
        yield _refusal(cfg, "data.val_ratio", "validation-given-twice", f"{own_text}; {fix}")


def _objective(cfg: Config, _: int) -> Iterator[Problem]:
    losses = [Metric.VAL_LOSS, *(of_text(Metric.VAL_LOSS, name) for name in cfg.data.validation)]
    if cfg.train.ema_half_life_tokens is not None:
        losses.append(Metric.VAL_LOSS_EMA)
    if cfg.sweep.objective not in losses:
        rule = f"the run logs no such loss; use one of {', '.join(losses)}"
        yield _refusal(cfg, "sweep.objective", "no-such-loss", rule)


# `problems` applies `_ramp` before these.
RULES: tuple[Rule, ...] = (
    _unread, _parts, _own_model, _model, _sequence, _parametrisation, _tokenizer, _batch, _intervals, _tree, _ranks,
    _noise, _optimizer, _scaling, fitted_problems, _lengths, _paths, _corpus, _mix, _validation, _objective,
    sharding_problems, _machine,
)  # fmt: skip
RULES_OF_SAVED: tuple[Rule, ...] = (_model, _sequence, _saved_tokenizer, _ramp, _scaling)
