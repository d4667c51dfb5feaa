"""Rows of `gptexp ls` that earlier calls have read: they are those that a new reading finds, whatever has changed."""

import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
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


def database_of(outputs: Path) -> Path:
    return outputs.parent / "cache" / known_rows.DATABASE


def names_kept(outputs: Path) -> list[str]:
    """The runs whose rows are in the database, relative to `outputs`."""
    with closing(sqlite3.connect(database_of(outputs))) as database:
        paths = [os.fsdecode(path) for (path,) in database.execute("SELECT path FROM known ORDER BY path")]
    return [os.path.relpath(path, outputs) for path in paths]


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
    lambda run: (run / "checkpoints/step-00000008/large").write_bytes(bytes(100_000)),
    lambda run: (run / "effective.json").write_text('{"vocab_size": 3}'),
    lambda run: shutil.rmtree(run),
]


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_is_read_again_after_each_change(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], settled: bool
) -> None:
    config = outputs / "day/a/config.yaml"
    config.write_text(re.sub("vocab_size: .*", "vocab_size: auto", config.read_text()))
    (outputs / "day/a/effective.json").write_text('{"vocab_size": 2}')
    (outputs / "day/a/checkpoints/step-00000008").mkdir(parents=True)
    settle(outputs, 1e9)
    read_by(outputs, monkeypatch)
    change(outputs / "day/a")
    if settled:
        settle(outputs / "day", 1.1e9)
    for _ in range(2):
        assert read_by(outputs, monkeypatch)[0] == list_runs(outputs)


