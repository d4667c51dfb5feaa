"""An exponential moving average (EMA) of the weights, with a half-life in tokens.

At a constant learning rate its loss is close to the one that a decay would reach, at every point of the run (arXiv
2410.21676, section 3). A half-life in tokens is a decay of 2^(-step_tokens / half_life) for each step, so k times the
batch has the k-th power of the decay, which is the rule of arXiv 2307.13813.

The average has no bias towards its start: the weights after an update count with 2^(-age / half_life), and these shares
add up to 1, as in the moments of Adam (arXiv 1412.6980, section 3). So the first average is the weights after the
first update, the initial weights are no part of it, and until a half-life has passed it is nearly a plain mean.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gptexp.distributed.sharding import Parameters
from gptexp.storage.checkpoint import AVERAGED_TOKENS


class WeightAverage:
    """The average of the weights after all updates, in float32, of those that this rank updates.

    It takes one copy of them, and one pass over them for each step. The host never waits for the device.
    """

    def __init__(self, parameters: Parameters, half_life_tokens: int) -> None:
        self._half_life_tokens = half_life_tokens
        self._weights = {name: p.detach() for name, p in parameters.named.items()}
        self._average = {name: p.clone() for name, p in self._weights.items()}
        device = next(iter(self._weights.values())).device
        # MPS has no float64.
        precise = torch.float32 if device.type == "mps" else torch.float64
        self._tokens = torch.zeros((), dtype=precise, device=device)  # of all updates so far

    def update(self, step_tokens: int, updated: Tensor) -> None:
        """Take in the weights after a step of `step_tokens`, if `updated`, a 0-dim bool on their device, is true."""
        per_token = -math.log(2) / self._half_life_tokens
        self._tokens += step_tokens * updated
        share = math.expm1(per_token * step_tokens) / torch.expm1(per_token * self._tokens)
        share = torch.where(updated, share, 0.0).float()
        average = list(self._average.values())
        torch._foreach_lerp_(average, list(self._weights.values()), [share] * len(average))

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Within, the model has the averaged weights; afterwards its own, to the last bit."""
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
        """This rank's part of the average under the names of the weights, and the number of tokens that it is of."""
        return {**self._average, AVERAGED_TOKENS: self._tokens}
