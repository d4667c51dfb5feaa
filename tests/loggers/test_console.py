"""The output of a run: lines, a bar, JSON, or one line."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, clean, events, summary, wait_for
from real_runs import begun
from rich.console import Console
from screens import Screen, written_to

from gptexp.config.compose import compose
from gptexp.config.schema import fields_of
from gptexp.loggers.console import BarSink, JsonSink, LineSink, build_console, eval_line, sharpness_line
from gptexp.process.signals import StopRequest
from gptexp.process.terminal import say, warn
from gptexp.storage.checkpoint import TrainState

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


def test_the_progress_bar_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(build_console("auto", 10, 1000, TrainState()), LineSink)
    assert isinstance(build_console("json", 10, 1000, TrainState()), JsonSink)
    assert build_console("off", 10, 1000, TrainState()) is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    bar = build_console("auto", 10, 1000, TrainState())
    assert isinstance(bar, BarSink)
    bar.close({}, 0)


@pytest.mark.parametrize(("mfu", "shown"), [(None, ""), (0.4213, "  MFU 42.1%")])
def test_bar_shows_losses_rate_utilisation_and_time_left(mfu: float | None, shown: str) -> None:
    bar = BarSink(10, 1000, TrainState(step=4, tokens=400, val_loss=9.0))
    step = {**step_event(6), "train/loss": 3.14159, "perf/tokens_per_s": 12345.6, "perf/mfu_palm": mfu}

    def drawn() -> str:
        console = Console(width=120, record=True, force_terminal=True)
        console.print(bar._progress.get_renderable())
        return console.export_text()

    bar.write(step)
    assert f"loss 3.1416  val 9.0000  12,346 tok/s{shown}" in drawn()
    bar.write({**of_step(6), "event": "eval", "val/loss": 4.5, "val/ppl": 90.0})
    assert "loss 3.1416  val 4.5000" in drawn()  # before the next step
    bar.write({**step, **of_step(7)})
    assert "8/10" in (text := drawn())
    assert "left" in text
    bar.rewind(TrainState(step=4, tokens=250, val_loss=9.0))
    assert "val 9.0000" in (text := drawn())
    assert "4/10" in text
    assert bar._progress.tasks[0].percentage == 25  # by tokens: the steps of a ramp differ in size
    bar.close({}, 0)


def step_event(step: int) -> dict[str, Any]:
    return {**of_step(step), "event": "step", "train/loss": 5.5, "perf/tokens_per_s": 6912.3, "perf/mfu_palm": 0.421}


def of_step(step: int) -> dict[str, int]:
    """What each event of a step has. All steps have 100 tokens."""
    return {"step": step, "tokens": 100 * (step + 1)}


@pytest.mark.parametrize("columns", [80, 120])
def test_every_message_has_a_line_of_its_own_above_the_bar(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of output of a run, and that of libraries, between the steps of a bar on a terminal."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    stop, screen = StopRequest(), Screen(columns)
    with written_to(screen):
        bar = BarSink(10, 1000, TrainState())
        for step, output in enumerate(
            (
                lambda: warn("wandb: a warning"),
                lambda: say("a line that is said"),
                lambda: print("a library prints :warning: [bold]"),
                lambda: print("a library warns", file=sys.stderr),
                lambda: bar.write({**of_step(4), "event": "eval", "val/loss": 4.5, "val/ppl": 90.0}),
                lambda: stop.on_signal(signal.SIGINT, None),
                lambda: bar.write({"event": "alert", "step": 6, "text": "x" * (columns + 5)}),
            )
        ):
            stop.training = True
            bar.write(step_event(step))
            bar._progress.refresh()
            output()
            bar._progress.refresh()
        bar.write({**of_step(6), "event": "eval", "val/loss": 3.5, "val/ppl": 33.1, "val/bpb": 1.25})
        bar.close({}, 0)
        say("the end")
    *lines, drawn, last = screen.lines()
    alert = f"step    7 | warning: {'x' * (columns + 5)}"
    assert lines == [
        "gptexp: wandb: a warning",
        "a line that is said",
        "a library prints :warning: [bold]",
        "a library warns",
        "step    5 | val loss: 4.500000 | perplexity: 90.00",
        "gptexp: SIGINT: the run stops after this step; repeat the signal to stop at once",
        alert[:columns],
        alert[columns:],
        "step    7 | val loss: 3.500000 | perplexity: 33.10 | bits per byte: 1.2500",
    ]
    assert drawn.startswith("step  7/10 ━" if columns == 120 else " 7/10 ━")
    assert "loss 5.5000  val 3.5000  6,912 tok/s" in drawn
    assert last == "the end"
    assert screen.shows_cursor


def test_an_evaluation_shows_the_figure_by_which_each_task_is_known() -> None:
    scores = {
        "hellaswag/acc": 0.28, "hellaswag/acc_norm": 0.29, "lambada_openai/perplexity": 40.0,
        "lambada_openai/acc": 0.32, "lm_eval/hellaswag/acc_norm": 0.31, "wikitext/word_perplexity": 37.5,
    }  # fmt: skip
    event = {"step": 4, "flops": 1.0, "val/loss": 4.5, "val/ppl": 90.0, **scores}
    assert eval_line(event) == (
        "step    5 | val loss: 4.500000 | perplexity: 90.00 | hellaswag: 0.2900 | lambada_openai: 0.3200 | "
        "lm_eval/hellaswag: 0.3100 | wikitext: 37.5000"
    )


def test_sharpness_is_shown_beside_its_threshold() -> None:
    event = {"step": 4, "sharpness/hessian": 12.3456, "sharpness/preconditioned": None, "sharpness/threshold": 3800.0,
             "sharpness/sam": 0.012}  # fmt: skip
    assert sharpness_line(event) == (
        "step    5 | sharpness: 12.35 | preconditioned: unknown, threshold 3800 | SAM: 0.012"
    )
    assert sharpness_line({**event, "sharpness/threshold": None}) == "step    5 | sharpness: 12.35 | SAM: 0.012"


@pytest.mark.parametrize("columns", [80, 120])
def test_no_number_of_the_bar_is_cut(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Screen(columns)
    with written_to(screen):
        bar = BarSink(19074, 1_907_400, TrainState(val_loss=3.4))
        bar.write({**step_event(12344), "perf/tokens_per_s": 1234567.8})
        bar.close({}, 0)
    [line] = screen.lines()
    assert "12345/19074 " in line
    assert "loss 5.5000  val 3.4000  1,234,568 tok/s  MFU 42.1% " in line
    assert line.endswith("left -:--:--")


def test_stderr_in_a_file_stays_there_while_a_bar_is_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    bar = BarSink(10, 1000, TrainState())
    warn("a warning")
    bar.close({}, 0)
    assert capsys.readouterr().err == "gptexp: a warning\n"


@pytest.mark.e2e
def test_a_run_on_a_terminal_that_is_interrupted_and_resumed(tiny: list[str], tmp_path: Path, cache: Path) -> None:
    """The bar, the messages and the last lines of a real run that Ctrl-C stops, then of its second half."""
    run = ["train", *tiny, "log=disabled", "log.progress=bar", "log.sample_tokens=0", "hydra.run.dir=out"]
    run += ["train.max_steps=120", "train.eval_every=20", "train.save_every=0"]
    env = {**clean(os.environ, cache), "TERM": "xterm", "PYTHONPATH": str(ROOT)}

    def on(screen: Screen) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "gptexp", *run], stdout=screen.fd, stderr=screen.fd, cwd=tmp_path, env=env
        )

    first, second = Screen(120), Screen(120)
    process = on(first)
    wait_for(begun(tmp_path / "out", 25), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(240) == 130
    steps = summary(tmp_path / "out")["steps"]
    lines = first.lines()
    assert "gptexp: SIGINT: the run stops after this step; repeat the signal to stop at once" in lines
    assert any(line.startswith("step   20 | val loss: ") for line in lines)
    [bar] = [line for line in lines if "/120" in line]
    assert bar.startswith(f"step {steps:3d}/120 ")
    assert any(line.startswith(f"interrupted after {steps} steps") for line in lines)
    assert on(second).wait(240) == 0
    lines = second.lines()
    assert any(line.startswith(f"resuming        after step {steps}, ") for line in lines)
    [bar] = [line for line in lines if "/120" in line]
    final = summary(tmp_path / "out")["final_val_loss"]
    assert bar.startswith("step 120/120 ")
    assert f"val {final:.4f}" in bar
    assert any(line.startswith("step  120 | val loss: ") for line in lines)


JSON_MODE = ("log.progress=json", "log.sample_tokens=4")


def kinds(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The kind of the event on each line of stdout."""
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["event"] for line in done.stdout.splitlines()]


def of_runs(found: list[str], runs: int) -> bool:
    """Whether `found` are the events of `runs` runs, each with four steps and one sample."""
    counts = [found.count(kind) for kind in ("start", "step", "sample", "end")]
    return (found[0], found[-1]) == ("start", "end") and counts == [runs, 4 * runs, runs, runs]


@pytest.mark.e2e
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


@pytest.mark.e2e
def test_log_quiet_prints_one_line_and_logs_everything(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    assert gptexp("prepare", *tiny).returncode == 0  # the first command that tokenises a text prints a line
    options = [option for option in tiny if not option.startswith("log")]
    done = gptexp("train", *options, "log=quiet", "log.wandb.mode=offline", "hydra.run.dir=out")
    assert done.returncode == 0
    assert "wandb sync" in done.stderr  # how to upload what wandb has logged offline
    [line] = done.stdout.splitlines()
    assert line.startswith("completed after 4 steps")
    assert len(events(tmp_path / "out", "sample")) == 1
    quiet, default = ({key: value for key, _, value in fields_of(compose(o))} for o in (["log=quiet"], []))
    assert {key for key in quiet if quiet[key] != default[key]} == {"log.progress"}
