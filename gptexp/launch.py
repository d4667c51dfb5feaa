"""Start the ranks of one run on this machine with torch's own elastic agent, and see them out.

Ranks are fresh `python -m gptexp.run RUN_DIR` processes: they read the frozen config, have sessions of their own (a
terminal's Ctrl-C reaches only this parent), ignore SIGINT, and get SIGTERM when the parent dies. The agent finds the
first rank that failed, by time, and ends the others.
"""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from gptexp.errors import EXIT_CONFIG, EXIT_DIVERGED, EXIT_FAILED, LostRankError, MicroBatchError, UserError
from gptexp.run import PARENT
from gptexp.signals import DEADLINE, StopRequest, deadline_after

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

START_ANEW = -1  # in place of an exit code: a smaller micro-batch has been chosen, start anew
GRACE_S = 60  # for a checkpoint after a signal, before the agent kills

_USER_ERRORS = {error.__name__ for error in UserError.__subclasses__()}
_STOPPED = tuple(128 + s for s in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM))


def launch(directory: Path, world_size: int, max_restarts: int = 0, max_minutes: float | None = None) -> int:
    """Run `world_size` ranks in `directory` until all have left; the exit code of the run.

    An error is printed once: the message of the rank that failed first, with its traceback if it is no user's error.
    Up to `max_restarts` times a run that failed goes on from its newest checkpoint; `max_minutes` are those of all
    attempts together.
    """
    restarts, deadline = 0, deadline_after(max_minutes)
    while True:
        code = _launch(directory, world_size, deadline)
        if code == START_ANEW:
            continue
        if code != EXIT_FAILED or restarts == max_restarts:
            return code
        restarts += 1
        print(f"gptexp: restart {restarts} of {max_restarts}", file=sys.stderr)


def _launch(directory: Path, world_size: int, deadline: float) -> int:
    # The agent's own restarts would try again whatever the reason, a request to stop among them.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it would tell each story twice
    with tempfile.TemporaryDirectory(prefix="gptexp-") as logs, _signals() as received, _environment(deadline):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # the kernel picks a port that is free
            run_id=uuid.uuid4().hex,
            max_restarts=0,
            monitor_interval=0.1,
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT,SIGUSR1",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        if hasattr(config, "shutdown_timeout"):  # torch 2.12 and newer; before, the agent grants its own 30 s
            config.shutdown_timeout = GRACE_S
        try:
            elastic_launch(config, sys.executable)("-uP", "-m", "gptexp.run", str(directory))
        except SignalException as error:
            return 128 + (received[0] if received else int(error.sigval))
        except ChildFailedError as error:
            rank, failure = _cause(error)
            return _report(rank, failure.exitcode, failure.message)
    return 0


def _cause(error: "ChildFailedError") -> "tuple[int, ProcessFailure]":
    """The rank that failed first, and what the agent knows of it.

    A rank that was killed left no time of its own: a peer that lost it seems to be first where the agent looked late.
    Anything else that a peer says is the cause, and the agent killed who did not leave for it.
    """
    rank, failure = error.get_first_failure()
    if _text(failure.message).startswith(LostRankError.__name__):
        killed = ((r, f) for r, f in error.failures.items() if f.exitcode < 0 and -f.exitcode != signal.SIGTERM)
        return next(killed, (rank, failure))
    return rank, failure


def _report(rank: int, exit_code: int, message: object) -> int:
    """Print why the first rank failed, unless it was merely stopped; the run's exit code."""
    if exit_code in (*_STOPPED, EXIT_DIVERGED):
        return exit_code  # rank 0 has said so
    text, trace = _text(message), ""
    if isinstance(message, dict):
        trace = str(message.get("extraInfo", {}).get("py_callstack", ""))
    kind, _, said = text.partition(": ")  # as `record` writes it
    if kind in _USER_ERRORS:
        prefix = "config error: " if exit_code == EXIT_CONFIG else ""
        for line in said.splitlines():
            print(f"gptexp: {prefix}{line}", file=sys.stderr)
        return START_ANEW if kind == MicroBatchError.__name__ else exit_code
    if exit_code < 0:
        text = f"killed by {signal.Signals(-exit_code).name}"
    print(f"{trace}gptexp: rank {rank} failed (exit code {exit_code}): {text}", file=sys.stderr)
    return EXIT_FAILED


def _text(message: object) -> str:
    """What `record` wrote of an error: "ClassName: message"."""
    return str(message["message"] if isinstance(message, dict) else message)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Turn Ctrl-C into the SIGTERM that the agent passes on; put everybody's handlers back afterwards.

    Yields a list that holds SIGINT once it has arrived. A second Ctrl-C leaves at once; the ranks follow their parent.
    """
    received: list[int] = []
    first = StopRequest()
    first.training = True

    def before_the_agent(number: int, _frame: FrameType | None) -> None:
        os._exit(128 + (received[0] if received else number))  # no rank has been started

    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in names}

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(number)
            first.on_signal(number, frame)
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            first.on_signal(number, frame)  # leaves at once, unless it is the first one passed on again

    for number in names:
        signal.signal(number, on_interrupt if number == signal.SIGINT else before_the_agent)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)


@contextmanager
def _environment(deadline: float) -> Iterator[None]:
    """The ranks' environment: this very gptexp whatever their working directory, and nothing of wandb's service."""
    root = Path(__file__).resolve().parent.parent
    before = dict(os.environ)
    if (root / "conf").is_dir():  # a checkout; what is installed is found anyway
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [before.get("PYTHONPATH")])])
    os.environ[PARENT] = str(os.getpid())
    os.environ[DEADLINE] = str(deadline)
    for name in ("WANDB_SERVICE", "HYDRA_FULL_ERROR"):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
