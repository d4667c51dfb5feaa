"""`gptexp plan`: the memory of each sharding, and which models fit a GPU."""

import json
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest

from gptexp.command.fitting import CHOICES, RANKS, least_sharding, needed_bytes
from gptexp.config.compose import compose
from gptexp.config.schema import Config
from gptexp.config.vocabulary import with_vocab_size

Gptexp = Callable[..., CompletedProcess[str]]


def model(name: str) -> Config:
    return with_vocab_size(compose([f"model={name}", "batch.micro_batch_size=auto"]), 50304)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_least_sharding_that_fits_is_named(ranks: int) -> None:
    """Just as much memory as a choice needs gives that choice or one before it, and a byte less never gives it."""
    cfg = model("gpt3_1300m")
    for name, sharding, every in CHOICES:
        needed = needed_bytes(cfg, ranks, sharding, every)
        found = least_sharding(cfg, ranks, needed)
        assert found in [choice[0] for choice in CHOICES[: [c[0] for c in CHOICES].index(name) + 1]]
        assert least_sharding(cfg, ranks, needed - 1) != name
    assert least_sharding(cfg, ranks, 10**6) is None


@pytest.mark.e2e
def test_models_are_listed_by_size_with_what_they_need(gptexp: Gptexp) -> None:
    done = gptexp("plan", "--models", "--json", "device=h100")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["models"]
    sizes = [row["parameters"] for row in rows]
    assert sizes == sorted(sizes)
    found = {row["model"]: row["world.sharding"] for row in rows}
    assert found["gpt2"] == dict.fromkeys(map(str, RANKS), "none")
    assert found["gpt3_1300m"]["1"] == "none"  # 16 bytes a parameter are 21 GB
    assert found["gpt3_13b"] == {"1": None, "8": "full", "64": "full", "512": "full"}
    assert found["gpt3_175b"]["8"] is None


def test_a_plan_says_which_sharding_fits(gptexp: Gptexp) -> None:
    run = ("model=gpt3_13b", "world.size=64", "batch=gpt3_2m", "batch.micro_batch_size=1", "data=stdlib")
    done = gptexp("plan", "--json", "device=h100", *run)
    planned = json.loads(done.stdout)
    each = planned["memory_by_sharding"]
    assert each["none"] == planned["memory_bytes"]["peak"]
    assert each["none"] > each["optimizer"] > 80e9 > each["full"]
    assert "use world.sharding=full, " in done.stderr
    split = json.loads(gptexp("plan", "--json", "device=h100", *run, "world.sharding=full").stdout)
    assert split["memory_by_sharding"] == each
    assert split["at_ranks"][1]["waiting_s"] > 0


def test_gradients_are_reduced_once_a_step_if_whole_ones_fit(gptexp: Gptexp) -> None:
    """Those of 13B parameters have 51 GB."""
    run = ("model=gpt3_13b", "world.size=64", "batch=gpt3_2m", "batch.micro_batch_size=1", "data=stdlib")
    for device, every in (("h100", "step"), ("l40s", "micro_step")):
        more = (f"device={device}", "world.sharding=full", "train.activation_checkpointing=true")
        planned = json.loads(gptexp("plan", "--json", *run, *more).stdout)
        assert planned["effective"]["reduce_every"] == every
        assert planned["memory_bytes"]["peak"] < planned["assumed"]["memory_bytes"]


@pytest.mark.e2e
def test_a_sharding_that_the_config_cannot_have_is_left_out(gptexp: Gptexp) -> None:
    done = gptexp("plan", "--json", "device=h100", "model=gpt2", "world=ddp8", "batch=gpt2", "optim=muon")
    assert json.loads(done.stdout)["memory_by_sharding"].keys() == {"none"}
