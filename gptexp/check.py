"""The rules between configuration keys: every problem of a config, one line each.

Runs before torch is imported and before anything is created. Each line names the value, the rule and the fix.
"""

from collections.abc import Callable, Iterator
from typing import Any

from gptexp.batch import count_val_windows, is_power_of_two, legal_micro_batches, plan_batch, run_length
from gptexp.config import Config, field_problems, shown
from gptexp.data.corpora import is_path_list, matching_files, path_list
from gptexp.data.tokenizer import VOCAB_SIZES
from gptexp.errors import ConfigError
from gptexp.noise_scale import unmeasurable
from gptexp.schedule import resolve_schedule

RUN_LENGTH = ("train.max_tokens", "train.max_steps", "batch.total_batch_size")
WARMUP = ("schedule.name", "schedule.warmup_ratio", "schedule.warmup_tokens", "schedule.warmup_steps")
LENGTHS_IN_STEPS = {
    "train.max_steps": "how much is trained on",
    "schedule.warmup_steps": "the warm-up in tokens",
    "schedule.decay_steps": "the decay in tokens",
}
SEQ_LEN = ("batch.seq_len", "model.block_size")


def check(cfg: Config, world_size: int) -> None:
    """Raise `ConfigError` with every problem of `cfg` when run by `world_size` ranks."""
    if found := problems(cfg, world_size):
        raise ConfigError(found)


def problems(cfg: Config, world_size: int) -> list[str]:
    """All problems of `cfg`, one line each."""
    broken = field_problems(cfg)
    found = list(broken.values())
    for rule, keys in RULES:
        if broken.keys().isdisjoint(keys):
            found += rule(cfg, world_size)
    return found


def in_steps(values: dict[str, Any]) -> Iterator[str]:
    """A line for each length in steps among `values` (dotted key -> value): what a sweep over batch sizes confounds."""
    for key, what in LENGTHS_IN_STEPS.items():
        if values.get(key) is not None:
            yield f"{key}={values[key]} counts steps, so {what} differs between batch sizes; give it in tokens"


def _heads(cfg: Config, _: int) -> Iterator[str]:
    m = cfg.model
    if m.n_embd % m.n_head:
        below, above = m.n_embd // m.n_head * m.n_head, (m.n_embd // m.n_head + 1) * m.n_head
        nearest = f"{below} or {above}" if below else f"{above}"
        yield f"model.n_embd={m.n_embd}: not divisible by model.n_head={m.n_head}; nearest: {nearest}"


def _vocabulary(cfg: Config, _: int) -> Iterator[str]:
    ids = VOCAB_SIZES[cfg.data.tokenizer]
    if cfg.model.vocab_size < ids:
        yield (
            f"model.vocab_size={cfg.model.vocab_size}: smaller than the {ids:,} ids of "
            f"data.tokenizer={cfg.data.tokenizer}; use {-(-ids // 128) * 128} (padded to a multiple of 128)"
        )


def _sequence(cfg: Config, _: int) -> Iterator[str]:
    t, block_size = cfg.seq_len, cfg.model.block_size
    if t > block_size:
        yield (
            f"batch.seq_len={t}: longer than model.block_size={block_size}; "
            f"use batch.seq_len={block_size} or model.block_size={t}"
        )


def _batch(cfg: Config, world_size: int) -> Iterator[str]:
    try:
        plan_batch(cfg.batch.total_batch_size, cfg.batch.asked_micro_batch_size or 1, cfg.seq_len, world_size)
    except ValueError as error:
        yield str(error)


