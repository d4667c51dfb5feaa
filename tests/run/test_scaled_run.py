"""A run with scaling rules: the optimizer has the effective values, and so has everything that reports them."""

import json
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from conftest import events, summary
from real_runs import train_here
from sweeps import compose_sweep

from gptexp.command.lead import readable_name
from gptexp.command.planning import plan
from gptexp.config.compose import compose
from gptexp.config.noise_scale import why_unmeasured
from gptexp.config.scaling import scaled_optim
from gptexp.optim import AdamWConfig
from gptexp.reporting.listings.records import read_run
from gptexp.storage import run_dir

RULES = [
    "optim.lr=1e-3", "scaling.lr=sqrt", "scaling.betas=beta2_half_life", "scaling.eps=sqrt", "scaling.weight_decay=tau",
]  # fmt: skip


def test_the_optimizer_trains_with_the_effective_values(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], optimizers: list[torch.optim.Optimizer]
) -> None:
    cfg = compose(tiny)
    overrides = [*tiny, *RULES, f"scaling.reference_tokens={cfg.batch.total_batch_size // 4}", "log.progress=lines"]
    run_dir.save_config(tmp_path / "out", compose(overrides))
    assert train_here(overrides, tmp_path / "out") == 0
    expected = {"lr": 2e-3, "betas": (0.9, 0.95**4), "eps": 5e-9, "weight_decay": 0.2}
    [optimizer] = optimizers
    decayed = optimizer.param_groups[0]
    assert decayed["initial_lr"] == pytest.approx(expected["lr"])
    for key in ("betas", "eps", "weight_decay"):
        assert decayed[key] == pytest.approx(expected[key]), key
    assert max(step["optim/lr"] for step in events(tmp_path / "out", "step")) == pytest.approx(2e-3)
    assert summary(tmp_path / "out")["effective_optim"]["beta2"] == pytest.approx(0.95**4)
    assert run_dir.load_config(tmp_path / "out").optim.lr == 1e-3  # the config keeps what was asked for
    assert read_run(tmp_path / "out").lr == pytest.approx(2e-3)
    said = capsys.readouterr().out
    scaled = "lr 0.001 -> 0.002, weight_decay 0.1 -> 0.2, beta2 0.95 -> 0.814506, eps 1e-08 -> 5e-09"
    assert f"scaling         {scaled}\n" in said
    planned = json.loads(json.dumps(plan(compose(overrides)).to_dict()))
    assert (planned["lr"], planned["effective_lr"]) == (1e-3, 2e-3)


def test_the_name_of_a_run_tells_the_arms_of_a_study_apart() -> None:
    arms = {
        "bytes-lr1e-3-b1024": [],
        "bytes-lr_sqrt-betas_half_life-lr1e-3-b1024": ["scaling.lr=sqrt", "scaling.betas=half_life"],
        "bytes-eps_sqrt-lr1e-3-b1024": ["scaling.eps=sqrt"],
        "bytes-muon-lr1e-3-b1024": ["optim=muon"],
        "bytes-mup-lr1e-3-b1024": ["model.parametrisation=mup", "model.base_n_embd=64"],
    }
    shared = ["model=bytes", "optim.lr=1e-3", "batch.total_batch_size=1024", "scaling.reference_tokens=512"]
    assert [readable_name("bytes", compose([*shared, *own])) for own in arms.values()] == [*arms]


def test_the_arms_of_the_study_of_beta2_have_one_beta2_or_one_half_life() -> None:
    drafts = compose_sweep(["experiment=beta2_two_arms", "train.seed=1337", "optim.lr=1e-3"]).drafts
    found = {
        (draft.values["scaling.betas"], draft.config.batch.total_batch_size): scaled_optim(draft.config)
        for draft in drafts
        if draft.config is not None
    }
    assert len(found) == 10
    for draft in drafts:
        assert draft.config is not None
        batch = draft.config.batch
        unmeasured = why_unmeasured(draft.config, batch.asked_micro_batch_size or 0, 1)
        assert (unmeasured is None) == (batch.total_batch_size > 64)  # a step of 64 tokens is one sequence
    for (rule, batch), optim in found.items():
        assert isinstance(optim, AdamWConfig)
        assert (optim.lr, optim.beta1, optim.eps, optim.weight_decay) == (1e-3, 0.9, 1e-8, 0.1)
        if rule == "none":
            assert optim.beta2 == 0.95
        else:
            assert batch * math.log(2) / -math.log(optim.beta2) == pytest.approx(1024 * math.log(2) / -math.log(0.95))


@pytest.mark.e2e
def test_the_arms_of_the_study_of_optimizers_have_learning_rates_of_their_own() -> None:
    tried: dict[tuple[str, int], list[float]] = defaultdict(list)
    for draft in compose_sweep(["experiment=large_batch_optimizers", "train.seed=1337"]).drafts:
        assert draft.config is not None
        config = draft.config
        assert why_unmeasured(config, config.batch.asked_micro_batch_size or 0, 1) is None
        assert getattr(config.optim, "trust_coefficient", 0.02) == 0.02
        tried[config.optim.name, config.batch.total_batch_size].append(config.optim.lr)
    assert {*tried} == {(name, batch) for name in ("adamw", "muon", "lamb", "lars") for batch in (512, 2048, 8192)}
    for rates in tried.values():
        assert [rate / rates[0] for rate in rates] == pytest.approx([1, 2, 4, 8, 16])
