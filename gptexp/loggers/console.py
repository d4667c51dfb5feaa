"""The terminal: a live bar where someone watches, a line per step elsewhere."""

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gptexp.checkpoint import TrainState
from gptexp.terminal import say


def step_line(event: dict[str, Any]) -> str:
    """The line that nanoGPT's readers know."""
    return (
        f"step {event['step']:4d} | loss: {event['train/loss']:.6f} | lr {event['optim/lr']:.4e} | "
        f"norm: {event['optim/grad_norm']:.4f} | dt: {event['perf/step_ms']:.2f}ms | "
        f"tok/sec: {event['perf/tokens_per_s']:.2f}"
    )


def eval_line(event: dict[str, Any]) -> str:
    return f"step {event['step']:4d} | val loss: {event['val/loss']:.6f} | perplexity: {event['val/ppl']:.2f}"


def fault_line(event: dict[str, Any]) -> str:
    return f"step {event['step']:4d} | {event['text']}"


def sample_text(event: dict[str, Any]) -> str:
    return f"--- a sample\n{event['text']}\n---"


class LineSink:
    """One line per event on stdout."""

    def write(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            say(step_line(event))
        elif event["event"] == "eval":
            say(eval_line(event))
        elif event["event"] == "fault":
            say(fault_line(event))
        elif event["event"] == "sample":
            say(sample_text(event))

    def rewind(self, state: TrainState) -> None:
        pass

    def close(self, summary: dict[str, Any]) -> None:
        pass


class BarSink:
    """A bar with loss, tokens/s and the time left; validation and notes scroll by above it."""

    def __init__(self, steps: int, first_step: int) -> None:
        self._console = Console(highlight=False, markup=False)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("starting", total=steps, completed=first_step)
        self._progress.start()

    def write(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            text = f"loss {event['train/loss']:.4f}  {event['perf/tokens_per_s']:,.0f} tok/s"
            self._progress.update(self._task, completed=event["step"] + 1, description=text)
        elif event["event"] == "eval":
            self._console.print(eval_line(event))
        elif event["event"] == "fault":
            self._console.print(fault_line(event))
        elif event["event"] == "sample":
            self._progress.stop()  # what comes after training is plain text
            self._console.print(sample_text(event))

    def rewind(self, state: TrainState) -> None:
        self._progress.update(self._task, completed=state.step)

    def close(self, summary: dict[str, Any]) -> None:
        self._progress.stop()


def build_console(progress: str, steps: int, first_step: int) -> LineSink | BarSink | None:
    """What log.progress asks for; `auto` looks whether stdout is a terminal."""
    if progress == "off":
        return None
    if progress == "bar" or (progress == "auto" and sys.stdout.isatty()):
        return BarSink(steps, first_step)
    return LineSink()
