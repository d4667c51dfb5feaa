"""Rules that scale the optimizer's keys with the batch size, as pure functions of the keys and of κ.

κ = batch.total_batch_size / scaling.reference_tokens. At κ = 1 every rule leaves every key as it is.

    scaling.lr            factor of the learning rate
      linear              κ             Goyal et al. 2017, arXiv 1706.02677
      sqrt                √κ            Krizhevsky 2014, arXiv 1404.5997
      power               κ^exponent
      surge               f(κ) / f(1), where f(κ) = 2 / (√(N/B) + √(B/N)), B = κ · reference_tokens and N is the
                          noise scale, where f peaks; Li et al. 2024, arXiv 2405.14578, for sign-based updates
    scaling.betas         decay rate β of a moment
      beta2_half_life     β^κ for beta2: its half-life in tokens stays; Marek et al. 2025, arXiv 2507.07101
      half_life           β^κ for every decay rate
      sde                 1 - κ (1 - β) for every decay rate; Malladi et al. 2022, arXiv 2205.10287
    scaling.eps           sqrt: eps / √κ; arXiv 2205.10287
    scaling.weight_decay  tau: the timescale B / (lr · weight_decay) of the weights stays; arXiv 2405.13698
"""

import math
from dataclasses import replace
from typing import Any

from gptexp.config.schema import Config, ScalingConfig
from gptexp.optim.base import OptimConfig, TwoMomentsConfig


def scaled_optim(cfg: Config) -> OptimConfig:
    """The optimizer's keys as a run of `cfg` uses them, with every decay rate as a number per step."""
    optim, tokens = cfg.optim, cfg.batch.total_batch_size
    if isinstance(optim, TwoMomentsConfig) and optim.beta2_half_life_tokens is not None:
        optim = replace(optim, beta2=0.5 ** (tokens / optim.beta2_half_life_tokens))
    reference = cfg.scaling.reference_tokens
    return scaled(optim, cfg.scaling, tokens / reference) if reference is not None else optim


def scaled(optim: OptimConfig, scaling: ScalingConfig, kappa: float) -> OptimConfig:
    """The keys `optim`, given for the reference batch size, scaled to `kappa` times that batch size."""
    factor = lr_factor(scaling, kappa)
    changed: dict[str, Any] = {"lr": optim.lr * factor}
    for name in scaled_decay_rates(optim, scaling.betas):
        if not (rate := getattr(optim, name)):
            continue  # a rate of 0: there is no such moment, and a larger rate would add one
        # The second form of 1 - κ (1 - β) is exactly β at κ = 1.
        changed[name] = rate - (kappa - 1) * (1 - rate) if scaling.betas == "sde" else rate**kappa
    if scaling.eps == "sqrt":
        changed["eps"] = getattr(optim, "eps") / math.sqrt(kappa)  # noqa: B009  not every optimizer has it
    if scaling.weight_decay == "tau":
        changed["weight_decay"] = optim.weight_decay * (kappa / factor)
    return replace(optim, **changed)


def lr_factor(scaling: ScalingConfig, kappa: float) -> float:
    """Factor of the learning rate at `kappa` times the reference batch size."""
    match scaling.lr:
        case "linear":
            return kappa
        case "sqrt":
            return math.sqrt(kappa)
        case "power":
            assert scaling.exponent is not None
            return float(kappa**scaling.exponent)
        case "surge":
            assert scaling.noise_scale_tokens is not None
            assert scaling.reference_tokens is not None
            reference = scaling.reference_tokens / scaling.noise_scale_tokens
            return _surge(kappa * reference) / _surge(reference)
    return 1.0


def _surge(batch: float) -> float:
    """The learning rate at `batch` times the noise scale, as a share of its peak."""
    return 2 / (math.sqrt(1 / batch) + math.sqrt(batch))


def scaled_decay_rates(optim: OptimConfig, rule: str) -> list[str]:
    """The names of the decay rates that `rule`, a value of `scaling.betas`, scales."""
    names = optim.decay_rates if rule != "none" else ()
    return [name for name in names if rule != "beta2_half_life" or name == "beta2"]


def lr_in_words(given: float, effective: float) -> str:
    """The learning rate: `0.001`, or `0.001 scaled to 0.002`."""
    return f"{given:g}" if effective == given else f"{given:g} scaled to {effective:g}"


def changes(given: OptimConfig, effective: OptimConfig) -> list[str]:
    """A text for each key that differs: `lr 0.005 -> 0.01`."""
    return [
        f"{name} {getattr(given, name):.6g} -> {value:.6g}"
        for name, value in vars(effective).items()
        if value != getattr(given, name)
    ]
