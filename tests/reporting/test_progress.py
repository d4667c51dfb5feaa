"""`gptexp status`: the state of each cell of a sweep, and the time until all are completed."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sweeps import TOKENS, write_run

from gptexp.process.words import duration
from gptexp.reporting.listings.progress import Progress, not_started, ready_in, survey
from gptexp.reporting.listings.records import find_runs, read_end, read_run
from gptexp.reporting.page.page import sections
from gptexp.reporting.page.report import build_report
from gptexp.status import main
from gptexp.storage import run_dir, sweep_record

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Six cells: completed, diverged, three stopped after a quarter (interrupted, running, failed), one not started."""
    root = tmp_path / "sweep"
    names = ("a", "b", "c", "d", "e", "f")
    for name, loss in zip(names[:5], (4.0, None, 4.0, 4.0, 4.0), strict=True):
        write_run(root / name, 4096, 0.02, 1, loss)
    for name, status in (("c", "interrupted"), ("d", "running"), ("e", "running")):
        metrics = root / name / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True)
        metrics.write_text("".join(lines[: len(lines) // 4]))
        run_dir.write_json(root / name / "summary.json", {"status": status})
    cells = {name: {"values": {}, "total_batch_size": 4096, "tokens": TOKENS} for name in names}
    run_dir.write_json(root / run_dir.SWEEP, {"name": "sweep", "overrides": [], "cells": cells})
    return root


def test_a_cells_status_follows_from_its_files_and_its_lock(sweep: Path) -> None:
    with run_dir.held(sweep / "d"):
        found = {cell.name: cell for cell in survey(sweep)}
    statuses = {name: cell.status for name, cell in sorted(found.items())}
    assert [*statuses.values()] == ["completed", "diverged", "interrupted", "running", "failed", "left"]
    assert found["f"].seconds_left == pytest.approx(TOKENS / 8e3)  # at the speed of the others
    assert found["d"].tokens == pytest.approx(TOKENS / 4, rel=0.15)
    assert found["d"].seconds_left == pytest.approx(0.75 * TOKENS / 8e3, rel=0.15)
    assert found["a"].seconds_left == found["b"].seconds_left == 0


def test_the_time_left_counts_what_a_run_does_beside_training(sweep: Path) -> None:
    """An ended run knows how long it took with its start and its evaluations; the rate of training is higher."""
    write_run(sweep / "a", 4096, 0.02, 1, 4.0, wall_s=250.0)
    found = {cell.name: cell for cell in survey(sweep)}
    assert found["f"].seconds_left == pytest.approx(250.0, rel=0.01)
    assert found["c"].seconds_left == pytest.approx(0.75 * 250.0, rel=0.15)


def test_a_sweep_between_two_cells_is_going_on(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_dir.lock_sweep(sweep):
        main([str(sweep)])
        assert "restart" not in capsys.readouterr().out
        assert "Nothing yet" in sections(build_report(sweep))["next"]
    main([str(sweep)])
    assert "after a restart" in capsys.readouterr().out


def test_a_planned_cell_has_the_seed_of_the_others(sweep: Path) -> None:
    record = sweep_record.load(sweep)
    [planned] = not_started(sweep, find_runs(sweep), record)
    assert (planned.name, planned.seed, planned.lr) == ("f", 1, 0.02)


def test_the_time_left_is_divided_by_the_cells_that_run_at_once() -> None:
    def cell(status: str, seconds: float | None) -> Progress:
        return Progress("", status, 0, 1, None, seconds)

    assert ready_in([cell("left", 60.0)] * 4) == 240
    assert ready_in([cell("running", 60.0)] * 2 + [cell("left", 60.0)] * 2 + [cell("completed", 0.0)]) == 120
    assert ready_in([cell("running", 600.0), cell("running", 0.0)]) == 600  # the longest cell is not divided
    assert ready_in([cell("left", None)]) is None
    assert ready_in([cell("completed", 0.0)]) == 0


def test_cells_that_optuna_has_yet_to_choose_count_as_left(sweep: Path) -> None:
    run_dir.write_json(sweep / run_dir.SWEEP, {**run_dir.read_json(sweep / run_dir.SWEEP), "to_choose": 3})
    found = survey(sweep)
    assert [cell.name for cell in found if cell.status == "left"] == ["f", *["to be chosen"] * 3]
    assert [cell.seconds_left for cell in found if cell.status == "left"] == [pytest.approx(TOKENS / 8e3)] * 4


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"), (0.0421, "42 ms"), (0.44, "0.4 s"), (59.4, "59 s"), (59.6, "1 min"), (200, "3 min 20 s"),
        (2702, "45 min"), (3599.6, "1 h"), (4800, "1 h 20 min"),
        (86_399, "1.0 days"), (276_480, "3.2 days"), (280_000, "3.2 days"), (730.5 * 86_400, "2.0 years"),
    ],
)  # fmt: skip
def test_a_time_is_shown_in_units_of_its_size(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_time_beyond_all_calendars_is_shown() -> None:
    assert duration(1e17) == duration(float("inf")) == "more than a thousand years"


def test_status_prints_a_line_for_each_cell_and_one_for_all(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(sweep)])
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert last.startswith("1 of 6 cells completed, 1 diverged, 1 interrupted, 2 failed, 1 not started; time left: ")
    assert "after a restart" in last


def test_status_counts_the_cells_that_run(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_dir.held(sweep / "d"), run_dir.held(sweep / "e"):
        main([str(sweep)])
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["running"] * 2
    assert last.startswith("2 of 6 cells running, 1 completed, 1 diverged, 1 interrupted, 1 not started; time left: ")
    assert last.endswith("if as many run at once as now")


def test_status_prints_json_for_scripts(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(sweep), "--json"])
    values = json.loads(capsys.readouterr().out)
    assert len(values["cells"]) == 6
    assert values["ready_in_s"] > 60


def test_status_says_that_all_cells_are_done(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "cdef":
        shutil.rmtree(sweep / name, ignore_errors=True)
    run_dir.write_json(sweep / run_dir.SWEEP, {})
    main([str(sweep)])
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 2 cells completed, 1 diverged; all done"


def test_status_accepts_a_run_and_refuses_a_missing_directory(gptexp: Gptexp, sweep: Path) -> None:
    assert gptexp("status", str(sweep / "a")).returncode == 0
    nowhere = gptexp("status", "nowhere")
    assert (nowhere.returncode, len(nowhere.stderr.splitlines())) == (2, 1)


def test_the_status_of_a_long_run_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its newest evaluation and its speed, but not the steps before."""
    write_run(tmp_path / "run", 64, 0.02, 1, 4.0)  # 4,096 steps, and an evaluation after each 512
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)[:-70]
    metrics.write_text("".join(lines))
    run_dir.write_json(tmp_path / "run" / "summary.json", {"status": "running"})
    monkeypatch.setattr("gptexp.reporting.listings.records.END", 20_000)
    whole, end = read_run(tmp_path / "run"), read_end(tmp_path / "run")
    assert len(end.train) < 100 < len(whole.train)
    assert [end.val[-1].loss, end.tokens_per_s] == [whole.val[-1].loss, whole.tokens_per_s]
    assert end.train[-1].step == json.loads(lines[-1])["step"] + 1
    assert (end.gaps, end.problem) == ([], None)
    [cell] = survey(tmp_path / "run", read_end)
    assert (cell.status, cell.tokens, cell.loss) == ("failed", end.train[-1].tokens, whole.val[-1].loss)
    metrics.write_text("".join(lines[:-10] + lines[-5:]))
    assert "no line for steps" in (read_end(tmp_path / "run").problem or "")
    alert = '{"event": "alert", "step": 4000, "tokens": 9, "text": "more alerts than are read"}\n'
    metrics.write_text("".join(lines) + 400 * alert)
    end = read_end(tmp_path / "run")
    assert (end.train, len(end.val), end.gaps, end.problem) == ([], 1, [], None)
