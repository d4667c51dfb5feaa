"""`continue_from`: a finished run warms up again, and decays again."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import BYTES, TINY, ForkServer, clean, events, summary
from real_runs import equal, newest
from safetensors.torch import load_file

from gptexp.config.compose import compose
from gptexp.config.schedule import Schedule, resolve_schedule
from gptexp.config.schema import BatchConfig, Config, ScheduleConfig
from gptexp.process.errors import ConfigError
from gptexp.storage import branch, run_dir

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
RUN = (
    *TINY, *BYTES, "optim.lr=1e-2", "model.dropout=0.1", "train.max_steps=8", "train.save_every=4",
    "train.eval_every=4",
)  # fmt: skip
composed = partial(compose, find_parent=branch.find)


@pytest.fixture(scope="module")
def finished(torch_server: ForkServer, corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps that has decayed. The tests of this file share it: read it, never write to it."""
    folder = tmp_path_factory.mktemp("parent")
    argv = ["train", *RUN, f"data.path={corpus}", "hydra.run.dir=finished"]
    done = torch_server.ask(argv, folder, clean(os.environ, cache), timeout=240)
    assert done["code"] == 0, done["stderr"]
    return folder / "finished"


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant", "inverse_sqrt"])
def test_a_schedule_that_begins_later_is_one_of_a_shorter_run(name: str) -> None:
    plain = Schedule(name, 1000, 9000, 0.1, 0.2, "1-sqrt")
    later = replace(plain, begin_tokens=5000)
    for tokens in range(0, 12_000, 100):
        assert later.lr_factor(5000 + tokens, 100) == plain.lr_factor(tokens, 100)
    assert later.warmup_ends == later.lr_factor(5900, 100) * 6000
    assert later.peak_ends in (plain.peak_ends, 5000 + plain.peak_ends)


def test_it_goes_on_with_weights_moments_and_data_at_a_new_learning_rate(
    finished: Path, tmp_path: Path, gptexp: Gptexp
) -> None:
    own = ["train", f"continue_from={finished}", "train.max_steps=20", "train.keep_last=0", "hydra.run.dir=out"]
    again = ["optim.lr=5e-3", "schedule.warmup_steps=2", "log.progress=lines"]
    stopped = gptexp(*own, *again, "train.max_minutes=1e-9")
    assert (stopped.returncode, summary(tmp_path / "out")["status"]) == (0, "interrupted"), stopped.stderr
    assert f"continue_from={finished}@8; its peak is 0.5 of that run's" in stopped.stdout
    assert gptexp("train", "--like", "out", "--dry-run").returncode == 0
    assert gptexp(*own, *again).returncode == 0
    assert gptexp(*own[:-1], *again, "hydra.run.dir=at_once").returncode == 0
    assert equal(tmp_path / "out", tmp_path / "at_once"), "a run that is stopped and resumed has other bits"
    steps = events(tmp_path / "at_once", "step")
    assert [e["step"] for e in steps] == [*range(8, 20)]
    text = f"data.path={run_dir.load_config(finished).data.path}"
    schedule = Schedule("cosine", 256, 12 * 128, 0.1, 0.2, "linear")
    assert [e["optim/lr"] for e in steps] == [pytest.approx(5e-3 * schedule.lr_factor(128 * n, 128)) for n in range(12)]
    assert gptexp("train", *RUN, text, "train.max_steps=20", "hydra.run.dir=whole").returncode == 0
    assert events(tmp_path / "whole", "step")[-1]["data/fingerprint"] == steps[-1]["data/fingerprint"]
    first = load_file(tmp_path / "at_once/checkpoints/step-00000008/optimizer.safetensors")
    before = load_file(newest(finished) / "optimizer.safetensors")
    assert all(torch.equal(first[name], before[name]) for name in before)


def test_without_a_warm_up_or_a_decay_it_is_an_exact_branch(finished: Path, tmp_path: Path, gptexp: Gptexp) -> None:
    """A run at a constant learning rate, and its continuation at that rate, have the bits of one whole run."""
    constant = ["schedule=constant", "schedule.warmup_tokens=0"]
    text = f"data.path={run_dir.load_config(finished).data.path}"
    for steps, name in ((8, "half"), (16, "whole")):
        assert (
            gptexp("train", *RUN, text, *constant, f"train.max_steps={steps}", f"hydra.run.dir={name}").returncode == 0
        )
    done = gptexp("train", "continue_from=half", "train.max_steps=16", "hydra.run.dir=rest")
    assert done.returncode == 0, done.stderr
    assert equal(tmp_path / "rest", tmp_path / "whole")
    cooldown = composed([f"branch_from={tmp_path / 'rest'}", "schedule=wsd"])
    assert (cooldown.schedule.begin_tokens, cooldown.run_length[0]) == (8 * 128, 18)


