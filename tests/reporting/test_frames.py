"""Tables of runs and sweeps: every logged number is in them, once, and nothing else."""

import json
import math
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from conftest import events
from sweeps import write_run, write_sweep

from gptexp import load_metrics, load_sweep
from gptexp.config.metrics import Metric
from gptexp.process.errors import ConfigError
from gptexp.reporting.listings import frames
from gptexp.reporting.page.write import write_report
from gptexp.storage import run_dir


def write_metrics(directory: Path, lines: list[dict[str, Any]]) -> Path:
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def step(number: int, **metrics: Any) -> dict[str, Any]:
    at = {"time": 1e9, "step": number, "tokens": 8 * (number + 1)}
    return {"event": "step", **at, "train/loss": 1 / (number + 1), "data/fingerprint": f"{number:016x}", **metrics}


def evaluation(number: int) -> dict[str, Any]:
    return {"event": "eval", "time": 2e9, "step": number, "tokens": 8 * (number + 1), "val/loss": 2.0 + number}


def test_the_table_of_a_real_run_has_every_logged_number(finished_run: Path) -> None:
    table = load_metrics(finished_run)
    steps, evaluations = events(finished_run, "step"), events(finished_run, "eval")
    assert len(table) == len(steps) == 4
    assert {*table.columns} <= {*Metric}
    for row, event in zip(table.to_dict("records"), steps, strict=True):
        logged = {**next((e for e in evaluations if e["step"] == event["step"]), {}), **event}
        del logged["event"]
        assert {name: row[name] for name, value in logged.items() if value is not None} == {
            name: value for name, value in logged.items() if value is not None
        }
        assert all(math.isnan(row[name]) for name in {*row} - {k for k, v in logged.items() if v is not None})
    others = {*table.columns} - {"step", "tokens", "data/fingerprint"}
    assert {str(table[name].dtype) for name in others} == {"float64"}
    assert table["step"].dtype == table["tokens"].dtype == "int64"
    [run] = load_sweep(finished_run).to_dict("records")
    assert [*table.iloc[-1][["step", "tokens"]] + [1, 0]] == [run["steps"], run["tokens"]]
    assert "`step + 1`" in str(load_metrics.__doc__)


