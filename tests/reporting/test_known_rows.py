"""Rows of `gptexp ls` that earlier calls have read: they are those that a new reading finds, whatever has changed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from sweeps import write_run

from gptexp.reporting.listings import known_rows, listing
from gptexp.reporting.listings.known_rows import KnownRows
from gptexp.reporting.listings.listing import list_runs, read_row
from gptexp.storage import run_dir

Rows = list[listing.Listed]


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs and a sweep of two, whose files were written long ago, and an empty cache."""
    monkeypatch.setattr("gptexp.reporting.listings.known_rows.user_cache_dir", lambda: tmp_path / "cache")
    for name, lr, loss in (("day/a", 0.01, 4.0), ("day/b", 0.02, None), ("sweep/x", 0.01, 4.2), ("sweep/y", 0.02, 4.1)):
        write_run(tmp_path / "outputs" / name, 4096, lr, 1, loss)
    cells = {name: {"values": {}, "total_batch_size": 4096, "tokens": 8192} for name in ("x", "y")}
    run_dir.write_json(tmp_path / "outputs/sweep" / run_dir.SWEEP, {"name": "s", "overrides": [], "cells": cells})
    settle(tmp_path / "outputs", 1e9)
    return tmp_path / "outputs"


def settle(directory: Path, at: float) -> None:
    """Let everything in a directory have changed at a time that is long ago."""
    for path in (directory, *directory.rglob("*")):
        os.utime(path, (at, at))


def read_by(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Rows, list[str]]:
    """The rows that a new call finds, and the names of the runs whose files it has read."""
    names: list[str] = []

    def counted(path: Path, name: str) -> listing.Listed:
        names.append(path.name)
        return read_row(path, name)

    monkeypatch.setattr("gptexp.reporting.listings.known_rows.read_row", counted)
    known = KnownRows(directory)
    rows = list_runs(directory, known.read)
    known.save()
    return rows, names


def test_a_second_call_reads_no_run_and_finds_the_same_rows(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list_runs(outputs)
    assert read_by(outputs, monkeypatch) == (expected, ["a", "b", "x", "y"])
    assert read_by(outputs, monkeypatch) == (expected, [])
    assert read_by(outputs / "sweep", monkeypatch) == (list_runs(outputs / "sweep"), [])
    monkeypatch.chdir(outputs.parent)
    assert read_by(Path("outputs"), monkeypatch) == (list_runs(Path("outputs")), [])  # their paths are relative


def _append(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "eval", "step": 1, "tokens": 8, "val/loss": 1.5}\n')


def _retag(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "log": {**config["log"], "note": "new"}}))


CHANGES: list[Callable[[Path], object]] = [
    _append,
    _retag,
    lambda run: run_dir.write_json(run / "summary.json", {"status": "interrupted"}),
    lambda run: (run / "summary.json").unlink(),
    lambda run: (run / "config.yaml").write_text("model: ["),
    lambda run: (run / "checkpoints/step-00000001").mkdir(parents=True),
    lambda run: (run / "large").write_bytes(bytes(100_000)),
    lambda run: shutil.rmtree(run),
]


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_is_read_again_after_each_change(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], settled: bool
) -> None:
    read_by(outputs, monkeypatch)
    change(outputs / "day/a")
    if settled:
        settle(outputs / "day", 1.1e9)
    for _ in range(2):
        assert read_by(outputs, monkeypatch)[0] == list_runs(outputs)


def test_a_change_within_the_same_tick_of_the_clock_is_seen(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is kept only if its files are older than what a file system may give the same time."""
    summary = outputs / "day/a/summary.json"
    summary.write_text(summary.read_text().replace("4.0", "4.1"))
    time = summary.stat().st_mtime_ns
    read_by(outputs, monkeypatch)
    summary.write_text(summary.read_text().replace("4.1", "4.2"))
    os.utime(summary, ns=(time, time))
    [row] = [found.row for found in read_by(outputs, monkeypatch)[0] if found.row.name == "day/a"]
    assert row.val_loss == 4.2


def test_a_run_is_running_while_its_lock_is_held(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_by(outputs, monkeypatch)
    with run_dir.held(outputs / "day/b"):
        settle(outputs / "day/b", 1e9)
        rows, read = read_by(outputs, monkeypatch)
        assert [found.row.status for found in rows[:2]] == ["completed", "running"]
        assert read == ["b"]
    assert [found.row.status for found in read_by(outputs, monkeypatch)[0][:2]] == ["completed", "diverged"]


@pytest.mark.parametrize("broken", ["folder", "text", "table"])
def test_without_a_database_every_run_is_read(outputs: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    database = outputs.parent / "cache" / known_rows.DATABASE
    if broken == "folder":
        database.mkdir(parents=True)
    else:
        read_by(outputs, monkeypatch)
        database.write_bytes(b"no database" * 1000 if broken == "text" else database.read_bytes()[:5000])
    for _ in range(2):
        assert read_by(outputs, monkeypatch) == (list_runs(outputs), ["a", "b", "x", "y"])


def test_rows_of_other_code_or_other_models_are_not_used(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_by(outputs, monkeypatch)
    conf = shutil.copytree(Path(listing.__file__).parents[3] / "conf", outputs.parent / "conf")
    monkeypatch.setenv("GPTEXP_CONF", str(conf))
    assert read_by(outputs, monkeypatch)[1] == ["a", "b", "x", "y"]
    assert read_by(outputs, monkeypatch)[1] == []
    monkeypatch.setattr("gptexp.reporting.listings.known_rows.VERSION", "next")
    assert read_by(outputs, monkeypatch)[1] == ["a", "b", "x", "y"]
