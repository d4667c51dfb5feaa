"""AdamW with weight decay on matrices only."""

import torch
from torch import Tensor, nn

from gptexp.config import OptimConfig
from gptexp.errors import ConfigError


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: tensors of two or more dimensions (matmuls, embeddings) decay, biases and LayerNorms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def describe_groups(model: nn.Module) -> list[str]:
    """The two lines that say what decays."""
    lines = []
    for name, group in zip(("decayed", "non-decayed"), parameter_groups(model, 0.0), strict=True):
        tensors: list[nn.Parameter] = group["params"]  # type: ignore[assignment]
        count = sum(p.numel() for p in tensors)
        lines.append(f"num {name} parameter tensors: {len(tensors)}, with {count:,} parameters")
    return lines


def fused_is_available(device: torch.device) -> bool:
    """Whether AdamW has a fused kernel for this device."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device.type in _get_fused_kernels_supported_devices()


def resolve_fused(wanted: str, device: torch.device) -> bool:
    """Whether to use the fused kernel; asked for and missing raises `ConfigError`."""
    available = fused_is_available(device)
    if wanted == "on" and not available:
        raise ConfigError(f"optim.fused=on: AdamW has no fused kernel for {device.type}; use optim.fused=auto")
    return available and wanted != "off"


def build_optimizer(model: nn.Module, cfg: OptimConfig, fused: bool) -> torch.optim.AdamW:
    """AdamW at the peak learning rate; the training loop sets each step's."""
    return torch.optim.AdamW(
        parameter_groups(model, cfg.weight_decay),
        lr=cfg.lr,
        betas=(cfg.beta1, cfg.beta2),
        eps=cfg.eps,
        fused=fused,
    )


def step_if(finite: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Update the weights if `finite` (0-dim bool, on their device) holds; nothing at all changes if not.

    A fused kernel looks at the number itself, as it does for torch's GradScaler, so that no host waits for a GPU.
    """
    if optimizer.param_groups[0].get("fused"):
        optimizer.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]
        optimizer.step()
    elif finite:
        optimizer.step()
