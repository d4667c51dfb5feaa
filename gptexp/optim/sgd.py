"""SGD."""

from dataclasses import dataclass

from gptexp.optim.base import Groups, Named, OptimConfig, Optimizer, optimizer_name
from gptexp.process.fields import below_one


@dataclass
class SGDConfig(OptimConfig):
    """SGD; the weight decay is a term of the gradient."""

    may_split_rows = True
    may_split_parameters = True
    has_timescale = True
    takes_nonfinite = True
    step_dependence = ""

    name: str = optimizer_name("sgd")
    momentum: float = below_one(0.9)  # decay rate of the sum of the gradients
    nesterov: bool = False  # whether the update looks ahead by one more step of momentum

    def build(self, groups: Groups, named: Named, fused: bool) -> Optimizer:
        from gptexp.optim.torch_optimizers import SGD

        return SGD(groups, self.lr, self.momentum, nesterov=self.nesterov)
