"""`train.sharpness_every_tokens`: measured from checkpoints while a run trains, which does not change by that."""

import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import e2e_then_slow, events, summary, wait_for
from real_runs import equal, train_here

from gptexp.config.metrics import SHARPNESS
from gptexp.model.gpt import GPT
from gptexp.run import evaluations
from gptexp.storage import run_dir
from gptexp.training import loop

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]
SMALL = ["data.tokenizer=bytes", "optim.lr=1e-2", "model.dropout=0.1", "data.max_tokens=480"]  # below 64 sequences
FOUND = dict.fromkeys(SHARPNESS, 1.0)


def steps_of(directory: Path) -> list[int]:
    return [run_dir.step_of(path) for path in reversed(run_dir.published(directory / "checkpoints"))]


def measured_at(directory: Path) -> list[int]:
    """The numbers of completed steps at which a run has logged its sharpness."""
    return [event["step"] + 1 for event in events(directory, "sharpness")]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """For each measurement, which takes no time here, the checkpoints on the disk."""
    seen: list[list[int]] = []

    def measure(directory: Path, step: int, *_: Any) -> dict[str, float]:
        seen.append(steps_of(directory))
        assert seen[-1][-1] == step
        return FOUND

    monkeypatch.setattr(evaluations, "measure_while_training", measure)
    return seen


def test_measuring_changes_no_bit_and_displaces_no_checkpoint(
    tiny: list[str], tmp_path: Path, measured: list[list[int]]
) -> None:
    """With keep_last=2 of the checkpoints at multiples of three steps, and sharpness at every second step."""
    own = [*tiny, *SMALL, "train.max_steps=9", "train.save_every=3", "train.keep_best=false"]
    assert train_here(own, tmp_path / "bare") == 0
    assert measured == []
    assert train_here([*own, "train.sharpness_every_tokens=256"], tmp_path / "run") == 0
    assert measured_at(tmp_path / "run") == [2, 4, 6, 8, 9]
    assert measured == [[2], [3, 4], [3, 6], [3, 6, 8], [6, 9]]
    assert equal(tmp_path / "bare", tmp_path / "run")
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "bare") == [6, 9]
    kept = ("tokens", "train/loss", "optim/grad_norm", "data/fingerprint")
    steps = [[[e[name] for name in kept] for e in events(tmp_path / run, "step")] for run in ("bare", "run")]
    assert steps[0] == steps[1]


