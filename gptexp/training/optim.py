"""AdamW with weight decay on matrices only."""

import torch
from torch import Tensor, nn

from gptexp.config.schema import OptimConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: tensors of two or more dimensions (matmuls, embeddings) decay, biases and LayerNorms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def describe_groups(model: nn.Module) -> list[str]:
    """Return two lines for the terminal: the numbers of tensors and parameters with and without weight decay."""
    lines = []
    for name, group in zip(("decayed", "non-decayed"), parameter_groups(model, 0.0), strict=True):
        tensors: list[nn.Parameter] = group["params"]  # type: ignore[assignment]
        count = sum(p.numel() for p in tensors)
        lines.append(f"num {name} parameter tensors: {len(tensors)}, with {count:,} parameters")
    return lines


def build_optimizer(model: nn.Module, cfg: OptimConfig, fused: bool) -> torch.optim.AdamW:
    """Build AdamW for `model`. Each group stores the peak learning rate as `initial_lr`, from which `set_lr` starts."""
    groups = parameter_groups(model, cfg.weight_decay)
    optimizer = torch.optim.AdamW(groups, cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=fused)
    for group in optimizer.param_groups:
        group["initial_lr"] = cfg.lr  # the name that torch's schedulers use
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to `factor` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def step_if(finite: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Update the weights if `finite`, a 0-dim bool tensor on their device, is true.

    A fused kernel checks the tensor itself, as for torch's GradScaler, so the host does not wait for the GPU.
    """
    if optimizer.param_groups[0].get("fused"):
        optimizer.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]
        optimizer.step()
    elif finite:
        optimizer.step()
