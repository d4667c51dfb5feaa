"""The rules that concern several configuration keys.

They are checked before torch is imported and before a file is created. Each problem is one line with the value, the
rule and the fix.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gptexp.config.batch import (
    count_val_windows,
    either,
    is_power_of_two,
    legal_micro_batches,
    nearest_divisors,
    plan_batch,
)
from gptexp.config.fitted import fitted_problems
from gptexp.config.noise_scale import LIKE_BATCH, needing_noise_scale, why_unmeasured
from gptexp.config.paths import (
    is_file,
    is_hub_name,
    is_path_list,
    matching_files,
    no_files,
    path_list,
    saved_dataset_files,
    why_not_creatable,
)
from gptexp.config.scaling import decay_rates, effective_optim, scaled_decay_rates
from gptexp.config.schedule import resolve_schedule
from gptexp.config.schema import (
    ATTENTION_DEVICES,
    AUTO,
    Config,
    DataConfig,
    ModelConfig,
    ScalingConfig,
    TwoMomentsConfig,
    field_problems,
)
from gptexp.config.vocabulary import CHARS, NAMES, VOCAB_SIZES, padded, padding_multiple
from gptexp.process.errors import ConfigError
from gptexp.process.words import counted, shown

RAMP = ("batch.ramp_from_tokens", "batch.ramp_tokens", "batch.ramp_quantum_tokens")
STEP_SIZES = ("batch.total_batch_size", *RAMP)
RUN_LENGTH = ("train.max_tokens", "train.max_steps", *STEP_SIZES)
WARMUP = ("schedule.name", "schedule.warmup_ratio", "schedule.warmup_tokens", "schedule.warmup_steps")
DECAY = ("schedule.decay_ratio", "schedule.decay_tokens", "schedule.decay_steps")
LENGTHS_IN_STEPS = {
    "train.max_steps": "the number of training tokens",
    "schedule.warmup_steps": "the number of warm-up tokens",
    "schedule.decay_steps": "the number of decay tokens",
}
SCALING = (*(f"scaling.{f.name}" for f in fields(ScalingConfig)), "batch.total_batch_size", "optim.lr", "optim.beta1",
           "optim.beta2", "optim.beta2_half_life_tokens", "optim.momentum", "optim.eps")  # fmt: skip
INTERVALS_IN_STEPS = ("train.eval_every", "train.save_every", "train.keep_every")
SIZES = ("model.n_embd", "model.n_head")
SEQ_LEN = ("batch.seq_len", "model.block_size")
TOKENIZER_RULE = f"must be one of {', '.join(NAMES)}, or the path of a tokenizer.json"
# Optimizers for which the table of model/parametrisation.py holds: each element of an update has about the size lr. Of
# SGD it has that of the gradient, of LARS, LAMB and Adafactor that of the weight. Muon and SOAP limit whole matrices.
LIKE_ADAM = ("adamw", "lion", "schedulefree")
# Optimizers whose update of a number depends on the gradient, the weight and the state of that number alone.
_BY_NUMBER = ("adamw", "sgd", "lion", "schedulefree")
_NOT_BY_PARAMETER = ("lamb", "muon", "schedulefree")  # the first two are two optimizers; the last exchanges the weights
_BASE_OF = {"base_n_embd": ("mup", "completep"), "base_n_head": ("mup", "completep"), "base_n_layer": ("completep",)}
MOST_QUANTA = 10_000  # in a step; each may be a level of the ramp


def check(cfg: Config, world_size: int) -> None:
    """Raise `ConfigError` with every problem of a run of `cfg` on `world_size` ranks."""
    if found := problems(cfg, world_size):
        raise ConfigError(found)


def problems(cfg: Config, world_size: int) -> list[str]:
    """Every problem of `cfg`, one line each. A rule is skipped if one of its keys has an invalid value."""
    invalid = field_problems(cfg)
    found = list(invalid.values())
    unusable = {*invalid}
    for rule, keys in RULES:
        if unusable.isdisjoint(keys):
            found += (lines := list(rule(cfg, world_size)))
            if rule is _ramp and lines:  # the steps have no sizes, which other rules need
                unusable.update(RAMP)
    return found


def saved_problems(cfg: Config) -> list[str]:
    """The problems of a saved config that make it useless on any machine: those of single keys and of the model."""
    invalid = field_problems(cfg)
    rules = (_heads, _parametrisation, _saved_tokenizer, _vocabulary, _sequence, _ramp, _scaling)
    return [*invalid.values()] or [line for rule in rules for line in rule(cfg, 1)]


def confounds_of(values: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each key in `values` (dotted key -> value) that confounds a comparison of batch sizes."""
    for key, what in LENGTHS_IN_STEPS.items():
        if values.get(key) is not None:
            yield f"{key}={values[key]} counts steps, so {what} differs between batch sizes; give it in tokens"
    if (ramp := values.get("batch.ramp_tokens")) is not None:
        yield f"batch.ramp_tokens={ramp}: the steps grow, so a run has not one batch size; leave out the ramp"
    if values.get("optim.name") == "adafactor":
        yield (
            "optim=adafactor: its limit of the learning rate, 1 / √step, and the decay of its average count steps, so "
            "both differ between batch sizes; use another optimizer"
        )
    noise, decay = values.get("optim.gradient_noise"), values.get("optim.gradient_noise_decay")
    if noise and decay and values.get("optim.gradient_noise_decay_tokens") is None:
        yield (
            f"optim.gradient_noise_decay={decay:g} counts steps, so the noise after a number of tokens differs between "
            "batch sizes; give optim.gradient_noise_decay_tokens"
        )


