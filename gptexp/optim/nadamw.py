"""NAdamW."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gptexp.optim.keys import Groups, Named, TwoMomentsConfig, optimizer_name
from gptexp.process.fields import not_negative, positive

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class NAdamWConfig(TwoMomentsConfig):
    """NAdamW (Dozat, ICLR workshop 2016; arXiv 2306.07179): AdamW with Nesterov's momentum."""

    is_like_adam: ClassVar[bool] = True
    is_by_number: ClassVar[bool] = True
    is_by_parameter: ClassVar[bool] = True
    has_timescale: ClassVar[bool] = True
    counts_steps: ClassVar[str] = "the rise of its momentum counts steps"

    name: str = optimizer_name("nadamw")
    eps: float = positive(1e-8)  # added to the square root of the second moment
    momentum_decay: float = not_negative(4e-3)  # beta1 of step t is beta1 * (1 - 0.96**(t * momentum_decay) / 2)

    def build(self, groups: Groups, named: Named, fused: bool) -> "Optimizer":
        from gptexp.optim.algorithms import NAdam

        betas, decay = (self.beta1, self.beta2), self.momentum_decay
        return NAdam(groups, self.lr, betas, self.eps, momentum_decay=decay, decoupled_weight_decay=True)