def test_no_step_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps than the report keeps, in several batches of rows; an evaluation may follow the last of a batch."""
    monkeypatch.setattr(frames, "ROWS_AT_ONCE", 7)
    lines = [line for number in range(1200) for line in (step(number), evaluation(number))[: 1 + (number % 3 == 0)]]
    table = load_metrics(write_metrics(tmp_path, lines))
    assert table["step"].tolist() == [*range(1200)]
    assert table["train/loss"].tolist() == [1 / (number + 1) for number in range(1200)]
    assert table["val/loss"].dropna().tolist() == [2.0 + number for number in range(0, 1200, 3)]
    assert {*table["time"]} == {1e9}


def test_an_evaluation_of_a_step_that_was_not_logged_has_a_row(tmp_path: Path) -> None:
    fault = {"event": "fault", "step": 3, "tokens": 32, "text": "x"}
    lines = [step(0), evaluation(2), fault, step(3, **{"train/loss": None}), fault, evaluation(3)]
    table = load_metrics(str(write_metrics(tmp_path, lines)))
    assert table[["step", "tokens"]].values.tolist() == [[0, 8], [2, 24], [3, 32]]
    assert table["train/loss"].isna().tolist() == [False, True, True]
    assert table["val/loss"].fillna(0).tolist() == [0, 4, 5]


def test_sharpness_is_in_the_row_of_its_step(tmp_path: Path) -> None:
    measured = {"event": "sharpness", "time": 3e9, "step": 1, "tokens": 16, "sharpness/hessian": 7.0,
                "sharpness/preconditioned": None}  # fmt: skip
    table = load_metrics(write_metrics(tmp_path, [step(0), step(1), evaluation(1), measured, step(2)]))
    assert table["step"].tolist() == [0, 1, 2]
    assert table["sharpness/hessian"].fillna(0).tolist() == [0, 7, 0]
    assert table["sharpness/preconditioned"].isna().all()
    assert table["val/loss"].fillna(0).tolist() == [0, 3, 0]


def test_both_losses_can_be_plotted_over_tokens(finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    axes = load_metrics(finished_run).plot(x="tokens", y=["train/loss", "val/loss"], style=".")
    for line, kind in zip(axes.get_lines(), ("step", "eval"), strict=True):
        logged = [(event["tokens"], event[line.get_label()]) for event in events(finished_run, kind)]
        points = zip(line.get_xdata(), line.get_ydata(), strict=True)
        assert [(x, y) for x, y in points if isinstance(y, float)] == logged  # a masked value is none
        assert line.get_marker() == "."


def test_a_table_needs_little_more_memory_than_its_numbers(finished_run: Path, tmp_path: Path) -> None:
    [last] = events(finished_run, "step")[-1:]
    lines = [{**last, "step": number, "data/fingerprint": f"{number:016x}"} for number in range(4000)]
    write_metrics(tmp_path, lines)
    tracemalloc.start()
    try:
        table = load_metrics(tmp_path)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.5 * table.memory_usage(deep=True).sum()


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", "7", '"step"', "null", "{}", '{"event": "step"}', '{"event": "step", "step": 1}',
        '{"event": "step", "step": -1, "tokens": 8}', '{"event": "eval", "step": 1.5, "tokens": 8}',
        '{"event": "step", "step": 1, "tokens": "8"}', '{"event": "step", "step": 1, "tokens": 10000000000000000000}',
        '{"event": "step", "step": 1, "tokens": 8, "train/loss": "x"}',
        '{"event": "step", "step": 1, "tokens": 8, "train/loss": NaN}',
        '{"event": "step", "step": 1, "tokens": 8, "train/loss": [1]}',
        '{"event": "step", "step": 1, "tokens": 8, "train/loss": 1e999}',
        '{"event": "step", "step": 1, "tokens": 8, "data/fingerprint": [1]}',
        '{"event": "step", "step": 1, "tokens": 8, "x": ' + "[" * 100_000, "\xff", "",
    ],
)  # fmt: skip
def test_a_line_that_is_no_event_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    write_metrics(tmp_path, [step(0)])
    with (tmp_path / "metrics.jsonl").open("a", encoding="latin-1") as file:
        file.write(f"{line}\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: line 2 is not a valid event; remove it$"):
        load_metrics(tmp_path)


def test_a_line_that_is_still_being_written_is_skipped(tmp_path: Path) -> None:
    write_metrics(tmp_path, [step(0), step(1)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')
    assert load_metrics(tmp_path)["step"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "cannot be read (No such file or directory); give the directory of a run"),
        (lambda path: path.mkdir(), "cannot be read (not a regular file); give the directory of a run"),
        (lambda path: path.symlink_to(__file__), "a link, and links are not followed"),
        (lambda path: path.touch(), "no step has been logged yet"),
    ],
    ids=["missing", "a directory", "a link", "empty"],
)
def test_a_run_without_metrics_is_refused(tmp_path: Path, make: Callable[[Path], None], why: str) -> None:
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError) as refused:
        load_metrics(tmp_path)
    assert why in str(refused.value)


@pytest.mark.e2e
@pytest.mark.usefixtures("without_pictures")
def test_the_table_of_a_sweep_is_that_of_the_report(tmp_path: Path) -> None:
    """With the runs that diverged, that are damaged, and whose numbers are unknown."""
    root = write_sweep(tmp_path / "sweep", batches=(8192, 16384))
    damaged, unknown, *_ = sorted(root.glob("lr=*"))
    (damaged / "config.yaml").write_text("model: [")
    (unknown / "summary.json").unlink()
    config = yaml.safe_load((unknown / "config.yaml").read_text())
    config["optim"]["beta2"] = 0.99
    (unknown / "config.yaml").write_text(yaml.safe_dump(config))
    write_report(root)
    table, written = load_sweep(root), pd.read_csv(root / "cells.csv")
    assert len(table) == 22
    assert [*table.columns] == [*written.columns, "problem", "directory"]
    assert "optim.beta2" in written.columns
    pd.testing.assert_frame_equal(table[[*written.columns]], written, check_dtype=False)
    assert table["directory"].tolist() == sorted(root.glob("lr=*"))
    first, *others = table["problem"]
    assert "config.yaml" in first
    assert not any(map(isinstance, others, [str] * len(others)))
    assert {str(table[name].dtype) for name in ("lr", "final_val_loss", "mfu_palm", "train_h")} == {"float64"}
    best = table.loc[table["final_val_loss"].idxmin()]
    assert load_metrics(best["directory"])["val/loss"].dropna().iloc[-1] == best["final_val_loss"]


def test_swept_keys_that_change_no_result_have_a_column(tmp_path: Path) -> None:
    """A key has the type of the config; the choice of a group stays text. A cell that has not started has no row."""
    cells = {}
    for size in (1, 2, 4):
        name = f"size={size}"
        cells[name] = {"values": {"world.size": f"{size}", "model": "nano", "optim.lr": "0.02"}}
        cells[name].update(total_batch_size=8192, tokens=2**18)
        if size < 4:
            write_run(tmp_path / name, 8192, 0.02, 1, 4.0)
            config = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
            config["world"]["size"] = size
            (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config))
    run_dir.write_json(tmp_path / run_dir.SWEEP, {"name": "sizes", "overrides": [], "cells": cells})
    table = load_sweep(str(tmp_path))
    assert table[["run", "world.size", "model"]].values.tolist() == [["size=1", 1, "nano"], ["size=2", 2, "nano"]]
    assert "optim.lr" not in table.columns  # it is `lr`
    (tmp_path / "size=1" / "config.yaml").write_text("")
    assert load_sweep(tmp_path)["status"].tolist() == ["damaged", "completed"]


def test_a_run_alone_is_a_table_of_one_row(finished_run: Path) -> None:
    [row] = load_sweep(finished_run).to_dict("records")
    assert (row["status"], row["directory"]) == ("completed", finished_run)


def test_a_directory_without_a_readable_sweep_is_refused(tmp_path: Path, finished_run: Path) -> None:
    with pytest.raises(ConfigError, match="contains no run; give the directory of a run or a sweep"):
        load_sweep(tmp_path)
    shutil.copytree(finished_run, tmp_path / "run")
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(ConfigError, match=r"sweep\.json: not JSON"):
        load_sweep(tmp_path)


@pytest.mark.parametrize("load", [load_metrics, load_sweep])
def test_without_pandas_the_command_that_installs_it_is_named(
    finished_run: Path, load: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"pandas is not installed: pip install 'gptexp\[pandas\]'"):
        load(finished_run)


@pytest.mark.e2e
def test_the_package_lists_its_public_names_without_loading_torch_or_pandas() -> None:
    script = """
import sys, gptexp
assert dir(gptexp) == sorted(gptexp.__all__) and {"__version__", "load_metrics", "load_run", "train"} <= {*dir(gptexp)}
assert not {"torch", "pandas"} & sys.modules.keys()
gptexp.load_sweep, gptexp.load_metrics
assert not {"torch", "pandas"} & sys.modules.keys()
sys.modules["pandas"] = None
from gptexp import *
assert all(map(callable, (load_metrics, load_run, load_sweep, compose, train, sweep, tune, report)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
