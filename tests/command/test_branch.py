"""`branch_from`: a run that continues a checkpoint of another run ends with the bits of an uninterrupted one."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import BYTES, TINY, ForkServer, clean, e2e_then_slow, events, summary
from real_runs import equal, newest
from safetensors.torch import load_file

from gptexp.config.branching import Parent, first_step, first_tokens, history_problems
from gptexp.config.compose import compose
from gptexp.config.schedule import resolve_schedule
from gptexp.config.schema import Config, fields_of, to_dict
from gptexp.distributed.ranks import Rank
from gptexp.process.errors import CheckpointError, ConfigError
from gptexp.process.signals import StopRequest
from gptexp.reporting.listings.progress import line_of, survey
from gptexp.reporting.listings.records import read_run
from gptexp.run.job import Job
from gptexp.run.rank import run
from gptexp.storage import branch, run_dir
from gptexp.storage.continuation import check_same
from gptexp.storage.removal import starting_from
from gptexp.sweep.cells import cell_name
from gptexp.training.step import TrainStep

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
PARENT = (
    *TINY, *BYTES, "optim.lr=1e-2", "model.dropout=0.1", "schedule=constant",
    "train.max_steps=16", "train.save_every=4", "train.keep_last=0", "train.eval_every=4", "log.note=parent",
    "train.ema_half_life_tokens=500",
)  # fmt: skip
WARMUP = 205  # tokens: a tenth of 16 steps of 128
composed = partial(compose, find_parent=branch.find)


@pytest.fixture(scope="module")
def constant(torch_server: ForkServer, corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 16 steps at a constant learning rate. The tests of this file share it: read it, never write to it."""
    folder = tmp_path_factory.mktemp("parent")
    argv = ["train", *PARENT, f"data.path={corpus}", "hydra.run.dir=constant"]
    done = torch_server.ask(argv, folder, clean(os.environ, cache), timeout=240)
    assert done["code"] == 0, done["stderr"]
    return folder / "constant"


@pytest.fixture
def mine(constant: Path, tmp_path: Path) -> Path:
    """A copy of `constant` that a test may change."""
    return Path(shutil.copytree(constant, tmp_path / "constant"))


def train(directory: Path, cfg: Config, stop: StopRequest | None = None) -> int:
    """Train or resume a run of one rank in this process."""
    run_dir.save_config(directory, cfg)
    return run(Job(cfg, directory, Rank(), stop or StopRequest()))


