"""The tokens of each optimizer step: equal for all steps, or growing with the tokens that were trained on (a ramp).

GPT-3's batch grew "linearly from a small value (32k tokens) to the full value over the first 4-12 billion tokens of
training, depending on the model size" (arXiv 2005.14165, appendix B). How it was rounded is not published. Here a step
that starts after t tokens has start + (total - start) * t / ramp_tokens tokens, rounded to the nearest multiple of a
quantum, half up. So its size depends on t alone. All arithmetic is in integers, and exact.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from gptexp.process.words import counted


class _Level(NamedTuple):
    """Consecutive steps of one size."""

    steps: int  # before its first step
    tokens: int  # before its first step
    size: int  # tokens of each of its steps


@dataclass(frozen=True)
class StepSizes:
    """The tokens of every step of a run, over all ranks. A quantum divides `start`, and `total`, which is larger."""

    total: int  # of a step that starts after `ramp_tokens` tokens or more
    start: int  # of the first step
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
        """Number of steps that start before `tokens` tokens: the fewest with at least so many tokens."""
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
    """The levels of a run in their order. A step that ends beyond the next level skips it."""
    steps = tokens = 0
    levels = []
    while (size := sizes.at(tokens)) < sizes.total:
        levels.append(_Level(steps, tokens, size))
        half_higher = 2 * (size - sizes.start) + sizes.quantum  # twice the growth from which it is rounded up
        end = -(-half_higher * sizes.ramp_tokens // (2 * (sizes.total - sizes.start)))
        count = -(-(end - tokens) // size)
        steps, tokens = steps + count, tokens + count * size
    return [*levels, _Level(steps, tokens, sizes.total)]
