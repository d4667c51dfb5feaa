"""The HTML of a page's parts, and of the index, without a browser."""

import json
from pathlib import Path

import pytest
from sweeps import TOKENS, write_run, write_sweep

from gptexp.reporting.page.index import Entry, build_index
from gptexp.reporting.page.page import index_sections, sections
from gptexp.reporting.page.report import build_report
from gptexp.reporting.page.write import show
from gptexp.storage import run_dir

HOSTILE = "<img src=x onerror=alert(1)>"
FIRST, SECOND = ["train", "-m", "optim.lr=0.01,0.02"], ["train", "-m", "optim.lr=0.02,0.04", "sweep.name=a b"]
SHOWN = ["gptexp train -m optim.lr=0.01,0.02", "gptexp train -m optim.lr=0.02,0.04 &#39;sweep.name=a b&#39;"]


def label(run: Path, tags: list[str], note: str | None = None) -> None:
    config = run_dir.load_config(run)
    config.log.tags, config.log.note = tags, note
    run_dir.save_config(run, config)


def html_of(directory: Path) -> dict[str, str]:
    return sections(build_report(directory))


def test_tags_and_notes_are_shown_and_escaped(tmp_path: Path) -> None:
    one, two, three = (tmp_path / f"sweep/{name}" for name in "abc")
    for lr, run in ((0.01, one), (0.02, two), (0.03, three)):
        write_run(run, 4096, lr, 1, 4.0)
    assert "<dt>Tags" not in html_of(one)["header"]
    label(one, ["base", HOSTILE, "first"], f"why {HOSTILE}")
    label(two, [HOSTILE, "second", "base"], "another note")
    label(three, [HOSTILE])
    escaped = HOSTILE.replace("<", "&lt;").replace(">", "&gt;")
    header = html_of(one)["header"]
    assert f"<dt>Tags</dt><dd>base, {escaped}, first</dd>" in header
    assert f"<dt>Note</dt><dd>why {escaped}</dd>" in header
    of_sweep = html_of(tmp_path / "sweep")
    assert f"<dt>Tags</dt><dd>{escaped}</dd>" in of_sweep["header"]  # what all share
    assert "<dt>Note" not in of_sweep["header"]
    assert f"<p>Tags: base, {escaped}, first</p>" in of_sweep["runs"]
    assert f"<p>Tags: {escaped}, second, base</p>" in of_sweep["runs"]
    assert not any("<img" in html for html in (header, *of_sweep.values()))
    label(one, [])  # edited while the page is open
    assert "<dt>Tags" not in html_of(one)["header"]


def test_a_bracket_is_green_only_if_the_noise_is_known(tmp_path: Path) -> None:
    for lr, loss in ((0.01, 5.0), (0.02, 4.0), (0.04, 5.0)):
        write_run(tmp_path / f"{lr}", 4096, lr, 1, loss)
    unknown = html_of(tmp_path)["verdict"]
    write_run(tmp_path / "second seed", 4096, 0.02, 2, 4.01)
    assert '<span class="badge good">bracketed</span>' in html_of(tmp_path)["verdict"]
    assert '<span class="badge plain">bracketed</span> <span class="badge plain">noise unknown</span>' in unknown


def write_stopped(root: Path, commands: list[list[str]]) -> Path:
    """A sweep of which one run has completed, one was interrupted, and one has not started. Returns the second."""
    for lr, status in ((0.01, "completed"), (0.02, "interrupted")):
        write_run(root / f"lr={lr}", 4096, lr, 1337, 4.0, status=status)
    cells = {f"lr={lr}": {"values": {"optim.lr": str(lr)}, "total_batch_size": 4096, "tokens": TOKENS}
             for lr in (0.01, 0.02, 0.04)}  # fmt: skip
    run_dir.write_json(root / run_dir.SWEEP, {"name": "sweep", "overrides": [], "cells": cells, "commands": commands})
    return root / "lr=0.02"


def test_the_terminal_shows_the_command_of_a_stopped_sweep_and_none_for_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted = write_stopped(tmp_path, [FIRST])
    show(build_report(tmp_path))
    assert SHOWN[0] in capsys.readouterr().out
    with run_dir.held(interrupted):
        show(build_report(interrupted))
    assert "still to finish" not in capsys.readouterr().out