def average(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(newest(directory) / "ema.safetensors")


def logged(directory: Path, kind: str, *keys: str, after: int = 0) -> list[tuple[Any, ...]]:
    return [tuple(event.get(key) for key in keys) for event in events(directory, kind) if event["step"] >= after]


def same(branched: Path, whole: Path, step: int) -> None:
    """Check that a branch from `step` has the bits, the numbers and the data of the run `whole`."""
    assert newest(branched).name == newest(whole).name
    assert equal(branched, whole)
    averages = [average(branched), average(whole)]
    assert all(torch.equal(tensor, averages[1][name]) for name, tensor in averages[0].items())
    keys = ("step", "tokens", "optim/lr", "train/loss", "optim/grad_norm", "data/fingerprint")
    assert logged(branched, "step", *keys) == logged(whole, "step", *keys, after=step)
    assert logged(branched, "step", "step")[0] == (step,)
    evaluated = ("step", "val/loss", "val/loss_ema")
    assert set(logged(branched, "eval", *evaluated)) >= set(logged(whole, "eval", *evaluated, after=step))
    states = [json.loads((newest(d) / "state.json").read_text()) for d in (branched, whole)]
    for key in ("step", "tokens", "fingerprint", "val_loss", "val_loss_ema", "skipped_updates", "steps_passed_over"):
        assert states[0][key] == states[1][key], key


@pytest.mark.parametrize(("step", "cooldown"), [(12, "1-sqrt"), *e2e_then_slow([(16, "linear"), (8, "linear")])])
def test_a_branch_ends_with_the_bits_of_an_uninterrupted_run(
    constant: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, cooldown: str
) -> None:
    """With dropout and an average of the weights. Nobody types the keys of the parent again."""
    own = ["schedule=wsd", f"schedule.cooldown={cooldown}"]
    branched = composed([f"branch_from={constant}@{step}", *own])
    assert train(tmp_path / "branch", branched) == 0
    whole = compose(
        [*PARENT, f"data.path={corpus}", *own, f"schedule.warmup_tokens={WARMUP}", "train.max_steps=null",
         f"train.max_tokens={step * 160}"]
    )  # fmt: skip
    assert train(tmp_path / "whole", whole) == 0
    same(tmp_path / "branch", tmp_path / "whole", step)
    rates = [lr for (lr,) in logged(tmp_path / "branch", "step", "optim/lr")]
    assert rates[0] == pytest.approx(1e-2)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 1e-2
    assert "no line for steps" not in capsys.readouterr().err


def test_a_branch_that_is_stopped_continues_without_the_other_run(mine: Path, corpus: Path, tmp_path: Path) -> None:
    """It has a copy of the checkpoint from its start on, and ends with the same bits."""
    own = ["schedule=wsd", "train.max_tokens=1600", "train.save_every=2"]
    branched = composed([f"branch_from={mine}@8", "schedule=wsd", "train.max_tokens=1600"])
    plain, stop, done = TrainStep.__call__, StopRequest(), 0

    def counted(step: TrainStep, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        report, done = plain(step, *args, **kwargs), done + 1
        if done == 2:
            stop.on_signal(15, None)
        return report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "__call__", counted)
        assert train(tmp_path / "branch", branched, stop) == 143
    assert [path.name for path in run_dir.published(tmp_path / "branch" / "checkpoints")][-1] == "step-00000008"
    mine.rename(tmp_path / "elsewhere")
    assert 8 < first_event(tmp_path / "branch", -1)["step"] + 1 < 13
    saved = run_dir.load_config(tmp_path / "branch")
    check_same(tmp_path / "branch", saved)
    assert train(tmp_path / "branch", saved) == 0
    whole = [*PARENT, f"data.path={corpus}", *own, f"schedule.warmup_tokens={WARMUP}", "train.max_steps=null"]
    assert train(tmp_path / "whole", compose(whole)) == 0
    same(tmp_path / "branch", tmp_path / "whole", 8)


@pytest.mark.e2e
def test_a_branch_of_a_growing_batch_counts_tokens(gptexp: Gptexp, corpus: Path, tmp_path: Path) -> None:
    """It begins within the ramp, and its steps have the sizes that they would have had."""
    ramp = ["batch.ramp_from_tokens=32", "batch.ramp_tokens=1000"]
    ramp += [f"train.{what}_every{of}" for what in ("save", "eval") for of in ("=null", "_tokens=300")]
    own = [*PARENT, f"data.path={corpus}", *ramp, "schedule.warmup_tokens=200"]
    assert gptexp("train", *own, "hydra.run.dir=parent").returncode == 0
    state = run_dir.read_state(next(iter(sorted((tmp_path / "parent" / "checkpoints").iterdir()))))
    step, tokens = state["step"], state["tokens"]
    assert tokens < step * 128
    config = composed([f"branch_from={tmp_path / 'parent'}@{step}", "schedule=wsd", "schedule.cooldown_ratio=0.7"])
    assert first_tokens(config) == tokens
    assert config.run_length[1] == round(tokens / 0.3)
    assert train(tmp_path / "branch", config) == 0
    lengths = ["schedule.cooldown_ratio=0.7", "train.max_steps=null", f"train.max_tokens={round(tokens / 0.3)}"]
    assert train(tmp_path / "whole", compose([*own, "schedule=wsd", *lengths])) == 0
    same(tmp_path / "branch", tmp_path / "whole", step)
    assert len({tokens for (tokens,) in logged(tmp_path / "branch", "step", "batch/tokens")}) > 1


def first_event(directory: Path, number: int = 0) -> dict[str, Any]:
    return events(directory, "step")[number]


def test_a_branch_tells_where_it_began(constant: Path, tmp_path: Path) -> None:
    directory = tmp_path / "branch"
    assert train(directory, composed([f"branch_from={constant}@12", "schedule=wsd"])) == 0
    found = summary(directory)
    identity = branch.find(Config(branch_from=f"{constant}@12"))
    assert identity is not None
    assert found["branched_from"] == {
        "run": str(constant), "step": 12, "tokens": 12 * 128, "checkpoint": identity.identity,
    }  # fmt: skip
    assert found["train_s"] < summary(constant)["train_s"]
    assert found["tokens_per_s"] == pytest.approx(3 * 128 / found["train_s"], rel=0.05)  # rounded to ms
    read = read_run(directory)
    assert (read.branch, read.first_tokens, read.of_tokens) == ("constant@12", 1536, 1920)
    assert (read.gaps, read.problem) == ([], None)
    assert read.train[0].step == 13
    assert read.train[-1].seconds == pytest.approx(found["train_s"], rel=0.2)
    [cell] = survey(directory)
    assert (cell.tokens, cell.of_tokens, cell.share) == (384, 384, 1.0)
    assert line_of(cell).endswith("branch  (from constant@12)")


def test_a_branch_takes_the_choices_that_its_run_made_for_auto(mine: Path, tmp_path: Path) -> None:
    """Not those of the sweep that it is a cell of."""
    for directory, kernel in ((mine, "math"), (tmp_path / "branch", "flash")):
        directory.mkdir(exist_ok=True)
        chosen = json.loads((mine / "effective.json").read_text())
        chosen["attention"], chosen["sources"]["attention"] = kernel, "decided"
        (directory / "effective.json").write_text(json.dumps(chosen))
    assert train(tmp_path / "branch", composed([f"branch_from={mine}@12", "schedule=wsd"])) == 0
    assert json.loads((tmp_path / "branch" / "effective.json").read_text())["attention"] == "math"


# --- the config -------------------------------------------------------------------------------------------------------


def test_every_key_that_is_not_given_is_that_of_the_run(constant: Path) -> None:
    before = {key: value for key, _, value in fields_of(run_dir.load_config(constant))}
    own = ["train.log_every=2", "log.progress=lines", "log.wandb.group=mine", "log=offline"]
    config = composed([f"branch_from={constant}@8", "schedule=wsd_sqrt", *own])
    now = {key: value for key, _, value in fields_of(config)}
    assert {key: now[key] for key in now if now[key] != before[key]} == {
        "schedule.name": "wsd", "schedule.cooldown": "1-sqrt", "schedule.min_lr_ratio": 0.0,
        "schedule.warmup_tokens": WARMUP, "train.max_tokens": 1280, "train.max_steps": None, "train.log_every": 2,
        "log.progress": "lines", "log.wandb.group": "mine", "log.wandb.mode": "offline", "log.wandb.name": None,
        "log.note": None, "branch_from": f"{constant}@8",
    }  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("of_parent", "given", "expected"),
    [
        (["schedule=wsd_sqrt"], ["schedule=wsd"], {"name": "wsd", "cooldown": "linear", "cooldown_ratio": 0.2}),
        (["schedule=wsd", "schedule.cooldown_ratio=0.5"], ["schedule=wsd"], {"cooldown_ratio": 0.2}),
        (["schedule=cosine_hold"], ["schedule=linear"], {"name": "linear", "decay_ratio": 1.0, "min_lr_ratio": 0.0}),
        (["schedule=wsd", "schedule.decay_steps=16"], ["schedule=constant"], {"name": "constant", "decay_steps": None}),
        (
            ["schedule=wsd_sqrt"],
            ["schedule.cooldown_ratio=0.1"],
            {"cooldown": "1-sqrt", "cooldown_ratio": 0.1, "min_lr_ratio": 0.0},
        ),
        (["schedule=wsd"], ["schedule=gpt3", "schedule.decay_ratio=0.5"], {"decay_tokens": None, "decay_ratio": 0.5}),
    ],
)
def test_a_chosen_schedule_is_a_whole_one_and_a_key_alone_changes_that_key(
    corpus: Path, of_parent: list[str], given: list[str], expected: dict[str, Any]
) -> None:
    """It has no key of the parent's schedule but the warm-up."""
    own = [*TINY, f"data.path={corpus}", "schedule.warmup_steps=5", "train.max_steps=16"]
    parent = Parent(Path("/parent"), compose([*own, *of_parent]), step=6, tokens=6 * 128)
    with pytest.MonkeyPatch.context() as patch:  # these lengths need not fit the past
        patch.setattr("gptexp.config.branching.history_problems", lambda *_: iter(()))
        branched = compose(["branch_from=/parent@6", *given, "train.max_steps=40"], find_parent=lambda _: parent)
    assert {key: getattr(branched.schedule, key) for key in expected} == expected
    assert (branched.schedule.warmup_tokens, branched.schedule.warmup_steps) == (5 * 128, None)


