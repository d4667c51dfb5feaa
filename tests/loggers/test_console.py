"""The output of a run: lines, a bar, JSON, or one line."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from rich.console import Console

from gptexp.loggers.console import BarSink, JsonSink, LineSink, build_console
from gptexp.storage.checkpoint import TrainState

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


def test_the_progress_bar_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(build_console("auto", 10, TrainState()), LineSink)
    assert isinstance(build_console("json", 10, TrainState()), JsonSink)
    assert build_console("off", 10, TrainState()) is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    bar = build_console("auto", 10, TrainState())
    assert isinstance(bar, BarSink)
    bar.close({}, 0)


@pytest.mark.parametrize(("mfu", "shown"), [(None, ""), (0.4213, "  MFU 42.1%")])
def test_bar_shows_losses_rate_utilisation_and_time_left(
    mfu: float | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = BarSink(10, TrainState(step=4, val_loss=9.0))
    step = {"event": "step", "step": 6, "train/loss": 3.14159, "perf/tokens_per_s": 12345.6, "perf/mfu_palm": mfu}

    def drawn() -> str:
        console = Console(width=120, record=True, force_terminal=True)
        console.print(bar._progress.get_renderable())
        return console.export_text()

    bar.write(step)
    assert f"loss 3.1416  val 9.0000  12,346 tok/s{shown}" in drawn()
    bar.write({"event": "eval", "step": 6, "val/loss": 4.5, "val/ppl": 90.0})
    bar.write({**step, "step": 7})
    assert "val 4.5000" in (text := drawn())
    assert "8/10" in text
    assert "left" in text
    bar.write({"event": "alert", "step": 7, "text": "look out"})
    assert "step    7 | warning: look out" in capsys.readouterr().out
    bar.close({}, 0)


JSON_MODE = ("log.progress=json", "log.sample_tokens=4")


def kinds(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The kind of the event on each line of stdout."""
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["event"] for line in done.stdout.splitlines()]


def of_runs(found: list[str], runs: int) -> bool:
    """Whether `found` are the events of `runs` runs, each with four steps and one sample."""
    counts = [found.count(kind) for kind in ("start", "step", "sample", "end")]
    return (found[0], found[-1]) == ("start", "end") and counts == [runs, 4 * runs, runs, runs]


def test_stdout_of_a_run_is_json_only(gptexp: Gptexp, tiny: list[str]) -> None:
    run = ("train", *tiny, *JSON_MODE, "hydra.run.dir=out")
    assert of_runs(kinds(gptexp(*run)), 1)
    assert kinds(gptexp(*run)) == kinds(gptexp("resume", "out")) == []  # the run is completed: no event


@pytest.mark.e2e
def test_stdout_of_two_ranks_is_json_only(gptexp: Gptexp, tiny: list[str]) -> None:
    assert of_runs(kinds(gptexp("train", *tiny, *JSON_MODE, "world.size=2")), 1)


@pytest.mark.e2e
def test_stdout_of_a_sweep_is_json_only(gptexp: Gptexp, tiny: list[str]) -> None:
    assert of_runs(kinds(gptexp("train", "-m", *tiny, *JSON_MODE, "optim.lr=1e-3,2e-3")), 2)


def test_log_quiet_prints_one_line(gptexp: Gptexp, tiny: list[str]) -> None:
    assert gptexp("prepare", *tiny).returncode == 0  # the first command that tokenises a text prints a line
    done = gptexp("train", *tiny, "hydra.run.dir=out")
    assert (done.returncode, done.stderr) == (0, "")
    [line] = done.stdout.splitlines()
    assert line.startswith("completed after 4 steps")
