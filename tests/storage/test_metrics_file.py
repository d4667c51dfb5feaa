"""Reading metrics.jsonl in one pass and from its end, against all lines in memory."""

import json
import random
import re
from pathlib import Path

import pytest

from gptexp.storage.metrics_file import BLOCK, POINTS, newest, scan

OTHERS = ("alert", "fault", "sample", "sharpness")
STEP = re.compile(rb'"event": "eval".*"val/loss": (\d[\d.]*)')


def write(path: Path, steps: int, draw: random.Random) -> list[bytes]:
    """Write events of `steps` steps, with others between them, and return the lines."""
    lines = []
    for step in range(steps):
        lines.append({"event": "step", "time": draw.random() * 1e9, "step": step, "tokens": 8 * step})
        if draw.random() < 0.02:
            lines.append({"event": draw.choice(["eval", *OTHERS, "profile"]), "step": step, "val/loss": step / 8})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("steps", [0, 1, POINTS, 2 * POINTS - 1, 2 * POINTS, 2 * POINTS + 1, 8 * POINTS, 9001])
def test_one_pass_keeps_every_nth_step_and_all_events_that_a_report_shows(tmp_path: Path, steps: int) -> None:
    lines = write(tmp_path / "metrics.jsonl", steps, random.Random(steps))
    found = scan(tmp_path / "metrics.jsonl")
    stride = next(n for n in (1, 2, 4, 8, 16, 32) if steps // n < 2 * POINTS)
    kept = [
        (number, line)
        for number, line in enumerate(lines, 1)
        if (event := json.loads(line))["event"] in ("eval", *OTHERS)
        or (event["event"] == "step" and (event["step"] + 1) % stride == 0)
    ]
    assert found.lines == kept
    assert [*found.logged] == [*range(steps)]
    assert found.is_whole


@pytest.mark.parametrize("last_bytes", [0, 1, 300, 40_000, 10**9])
def test_of_the_last_bytes_only_whole_lines_are_read(tmp_path: Path, last_bytes: int) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = write(path, 900, random.Random(1))
    part, length = [], 0
    for line in reversed(lines):
        length += len(line)
        if length > last_bytes:
            break
        part.append(line)
    found = scan(path, last_bytes)
    steps = [event["step"] for line in reversed(part) if (event := json.loads(line))["event"] == "step"]
    assert [*found.logged] == steps
    assert found.is_whole == (last_bytes == 10**9)


def test_the_newest_match_is_that_of_the_last_whole_line_that_has_one(tmp_path: Path) -> None:
    path, draw = tmp_path / "metrics.jsonl", random.Random(2)
    assert newest(path, STEP) is None
    for steps in (0, 1, 300, 6000):  # the last of several blocks of bytes
        lines = write(path, steps, draw)
        with path.open("ab") as file:
            file.write(b'{"event": "eval", "val/loss": 7')
        matches = [match for line in lines if (match := STEP.search(line))]
        found = newest(path, STEP)
        assert (found and found.string, found and found[1]) == (
            (matches[-1].string, matches[-1][1]) if matches else (None, None)
        )
    assert path.stat().st_size > 4 * BLOCK


def test_a_match_in_front_of_many_blocks_of_other_lines_is_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = b'{"event": "eval", "val/loss": 2.5}\n'
    path.write_bytes(first + b'{"event": "step", "step": 1}\n' * (5 * BLOCK // 29))
    found = newest(path, STEP)
    assert found is not None
    assert (found.string, found[1]) == (first, b"2.5")