def test_the_newest_checkpoint_is_taken_without_a_step(constant: Path) -> None:
    assert composed([f"branch_from={constant}", "schedule=wsd"]).branch_from == f"{constant}@16"


@pytest.mark.parametrize(
    ("given", "length", "cooldown_from"),
    [
        ((), 1280, 1024),
        (("schedule.cooldown_ratio=0.5",), 2048, 1024),
        (("train.max_tokens=4000",), 4000, 3200),
        (("train.max_steps=20",), 2560, 2048),
        (("schedule.decay_tokens=1500", "train.max_tokens=2000"), 2000, 1200),
    ],
)
def test_the_cooldown_begins_at_the_checkpoint_unless_a_length_is_given(
    constant: Path, given: tuple[str, ...], length: int, cooldown_from: int
) -> None:
    config = composed([f"branch_from={constant}@8", "schedule=wsd", *given])
    assert config.run_length[1] == length
    schedule = resolve_schedule(config, length)
    assert schedule.lr_factor(cooldown_from, 1) == 1
    assert schedule.lr_factor(cooldown_from + 64, 1) < 1


def test_a_branch_of_a_branch_and_one_without_any_change(constant: Path, tmp_path: Path) -> None:
    first = composed([f"branch_from={constant}@8", "schedule=wsd", "train.max_steps=20"])  # constant until step 16
    assert train(tmp_path / "first", first) == 0
    second = composed([f"branch_from={tmp_path / 'first'}@12", "schedule=wsd"])
    assert second.branch_from == f"{tmp_path / 'first'}@12"
    assert (first_step(second.branch_from), first_tokens(second)) == (12, 12 * 128)
    assert composed([f"branch_from={constant}@8"]).schedule.name == "constant"  # goes on as the run did


