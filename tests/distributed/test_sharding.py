"""`world.sharding`: training with shares of the state equals plain DDP. `sharded_training.py` trains on real ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

from gptexp.config.compose import compose
from gptexp.process.errors import ConfigError

SCRIPT = ROOT / "tests" / "distributed" / "sharded_training.py"


def trained(ranks: int, folder: Path, which: str, *overrides: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(folder), which, *overrides], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("ranks", "which"),
    [
        pytest.param(2, "few", marks=pytest.mark.e2e),
        pytest.param(2, "all", marks=pytest.mark.slow),
        pytest.param(4, "all", marks=pytest.mark.slow),
    ],
)
def test_training_equals_plain_ddp(tmp_path: Path, ranks: int, which: str) -> None:
    """Twenty steps in float32 at lr 6e-4; each sharding also continues from the checkpoint of the other."""
    cases = trained(ranks, tmp_path, which)
    assert len(cases) == (3 if which == "few" else 8)
    for case in cases:
        sharding, _, _, more = case["case"]
        exact, low = sharding == "optimizer", "train.dtype=bfloat16" in more
        assert case["initial weights"] == 0, case
        assert case["loaded"] == 0, case  # a checkpoint is the same, whoever loads it
        # DDP regroups its gradients after the first step of a start, also of one that continues from a checkpoint.
        same_sums = ranks == 2  # the order of sums of more than two then changes
        if sharding == "full" or same_sums:
            assert case["resumed"] == 0, case
        assert case["loss"] <= (0 if exact else 1e-4 if low else 1e-5), case
        assert case["loss after crossing"] <= (0 if exact else 1e-4 if low else 1e-5), case
        assert case["norm"] <= (0 if exact else 0.02 if low else 1e-6), case
        assert case["small norm"] <= (0 if exact else 0.02 if low else 1e-6), case
        if not low:
            assert case["end"] <= (0 if exact and same_sums else 1e-3), case
        assert case["share"] == pytest.approx(1 if exact else 1 / ranks, rel=0.1), case


@pytest.mark.gpu
def test_training_on_gpus_equals_plain_ddp(tmp_path: Path) -> None:
    """By NCCL, whose sums have no fixed order."""
    if (ranks := torch.cuda.device_count()) < 2:
        pytest.skip("needs two GPUs")
    for case in trained(min(ranks, 4), tmp_path, "all", "train.device=cuda"):
        low = "train.dtype=bfloat16" in case["case"][3]
        assert case["initial weights"] == case["loaded"] == 0, case
        assert max(case["loss"], case["loss after crossing"]) <= (1e-3 if low else 1e-5), case
        assert low or max(case["norm"], case["small norm"]) <= 1e-5, case


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["world.sharding=full", "train.reduction=tree"], "train.reduction=tree: adds whole gradients"),
        (["world.sharding=full", "optim=muon"], "world.sharding=full: optim=muon updates whole matrices"),
        (["world.sharding=full", "optim=soap"], "use optim=adamw or sgd or lion or"),
        (["world.sharding=optimizer", "optim=lamb"], "world.sharding=optimizer: optim=lamb is not one optimizer"),
        (["world.sharding=full", "train.eval_tasks=[hellaswag]"], "train.eval_tasks=['hellaswag']: needs the whole"),
        (["world.sharding=full", "train.sharpness_every_tokens=8192"], "train.sharpness_every_tokens=8192: needs"),
        (["world.sharding=half"], "world.sharding=half: must be one of none, optimizer, full"),
        (
            ["train.activation_checkpointing_every=0"],
            "train.activation_checkpointing_every=0: must be above",
        ),
    ],
)
def test_what_a_sharding_cannot_do_is_refused(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose(["world.size=2", *overrides])
    assert [problem for problem in error.value.problems if problem.startswith(line) or line in problem], error.value