def test_a_rollback_does_not_go_to_a_checkpoint_that_was_only_measured(
    tiny: list[str], tmp_path: Path, measured: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = GPT.forward
    passes = 0

    def broken(self: GPT, *args: Any) -> Any:
        nonlocal passes
        passes += self.training
        found = forward(self, *args)
        return found * math.nan if self.training and 16 < passes <= 20 else found  # of four in a step

    monkeypatch.setattr(GPT, "forward", broken)
    own = [*tiny, *SMALL, "train.max_steps=7", "train.save_every=3", "train.eval_every=0", "train.nonfinite=rollback",
           "train.compile=off"]  # fmt: skip
    for name, more in (("bare", []), ("run", ["train.sharpness_every_tokens=256"])):
        passes = 0
        assert train_here([*own, *more], tmp_path / name) == 0
        [fault] = events(tmp_path / name, "fault")
        assert "reloaded step-00000003" in fault["text"]
    assert equal(tmp_path / "bare", tmp_path / "run")
    assert measured_at(tmp_path / "run") == [2, 4, 6, 7]
    assert measured == [[2], [3, 4], [3, 4], [3, 6], [6, 7]]  # after the rollback the fourth step is another one


@pytest.mark.e2e
def test_a_run_that_was_killed_before_it_measured_does_so_first(
    tiny: list[str], tmp_path: Path, measured: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill before, in or after a measurement it measures each checkpoint once, also the last one."""

    class Killed(BaseException):
        pass

    own = [*tiny, *SMALL, "train.max_steps=6", "train.save_every=0", "train.sharpness_every_tokens=256"]
    plain = loop._Loop.evaluate_checkpoint
    for at in (2, 4, 6):
        for late in (False, True):  # the kill comes before, or after

            def measure(self: loop._Loop, due: Any, of: int = at, after: bool = late, resumed: bool = False) -> Any:
                reason = plain(self, due, resumed) if after or self.state.step != of else None
                if self.state.step == of:
                    raise Killed
                return reason

            monkeypatch.setattr(loop._Loop, "evaluate_checkpoint", measure)
            directory = tmp_path / f"{at}-{late}"
            with pytest.raises(Killed):
                train_here(own, directory)
            for thread in threading.enumerate():  # a real kill would end it
                if thread.name == "checkpoint":
                    thread.join()
            assert measured_at(directory) == [step for step in (2, 4, 6) if step < at + late]
            monkeypatch.setattr(loop._Loop, "evaluate_checkpoint", plain)
            assert train_here(own, directory) == 0
            assert measured_at(directory) == [2, 4, 6]


@pytest.fixture
def with_code(tmp_path: Path, sabotage: Callable[[str, str], dict[str, str]]) -> Callable[[str], dict[str, str]]:
    """An environment in which the process that measures runs some code first."""

    def environment(code: str) -> dict[str, str]:
        only = "import sys, os, time\nif sys.argv[0].endswith('run/sharpness.py'):\n    "
        return sabotage("gptexp.run.load", only + code)

    return environment


@pytest.mark.slow
def test_two_ranks_log_what_the_verb_finds_and_train_as_without_it(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path, with_code: Callable[[str], dict[str, str]]
) -> None:
    both = [*tiny, *SMALL, "world.size=2", "train.keep_last=0", "train.save_every=2", "world.timeout_s=10"]
    run = ["train.sharpness_every_tokens=256", "train.log_every=3", "log.progress=lines", "hydra.run.dir=run"]
    measuring = start("train", *both, *run, env=with_code("time.sleep(12)"))
    out, err = measuring.communicate(timeout=400)
    assert measuring.returncode == 0, err
    assert "sharpness       every 256 tokens (2 steps), and at the end" in out
    assert out.count(" | sharpness: ") == 2
    assert summary(tmp_path / "run")["train_s"] < 12, "the time of measuring is not that of training"
    done = gptexp("sharpness", "run", "--all")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    logged = events(tmp_path / "run", "sharpness")
    assert [(row["step"], row["tokens"]) for row in rows] == [(e["step"] + 1, e["tokens"]) for e in logged] == [
        (2, 256), (4, 512)
    ]  # fmt: skip
    for row, event in zip(rows, logged, strict=True):
        for name in SHARPNESS:
            assert row[name] == pytest.approx(event[name], rel=1e-6), name
    assert gptexp("train", *both, "hydra.run.dir=bare").returncode == 0
    assert equal(tmp_path / "run", tmp_path / "bare")


@pytest.mark.parametrize(
    ("code", "line"),
    e2e_then_slow(
        [
            ("os.kill(os.getpid(), 9)", "sharpness after step 4: its process was killed by SIGKILL"),
            ("raise RuntimeError('no luck')", "sharpness after step 4: its process failed (RuntimeError: no luck)"),
            ("print('x'); raise SystemExit(0)", "sharpness after step 4: JSONDecodeError: Expecting value"),
            (
                "os.remove(sys.argv[1] + '/checkpoints/step-00000004/optimizer.safetensors')",
                "checkpoints/step-00000004: optimizer.safetensors:",
            ),
        ],
        2,
    ),
)
def test_a_failure_is_a_line_and_training_goes_on(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, with_code: Callable[[str], dict[str, str]], code: str, line: str
) -> None:
    own = ["train.sharpness_every_tokens=100000", "hydra.run.dir=run"]
    done = gptexp("train", *tiny, *SMALL, *own, env=with_code(code))
    assert done.returncode == 0
    problems = [text for text in done.stderr.splitlines() if not text.startswith("tokenised ")]
    assert len(problems) == 1, done.stderr
    assert line in problems[0]
    assert problems[0].endswith("; training continues")
    assert events(tmp_path / "run", "sharpness") == []
    assert summary(tmp_path / "run")["status"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "at"), [(signal.SIGTERM, 2), (signal.SIGTERM, 4), (signal.SIGKILL, 2)])
def test_a_run_that_is_stopped_while_it_measures_continues_with_that(
    start: Start,
    gptexp: Gptexp,
    tiny: list[str],
    tmp_path: Path,
    with_code: Callable[[str], dict[str, str]],
    number: signal.Signals,
    at: int,
) -> None:
    """In the middle, and after the last step. The stop leaves no process, and loses no step."""
    process = tmp_path / "process"
    hang = f"if sys.argv[2] == '{at}': open({str(process)!r}, 'x').write(str(os.getpid())); time.sleep(600)"
    own = [*tiny, *SMALL, "world.size=2", "train.sharpness_every_tokens=256", f"hydra.run.dir={tmp_path / 'run'}"]
    run = start("train", *own, env=with_code(hang))
    wait_for(lambda: process.is_file() and process.read_text(), run, 240)
    run.send_signal(number)
    run.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{process.read_text()}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if number == signal.SIGTERM:
        assert run.returncode == 143
        assert summary(tmp_path / "run")["status"] == "interrupted"
    assert steps_of(tmp_path / "run")[-1] == at
    assert measured_at(tmp_path / "run") == ([2] if at == 4 else [])
    deadline = time.monotonic() + 30
    while run_dir.is_locked(tmp_path / "run"):  # ranks whose parent was killed exit a moment later
        assert time.monotonic() < deadline
        time.sleep(0.1)
    done = gptexp("resume", "run")
    assert done.returncode == 0, done.stderr
    assert measured_at(tmp_path / "run") == [2, 4]
    assert all(event["sharpness/hessian"] > 0 for event in events(tmp_path / "run", "sharpness"))
    assert summary(tmp_path / "run")["status"] == "completed"
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_measurement_longer_than_the_limit_of_time_is_given_up_when_it_is_tried_again(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, with_code: Callable[[str], dict[str, str]]
) -> None:
    """Otherwise each attempt would begin with it, and training would never go on."""
    env = {**os.environ, **with_code("time.sleep(600)")}
    own = [*tiny, *SMALL, "train.sharpness_every_tokens=256", "train.max_minutes=0.2", "hydra.run.dir=run"]
    measured = []
    for _ in range(4):
        done = gptexp("train", *own, env=env)
        assert done.returncode == 0, done.stderr
        measured.append(measured_at(tmp_path / "run"))
    assert measured == [[], [2], [2], [2, 4]]
    assert [event.get("sharpness/hessian") for event in events(tmp_path / "run", "sharpness")] == [None, None]
    assert gptexp("train", *own, env=env).returncode == 0
    assert summary(tmp_path / "run")["status"] == "completed"
