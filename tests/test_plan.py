"""`gptexp plan -m`: the whole grid, what is illegal in it, and how long it takes, before anything runs."""

import itertools
import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptexp import calibrate
from gptexp.batch import BatchPlan
from gptexp.calibrate import Sample
from gptexp.compose import compose, compose_sweep
from gptexp.config import Config
from gptexp.plan import add_times, makespan, plan, plan_sweep

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

GRID = ["batch.total_batch_size=4096,10000,16384", "optim.lr=1e-3,2e-3"]


def test_every_cell_is_what_it_would_be_by_itself() -> None:
    grid = compose_sweep(GRID)
    cells = plan_sweep(grid.drafts)
    assert len(cells) == grid.of == 6
    for cell, (batch, lr) in zip(cells, itertools.product((4096, 10000, 16384), (1e-3, 2e-3)), strict=True):
        assert {key: float(value) for key, value in cell["values"].items()} == {
            "batch.total_batch_size": batch, "optim.lr": lr
        }  # fmt: skip
        if batch == 10000:
            assert cell["plan"] is None
            assert "nearest batch: 8,192 or 10,240" in cell["problems"][0]
        else:
            alone = plan(compose([f"batch.total_batch_size={batch}", f"optim.lr={lr}"]))
            alone["effective"]["reasons"] = cell["plan"]["effective"]["reasons"]  # probes may time differently
            assert cell["plan"] == alone


def test_one_sample_serves_all_cells_of_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models and three batch sizes: two samples, of the runs with the most micro-steps."""
    sampled: list[tuple[int, int]] = []

    def sample(cfg: Config, batch: BatchPlan, effective: dict[str, Any]) -> Sample:
        sampled.append((cfg.model.n_layer, batch.grad_accum_steps))
        return Sample(start_s=2.0, first_s=1.0, step_s=0.3, micro_s=0.1, micro_steps=2)

    monkeypatch.setattr(calibrate, "sample", sample)
    grid = compose_sweep(["batch.total_batch_size=2048,8192,4096", "model.n_layer=1,2", "train.max_tokens=81920"])
    cells = plan_sweep(grid.drafts)
    add_times([(d.config, c["plan"]) for d, c in zip(grid.drafts, cells, strict=True) if d.config is not None])
    assert sorted(sampled) == [(1, 4), (2, 4)]
    steps = {cell["plan"]["total_batch_size"]: cell["plan"]["time"]["step_s"] for cell in cells}
    assert steps == {2048: pytest.approx(0.2), 4096: pytest.approx(0.3), 8192: pytest.approx(0.5)}


def test_the_makespan_is_that_of_a_queue() -> None:
    draw = random.Random(0)
    for _ in range(50):
        times, places = [draw.uniform(1, 9) for _ in range(draw.randint(1, 12))], draw.randint(1, 4)
        free = [0.0] * places
        for duration in times:  # a brute-force queue
            place = free.index(min(free))
            free[place] += duration
        assert makespan(times, places) == pytest.approx(max(free))
    assert makespan([1.0, 2.0, 3.0], 1) == 6


def test_the_table_names_what_is_illegal_and_starts_nothing(gptexp: Gptexp, tmp_path: Path) -> None:
    done = gptexp("plan", "-m", *GRID)
    assert done.returncode == 2
    assert done.stdout.count("illegal") == 2
    assert "nearest batch: 8,192 or 10,240 (cell batch.total_batch_size=10000 optim.lr=0.001 and 1 more)" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
    values = json.loads(gptexp("plan", "sweep=lr", "--json").stdout)
    assert len(values["cells"]) == values["of"] == 7
    optuna = gptexp("plan", "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=9", "optim.lr=interval(1e-3,1e-2)")
    assert optuna.returncode == 0, optuna.stderr
    assert "9 cells, 3,686,400 tokens in all; chosen by Optuna" in optuna.stdout
    none = gptexp("plan", "-m", "model=glob(gpt9*)")
    assert (none.returncode, none.stderr) == (
        2, "gptexp: config error: the sweep has no cells; give at least one value of each swept key\n"
    )  # fmt: skip
    jobs = gptexp("plan", "-m", "optim.lr=1e-3,2e-3,4e-3", "hydra/launcher=submitit_slurm")
    assert "3 cells, 1,228,800 tokens in all, 3 at once" in jobs.stdout
    confounded = gptexp("plan", "-m", GRID[0].replace("10000,", ""), "schedule.warmup_steps=5")
    assert "warning: schedule.warmup_steps=5 counts steps" in confounded.stderr
