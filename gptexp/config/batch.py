"""Batch arithmetic: tokens, sequences and gradient accumulation steps.

One optimizer step of `total_batch_size` tokens consists of M = total / (B * T) micro-batches of B sequences of T
tokens. Each of `world_size` ranks processes M / world_size micro-batches in sequence (gradient accumulation).
"""

from dataclasses import dataclass

from gptexp.process.errors import ConfigError

SEARCH_RANGE = 100_000  # divisors farther from the given value than this are not suggested


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
    """Changes of one value that make the step divisible: of the batch, the world size or the micro-batch."""
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
    """The micro-batch sizes that divide a step, in descending order. Size 1 must divide it."""
    sequences = total_batch_size // (seq_len * world_size)
    return [size for size in range(min(sequences, SEARCH_RANGE), 0, -1) if sequences % size == 0]


def either(numbers: list[int]) -> str:
    return " or ".join(f"{n:,}" for n in numbers)


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def nearest_divisors(n: int, wanted: int) -> list[int]:
    """The nearest divisors of `n` up to `wanted` and above it. If none below is near, the first is 1."""
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
