"""Lion."""

from dataclasses import dataclass

from gptexp.optim.base import PYTORCH_OPTIMIZER, Groups, Named, Optimizer, TwoMomentsConfig, optimizer_name
from gptexp.process.fields import below_one


@dataclass
class LionConfig(TwoMomentsConfig):
    """Lion (arXiv 2302.06675): the update is the sign of a moment."""

    needs = PYTORCH_OPTIMIZER
    is_like_adam = True
    may_split_rows = True
    may_split_parameters = True
    has_timescale = True
    takes_nonfinite = True
    decay_rates = ("beta2",)
    step_dependence = ""

    name: str = optimizer_name("lion")
    beta1: float = below_one(0.9)  # weight of the moment in an update
    beta2: float = below_one(0.95)  # decay rate of the moment

    def build(self, groups: Groups, named: Named, fused: bool) -> Optimizer:
        from pytorch_optimizer import Lion

        return Lion(groups, self.lr, (self.beta1, self.beta2))

    def least_warmup_steps(self) -> int:
        return 0  # it has no second moment
