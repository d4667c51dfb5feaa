"""`--like RUN_DIR`: a command with the config of a run."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sweeps import write_sweep

from gptexp.command.like import like
from gptexp.config.compose import compose, is_multirun
from gptexp.config.schema import Config, to_dict
from gptexp.storage import run_dir

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


def saved(directory: Path, *overrides: str) -> Config:
    """Save the config of a run as a run does, without Hydra's record."""
    config = compose(overrides)
    run_dir.save_config(directory, config)
    return config


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=nano", "optim=lion", "optim.lr=3e-4", "schedule=wsd", "world.size=2", "batch.micro_batch_size=4"],
        ["model=llama_124m", "train.max_steps=7", 'log.note="a=b, {c}"', "log.tags=[x,'y z']", "train.dtype=float32"],
        ["model=qwen3_bytes", "data.val_ratio=0.1", "train.divergence_nats=null", "optim.gradient_noise=0.1"],
        ["experiment=gpt2_124m", "data=stdlib"],
    ],
)
def test_the_config_is_that_of_the_run(tmp_path: Path, overrides: list[str]) -> None:
    config = saved(tmp_path / "run", *overrides)
    again = compose(like(str(tmp_path / "run"), []))
    assert to_dict(again) == to_dict(config)


def test_a_cell_of_a_named_sweep_is_a_single_run(tmp_path: Path) -> None:
    config = saved(tmp_path / "run", "model=nano", "optim.lr=3e-4")
    record = {"hydra": {"runtime": {"choices": {"sweep": "lr", "model": "nano"}}}}
    (tmp_path / "run/.hydra").mkdir()
    (tmp_path / "run/.hydra/hydra.yaml").write_text(json.dumps(record))
    arguments = like(str(tmp_path / "run"), [])
    assert not is_multirun(arguments)
    assert to_dict(compose(arguments)) == to_dict(config)


def test_what_the_command_says_itself_wins(tmp_path: Path) -> None:
    saved(tmp_path / "run", "model=nano", "optim.lr=3e-4", "optim.beta2=0.99", "train.max_steps=7")
    run = str(tmp_path / "run")
    key = compose([*like(run, ["optim.lr=1e-2"]), "optim.lr=1e-2"])
    assert (key.optim.lr, key.optim.beta2, key.train.max_steps) == (1e-2, 0.99, 7)  # type: ignore[attr-defined]
    group = compose([*like(run, ["optim=muon"]), "optim=muon"])
    assert (group.optim.name, group.train.max_steps, group.model.n_layer) == ("muon", 7, 2)


def test_a_length_that_the_command_gives_wins_over_those_of_the_run(tmp_path: Path) -> None:
    lengths = ["train.max_steps=7", "train.eval_every=2", "schedule.warmup_steps=2"]
    saved(tmp_path / "run", "model=nano", *lengths)
    own = ["train.max_tokens=65536", "train.eval_every_tokens=8192", "schedule.warmup_ratio=0.25"]
    again = compose([*like(str(tmp_path / "run"), own), *own])
    assert (again.run_length, again.train.eval_every, again.schedule.warmup_steps) == ((8, 65536), None, None)


def test_of_a_sweep_it_is_the_config_of_its_best_run(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "root", batches=(4096,), centre=0.01, seeds=1, sigma=0.0)
    for given in (str(root), f"{root}@best"):
        assert compose([*like(given, []), "data=stdlib"]).optim.lr == 0.01


def test_a_run_of_epochs_is_taken_over(tmp_path: Path) -> None:
    config = compose(["model=nano", "train.epochs=2"], count_epoch=lambda _: 50_000)
    run_dir.save_config(tmp_path / "run", config)
    run = str(tmp_path / "run")
    for own, tokens in (([], 100_000), (["train.epochs=3"], 150_000), (["train.max_tokens=8192"], 8192)):
        again = compose([*like(run, own), *own], count_epoch=lambda _: 50_000)
        assert again.run_length[1] == tokens


def test_a_run_like_another_has_its_results(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    first = gptexp("train", *tiny, "optim=sgd", "optim.lr=1e-2", "hydra.run.dir=outputs/first")
    assert first.returncode == 0, first.stderr
    again = gptexp("train", "--like", "first", "hydra.run.dir=again")
    assert again.returncode == 0, again.stderr
    a, b = (run_dir.load_config(tmp_path / name) for name in ("outputs/first", "again"))
    assert to_dict(a) == to_dict(b)
    refused = gptexp("train", "--like", "nothing")
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    swept = gptexp("plan", "-m", "--like", "first", "optim.lr=1e-3,1e-2", "--json")
    assert swept.returncode == 0, swept.stderr
