"""LARS."""

from dataclasses import dataclass

from gptexp.optim.base import PYTORCH_OPTIMIZER, Groups, Named, OptimConfig, Optimizer, optimizer_name
from gptexp.process.fields import below_one, positive


@dataclass
class LarsConfig(OptimConfig):
    """LARS (arXiv 1708.03888): SGD with each matrix's update scaled to the matrix's norm. Vectors are not scaled."""

    needs = PYTORCH_OPTIMIZER
    may_split_parameters = True
    takes_nonfinite = True
    step_dependence = ""

    name: str = optimizer_name("lars")
    momentum: float = below_one(0.9)  # decay rate of the sum of the gradients
    trust_coefficient: float = positive(1e-3)  # norm of an update at lr=1, as a share of the matrix's norm

    def build(self, groups: Groups, named: Named, fused: bool) -> Optimizer:
        from pytorch_optimizer import LARS

        return LARS(groups, self.lr, momentum=self.momentum, trust_coefficient=self.trust_coefficient)
