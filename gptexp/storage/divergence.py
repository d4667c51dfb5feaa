"""Detection of divergence with a finite loss. No torch.

A loss that rises and stays high does not recover, while a spike does. So a run has diverged if its smoothed loss stays
above its minimum for long enough.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SMOOTHING = 0.0025  # half-life of the moving average, as a share of the run
SMOOTHING_STEPS = 5  # minimum of the half-life, in steps
PATIENCE = 0.01  # time above the limit after which a run has diverged, as a share of the run
PATIENCE_STEPS = 20  # minimum of that time, in steps
ABOVE_A_GUESS = 1.0  # nats: a run that ends so far above the loss of a uniform guess has learned nothing


@dataclass
class LossTrend:
    """Statistics of the training loss, in nats per token. Checkpoints hold them."""

    smoothed: float | None = None  # exponential moving average; None before the first step
    lowest: float | None = None  # minimum of `smoothed`
    steps_above: int = 0  # consecutive steps with `smoothed` above the limit
    tokens_above: int = 0  # tokens of these steps

    def diverged(self, loss: float, step_tokens: int, run_tokens: int, nats: float | None) -> bool:
        """Update with a step's loss and return whether the run of `run_tokens` has diverged. `nats` None: never."""
        keep = 0.5 ** (1 / max(SMOOTHING_STEPS, SMOOTHING * (run_tokens / step_tokens)))
        self.smoothed = loss if self.smoothed is None else keep * self.smoothed + (1 - keep) * loss
        self.lowest = self.smoothed if self.lowest is None else min(self.lowest, self.smoothed)
        if nats is None:
            return False
        if self.smoothed <= self.lowest + nats:
            self.steps_above = self.tokens_above = 0
            return False
        self.steps_above, self.tokens_above = self.steps_above + 1, self.tokens_above + step_tokens
        return self.steps_above >= PATIENCE_STEPS and self.tokens_above >= PATIENCE * run_tokens


def counts_as_diverged(status: str, final_loss: float | None, config: Mapping[str, Any]) -> bool:
    """Whether a run has diverged, or has completed with a loss, in nats, far above that of a uniform guess.

    `final_loss` is None for a run that has not completed. `config`: dotted key -> value.
    """
    if status == "diverged" or final_loss is None:
        return status == "diverged"
    vocab_size = config["model.vocab_size"]
    return isinstance(vocab_size, int) and final_loss > math.log(vocab_size) + ABOVE_A_GUESS
