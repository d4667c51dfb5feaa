"""NAdamW."""

import math
from dataclasses import dataclass

from gptexp.optim.base import Groups, Named, Optimizer, TwoMomentsConfig, optimizer_name
from gptexp.process.fields import positive


@dataclass
class NAdamWConfig(TwoMomentsConfig):
    """AdamW with Nesterov's momentum (Dozat, ICLR workshop 2016), at a constant beta1 as in optax's nadamw."""

    is_like_adam = True
    may_split_rows = True
    may_split_parameters = True
    has_timescale = True
    takes_nonfinite = True
    decay_rates = ("beta1", "beta2")
    step_dependence = ""

    name: str = optimizer_name("nadamw")
    eps: float = positive(1e-8)  # added to the square root of the second moment

    def build(self, groups: Groups, named: Named, fused: bool) -> Optimizer:
        from gptexp.optim.torch_optimizers import NAdam

        # torch multiplies beta1 by 1 - 0.96**(step * momentum_decay) / 2, which is 1 at an infinite decay.
        betas = (self.beta1, self.beta2)
        return NAdam(groups, self.lr, betas, self.eps, momentum_decay=math.inf, decoupled_weight_decay=True)
