"""`branch_from`: the config of a run (a branch) that continues a checkpoint of another run (its parent).

Keys that are not set on the command line come from the parent. A branch may change what follows the checkpoint: the
schedule and the length. Up to the checkpoint its learning rates must equal the parent's. So its result is, to the last
bit, that of one uninterrupted run with the branch's schedule.

`continue_from`: a branch whose schedule begins anew at the checkpoint, so it may have any, and another learning rate: a
finished run warms up again, and decays again (arXiv 2403.08763).
"""

import copy
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from gptexp.config.noise_scale import noise_half_life
from gptexp.config.parts import SOURCE
from gptexp.config.rules import length_key
from gptexp.config.schedule import Schedule, resolve_schedule
from gptexp.config.schema import Config, result_deciding, with_parts
from gptexp.process.errors import ConfigError, Problem
from gptexp.process.words import shown

# Result-deciding keys that a branch may change. `history_problems` checks that nothing changes up to the checkpoint.
MAY_CHANGE = ("schedule.", "train.max_tokens", "train.max_steps", "train.epochs", "train.divergence_nats")
STARTS = ("branch_from", "continue_from")
DECAY_LENGTHS = ("schedule.decay_ratio", "schedule.decay_tokens", "schedule.decay_steps")
WARMUP_LENGTHS = ("schedule.warmup_ratio", "schedule.warmup_tokens", "schedule.warmup_steps")
ANEW = ("optim.lr",)  # what may change too if the schedule begins anew at the checkpoint
LENGTH = ("train.max_tokens", "train.max_steps", "train.epochs")


@dataclass(frozen=True)
class Parent:
    """The checkpoint of another run that a run branches from."""

    directory: Path  # directory of that run, absolute
    config: Config  # config of that run
    step: int  # number of steps done at the checkpoint
    tokens: int  # training tokens consumed at the checkpoint
    steps: list[int] = field(default_factory=list)  # steps of all checkpoints of that run
    identity: str = ""  # a hash of weights and optimizer state
    choices: dict[str, str] = field(default_factory=dict)  # that run's config groups and their options

    @property
    def name(self) -> str:
        """The value of `branch_from` in the config of a branch."""
        return f"{self.directory}@{self.step}"

    @property
    def short_name(self) -> str:
        """`name` without the path of the folder that contains the run."""
        return f"{self.directory.name}@{self.step}"


def start_of(config: Any) -> tuple[str, str] | None:
    """The key, `branch_from` or `continue_from`, and its value, of a composed or saved config; None without both.

    Raises `ConfigError` if both are given.
    """
    given = [(key, str(value)) for key in STARTS if (value := getattr(config, key)) is not None]
    if len(given) > 1:
        raise ConfigError(f"{'='.join(given[1])}: {'='.join(given[0])} is another start; leave out one", "two-starts")
    return given[0] if given else None


def first_step(branch_from: str | None) -> int:
    """The number of steps that were done before a run began, given its saved `branch_from`."""
    step = (branch_from or "").rpartition("@")[2]
    return int(step) if re.fullmatch(r"[0-9]{1,15}", step) else 0


def first_tokens(config: Config) -> int:
    """The training tokens that were consumed before the run of a saved config began: 0 unless it is a branch."""
    return config.batch.step_sizes.tokens_after(first_step(config.branch_from))


