"""AdamW."""

from collections.abc import Sequence
from dataclasses import dataclass

from gptexp.optim.base import Groups, Named, Optimizer, Shape, TwoMomentsConfig, optimizer_name
from gptexp.process.fields import choice, positive


@dataclass
class AdamWConfig(TwoMomentsConfig):
    """AdamW as GPT-3 uses it (arXiv 2005.14165, appendix B)."""

    is_like_adam = True
    may_split_rows = True
    may_split_parameters = True
    has_timescale = True
    takes_nonfinite = True
    decay_rates = ("beta1", "beta2")
    step_dependence = ""

    name: str = optimizer_name("adamw")
    eps: float = positive(1e-8)  # added to the square root of the second moment
    fused: str = choice("auto", "on", "off")  # AdamW's fused kernel; auto: used if the device has one

    def build(self, groups: Groups, named: Named, fused: bool) -> Optimizer:
        from gptexp.optim.torch_optimizers import AdamW

        return AdamW(groups, self.lr, (self.beta1, self.beta2), self.eps, fused=fused)

    def scratch_numbers(self, shapes: Sequence[tuple[Shape, int]]) -> int:
        return super().scratch_numbers(shapes) if self.fused == "off" else 0  # the fused kernel works in place
