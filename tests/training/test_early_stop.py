"""`train.stop_at_loss` and `train.patience_tokens` end a run at an evaluation, as if it had been planned so."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import events, summary
from real_runs import equal, newest, train_here

from gptexp.config.compose import compose
from gptexp.distributed.ranks import Rank
from gptexp.process.errors import ConfigError
from gptexp.process.signals import StopRequest
from gptexp.reporting.listings.progress import survey
from gptexp.run.job import Job
from gptexp.run.rank import run
from gptexp.storage import run_dir

EVERY = ["train.max_steps=12", "train.eval_every=2", "schedule=constant", "schedule.warmup_tokens=0"]


def trained(tiny: list[str], directory: Path, *overrides: str) -> list[dict[str, float]]:
    """Train a run; its evaluations."""
    argv = [*tiny, *EVERY, "data.tokenizer=bytes", "optim.lr=1e-2", *overrides]
    run_dir.save_config(directory, compose(argv))
    assert train_here(argv, directory) == 0
    return events(directory, "eval")


def test_a_run_ends_at_the_first_evaluation_at_or_below_the_loss(tiny: list[str], tmp_path: Path) -> None:
    whole = trained(tiny, tmp_path / "whole")
    target = whole[2]["val/loss"] + 1e-9
    stopped = trained(tiny, tmp_path / "stopped", f"train.stop_at_loss={target!r}")
    assert [e["val/loss"] for e in stopped] == [e["val/loss"] for e in whole[: len(stopped)]]
    assert stopped[-1]["val/loss"] <= target < min(e["val/loss"] for e in stopped[:-1])
    about = summary(tmp_path / "stopped")
    assert (about["status"], about["final_val_loss"]) == ("completed", stopped[-1]["val/loss"])
    [alert] = [e for e in events(tmp_path / "stopped", "alert") if e["about"] == "early stop"]
    assert "train.stop_at_loss" in alert["text"]
    [progress] = survey(tmp_path / "stopped")
    assert (progress.share, progress.seconds_left) == (1.0, 0.0)
    short = trained(tiny, tmp_path / "short", f"train.max_steps={newest(tmp_path / 'stopped').name[-2:].lstrip('0')}")
    assert len(short) == len(stopped)
    assert equal(tmp_path / "stopped", tmp_path / "short")


def test_all_evaluations_are_measured_after_an_early_stop(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "early.py").write_text("def one(model, tokenizer, batches):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = ["train.evaluations=[{_target_: early.one}]", "log.progress=lines"]
    found = trained(tiny, tmp_path / "run", "train.stop_at_loss=100", *own)
    assert [e["eval/one"] for e in found if "eval/one" in e] == [1.0]
    assert summary(tmp_path / "run")["status"] == "completed"
    printed = capsys.readouterr().out
    assert "eval/one: 1.0000" in printed
    assert "train.stop_at_loss=100" in printed
    assert "warning" not in printed


def test_a_run_ends_after_so_many_tokens_without_a_lower_loss(tiny: list[str], tmp_path: Path) -> None:
    """With a learning rate that spoils the weights: the first loss stays the lowest."""
    found = trained(tiny, tmp_path / "run", "optim.lr=10", "train.patience_tokens=500", "train.divergence_nats=null")
    lowest = min(range(len(found)), key=lambda i: found[i]["val/loss"])
    assert found[-1]["tokens"] - found[lowest]["tokens"] >= 500
    assert len(found) == 1 or found[-2]["tokens"] - found[lowest]["tokens"] < 500
    assert found[-1]["tokens"] < 12 * 128
    assert summary(tmp_path / "run")["status"] == "completed"


def test_a_run_that_has_stopped_early_does_not_go_on(tiny: list[str], tmp_path: Path) -> None:
    """Also if it was killed after its last checkpoint, before its summary was written."""
    found = trained(tiny, tmp_path / "run", "train.stop_at_loss=100")
    assert len(found) == 1
    again = shutil.copytree(tmp_path / "run", tmp_path / "again")
    (again / "summary.json").unlink()
    assert run(Job(run_dir.load_config(again), again, Rank(), StopRequest())) == 0
    assert newest(again).name == newest(tmp_path / "run").name
    assert len(events(again, "step")) == 2


def test_a_run_that_was_interrupted_before_its_last_evaluation_ends_after_it(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal comes in the step before an evaluation, which then finds that the run ends."""
    (tmp_path / "late.py").write_text("def one(model, tokenizer, batches):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = ["train.evaluations=[{_target_: late.one}]", "train.stop_at_loss=100"]
    argv, directory = [*tiny, *EVERY, "data.tokenizer=bytes", *own], tmp_path / "run"
    run_dir.save_config(directory, compose(argv))

    class AfterTwoSteps(StopRequest):
        asked = 0

        def flags(self) -> list[float]:
            self.asked += 1
            return [float(self.asked == 2), *super().flags()[1:]]

    assert train_here(argv, directory, AfterTwoSteps()) == 130
    assert events(directory, "eval") == []
    assert train_here(argv, directory) == 0
    assert [alert["about"] for alert in events(directory, "alert")] == ["early stop"]
    assert [e["eval/one"] for e in events(directory, "eval") if "eval/one" in e] == [1.0]
    assert (summary(directory)["status"], len(events(directory, "step"))) == ("completed", 2)


def test_early_stops_are_refused_in_a_sweep_of_learning_rates(
    gptexp: Callable[..., subprocess.CompletedProcess[str]], tiny: list[str]
) -> None:
    for key in ("train.stop_at_loss=3", "train.patience_tokens=1k"):
        refused = gptexp("plan", "-m", *tiny, "optim.lr=1e-3,2e-3", key)
        assert refused.returncode == 2
        assert "[early-stop-in-sweep]" in refused.stderr
        assert gptexp("plan", "-m", *tiny, "train.seed=1,2", key).returncode == 0
    with pytest.raises(ConfigError) as caught:
        compose([*tiny, "train.stop_at_loss=3", "data.val_tokens=0"])
    assert caught.value.code == "validation-off"
