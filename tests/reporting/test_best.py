"""The best run of a sweep: of those that count in a report."""

import math
from pathlib import Path

import pytest
from sweeps import write_run, write_sweep

from gptexp.process.errors import CheckpointError
from gptexp.reporting.listings.records import find_runs
from gptexp.reporting.statistics.analysis import analyse
from gptexp.reporting.statistics.best import best_cell, one_run
from gptexp.storage import run_dir


@pytest.mark.e2e
def test_it_has_the_lowest_loss_at_any_batch_size_and_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The brute-force minimum of a sweep, in which each loss belongs to one run."""
    sweep = write_sweep(tmp_path / "sweep", batches=(8192, 16384))
    losses = {run.loss: run.name for run in find_runs(sweep) if run.loss is not None}
    best = losses[min(losses)]
    assert one_run(sweep) == sweep / best
    assert capsys.readouterr().err == (
        f"gptexp: {sweep}: its best run is {best}, with a validation loss of {min(losses):.4f}\n"
    )


def test_a_run_is_its_own_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", 4096, 0.02, 1, None)
    assert one_run(tmp_path / "run") == tmp_path / "run"
    assert capsys.readouterr().err == ""


def test_the_best_cell_is_that_of_the_report(tmp_path: Path) -> None:
    """The lowest mean over seeds, in which one lucky run of another cell does not count."""
    for lr, losses in {0.01: (4.0, 4.2), 0.02: (4.05, 4.06), 0.04: (4.2, 4.3)}.items():
        for seed, loss in enumerate(losses):
            write_run(tmp_path / f"{lr}-{seed}", 4096, lr, seed, loss)
    runs = find_runs(tmp_path)
    assert [run.name for run in best_cell(runs)] == [run.name for run in analyse("", runs).best_runs]
    assert [run.name for run in best_cell(runs)] == ["0.02-0", "0.02-1"]


@pytest.mark.e2e
@pytest.mark.parametrize("better", [0.95, 0.99])
def test_of_two_arms_the_one_with_the_lowest_mean_has_the_best_cell(tmp_path: Path, better: float) -> None:
    for beta2 in (0.95, 0.99):
        for lr, loss in ((0.01, 4.1), (0.02, 4.0)):
            directory = tmp_path / f"{beta2}-{lr}"
            write_run(directory, 16384, lr, 1, loss if beta2 == better else loss + 0.05)
            config = run_dir.load_config(directory)
            config.optim.beta2 = beta2
            run_dir.save_config(directory, config)
    analysis = analyse("", find_runs(tmp_path))
    assert analysis.best_arm is not None
    assert analysis.best_arm.choices == {"optim.beta2": better}
    assert [run.name for run in analysis.best_runs] == [f"{better}-0.02"]


def test_of_equal_learning_rates_the_batch_size_decides(tmp_path: Path) -> None:
    for batch, loss in ((8192, 4.1), (16384, 4.0), (32768, 4.1)):
        for seed in (1, 2):
            write_run(tmp_path / f"{batch}-{seed}", batch, 0.02, seed, loss + 0.001 * seed)
    assert [run.name for run in analyse("", find_runs(tmp_path)).best_runs] == ["16384-1", "16384-2"]


def test_a_run_that_the_report_leaves_out_does_not_win(tmp_path: Path) -> None:
    """One seed far below the others of its cell."""
    for lr in (0.005, 0.01, 0.02, 0.04, 0.08):
        for seed in range(4):
            loss = 4 + 0.02 * math.log2(lr / 0.02) ** 2 + 0.001 * seed
            write_run(tmp_path / f"{lr}-{seed}", 4096, lr, seed, 3.0 if (lr, seed) == (0.08, 2) else loss)
    runs = find_runs(tmp_path)
    [arm] = analyse("", runs).arms
    assert [run.name for run, _ in arm.outliers] == ["0.08-2"]  # otherwise this test shows nothing
    assert [run.name for run in best_cell(runs)] == ["0.02-0", "0.02-1", "0.02-2", "0.02-3"]


def test_runs_that_count_as_diverged_do_not_win(tmp_path: Path) -> None:
    """Also one that completed, far above a guess; and the other seed of a cell that diverged does not count."""
    write_run(tmp_path / "diverged", 4096, 0.08, 1, None)
    write_run(tmp_path / "its seed", 4096, 0.08, 2, 3.0)
    write_run(tmp_path / "above a guess", 4096, 0.04, 1, 13.0)
    with pytest.raises(CheckpointError, match="of its 3 runs, none has completed with a validation loss that counts"):
        one_run(tmp_path)
    write_run(tmp_path / "other", 4096, 0.02, 1, 4.0)
    assert one_run(tmp_path) == tmp_path / "other"
