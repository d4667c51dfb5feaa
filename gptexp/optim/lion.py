"""Lion."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gptexp.optim.keys import PYTORCH_OPTIMIZER, Groups, Named, TwoMomentsConfig, optimizer_name

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class LionConfig(TwoMomentsConfig):
    """Lion (arXiv 2302.06675): the update is the sign of a moment."""

    needs: ClassVar[str | None] = PYTORCH_OPTIMIZER
    is_like_adam: ClassVar[bool] = True
    is_by_number: ClassVar[bool] = True
    is_by_parameter: ClassVar[bool] = True
    has_timescale: ClassVar[bool] = True
    decay_rates: ClassVar[Sequence[str]] = ("beta2",)  # beta1 mixes the moment with the gradient
    counts_steps: ClassVar[str] = ""

    name: str = optimizer_name("lion")

    def build(self, groups: Groups, named: Named, fused: bool) -> "Optimizer":
        from pytorch_optimizer import Lion

        return Lion(groups, self.lr, (self.beta1, self.beta2))

    def least_warmup_steps(self) -> int:
        return 0  # it has no second moment
