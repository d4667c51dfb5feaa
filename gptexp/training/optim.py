"""Optimizers, with weight decay on matrices only, and their parameter groups."""

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from gptexp.config.schema import (
    AdafactorConfig,
    AdamWConfig,
    LambConfig,
    LarsConfig,
    LionConfig,
    MuonConfig,
    OptimConfig,
    ScheduleFreeConfig,
    SGDConfig,
    SoapConfig,
)
from gptexp.model.gpt import GPT
from gptexp.model.optimizer_state import MOST_ROTATED, TRAINED, is_by_muon
from gptexp.model.parametrisation import Factors, optimizer_factors
from gptexp.process.words import shown

Kind = TypeVar("Kind", bound=Optimizer)

# torch's optimizers import its compiler, which takes more than a second, only to tell it not to compile their methods.
# This is the mark that torch sets after that import.
for _method in (Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict, Optimizer.load_state_dict):
    _plain = inspect.unwrap(_method)
    setattr(_plain, "__dynamo_disable", _plain)


def _without_compiler(kind: type[Kind]) -> type[Kind]:
    """`kind`, whose step does not import the compiler. Its decorator also disables gradients, as here."""
    return type(kind.__name__, (kind,), {"step": torch.no_grad()(inspect.unwrap(kind.step))})


AdamW, SGD = _without_compiler(optim.AdamW), _without_compiler(optim.SGD)
Adafactor, Muon = _without_compiler(optim.Adafactor), _without_compiler(optim.Muon)


def parameter_groups(
    model: nn.Module, cfg: OptimConfig, named: Mapping[str, nn.Parameter] | None = None
) -> list[dict[str, Any]]:
    """The groups with their settings: those of `cfg`, times the factors of the model's parametrisation.

    Tensors of two or more dimensions (matmuls, embeddings) decay, biases and LayerNorms do not. The standard
    parametrisation has these two groups; others have one for each combination of factors, those that decay first.
    """
    groups = []
    for (decays, factors), parameters in _grouped(model, named):
        decay = cfg.weight_decay * factors.weight_decay if decays else 0.0
        group = {"params": parameters, "lr": cfg.lr * factors.lr, "weight_decay": decay}
        if isinstance(cfg, AdamWConfig | ScheduleFreeConfig):  # which parametrisations allow, and which have an eps
            group["eps"] = cfg.eps * factors.eps
        groups.append(group)
    return groups


def describe_groups(model: nn.Module, cfg: OptimConfig) -> list[str]:
    """Return a line for the terminal for each group: its numbers of tensors and parameters, and its factors.

    A factor that is not 1 stands with its key of the optimizer, for example `lr × 0.25`.
    """
    lines = []
    for (decays, factors), tensors in _grouped(model):
        count, name = sum(p.numel() for p in tensors), "decayed" if decays else "non-decayed"
        keys = [key for key in asdict(factors) if hasattr(cfg, key)]
        more = "".join(f", {key} × {factor:g}" for key in keys if (factor := getattr(factors, key)) != 1)
        lines.append(f"num {name} parameter tensors: {len(tensors)}, with {count:,} parameters{more}")
    return lines


def _grouped(
    model: nn.Module, named: Mapping[str, nn.Parameter] | None = None
) -> list[tuple[tuple[bool, Factors], list[nn.Parameter]]]:
    """The parameters by whether they decay and by their factors. Those that decay come first."""
    groups: dict[tuple[bool, Factors], list[nn.Parameter]] = {}
    for name, p in (named or dict(model.named_parameters())).items():
        if p.requires_grad:
            factors = optimizer_factors(model.cfg, name) if isinstance(model, GPT) else Factors()
            groups.setdefault((p.dim() >= 2, factors), []).append(p)
    return sorted(groups.items(), key=lambda group: not group[0][0])


def describe_optimizer(cfg: OptimConfig) -> str:
    """Return the optimizer's name and keys: `lion, lr 0.001, …`, those of gradient noise only if there is any."""
    is_noisy = cfg.gradient_noise or cfg.gradient_noise_like_batch
    name, *keys = [
        (key, value)
        for key, value in asdict(cfg).items()
        if value is not None and (is_noisy or not key.startswith("gradient_noise"))
    ]
    values = [f"{value:.6g}" if isinstance(value, float) else shown(value) for _, value in keys]
    return ", ".join([name[1], *(f"{key} {value}" for (key, _), value in zip(keys, values, strict=True))])


