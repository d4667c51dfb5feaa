"""Runs several runs at once, each in new processes and on GPUs of its own.

Owns processes, devices and signals. A sweep chooses the runs; each of them is a `gptexp resume`.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

from gptexp.config.schema import Config
from gptexp.distributed.ranks import AT_ONCE, Rank
from gptexp.process.errors import EXIT_FAILED, InUseError, UserError
from gptexp.process.signals import HANDLED, SAME_REQUEST_S, start_a_run
from gptexp.process.terminal import warn

OUTPUT = "output.log"  # in a run's directory: its output, if several runs share the terminal
POLL_S = 0.05  # s: between two checks of all processes


class Runnable(Protocol):
    """A run to start or resume. Its directory contains its config."""

    @property
    def directory(self) -> Path: ...

    @property
    def world_size(self) -> int: ...


class Process(Protocol):
    """The process of a run: a `subprocess.Popen`, or a job of a cluster."""

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""

    def send_signal(self, number: int) -> None:
        """Ask it to save a checkpoint and end."""

    def wait(self) -> int:
        """Wait for its end. Returns the exit code."""


R = TypeVar("R", bound=Runnable)
R_contra = TypeVar("R_contra", bound=Runnable, contravariant=True)


class Source(Protocol[R]):
    """Chooses the runs, and receives their exit codes."""

    waiting: list[R]  # runs to start; `run_all` removes each run that it starts
    elsewhere: list[R]  # runs that another command runs

    def more(self) -> R | None:
        """Return another run once `waiting` is empty; None if there is none now."""

    def set_aside(self, run: R) -> None:
        """Add a run to `elsewhere`. `more` removes it, and returns it if it has ended there and is not done."""

    def share_decisions(self) -> bool:
        """Give the first run's `auto` values to the others. Returns whether it has any; until then it runs alone."""

    def ended(self, run: R, code: int) -> None:
        """Record that a run has ended with this exit code."""


class Starter(Protocol[R_contra]):
    def begin(self, run: R_contra, gpus: Sequence[str]) -> object:
        """Prepare the directory of a run. Raises `InUseError` if another command runs it, `UserError` if it fails."""

    def start(self, run: R_contra, gpus: Sequence[str], at_once: int) -> Process:
        """Start the run on these GPUs, as one of `at_once` runs."""


@dataclass(frozen=True)
class Places:
    """How many runs fit on the devices."""

    at_once: int
    gpus: list[str] | None = None  # each run gets one per rank; None: the runs share a CPU, or run elsewhere


def require_devices(configs: Sequence[Config]) -> None:
    """Raise `ConfigError` if a config names a device that this machine does not have."""
    for config in configs:
        if config.train.device in ("cuda", "mps"):
            from gptexp.machine.device import check_device  # imports torch

            size = config.world.size or 1
            check_device(config.train.device, Rank(size - 1, size, size - 1, size))


def visible_gpus() -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them; empty without a GPU."""
    import torch  # here, because a sweep's parent starts without torch

    count = torch.cuda.device_count()
    named = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    # CUDA ignores the names after the first invalid one.
    return (named or [str(number) for number in range(count)])[:count]


def start_here(run: Runnable, gpus: Sequence[str], at_once: int) -> Process:
    """Start a run in new processes on this machine and these GPUs, as one of `at_once` runs."""
    environment = {**os.environ, AT_ONCE: str(at_once)}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with nullcontext() if at_once == 1 else (run.directory / OUTPUT).open("ab") as output:
        return subprocess.Popen(
            resume_command(run.directory),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C reaches only this process, which forwards it
            preexec_fn=start_a_run,
        )


def resume_command(directory: Path) -> list[str]:
    """Return the command that starts or resumes a run."""
    return [sys.executable, "-m", "gptexp.resume", str(directory.absolute())]


def run_all(source: Source[R], starter: Starter[R], places: Places) -> int | None:
    """Run all runs of `source`, and wait for those that run elsewhere. Returns the signal that stopped them, or None.

    Forwards SIGINT, SIGTERM and SIGUSR1 to all runs, which save a checkpoint; starts no run after that.
    """
    running = dict[Process, tuple[R, list[str]]]()
    free = list(places.gpus or [])
    with _forwarding_signals(running) as received:
        while True:
            while not received and len(running) < (places.at_once if source.share_decisions() else 1):
                run = _next(source, places, len(free), idle=not running)
                if run is None:
                    break
                gpus = [free.pop(0) for _ in range(min(run.world_size, len(free)))]
                try:
                    starter.begin(run, gpus)
                    if received:
                        source.ended(run, 128 + received[-1])
                        break
                    process = starter.start(run, gpus, places.at_once)
                except InUseError:
                    free.extend(gpus)
                    source.set_aside(run)
                    continue
                except (OSError, UserError) as error:
                    warn(f"{run.directory}: {error}")
                    free.extend(gpus)
                    source.ended(run, EXIT_FAILED)
                    continue
                running[process] = run, gpus
                if received:  # between the check above and this line, when the process was not in `running`
                    process.send_signal(received[-1])
            if not running and (received or not source.elsewhere):
                return received[0] if received else None
            time.sleep(POLL_S)
            for process, code in [(process, process.poll()) for process in running]:
                if code is not None:
                    run, gpus = running.pop(process)
                    free.extend(gpus)
                    source.ended(run, code)


def _next(source: Source[R], places: Places, free: int, idle: bool) -> R | None:
    """Remove and return the first waiting run that needs at most `free` GPUs, else None.

    If nothing runs (`idle`), returns the first run in any case: it reports the missing GPUs itself.
    """
    if not source.waiting and (further := source.more()) is not None:
        source.waiting.append(further)
    run = next((run for run in source.waiting if places.gpus is None or run.world_size <= free), None)
    if run is None and idle and source.waiting:
        run = source.waiting[0]
    if run is not None:
        source.waiting.remove(run)
    return run


@contextmanager
def _forwarding_signals(running: dict[Process, tuple[R, list[str]]]) -> Iterator[list[int]]:
    """Forward SIGINT, SIGTERM and SIGUSR1 to all running processes. Yields the list of received signals."""
    received: list[int] = []
    last = -math.inf

    def forward(number: int, _frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last < SAME_REQUEST_S:
            return
        last = time.monotonic()
        received.append(number)
        for process in running:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in HANDLED}
    try:
        yield received
    finally:
        for process in running:  # not empty only after an error in this process
            process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