def inherited(config: Config, parent: Parent, given: Collection[str]) -> Config:
    """The config of a branch: the parent's, with the values of the `given` keys from `config`.

    `given` holds the keys on the command line and those in the files of groups chosen there. A `schedule` chosen there
    replaces the parent's, except for the warm-up. Two lengths are set unless they are given. The warm-up is the
    parent's, in tokens: no other gives the parent's learning rates. With schedule=wsd, the length of the run makes the
    cooldown begin at the checkpoint. Raises `ConfigError` for a key that a branch cannot have.
    """
    if "experiment" in given:
        raise ConfigError("experiment: a branch has the settings of its run; leave it out", "branch-with-recipe")
    if "schedule.begin_tokens" in given:
        rule = "follows from the checkpoint of continue_from; leave it out"
        raise ConfigError(f"schedule.begin_tokens={config.schedule.begin_tokens}: {rule}", "begin-not-taken")
    branch = copy.deepcopy(with_parts(parent.config))
    for entry in (*branch.train.evaluations, *branch.log.metrics):
        entry.pop(SOURCE)  # they decide no bit, so they may have changed
    if "optim" in given:  # another optimizer has other keys
        branch.optim = config.optim
    if "schedule" in given:
        was = branch.schedule
        branch.schedule = replace(
            config.schedule,
            warmup_ratio=was.warmup_ratio,
            warmup_tokens=was.warmup_tokens,
            warmup_steps=was.warmup_steps,
            begin_tokens=was.begin_tokens,
        )
    for key in given:
        section, name = _place(branch, key)
        composed, _ = _place(config, key)
        if isinstance(section, dict):  # a key of a mapping, such as user.team
            section[name] = composed[name]
            continue
        if section is None or not hasattr(composed, name):
            continue  # a group, or a key of Hydra
        if not hasattr(section, name):
            raise ConfigError(
                f"{key}: not a key of optim={parent.config.optim.name}, with which {parent.directory} was trained; "
                "leave it out",
                "key-of-other-optimizer",
            )
        setattr(section, name, getattr(composed, name))
    branch.branch_from, branch.continue_from, branch.sweep = parent.name, None, config.sweep
    branch.log.note, branch.log.wandb.name = config.log.note, config.log.wandb.name  # not inherited: they name one run
    if config.continue_from is not None:
        branch.schedule.begin_tokens = parent.tokens
        if not {"schedule", *DECAY_LENGTHS} & set(given):
            branch.schedule.decay_ratio, branch.schedule.decay_tokens, branch.schedule.decay_steps = 1.0, None, None
        return branch
    if not set(WARMUP_LENGTHS) & set(given):
        warmup = resolve_schedule(parent.config, parent.config.run_length[1]).warmup_tokens
        branch.schedule.warmup_tokens, branch.schedule.warmup_steps = warmup, None
    schedule = branch.schedule
    ends_with_the_run = schedule.decay_tokens is None and schedule.decay_steps is None and schedule.decay_ratio == 1
    if schedule.name == "wsd" and ends_with_the_run and schedule.cooldown_ratio < 1 and not set(LENGTH) & set(given):
        begin = schedule.begin_tokens
        branch.train.max_tokens = begin + round((parent.tokens - begin) / (1 - schedule.cooldown_ratio))
        branch.train.max_steps = None
    return branch


def _place(config: Config, key: str) -> tuple[Any, str]:
    """The section of a dotted key (None if there is no such section), and the last part of the key."""
    section: Any = config
    *parents, name = key.split(".")
    for part in parents:
        section = section.get(part) if isinstance(section, dict) else getattr(section, part, None)
    return (section if parents or name in ("init_from", "user") else None), name


def differences(config: Config, parent: Parent) -> Iterator[Problem]:
    """A line for each key of a branch whose value must equal the parent's and does not."""
    before, now = result_deciding(parent.config), result_deciding(config)
    may_change = MAY_CHANGE + ANEW if config.schedule.begin_tokens == parent.tokens else MAY_CHANGE
    for key in dict.fromkeys([*now, *before]):
        if before.get(key) != now.get(key) and not key.startswith(may_change):
            rule = f"{parent.directory} was trained with {shown(before.get(key))}, and a branch continues it"
            yield Problem("branch-differs", f"{key}={shown(now.get(key))}: {rule}; leave it out")


