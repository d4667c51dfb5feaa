"""A process that has done the imports of a run, and forks runs: each then begins in a tenth of the time.

A forked run is a child of the process that asked for it, with a session of its own, like a new interpreter that
`subprocess.Popen` has started. So signals, exit codes and the end of either process mean the same. Only on Linux, and
not for runs on GPUs: CUDA does not survive a fork.
"""

import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from gptexp.distributed.ranks import ending_rank
from gptexp.process.errors import EXIT_FAILED
from gptexp.process.signals import HANDLED, adopting, at_parents_death, die_with_parent
from gptexp.process.terminal import run_verb

ANSWER_S = 20.0  # longest wait for a fork; then the run gets a new interpreter
READY, REQUEST = b"r", b"f"
ROOM = " " * 4096  # the last argument of the process: room for the command lines of the forks, as `ps` shows them


class Forked:
    """A run that was forked, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Preloaded:
    """The process that forks runs. It imports `modules` meanwhile, and ends with the process that has started it."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-Pm", "gptexp.run.preloaded", str(theirs.fileno()), *modules, ROOM],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a run with a new interpreter prints what goes wrong
                start_new_session=True,
                preexec_fn=partial(at_parents_death, signal.SIGKILL),
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], output: int | None, end: int
    ) -> Forked | None:
        """Fork a process that runs `command`, `python -Pm MODULE …`; None if that is not possible now.

        `output`: descriptor for its stdout and stderr; None: those of this process. It gets the signal `end` when this
        process ends.
        """
        outputs = [1, 2] if output is None else [output, output]
        request = {"parent": os.getpid(), "command": [*command], "environment": {**environment}, "end": end}
        ours, theirs = socket.socketpair()
        with suppress(OSError), ours, adopting():
            with theirs:
                self._control.setblocking(False)
                if self._control.recv(1, socket.MSG_PEEK) != READY:
                    return None
                socket.send_fds(self._control, [REQUEST], [theirs.fileno(), *outputs])
            ours.settimeout(ANSWER_S)
            ours.sendall(json.dumps(request).encode())
            ours.shutdown(socket.SHUT_WR)
            if pid := ours.recv(32):
                return Forked(int(pid))
        return None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._control.close()


def main(argv: list[str]) -> None:
    """Import modules, then fork a run for each request, until the asking process has ended."""
    asking, *modules, _ = argv
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # also in the forks, until their `StopRequest` handles them
    gc.disable()
    for module in modules:
        import_module(module)
    gc.freeze()  # a collection in a fork does not touch the shared pages
    with socket.socket(fileno=int(asking)) as control:
        if _has_threads():
            return  # a fork would lack them
        control.send(READY)
        while True:
            request, descriptors, _, _ = socket.recv_fds(control, 1, 3)
            if not request:
                return
            if (middle := os.fork()) == 0:
                middle = os.getpid()
                if os.fork() == 0:
                    control.close()
                    _become(middle, *descriptors)
                os._exit(0)  # so the fork becomes a child of the asking process
            os.waitpid(middle, 0)
            for descriptor in descriptors:
                os.close(descriptor)


def _has_threads() -> bool:
    """Whether this process has threads after a fork. OpenBLAS has, and stops them for each."""
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len([*Path("/proc/self/task").iterdir()]) > 1


def _become(middle: int, request: int, *outputs: int) -> NoReturn:
    """Run the command of the request in this process, a child of the asking one as soon as `middle` has ended."""
    with ending_rank():
        while os.getppid() == middle:
            time.sleep(1e-3)
        try:
            with socket.socket(fileno=request) as asking:
                asked = json.loads(b"".join(iter(partial(asking.recv, 1 << 16), b"")))
                _resemble(asked, outputs)
                asking.send(str(os.getpid()).encode())
        except (OSError, ValueError):  # the asking process waits no longer
            os._exit(EXIT_FAILED)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    raise AssertionError


def _resemble(asked: dict[str, Any], outputs: Sequence[int]) -> None:
    """Give this process all that a new interpreter would have from the process that starts it."""
    os.setsid()  # a terminal's Ctrl-C reaches only the asking process
    die_with_parent(asked["parent"], asked["end"])
    for own, descriptor in enumerate(outputs, 1):
        os.dup2(descriptor, own)
        os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    gc.enable()
    os.environ.clear()
    os.environ.update(asked["environment"])
    _, _, *sys.argv = asked["command"]
    # Write the command over the command line of this process, which `ps` shows.
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = os.fsencode("\0".join(asked["command"]))[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    run_verb(main)
