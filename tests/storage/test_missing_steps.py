"""Gaps in metrics.jsonl: found by brute force where the interval of the lines is constant; named and shown."""

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import e2e_then_slow, events
from sweeps import write_run

from gptexp.loggers.jsonl import JsonlSink
from gptexp.reporting.charts.figures import figures
from gptexp.reporting.listings.records import find_runs
from gptexp.reporting.statistics.analysis import analyse
from gptexp.storage.checkpoint import TrainState
from gptexp.storage.missing_steps import described, missing_steps

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("log_every", [1, 2, 10])
def test_a_complete_file_has_no_gap_and_a_cut_one_has_the_steps_that_were_cut(log_every: int) -> None:
    draw = random.Random(0)
    for _ in range(200):
        end = draw.randint(1, 300)
        logged = [step for step in range(end) if step % log_every == 0 or step == end - 1]
        assert missing_steps(logged, end, log_every) == []
        first, last = sorted(draw.choices(range(len(logged) + 1), k=2))
        kept = logged[:first] + logged[last:]
        found = {step for gap in missing_steps(kept, end, log_every) for step in gap}
        assert not found & {*kept}
        cut = [step for step in logged[first:last] if step != end - 1]
        # Two lines that are cut out of few look like a larger interval, which a run may have been resumed with.
        if len(cut) >= 2 and (first >= 2 or len(logged) - last >= 2 or not kept):
            assert {*cut} <= found


def test_a_run_that_was_resumed_with_another_interval_has_no_gap() -> None:
    assert missing_steps([0, 1, 2, 3, 4, 10, 20, 30], 31, 10) == []
    assert missing_steps([0, 10, 20, 25, 26, 27, 28], 29, 1) == []
    assert missing_steps([0, 10, 13, 20, 30], 40, 10) == []  # a non-finite step is logged too
    assert missing_steps([-5, 3, 2, 2**40], 5, 1) != []  # values that no run writes


@pytest.mark.parametrize("log_every", [1, 3, 10])
def test_a_branch_lacks_no_step_before_its_first_one(log_every: int) -> None:
    """It begins between two steps that are logged, or at one of them."""
    for first in range(1, 40):
        for end in range(first, first + 40):
            logged = [step for step in range(first, end) if step % log_every == 0]
            assert missing_steps(logged, end, log_every, first) == []
    assert missing_steps([16, 17, 18], 19, 1, 12) == [range(12, 16)]
    assert missing_steps([], 19, 1, 12) == [range(12, 19)]
    assert missing_steps([20, 30, 40, 41, 42], 43, 1, 12) == []  # resumed with another interval
    assert missing_steps([40, 50], 51, 10, 12) == [range(12, 40)]


def test_a_file_of_a_million_lines_is_checked_at_once() -> None:
    """A copy of the rest at each line would take minutes."""
    assert missing_steps(range(10**6), 10**6, 1) == []


def test_steps_beyond_63_bits_are_described() -> None:
    assert described(missing_steps([0, 1, 2], 10**19, 1)) == (
        "no line for steps 4 to 10000000000000000000: the file may have been cut"
    )


def test_the_line_names_three_gaps_at_most() -> None:
    assert described([range(3, 4), range(11, 30)]) == "no line for steps 4, 12 to 30: the file may have been cut"
    assert described([range(3, 4)]) == "no line for step 4: the file may have been cut"
    assert "and 1 further gap" in described([range(i, i + 1) for i in range(0, 8, 2)])
    assert "and 2 further gaps" in described([range(i, i + 1) for i in range(0, 10, 2)])


@pytest.mark.parametrize(("kept", "named"), [(range(0), "1 to 10"), (range(3), "4 to 10"), ((0, 1, 8, 9), "3 to 8")])
def test_opening_a_cut_file_prints_which_steps_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: range, named: str
) -> None:
    lines = [json.dumps({"event": "step", "step": step, "tokens": step + 1}) + "\n" for step in kept]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    JsonlSink(tmp_path, TrainState(step=10, tokens=10), log_every=1)
    assert f"no line for steps {named}: the file may have been cut" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"event": "step", "step": step, "tokens": step + 1}) + "\n" for step in range(10))
    )
    JsonlSink(tmp_path, TrainState(step=10, tokens=10), log_every=1)
    assert capsys.readouterr().err == ""


def test_a_report_names_the_missing_steps_and_its_curves_have_a_gap(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 4096, 0.02, 1, 4.0)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not 19 < json.loads(line)["step"] < 40))
    [run] = find_runs(tmp_path / "run")
    assert run.gaps == [range(20, 40)]
    assert run.problem == f"{path}: no line for steps 21 to 40: the file may have been cut"
    [loss] = [figure for figure in figures(analyse("run", [run])) if figure.key == "loss"]
    assert {"field": "part"} in loss.spec["encoding"]["detail"]
    parts = {(point["part"], point["steps"] > 20) for point in loss.spec["data"]["values"]}
    assert parts == {(0, False), (1, True)}


def test_a_report_of_complete_runs_has_no_gap(tmp_path: Path) -> None:
    for batch in (64, 4096):  # steps of the first are thinned
        write_run(tmp_path / f"{batch}", batch, 0.02, 1, 4.0)
    write_run(tmp_path / "diverged", 4096, 0.02, 1, None)
    for run in find_runs(tmp_path):
        assert (run.gaps, run.problem) == ([], None)


@pytest.mark.parametrize(("left", "named"), e2e_then_slow([(13, "14 to 30"), (0, "1 to 30")]))
def test_a_resumed_run_says_which_steps_are_missing(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, left: int, named: str
) -> None:
    """Of a run that lost its last checkpoint, so that it resumes after 30 of 40 steps."""
    overrides = [*tiny, "train.max_steps=40", "train.save_every=10", "train.keep_last=0", "hydra.run.dir=out"]
    assert gptexp("train", *overrides).returncode == 0
    shutil.rmtree(tmp_path / "out/checkpoints/step-00000040")
    (tmp_path / "out/summary.json").unlink()
    metrics = tmp_path / "out/metrics.jsonl"
    steps = [line for line in metrics.read_text().splitlines(keepends=True) if '"event": "step"' in line]
    metrics.unlink()
    if left:
        metrics.write_text("".join(steps[:left]))
    resumed = gptexp("train", *overrides)
    assert resumed.returncode == 0, resumed.stderr
    assert f"no line for steps {named}: the file may have been cut; the curves have a gap there" in resumed.stderr
    assert f"no line for steps {named}" in gptexp("status", "out").stdout
    assert [event["step"] for event in events(tmp_path / "out", "step")] == [*range(left), *range(30, 40)]