def build_optimizer(
    model: nn.Module,
    cfg: OptimConfig,
    fused: bool,
    named: Mapping[str, nn.Parameter] | None = None,
    split_state: bool = False,
) -> Optimizer:
    """Build the optimizer of `cfg` for `model`. Each group stores its peak learning rate as `initial_lr`.

    `fused` selects AdamW's fused kernel; of the others none is used. None of them clips gradients: the trainer does.
    It updates `named`, this rank's parts of the parameters, if given. With `split_state` each rank keeps the state of
    some of the parameters, updates these and sends them to the others (ZeRO stage 1, arXiv 1910.02054).
    """
    groups = parameter_groups(model, cfg, named)
    if split_state:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # imports the compiler, which takes a second

        # It calls its second argument with the groups of this rank.
        build: Any = partial(_built, model=model, cfg=cfg, fused=fused)
        optimizer: Optimizer = ZeroRedundancyOptimizer(groups, build)
    else:
        optimizer = _built(groups, model, cfg, fused)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # the name that torch's schedulers use
    return optimizer


def _built(groups: list[dict[str, Any]], model: nn.Module, cfg: OptimConfig, fused: bool) -> Optimizer:
    match cfg:
        case AdamWConfig():
            return AdamW(groups, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps, fused=fused)
        case SGDConfig():
            return SGD(groups, cfg.lr, cfg.momentum, nesterov=cfg.nesterov)
        case AdafactorConfig():
            # torch squares the first eps: the paper's 1e-30. Its default would outweigh the gradients of large models.
            return Adafactor(groups, cfg.lr, cfg.beta2_decay, eps=(1e-15, 1e-3), d=cfg.clip_threshold)
        case MuonConfig():
            return _muon_with_adamw(groups, model, cfg)

    import pytorch_optimizer  # an optional package, which takes a second to import

    match cfg:
        case LionConfig():
            return pytorch_optimizer.Lion(groups, cfg.lr, (cfg.beta1, cfg.beta2))
        case LambConfig():
            # As version 3 of the paper: weight decay before the scaling, and no correction of the moments' bias, which
            # the scaling makes up for. Vectors are not scaled, and without a correction the first updates of a vector
            # would be several times lr. So AdamW, which corrects the bias, updates them.
            matrices, vectors = groups
            lamb = pytorch_optimizer.Lamb(
                [matrices], cfg.lr, (cfg.beta1, cfg.beta2), eps=cfg.eps, weight_decouple=False, adam_debias=True,
                max_grad_norm=0.0,
            )  # fmt: skip
            lamb.clamp = math.inf  # 10 would cut the norms of most matrices of a GPT-2
            return Joined(lamb, AdamW([vectors], cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps))
        case LarsConfig():
            return pytorch_optimizer.LARS(
                groups, cfg.lr, momentum=cfg.momentum, trust_coefficient=cfg.trust_coefficient
            )
        case SoapConfig():
            return pytorch_optimizer.SOAP(
                groups,
                cfg.lr,
                (cfg.beta1, cfg.beta2),
                eps=cfg.eps,
                precondition_frequency=cfg.precondition_every,
                max_precondition_dim=MOST_ROTATED,
            )
        case ScheduleFreeConfig():
            return pytorch_optimizer.ScheduleFreeAdamW(groups, cfg.lr, (cfg.beta1, cfg.beta2), eps=cfg.eps)
    raise AssertionError(f"no optimizer for {type(cfg).__name__}")


def _muon_with_adamw(groups: list[dict[str, Any]], model: nn.Module, cfg: MuonConfig) -> "Joined":
    by_muon = [p for name, p in model.named_parameters() if is_by_muon(name, p.dim())]
    rest = [
        {**group, "params": [p for p in group["params"] if all(p is not other for other in by_muon)]}
        for group in groups
    ]
    muon = Muon(
        [{"params": by_muon, "weight_decay": cfg.weight_decay}], cfg.lr, momentum=cfg.momentum, nesterov=cfg.nesterov,
        ns_steps=cfg.ns_steps, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    return Joined(muon, AdamW(rest, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps))


def has_split_state(optimizer: Optimizer) -> bool:
    """Whether it is a ZeroRedundancyOptimizer, whose `optim` has the state of this rank's parameters."""
    return hasattr(optimizer, "consolidate_state_dict")


class Joined(Optimizer):
    """Several optimizers for different parameters, as one: their groups and states are its own."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = list(islice(groups, len(part.param_groups)))
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # makes new groups and a new state
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


@contextmanager
def weights_for_use(optimizer: Optimizer) -> Iterator[None]:
    """Within, the model has the weights to evaluate, sample and save; afterwards those to train, to the last bit.

    They differ for a schedule-free optimizer, which trains at a point between its averaged and its newest weights
    (arXiv 2405.15682, section 2). Its state contains the latter meanwhile.
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
    """Give the model the weights to train that the optimizer's state contains, if it does."""
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


def step_if(finite: Tensor, optimizer: Optimizer) -> None:
    """Update the weights if `finite`, a 0-dim bool tensor on their device, is true.

    A fused kernel checks the tensor itself, as for torch's GradScaler, so the host does not wait for the GPU.
    """
    if optimizer.param_groups[0].get("fused"):
        kernel: Any = optimizer.optim if has_split_state(optimizer) else optimizer  # type: ignore[attr-defined]
        kernel.found_inf = 1.0 - finite.float()
        optimizer.step()
    elif finite:
        optimizer.step()
