"""SGD."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gptexp.optim.keys import Groups, Named, OptimConfig, optimizer_name
from gptexp.process.fields import below_one

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class SGDConfig(OptimConfig):
    """SGD; the weight decay is a term of the gradient."""

    is_by_number: ClassVar[bool] = True
    is_by_parameter: ClassVar[bool] = True
    has_timescale: ClassVar[bool] = True
    counts_steps: ClassVar[str] = ""

    name: str = optimizer_name("sgd")
    momentum: float = below_one(0.9)  # decay rate of the sum of the gradients; muon: of their average
    nesterov: bool = False  # whether the update looks ahead by one more step of momentum

    def build(self, groups: Groups, named: Named, fused: bool) -> "Optimizer":
        from gptexp.optim.algorithms import SGD

        return SGD(groups, self.lr, self.momentum, nesterov=self.nesterov)
