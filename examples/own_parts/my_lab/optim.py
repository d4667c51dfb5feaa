"""Adan: adaptive Nesterov momentum (Xie et al. 2022, arXiv 2208.06677, algorithm 1)."""

import torch


class Adan(torch.optim.Optimizer):
    is_like_adam = True  # an element of an update has about the size lr: gptexp may scale its rate as Adam's

    def __init__(
        self,
        params: list[dict],
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.02,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2, beta3 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[p], p.grad
                if not state:
                    state |= {key: torch.zeros_like(p) for key in ("mean", "change", "square")}
                    state |= {"steps": 0, "before": grad.clone()}
                state["steps"] += 1
                difference = grad - state["before"]
                state["mean"].lerp_(grad, 1 - beta1)
                state["change"].lerp_(difference, 1 - beta2)
                state["square"].lerp_((grad + beta2 * difference).square(), 1 - beta3)
                state["before"].copy_(grad)
                mean, change, square = (
                    state[key] / (1 - beta ** state["steps"])  # an average that began at 0
                    for key, beta in zip(("mean", "change", "square"), group["betas"], strict=True)
                )
                update = (mean + beta2 * change) / (square.sqrt() + group["eps"])
                p.sub_(update, alpha=group["lr"]).div_(1 + group["lr"] * group["weight_decay"])
