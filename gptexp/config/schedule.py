"""The learning rate as a pure function of tokens.

The warm-up factor depends on the tokens up to the end of a step, the decay factor on the tokens before the step. So
both are 1 where the warm-up ends, the first step has a learning rate above 0, and after the warm-up the rate at a given
token count is the same for every batch size. The decay ends at `decay_tokens`, which may differ from the length of the
run: GPT-3 decays over 260B of its 300B tokens (arXiv 2005.14165, appendix B).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from gptexp.config.parts import bound, is_part
from gptexp.config.schema import Config
from gptexp.process.errors import ConfigError
from gptexp.process.fields import LIMIT


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule with all lengths in tokens. Built by `resolve_schedule`."""

    name: str
    warmup_tokens: int
    decay_tokens: int  # end of the decay
    min_lr_ratio: float
    cooldown_ratio: float
    cooldown: str
    peak_ratio: float = 1.0  # the factor at the end of the warm-up
    own: Callable[[], Callable[[int, int, int], float]] | None = None  # imports the user's own factor after the warm-up
    begin_tokens: int = 0  # tokens of the run before the schedule; all other lengths count from there

    def lr_factor(self, tokens_before: int, step_tokens: int) -> float:
        """Factor of the peak learning rate for the step that consumes `step_tokens` after `tokens_before`."""
        tokens = tokens_before - self.begin_tokens
        if tokens + step_tokens <= self.warmup_tokens:
            return self.peak_ratio * ((tokens + step_tokens) / self.warmup_tokens)
        return self._decay(max(tokens, self.warmup_tokens))

    @property
    def warmup_ends(self) -> int:
        """Tokens of the run up to the end of the warm-up."""
        return self.begin_tokens + self.warmup_tokens

    @property
    def decay_ends(self) -> int:
        """Tokens of the run up to the end of the decay."""
        return self.begin_tokens + self.decay_tokens

    @property
    def peak_ends(self) -> int:
        """The tokens of the run up to which the factor is that of the warm-up, and then `peak_ratio`."""
        if self.name == "constant":
            return LIMIT
        if self.name == "inverse_sqrt" or self.own is not None:
            return self.warmup_ends
        return self.begin_tokens + min(self._decay_start, self.decay_tokens)

    @property
    def _decay_start(self) -> int:
        if self.name != "wsd":
            return self.warmup_tokens
        return max(self.warmup_tokens, round((1 - self.cooldown_ratio) * self.decay_tokens))

    def _decay(self, tokens: int) -> float:
        if self.own is not None:
            factor = self.own()(tokens, self.warmup_tokens, self.decay_tokens)
            if not (isinstance(factor, int | float) and 0 <= factor < math.inf):
                rule = "must give a finite number, 0 or above"
                raise ConfigError(f"schedule={self.name}: gives {factor} at {tokens:,} tokens; {rule}", "wrong-factor")
            return self.peak_ratio * float(factor)
        if self.name == "constant":
            return self.peak_ratio
        if self.name == "inverse_sqrt":
            return self.peak_ratio * math.sqrt(self.warmup_tokens / tokens)
        start = self._decay_start
        if tokens >= self.decay_tokens:
            return self.min_lr_ratio
        x = max(0.0, (tokens - start) / (self.decay_tokens - start))  # completed share of the decay
        if self.name == "cosine":
            x = 0.5 * (1 - math.cos(math.pi * x))
        elif self.name == "wsd" and self.cooldown == "1-sqrt":
            x = math.sqrt(x)
        return self.peak_ratio - (self.peak_ratio - self.min_lr_ratio) * x


def resolve_schedule(cfg: Config, run_tokens: int) -> Schedule:
    """Convert the ratios and steps of `cfg.schedule` to tokens, for a run of `run_tokens` tokens."""
    c, sizes = cfg.schedule, cfg.batch.step_sizes
    run_tokens -= c.begin_tokens

    def tokens_of(steps: int) -> int:
        """Tokens of so many steps from the begin of the schedule on."""
        return sizes.tokens_after(sizes.steps_to(c.begin_tokens) + steps) - c.begin_tokens

    if c.warmup_steps is not None:
        warmup = tokens_of(c.warmup_steps)
    elif c.warmup_tokens is not None:
        warmup = c.warmup_tokens
    else:
        warmup = round(c.warmup_ratio * run_tokens)
    if c.decay_steps is not None:
        decay = tokens_of(c.decay_steps)
    elif c.decay_tokens is not None:
        decay = c.decay_tokens
    else:
        decay = round(c.decay_ratio * run_tokens)
    own = cache(partial(bound, "schedule", c)) if is_part(c) else None
    return Schedule(
        c.name, warmup, decay, c.min_lr_ratio, c.cooldown_ratio, c.cooldown, c.peak_ratio, own, c.begin_tokens
    )
