"""The terminal: a progress bar on a terminal, one line per step otherwise, or JSON for a program.

Text for people counts completed steps: the first step is step 1. The events, and so JSON, count steps from 0.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from gptexp.config.metrics import SHARPNESS, Metric, is_loss
from gptexp.config.schema import HELLASWAG
from gptexp.loggers.run_log import Sink
from gptexp.process.terminal import emit, say
from gptexp.storage.checkpoint import TrainState
from gptexp.storage.run_dir import finite

EARLY_STOP = "early stop"  # an alert that is no warning
WIDE = 100  # characters; a narrower terminal shows less text, so that no number is cut
NAME_CHARS = 70  # largest length of an operation's name; the names of C++ templates have thousands


def _after(event: dict[str, Any], what: str) -> str:
    """`what` after the number of completed steps, in nanoGPT's style."""
    return f"step {event['step'] + 1:4d} | {what}"


def step_line(event: dict[str, Any]) -> str:
    return _after(
        event,
        f"loss: {event[Metric.TRAIN_LOSS]:.6f} | lr {event[Metric.LR]:.4e} | "
        f"norm: {event[Metric.GRAD_NORM]:.4f} | dt: {event[Metric.STEP_MS]:.2f}ms | "
        f"tok/sec: {event[Metric.TOKENS_PER_S]:.2f}",
    )


def eval_line(event: dict[str, Any]) -> str:
    parts = [f"val loss: {event[Metric.VAL_LOSS]:.6f}", f"perplexity: {event[Metric.VAL_PPL]:.2f}"]
    if (bits := event.get(Metric.VAL_BPB)) is not None:
        parts.append(f"bits per byte: {bits:.4f}")
    if (averaged := event.get(Metric.VAL_LOSS_EMA)) is not None:
        parts.append(f"averaged weights: {averaged:.6f}")
    more = {key: value for key, value in event.items() if key.startswith(OWN) or _is_of_text(key)}
    scores = {**_main_scores(event), **more}
    parts += [f"{name}: {'not finite' if value is None else f'{value:.4f}'}" for name, value in scores.items()]
    return _after(event, " | ".join(parts))


OWN = "eval/"  # how the names of own metrics begin (train.evaluations)
_NO_TASKS = {metric.rpartition("/")[0] for metric in Metric} - {HELLASWAG}  # what metrics begin with


def _is_of_text(key: str) -> bool:
    """Whether it is the loss of a text of data.validation."""
    return key not in (Metric.VAL_LOSS, Metric.VAL_LOSS_EMA) and is_loss(key)


def _main_scores(event: dict[str, Any]) -> dict[str, float]:
    """The best-known figure of each task: acc_norm, else acc, else its first."""
    figures: dict[str, dict[str, float]] = {}
    for key, value in event.items():
        task, _, name = key.rpartition("/")
        if task not in _NO_TASKS and not key.startswith((OWN, "val/")):
            figures.setdefault(task, {})[name] = value
    return {task: of.get("acc_norm", of.get("acc", next(iter(of.values())))) for task, of in figures.items()}


def sharpness_line(event: dict[str, Any]) -> str:
    hessian, preconditioned, threshold, sam = (
        "unknown" if (value := event.get(metric)) is None else f"{value:.4g}" for metric in SHARPNESS
    )
    parts = [f"sharpness: {hessian}"]
    if event.get(Metric.SHARPNESS_THRESHOLD) is not None:
        parts.append(f"preconditioned: {preconditioned}, threshold {threshold}")
    return _after(event, " | ".join([*parts, f"SAM: {sam}"]))


def profile_text(event: dict[str, Any]) -> str:
    shares = event["shares"]
    rows = [
        f"{op['share']:7.1%} {op['ms_per_step']:12,.3f} {op['calls_per_step']:9,.1f}  {op['name'][:NAME_CHARS]}"
        for op in event["operations"]
    ]
    return "\n".join(
        [
            "--- the most expensive operations, by their own time",
            "  share      ms/step     calls  operation",
            *rows,
            f"shares of a step: {shares['data']:.1%} waiting for data, {shares['collectives']:.1%} in collectives "
            f"(other work may overlap them), {shares['optimizer']:.1%} in the optimizer",
            f"the trace: {event['path']}",
            "---",
        ]
    )


