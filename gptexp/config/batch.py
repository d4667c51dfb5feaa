"""Batch arithmetic: tokens, sequences and gradient accumulation steps.

One optimizer step of `total_batch_size` tokens consists of M = total / (B * T) micro-batches of B sequences of T
tokens. Each of `world_size` ranks processes M / world_size micro-batches in sequence (gradient accumulation).

All steps have equal sizes, or they grow with the tokens that were trained on (a ramp). GPT-3's batch grew "linearly
from a small value (32k tokens) to the full value over the first 4-12 billion tokens of training, depending on the model
size" (arXiv 2005.14165, appendix B). Its rounding is not published. Here a step that starts after t tokens has
start + (total - start) * t / ramp_tokens tokens, rounded to the nearest multiple of a quantum, half up. So the size of
a step depends only on t. The arithmetic uses integers and is exact.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from gptexp.process.errors import ConfigError
from gptexp.process.words import counted

SEARCH_RANGE = 100_000  # divisors farther than this from the given value are not suggested


@dataclass(frozen=True)
class BatchPlan:
    """The micro-batches of one optimizer step. Built by `plan_batch`, which checks divisibility."""

    total_batch_size: int  # tokens per step, over all ranks
    micro_batch_size: int  # B, sequences per forward pass
    seq_len: int  # T, tokens per sequence
    world_size: int
    grad_accum_steps: int  # micro-steps per rank and step

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step, over all ranks."""
        return self.total_batch_size // self.seq_len


