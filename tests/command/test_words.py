"""What people read of a run of one step and of a sweep of one cell: singular nouns, and no unrounded numbers."""

import re
from pathlib import Path

import pytest
from pages import leave_out_pictures
from real_runs import train_here
from sweeps import TOKENS, write_run

from gptexp import plan, report, status
from gptexp.config.compose import compose
from gptexp.storage import run_dir


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of a report's time, and are made of the words of its page."""
    leave_out_pictures(monkeypatch)


# One of everything that a config counts.
ONE = ["model.n_layer=1", "model.n_head=1", "batch.total_batch_size=16", "batch.micro_batch_size=1"]
ODD = ["schedule.warmup_tokens=100", "train.eval_every_tokens=150", "train.save_every_tokens=1", "train.max_steps=3"]


def wrong(text: str) -> list[str]:
    """Plurals after 1, and numbers of steps with more than one decimal."""
    plurals = re.findall(r"(?<![\d.,:])\b1 [a-z-]+s\b", text)
    return [*plurals, *re.findall(r"\d\.\d{2,} steps", text)]


def train(overrides: list[str], directory: Path) -> None:
    run_dir.save_config(directory, compose(overrides))
    assert train_here(overrides, directory) == 0


def test_what_is_looked_for_is_found() -> None:
    assert wrong("1 ranks, 1 micro-steps, 11 steps, 2.1 steps, 1 step, 3.90625 steps") == [
        "1 ranks", "1 micro-steps", "3.90625 steps"
    ]  # fmt: skip


def test_a_run_of_one_step(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loud = [*tiny, "log=disabled", "log.progress=lines"]
    plan.main([*tiny, *ONE, "train.max_steps=1"])
    train([*loud, *ONE, "train.max_steps=1"], tmp_path / "one")
    status.main([str(tmp_path / "one")])
    report.main([str(tmp_path / "one")])
    text = capsys.readouterr().out
    assert "1 sequence × 16 tokens × 1 rank × 1 micro-step" in text
    assert "completed after 1 step, 16 tokens" in text
    assert wrong(text) == []


@pytest.mark.e2e
def test_intervals_that_are_no_whole_steps(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train([*tiny, "log=disabled", "log.progress=lines", *ODD], tmp_path / "odd")
    text = capsys.readouterr().out
    assert "warm-up over 100 tokens (0.8 steps; beta2 asks for 40), end at 384 tokens (3 steps)" in text
    assert "every 150 tokens (1.2 steps)" in text
    assert wrong(text) == []


@pytest.mark.e2e
def test_a_sweep_of_one_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", 4096, 0.02, 1, 4.0)
    cells = {"a": {"values": {}, "total_batch_size": 4096, "tokens": TOKENS}}
    run_dir.write_json(tmp_path / run_dir.SWEEP, {"name": "sweep", "overrides": [], "cells": cells})
    plan.main(["-m", "model=nano", "optim.lr=1e-3"])
    status.main([str(tmp_path)])
    report.main([str(tmp_path)])
    text = capsys.readouterr().out + (tmp_path / "report.html").read_text().partition("<script>")[0]
    assert "1 cell, 409,600 tokens in all" in text
    assert wrong(text) == []
