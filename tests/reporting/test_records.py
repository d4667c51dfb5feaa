"""Runs as the report reads them: damaged files, values of wrong types, long runs, unfinished runs."""

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from sweeps import report_of, write_run

from gptexp.compare import main as compare
from gptexp.evaluate import main as evaluate
from gptexp.process.errors import ConfigError
from gptexp.report import main as report
from gptexp.reporting.listings.records import find_runs
from gptexp.reporting.page.page import sections
from gptexp.reporting.page.report import build_report
from gptexp.sample import main as sample
from gptexp.status import main as status
from gptexp.storage import run_dir
from gptexp.storage.metrics_file import POINTS


@pytest.mark.e2e
def test_unreadable_files_are_listed_and_the_other_runs_are_reported(swept: Path, tmp_path: Path) -> None:
    root = tmp_path / "damaged"
    shutil.copytree(swept, root)
    a, b, c, d, *_ = sorted(root.glob("lr=0.16*")) + sorted(root.glob("lr=*seed=1338"))
    (a / "config.yaml").write_text("model: [")
    (b / "summary.json").write_text("{")
    (c / "metrics.jsonl").write_bytes(b"\xff\n{}\n" + (c / "metrics.jsonl").read_bytes()[:-20])
    (d / "summary.json").unlink()
    os.mkfifo(root / "pipe")
    runs = {run.name: run for run in find_runs(root)}
    assert [runs[path.name].status for path in (a, b, c, d)] == ["damaged", "damaged", "diverged", "failed"]
    report = report_of(root)
    said = "\n".join(report["verdict"])
    assert f"{a / 'config.yaml'}" in said
    assert f"{b / 'summary.json'}" in said
    assert report["arms"][0]["law"] is not None


WRONG_TYPES = [
    ("summary.json", "steps", 1.5), ("summary.json", "train_s", "x"), ("summary.json", "data_hash", [1]),
    ("summary.json", "status", "\x1b]0;owned\x07"), ("summary.json", "final_val_loss", "4"),
    ("summary.json", "final_val_loss", math.nan), ("summary.json", "final_val_loss", math.inf),
    ("summary.json", "final_val_loss", 10**400), ("summary.json", "steps", 10**400), ("summary.json", "tokens", None),
    ("metrics.jsonl", "train/loss", math.nan), ("metrics.jsonl", "tokens", 10**400),
    ("metrics.jsonl", "train/loss", [[[]]]), ("metrics.jsonl", "step", -1),
    ("metrics.jsonl", "tokens", "x"), ("metrics.jsonl", "perf/tokens_per_s", None),
    ("metrics.jsonl", "train/loss", {}), ("metrics.jsonl", "data/fingerprint", "\x1b[31m"),
]  # fmt: skip


def with_a_wrong_value(root: Path, file: str, key: str, value: object) -> Path:
    """A sweep of three runs; in one of them `key` has `value`, which no run writes."""
    for lr in (0.01, 0.02, 0.04):
        write_run(root / f"{lr}", 4096, lr, 1, 4.0)
    path = root / "0.02" / file
    if file == "metrics.jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**line, **({key: value} if key in line else {})}) + "\n" for line in lines))
    else:
        path.write_text(json.dumps({**run_dir.read_json(path), key: value}))
    return root


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(("file", "key", "value"), WRONG_TYPES)
def test_a_value_of_a_wrong_type_does_not_prevent_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, key: str, value: object
) -> None:
    root = with_a_wrong_value(tmp_path / "sweep", file, key, value)
    report([str(root)])
    status([str(root)])
    printed = capsys.readouterr().out
    assert "0.01" in printed
    assert not re.search(r"\bnan\b|\binf\b", printed)
    assert "\x1b" not in printed
    assert (root / "report.html").exists()


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("optim.lr", "nan", "optim.lr=nan: must be above 0"),
        ("data.tokenizer", "klingon", "data.tokenizer=klingon: must be one of bytes, gpt2"),
        ("model.n_head", "5", "model.n_embd=768: not divisible by model.n_head=5"),
        ("batch.total_batch_size", "-4096", "batch.total_batch_size=-4096: must be above 0"),
    ],
)
def test_a_run_with_an_illegal_config_is_left_out_and_named(tmp_path: Path, key: str, value: str, why: str) -> None:
    for lr in (0.01, 0.02):
        write_run(tmp_path / f"{lr}", 4096, lr, 1, 4.0)
    path = tmp_path / "0.01/config.yaml"
    section, _, name = key.partition(".")
    content = yaml.safe_load(path.read_text())
    content[section][name] = yaml.safe_load(value if value != "nan" else ".nan")
    path.write_text(yaml.safe_dump(content))
    runs = {run.name: run for run in find_runs(tmp_path)}
    assert [runs[name].status for name in ("0.01", "0.02")] == ["damaged", "completed"]
    assert f"{path}: {why}" in (runs["0.01"].problem or "")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("x", "final_val_loss=x: wrong type"), (-1.0, "final_val_loss=-1.0: must be 0 or above"),
        (True, "final_val_loss=true: wrong type"), (None, "final_val_loss is missing"),
        (math.nan, "NaN is not a JSON number"), (10**400, "is too large"),
    ],
)  # fmt: skip
def test_a_completed_run_without_a_right_loss_is_left_out_and_named(tmp_path: Path, value: object, why: str) -> None:
    root = with_a_wrong_value(tmp_path / "sweep", "summary.json", "final_val_loss", value)
    runs = {run.name: run for run in find_runs(root)}
    assert [runs[name].status for name in ("0.01", "0.02", "0.04")] == ["completed", "damaged", "completed"]
    assert runs["0.02"].loss is None
    assert f"{root / '0.02/summary.json'}: " in (runs["0.02"].problem or "")
    assert why in (runs["0.02"].problem or "")


