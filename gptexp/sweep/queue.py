"""A queue of commands: each is a process of its own, in turn or several at once; a signal stops and saves all."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gptexp.distributed.ranks import AT_ONCE
from gptexp.process.errors import EXIT_DIVERGED, EXIT_FAILED, ConfigError, UserError
from gptexp.process.signals import STOPPED, at_parents_death, collected, start_a_run
from gptexp.process.terminal import say, warn
from gptexp.process.words import counted
from gptexp.storage import run_dir
from gptexp.sweep.launchers import visible_gpus

POLL_S = 0.1
TRAINING = ("train", "tune", "resume")  # verbs that save a checkpoint when a signal comes


@dataclass(frozen=True)
class Command:
    """A command of the file."""

    title: str  # its line, as typed
    arguments: list[str]  # of gptexp; the first is the verb
    output: Path  # what it prints, if others run beside it
    directory: Path | None = None  # of a single run, which says whether it is done
    waits: bool = False  # for all commands before it, and those after it wait for it
    needs: "Command | None" = None  # the earlier command whose run it begins with
    is_derived: bool = False  # the directory follows from the command, so it has the run of no other

    def status(self) -> str:
        """That of its run; "" without one."""
        if self.directory is None or not run_dir.is_run(self.directory):
            return ""
        try:
            return run_dir.present_status(self.directory, run_dir.read_summary(self.directory))
        except UserError:
            return "damaged"  # the command itself says how


@dataclass
class _Running:
    command: Command
    process: subprocess.Popen[bytes]
    gpus: list[str]
    sent: int = 0  # of the signals


class Queue:
    """Runs commands, at most `parallel` at once. Raises `ConfigError` if that needs more GPUs than there are."""

    def __init__(self, commands: Sequence[Command], parallel: int) -> None:
        self.waiting, self.parallel, self.total = list(commands), parallel, len(commands)
        gpus = visible_gpus() if parallel > 1 else []
        each = len(gpus) // parallel
        if gpus and not each:
            rule = f"visible GPUs: {len(gpus)}; use at most {len(gpus)}"
            raise ConfigError(f"--parallel={parallel}: {rule}", "out-of-range")
        self.free = [gpus[n * each : (n + 1) * each] for n in range(parallel)]  # the GPUs of each free place
        self.running: list[_Running] = []
        self.outcomes: list[tuple[Command, str]] = []
        self.failed = 0

    def run(self) -> int:
        """Run all commands. Returns the exit code: 1 if one failed, 128 + N after signal N."""
        signals = list[int]()
        with collected(signals):
            while self.running or (self.waiting and not signals):
                while not signals and self.may_start():
                    self.start(self.waiting.pop(0))
                time.sleep(POLL_S)
                for one in [*self.running]:
                    for number in signals[one.sent :]:
                        one.process.send_signal(number)
                    one.sent = len(signals)
                    if (code := one.process.poll()) is not None:
                        self.end(one, code)
        say(f"--- {len(self.outcomes)} of {counted(self.total, 'command')}")
        say(*(f"{outcome:<12} {command.title}" for command, outcome in self.outcomes))
        if signals:
            warn(f"interrupted: {counted(len(self.waiting), 'command')} not started; repeat the command to go on")
            return 128 + signals[0]
        return EXIT_FAILED if self.failed else 0

    def may_start(self) -> bool:
        if not self.waiting or len(self.running) == self.parallel:
            return False
        return not self.running or not (self.waiting[0].waits or any(one.command.waits for one in self.running))

    def start(self, command: Command) -> None:
        """Start a command, unless its run is done, or runs already."""
        status, outcome = command.status(), ""
        if command.needs is not None and command.needs.directory and command.needs.status() != "completed":
            line, self.failed = command.needs.title.partition(":")[0], self.failed + 1
            outcome = f"not started: the run of {line} is {command.needs.status() or 'not there'}"
        elif status == "running":
            outcome = status
        elif status in run_dir.DONE and command.is_derived:
            outcome = f"already {status}"
        if outcome:
            say(f"--- {outcome}: {command.title}")
            self.outcomes.append((command, outcome))
            return
        arguments = command.arguments
        if status and command.is_derived:  # begun: what its arguments name, such as latest, may be another run now
            arguments = ["resume", str(command.directory)]
        is_shown, gpus = self.parallel == 1, self.free.pop()
        where = f" on GPU {', '.join(gpus)}" if gpus else ""
        say(f"--- begins{where}: {command.title}")
        environment = dict(os.environ)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if not is_shown:
            environment[AT_ONCE] = str(self.parallel)
        command.output.parent.mkdir(parents=True, exist_ok=True)
        with nullcontext() if is_shown else command.output.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-Pm", "gptexp", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches only this process, which passes it on
                preexec_fn=start_a_run
                if command.arguments[0] in TRAINING
                else partial(at_parents_death, signal.SIGTERM),
            )
        self.running.append(_Running(command, process, gpus))

    def end(self, one: _Running, code: int) -> None:
        """Record the end of a command, and say so."""
        self.running.remove(one)
        self.free.append(one.gpus)
        if code == EXIT_DIVERGED:
            outcome = "diverged"
        elif code == 0:
            outcome = one.command.status() or "done"
        elif code in STOPPED or code < 0:
            outcome = "interrupted"
        else:
            outcome, self.failed = f"failed ({code})", self.failed + 1
        self.outcomes.append((one.command, outcome))
        where = "" if self.parallel == 1 else f"; {one.command.output}"
        say(f"--- {outcome}: {one.command.title}{where}")