def test_the_world_is_that_of_the_run_or_of_the_launcher(mine: Path) -> None:
    values = yaml.safe_load((mine / "config.yaml").read_text())
    values["world"]["size"] = 2
    (mine / "config.yaml").write_text(yaml.safe_dump(values))
    given = [f"branch_from={mine}@8", "schedule=wsd"]
    assert composed(given).world.size == 2
    assert composed([*given, "world=ddp4"]).world.size == 4
    assert composed(given, launcher_world_size=1).world.size == 1
    with pytest.raises(ConfigError, match="the launcher started 1 rank"):
        composed([*given, "world.size=2"], launcher_world_size=1)


# What is given -> the code, and what the line names.
REFUSED = {
    "optim.lr=1e-3": "branch-differs optim.lr 0.001 0.01",
    "train.seed=1": "branch-differs train.seed 1337",
    "batch.total_batch_size=256": "branch-differs batch.total_batch_size 128",
    "optim=sgd": "branch-differs optim.name adamw",
    "train.ema_half_life_tokens=null": "branch-differs train.ema_half_life_tokens 500",
    "experiment=tutorial": "branch-with-recipe experiment",
    "train.max_steps=12": "branch-too-short train.max_steps 12",
    "schedule.warmup_ratio=0.2": "branch-with-other-warmup schedule.warmup_ratio 384 schedule.warmup_tokens=205",
    "schedule.warmup_steps=3": "branch-with-other-warmup schedule.warmup_steps schedule.warmup_tokens=205",
    "train.max_tokens=1600": "branch-with-other-lr branch_from 0.6 train.max_tokens=1920 @8",
    "train.max_steps=13": "branch-with-other-lr branch_from train.max_steps=15 @8",
    "schedule.decay_tokens=1600": "branch-with-other-lr branch_from schedule.decay_tokens=1920 @8",
    "schedule.decay_steps=13": "branch-with-other-lr branch_from schedule.decay_steps=15 @8",
    "schedule.cooldown_ratio=1": "branch-with-other-lr branch_from schedule.cooldown_ratio",
    "schedule=linear": "branch-with-other-lr branch_from 0.97",
    "schedule=cosine": "branch-with-other-lr branch_from schedule=wsd",
}


