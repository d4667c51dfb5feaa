"""One rank in this process: `gptexp.run.rank.run`, from a directory to a finished or resumed run."""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, events, summary

from gptexp.config.compose import compose
from gptexp.config.schema import Config
from gptexp.distributed.ranks import Rank
from gptexp.model.gpt import GPT
from gptexp.process.signals import REASONS, StopRequest
from gptexp.run.job import Job
from gptexp.run.rank import run
from gptexp.storage import checkpoint
from gptexp.training.evaluation import validation_loss


def train(config: Config, directory: Path, stop: StopRequest | None = None) -> int:
    return run(Job(config, directory, Rank(), stop or StopRequest()))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A run sets the number of threads of this process, and how they treat denormals: restore both."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("command", [["train", "hydra.run.dir=out"], pytest.param(["plan"], marks=pytest.mark.e2e)])
def test_a_start_without_compiling_imports_neither_the_compiler_nor_scipy(
    tiny: list[str], tmp_path: Path, command: list[str]
) -> None:
    """Each takes a second: the compiler, which torch's own optimizers import, and the libraries of reports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gptexp", *command, *tiny, "train.compile=off"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert {"torch", "gptexp.machine.resolve"} <= imported
    assert not {"torch._dynamo", "torch._inductor", "scipy", "wandb"} & imported


def test_denormals_are_zero_in_training(tiny: list[str], tmp_path: Path) -> None:
    assert torch.tensor(2.0**-100) * 2.0**-40 != 0
    assert train(compose([*tiny, "train.max_steps=1"]), tmp_path) == 0
    assert torch.tensor(2.0**-100) * 2.0**-40 == 0


def test_a_run_resumes_before_a_damaged_checkpoint_and_saves_that_step_again(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose([*tiny, "train.max_steps=6", "train.save_every=2", "train.eval_every=0"])
    assert train(config, tmp_path) == 0
    newest = tmp_path / "checkpoints" / "step-00000006"
    weights = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(weights[:-1])
    assert train(config, tmp_path) == 0
    assert "checkpoint skipped" in capsys.readouterr().err
    assert (newest / "model.safetensors").read_bytes() == weights
    assert (checkpoint.load_latest(tmp_path / "checkpoints") or pytest.fail("none"))[1].step == 6
    assert [e["step"] for e in events(tmp_path, "step")] == list(range(6))
    assert summary(tmp_path)["status"] == "completed"


def test_the_process_uses_the_decided_number_of_threads(tiny: list[str], tmp_path: Path) -> None:
    config = compose([*tiny, "world.threads_per_rank=2", "train.max_steps=1"])
    torch.set_num_threads(1)
    train(config, tmp_path)
    assert torch.get_num_threads() == 2


@pytest.mark.e2e
def test_an_evaluation_that_was_due_at_an_interruption_runs_first_after_resuming(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose([*tiny, "train.max_steps=6", "train.eval_every=2", "log.sample_tokens=0"])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    train(config, whole)

    class AfterFourSteps(StopRequest):
        steps = 0

        def flags(self) -> list[float]:
            self.steps += 1
            return [float(self.steps == 4), *[0.0] * (len(REASONS) - 1)]

    assert train(config, parts, AfterFourSteps()) == 130
    assert [e["step"] for e in events(parts, "eval")] == [1]

    delays = iter([2.0])  # of the evaluation that was due

    def slowly(*args: Any) -> float:
        time.sleep(next(delays, 0.0))
        return validation_loss(*args)

    monkeypatch.setattr("gptexp.run.evaluations.validation_loss", slowly)
    assert train(config, parts) == 0
    assert all(
        e["perf/step_ms"] < 2000 for e in events(parts, "step")
    )  # an evaluation does not count as a part of a step
    evaluations = [[(e["step"], e["val/loss"]) for e in events(d, "eval")] for d in (whole, parts)]
    assert [step for step, _ in evaluations[0]] == [1, 3, 5]
    assert evaluations[0] == evaluations[1]
    # Resumed from a checkpoint that was evaluated, nothing is evaluated twice.
    assert train(config, parts) == 0
    assert len(events(parts, "eval")) == 3


def test_a_run_whose_sample_fails_is_completed(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UnicodeEncodeError("ascii", "…", 0, 1, "ordinal not in range")

    monkeypatch.setattr("gptexp.run.rank.complete", fail)
    assert train(compose([*tiny, "log.sample_tokens=4"]), tmp_path) == 0
    assert "gptexp: sampling failed: UnicodeEncodeError" in capsys.readouterr().err
    assert summary(tmp_path)["status"] == "completed"


def test_the_sample_is_computed_in_the_type_of_the_run(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[torch.dtype] = []

    def recorded(model: GPT, *_: object) -> list[str]:
        used.append(model.logits(torch.zeros(1, 4, dtype=torch.long)).dtype)
        return ["a text"]

    monkeypatch.setattr("gptexp.run.rank.complete", recorded)
    for dtype in ("float32", "bfloat16"):
        assert train(compose([*tiny, "log.sample_tokens=4", f"train.dtype={dtype}"]), tmp_path / dtype) == 0
        assert [event["text"] for event in events(tmp_path / dtype, "sample")] == ["a text"]
    assert used == [torch.float32, torch.bfloat16]


def test_garbage_collection_is_off_until_the_first_step_is_done(tiny: list[str], tmp_path: Path) -> None:
    enabled: list[bool] = []

    class Looks(StopRequest):
        def flags(self) -> list[float]:
            enabled.append(gc.isenabled())
            return super().flags()

    config = compose([*tiny, "train.max_steps=3", "train.eval_every=0"])
    assert train(config, tmp_path, Looks()) == 0
    assert enabled == [False, True, True]
    assert train(config, tmp_path) == 0  # nothing is left to train
    assert gc.isenabled()


@pytest.mark.e2e
def test_the_peak_rate_is_measured_once_per_run(gptexp: Any, tiny: list[str], tmp_path: Path) -> None:
    """All attempts use the same number, and the summary names it."""
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
