"""Whole runs with `world.sharding`: what they log, save and sample equals a run of plain DDP."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from conftest import events, summary

Gptexp = Callable[..., CompletedProcess[str]]

AVERAGED = ["train.ema_half_life_tokens=500", "model.dropout=0.1"]
FREE = ["optim=schedulefree", "schedule=constant", "optim.lr=0.01"]
COMMON = ["world=ddp2", "train.max_steps=8", "train.eval_every=2", "train.save_every=4", "log.sample_tokens=8",
          "log.progress=lines", "train.keep_last=0", "batch.micro_batch_size=2"]  # fmt: skip


def trained(gptexp: Gptexp, tiny: list[str], name: str, *more: str) -> tuple[Path, CompletedProcess[str]]:
    done = gptexp("train", *tiny, *COMMON, *more, f"hydra.run.dir={name}", timeout=500)
    assert done.returncode == 0, done.stderr + done.stdout
    return Path(name), done


def sample_of(output: str) -> str:
    return output.split("--- a sample\n")[1].split("---")[0]


def curves(directory: Path) -> list[float]:
    steps = [event["train/loss"] for event in events(directory, "step")]
    names = ("val/loss", "val/loss_ema")
    return steps + [event[name] for event in events(directory, "eval") for name in names if name in event]


@pytest.mark.parametrize(
    ("sharding", "more"),
    [
        pytest.param("full", AVERAGED, marks=pytest.mark.e2e),
        pytest.param("full", FREE, marks=pytest.mark.slow),
        # Without dropout: a compiled block draws other numbers than a compiled model.
        pytest.param("full", [AVERAGED[0], "train.compile=on"], marks=pytest.mark.slow),
        pytest.param("full", [*AVERAGED, "optim=lion", "train.nonfinite=rollback"], marks=pytest.mark.slow),
        pytest.param("optimizer", AVERAGED, marks=pytest.mark.slow),
    ],
)
def test_a_run_logs_saves_and_samples_the_same(
    tmp_path: Path, gptexp: Gptexp, tiny: list[str], sharding: str, more: list[str]
) -> None:
    if "optim=adamw" not in more:
        pytest.importorskip("pytorch_optimizer", reason="no pytorch_optimizer; pip install 'gptexp[optim]'")
    plain, said = trained(gptexp, tiny, "plain", *more)
    split, also_said = trained(gptexp, tiny, "split", *more, f"world.sharding={sharding}")
    expected = curves(tmp_path / plain)
    assert len(expected) >= 8 + 4
    assert curves(tmp_path / split) == pytest.approx(expected, rel=1e-5)
    unknown = {event["perf/reduce_ms"] is None for event in events(tmp_path / split, "step")}
    assert unknown == {sharding == "full"}
    assert sample_of(also_said.stdout) == sample_of(said.stdout)
    assert f"sharding        {sharding}: " in also_said.stdout
    checkpoints = tmp_path / split / "checkpoints"
    assert [path.name for path in sorted(checkpoints.iterdir())] == ["step-00000004", "step-00000008"]
    names = {path.name for path in (checkpoints / "step-00000008").iterdir()}
    assert ("model-00002-of-00002.safetensors" in names) == (sharding == "full")
    assert "optimizer-00002-of-00002.safetensors" in names

    # As if it had been stopped in the middle, it goes on with one rank that has everything.
    shutil.rmtree(checkpoints / "step-00000008")
    stopped = {**summary(tmp_path / split), "status": "interrupted"}
    (tmp_path / split / "summary.json").write_text(json.dumps(stopped))
    done = gptexp("resume", str(split), "--world-size", "1", "--sharding", "none", timeout=500)
    assert done.returncode == 0, done.stderr
    assert curves(tmp_path / split) == pytest.approx(expected, rel=1e-5)
    assert summary(tmp_path / split)["status"] == "completed"
    assert (checkpoints / "step-00000008" / "optimizer.safetensors").exists()


@pytest.mark.e2e
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_split_model_samples_in_the_type_of_the_run(gptexp: Gptexp, tiny: list[str], dtype: str) -> None:
    _, done = trained(gptexp, tiny, "split", "world.sharding=full", f"train.dtype={dtype}")
    assert "sampling failed" not in done.stderr
    assert sample_of(done.stdout).strip()