@pytest.mark.e2e
@pytest.mark.parametrize("given", REFUSED)
def test_a_branch_that_would_have_another_past_is_refused(constant: Path, given: str) -> None:
    """What the line proposes is accepted, or a checkpoint before it is."""
    schedule = [] if given.startswith("schedule=") else ["schedule=wsd"]
    with pytest.raises(ConfigError) as refused:
        composed([f"branch_from={constant}@12", *schedule, given])
    code, key, *words = REFUSED[given].split()
    line = refused.value.problems[0]
    assert line.code == refused.value.code == code
    assert line.startswith(key)
    assert all(word in line for word in words)
    for fix in (word for word in words if re.fullmatch(r"[a-z_.]+=\d+", word)):
        assert composed([f"branch_from={constant}@12", *schedule, fix]).branch_from == f"{constant}@12"


def test_the_learning_rates_of_a_run_that_has_decayed_cannot_be_continued(constant: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "wsd", composed([f"branch_from={constant}@12", "schedule=wsd"])) == 0
    with pytest.raises(ConfigError) as refused:
        composed([f"branch_from={tmp_path / 'wsd'}", "schedule=wsd"])
    assert refused.value.code == "branch-with-other-lr"
    assert all(word in str(refused.value) for word in ("step 14 had 0.666667", "schedule=constant", "@12"))


def remove(*names: str) -> Callable[[Path], object]:
    def edit(parent: Path) -> None:
        for name in names:
            path = parent / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return edit


def replace_text(name: str, old: str, new: str) -> Callable[[Path], object]:
    def edit(parent: Path) -> None:
        text = (parent / name).read_text()
        assert old in text
        (parent / name).write_text(text.replace(old, new))

    return edit


