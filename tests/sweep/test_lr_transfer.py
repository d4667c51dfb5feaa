"""`experiment=lr_transfer`: its cells, a short version of it with its report, and what it shows at width 512."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sweeps import compose_sweep

from gptexp.reporting.listings.records import find_runs
from gptexp.reporting.page.report import build_report
from gptexp.reporting.statistics.analysis import analyse

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
ARMS = {
    f"model.n_embd={width}, model.parametrisation={name}" for width in (64, 128, 256) for name in ("mup", "standard")
}


@pytest.mark.e2e
def test_six_arms_have_five_learning_rates_three_seeds_and_heads_of_one_size() -> None:
    configs = [drafted.config for drafted in compose_sweep(["experiment=lr_transfer"]).drafts]
    cells = {
        (c.model.parametrisation, c.model.n_embd, c.model.base_n_embd, c.optim.lr, c.train.seed) for c in configs if c
    }
    assert len(configs) == len(cells) == 90
    middles = {
        "standard": {64: 5e-3, 128: 2.5e-3, 256: 1.25e-3},
        "mup": {64: 5e-3, 128: 5e-3, 256: 5e-3},
    }
    assert cells == {
        (name, width, 64 if name == "mup" else None, middle * 2.0**octave, seed)
        for name, of_width in middles.items()
        for width, middle in of_width.items()
        for octave in (-2, -1, 0, 1, 2)
        for seed in (1337, 1338, 1339)
    }
    assert {c.model.n_embd / c.model.n_head for c in configs if c} == {16}
    assert {c.model.base_n_head for c in configs if c and c.model.base_n_embd} == {4}


def test_a_command_for_one_arm_has_each_of_its_cells_once() -> None:
    """Such as the report proposes: its arguments replace the values of all six grids."""
    arm = ["model.parametrisation=mup", "model.base_n_embd=64", "model.base_n_head=4"]
    wide = ["model.n_embd=512", "model.n_head=32"]
    grid = compose_sweep(["experiment=lr_transfer", *arm, *wide, "optim.lr=4e-2,8e-2", "train.seed=1"])
    assert len(grid.drafts) == grid.of == 2
    assert [drafted.problems for drafted in grid.drafts] == [[], []]


@pytest.mark.slow
def test_a_short_version_has_an_arm_for_each_width_in_both_parametrisations(gptexp: Gptexp, tmp_path: Path) -> None:
    """Two runs an arm, too short for an optimum. At the base the losses of both parametrisations are equal."""
    own = ["optim.lr=1e-3,1.6e-2", "train.seed=1", "train.max_tokens=5120", "data.val_tokens=512", "log=disabled"]
    done = gptexp("train", "-m", "experiment=lr_transfer", *own, timeout=900)
    assert done.returncode == 0, done.stderr
    arms = analyse("", find_runs(tmp_path / "outputs/lr_transfer")).arms
    losses = {arm.label: {run.lr: run.loss for run in arm.runs} for arm in arms}
    assert losses.keys() == ARMS
    assert {len(of_arm) for of_arm in losses.values()} == {2}
    equal = [losses[f"model.n_embd=64, model.parametrisation={name}"] for name in ("mup", "standard")]
    assert equal[0] == equal[1]
    assert build_report(tmp_path / "outputs/lr_transfer").further


@pytest.mark.slow
def test_at_width_512_the_best_learning_rate_of_width_64_is_best_in_mup_only(gptexp: Gptexp, tmp_path: Path) -> None:
    """At the learning rate that is best for width 64, and at a quarter and at four times that."""
    own = ["train.max_tokens=102400", "train.seed=1337", "log=disabled"]
    wide = ["model.n_embd=512", "model.n_head=32", "optim.lr=1.25e-3,5e-3,2e-2"]
    for sizes in (["optim.lr=1.25e-3,5e-3,2e-2", "model.n_embd=64", "model.n_head=4"], wide):
        done = gptexp("train", "-m", "experiment=lr_transfer", *own, *sizes, timeout=3000)
        assert done.returncode == 0, done.stderr
    losses = {
        (run.config["model.parametrisation"], run.config["model.n_embd"], run.lr): run.loss or 99.0
        for run in find_runs(tmp_path / "outputs/lr_transfer")
    }
    print(losses)

    def best(name: str, width: int) -> float:
        return min((loss, lr) for (n, w, lr), loss in losses.items() if (n, w) == (name, width))[1]

    assert best("standard", 64) == best("mup", 64) == best("mup", 512) == 5e-3
    assert best("standard", 512) == 1.25e-3
