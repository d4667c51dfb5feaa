"""`gptexp ls`: one row for each run and sweep, its order and filters, damaged directories, and the time it takes."""

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from sweeps import write_run

from gptexp.ls import main
from gptexp.process.errors import ConfigError
from gptexp.reporting.listings.listing import Row, model_name
from gptexp.reporting.listings.records import find_runs
from gptexp.reporting.statistics.best import best_cell
from gptexp.storage import run_dir


def change(directory: Path, **log: Any) -> None:
    """Change keys of the group log in a run's config."""
    path = directory / run_dir.CONFIG
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**config, "log": {**config["log"], **log}}))


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Four runs on two days, a sweep of three cells and one not started, and directories that are neither."""
    root = tmp_path / "outputs"
    write_run(root / "2026-01-01/10-00-00-000000-a", 4096, 0.03, 1, 4.25)
    write_run(root / "2026-01-01/11-00-00-000000-b", 8192, 0.01, 1, 4.5)
    write_run(root / "2026-01-02/10-00-00-000000-c", 4096, 0.02, 2, None)
    write_run(root / "2026-01-02/11-00-00-000000-d", 16384, 0.04, 2, 5.0)
    run_dir.write_json(
        root / "2026-01-02/11-00-00-000000-d/summary.json", {"status": "interrupted", "final_val_loss": 5.5}
    )
    change(root / "2026-01-01/10-00-00-000000-a", tags=["paper", "first try"], note="why")
    change(root / "2026-01-01/11-00-00-000000-b", tags=["paper"])
    for name, lr, loss in (("x", 0.01, 4.2), ("y", 0.02, 4.1), ("z", 0.04, None)):
        write_run(root / "mine" / name, 8192, lr, 1, loss)
    cells = {name: {"values": {}, "total_batch_size": 8192, "tokens": 8192} for name in ("x", "y", "z", "not started")}
    run_dir.write_json(root / "mine" / run_dir.SWEEP, {"name": "mine", "overrides": [], "cells": cells})
    (root / ".removed-17").mkdir()
    shutil.copytree(root / "mine/x", root / ".removed-17/x")
    (root / "notes").mkdir()
    for number, metrics in enumerate(sorted(root.glob("*/*/metrics.jsonl"))):
        metrics.write_text(metrics.read_text().replace("1000000000.0", str(1e9 + 3600 * number)))
    return root


def listed(capsys: pytest.CaptureFixture[str], *argv: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    main([*map(str, argv), "--json"])
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def names(capsys: pytest.CaptureFixture[str], *argv: object) -> list[str]:
    return [row["name"][-1] if row["kind"] == "run" else row["name"] for row in listed(capsys, *argv)]


def test_each_run_and_sweep_is_a_row(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"].rpartition("-")[2]: row for row in listed(capsys, outputs)}
    assert rows.keys() == {"a", "b", "c", "d", "mine"}
    assert {key for row in rows.values() for key in row} == set(Row.__dataclass_fields__)
    a = rows["a"]
    assert (a["kind"], a["status"], a["lr"], a["total_batch_size"], a["val_loss"]) == (
        "run",
        "completed",
        0.03,
        4096,
        4.25,
    )
    assert (a["tags"], a["note"], a["path"]) == (
        ["paper", "first try"],
        "why",
        f"{outputs}/2026-01-01/10-00-00-000000-a",
    )
    assert a["started"] == time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(1e9 + 3600)) + a["started"][19:]
    du = subprocess.run(["du", "-s", "--block-size=1", a["path"]], capture_output=True, text=True, check=True)
    itself = Path(a["path"]).stat().st_blocks * 512
    assert a["size_bytes"] == int(du.stdout.split()[0]) - itself
    assert [rows[name]["status"] for name in "cd"] == ["diverged", "interrupted"]
    assert rows["d"]["val_loss"] == 5.5
    mine = rows["mine"]
    assert (mine["kind"], mine["status"], mine["cells_done"], mine["cells"]) == ("sweep", "interrupted", 3, 4)
    assert (mine["val_loss"], mine["lr"], mine["total_batch_size"]) == (4.1, 0.02, 8192)
    assert sum(row["size_bytes"] for row in listed(capsys, outputs / "mine")) <= mine["size_bytes"]


def test_of_a_sweep_the_cells_are_rows_and_of_a_run_the_run(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert names(capsys, outputs / "mine", "--sort", "name") == ["x", "y", "z"]
    assert names(capsys, outputs / "mine/y") == ["y"]
    assert names(capsys, outputs / "2026-01-02", "--sort=name") == ["c", "d"]
    shutil.rmtree(outputs / "mine/z")
    run_dir.write_json(outputs / "mine" / run_dir.SWEEP, {"name": "mine", "overrides": []})
    [mine] = [row for row in listed(capsys, outputs) if row["kind"] == "sweep"]
    assert (mine["status"], mine["cells_done"], mine["cells"]) == ("completed", 2, 2)


def test_a_sweep_shows_its_lowest_loss_below_a_guess_or_what_its_cells_share(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = outputs / "mine"
    for name, loss in (("x", 12.5), ("y", 13.0)):  # a guess among 50,304 tokens has 10.8
        run_dir.write_json(sweep / name / run_dir.SUMMARY, {"status": "completed", "final_val_loss": loss})
    [mine] = [row for row in listed(capsys, outputs) if row["kind"] == "sweep"]
    assert (mine["val_loss"], mine["lr"], mine["total_batch_size"], mine["model"]) == (None, None, 8192, "gpt2")
    size = subprocess.run(["du", "-s", "--block-size=1", sweep], capture_output=True, text=True, check=True)
    assert mine["size_bytes"] == int(size.stdout.split()[0]) - sweep.stat().st_blocks * 512


@pytest.mark.e2e
def test_a_sweep_shows_the_mean_loss_of_the_cell_that_its_report_calls_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of random sweeps with lucky seeds, a diverged seed, a loss above a guess, and a cell under two names."""
    rng = np.random.default_rng(0)
    for number in range(3):
        sweep, seeds = tmp_path / f"{number}", range(1 + number)
        for lr in (0.01, 0.02, 0.04):
            for batch in (16384, 32768):
                for seed in seeds:
                    loss = rng.normal(4 + 0.01 * math.log2(lr / 0.02) ** 2, 0.05)
                    write_run(sweep / f"{lr}-{batch}-{seed}", batch, lr, seed, loss)
        write_run(sweep / "0.08-0", 16384, 0.08, 0, 3.0)
        write_run(sweep / "0.08-1", 16384, 0.08, 1, (None, 12.5)[number % 2])
        shutil.copytree(best_cell(find_runs(sweep))[0].directory, sweep / "again")
        run_dir.write_json(sweep / run_dir.SWEEP, {"name": f"{number}", "overrides": []})
    for row in listed(capsys, tmp_path):
        best = best_cell(find_runs(Path(row["path"])))
        assert row["val_loss"] == pytest.approx(np.mean([run.loss for run in best if run.loss]))
        assert (row["lr"], row["total_batch_size"]) == (best[0].lr, best[0].batch)