def test_a_directory_that_has_lost_its_config_is_named(tmp_path: Path) -> None:
    for lr in (0.01, 0.02):
        write_run(tmp_path / f"{lr}", 4096, lr, 1, 4.0)
    (tmp_path / "0.01/config.yaml").unlink()
    (tmp_path / "pictures").mkdir()
    damaged, whole = find_runs(tmp_path)
    assert (damaged.status, whole.status) == ("damaged", "completed")
    assert "config.yaml is missing" in (damaged.problem or "")


@pytest.mark.parametrize("read", [[sample], [evaluate], [compare, "sweep/cell"], [status], [report]])
@pytest.mark.parametrize("beside", ["sweep/cell", "2026-01-02/run"])
def test_a_folder_of_runs_and_sweeps_is_not_taken_for_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[Any], beside: str
) -> None:
    """It would be one of a single run, the one that lies directly in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("later", beside, "sweep/cell"):
        write_run(tmp_path / "outputs" / name, 4096, 0.02, 1, 4.0)
    if beside == "sweep/cell":
        (tmp_path / "outputs/sweep/sweep.json").write_text("{}")
    verb, *others = read
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        ConfigError,
        match=r"^outputs: holds runs and sweeps, and is none itself; give one of them; `gptexp ls outputs` lists them$",
    ):
        verb(["outputs", *(f"outputs/{name}" for name in others)])
    assert sorted(tmp_path.rglob("*")) == before


def test_warnings_and_samples_are_named_by_the_completed_steps(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 4096, 0.02, 1, 4.0)
    lines = ({"event": kind, "step": 4, "tokens": 5 * 4096, "text": f"of {kind}"} for kind in ("alert", "sample"))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as metrics:
        metrics.writelines(f"{json.dumps(line)}\n" for line in lines)
    [run] = find_runs(tmp_path / "run")
    assert [(note.kind, note.step) for note in run.notes] == [("alert", 5), ("sample", 5)]
    notes = sections(build_report(tmp_path / "run"))["notes"]
    assert "After step 5: of alert" in notes
    assert "A sample after step 5:" in notes


def test_a_run_is_running_while_its_lock_is_held(swept: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(sorted(swept.glob("lr=*"))[0], directory)
    run_dir.write_json(
        directory / "summary.json", {**run_dir.read_json(directory / "summary.json"), "status": "running"}
    )
    with run_dir.held(directory):
        assert [run.status for run in find_runs(directory)] == ["running"]
    assert [run.status for run in find_runs(directory)] == ["failed"]


def test_a_long_run_is_thinned_to_steps_that_runs_of_other_batch_sizes_share(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 64, 0.02, 1, 4.0)
    write_run(tmp_path / "b", 128, 0.02, 1, 4.0)
    runs = find_runs(tmp_path)
    for run in runs:
        assert POINTS <= len(run.train) <= 2 * POINTS
    assert runs[0].fingerprints.keys() == runs[1].fingerprints.keys()
    assert runs[0].train[-1].seconds == pytest.approx(4096 * 8e-3)


def test_a_run_that_logs_every_tenth_step_keeps_all_points_of_its_curve(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 64, 0.02, 1, 4.0)
    path = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "step": 10 * row["step"]}) + "\n" for row in rows))
    [run] = find_runs(tmp_path / "run")
    assert len(run.train) >= POINTS


def test_metrics_behind_a_link_are_not_read(swept: Path, tmp_path: Path) -> None:
    run = shutil.copytree(next(swept.glob("lr=0.02*")), tmp_path / "run")
    (run / "metrics.jsonl").rename(tmp_path / "elsewhere.jsonl")
    (run / "metrics.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    [read] = find_runs(run)
    assert read.train == []
    assert (
        read.problem == f"{run / 'metrics.jsonl'}: cannot be read (a link, and links are not followed; copy the file)"
    )