def missing_kernel(name: str, device: str) -> str | None:
    """The error if `device` does not have the attention kernel `name`, else None."""
    if device in ATTENTION_DEVICES[name]:
        return None
    available = " or ".join(other for other, devices in ATTENTION_DEVICES.items() if device in devices)
    return f"train.attention={name}: {device} has no such kernel; use {available}"


def _heads(cfg: Config, _: int) -> Iterator[str]:
    m = cfg.model
    if m.n_embd % m.n_head:
        below = m.n_embd // m.n_head * m.n_head
        nearest = f"{below} or {below + m.n_head}" if below else m.n_head
        yield f"model.n_embd={m.n_embd}: not divisible by model.n_head={m.n_head}; nearest: {nearest}"


def _parametrisation(cfg: Config, _: int) -> Iterator[str]:
    m, chosen = cfg.model, f"model.parametrisation={cfg.model.parametrisation}"
    for key, readers in _BASE_OF.items():
        value = getattr(m, key)
        if value is not None and m.parametrisation not in readers:
            yield f"model.{key}={value}: {chosen} has no such base; use {' or '.join(readers)}, or leave it out"
    width, heads = m.base_n_embd or m.n_embd, m.base_n_head or m.n_head
    if width % heads and (m.base_n_embd, m.base_n_head) != (None, None):
        yield f"model.base_n_embd={width}: not divisible by the {counted(heads, 'head')} of the base; set base_n_head"


def _base(cfg: Config, _: int) -> Iterator[str]:
    chosen = cfg.model.parametrisation
    if chosen != "standard" and cfg.model.base_n_embd is None:  # a run that has been trained so can still be read
        yield (
            f"model.base_n_embd=null: model.parametrisation={chosen} corrects for how much wider a model is than a "
            "base; set model.base_n_embd, the width of the model whose learning rate is known"
        )


def _learning_rates(cfg: Config, _: int) -> Iterator[str]:
    chosen, name = cfg.model.parametrisation, cfg.optim.name
    if chosen != "standard" and name not in LIKE_ADAM:
        yield (
            f"model.parametrisation={chosen}: its learning rates are for updates like Adam's, unlike those of "
            f"optim={name}; use optim={' or '.join(LIKE_ADAM)}"
        )


def _tokenizer(cfg: Config, _: int) -> Iterator[str]:
    given = cfg.data.tokenizer
    if given not in NAMES and not is_file(Path(given)):
        yield f"data.tokenizer={shown(given)}: no such file; {TOKENIZER_RULE}"