LINES: dict[str, Callable[[dict[str, Any]], str]] = {
    "eval": eval_line,
    "sharpness": sharpness_line,
    "fault": lambda event: _after(event, event["text"]),
    "alert": lambda event: _after(event, f"{'' if event.get('about') == EARLY_STOP else 'warning: '}{event['text']}"),
    "profile": profile_text,
    "sample": lambda event: f"--- a sample\n{event['text']}\n---",
}


class LineSink(Sink):
    """Prints a line for each step and each event in `LINES`."""

    def write(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            say(step_line(event))
        elif line := LINES.get(event["event"]):
            say(line(event))


class JsonSink(Sink):
    """Prints each event as the line that metrics.jsonl has, and the summary at the end."""

    def write(self, event: dict[str, Any]) -> None:
        emit(json.dumps(finite(event)))

    def rewind(self, state: TrainState) -> None:
        self.write({"event": "rewind", "step": state.step - 1, "tokens": state.tokens})

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        self.write({"event": "end", **summary, "exit_code": exit_code})


class BarSink(Sink):
    """Shows a progress bar with losses, tokens/s, MFU and remaining time. Other printed lines appear above it.

    The bar and the time go by tokens, because the steps of a ramp differ in size.
    """

    def __init__(self, steps: int, tokens: int, state: TrainState) -> None:
        self._steps = steps
        self._loss = self._speed = ""  # of the newest step
        self._val = _val(state.val_loss)
        console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        wide = console.width >= WIDE
        self._progress = Progress(
            *([TextColumn("step")] if wide else []),
            TextColumn("{task.fields[steps]}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # takes the width that the others leave
            TextColumn("{task.description}"),
            *([TimeElapsedColumn()] if wide else []),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            redirect_stderr=sys.stderr.isatty(),  # if stderr is a file, errors still go there
        )
        counted = self._counted(state.step)
        self._task = self._progress.add_task("starting", total=tokens, completed=state.tokens, steps=counted)
        self._progress.start()

    def write(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            mfu = f"  MFU {event[Metric.MFU_PALM]:.1%}" if event[Metric.MFU_PALM] is not None else ""
            self._loss = f"loss {event[Metric.TRAIN_LOSS]:.4f}"
            self._speed = f"{event[Metric.TOKENS_PER_S]:,.0f} tok/s{mfu}"
            self._update(event["step"] + 1, event["tokens"])
            return
        if event["event"] == "eval":
            self._val = _val(event[Metric.VAL_LOSS])
            self._update(event["step"] + 1, event["tokens"])
        if event["event"] == "sample":
            self._progress.stop()  # training is over; the lines after it are plain text
        if line := LINES.get(event["event"]):
            say(line(event))

    def rewind(self, state: TrainState) -> None:
        self._val = _val(state.val_loss)
        self._update(state.step, state.tokens)

    def _update(self, steps: int, tokens: int) -> None:
        text = "  ".join(filter(None, (self._loss, self._val, self._speed)))
        self._progress.update(self._task, completed=tokens, description=text, steps=self._counted(steps))

    def _counted(self, steps: int) -> str:
        """`steps` of all steps, in a width that does not depend on `steps`."""
        return f"{steps:{len(str(self._steps))}}/{self._steps}"

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        self._progress.stop()


def _val(loss: float | None) -> str:
    return f"val {loss:.4f}" if loss is not None else ""


def build_console(progress: str, steps: int, tokens: int, state: TrainState) -> Sink | None:
    """Build the sink that `log.progress` asks for; `auto` is a bar if stdout is a terminal. None if it is off.

    `steps` and `tokens` are those of the whole run.
    """
    if progress == "off":
        return None
    if progress == "json":
        return JsonSink()
    if progress == "bar" or (progress == "auto" and sys.stdout.isatty()):
        return BarSink(steps, tokens, state)
    return LineSink()
