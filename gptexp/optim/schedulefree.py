"""Schedule-free AdamW."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gptexp.optim.keys import PYTORCH_OPTIMIZER, Groups, Named, Shape, TwoMomentsConfig, optimizer_name
from gptexp.process.fields import positive, ruled

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class ScheduleFreeConfig(TwoMomentsConfig):
    """Schedule-free AdamW (arXiv 2405.15682): averaged weights in place of a decay of the learning rate."""

    needs: ClassVar[str | None] = PYTORCH_OPTIMIZER
    is_like_adam: ClassVar[bool] = True
    is_by_number: ClassVar[bool] = True  # but not by parameter: before an evaluation it exchanges the weights
    has_timescale: ClassVar[bool] = True
    averages_weights: ClassVar[bool] = True
    decay_rates: ClassVar[Sequence[str]] = ("beta2",)  # beta1 mixes two versions of the weights
    counts_steps: ClassVar[str] = ""

    name: str = optimizer_name("schedulefree")
    beta1: float = ruled(0.9, lambda v: 0 < v < 1, "must lie in (0, 1)")  # share of the average in the trained weights
    eps: float = positive(1e-8)  # added to the square root of the second moment

    def build(self, groups: Groups, named: Named, fused: bool) -> "Optimizer":
        from pytorch_optimizer import ScheduleFreeAdamW

        return ScheduleFreeAdamW(groups, self.lr, (self.beta1, self.beta2), eps=self.eps)

    def update_numbers(self, shapes: Sequence[tuple[Shape, int]]) -> int:
        return 2 * super().update_numbers(shapes)
