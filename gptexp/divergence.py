"""When a run has diverged though its loss is still a number: no torch.

A loss that rises and stays up does not come back down; one that spikes does. So what counts is the smoothed loss, and
how long it stays above the lowest that it has been.
"""

from dataclasses import dataclass

SMOOTHING = 0.0025  # of a run, the half-life of what smooths the loss; and in steps, of a short one
SMOOTHING_STEPS = 5
PATIENCE = 0.01  # of a run, how long the smoothed loss stays high before that is no spike; and in steps
PATIENCE_STEPS = 20


@dataclass
class LossTrend:
    """Of the training loss, in nats per token: what a run carries from step to step, and its checkpoints hold."""

    smoothed: float | None = None  # exponential moving average; None before the first step
    lowest: float | None = None  # that it has been
    steps_above: int = 0  # for so many steps in a row it has been too high

    def diverged(self, loss: float, steps: int, nats: float | None) -> bool:
        """Take in a step's loss, of a run of `steps`: whether it has now stayed `nats` too high for too long."""
        keep = 0.5 ** (1 / max(SMOOTHING_STEPS, SMOOTHING * steps))
        self.smoothed = loss if self.smoothed is None else keep * self.smoothed + (1 - keep) * loss
        self.lowest = self.smoothed if self.lowest is None else min(self.lowest, self.smoothed)
        if nats is None:
            return False
        self.steps_above = self.steps_above + 1 if self.smoothed > self.lowest + nats else 0
        return self.steps_above >= max(PATIENCE_STEPS, PATIENCE * steps)
