"""Gaussian noise on the gradient of a step: proportional to the gradient, or the extra noise of a smaller batch.

Proportional noise decays as in Neelakantan et al. (arXiv 1511.06807). Their noise has an absolute size, so its norm
grows with the root of the number of parameters; here it does not. The extra noise of a smaller batch follows from the
covariance S of one sequence's gradient: the mean gradient of b sequences has noise of squared norm tr S / b.

The added noise is isotropic, unlike a batch's. It is drawn from (seed, step): all ranks and a resumed run add the same.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gptexp.config.batch import BatchPlan
from gptexp.data.order import mix
from gptexp.distributed.sharding import Parameters
from gptexp.optim.base import OptimConfig

_KEY = 0x6E6F697365  # "noise" in ASCII


@dataclass(frozen=True)
class StepNoise:
    """The noise of one step. Its norm is `relative` times that of the gradient, plus `absolute`."""

    seed: int
    relative: float
    absolute: float

    def add_to(self, parameters: Parameters, norm: Tensor) -> None:
        """Add the noise to the gradients of `parameters`, whose norm is `norm` (0-dim). The host does not wait.

        A rank that has a part of the parameters still draws the noise of all, one parameter at a time.
        """
        generator = torch.Generator(norm.device).manual_seed(self.seed)
        size = sum(shape.numel() for shape in parameters.shapes.values())
        deviation = (self.relative * norm + self.absolute) / math.sqrt(size)
        for name, p in parameters.named.items():
            noise = torch.randn(parameters.shapes[name], generator=generator, device=norm.device)
            assert p.grad is not None
            p.grad.addcmul_(noise[parameters.rows(name)], deviation)

    def over(self, norm: float) -> float:
        """The norm of the noise divided by that of the gradient, `norm`; NaN if `norm` is 0."""
        return self.relative + self.absolute / norm if norm else math.nan


def step_noise(
    optim: OptimConfig, seed: int, step: int, tokens: int, batch: BatchPlan, noise_trace: float
) -> StepNoise | None:
    """The noise of `step`, which begins after `tokens` tokens; None if there is none.

    `noise_trace` is the trace of the covariance of one sequence's gradient; 0: not known yet.
    """
    relative = absolute = 0.0
    if optim.gradient_noise:
        t = tokens / optim.gradient_noise_decay_tokens if optim.gradient_noise_decay_tokens else step
        relative = optim.gradient_noise * (1 + t) ** (-optim.gradient_noise_decay / 2)
    elif optim.gradient_noise_like_batch:
        sequences = optim.gradient_noise_like_batch / batch.seq_len
        absolute = math.sqrt(noise_trace * max(0.0, 1 / sequences - 1 / batch.sequences))
    if not relative + absolute:
        return None
    return StepNoise(mix(seed, _KEY, step), relative, absolute)