def test_a_run_without_events_began_when_its_directory_changed(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (outputs / "day/a/metrics.jsonl").unlink()
    for at in (1e9, 1.1e9):
        settle(outputs / "day/a", 1e9)
        os.utime(outputs / "day/a", (at, at))
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


@pytest.mark.parametrize("released", [False, True])
def test_a_row_of_a_process_that_has_begun_since_its_files_were_looked_at_is_not_kept(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    """It takes the lock, changes no file, and may release the lock before the row is kept."""
    (outputs / "day/a" / run_dir.LOCK).touch()
    settle(outputs, 1e9)
    locks = []

    def locked(path: Path, name: str) -> listing.Listed:
        locks.append(run_dir.acquire(path, run_dir.LOCK))
        row = read_row(path, name)
        if released:
            locks.pop().release()
        return row

    monkeypatch.setattr("gptexp.reporting.listings.known_rows.read_row", locked)
    known = KnownRows(outputs)
    assert known.read(outputs / "day/a", "a").row.status == "running"
    known.save()
    for lock in locks:
        lock.release()
    assert read_by(outputs / "day", monkeypatch)[0][0].row.status == "completed"


def test_a_run_that_vanishes_while_it_is_listed_is_a_damaged_row(outputs: Path) -> None:
    gone = outputs / "day/gone"
    assert KnownRows(outputs).read(gone, "gone") == read_row(gone, "gone")


@pytest.mark.parametrize("broken", ["folder", "text", "table"])
def test_a_damaged_database_is_replaced_and_without_one_every_run_is_read(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    database = database_of(outputs)
    if broken == "folder":
        database.mkdir(parents=True)
    else:
        read_by(outputs, monkeypatch)
        database.write_bytes(b"no database" * 1000 if broken == "text" else database.read_bytes()[:5000])
    assert read_by(outputs, monkeypatch) == (list_runs(outputs), ["a", "b", "x", "y"])
    again = ["a", "b", "x", "y"] if broken == "folder" else []
    assert read_by(outputs, monkeypatch) == (list_runs(outputs), again)


def test_the_connection_to_a_damaged_database_is_closed(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database_of(outputs).parent.mkdir()
    database_of(outputs).write_text("no database" * 1000)
    connections, connect = list[sqlite3.Connection](), sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connections.append(connect(*a, **k)) or connections[-1])
    KnownRows(outputs)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connections[0].execute("SELECT 1")


def test_a_locked_database_stays(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_by(outputs, monkeypatch)
    with closing(sqlite3.connect(database_of(outputs))) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert read_by(outputs / "day", monkeypatch) == (list_runs(outputs / "day"), ["a", "b"])
    assert read_by(outputs, monkeypatch)[1] == []


@pytest.mark.parametrize(
    "row", ["{", "3", "[]", '"text"', "{}", '{"row": 3}', '{"row": {"kind": "run"}}', '{"row": {}, "more": 1}', 7]
)
def test_a_malformed_row_is_read_again(outputs: Path, monkeypatch: pytest.MonkeyPatch, row: str | int) -> None:
    read_by(outputs, monkeypatch)
    with closing(sqlite3.connect(database_of(outputs))) as database, database:
        database.execute("UPDATE known SET row = ?", [row.encode() if isinstance(row, str) else row])
    assert read_by(outputs, monkeypatch) == (list_runs(outputs), ["a", "b", "x", "y"])
    assert read_by(outputs, monkeypatch) == (list_runs(outputs), [])


def test_a_run_whose_row_json_cannot_hold_is_read_each_time(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir.write_json(outputs / "day/a/summary.json", {"status": "failed"})
    (outputs / "day/a/metrics.jsonl").write_text('{"event": "eval", "step": 1, "val/loss": 1e999}\n')
    settle(outputs, 1e9)
    for read in (["a", "b"], ["a"]):
        rows, names = read_by(outputs / "day", monkeypatch)
        assert (rows[0].row.val_loss, names) == (float("inf"), read)


def test_a_name_that_is_not_utf_8_is_kept_as_others_are(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (outputs / "day/b").rename(outputs / "day" / os.fsdecode(b"\xff\xfe"))
    settle(outputs, 1e9)
    assert len(read_by(outputs, monkeypatch)[1]) == 4
    assert read_by(outputs, monkeypatch) == (list_runs(outputs), [])


def test_rows_of_removed_runs_are_deleted_and_no_others(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = shutil.copytree(outputs / "day", outputs.parent / "outputs0")
    settle(outputs.parent, 1e9)
    read_by(beside, monkeypatch)
    read_by(outputs, monkeypatch)
    shutil.rmtree(outputs / "day/a")
    (outputs / "day").rename(outputs / "night")
    settle(outputs, 1e9)
    read_by(outputs, monkeypatch)
    assert names_kept(outputs) == ["night/b", "sweep/x", "sweep/y", "../outputs0/a", "../outputs0/b"]
    read_by(outputs / "sweep/x", monkeypatch)
    assert len(names_kept(outputs)) == 5


def test_rows_of_other_code_models_or_time_zones_are_not_used_and_stay_until_they_are_old(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone = ["a", "b", "x", "y"]
    conf = shutil.copytree(known_rows.conf_dir(), outputs.parent / "conf")
    package = shutil.copytree(known_rows.PACKAGE, outputs.parent / "code", ignore=shutil.ignore_patterns("__pycache__"))
    with monkeypatch.context() as other:
        changes: list[Callable[[], object]] = [
            lambda: None,
            lambda: other.setenv("GPTEXP_CONF", str(conf)),
            (conf / "model/gpt2.yaml").touch,
            lambda: other.setattr("gptexp.reporting.listings.known_rows.PACKAGE", package),
            (package / "config/scaling.py").touch,
            lambda: other.setenv("TZ", "Asia/Tokyo"),
        ]
        for change in changes:
            change()
            time.tzset()
            assert read_by(outputs, monkeypatch) == (list_runs(outputs), everyone)
            assert read_by(outputs, monkeypatch) == (list_runs(outputs), [])
    time.tzset()
    assert read_by(outputs, monkeypatch)[1] == []
    monkeypatch.setattr("gptexp.reporting.listings.known_rows.OLD_S", -60)
    settle(outputs / "day/a", 1.1e9)
    assert read_by(outputs, monkeypatch)[1] == ["a"]
    assert len(names_kept(outputs)) == 4