def _saved_tokenizer(cfg: Config, _: int) -> Iterator[str]:
    given = cfg.data.tokenizer
    if given not in NAMES and not Path(given).is_absolute():  # the run has a copy of the file
        yield f"data.tokenizer={shown(given)}: {TOKENIZER_RULE}"


def _vocabulary(cfg: Config, _: int) -> Iterator[str]:
    ids, size = VOCAB_SIZES.get(cfg.data.tokenizer), cfg.model.vocab_size
    if ids is not None and isinstance(size, int) and size < ids:
        yield (
            f"model.vocab_size={size}: smaller than the {ids:,} ids of data.tokenizer={cfg.data.tokenizer}; use auto "
            f"({padded(ids)}, a multiple of {padding_multiple(ids)})"
        )


def _sequence(cfg: Config, _: int) -> Iterator[str]:
    t, block_size = cfg.seq_len, cfg.model.block_size
    if t > block_size:
        yield f"batch.seq_len={t}: longer than model.block_size={block_size}; use that, or model.block_size={t}"


def _ramp(cfg: Config, _: int) -> Iterator[str]:
    given = [key for key in RAMP if getattr(cfg.batch, key.removeprefix("batch.")) is not None]
    if not given:
        return
    if missing := [key for key in RAMP[:2] if key not in given]:
        value = getattr(cfg.batch, given[0].removeprefix("batch."))
        yield f"{given[0]}={value}: a ramp needs {' and '.join(missing)} too; give both, or leave it out"
        return
    sizes, key = cfg.batch.step_sizes, _quantum_key(cfg)
    if sizes.start >= sizes.total:
        yield f"{RAMP[0]}={sizes.start:,}: must be below batch.total_batch_size={sizes.total:,}, to which steps grow"
    elif sizes.total % sizes.quantum or sizes.start % sizes.quantum:
        start = "" if key == RAMP[0] else f"{RAMP[0]}={sizes.start:,} and "
        near = nearest_divisors(_multiple_of_quantum(cfg), sizes.quantum)
        yield (
            f"{key}={sizes.quantum:,}: must divide {start}batch.total_batch_size={sizes.total:,}; nearest: "
            f"{either([n for n in near if n < sizes.total])}"
        )
    elif sizes.total // sizes.quantum > MOST_QUANTA:
        yield (
            f"{key}={sizes.quantum:,}: less than 1/{MOST_QUANTA:,} of batch.total_batch_size={sizes.total:,}; give a "
            f"larger {RAMP[2]}"
        )


def _quantum_key(cfg: Config) -> str:
    """The key that sets the quantum of a ramp."""
    return RAMP[2 if cfg.batch.ramp_quantum_tokens is not None else 0]


def _multiple_of_quantum(cfg: Config) -> int:
    """The tokens that the quantum of a ramp must divide."""
    sizes = cfg.batch.step_sizes
    return sizes.total if _quantum_key(cfg) == RAMP[0] else math.gcd(sizes.start, sizes.total)


