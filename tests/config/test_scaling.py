"""Scaling rules against their formulas, and against what they promise to keep constant."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from gptexp.config.rules import problems
from gptexp.config.scaling import lr_factor, lr_in_words, scaled, scaled_optim
from gptexp.config.schema import Config, ScalingConfig
from gptexp.optim import OPTIMIZERS, AdamWConfig, LionConfig, MuonConfig, SGDConfig

ADAMW = AdamWConfig(lr=6e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
ALL = [
    ScalingConfig(lr=lr, exponent=0.37, noise_scale_tokens=3000, betas=betas, eps=eps, weight_decay=decay,
                  reference_tokens=1024)
    for lr, betas, eps, decay in itertools.product(
        ("none", "linear", "sqrt", "power", "surge"), ("none", "half_life", "beta2_half_life", "sde"),
        ("none", "sqrt"), ("none", "tau"),
    )
]  # fmt: skip


def config(scaling: ScalingConfig, batch: int = 1024, optim: object = ADAMW) -> Config:
    cfg = Config(scaling=scaling, optim=replace(optim))  # type: ignore[type-var]
    cfg.batch.total_batch_size, cfg.batch.micro_batch_size, cfg.model.block_size = batch, 1, 64
    return cfg


def half_life(beta: float, batch: float) -> float:
    """Tokens after which a gradient's weight in a moment has halved."""
    return batch * math.log(2) / -math.log(beta)


@pytest.mark.parametrize("scaling", ALL)
def test_at_the_reference_every_rule_leaves_every_bit(scaling: ScalingConfig) -> None:
    assert scaled(ADAMW, scaling, 1.0) == ADAMW


@pytest.mark.parametrize("scaling", [rule for rule in ALL if rule.lr != "surge"])
def test_two_steps_of_scaling_are_one(scaling: ScalingConfig) -> None:
    """The surge rule depends on where the reference lies, so it is tested below."""
    at_once, first = scaled(ADAMW, scaling, 6.0), scaled(ADAMW, scaling, 2.0)
    again = scaled(first, scaling, 3.0)
    for name in ("lr", "beta1", "beta2", "eps", "weight_decay"):
        assert getattr(again, name) == pytest.approx(getattr(at_once, name), rel=1e-12), name


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2), ("power", 4**0.37)])
def test_the_learning_rate_follows_its_rule(rule: str, factor: float) -> None:
    """From 524,288 to 2,097,152 tokens a step."""
    scaling = ScalingConfig(lr=rule, exponent=0.37, reference_tokens=2**19)
    assert scaled_optim(config(scaling, 2**21)).lr == pytest.approx(6e-4 * factor, rel=1e-15)