def _tree(cfg: Config, world_size: int) -> Iterator[str]:
    if cfg.train.reduction != "tree":
        return
    given, total, size = "train.reduction=tree", cfg.batch.total_batch_size, cfg.batch.asked_micro_batch_size
    if not is_power_of_two(world_size):
        yield f"{given}: adds up pairs of ranks and needs a power of two, not {world_size}; use world.size=1, 2, 4 or 8"
    elif total % ((size or 1) * cfg.seq_len * world_size) == 0:
        sequences = total // (cfg.seq_len * world_size)
        legal = [s for s in legal_micro_batches(total, cfg.seq_len, world_size) if is_power_of_two(sequences // s)]
        use = f"use batch.micro_batch_size={' or '.join(map(str, legal[:4]))}"
        if size is None:
            yield f"batch.micro_batch_size=auto: {given} gives equal bits at equal micro-batches, so name one; {use}"
        elif size not in legal:
            yield (
                f"{given}: adds up pairs of micro-batches and needs a power of two of them, not "
                f"{total // (size * cfg.seq_len)}; {use}"
            )
    if cfg.world.threads_per_rank not in (None, 1):
        yield f"world.threads_per_rank={cfg.world.threads_per_rank}: {given} needs one thread per rank; leave it out"


def _noise_scale(cfg: Config, world_size: int) -> Iterator[str]:
    size = cfg.batch.asked_micro_batch_size  # what `auto` comes to, only the ranks know
    if cfg.log.noise_scale == "on" and (why := unmeasurable(cfg, size or 1, world_size)):
        yield f"log.noise_scale=on: {why}"


def _profile(cfg: Config, _: int) -> Iterator[str]:
    steps, _tokens = run_length(cfg.train.max_tokens, cfg.train.max_steps, cfg.batch.total_batch_size)
    if cfg.train.profile and steps < 2:
        yield "train.profile=true: traces the second step at the earliest, and this run has one; lengthen it"


def _warmup(cfg: Config, _: int) -> Iterator[str]:
    _, run_tokens = run_length(cfg.train.max_tokens, cfg.train.max_steps, cfg.batch.total_batch_size)
    warmup = resolve_schedule(cfg, run_tokens).warmup_tokens
    key = _first_given(cfg.schedule, "warmup_steps", "warmup_tokens") or "warmup_ratio"
    given = f"schedule.{key}={getattr(cfg.schedule, key)}"
    if warmup >= run_tokens:
        yield (
            f"{given}: the warm-up of {warmup:,} tokens is not shorter than the run of {run_tokens:,}, "
            "the peak learning rate would never be reached; shorten it or lengthen the run"
        )
    if cfg.schedule.name == "inverse_sqrt" and warmup == 0:
        yield (
            f"{given}: inverse_sqrt falls from the end of the warm-up and needs one; set schedule.warmup_ratio above 0"
        )


def _decay(cfg: Config, _: int) -> Iterator[str]:
    key = _first_given(cfg.schedule, "decay_steps", "decay_tokens")
    _, run_tokens = run_length(cfg.train.max_tokens, cfg.train.max_steps, cfg.batch.total_batch_size)
    schedule = resolve_schedule(cfg, run_tokens)
    if key and cfg.schedule.name in ("cosine", "linear", "wsd") and schedule.decay_tokens <= schedule.warmup_tokens:
        yield (
            f"schedule.{key}={getattr(cfg.schedule, key)}: the decay ends at {schedule.decay_tokens:,} tokens, within "
            f"the warm-up of {schedule.warmup_tokens:,}; let it end later"
        )


def _first_given(section: Any, *keys: str) -> str | None:
    """The first of `keys` that is not null: the one that wins."""
    return next((key for key in keys if getattr(section, key) is not None), None)


def _paths(cfg: Config, _: int) -> Iterator[str]:
    for key in ("path", "val_path"):
        value = getattr(cfg.data, key)
        if value is None:
            continue
        if not is_path_list(value):
            yield f"data.{key}={shown(value)}: must be a file, a glob or a list of them"
            continue
        for pattern in path_list(value):
            if not matching_files(pattern):
                yield f"data.{key}={shown(pattern)}: no such file; give a file, a glob or a list of them"


def _corpus(cfg: Config, _: int) -> Iterator[str]:
    d = cfg.data
    if d.name == "text" and d.path is None:
        yield "data.path=null: data=text needs text to read; give data.path=FILE, a glob or a list"
    if d.name != "text" and d.path is not None:
        yield f"data.path={shown(d.path)}: only data=text reads it; use data=text or leave it out"


def _corpus_length(cfg: Config, _: int) -> Iterator[str]:
    window = cfg.seq_len + 1
    if cfg.data.max_tokens is not None and cfg.data.max_tokens < window:
        yield (
            f"data.max_tokens={cfg.data.max_tokens}: fewer than one window of seq_len+1 = {window} tokens; "
            "use at least that"
        )


def _validation(cfg: Config, _: int) -> Iterator[str]:
    d, t = cfg.data, cfg.seq_len
    if d.val_tokens and count_val_windows(d.val_tokens, t) == 0:
        yield (
            f"data.val_tokens={d.val_tokens}: rounds to no window of seq_len={t} tokens; use {t} or more, "
            "or 0 for no validation"
        )
    if d.val_path is not None and d.val_tokens == 0:
        yield (
            f"data.val_path={shown(d.val_path)}: set together with data.val_tokens=0, which means no validation; "
            "drop one"
        )


def _held_out(cfg: Config, _: int) -> Iterator[str]:
    d = cfg.data
    if d.max_tokens is not None and d.val_path is None and d.val_tokens >= d.max_tokens:
        yield (
            f"data.val_tokens={d.val_tokens}: holds out all of data.max_tokens={d.max_tokens}; use fewer, or "
            "data.val_path"
        )


def _one_device(cfg: Config, world_size: int) -> Iterator[str]:
    if cfg.train.device == "mps" and world_size > 1:
        yield f"train.device=mps: runs on one rank only, not {world_size}; use world.size=1"


def _backend(cfg: Config, _: int) -> Iterator[str]:
    if cfg.world.backend == "nccl" and cfg.train.device in ("cpu", "mps"):
        yield (
            f"world.backend=nccl: talks between CUDA devices only and train.device={cfg.train.device}; "
            "use world.backend=gloo or auto"
        )


# (the rule, the keys it reads): applied where all of those are right by themselves.
RULES: tuple[tuple[Callable[[Config, int], Iterator[str]], tuple[str, ...]], ...] = (
    (_heads, ("model.n_embd", "model.n_head")),
    (_vocabulary, ("model.vocab_size", "data.tokenizer")),
    (_sequence, (*SEQ_LEN,)),
    (_batch, ("batch.total_batch_size", "batch.micro_batch_size", "world.size", *SEQ_LEN)),
    (_tree, ("batch.total_batch_size", "batch.micro_batch_size", "world.size", "world.threads_per_rank", *SEQ_LEN)),
    (_noise_scale, ("batch.total_batch_size", "batch.micro_batch_size", "world.size", "data.order", *SEQ_LEN)),
    (_profile, (*RUN_LENGTH,)),
    (_warmup, (*RUN_LENGTH, *WARMUP)),
    (_decay, ("schedule.name", "schedule.decay_tokens", "schedule.decay_steps", *RUN_LENGTH, *WARMUP)),
    (_paths, ("data.path", "data.val_path")),
    (_corpus, ("data.name", "data.path")),
    (_corpus_length, ("data.max_tokens", *SEQ_LEN)),
    (_validation, ("data.val_tokens", "data.val_path", *SEQ_LEN)),
    (_held_out, ("data.val_tokens", "data.max_tokens", "data.val_path")),
    (_one_device, ("train.device", "world.size")),
    (_backend, ("world.backend", "train.device")),
)