def history_problems(config: Config, parent: Parent) -> Iterator[Problem]:
    """The problem of a branch that would end at the checkpoint or earlier, or train differently up to it."""
    steps, run_tokens = config.run_length
    parent_tokens = parent.config.run_length[1]
    half_life = noise_half_life(parent.config, parent_tokens)
    before, now = resolve_schedule(parent.config, parent_tokens), resolve_schedule(config, run_tokens)
    if steps <= parent.step:
        key = "max_tokens" if config.train.max_steps is None else "max_steps"
        start = "continue_from" if now.begin_tokens == parent.tokens else "branch_from"
        rule = f"the run would end after step {steps:,}, and the checkpoint of {start} is that of step {parent.step:,}"
        fix = f"give more than train.max_tokens={parent.tokens}, counted from the start of {parent.directory.name}"
        line = f"train.{key}={getattr(config.train, key)}: {rule}; {fix}"
        yield Problem("branch-too-short", line)
    elif config.optim.gradient_noise_like_batch and noise_half_life(config, run_tokens) != half_life:
        yield Problem(
            "branch-with-other-noise",
            f"optim.gradient_noise_like_batch={config.optim.gradient_noise_like_batch}: the noise follows an average "
            f"with a half-life of {half_life:,.0f} tokens, 1% of the length of {parent.directory}, and this run has "
            "another length; branch from a run with log.noise_half_life_tokens",
        )
    elif now.begin_tokens == parent.tokens:
        return
    elif before.warmup_tokens != now.warmup_tokens:
        key = length_key(config, "warmup")
        yield Problem(
            "branch-with-other-warmup",
            f"{key}={attrgetter(key)(config)}: a warm-up of {now.warmup_tokens:,} tokens, and {parent.directory} had "
            f"one of {before.warmup_tokens:,}; use schedule.warmup_tokens={before.warmup_tokens}, or leave it out",
        )
    else:
        yield from _other_learning_rates(config, parent, before, now)


def _other_learning_rates(config: Config, parent: Parent, before: Schedule, now: Schedule) -> Iterator[Problem]:
    """The problem if a step of `parent` would have had another learning rate in the branch; names the first one."""
    if before == now:
        return
    sizes = config.batch.step_sizes
    first = max(0, sizes.steps_to(min(before.peak_ends, now.peak_ends)) - 1)  # they have the same warm-up
    tokens = sizes.tokens_after(first)
    begun = sizes.steps_to(before.begin_tokens)
    for step in range(max(first, begun), parent.step):
        step_tokens = sizes.at(tokens)
        was, would_be = (schedule.lr_factor(tokens, step_tokens) for schedule in (before, now))
        tokens += step_tokens
        if was != would_be:
            earlier_steps = [saved for saved in parent.steps if saved <= step]
            no_step = f"step {step} or before, of which it has no checkpoint"
            earlier = f"@{max(earlier_steps)}" if earlier_steps else no_step
            yield Problem(
                "branch-with-other-lr",
                f"branch_from={parent.name}: step {step + 1:,} had {was:.6g} of optim.lr with schedule.name="
                f"{before.name}, and would have had {would_be:.6g} with {now.name} until {now.decay_ends:,} tokens; "
                f"{_fix(config, parent, was < 1)}, or branch from {earlier}; or warm up again with continue_from",
            )
            return


def _fix(config: Config, parent: Parent, had_decayed: bool) -> str:
    """How a branch from this checkpoint can have its parent's learning rates up to there."""
    schedule = config.schedule
    if had_decayed:
        return "take a run with schedule=constant"
    if schedule.name != "wsd":
        return "use schedule=wsd"
    if schedule.cooldown_ratio == 1:
        return "use a schedule.cooldown_ratio below 1"
    begin = schedule.begin_tokens
    # The end, from the begin of the schedule, of a decay that begins at the checkpoint.
    end = math.ceil((parent.tokens - begin) / (1 - schedule.cooldown_ratio))
    if schedule.decay_steps is not None:
        sizes = config.batch.step_sizes
        return f"use schedule.decay_steps={sizes.steps_to(begin + end) - sizes.steps_to(begin)} or more"
    if schedule.decay_tokens is not None:
        return f"use schedule.decay_tokens={end} or more"
    length = begin + math.ceil(end / schedule.decay_ratio)
    if config.train.max_steps is not None:
        return f"use train.max_steps={config.batch.step_sizes.steps_to(length)} or more"
    return f"use train.max_tokens={length} or more"