def test_the_surge_rule_rises_as_a_root_peaks_at_the_noise_scale_and_falls() -> None:
    noise = 4096
    scaling = ScalingConfig(lr="surge", noise_scale_tokens=noise, reference_tokens=1)
    factors = {batch: lr_factor(scaling, batch) for batch in (1, 4, noise // 2, noise, 2 * noise, 4**8 * noise)}
    assert factors[4] / factors[1] == pytest.approx(2, rel=1e-2)
    assert factors[noise] > factors[noise // 2] == pytest.approx(factors[2 * noise])
    peak = 2 / (math.sqrt(noise / noise) + math.sqrt(noise / noise))
    first = 2 / (math.sqrt(noise / 1) + math.sqrt(1 / noise))
    assert factors[noise] == pytest.approx(peak / first)
    elsewhere = replace(scaling, reference_tokens=64)
    assert lr_factor(elsewhere, 512 / 64) == pytest.approx(lr_factor(scaling, 512) / lr_factor(scaling, 64))


@pytest.mark.parametrize("kappa", [1 / 64, 0.5, 2, 16])
def test_half_lives_in_tokens_stay(kappa: float) -> None:
    both = scaled(ADAMW, ScalingConfig(betas="half_life", reference_tokens=1024), kappa)
    for name in ("beta1", "beta2"):
        assert half_life(getattr(both, name), kappa) == pytest.approx(half_life(getattr(ADAMW, name), 1), rel=1e-9)
    only = scaled(ADAMW, ScalingConfig(betas="beta2_half_life", reference_tokens=1024), kappa)
    assert (only.beta1, only.beta2) == (0.9, both.beta2)  # type: ignore[attr-defined]


def test_the_half_life_of_beta2_can_be_given_in_tokens() -> None:
    """7.08M tokens at 524,288 tokens a step is 0.95 (science of the field: GPT-3's batch size)."""
    given = replace(ADAMW, beta2=0.5, beta2_half_life_tokens=round(half_life(0.95, 2**19)))
    for batch in (2**17, 2**19, 2**21):
        effective = scaled_optim(config(ScalingConfig(), batch, given))
        assert half_life(effective.beta2, batch) == pytest.approx(half_life(0.95, 2**19), rel=1e-7)  # type: ignore[attr-defined]
    assert scaled_optim(config(ScalingConfig(), 2**19, given)).beta2 == pytest.approx(0.95)  # type: ignore[attr-defined]


def test_the_sde_rule_scales_distances_from_one_and_eps() -> None:
    scaling = ScalingConfig(lr="sqrt", betas="sde", eps="sqrt", reference_tokens=1024)
    effective = scaled(ADAMW, scaling, 4.0)
    assert effective == replace(
        ADAMW, lr=pytest.approx(1.2e-3), beta1=pytest.approx(0.6), beta2=pytest.approx(0.8), eps=pytest.approx(5e-9)
    )


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt", "power", "surge"])
@pytest.mark.parametrize("kappa", [0.25, 3, 16])
def test_the_timescale_of_weight_decay_stays(rule: str, kappa: float) -> None:
    """B / (lr · weight_decay), in tokens."""
    scaling = ScalingConfig(lr=rule, exponent=0.2, noise_scale_tokens=5000, weight_decay="tau", reference_tokens=1024)
    effective = scaled(ADAMW, scaling, kappa)
    assert kappa / (effective.lr * effective.weight_decay) == pytest.approx(1 / (6e-4 * 0.1), rel=1e-9)


def test_by_default_nothing_is_scaled() -> None:
    for name, keys in OPTIMIZERS.items():
        cfg = config(ScalingConfig(), 2**16, keys())
        assert scaled_optim(cfg) == cfg.optim, name


def test_the_decay_rates_of_other_optimizers_are_scaled_too() -> None:
    scaling = ScalingConfig(betas="half_life", reference_tokens=1024)
    assert scaled(SGDConfig(momentum=0.9), scaling, 2.0) == SGDConfig(momentum=0.9)  # a sum, not an average
    muon = scaled(MuonConfig(), scaling, 2.0)
    assert (muon.momentum, muon.beta1, muon.beta2) == pytest.approx((0.95**2, 0.9**2, 0.95**2))  # type: ignore[attr-defined]
    lion = scaled(LionConfig(beta1=0.9, beta2=0.99), scaling, 2.0)
    assert lion == LionConfig(beta1=0.9, beta2=pytest.approx(0.99**2))  # its beta1 is no decay rate


@pytest.mark.parametrize("rule", ["half_life", "sde"])
@pytest.mark.parametrize("kappa", [0.25, 1.0, 2.0])
def test_a_moment_that_is_off_stays_off(rule: str, kappa: float) -> None:
    without = replace(ADAMW, beta1=0.0, beta2=0.999)
    found = scaled(without, ScalingConfig(betas=rule, reference_tokens=1024), kappa)
    assert getattr(found, "beta1") == 0  # noqa: B009
    assert (getattr(found, "beta2") == 0.999) == (kappa == 1)  # noqa: B009


@pytest.mark.parametrize(
    ("code", "optim", "rules"),
    [
        ("reference-missing", ADAMW, {"weight_decay": "tau", "reference_tokens": None}),
        ("scaling-incomplete", ADAMW, {"lr": "surge"}),
        ("nothing-to-scale", OPTIMIZERS["lars"](), {"betas": "half_life"}),
        ("nothing-to-scale", OPTIMIZERS["adafactor"](), {"betas": "half_life"}),
        ("nothing-to-scale", LionConfig(), {"eps": "sqrt"}),
        ("nothing-to-scale", OPTIMIZERS["lars"](), {"weight_decay": "tau"}),
        ("scaled-out-of-range", ADAMW, {"betas": "half_life", "reference_tokens": 2**62}),
        ("scaled-out-of-range", ADAMW, {"lr": "power", "exponent": 1e3, "reference_tokens": 1}),
        ("scaled-out-of-range", ADAMW, {"lr": "power", "exponent": -150.0, "reference_tokens": 1}),
    ],
)
def test_what_makes_no_sense_is_refused(code: str, optim: object, rules: dict[str, Any]) -> None:
    scaling = ScalingConfig(**{"reference_tokens": 64, **rules})
    assert {problem.code for problem in problems(config(scaling, optim=optim), 1)} == {code}


def test_the_largest_batch_size_that_the_sde_rule_names_is_legal() -> None:
    scaling = ScalingConfig(betas="sde", reference_tokens=64)
    [line] = problems(config(scaling, 1024), 1)
    assert "use at most 640," in line
    assert problems(config(scaling, 640), 1) == []


def test_a_learning_rate_is_followed_by_its_scaled_value_if_it_has_another() -> None:
    assert (lr_in_words(1e-3, 1e-3), lr_in_words(1e-3, 2e-3)) == ("0.001", "0.001 scaled to 0.002")
