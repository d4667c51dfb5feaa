"""An exponential moving average (EMA) of the weights, with a half-life in tokens.

At a constant learning rate the average has, at every point of the run, nearly the loss that decaying the learning rate
would reach (arXiv 2410.21676, section 3). With a half-life in tokens, each step decays the average by a factor
2^(-step_tokens / half_life). So k times the batch size raises that factor to the power k: the rule of arXiv 2307.13813.

The average has no bias towards its start: the weights after an update count in proportion to 2^(-age / half_life), and
these shares add up to 1, as in Adam's bias-corrected moments (arXiv 1412.6980, section 3). So the first average equals
the weights after the first update, without the initial weights; until a half-life has passed it is nearly a plain mean.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gptexp.distributed.sharding import Parameters
from gptexp.storage.checkpoint import AVERAGED_TOKENS


class WeightAverage:
    """The average of the weights after all updates, in float32. Each rank averages the weights that it updates.

    That takes the memory of one copy of these weights, and one pass over them in each step. The host never waits.
    """

    def __init__(self, parameters: Parameters, half_life_tokens: int) -> None:
        self._half_life_tokens = half_life_tokens
        self._weights = {name: p.detach() for name, p in parameters.named.items()}
        self._average = {name: p.clone() for name, p in self._weights.items()}
        device = next(iter(self._weights.values())).device
        # MPS has no float64.
        precise = torch.float32 if device.type == "mps" else torch.float64
        self._tokens = torch.zeros((), dtype=precise, device=device)  # tokens of all updates

    def update(self, step_tokens: int, updated: Tensor) -> None:
        """Add the weights after a step of `step_tokens` to the average if `updated`, a 0-dim bool tensor, is true.

        If it is false, the weights must be finite too, unless the average is not used again: they get the share 0.
        """
        per_token = -math.log(2) / self._half_life_tokens
        self._tokens += step_tokens * updated
        share = math.expm1(per_token * step_tokens) / torch.expm1(per_token * self._tokens)
        share = torch.where(updated, share, 0.0).float()
        average = list(self._average.values())
        torch._foreach_lerp_(average, list(self._weights.values()), [share] * len(average))

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Within this context the model has the averaged weights; afterwards its own, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, weight in self._weights.items():
            kept = weight.clone()
            weight.copy_(self._average[name])
            self._average[name].copy_(kept)

    def tensors(self) -> dict[str, Tensor]:
        """This rank's part of the average under the names of the weights, and the number of averaged tokens."""
        return {**self._average, AVERAGED_TOKENS: self._tokens}
