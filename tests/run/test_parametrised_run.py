"""A whole run with `model.parametrisation=completep`: what it logs, says, saves and exports, and a resume of it."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import events, summary
from judge import judge
from real_runs import equal, newest, train_here

import gptexp as package
from gptexp.config.compose import compose
from gptexp.data.loader import build_dataset
from gptexp.process.errors import ConfigError
from gptexp.reporting.listings.listing import model_option
from gptexp.storage import run_dir

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
# A base of width 8 with one head and one layer: every factor differs from 1.
OWN = ["model.parametrisation=completep", "model.base_n_embd=8", "model.base_n_head=2", "model.n_layer=2",
       "model.base_n_layer=1", "data.tokenizer=bytes", "optim.lr=1e-2", "train.save_every=2", "schedule=constant",
       "schedule.warmup_tokens=0"]  # fmt: skip


@pytest.fixture
def trained(tiny: list[str], tmp_path: Path) -> Path:
    run_dir.save_config(tmp_path / "run", compose([*tiny, *OWN]))
    assert train_here([*tiny, *OWN], tmp_path / "run") == 0
    return tmp_path / "run"


def test_the_groups_have_their_own_rates_and_the_metrics_the_base_one(
    tiny: list[str], tmp_path: Path, optimizers: list[torch.optim.Optimizer]
) -> None:
    run_dir.save_config(tmp_path / "run", compose([*tiny, *OWN]))
    assert train_here([*tiny, *OWN], tmp_path / "run") == 0
    assert [event["optim/lr"] for event in events(tmp_path / "run", "step")] == [1e-2] * 4
    [optimizer] = optimizers
    found = [(group["lr"], group["weight_decay"], group["eps"]) for group in optimizer.param_groups]
    expected = [(1e-2, 0.1, 5e-9), (5e-3, 0.2, 2.5e-9), (1e-2, 0, 2.5e-9), (1e-2, 0, 5e-9)]
    assert found == [pytest.approx(settings) for settings in expected]


def test_a_loaded_model_computes_what_the_run_did(trained: Path) -> None:
    model, _, config = package.load_run(trained)
    windows = build_dataset(config)
    rows = torch.from_numpy(windows.rows(windows.val, windows.val_starts).astype("int64"))
    with torch.no_grad():
        assert float(model(rows[:, :-1], rows[:, 1:])) == pytest.approx(summary(trained)["final_val_loss"], rel=1e-5)
    config = run_dir.load_config(trained)
    config.model.base_n_embd = 4
    run_dir.save_config(trained, config)
    with pytest.raises(ConfigError, match=r"model\.base_n_embd=4, and the weights were trained with 8"):
        package.load_run(trained)


def test_a_resumed_run_ends_with_the_same_bits(trained: Path, tiny: list[str], tmp_path: Path) -> None:
    half = shutil.copytree(trained, tmp_path / "half")
    shutil.rmtree(newest(half))
    (half / "summary.json").unlink()
    assert newest(half).name == "step-00000002"
    assert train_here([*tiny, *OWN], half) == 0
    assert equal(trained, half)


@pytest.mark.e2e
def test_transformers_computes_what_an_exported_run_computes(trained: Path, gptexp: Gptexp) -> None:
    done = gptexp("export", "run", "out")
    assert done.returncode == 0, done.stderr
    found = judge(str(trained.parent / "out"), "A", new_tokens=2)
    model, tokenizer, _ = package.load_run(trained)
    with torch.no_grad():
        expected = model(torch.arange(16)[None])[0, :, : tokenizer.n_vocab]
    torch.testing.assert_close(torch.tensor(found["logits"]), expected, rtol=0, atol=1e-5)
    card = (trained.parent / "out/README.md").read_text()
    assert (
        "| parametrisation | completep; of the base: width 16 = 2 × 8, head size 8 = 2 × 4, depth 2 = 2 × 1 |" in card
    )
    assert "multiplied into these weights" in card


def test_weights_are_trained_on_in_their_own_parametrisation_only(
    trained: Path, gptexp: Gptexp, tiny: list[str]
) -> None:
    kept = [text for text in tiny if not text.startswith("model")]
    own = ["data.tokenizer=bytes", "init_from=run", "hydra.run.dir=next", "optim.lr=1e-30"]
    refused = gptexp("train", *tiny, "model.n_layer=2", *own)
    assert refused.returncode == 2
    assert "model.parametrisation=standard: init_from=" in refused.stderr
    assert "/run has parametrisation=completep; use the same value, or model=from_init" in refused.stderr
    done = gptexp("train", *kept, "model=from_init", *own, "log.progress=lines")
    assert done.returncode == 0, done.stderr
    assert "parametrisation completep; of the base: width 16 = 2 × 8" in done.stdout
    assert "lr × 0.5, weight_decay × 2, eps × 0.25" in done.stdout
    assert summary(trained.parent / "next")["final_val_loss"] == pytest.approx(summary(trained)["final_val_loss"])


def test_the_name_of_a_shape_says_nothing_of_the_parametrisation() -> None:
    own = ["model.parametrisation=mup", "model.base_n_embd=256", "model.base_n_head=4"]
    config = compose(["model=gpt2", "model.vocab_size=50304", *own])
    assert model_option(config.model) == "gpt2"