def test_notes_are_shown_and_a_sweep_has_the_note_of_all_its_runs(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("x", "y"):
        change(outputs / "mine" / name, note="longer warm-up")
    notes = {row["name"][-1]: row["note"] for row in listed(capsys, outputs)}
    assert notes == {"a": "why", "b": None, "c": None, "d": None, "e": None}
    change(outputs / "mine/z", note="longer warm-up")
    main([str(outputs)])
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split()[-1] == "note"
    assert [line.rstrip()[-14:] for line in lines if " mine " in line] == ["longer warm-up"]
    monkeypatch.setattr("gptexp.ls.terminal_width", lambda: len(title) - 10)  # it is left out first
    main([str(outputs)])
    narrow = capsys.readouterr().out
    assert "note" not in narrow
    assert "first try" in narrow


def test_a_sweep_whose_runs_have_all_diverged_is_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for lr in (1.0, 2.0):
        write_run(tmp_path / f"mine/{lr}", 16384, lr, 1, None)
    run_dir.write_json(tmp_path / "mine" / run_dir.SWEEP, {"name": "mine", "overrides": []})
    [row] = listed(capsys, tmp_path, "--status", "diverged")
    assert (row["cells_done"], row["cells"], row["val_loss"]) == (2, 2, None)


def test_where_takes_one_value_so_that_the_directory_may_follow(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names(capsys, "--where", "optim.lr=0.03", outputs) == ["a"]


def test_quiet_prints_paths_that_other_commands_find(outputs: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (outputs / "2026-01-01/10-00-00-000000-a").rename(outputs / "a b\udcff")
    main([str(outputs), "-q"])
    paths = capfdbinary.readouterr().out.splitlines()
    assert os.fsencode(outputs / "a b\udcff") in paths
    assert all(map(os.path.exists, paths))


def test_rows_are_sorted_and_a_missing_value_is_last(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (outputs / "2026-01-01/10-00-00-000000-a" / run_dir.CONFIG).write_text("")
    assert names(capsys, outputs) == ["mine", "d", "c", "b", "a"]  # the newest first
    assert names(capsys, outputs, "-r") == ["a", "b", "c", "d", "mine"]
    assert names(capsys, outputs, "--sort=name", "-n", 2) == ["a", "b"]
    assert names(capsys, outputs, "--sort=loss", "-n", 3) == ["mine", "b", "d"]
    assert names(capsys, outputs, "--sort=loss", "--reverse")[:3] == ["d", "b", "mine"]
    assert names(capsys, outputs, "--sort=lr") == ["b", *names(capsys, outputs, "--sort=lr")[1:3], "d", "a"]
    assert names(capsys, outputs, "--sort=batch")[0] == "c"
    assert names(capsys, outputs, "--sort=size")[0] == "mine"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--status", "completed"], "ab"),
        (["--status", "diverged", "--status", "interrupted"], "cde"),
        (["--tag", "paper"], "ab"),
        (["--tag", "paper", "--tag", "first try"], "a"),
        (["--tag", "pap"], ""),
        (["--where", "optim.lr=3e-2"], "a"),
        (["--where", "optim.lr=0.01"], "be"),  # e: the sweep, which has such a cell
        (["--where", "optim.lr=0.01", "--where", "batch.total_batch_size=8192"], "be"),
        (["--where", "optim.lr=0.01", "--where", "batch.total_batch_size=8k"], "be"),
        (["--where", "optim.lr=0.01", "--where", "optim.lr=0.02"], ""),
        (["--where", "model.n_layer=12", "--where", "train.seed=2"], "cd"),
        (["--where", "log.tags=first try"], "a"),
        (["--where", "log.note=null", "--where", "train.deterministic=false", "--tag", "paper"], "b"),
        (["--where", "train.deterministic=0"], None),
        (["--where", "schedule.name=cosine", "--where", "data.max_tokens=null"], "abcde"),
    ],
)
def test_a_filter_shows_exactly_the_rows_that_hold_it(
    outputs: Path, capsys: pytest.CaptureFixture[str], argv: list[str], expected: str | None
) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="must be of type bool"):
            main([str(outputs), *argv])
    else:
        assert sorted(name.replace("mine", "e") for name in names(capsys, outputs, *argv)) == [*expected]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--where", "lr=1"], "unknown key 'lr'; did you mean 'optim.lr'?"),
        (["--where", "optim.lr=x"], "optim.lr=x: must be of type float"),
        (["--where", "train.seed=1m"], "train.seed=1m: must be of type int"),
        (["--where", "optim.lr"], "--where optim.lr: must be key=value"),
        (["-n", "0"], "--limit=0: must be 1 or above"),
    ],
)
def test_a_wrong_filter_is_refused(outputs: Path, argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        main([str(outputs), *argv])
    assert said in str(refused.value)


def test_a_running_run_shows_its_newest_loss(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = outputs / "2026-01-02/11-00-00-000000-d"
    with (run / run_dir.METRICS).open("a") as metrics:
        for step in range(1000):
            metrics.write(json.dumps({"event": "step", "step": step, "padding": "x" * 200}) + "\n")
            if step == 400:
                metrics.write(json.dumps({"event": "eval", "val/loss": 3.21}) + "\n")
        metrics.write('{"event": "eval", "val/loss": 1.')  # a line that is being written
    with run_dir.held(run):
        [row] = listed(capsys, outputs, "--status", "running")
        assert (row["name"][-1], row["val_loss"]) == ("d", 3.21)
        (outputs / "mine/x" / run_dir.LOCK).touch()
    with run_dir.held(outputs / "mine/x"):
        assert names(capsys, outputs, "--status=running") == ["mine"]


def test_damaged_directories_are_named_and_stop_nothing(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (outputs / "2026-01-01/10-00-00-000000-a" / run_dir.CONFIG).write_text("\x00")
    (outputs / "2026-01-01/11-00-00-000000-b" / run_dir.SUMMARY).write_text("[")
    (outputs / "mine" / run_dir.SWEEP).write_text("[")
    assert names(capsys, outputs, "--status", "damaged", "--sort=name") == ["a", "b", "mine"]
    main([str(outputs)])
    said = capsys.readouterr()
    assert said.out.count("damaged") == 3
    assert all(name in said.err for name in (run_dir.CONFIG, run_dir.SUMMARY, run_dir.SWEEP))
    assert len(said.err.splitlines()) == 3


def test_the_copy_of_conf_is_no_run(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gptexp.config.paths import conf_dir

    shutil.copytree(conf_dir(), outputs / "conf")
    assert "conf" not in [row["name"] for row in listed(capsys, outputs)]


def test_names_cannot_control_the_terminal(outputs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = outputs / "2026-01-01/10-00-00-000000-a"
    run.rename(outputs / "bad\x1b[31m\nname\udcff")
    change(outputs / "mine/x", tags=["\x1b[2J"])
    for argv in ([], ["--json"]):
        main([str(outputs), *argv])
        out = capfd.readouterr().out
        assert "\x1b" not in out
        assert "bad" in out
        assert argv == ["--json"] or len(out.splitlines()) == 5 + (not argv)


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, None])
def test_no_digit_is_cut_on_a_narrow_terminal(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int | None
) -> None:
    monkeypatch.setattr("gptexp.ls.terminal_width", lambda: width)
    main([str(outputs)])
    out = capsys.readouterr().out
    assert "\u2026" not in out
    assert max(map(len, out.splitlines())) <= (width or 10_000)
    if width is None or width >= 40:
        assert all(text in out for text in ("4.2500", "4.5000", "4.1000"))
    if width is None or width >= 120:
        assert all(text in out for text in ("16,384", "0.04"))
    assert ("first try" in out) == (width is None)


@pytest.mark.parametrize(("width", "whole"), [(40, False), (60, True), (80, True)])
def test_other_columns_are_left_out_before_the_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, whole: bool
) -> None:
    names = [f"2026-01-02/0{number}-04-05-678901-gpt2_124m" for number in range(2)]
    for name in names:
        write_run(tmp_path / name, 16384, 0.0006, 1, 4.25)
    monkeypatch.setattr("gptexp.ls.terminal_width", lambda: width)
    main([str(tmp_path)])
    out = capsys.readouterr().out
    for name in names:
        assert (name if whole else name[:24]) in out
    assert out.count("4.2500") == 2
    assert ("learning rate" in out) == (width == 80)


def test_without_runs_a_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path}: no runs yet\n"
    assert listed(capsys, tmp_path) == []
    main([str(tmp_path), "-q"])
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigError, match="no such directory"):
        main([str(tmp_path / "nowhere")])


