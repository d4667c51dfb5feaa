"""Schedule-free AdamW."""

from dataclasses import dataclass

from gptexp.optim.base import Groups, Named, Optimizer, TwoMomentsConfig, optimizer_name
from gptexp.process.fields import positive, ruled


@dataclass
class ScheduleFreeConfig(TwoMomentsConfig):
    """Schedule-free AdamW (arXiv 2405.15682): averaged weights in place of a decay of the learning rate.

    It is the variant of the authors' package, schedulefree: the average weighs each step by the square of the largest
    lr so far. The paper's algorithm 1 also multiplies lr by √(1 − beta2^t), so its average trusts the first steps less.
    """

    needs = "schedulefree"
    is_like_adam = True
    may_split_rows = True  # but not parameters: it exchanges all weights before an evaluation
    has_timescale = True
    takes_nonfinite = True
    averages_weights = True
    decay_rates = ("beta2",)
    step_dependence = ""

    name: str = optimizer_name("schedulefree")
    beta1: float = ruled(0.9, lambda v: 0 < v < 1, "must lie in (0, 1)")  # share of the average in
    # the weights that are trained
    eps: float = positive(1e-8)  # added to the square root of the second moment

    def build(self, groups: Groups, named: Named, fused: bool) -> Optimizer:
        from schedulefree import AdamWScheduleFree

        optimizer: Optimizer = AdamWScheduleFree(groups, self.lr, (self.beta1, self.beta2), self.eps)
        optimizer.train()  # type: ignore[attr-defined]
        return optimizer
