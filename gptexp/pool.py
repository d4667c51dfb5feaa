"""Runs side by side: each in processes of its own, on devices that no other has, and all of them asked to stop at once.

Knows processes, devices and signals; what runs is for `sweep` and how a run ends for `resume`, which each of them is.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

from gptexp.distributed import AT_ONCE
from gptexp.errors import EXIT_FAILED, UserError
from gptexp.signals import SAME_REQUEST_S, at_parents_death

OUTPUT = "output.log"  # of a run that has no terminal of its own
POLL_S = 0.05


class Job(Protocol):
    """A run to be begun or gone on with, in a directory that holds its config."""

    @property
    def directory(self) -> Path: ...

    @property
    def world_size(self) -> int: ...


class Process(Protocol):
    """What runs a job: here a `subprocess.Popen`."""

    def poll(self) -> int | None:
        """The exit code once it has ended."""

    def send_signal(self, number: int) -> None:
        """Ask it to save and leave."""

    def wait(self) -> int:
        """Until it has ended."""


J = TypeVar("J", bound=Job)


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES would name one by one; empty without a GPU."""
    import torch

    count = torch.cuda.device_count()
    named = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    return (named or [str(number) for number in range(count)])[:count]  # CUDA stops at the first that is not there


def start_here(job: Job, gpus: Sequence[str], at_once: int) -> Process:
    """A job in processes of this machine, one of `at_once`, with `gpus` of its own."""
    environment = {**os.environ, AT_ONCE: str(at_once)}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with nullcontext() if at_once == 1 else (job.directory / OUTPUT).open("ab") as output:
        return subprocess.Popen(
            resume_command(job.directory),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C comes to this process, which passes it on
            preexec_fn=partial(at_parents_death, signal.SIGTERM),
        )


def resume_command(directory: Path) -> list[str]:
    """What begins a run, or goes on with it."""
    return [sys.executable, "-m", "gptexp.resume", str(directory.absolute())]


def run_all(
    waiting: list[J],
    more: Callable[[], J | None],
    at_once: int,
    gpus: Sequence[str] | None,
    decided: Callable[[], bool],
    begins: Callable[[J, Sequence[str]], object],
    ended: Callable[[J, int], None],
    start: Callable[[J, Sequence[str], int], Process] = start_here,
) -> int | None:
    """Run jobs, up to `at_once` of them side by side; the number of the signal that stopped them, or None.

    Those of `waiting` are taken out of it, then `more` gives one by one. With `gpus` each job has as many of them as
    ranks, and no other sees these. Until `decided` nothing runs beside the first job: what that decides about the
    machine holds for all. `begins` is called before a job starts, `ended` with its exit code. SIGINT, SIGTERM and
    SIGUSR1 are passed on to all that run, which save; nothing starts after that.
    """
    running = dict[Process, tuple[J, list[str]]]()
    free = list(gpus or [])
    with _passed_on(running) as received:
        while True:
            while not received and len(running) < (at_once if decided() else 1):
                if not waiting and (another := more()) is not None:
                    waiting.append(another)
                job = next((job for job in waiting if gpus is None or job.world_size <= len(free)), None)
                if job is None and (running or not waiting):
                    break
                job = job or waiting[0]  # needs more than there are, and will say so itself
                waiting.remove(job)
                own = [free.pop(0) for _ in range(min(job.world_size, len(free)))]
                try:
                    begins(job, own)
                    if received:
                        break
                    process = start(job, own, at_once)
                except (OSError, UserError) as error:
                    print(f"gptexp: {job.directory}: {error}", file=sys.stderr)
                    free.extend(own)
                    ended(job, EXIT_FAILED)
                    continue
                running[process] = job, own
                if received:  # between the last look and now: nobody has passed it on to this one
                    process.send_signal(received[-1])
            if not running:
                return received[0] if received else None
            time.sleep(POLL_S)
            for process, code in [(process, process.poll()) for process in running]:
                if code is not None:
                    job, own = running.pop(process)
                    free.extend(own)
                    ended(job, code)


@contextmanager
def _passed_on(running: "dict[Process, tuple[J, list[str]]]") -> Iterator[list[int]]:
    """Pass signals on to all that run, Ctrl-C too; yields the numbers of those received."""
    received: list[int] = []
    last = -math.inf

    def pass_on(number: int, _frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last < SAME_REQUEST_S:
            return
        last = time.monotonic()
        received.append(number)
        for process in running:
            process.send_signal(number)

    names = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, pass_on) for number in names}
    try:
        yield received
    finally:
        for process in running:  # only where something of ours has failed
            process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
