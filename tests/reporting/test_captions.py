"""What captions say of things that a chart lacks."""

import shutil
from pathlib import Path

import pytest
from sweeps import write_run, write_sweep

from gptexp.reporting.charts.line_charts import GAPS, ZOOM
from gptexp.reporting.page.report import build_report
from gptexp.storage import run_dir

LACKS = ("not shown", "diverged", "No curve", "mpty cell", "Without", "gaps", "stands in", "so far")


def captions(directory: Path) -> dict[str, str]:
    return {figure.key: figure.caption for figure in build_report(directory).figures}


def drop(run: Path, text: str) -> None:
    """Drop the logged lines that hold `text`."""
    lines = (run / run_dir.METRICS).read_text().splitlines(keepends=True)
    (run / run_dir.METRICS).write_text("".join(line for line in lines if text not in line))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A whole grid in which nothing has diverged."""
    root = write_sweep(tmp_path / "sweep", batches=(4096, 8192, 16384), schedule="constant")
    for diverged in root.glob("lr=0.16*"):
        shutil.rmtree(diverged)
    return root


@pytest.mark.e2e
def test_nothing_is_said_of_a_whole_sweep(sweep: Path) -> None:
    found = captions(sweep)
    drawn = {"curves", "loss", "noise-scale", "cosine", "heatmap", "law", "optima", "isoloss", "throughput"}
    assert found.keys() == drawn
    assert [(key, word) for key, text in found.items() for word in LACKS if word in text] == []


@pytest.mark.e2e
def test_runs_without_values_are_counted(sweep: Path) -> None:
    for run in (runs := sorted(sweep.glob("lr=0.04,total_batch_size=4096*"))):
        (run / run_dir.METRICS).unlink()
        (run / run_dir.SUMMARY).unlink()
    found = captions(sweep)
    counted = [key for key, text in found.items() if "2 runs " in text and " are not shown." in text]
    assert counted == ["curves", "loss", "noise-scale", "cosine", "throughput"]
    assert "mpty cell" in found["heatmap"]
    write_run(runs[1], 4096, 0.04, 1338, 4.05, schedule="constant")
    found = captions(sweep)
    assert found["curves"].endswith(" 1 run without a final validation loss is not shown.")
    assert "mpty cell" not in found["heatmap"]


@pytest.mark.e2e
def test_batch_sizes_without_an_optimum_are_named_with_the_reason(sweep: Path) -> None:
    largest = [run for run in sweep.glob("lr=*,total_batch_size=16384*") if not run.name.startswith("lr=0.08")]
    for run in largest:
        shutil.rmtree(run)
    found = captions(sweep)
    assert [key for key, text in found.items() if "16,384 (too few)." in text] == ["curves", "law", "optima"]
    assert "16,384" not in found["isoloss"]
    for run in sweep.glob("lr=*,total_batch_size=16384*"):
        (run / run_dir.SUMMARY).unlink()
    assert captions(sweep)["isoloss"].endswith("no run has completed: 16,384.")


@pytest.mark.e2e
def test_lines_that_end_early_or_have_gaps_are_explained(sweep: Path) -> None:
    write_run(sweep / "high", 4096, 0.16, 1337, None, schedule="constant")
    drop(sweep / "lr=0.02,total_batch_size=4096,seed=1337", '"step": 20,')
    found = captions(sweep)
    assert [key for key, text in found.items() if GAPS in text] == ["loss", "noise-scale", "cosine"]
    assert [key for key, text in found.items() if "diverged." in text] == ["curves", "loss", "heatmap"]


def test_losses_outside_the_axis_are_mentioned(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 4096, 0.02, 1, 4.0)
    assert captions(tmp_path / "run")["loss"].endswith(" lie outside the axis.")
    write_run(tmp_path / "new", 2**18, 0.02, 1, 4.0)  # of one step
    assert captions(tmp_path / "new")["loss"].endswith(ZOOM)


def test_a_chart_of_training_losses_says_that_there_is_no_other(tmp_path: Path) -> None:
    for number in (1, 2):
        write_run(tmp_path / f"sweep/{number}", 4096, 0.02, number, 4.0)
        drop(tmp_path / f"sweep/{number}", '"event": "eval"')
    assert "stands in for the validation loss" in captions(tmp_path / "sweep")["loss"]
    assert "no validation loss so far" in captions(tmp_path / "sweep/1")["loss"]