@pytest.mark.parametrize(
    ("verb", "argv", "said"),
    [
        (main, [], "outputs: no runs yet\n"),
        (main, ["--json"], "[]\n"),
        (main, ["-q"], ""),
    ],
)
def test_before_the_first_run_the_default_directory_need_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    verb: Callable[[list[str]], int | None], argv: list[str], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert not verb(argv)
    assert capsys.readouterr() == (said, "")
    with pytest.raises(ConfigError, match="outputs: no such directory"):
        verb(["outputs", *argv])


def test_a_model_has_the_name_of_its_option_or_its_sizes() -> None:
    from gptexp.config.compose import compose

    def name(*overrides: str) -> str:
        return model_name(compose([*overrides, "model.vocab_size=50304"]).model)

    for option in ("nano", "gpt2", "gpt2_xl"):
        assert name(f"model={option}") == option
    assert name("model=nano", "model.dropout=0.1") == "nano"
    assert name("model=nano", "model.n_layer=3") == "3x2x32"


HEAVY = {"torch", "numpy", "scipy", "hydra", "omegaconf", "wandb", "pandas"}


@pytest.mark.parametrize("runs", [100, pytest.param(1000, marks=pytest.mark.e2e)])
def test_a_thousand_runs_take_seconds_and_no_heavy_package(outputs: Path, tmp_path: Path, runs: int) -> None:
    run = outputs / "2026-01-01/10-00-00-000000-a"
    for number in range(runs):
        shutil.copytree(run, tmp_path / f"many/2026-01-01/{number:04}", copy_function=shutil.copyfile)
    script = (
        "import sys\nfrom gptexp.ls import main\n"
        f"main([{str(tmp_path / 'many')!r}])\n"
        f"print(sorted({HEAVY} & sys.modules.keys()), file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert (done.stderr, len(done.stdout.splitlines())) == ("[]\n", runs + 1)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"gptexp ls of {runs:,} runs: {cpu_s:.1f} s of CPU time")
    assert cpu_s < 1 + 0.009 * runs  # half of it; with yaml's own parser three times as much
