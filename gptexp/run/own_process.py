"""Separate processes: for a run, and for work beside training, whose imports and failures then stay apart."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from gptexp.distributed.ranks import without_launcher
from gptexp.process.errors import UserError
from gptexp.process.signals import PARENT, die_with_parent

POLL_S = 0.2
OWN = "gptexp: "  # begins each line of an error of gptexp


def resume_command(directory: Path) -> list[str]:
    """Return the command that starts or resumes the run in `directory`."""
    return [sys.executable, "-Pm", "gptexp.resume", str(directory.absolute())]


def ask(argv: Sequence[str], given: str, who: str, is_stopped: Callable[[], bool]) -> str | None:
    """Return what `python -m ARGV` prints; or end it and return None once `is_stopped()` is true.

    If it fails, raises `UserError` with the line of its error. An error that is not gptexp's own is put after `given`
    and the words that `who` failed.
    """
    process = subprocess.Popen(
        [sys.executable, "-Pm", *argv],
        env={**without_launcher(os.environ), PARENT: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C reaches only this process, which decides what it means
    )
    try:
        while process.returncode is None:
            if is_stopped():
                return None
            with suppress(subprocess.TimeoutExpired):
                output, errors = process.communicate(timeout=POLL_S)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode == 0:
        return output
    if process.returncode < 0:
        raise UserError(f"{given}: {who} was killed by {signal.Signals(-process.returncode).name}")
    lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
    messages = [text.removeprefix(OWN) for text in lines if text.startswith(OWN)]  # a package may warn after the error
    raise UserError(messages[-1].removeprefix("config error: ") if messages else f"{given}: {who} failed ({lines[-1]})")


def die_with_asker() -> None:
    """End this process, which `ask` has started, as soon as the one that waits for its answer ends."""
    die_with_parent(int(os.environ[PARENT]), signal.SIGKILL)
