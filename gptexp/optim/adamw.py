"""AdamW."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gptexp.optim.keys import Groups, Named, Shape, TwoMomentsConfig, optimizer_name
from gptexp.process.fields import choice, positive

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class AdamWConfig(TwoMomentsConfig):
    """AdamW as GPT-3 uses it (arXiv 2005.14165, appendix B)."""

    is_like_adam: ClassVar[bool] = True
    is_by_number: ClassVar[bool] = True
    is_by_parameter: ClassVar[bool] = True
    has_timescale: ClassVar[bool] = True
    counts_steps: ClassVar[str] = ""

    name: str = optimizer_name("adamw")
    eps: float = positive(1e-8)  # added to the square root of the second moment
    fused: str = choice("auto", "on", "off")  # AdamW's fused kernel; auto: used if the device has one

    def build(self, groups: Groups, named: Named, fused: bool) -> "Optimizer":
        from gptexp.optim.algorithms import AdamW

        return AdamW(groups, self.lr, (self.beta1, self.beta2), self.eps, fused=fused)

    def update_numbers(self, shapes: Sequence[tuple[Shape, int]]) -> int:
        return 0  # the fused kernel updates in place