@pytest.mark.parametrize(
    ("edit", "at", "kind", "line"),
    [
        (lambda _: None, "@5", ConfigError, "no checkpoint of step 5; the run has 16, 12, 8, 4 (train.save_every"),
        (remove("checkpoints"), "", CheckpointError, "no checkpoint has been saved yet"),
        (remove("config.yaml", "checkpoints", "metrics.jsonl"), "@8", ConfigError, "no run is in"),
        (remove("config.yaml"), "@8", ConfigError, "config.yaml is missing"),
        (remove("checkpoints/step-00000008/state.json"), "@8", CheckpointError, "the checkpoint is damaged"),
        (replace_text("checkpoints/step-00000008/state.json", "1024", "1025"), "@8", CheckpointError, "damaged"),
        (replace_text("config.yaml", "lr: 0.01", "lr: 0.02"), "@8", ConfigError, "optim.lr=0.02, and step-00000008 was "
         "trained with 0.01; restore that value"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_continued_is_refused_in_one_line(
    mine: Path, edit: Callable[[Path], object], at: str, kind: type[Exception], line: str
) -> None:
    edit(mine)
    with pytest.raises(kind, match=re.escape(line)) as refused:
        composed([f"branch_from={mine}{at}", "schedule=wsd"])
    assert "\n" not in str(refused.value)


def test_the_time_of_a_check_does_not_grow_with_the_number_of_a_checkpoint(constant: Path) -> None:
    """A stranger's checkpoint may have any."""
    config, parent = (
        composed([f"branch_from={constant}@8", "schedule=wsd"]),
        branch.find(Config(branch_from=f"{constant}@8")),
    )
    assert parent is not None
    parent.config.train.max_steps = config.train.max_steps = None
    parent.config.train.max_tokens = config.train.max_tokens = 2 * 128 * 10**15
    config.schedule.warmup_tokens = parent.config.schedule.warmup_tokens = 128
    late = replace(parent, step=10**15, tokens=128 * 10**15)
    assert [*history_problems(config, late)] == []
    assert [*history_problems(parent.config, late)] == []


def test_damaged_weights_are_refused_when_the_run_starts(mine: Path, tmp_path: Path) -> None:
    """Nothing of them is left in its directory."""
    config = composed([f"branch_from={mine}@8", "schedule=wsd"])
    file = mine / "checkpoints/step-00000008/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since it was saved"):
        train(tmp_path / "branch", config)
    assert list((tmp_path / "branch" / "checkpoints").glob("*")) == []


def test_a_command_that_does_not_know_branches_refuses_one(constant: Path) -> None:
    with pytest.raises(ConfigError, match="only train, plan and prepare take it"):
        compose([f"branch_from={constant}@8"])


# --- its place --------------------------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_the_name_of_a_cell_has_the_checkpoint_and_not_its_place(mine: Path, tmp_path: Path) -> None:
    def name(parent: Path, step: int, swept: bool = True) -> str:
        given = f"{parent}@{step}"
        config = composed([f"branch_from={given}", "schedule=wsd", "train.max_tokens=4000"])
        return cell_name(config, {"branch_from": given} if swept else {}, tmp_path / "sweep")

    names = [name(mine, 8), name(mine, 12)]
    assert [text.rpartition("-")[0] for text in names] == ["branch_from=constant_8", "branch_from=constant_12"]
    assert len({text.rpartition("-")[2] for text in names}) == 2
    assert name(mine, 8, swept=False) == names[0].rpartition("-")[2]
    moved = mine.rename(tmp_path / "moved")
    assert name(moved, 8).rpartition("-")[2] == names[0].rpartition("-")[2]
    for path in sorted((moved / "checkpoints").iterdir()):  # other weights at the same place
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["model.safetensors"][1] = "0" * 64
        (path / "manifest.json").write_text(json.dumps(manifest))
    assert name(moved, 8).rpartition("-")[2] != names[0].rpartition("-")[2]


def test_a_directory_belongs_to_one_branch(mine: Path, tmp_path: Path) -> None:
    """The run that it branched from may lie elsewhere now."""
    own = ["schedule=wsd", "train.max_tokens=1664"]
    config = composed([f"branch_from={mine}@8", *own])
    assert train(tmp_path / "branch", config) == 0
    assert check_same(tmp_path / "branch", config) == "completed"
    moved = mine.rename(tmp_path / "moved")
    assert check_same(tmp_path / "branch", composed([f"branch_from={moved}@8", *own])) == "completed"
    for other in (composed([f"branch_from={moved}@4", *own]), replace(config, branch_from=None)):
        with pytest.raises(ConfigError, match=r"branch_from was .*@8, now .*; start a new run"):
            check_same(tmp_path / "branch", other)


def test_a_run_that_is_about_to_be_branched_from_is_named_before_it_is_removed(mine: Path, tmp_path: Path) -> None:
    config = composed([f"branch_from={mine}@8", "schedule=wsd"])
    run_dir.save_config(tmp_path / "branch", config)
    assert starting_from(mine) == [tmp_path / "branch"]
    (tmp_path / "branch" / "checkpoints" / "step-00000008").mkdir(parents=True)
    assert starting_from(mine) == []


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_command_trains_a_cooldown_for_each_horizon(mine: Path, gptexp: Gptexp, tmp_path: Path) -> None:
    given = ["train", "-m", "branch_from=constant@4,constant@8,constant@12", "schedule=wsd", "log.progress=lines"]
    planned = gptexp("plan", *given[1:], "--json")
    cells = json.loads(planned.stdout)["cells"]
    assert [(cell["plan"]["first_step"], cell["plan"]["steps"]) for cell in cells] == [(4, 5), (8, 10), (12, 15)]
    done = gptexp(*given, "sweep.name=horizons")
    assert done.returncode == 0, done.stderr
    runs = sorted((tmp_path / "outputs/horizons").glob("branch_from=*"), key=lambda path: summary(path)["steps"])
    assert [(summary(path)["status"], summary(path)["steps"]) for path in runs] == [
        ("completed", 5), ("completed", 10), ("completed", 15),
    ]  # fmt: skip
    assert f"branch          from step 8, 1,024 tokens, of {mine}@8" in done.stdout
    status = gptexp("status", "outputs/horizons")
    assert status.stdout.count("100%") == 3
    assert "(from constant@12)" in status.stdout
    again = gptexp(*given, "sweep.name=horizons")
    assert again.stdout.count("already completed") == 3
    wider = gptexp("train", "-m", "branch_from=constant@8,constant@16", *given[3:], "sweep.name=horizons")
    assert wider.stdout.count("already completed") == 1
    report = gptexp("report", "outputs/horizons")
    assert report.returncode == 0, report.stderr
    assert "run next" not in report.stdout  # no command for another learning rate or seed
    illegal = gptexp("train", "-m", "branch_from=constant@4,constant@12", "schedule=wsd", "train.max_tokens=1600")
    assert illegal.returncode == 2
    assert "(cell branch_from=constant@12)" in illegal.stderr


@pytest.mark.e2e
def test_a_new_branch_has_the_name_of_its_model_and_is_continued_by_its_directory(
    mine: Path, gptexp: Gptexp, tmp_path: Path
) -> None:
    done = gptexp("train", "branch_from=constant@12", "schedule=wsd", "log.progress=lines")
    assert done.returncode == 0, done.stderr
    [directory] = (tmp_path / "outputs").glob("*/*-nano")
    assert "learning rate   0.01, from branch_from=" in done.stdout
    assert run_dir.load_config(directory).log.wandb.name == "nano-lr1e-2-b128-from12"
    page = gptexp("report", str(directory))
    assert page.returncode == 0, page.stderr
    assert "constant@12, after 1,536 tokens" in (directory / "report.html").read_text()
    compared = gptexp("compare", str(directory), str(mine))
    assert compared.returncode == 0, compared.stderr
    assert "branch_from" in compared.stdout
    shutil.rmtree(newest(directory))
    shutil.rmtree(mine)
    (directory / "summary.json").write_text(json.dumps({**summary(directory), "status": "interrupted"}))
    resumed = gptexp("resume", str(directory))
    assert resumed.returncode == 0, resumed.stderr
    assert summary(directory)["steps"] == 15
    asked = gptexp("train", "branch_from=constant@12", "--cfg", "job")
    assert asked.returncode == 2
    assert "--cfg job: shows what files and overrides set" in asked.stderr


@pytest.mark.slow
def test_two_ranks_branch_with_the_bits_of_an_uninterrupted_run(gptexp: Gptexp, corpus: Path, tmp_path: Path) -> None:
    """By default the branch has as many ranks as its run. Its checkpoint is read by all of them."""
    own = [*PARENT, f"data.path={corpus}", "world.size=2", "train.reduction=mean"]
    assert gptexp("train", *own, "hydra.run.dir=parent").returncode == 0
    done = gptexp("train", "branch_from=parent@8", "schedule=wsd", "hydra.run.dir=branch", "log.progress=lines")
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "branch")["world_size"] == 2
    lengths = ["train.max_steps=null", "train.max_tokens=1280", f"schedule.warmup_tokens={WARMUP}"]
    whole = gptexp("train", *own, "schedule=wsd", *lengths, "hydra.run.dir=whole")
    assert whole.returncode == 0, whole.stderr
    same(tmp_path / "branch", tmp_path / "whole", 8)


def test_a_saved_branch_holds_all_that_it_needs(constant: Path) -> None:
    """Its config.yaml is complete: read again, it is the same."""
    config = composed([f"branch_from={constant}@8", "schedule=wsd"])
    assert yaml.safe_load(yaml.safe_dump(to_dict(config))) == to_dict(config)
    assert Parent(constant, config, 8, 1024).name == f"{constant}@8"