def test_a_sweep_that_has_stopped_goes_on_with_its_command(tmp_path: Path) -> None:
    interrupted = write_stopped(tmp_path, [FIRST])
    html = html_of(tmp_path)
    assert "The sweep has stopped with 2 cells left. Its command goes on with them:" in html["next"]
    assert SHOWN[0] in html["next"]
    assert "Earlier commands" not in html["header"]
    with run_dir.held(interrupted):
        assert "Nothing yet: 2 cells still to finish, time left " in html_of(tmp_path)["next"]


def test_a_head_names_what_is_planned_too(tmp_path: Path) -> None:
    write_run(tmp_path / "lr=0.01", 4096, 0.01, 1337, 4.0)
    cells = {f"lr={lr}": {"values": {"optim.lr": str(lr)}, "total_batch_size": 4096, "tokens": TOKENS}
             for lr in (0.01, 0.04)}  # fmt: skip
    run_dir.write_json(tmp_path / run_dir.SWEEP, {"name": "sweep", "overrides": [], "cells": cells})
    header = html_of(tmp_path)["header"]
    assert "learning rate</h1>" in header
    assert "<dt>Learning rate</dt><dd>0.01, 0.04</dd>" in header
    assert "seed" not in header


def test_of_several_commands_each_goes_on_with_its_cells_and_the_newest_is_on_top(tmp_path: Path) -> None:
    """The newest one alone would leave the cells of the earlier one as they are."""
    write_stopped(tmp_path, [FIRST, SECOND])
    html = html_of(tmp_path)
    assert "Several commands made it, the newest is the last one." in html["next"]
    assert -1 < html["next"].index(SHOWN[0]) < html["next"].index(SHOWN[1])
    newest, earlier = html["header"].split("Earlier commands of this sweep")
    assert SHOWN[1] in newest
    assert SHOWN[0] not in newest
    assert SHOWN[0] in earlier
    assert SHOWN[1] not in earlier


def test_a_sweep_that_is_done_does_not_go_on(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "sweep", batches=(4096,), seeds=1)
    record = json.loads((root / run_dir.SWEEP).read_text())
    run_dir.write_json(root / run_dir.SWEEP, {**record, "commands": [FIRST, SECOND]})
    assert "has stopped" not in html_of(root)["next"]


def entries(outputs: Path) -> dict[str, Entry]:
    return {entry.row.name: entry for entry in build_index(outputs).entries}


def test_the_index_says_how_much_of_a_running_row_is_done(tmp_path: Path) -> None:
    run, cell = tmp_path / "a run", write_stopped(tmp_path / "sweep", [FIRST])
    write_run(run, 4096, 0.02, 1, 4.0)
    for directory in (run, cell):
        lines = (directory / run_dir.METRICS).read_text().splitlines(keepends=True)
        cut = next(number for number, line in enumerate(lines) if '"step": 16,' in line)
        half_a_number = lines[cut][: lines[cut].index('"tokens": ') + 12]  # as if it were being written
        (directory / run_dir.METRICS).write_text("".join(lines[:cut]) + half_a_number)  # 16 of 64 steps
    assert {entry.share for entry in entries(tmp_path).values()} == {None}
    with run_dir.held(run), run_dir.held(cell):
        running = entries(tmp_path)
        assert running["a run"].share == 0.25
        assert running["sweep"].share == pytest.approx(1.25 / 3)  # one cell of three is done
        assert "</span> 25%" in index_sections(build_index(tmp_path))["runs"]
        (run / run_dir.METRICS).unlink()
        assert entries(tmp_path)["a run"].share == 0
    edited = run_dir.load_config(cell)
    edited.branch_from = f"{run}@8"
    run_dir.save_config(cell, edited)
    with run_dir.held(cell):
        assert entries(tmp_path)["sweep"].share == pytest.approx((1 + 8 / 56) / 3)  # of a branch, its own steps


def test_rows_of_the_index_are_found_by_name_model_status_and_tags(tmp_path: Path) -> None:
    write_run(tmp_path / "My run", 4096, 0.02, 1, 4.0)
    label(tmp_path / "My run", ["Ablation", '"><b>'])
    entry = entries(tmp_path)["My run"]
    assert entry.searched.split() == ["my", "run", entry.row.model, "completed", "ablation", '"><b>']
    assert "<b>" not in index_sections(build_index(tmp_path))["runs"]
