"""Whether runs fit the memory of a GPU, which this machine need not have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gptexp.config.rules import sharding_problems
from gptexp.config.schema import SHARDINGS, Config, memory_key
from gptexp.config.vocabulary import ASSUMED_CHARACTERS, with_vocab_size
from gptexp.data.prepare import count_ids
from gptexp.distributed.ranks import Rank
from gptexp.machine.effective import Effective
from gptexp.machine.resolve import estimate, resolve
from gptexp.model.gpus import Gpu
from gptexp.process.errors import ConfigError

# A run is refused only if it certainly does not fit: a GPU of 80 GB may have 80 GiB, and the estimate is within 10%.
CERTAIN = 1.1 * 2**30 / 10**9


def refuse_too_large(configs: Sequence[Config], gpu: Gpu) -> None:
    """Raise `ConfigError` if a rank of one of `configs` needs far more memory than `gpu` has. Says what would fit."""
    alike = {memory_key(config): config for config in configs if config.train.device in ("auto", "cuda")}
    problems = []
    for config in alike.values():
        world_size, n_vocab = config.world.size or 1, count_ids(config.data) or ASSUMED_CHARACTERS
        rank = Rank(0, world_size, 0, world_size)

        def resolved(of: Config, rank: Rank = rank, n_vocab: int = n_vocab) -> Effective:
            return resolve(of, gpu, rank, n_vocab=n_vocab)

        effective = resolved(config)
        sized = with_vocab_size(config, effective.vocab_size.value)
        peak = estimate(sized, effective, world_size).peak
        if gpu.memory_bytes is not None and peak > CERTAIN * gpu.memory_bytes:
            others = memory_by_sharding(sized, effective, world_size, resolved)
            size = effective.micro_batch_size.value
            problems.append(f"world.size={world_size}, {size} × {config.seq_len}: {excess(config, peak, gpu, others)}")
    if problems:
        raise ConfigError(problems)


def memory_by_sharding(
    cfg: Config, effective: Effective, world_size: int, resolved: Callable[[Config], Effective]
) -> dict[str, int]:
    """The bytes that a rank needs at the peak under each `world.sharding` that the other keys allow.

    All have the micro-batch size of `effective`. If `reduce_every` is open, `full` gets the value that needs least.
    `resolved` returns the choices for another config.
    """
    peaks = {}
    for sharding in SHARDINGS:
        other = _with_sharding(cfg, sharding)
        if not any(sharding_problems(other, world_size)):
            choices = effective
            if sharding != cfg.world.sharding:
                open_choices = replace(resolved(other), reduce_every=None)
                choices = replace(open_choices, micro_batch_size=effective.micro_batch_size)
            peaks[sharding] = estimate(other, choices, world_size).peak
    return peaks


def excess(config: Config, peak: int, gpu: Gpu, by_sharding: Mapping[str, int]) -> str:
    """What to do about a peak that is more than the memory of `gpu`."""
    assert gpu.memory_bytes is not None
    fitting = [f"world.sharding={name}" for name, size in by_sharding.items() if size <= gpu.memory_bytes]
    more = [f"world.sharding={name} on more ranks" for name in ("full", "optimizer") if _allows(config, name)]
    advice = (fitting or more)[:1]
    if config.world.sharding == "full" and config.world.reduce_every == "step":
        advice.append("world.reduce_every=auto")
    if (config.batch.asked_micro_batch_size or 1) > 1:
        takes_auto = config.train.reduction != "tree"
        advice.append("batch.micro_batch_size=auto" if takes_auto else "a smaller batch.micro_batch_size")
    if not config.train.recomputed_every:
        advice.append("train.activation_checkpointing=true")
    elif config.train.recomputed_every > 1:
        advice.append("train.activation_checkpointing_every=1")
    advice.append(f"{'or ' if advice else ''}a smaller model or batch.seq_len")
    return (
        f"a rank needs about {peak / 2**30:.1f} GiB, and the {gpu.name} has {gpu.memory_bytes / 2**30:.1f} GiB; "
        f"use {', '.join(advice)}"
    )


def _allows(config: Config, sharding: str) -> bool:
    """Whether several ranks of this run could have that sharding."""
    return not any(sharding_problems(_with_sharding(config, sharding), 2))


def _with_sharding(config: Config, sharding: str) -> Config:
    return replace(config, world=replace(config.world, sharding=sharding))