@pytest.mark.e2e
def test_learning_rates_of_a_continuation_are_swept(finished: Path, tmp_path: Path, gptexp: Gptexp) -> None:
    own = ["train", "-m", f"continue_from={finished}", "train.max_steps=12", "optim.lr=2e-3,4e-3,8e-3"]
    done = gptexp(*own, "sweep.name=anew")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "outputs/anew/report.json").read_text())
    assert sorted(run["lr"] for run in report["runs"]) == [2e-3, 4e-3, 8e-3]
    assert {len(events(tmp_path / "outputs/anew" / run["run"], "step")) for run in report["runs"]} == {4}
    again = gptexp(*own, "sweep.name=anew")
    assert again.returncode == 0
    assert len(list((tmp_path / "outputs/anew").glob("lr=*"))) == 3


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["train.max_steps=8"], "branch-too-short"),
        (["train.max_steps=12", "branch_from=latest"], "two-starts"),
        (["train.max_steps=12", "schedule.begin_tokens=512"], "begin-not-taken"),
        (["train.max_steps=12", "schedule.warmup_tokens=4k"], "warmup-too-long"),
        (["train.max_steps=12", "optim.weight_decay=0.2"], "branch-differs"),
        (["train.max_steps=12", "batch.total_batch_size=256"], "branch-differs"),
        (["train.max_steps=12", "data.tokenizer=gpt2"], "branch-differs"),
    ],
)
def test_what_a_continuation_cannot_have_is_one_line(finished: Path, overrides: list[str], code: str) -> None:
    with pytest.raises(ConfigError) as refused:
        composed([f"continue_from={finished}", *overrides])
    assert code in [problem.code for problem in refused.value.problems]


def test_errors_propose_it_where_no_exact_branch_is_possible(finished: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        composed([f"branch_from={finished}", "train.max_steps=12"])
    assert (refused.value.code, "continue_from" in str(refused.value)) == ("branch-with-other-lr", True)
    from gptexp.storage.continuation import check_same

    longer = run_dir.load_config(finished)
    longer.train.max_steps = 12
    with pytest.raises(ConfigError, match=f"continue_from={finished}"):
        check_same(finished, longer)


def test_lengths_in_steps_count_from_the_checkpoint_on_a_ramp_too(finished: Path) -> None:
    batch = BatchConfig(1024, 1, 16, ramp_from_tokens=128, ramp_tokens=4096)
    cfg = Config(batch=batch, schedule=ScheduleConfig(warmup_steps=3, begin_tokens=batch.step_sizes.tokens_after(8)))
    sizes, schedule = batch.step_sizes, resolve_schedule(cfg, 100_000)
    factors = [schedule.lr_factor(sizes.tokens_after(n), sizes.at(sizes.tokens_after(n))) for n in (8, 9, 10, 11)]
    assert factors[0] < factors[1] < factors[2] == 1.0 == pytest.approx(factors[3], rel=0.01)


def test_mappings_of_the_command_line_are_taken_over(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The cat sees fish. " * 100)
    own = [f"continue_from={finished}", "train.max_steps=12"]
    of_text = [f"data.validation={{a: {tmp_path / 'a.txt'}}}", "sweep.objective=val/a/loss"]
    config = composed([*own, *of_text, "user.team=b"])
    assert (config.data.validation, config.user) == ({"a": str(tmp_path / "a.txt")}, {"team": "b"})
    assert composed([*own, "log.wandb.init={job_type: x}"]).log.wandb.init == {"job_type": "x"}


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_the_peak_is_a_share_of_the_learning_rate(name: str) -> None:
    whole, half = (Schedule(name, 1000, 9000, 0.1, 0.2, "linear", peak_ratio=share) for share in (1.0, 0.5))
    assert [half.lr_factor(t, 100) for t in range(0, 1000, 100)] == [
        pytest.approx(0.5 * whole.lr_factor(t, 100)) for t in range(0, 1000, 100)
    ]
    assert half.lr_factor(1000, 100) == pytest.approx(0.5)
    assert half.lr_factor(9000, 100) == (0.5 if name == "constant" else pytest.approx(0.1))


def test_its_lengths_count_from_the_checkpoint_and_the_rest_is_that_of_the_run(finished: Path) -> None:
    config = composed([f"continue_from={finished}@4", "train.max_steps=14"])
    before = run_dir.load_config(finished)
    assert (config.schedule.begin_tokens, config.branch_from) == (4 * 128, f"{finished}@4")
    assert config.optim == before.optim
    assert config.schedule.warmup_ratio == before.schedule.warmup_ratio
    again = composed([f"continue_from={finished}@4", "train.max_steps=14", "schedule=wsd", "schedule.warmup_ratio=0.3"])
    assert (again.schedule.name, again.schedule.warmup_ratio) == ("wsd", 0.3)
    with pytest.raises(ConfigError) as refused:
        composed([*RUN, f"data.path={before.data.path}", "schedule.begin_tokens=512"])
    assert refused.value.code == "begin-not-taken"