def plan_batch(total_batch_size: int, micro_batch_size: int, seq_len: int, world_size: int) -> BatchPlan:
    """Divide a step into micro-steps. Raises `ConfigError` with the nearest legal values if it does not divide."""
    tokens_per_micro_step = micro_batch_size * seq_len * world_size
    if total_batch_size % tokens_per_micro_step:
        raise ConfigError(
            f"batch.total_batch_size={total_batch_size:,} tokens is not divisible by micro_batch_size·seq_len·"
            f"world_size = {micro_batch_size}·{seq_len}·{world_size} = {tokens_per_micro_step:,}; "
            f"{_nearest(total_batch_size, micro_batch_size, seq_len, world_size)}",
            "batch-not-divisible",
        )
    return BatchPlan(total_batch_size, micro_batch_size, seq_len, world_size, total_batch_size // tokens_per_micro_step)


def _nearest(total: int, micro_batch_size: int, seq_len: int, world_size: int) -> str:
    """Changes to one value (batch, world size or micro-batch) that make the step divisible, in words."""
    quantum = micro_batch_size * seq_len * world_size
    below, above = total // quantum * quantum, (total // quantum + 1) * quantum
    fixes = [f"nearest batch: {either([below, above] if below else [above])}"]
    if total % (micro_batch_size * seq_len) == 0:
        near = nearest_divisors(total // (micro_batch_size * seq_len), world_size)
        fixes.append(f"nearest world.size: {either(near)}")
    if total % (seq_len * world_size) == 0:
        near = nearest_divisors(total // (seq_len * world_size), micro_batch_size)
        fixes.append(f"nearest micro_batch_size: {either(near)}")
    return "; ".join(fixes)


def legal_micro_batches(total_batch_size: int, seq_len: int, world_size: int) -> list[int]:
    """The micro-batch sizes that divide a step, in descending order. A micro-batch of size 1 must divide it."""
    sequences = total_batch_size // (seq_len * world_size)
    return [size for size in range(min(sequences, SEARCH_RANGE), 0, -1) if sequences % size == 0]


def either(numbers: list[int]) -> str:
    return " or ".join(f"{n:,}" for n in numbers)


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def nearest_divisors(n: int, wanted: int) -> list[int]:
    """The largest divisor of `n` up to `wanted` (1 if none is near), and the smallest one above if one is near."""
    below = next((d for d in range(min(wanted, n), max(0, min(wanted, n) - SEARCH_RANGE), -1) if n % d == 0), 1)
    above = next((d for d in range(max(below, wanted) + 1, min(n, wanted + SEARCH_RANGE) + 1) if n % d == 0), None)
    return [below] if above is None else [below, above]


def count_windows(tokens: int, seq_len: int) -> int:
    """Number of complete windows in a stream of `tokens`. A window holds one token more than its `seq_len` inputs."""
    return max(0, (tokens - 1) // seq_len)


def count_val_windows(val_tokens: float, seq_len: int) -> int:
    """Number of validation windows: `val_tokens` rounded to the nearest number of windows."""
    return round(val_tokens / seq_len)


def interval_tokens(every_steps: int | None, every_tokens: int | None, run_tokens: int, total_batch_size: int) -> int:
    """Tokens between evaluations or checkpoints: from `every_steps`, else `every_tokens`, else a tenth of the run."""
    if every_steps is not None:
        return every_steps * total_batch_size
    if every_tokens is not None:
        return every_tokens
    return max(1, run_tokens // 10)


def crosses(tokens_before: int, tokens_after: int, every: int) -> bool:
    """Whether a multiple of `every` tokens lies in (`tokens_before`, `tokens_after`]; False if `every` is 0."""
    return every > 0 and tokens_after // every > tokens_before // every


class _Level(NamedTuple):
    """Consecutive steps of one size."""

    steps: int  # number of steps before its first step
    tokens: int  # tokens before its first step
    size: int  # tokens of each of its steps


@dataclass(frozen=True)
class StepSizes:
    """The tokens of every step of a run, over all ranks. `quantum` divides `start` and `total`; start <= total."""

    total: int  # tokens of a step that starts after at least `ramp_tokens` tokens
    start: int  # tokens of the first step
    ramp_tokens: int  # 0: every step has `total` tokens
    quantum: int  # divides every step

    @classmethod
    def constant(cls, total: int) -> "StepSizes":
        return cls(total, total, 0, total)

    def at(self, tokens: int) -> int:
        """Tokens of the step that starts after `tokens` tokens."""
        if tokens >= self.ramp_tokens:
            return self.total
        linear = self.start * self.ramp_tokens + (self.total - self.start) * tokens  # times ramp_tokens
        return (2 * linear // (self.quantum * self.ramp_tokens) + 1) // 2 * self.quantum

    def tokens_after(self, steps: int) -> int:
        """Tokens of the first `steps` steps."""
        levels = _levels(self)
        level = levels[bisect_right(levels, steps, key=lambda level: level.steps) - 1]
        return level.tokens + (steps - level.steps) * level.size

    def steps_to(self, tokens: int) -> int:
        """Number of steps that start before `tokens` tokens: the fewest that have at least `tokens` tokens."""
        levels = _levels(self)
        level = levels[max(0, bisect_left(levels, tokens, key=lambda level: level.tokens) - 1)]
        return level.steps - (level.tokens - tokens) // level.size

    @property
    def ramp_steps(self) -> int:
        """Number of steps that start before `ramp_tokens` tokens."""
        return self.steps_to(self.ramp_tokens)

    def ramp_in_words(self) -> str:
        """How the steps grow, as text. There must be a ramp."""
        return (
            f"from {self.start:,} tokens per step, linear over the first {counted(self.ramp_tokens, 'token')} "
            f"({counted(self.ramp_steps, 'step')}), in multiples of {self.quantum:,}"
        )


@lru_cache(maxsize=256)
def _levels(sizes: StepSizes) -> list[_Level]:
    """The levels of a run, in order. A level is left out if the last step before it ends beyond it."""
    steps = tokens = 0
    levels = []
    while (size := sizes.at(tokens)) < sizes.total:
        levels.append(_Level(steps, tokens, size))
        half_higher = 2 * (size - sizes.start) + sizes.quantum  # twice the growth that rounds up to the next size
        end = -(-half_higher * sizes.ramp_tokens // (2 * (sizes.total - sizes.start)))
        count = -(-(end - tokens) // size)
        steps, tokens = steps + count, tokens + count * size
    return [*levels, _Level(steps, tokens, sizes.total)]
