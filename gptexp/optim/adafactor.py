"""Adafactor."""

from dataclasses import dataclass

from gptexp.optim.base import Groups, Named, OptimConfig, Optimizer, optimizer_name
from gptexp.process.fields import positive, ruled


@dataclass
class AdafactorConfig(OptimConfig):
    """Adafactor (arXiv 1804.04235): keeps a matrix's second moment as one vector for its rows, one for its columns."""

    may_split_parameters = True
    has_timescale = True
    takes_nonfinite = True
    step_dependence = "its limit of the learning rate, 1 / √step, and the decay of its average count steps"

    name: str = optimizer_name("adafactor")
    beta2_decay: float = ruled(-0.8, lambda v: v < 0, "must be below 0")  # weight of a step's gradients in the second
    # moment: step**beta2_decay
    clip_threshold: float = positive(1.0)  # maximum of an update's root mean square, at lr=1 and weights of size 1

    def build(self, groups: Groups, named: Named, fused: bool) -> Optimizer:
        from gptexp.optim.torch_optimizers import Adafactor

        # torch squares 1e-15 to the paper's 1e-30. torch's own default would outweigh the gradients of large models.
        return Adafactor(groups, self.lr, self.beta2_decay, eps=(1e-15, 1e-3), d=self.clip_threshold)
