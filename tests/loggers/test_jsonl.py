"""metrics.jsonl: whole lines, no NaN, resumed files, a full disk."""

import errno
import json
import math
import os
from pathlib import Path

import pytest

from gptexp.loggers.jsonl import JsonlSink
from gptexp.process.errors import StorageError
from gptexp.storage.checkpoint import TrainState


def test_a_resumed_file_ends_at_the_checkpoint_and_has_no_nan(tmp_path: Path) -> None:
    log = JsonlSink(tmp_path, TrainState(), log_every=1)
    for step, tokens in enumerate((100, 200, 300)):
        log.write({"event": "step", "step": step, "tokens": tokens, "train/loss": math.nan})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "tok')  # the process was killed while it wrote a line
    resumed = JsonlSink(tmp_path, TrainState(step=2, tokens=200), log_every=1)
    resumed.write({"event": "step", "step": 2, "tokens": 300, "train/loss": 1.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(e["tokens"], e["train/loss"]) for e in lines] == [(100, None), (200, None), (300, 1.0)]


def test_a_full_disk_raises_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = JsonlSink(tmp_path, TrainState(), log_every=1)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be written \(No space left on device\)"):
        log.sync()
