"""Muon."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gptexp.optim.keys import Groups, Named, TwoMomentsConfig, optimizer_name
from gptexp.process.fields import below_one, positive, ruled

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class MuonConfig(TwoMomentsConfig):
    """Muon (arXiv 2502.16982) for the matrices of the blocks, AdamW for embeddings and vectors, with one lr."""

    has_timescale: ClassVar[bool] = True
    decay_rates: ClassVar[Sequence[str]] = ("beta1", "beta2", "momentum")
    counts_steps: ClassVar[str] = ""

    name: str = optimizer_name("muon")
    momentum: float = below_one(0.95)  # decay rate of the average of the gradients
    nesterov: bool = True  # whether the update looks ahead by one more step of momentum
    ns_steps: int = ruled(5, lambda v: 0 < v < 100, "must lie in 1 to 99")  # Newton-Schulz iterations
    eps: float = positive(1e-8)  # AdamW's: added to the square root of the second moment

    def build(self, groups: Groups, named: Named, fused: bool) -> "Optimizer":
        from gptexp.optim.algorithms import AdamW, Joined, Muon

        matrices = {p: name for name, p in named.items() if p.dim() == 2 and name.startswith("h.")}
        rest = [{**group, "params": [p for p in group["params"] if p not in matrices]} for group in groups]
        muon = Muon(
            [{"params": [*matrices], "weight_decay": self.weight_decay}], self.lr, momentum=self.momentum,
            nesterov=self.nesterov, ns_steps=self.ns_steps, adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        return Joined(muon, AdamW(rest, self.lr, (self.beta1, self.beta2), self.eps))
