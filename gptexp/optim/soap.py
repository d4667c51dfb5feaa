"""SOAP."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gptexp.optim.base import PYTORCH_OPTIMIZER, Groups, Named, Optimizer, Shape, TwoMomentsConfig, optimizer_name
from gptexp.process.fields import positive

MOST_ROTATED = 10_000  # no eigenbasis for a dimension of a matrix that is longer than this


@dataclass
class SoapConfig(TwoMomentsConfig):
    """SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner."""

    needs = PYTORCH_OPTIMIZER
    may_split_parameters = True
    has_timescale = True
    decay_rates = ("beta1", "beta2")
    step_dependence = "precondition_every counts steps"

    name: str = optimizer_name("soap")
    eps: float = positive(1e-8)  # added to the square root of the second moment
    precondition_every: int = positive(10)  # steps between two updates of the eigenbasis

    def build(self, groups: Groups, named: Named, fused: bool) -> Optimizer:
        from pytorch_optimizer import SOAP

        return SOAP(
            groups, self.lr, (self.beta1, self.beta2), eps=self.eps,
            precondition_frequency=self.precondition_every, max_precondition_dim=MOST_ROTATED,
        )  # fmt: skip

    def scratch_numbers(self, shapes: Sequence[tuple[Shape, int]]) -> int:
        """The numbers that the largest update needs: SOAP updates one parameter after the other."""
        rotated = [n * n for shape, _ in shapes for n in shape if n <= MOST_ROTATED and len(shape) > 1]
        return max(6 * max(math.prod(shape) for shape, _ in shapes), *rotated)
