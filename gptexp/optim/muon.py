"""Muon."""

from dataclasses import dataclass

from gptexp.optim.base import Groups, Named, Optimizer, TwoMomentsConfig, in_block, optimizer_name
from gptexp.process.fields import below_one, positive, ruled


@dataclass
class MuonConfig(TwoMomentsConfig):
    """Muon (arXiv 2502.16982) for the matrices of the blocks, AdamW for embeddings and vectors, with one lr."""

    has_timescale = True
    takes_nonfinite = True
    decay_rates = ("beta1", "beta2", "momentum")
    step_dependence = ""

    name: str = optimizer_name("muon")
    momentum: float = below_one(0.95)  # decay rate of the average of the gradients
    nesterov: bool = True  # whether the update looks ahead by one more step of momentum
    ns_steps: int = ruled(5, lambda v: 0 < v < 100, "must lie in 1 to 99")  # Newton-Schulz iterations
    eps: float = positive(1e-8)  # AdamW's: added to the square root of the second moment

    def build(self, groups: Groups, named: Named, fused: bool) -> Optimizer:
        from gptexp.optim.torch_optimizers import AdamW, Joined, Muon

        matrices = {p: name for name, p in named.items() if p.dim() == 2 and in_block(name)}
        rest = [{**group, "params": [p for p in group["params"] if p not in matrices]} for group in groups]
        muon = Muon(
            [{"params": [*matrices], "weight_decay": self.weight_decay}], self.lr, momentum=self.momentum,
            nesterov=self.nesterov, ns_steps=self.ns_steps, adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        return Joined(muon, AdamW(rest, self.lr, (self.beta1, self.beta2), self.eps))
