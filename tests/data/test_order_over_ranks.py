"""The data and the loss of a step depend neither on the number of ranks nor on the micro-batch size."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import events
from real_runs import equal, train_here

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

# 12 steps of 512 tokens at lr 6e-4, 5 warm-up steps, one thread per rank.
STEPS = 12
OPTIONS = ["batch.total_batch_size=512", f"train.max_steps={STEPS}", "schedule.warmup_steps=5", "train.eval_every=0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def reference(trained: Path, tiny: list[str]) -> Path:
    """One rank with micro-batches of two sequences."""
    directory = trained / "w1b2"
    if not directory.exists():
        assert train_here([*tiny, *OPTIONS, "batch.micro_batch_size=2"], directory) == 0
    return directory


def check_equal(reference: Path, other: Path) -> None:
    """Check for equal data, and for losses within a relative 1e-5."""
    for kind, keys in (("step", ("train/loss", "optim/grad_norm")), ("eval", ("val/loss",))):
        assert len(events(reference, kind)) == (STEPS if kind == "step" else 1)
        for a, b in zip(events(reference, kind), events(other, kind), strict=True):
            assert a.get("data/fingerprint") == b.get("data/fingerprint")
            for key in keys:
                assert b[key] == pytest.approx(a[key], rel=1e-5), (a["step"], key)


@pytest.mark.parametrize(
    "micro_batch_size", [pytest.param(8, marks=pytest.mark.e2e), pytest.param(4, marks=pytest.mark.slow)]
)
def test_another_micro_batch_size_gives_the_same_losses(
    reference: Path, tiny: list[str], tmp_path: Path, micro_batch_size: int
) -> None:
    overrides = [*tiny, *OPTIONS, f"batch.micro_batch_size={micro_batch_size}"]
    assert train_here(overrides, tmp_path / "out") == 0
    check_equal(reference, tmp_path / "out")


@pytest.mark.slow
def test_shifted_windows_are_the_same_over_ranks_and_for_a_resumed_run(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """Twelve steps read four and a half epochs. The fingerprints of unshifted windows differ from the first step on."""
    short = [*tiny, *OPTIONS, "data.max_tokens=1500", "batch.micro_batch_size=2", "train.save_every=3"]
    shifted = [*short, "data.offset=per_epoch"]
    for argv in (["train", *shifted, "hydra.run.dir=one"], ["train", *shifted, "world.size=2", "hydra.run.dir=two"]):
        done = gptexp(*argv)
        assert done.returncode == 0, done.stderr
    one, two = tmp_path / "one", tmp_path / "two"
    check_equal(one, two)
    assert 4 < events(one, "step")[-1]["epoch"] < 5
    again = tmp_path / "again"
    shutil.copytree(one, again)
    shutil.rmtree(again / "checkpoints/step-00000012")
    (again / "summary.json").unlink()
    done = gptexp("resume", "again")
    assert done.returncode == 0, done.stderr
    check_equal(one, again)
    assert equal(one, again)
    assert train_here(short, tmp_path / "fixed") == 0
    prints = [[event["data/fingerprint"] for event in events(run, "step")] for run in (one, tmp_path / "fixed")]
    assert not {*prints[0]} & {*prints[1]}
    refused = gptexp("train", *short, "data.offset=fixed", "hydra.run.dir=again")
    assert (refused.returncode, "data.offset was per_epoch, now fixed" in refused.stderr) == (2, True), refused.stderr


@pytest.mark.parametrize(
    "world_size", [pytest.param(2, marks=pytest.mark.e2e), pytest.param(4, marks=pytest.mark.slow)]
)
def test_several_ranks_give_the_same_losses_as_one(
    reference: Path, gptexp: Gptexp, tiny: list[str], tmp_path: Path, world_size: int
) -> None:
    overrides = [*tiny, *OPTIONS, "batch.micro_batch_size=2", f"world.size={world_size}"]
    done = gptexp("train", *overrides, "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    check_equal(reference, tmp_path / "out")
