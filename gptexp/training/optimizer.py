"""Optimizers, with weight decay on matrices only, and their parameter groups."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gptexp.optim.torch_optimizers  # noqa: F401  so that no optimizer imports the compiler
from gptexp.model.gpt import GPT
from gptexp.model.parametrisation import Factors, optimizer_factors
from gptexp.optim.base import Groups, Named, OptimConfig
from gptexp.process.words import shown

BUILT = "built"  # key in a group: the numbers that it was built with
TRAINED = "trained"  # key in the state of an optimizer that averages weights: the weights at which it trains


def parameter_groups(model: nn.Module, cfg: OptimConfig, named: Named | None = None) -> Groups:
    """The parameter groups with their settings: the values in `cfg` times the factors of the parametrisation.

    Weight decay applies to tensors of two or more dimensions (matmuls, embeddings), not to biases and LayerNorms. The
    standard parametrisation has these two groups. Others split both by their factors; groups that decay come first.
    """
    groups = []
    for (decays, factors), parameters in _grouped(model, named):
        decay = cfg.weight_decay * factors.weight_decay if decays else 0.0
        group = {"params": parameters, "lr": cfg.lr * factors.lr, "weight_decay": decay}
        if hasattr(cfg, "eps"):
            group["eps"] = cfg.eps * factors.eps
        groups.append(group)
    return groups


def describe_groups(model: nn.Module, cfg: OptimConfig) -> list[str]:
    """Return a line for the terminal for each group: its numbers of tensors and parameters, and its factors.

    A factor other than 1 is shown with the key that it multiplies, for example `lr × 0.25`.
    """
    lines = []
    for (decays, factors), tensors in _grouped(model):
        count, name = sum(p.numel() for p in tensors), "decayed" if decays else "non-decayed"
        keys = [key for key in asdict(factors) if hasattr(cfg, key)]
        more = "".join(f", {key} × {factor:g}" for key in keys if (factor := getattr(factors, key)) != 1)
        lines.append(f"num {name} parameter tensors: {len(tensors)}, with {count:,} parameters{more}")
    return lines


def _grouped(model: nn.Module, named: Named | None = None) -> list[tuple[tuple[bool, Factors], list[nn.Parameter]]]:
    """The parameters, grouped by whether they decay and by their factors. Groups that decay come first."""
    groups: dict[tuple[bool, Factors], list[nn.Parameter]] = {}
    for name, p in (named or dict(model.named_parameters())).items():
        if p.requires_grad:
            factors = optimizer_factors(model.cfg, name) if isinstance(model, GPT) else Factors()
            groups.setdefault((p.dim() >= 2, factors), []).append(p)
    return sorted(groups.items(), key=lambda group: not group[0][0])


def describe_optimizer(cfg: OptimConfig) -> str:
    """Return the optimizer's name and keys: `lion, lr 0.001, …`. Keys of gradient noise only if there is any."""
    is_noisy = cfg.gradient_noise or cfg.gradient_noise_like_batch
    name, *keys = [
        (key, value)
        for key, value in asdict(cfg).items()
        if value is not None and (is_noisy or not key.startswith("gradient_noise")) and not key.startswith("_")
    ]
    values = [f"{value:.6g}" if isinstance(value, float) else shown(value) for _, value in keys]
    return ", ".join([name[1], *(f"{key} {value}" for (key, _), value in zip(keys, values, strict=True))])


def build_optimizer(
    model: nn.Module,
    cfg: OptimConfig,
    fused: bool,
    named: Named | None = None,
    split_state: bool = False,
) -> Optimizer:
    """Build the optimizer of `cfg` for `model`. Each group stores its peak learning rate as `initial_lr`.

    `fused` selects AdamW's fused kernel; other optimizers ignore it. No optimizer clips gradients: the trainer does.
    `named` gives this rank's parts of the parameters to update; default: the parameters of `model`. With `split_state`
    each rank has the state of some parameters, updates these and sends them to all (ZeRO stage 1, arXiv 1910.02054).
    """
    named = named or dict(model.named_parameters())
    groups = parameter_groups(model, cfg, named)
    if split_state:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # imports the compiler, which takes a second

        # It calls its second argument with the groups of this rank.
        build: Any = partial(cfg.build, named=named, fused=fused)
        optimizer: Optimizer = ZeroRedundancyOptimizer(groups, build)
    else:
        optimizer = cfg.build(groups, named, fused)
    for group in optimizer.param_groups:
        group[BUILT] = numbers_in(group)
        group["initial_lr"] = group["lr"]  # the name that torch's schedulers use
    return optimizer


def numbers_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers among the values of a group or of a state, without the learning rate, which each step sets."""
    rates = ("lr", "initial_lr")
    return {key: value for key, value in values.items() if type(value) in (int, float) and key not in rates}


def has_split_state(optimizer: Optimizer) -> bool:
    """Whether it is a ZeroRedundancyOptimizer, whose `optim` has the state of this rank's parameters."""
    return hasattr(optimizer, "consolidate_state_dict")


@contextmanager
def weights_for_use(optimizer: Optimizer) -> Iterator[None]:
    """Within, the model has the weights to evaluate, sample and save; afterwards those to train, bit for bit.

    They differ for a schedule-free optimizer, which trains at a point between its averaged and its newest weights
    (arXiv 2405.15682, section 2). Within this context its state keeps the weights to train, under `TRAINED`.
    """
    if not hasattr(optimizer, "eval"):
        yield
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if optimizer.state.get(p)]
    for p in parameters:
        optimizer.state[p][TRAINED] = p.detach().clone()
    optimizer.eval()
    try:
        yield
    finally:
        back_to_training(optimizer)


@torch.no_grad()
def back_to_training(optimizer: Optimizer) -> None:
    """Move the weights to train from the optimizer's state, if it has them, back into the model."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if TRAINED in optimizer.state.get(p, {}):
                p.copy_(optimizer.state[p].pop(TRAINED))
        if "train_mode" in group:
            group["train_mode"] = True


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Set every group's learning rate to `factor` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def step_if(finite: Tensor, optimizer: Optimizer, may_spoil: bool = False) -> None:
    """Update the weights if `finite`, a 0-dim bool tensor on their device, is true.

    A fused kernel checks the tensor itself, as for torch's GradScaler, so the host does not wait for the GPU. Without
    one it waits, unless a non-finite step `may_spoil` the weights: then a GPU updates them in any case.
    """
    if optimizer.param_groups[0].get("fused"):
        kernel: Any = optimizer.optim if has_split_state(optimizer) else optimizer  # type: ignore[attr-defined]
        kernel.found_inf = 1.0 - finite.float()
        optimizer.step()
    elif (may_spoil and finite.is_cuda) or finite:
        optimizer.step()
