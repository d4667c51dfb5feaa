"""The rules between configuration keys: every problem of a config, one line each.

Runs before torch is imported and before anything is created. Each line names the value, the rule and the fix.
"""

import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptexp.batch import plan_batch, run_length
from gptexp.config import Config, field_problems
from gptexp.data.tokenizer import VOCAB_SIZES
from gptexp.errors import ConfigError
from gptexp.schedule import resolve_schedule

NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")


def check(cfg: Config, world_size: int) -> None:
    """Raise `ConfigError` with every problem of `cfg` when run by `world_size` ranks."""
    if found := problems(cfg, world_size):
        raise ConfigError(found)


def problems(cfg: Config, world_size: int) -> list[str]:
    """All problems of `cfg`, one line each; rules between keys apply only to keys that are right by themselves."""
    found = field_problems(cfg)
    broken = {line.split("=")[0] for line in found}
    rules = [_model(cfg), _batch(cfg, world_size), _schedule(cfg), _data(cfg), _world(cfg), _names(cfg)]
    for rule in rules:
        found += [line for keys, line in rule if not broken.intersection(keys)]
    return found


# Each rule yields (the keys that it reads, the line to print).
Problems = Iterator[tuple[set[str], str]]


def seq_len(cfg: Config) -> int:
    """T: tokens per sequence."""
    return cfg.batch.seq_len or cfg.model.block_size


def _model(cfg: Config) -> Problems:
    m = cfg.model
    keys = {"model.n_embd", "model.n_head"}
    if m.n_head > 0 and m.n_embd % m.n_head:
        below, above = m.n_embd // m.n_head * m.n_head, (m.n_embd // m.n_head + 1) * m.n_head
        nearest = f"{below} or {above}" if below else f"{above}"
        yield keys, f"model.n_embd={m.n_embd}: not divisible by model.n_head={m.n_head}; nearest: {nearest}"
    vocab = VOCAB_SIZES.get(cfg.data.tokenizer, 0)
    if m.vocab_size < vocab:
        yield (
            {"model.vocab_size", "data.tokenizer"},
            f"model.vocab_size={m.vocab_size}: smaller than the {vocab:,} ids of data.tokenizer={cfg.data.tokenizer}; "
            f"use {-(-vocab // 128) * 128} (padded to a multiple of 128)",
        )


def _batch(cfg: Config, world_size: int) -> Problems:
    t, block_size = seq_len(cfg), cfg.model.block_size
    if t > block_size:
        yield (
            {"batch.seq_len", "model.block_size"},
            f"batch.seq_len={t}: longer than model.block_size={block_size}; "
            f"use batch.seq_len={block_size} or model.block_size={t}",
        )
    keys = {
        "batch.total_batch_size", "batch.micro_batch_size", "batch.seq_len", "model.block_size", "world.size"
    }  # fmt: skip
    if min(cfg.batch.total_batch_size, cfg.batch.micro_batch_size, t, world_size) > 0:
        try:
            plan_batch(cfg.batch.total_batch_size, cfg.batch.micro_batch_size, t, world_size)
        except ValueError as error:
            yield keys, str(error)


def _schedule(cfg: Config) -> Problems:
    s = cfg.schedule
    lengths = {"train.max_tokens", "train.max_steps", "batch.total_batch_size"}
    warmup_keys = lengths | {"schedule.warmup_ratio", "schedule.warmup_tokens", "schedule.warmup_steps"}
    decay_keys = warmup_keys | {"schedule.decay_tokens", "schedule.decay_steps"}
    if cfg.batch.total_batch_size <= 0:
        return
    _, run_tokens = run_length(cfg.train.max_tokens, cfg.train.max_steps, cfg.batch.total_batch_size)
    schedule = resolve_schedule(cfg, run_tokens)
    warmup, given = schedule.warmup_tokens, _first_given(s, "warmup_steps", "warmup_tokens", "warmup_ratio")
    if warmup >= run_tokens > 0:
        yield (
            warmup_keys,
            f"schedule.{given}={getattr(s, given)}: the warm-up of {warmup:,} tokens is not shorter than the run of "
            f"{run_tokens:,}, the peak learning rate would never be reached; shorten it or lengthen the run",
        )
    elif s.name in ("cosine", "linear", "wsd") and schedule.decay_tokens <= warmup:
        given = _first_given(s, "decay_steps", "decay_tokens")
        yield (
            decay_keys,
            f"schedule.{given}={getattr(s, given)}: the decay ends at {schedule.decay_tokens:,} tokens, within the "
            f"warm-up of {warmup:,}; let it end later",
        )
    if s.name == "inverse_sqrt" and warmup == 0:
        yield (
            warmup_keys,
            f"schedule.{given}={getattr(s, given)}: inverse_sqrt falls from the end of the warm-up and needs one; "
            "set schedule.warmup_ratio above 0",
        )


def _first_given(s: Any, *keys: str) -> str:
    """The first of `keys` that is not null: the one that wins."""
    return next(key for key in keys if getattr(s, key) is not None)


def _data(cfg: Config) -> Problems:
    d, t = cfg.data, seq_len(cfg)
    for key in ("path", "val_path"):
        value = getattr(d, key)
        if value is None:
            continue
        if not is_path_list(value):
            yield {f"data.{key}"}, f"data.{key}={value}: must be a file, a glob or a list of them"
        else:
            for pattern in path_list(value):
                if not any(Path(p).is_file() for p in glob.iglob(pattern, recursive=True)):
                    yield {f"data.{key}"}, f"data.{key}={pattern}: no such file; a file, a glob or a list of them"
    if d.name == "text" and d.path is None:
        yield {"data.name"}, "data.path=null: data=text needs text to read; give data.path=FILE, a glob or a list"
    if d.name not in ("text",) and d.path is not None:
        yield {"data.name"}, f"data.path={d.path}: only data=text reads it; use data=text or leave it out"
    length = {"batch.seq_len", "model.block_size"}
    if d.max_tokens is not None and d.max_tokens < t + 1:
        yield (
            length | {"data.max_tokens"},
            f"data.max_tokens={d.max_tokens}: fewer than one window of seq_len+1 = {t + 1} tokens; use at least that",
        )
    if 0 < d.val_tokens < t / 2:
        yield (
            length | {"data.val_tokens"},
            f"data.val_tokens={d.val_tokens}: rounds to no window of seq_len={t} tokens; use {t} or more, "
            "or 0 for no validation",
        )
    if d.val_path is not None and d.val_tokens == 0:
        yield (
            {"data.val_tokens", "data.val_path"},
            f"data.val_path={d.val_path}: set together with data.val_tokens=0, which means no validation; drop one",
        )


def is_path_list(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
    )


def path_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _world(cfg: Config) -> Problems:
    if cfg.world.backend == "nccl" and cfg.train.device in ("cpu", "mps"):
        yield (
            {"world.backend", "train.device"},
            f"world.backend=nccl: talks between CUDA devices only and train.device={cfg.train.device}; "
            "use world.backend=gloo or auto",
        )


def _names(cfg: Config) -> Problems:
    wandb = cfg.log.wandb
    for key, name in (("sweep.name", cfg.sweep.name), ("log.wandb.project", wandb.project)):
        if name is not None and (not NAME.fullmatch(name) or set(name) == {"."}):
            yield {key}, f"{key}={name}: must be 1 to 80 of A-Z a-z 0-9 . _ - (it names a directory or a project)"
