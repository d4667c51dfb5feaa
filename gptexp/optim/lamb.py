"""LAMB."""

import math
from dataclasses import dataclass

from gptexp.optim.base import PYTORCH_OPTIMIZER, Groups, Named, Optimizer, TwoMomentsConfig, optimizer_name
from gptexp.process.fields import positive


@dataclass
class LambConfig(TwoMomentsConfig):
    """LAMB (arXiv 1904.00962): Adam's updates of matrices, scaled to each matrix's norm; AdamW for vectors."""

    needs = PYTORCH_OPTIMIZER
    takes_nonfinite = True
    decay_rates = ("beta1", "beta2")
    step_dependence = ""

    name: str = optimizer_name("lamb")
    eps: float = positive(1e-6)  # added to the square root of the second moment

    def build(self, groups: Groups, named: Named, fused: bool) -> Optimizer:
        """As version 3 of the paper: weight decay before the scaling, and no correction of the moments' bias.

        The scaling makes up for the bias. Vectors are not scaled, and without a correction the first updates of a
        vector would be several times lr. So AdamW, which corrects the bias, updates them.
        """
        from pytorch_optimizer import Lamb

        from gptexp.optim.torch_optimizers import AdamW, Joined

        matrices, vectors = groups
        betas = (self.beta1, self.beta2)
        lamb = Lamb(
            [matrices], self.lr, betas, eps=self.eps, weight_decouple=False, adam_debias=True, max_grad_norm=0.0
        )
        lamb.clamp = math.inf  # the default, 10, would cut the norms of most matrices of a GPT-2
        return Joined(lamb, AdamW([vectors], self.lr, betas, self.eps))
