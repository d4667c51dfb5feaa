"""One rank, in this process: `gptexp.run.run` on a run directory that already holds something."""

import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import events, summary

from gptexp import checkpoint
from gptexp.compose import compose
from gptexp.distributed import Rank
from gptexp.evaluate import evaluate
from gptexp.run import run
from gptexp.signals import StopRequest


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The threads that a run sets are the process's own: put them back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_run_goes_on_before_a_damaged_checkpoint_and_saves_that_step_anew(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose([*tiny, "train.max_steps=6", "train.save_every=2", "train.eval_every=0"])
    assert run(config, tmp_path, StopRequest(), Rank()) == 0
    newest = tmp_path / "checkpoints" / "step-00000006"
    weights = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(weights[:-1])
    assert run(config, tmp_path, StopRequest(), Rank()) == 0
    assert "passed over" in capsys.readouterr().err
    assert (newest / "model.safetensors").read_bytes() == weights
    assert (checkpoint.load_latest(tmp_path / "checkpoints") or pytest.fail("none"))[1].step == 6
    assert [e["step"] for e in events(tmp_path, "step")] == list(range(6))
    assert summary(tmp_path)["status"] == "completed"


def test_what_was_decided_is_what_the_process_runs_with(tiny: list[str], tmp_path: Path) -> None:
    config = compose([*tiny, "world.threads_per_rank=2", "train.max_steps=1"])
    torch.set_num_threads(1)
    run(config, tmp_path, StopRequest(), Rank())
    assert torch.get_num_threads() == 2


def test_an_evaluation_that_an_interruption_put_off_is_made_first(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose([*tiny, "train.max_steps=6", "train.eval_every=2", "log.sample_tokens=0"])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    run(config, whole, StopRequest(), Rank())

    class AfterFourSteps(StopRequest):
        steps = 0

        def flags(self) -> list[float]:
            self.steps += 1
            return [float(self.steps == 4), 0.0, 0.0, 0.0]

    assert run(config, parts, AfterFourSteps(), Rank()) == 130
    assert [e["step"] for e in events(parts, "eval")] == [1]

    def slowly(*args: Any) -> float:
        time.sleep(2)
        return evaluate(*args)

    monkeypatch.setattr("gptexp.trainer.evaluate", slowly)
    assert run(config, parts, StopRequest(), Rank()) == 0
    assert all(e["perf/step_ms"] < 2000 for e in events(parts, "step"))  # it is no part of a step's time
    evaluations = [[(e["step"], e["val/loss"]) for e in events(d, "eval")] for d in (whole, parts)]
    assert [step for step, _ in evaluations[0]] == [1, 3, 5]
    assert evaluations[0] == evaluations[1]
    # Done again from a checkpoint that was evaluated, nothing is evaluated twice.
    assert run(config, parts, StopRequest(), Rank()) == 0
    assert len(events(parts, "eval")) == 3


def test_a_failing_sample_is_no_failed_run(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UnicodeEncodeError("ascii", "…", 0, 1, "ordinal not in range")

    monkeypatch.setattr("gptexp.sample.complete", fail)
    assert run(compose([*tiny, "log.sample_tokens=4"]), tmp_path, StopRequest(), Rank()) == 0
    assert "gptexp: no sample: UnicodeEncodeError" in capsys.readouterr().err
    assert summary(tmp_path)["status"] == "completed"


def test_garbage_is_collected_again_once_a_step_was_made(tiny: list[str], tmp_path: Path) -> None:
    enabled: list[bool] = []

    class Looks(StopRequest):
        def flags(self) -> list[float]:
            enabled.append(gc.isenabled())
            return super().flags()

    config = compose([*tiny, "train.max_steps=3", "train.eval_every=0"])
    assert run(config, tmp_path, Looks(), Rank()) == 0
    assert enabled == [False, True, True]
    assert run(config, tmp_path, StopRequest(), Rank()) == 0  # nothing is left to train
    assert gc.isenabled()


def test_a_measured_peak_is_measured_once(gptexp: Any, tiny: list[str], tmp_path: Path) -> None:
    """MFU of all attempts is a share of the same number, and says of which."""
    out = tmp_path / "out"
    done = gptexp("train", *tiny, "train.save_every=2", "log.mfu_peak=measured", "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    effective = json.loads((out / "effective.json").read_text())
    mfu = summary(out)["mfu"]
    assert mfu["peak_flops_per_s"] == effective["peak_flops_per_rank"] > 1e8
    last = events(out, "step")[-1]
    assert last["perf/mfu_palm"] == pytest.approx(
        last["perf/tokens_per_s"] * mfu["flops_per_token_palm"] / mfu["peak_flops_per_s"]
    )
    (out / "checkpoints/step-00000004").rename(out / "checkpoints/gone")
    (out / "effective.json").write_text(json.dumps({**effective, "peak_flops_per_rank": 1e12}))
    (out / "summary.json").write_text(json.dumps({**summary(out), "status": "running"}))
    assert gptexp("resume", "out").returncode == 0
    assert summary(out)["mfu"]["peak_flops_per_s"] == 1e12