def _batch(cfg: Config, world_size: int) -> Iterator[str]:
    size, sizes = cfg.batch.asked_micro_batch_size or 1, cfg.batch.step_sizes
    try:
        plan_batch(sizes.total, size, cfg.seq_len, world_size)
    except ValueError as error:
        yield str(error)
        return
    if sizes.quantum % (micro_step := size * cfg.seq_len * world_size):
        multiple = _multiple_of_quantum(cfg)
        near = nearest_divisors(multiple // micro_step, sizes.quantum // micro_step)
        legal = [n * micro_step for n in near if multiple % micro_step == 0 and n * micro_step < sizes.total]
        fixes = [f"nearest: {either(legal)}"] if legal else []
        if sizes.quantum % (cfg.seq_len * world_size) == 0:
            near = nearest_divisors(sizes.quantum // (cfg.seq_len * world_size), size)
            fixes.append(f"nearest micro_batch_size: {either(near)}")
        yield (
            f"{_quantum_key(cfg)}={sizes.quantum:,} tokens, of which each step of the ramp is a multiple, is not "
            f"divisible by micro_batch_size·seq_len·world_size = {size}·{cfg.seq_len}·{world_size} = {micro_step:,}; "
            f"{'; '.join(fixes) or 'use fewer ranks, or smaller micro-batches'}"
        )


def _intervals(cfg: Config, _: int) -> Iterator[str]:
    for key in INTERVALS_IN_STEPS:
        every = getattr(cfg.train, key.removeprefix("train."))
        if every is not None and cfg.batch.ramp_tokens is not None:
            yield f"{key}={every}: counts steps, and the steps of a ramp differ in size; give {key}_tokens"


def _tree(cfg: Config, world_size: int) -> Iterator[str]:
    if cfg.train.reduction != "tree":
        return
    given, total, size = "train.reduction=tree", cfg.batch.total_batch_size, cfg.batch.asked_micro_batch_size
    if cfg.batch.ramp_tokens is not None:
        yield f"{given}: micro-batches of each step must be a power of two, and in a ramp they are not; leave out one"
    elif not is_power_of_two(world_size):
        yield f"{given}: the number of ranks must be a power of two, not {world_size}; use world.size=1, 2, 4 or 8"
    elif total % ((size or 1) * cfg.seq_len * world_size) == 0:
        sequences = total // (cfg.seq_len * world_size)
        legal = [s for s in legal_micro_batches(total, cfg.seq_len, world_size) if is_power_of_two(sequences // s)]
        use = f"use batch.micro_batch_size={' or '.join(map(str, legal[:4]))}"
        if size is None:
            yield f"batch.micro_batch_size=auto: {given} needs a number, because its result depends on the size; {use}"
        elif size not in legal:
            yield f"{given}: micro-batches of a step must be a power of two, not {total // (size * cfg.seq_len)}; {use}"
    if cfg.world.threads_per_rank not in (None, 1):
        yield f"world.threads_per_rank={cfg.world.threads_per_rank}: {given} needs one thread per rank; leave it out"


def _comm(cfg: Config, world_size: int) -> Iterator[str]:
    given = f"world.comm={cfg.world.comm}"
    if cfg.world.comm == "float32":
        return
    if world_size == 1:
        yield f"{given}: one rank sends no gradients, and would train as with float32; use more ranks, or leave it out"
    if cfg.train.reduction == "tree":
        yield f"{given}: train.reduction=tree promises equal bits at every number of ranks; leave out one of them"


def _noise_scale(cfg: Config, world_size: int) -> Iterator[str]:
    size = cfg.batch.asked_micro_batch_size or 1  # the ranks resolve `auto` later
    given = needing_noise_scale(cfg)
    if given and cfg.log.noise_scale == "off":
        yield f"log.noise_scale=off: {given} needs the noise scale; leave out one of them"
    elif given and (why := why_unmeasured(cfg, size, world_size)):
        yield f"{given}: {why}"


def _gradient_noise(cfg: Config, _: int) -> Iterator[str]:
    o, total = cfg.optim, cfg.batch.total_batch_size
    like = o.gradient_noise_like_batch
    if like is None:
        return
    given = f"{LIKE_BATCH}={like}"
    if o.gradient_noise:
        yield f"{given}: is another noise than optim.gradient_noise={o.gradient_noise:g}; leave out one of them"
    if not cfg.seq_len <= like <= total:
        yield f"{given}: must lie between a sequence of {cfg.seq_len} tokens and batch.total_batch_size={total}"


def _profile(cfg: Config, _: int) -> Iterator[str]:
    steps, _tokens = cfg.run_length
    if cfg.train.profile and steps < 2:
        yield "train.profile=true: the profiler skips the first step, and this run has only one; lengthen the run"


def _warmup(cfg: Config, _: int) -> Iterator[str]:
    _, run_tokens = cfg.run_length
    warmup = resolve_schedule(cfg, run_tokens).warmup_tokens
    key = _first_given(cfg.schedule, "warmup_steps", "warmup_tokens") or "warmup_ratio"
    given = f"schedule.{key}={getattr(cfg.schedule, key)}"
    if warmup >= run_tokens:
        yield (
            f"{given}: the warm-up of {warmup:,} tokens is not shorter than the run of {run_tokens:,} tokens, "
            "so the learning rate would not reach its peak; shorten the warm-up or lengthen the run"
        )
    if cfg.schedule.name == "inverse_sqrt" and warmup == 0:
        yield f"{given}: inverse_sqrt needs a warm-up; set schedule.warmup_ratio above 0"


def _decay(cfg: Config, _: int) -> Iterator[str]:
    key = _first_given(cfg.schedule, "decay_steps", "decay_tokens") or "decay_ratio"
    _, run_tokens = cfg.run_length
    schedule = resolve_schedule(cfg, run_tokens)
    is_of_decay = key != "decay_ratio" or cfg.schedule.decay_ratio < 1  # else `_warmup` speaks of it
    decays = cfg.schedule.name in ("cosine", "linear", "wsd")
    if is_of_decay and decays and schedule.decay_tokens <= schedule.warmup_tokens:
        yield (
            f"schedule.{key}={getattr(cfg.schedule, key)}: the decay ends at {schedule.decay_tokens:,} tokens, not "
            f"after the warm-up of {schedule.warmup_tokens:,} tokens; lengthen the decay or shorten the warm-up"
        )


def _first_given(section: Any, *keys: str) -> str | None:
    """The first of `keys` that is not null; it takes precedence over the others."""
    return next((key for key in keys if getattr(section, key) is not None), None)


def _optimizer(cfg: Config, _: int) -> Iterator[str]:
    name, schedule = cfg.optim.name, cfg.schedule.name
    if cfg.optim.needs is not None and find_spec(cfg.optim.needs) is None:
        yield f"optim={name}: needs the package {cfg.optim.needs}; run: pip install 'gptexp[optim]'"
    if name == "schedulefree" and schedule != "constant":
        yield f"schedule.name={schedule}: optim=schedulefree averages weights in place of a decay; use constant"
    if name == "schedulefree" and cfg.train.ema_half_life_tokens is not None:
        given = f"train.ema_half_life_tokens={cfg.train.ema_half_life_tokens}"
        yield f"{given}: optim=schedulefree averages its weights itself; leave out one of them"


_NEEDED_BY = {("lr", "power"): "exponent", ("lr", "surge"): "noise_scale_tokens"}
_WITHOUT_TIMESCALE = ("lamb", "lars")  # their updates have the size of the weights, whatever the weight decay


def _scaling(cfg: Config, _: int) -> Iterator[str]:
    scaling, optim = cfg.scaling, cfg.optim
    refused = []
    for key, rule in scaling.rules.items():
        given = f"scaling.{key}={rule}"
        if scaling.reference_tokens is None:
            refused.append(f"{given}: give scaling.reference_tokens, the batch size at which the optimizer's keys hold")
        if (needed := _NEEDED_BY.get((key, rule))) and getattr(scaling, needed) is None:
            refused.append(f"{given}: needs scaling.{needed}; give it")
        if key == "betas" and not scaled_decay_rates(optim, rule):
            refused.append(f"{given}: optim={optim.name} has no decay rate of an average to scale; use none")
        if key == "betas" and isinstance(optim, TwoMomentsConfig) and optim.beta2_half_life_tokens is not None:
            refused.append(
                f"{given}: optim.beta2_half_life_tokens={optim.beta2_half_life_tokens} fixes the half-life of beta2 "
                "already; leave out one of them"
            )
        if key == "eps" and not hasattr(optim, "eps"):
            refused.append(f"{given}: optim={optim.name} has no eps; use none")
        if key == "weight_decay" and optim.name in _WITHOUT_TIMESCALE:
            refused.append(f"{given}: optim={optim.name} scales its updates to the size of the weights; use none")
    yield from refused or _scaled_values(cfg)


def _scaled_values(cfg: Config) -> Iterator[str]:
    """A line for each value that the rules scale out of its legal range."""
    given, total = cfg.scaling, cfg.batch.total_batch_size
    try:
        effective = effective_optim(cfg)
    except OverflowError:
        yield f"scaling.lr={given.lr}: the learning rate at {total:,} tokens a step is too large; use another rule"
        return
    for name in decay_rates(cfg.optim):
        rate, scaled_rate = getattr(cfg.optim, name), getattr(effective, name)
        if 0 <= scaled_rate < 1:
            continue
        if given.betas == "none" and isinstance(cfg.optim, TwoMomentsConfig):
            yield (
                f"optim.beta2_half_life_tokens={cfg.optim.beta2_half_life_tokens}: too long for a batch size of "
                f"{total:,} tokens: beta2 would be {scaled_rate:g}; use a shorter one"
            )
        elif scaled_rate < 0:
            assert given.reference_tokens is not None
            largest = math.floor(given.reference_tokens / (1 - rate))
            yield (
                f"scaling.betas=sde: {name}={rate:g} would be {scaled_rate:.3g} at {total:,} tokens a step; use at "
                f"most {largest:,}, or scaling.betas=half_life"
            )
        else:
            yield f"scaling.betas={given.betas}: {name}={rate:g} would be {scaled_rate:g} at {total:,} tokens a step"
    for name in ("lr", "eps"):
        if not 0 < getattr(effective, name, 1.0) < math.inf:
            value = f"{getattr(effective, name):g}"
            yield f"scaling.{name}={getattr(given, name)}: optim.{name} would be {value} at {total:,} tokens a step"


def _paths(cfg: Config, _: int) -> Iterator[str]:
    for key in ("path", "val_path"):
        value = getattr(cfg.data, key)
        if value is None or (key == "path" and cfg.data.name == "hf"):
            continue
        if not is_path_list(value):
            yield f"data.{key}={shown(value)}: must be a file, a glob or a list of them"
            continue
        for pattern in path_list(value):
            if not _exists(pattern) and not (cfg.data.name == "tokens" and Path(pattern).is_dir()):
                yield f"data.{key}={shown(pattern)}: {no_files(pattern)}"


_READ_BY = {  # key of data -> the corpora that read it
    "path": ("text", "hf", "tokens"),
    "format": ("tokens",),
    "subset": ("hf",),
    "split": ("hf",),
    "mix": ("text", "hf"),
    "text_column": ("text", "hf"),
}


def _corpus(cfg: Config, _: int) -> Iterator[str]:
    d = cfg.data
    if d.name == "text" and d.path is None and d.mix is None:
        yield "data.path=null: data=text needs text to read; give data.path=FILE, a glob or a list"
    if d.name == "hf" and d.mix is None and not is_hub_name(d.path):
        yield f"data.path={shown(d.path)}: data=hf needs the name of a data set; give data.path=OWNER/NAME"
    if d.name == "tokens" and d.path is None:
        yield "data.path=null: data=tokens needs token files; give data.path=FOLDER, a file, a glob or a list"
    for key, names in _READ_BY.items():
        if d.name not in names and (value := getattr(d, key)) != getattr(DataConfig, key):
            readers = " or ".join(f"data={name}" for name in names)
            yield f"data.{key}={shown(value)}: only {readers} reads it; use that, or leave it out"
    if d.path is not None and d.mix is not None:
        yield f"data.mix={shown(d.mix)}: names the sources in place of data.path={shown(d.path)}; leave out one of them"


def _mix(cfg: Config, _: int) -> Iterator[str]:
    d, given = cfg.data, f"data.mix={shown(cfg.data.mix)}"
    if d.mix is None:
        return
    if not isinstance(d.mix, dict) or not d.mix or not all(_is_weight(weight) for weight in d.mix.values()):
        yield f"{given}: must map paths to weights above 0, for example data.mix='{{a.txt: 0.7, b.txt: 0.3}}'"
        return
    if d.order == "sequential":
        yield f"{given}: data.order=sequential would read one source after the other; use data.order=shuffled"
    if d.tokenizer == CHARS:
        yield f"{given}: data.tokenizer=chars would number the characters of each source anew; use data.tokenizer=bytes"
    if d.val_split == "tail":
        yield f"{given}: data.val_split=tail would hold out the last source alone; use data.val_split=spread"
    source_of: dict[Path, str] = {}
    for source in d.mix:
        if d.name == "hf" and not is_hub_name(source):
            yield f"data.mix={shown(source)}: data=hf needs the names of data sets; give OWNER/NAME for each"
        if d.name != "text":
            continue
        if not _exists(source):
            yield f"data.mix={shown(source)}: {no_files(source)}"
        for file in matching_files(source):
            if (other := source_of.setdefault(file, source)) != source:
                yield f"{given}: {file} is in {shown(other)} and in {shown(source)}; give each file to one source"
                return


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _exists(pattern: str) -> bool:
    return bool(saved_dataset_files(Path(pattern)) or matching_files(pattern))


def _corpus_length(cfg: Config, _: int) -> Iterator[str]:
    window = cfg.seq_len + 1
    if cfg.data.max_tokens is not None and cfg.data.max_tokens < window:
        yield f"data.max_tokens={cfg.data.max_tokens}: less than a window of seq_len+1 = {window}; use that or more"


def _validation(cfg: Config, _: int) -> Iterator[str]:
    d, t = cfg.data, cfg.seq_len
    if d.val_ratio is None and d.val_tokens and count_val_windows(d.val_tokens, t) == 0:
        yield f"data.val_tokens={d.val_tokens}: rounds to 0 windows of seq_len={t}; use {t} or more, or 0 for none"
    if d.val_path is not None and not d.validates:
        yield f"data.val_path={shown(d.val_path)}: data.val_tokens=0 turns validation off; leave out one of them"


def _own_validation_text(cfg: Config, _: int) -> Iterator[str]:
    d = cfg.data
    if d.val_path is None:
        return
    instead = f"data.val_path={shown(d.val_path)} is the validation text, and nothing is held out of the corpus"
    if d.val_split == "tail":
        yield f"data.val_split=tail: {instead}; leave out one of them"
    if d.val_ratio is not None:
        yield f"data.val_ratio={d.val_ratio:g}: {instead}; leave out one of them, and give data.val_tokens"


def _tasks(cfg: Config, _: int) -> Iterator[str]:
    if cfg.train.eval_tasks and not cfg.data.validates:
        given = f"train.eval_tasks={shown(cfg.train.eval_tasks)}"
        yield f"{given}: data.val_tokens=0 turns evaluation off; leave out one of them"


def _held_out(cfg: Config, _: int) -> Iterator[str]:
    d = cfg.data
    if d.val_ratio is not None or d.val_path is not None or d.max_tokens is None:
        return
    if d.val_tokens >= d.max_tokens:
        yield f"data.val_tokens={d.val_tokens}: must be below data.max_tokens={d.max_tokens}; or set data.val_path"


def _one_device(cfg: Config, world_size: int) -> Iterator[str]:
    if cfg.train.device == "mps" and world_size > 1:
        yield f"train.device=mps: supports only one rank, not {world_size}; use world.size=1"


def sharding_problems(cfg: Config, world_size: int) -> Iterator[str]:
    """What `world.sharding` cannot do."""
    given, name = f"world.sharding={cfg.world.sharding}", cfg.optim.name
    if cfg.world.sharding == "none" or world_size == 1:  # one rank has everything
        return
    if cfg.train.reduction == "tree":
        yield f"train.reduction=tree: adds whole gradients, and with {given} they are not; use world.sharding=none"
    if cfg.world.sharding == "optimizer":
        if name in _NOT_BY_PARAMETER:
            yield (
                f"{given}: optim={name} is not one optimizer that updates each parameter by itself; use another, or "
                "world.sharding=none"
            )
        return
    if name not in _BY_NUMBER:
        yield (
            f"{given}: optim={name} updates whole matrices, and each rank has some rows of them; use optim="
            f"{' or '.join(_BY_NUMBER)}, or world.sharding=optimizer"
        )
    for key, value in (
        ("train.eval_tasks", cfg.train.eval_tasks),
        ("train.sharpness_every_tokens", cfg.train.sharpness_every_tokens),
    ):
        if value:
            yield f"{key}={shown(value)}: needs the whole model on one rank, unlike {given}; measure it after the run"


def _backend(cfg: Config, _: int) -> Iterator[str]:
    if cfg.world.backend == "nccl" and cfg.train.device in ("cpu", "mps"):
        yield f"world.backend=nccl: needs CUDA devices, not train.device={cfg.train.device}; use gloo or auto"


def _attention(cfg: Config, _: int) -> Iterator[str]:
    name, device = cfg.train.attention, cfg.train.device
    if AUTO not in (name, device) and (missing := missing_kernel(name, device)):
        yield missing


def _tensorboard(cfg: Config, _: int) -> Iterator[str]:
    if cfg.log.tensorboard:
        found = find_spec("tensorboard")
        if found is None or found.origin is None:  # a folder of that name in the working directory is no package
            yield "log.tensorboard=true: not installed; pip install 'gptexp[tensorboard]'"


def _cache(cfg: Config, _: int) -> Iterator[str]:
    folder = cfg.data.cache_dir  # one that exists may be read-only
    if folder and not Path(folder).is_dir() and (why := why_not_creatable(Path(folder))):
        yield f"data.cache_dir={shown(folder)}: {why}; choose another"


# Each rule with the keys that it reads. It is applied if each of these keys has a valid value.
RULES: tuple[tuple[Callable[[Config, int], Iterator[str]], tuple[str, ...]], ...] = (
    (_ramp, STEP_SIZES),
    (_heads, SIZES),
    (_parametrisation, ("model.parametrisation", *SIZES, *(f"model.{key}" for key in _BASE_OF))),
    (_base, ("model.parametrisation", "model.base_n_embd")),
    (_learning_rates, ("model.parametrisation", "optim.name")),
    (_tokenizer, ("data.tokenizer",)),
    (_vocabulary, ("model.vocab_size", "data.tokenizer")),
    (_sequence, SEQ_LEN),
    (_batch, (*STEP_SIZES, "batch.micro_batch_size", "world.size", *SEQ_LEN)),
    (_intervals, ("batch.ramp_tokens", *INTERVALS_IN_STEPS)),
    (_tree, (*STEP_SIZES, "batch.micro_batch_size", "world.size", "world.threads_per_rank", *SEQ_LEN)),
    (_comm, ("world.comm", "world.size", "train.reduction")),
    (_noise_scale, (*STEP_SIZES, "batch.micro_batch_size", "world.size", "data.order", LIKE_BATCH, *SEQ_LEN)),
    (_gradient_noise, ("batch.total_batch_size", "optim.gradient_noise", LIKE_BATCH, *SEQ_LEN)),
    (_profile, RUN_LENGTH),
    (_optimizer, ("optim.name", "schedule.name", "train.ema_half_life_tokens")),
    (_scaling, SCALING),
    (fitted_problems, ("optim.name", *(f"model.{f.name}" for f in fields(ModelConfig)))),
    (_warmup, (*RUN_LENGTH, *WARMUP)),
    (_decay, ("schedule.name", *DECAY, *RUN_LENGTH, *WARMUP)),
    (_paths, ("data.path", "data.val_path")),
    (_corpus, ("data.name", "data.path", "data.mix", "data.format")),
    (_mix, ("data.name", "data.mix", "data.order", "data.tokenizer")),
    (_corpus_length, ("data.max_tokens", *SEQ_LEN)),
    (_validation, ("data.val_tokens", "data.val_ratio", "data.val_path", *SEQ_LEN)),
    (_tasks, ("train.eval_tasks", "data.val_tokens", "data.val_ratio")),
    (_own_validation_text, ("data.val_path", "data.val_split", "data.val_ratio")),
    (_held_out, ("data.val_tokens", "data.val_ratio", "data.max_tokens", "data.val_path")),
    (_one_device, ("train.device", "world.size")),
    (_backend, ("world.backend", "train.device")),
    (
        sharding_problems,
        ("world.sharding", "train.reduction", "optim.name", "train.eval_tasks", "train.sharpness_every_tokens"),
    ),
    (_attention, ("train.attention", "train.device")),
    (_tensorboard, ("log.tensorboard",)),
    (_cache, ("data.cache_dir",)),
)
