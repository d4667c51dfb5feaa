"""Starts the ranks of one run on this machine with torch's elastic agent, and waits for their end.

Ranks are new `python -m gptexp.run RUN_DIR` processes that read the frozen config. Each has a session of its own, so a
terminal's Ctrl-C reaches only this parent. Ranks ignore SIGINT, and receive SIGTERM when the parent dies. The agent
reports the rank that failed first and ends the others.
"""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gptexp.process import errors
from gptexp.process.errors import (
    EXIT_CONFIG,
    EXIT_DIVERGED,
    EXIT_FAILED,
    ConfigError,
    LostRankError,
    MicroBatchError,
    UserError,
)
from gptexp.process.signals import (
    DEADLINE,
    HANDLED,
    PARENT,
    STOPPED,
    StopRequest,
    before_training,
    deadline_after,
    handled,
)
from gptexp.process.terminal import print_error, warn
from gptexp.process.versions import PACKAGE
from gptexp.storage import run_dir

START_ANEW = -1  # instead of an exit code: a smaller micro-batch is saved, start the ranks again
GRACE_S = 60  # for a checkpoint after a signal, before the agent kills the ranks

_USER_ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, UserError)}


def launch(directory: Path, world_size: int, max_restarts: int = 0, max_minutes: float | None = None) -> int:
    """Run `world_size` ranks in `directory` until all have ended. Returns the exit code of the run.

    Prints one error: that of the rank that failed first, with its traceback unless it is a `UserError`. A failed run
    restarts from its newest checkpoint up to `max_restarts` times; `max_minutes` limits all attempts together.
    """
    restarts, deadline = 0, deadline_after(max_minutes)
    while True:
        code = _launch(directory, world_size, deadline)
        if code == START_ANEW:
            continue
        if code in STOPPED and run_dir.mark_interrupted(directory):
            warn(before_training(directory))
        if code != EXIT_FAILED or restarts == max_restarts:
            return code
        restarts += 1
        warn(f"restart {restarts} of {max_restarts}")


def _launch(directory: Path, world_size: int, deadline: float) -> int:
    _silence_agent()
    with tempfile.TemporaryDirectory(prefix="gptexp-") as logs, _signals(directory) as received, _environment(deadline):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # the kernel chooses a free port
            run_id=uuid.uuid4().hex,
            max_restarts=0,  # the agent would also restart after a signal to stop
            monitor_interval=0.1,
            signals_to_handle=",".join(number.name for number in _passed_on()),
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        if hasattr(config, "shutdown_timeout"):  # torch 2.12 and newer; older agents wait 30 s
            config.shutdown_timeout = GRACE_S
        try:
            elastic_launch(config, sys.executable)("-uP", "-m", "gptexp.run", str(directory))
        except SignalException as error:
            return 128 + (received[0] if received else int(error.sigval))
        except ChildFailedError as error:
            rank, failure = _cause(error)
            return _report(rank, failure.exitcode, failure.message)
    return 0


def _passed_on() -> list[signal.Signals]:
    """The signals that the agent passes on to the ranks. It would replace the ignored SIGHUP of nohup."""
    return [signal.SIGQUIT, *(number for number in handled() if number != signal.SIGINT)]


def _silence_agent() -> None:
    """Print nothing from torch's agent, which would repeat each error. Levels do not help: its modules set them."""
    agent = logging.getLogger("torch.distributed.elastic")
    agent.propagate = False
    agent.handlers = [logging.NullHandler()]  # without any handler, Python prints to stderr


def _cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first, and its failure.

    A killed rank records no time of failure, so the peer that lost it may seem to be first. If the first error is a
    `LostRankError`, the cause is a rank that was killed by a signal other than the agent's SIGTERM.
    """
    rank, failure = error.get_first_failure()
    if _text(failure.message).startswith(LostRankError.__name__):
        killed = ((r, f) for r, f in error.failures.items() if f.exitcode < 0 and -f.exitcode != signal.SIGTERM)
        return next(killed, (rank, failure))
    return rank, failure


def _report(rank: int, exit_code: int, message: object) -> int:
    """Print the error of the rank that failed first, unless it was stopped. Returns the exit code of the run."""
    if -exit_code in HANDLED:  # a signal before training
        exit_code = 128 - exit_code
    if exit_code in (*STOPPED, EXIT_DIVERGED):
        return exit_code  # rank 0 has printed the reason
    text, trace = _text(message), ""
    if isinstance(message, dict):
        trace = str(message.get("extraInfo", {}).get("py_callstack", ""))
    kind, _, lines = text.partition(": ")
    if kind in _USER_ERRORS:
        print_error(ConfigError(lines) if exit_code == EXIT_CONFIG else UserError(lines))
        return START_ANEW if kind == MicroBatchError.__name__ else exit_code
    if exit_code < 0:
        text = f"killed by {signal.Signals(-exit_code).name}"
    print(f"{trace}gptexp: rank {rank} failed (exit code {exit_code}): {text}", file=sys.stderr)
    return EXIT_FAILED


def _text(message: object) -> str:
    """Return an error as torch's `record` writes it: "ClassName: message"."""
    return str(message["message"] if isinstance(message, dict) else message)


@contextmanager
def _signals(directory: Path) -> Iterator[list[int]]:
    """Turn Ctrl-C into the SIGTERM that the agent forwards; restore all handlers afterwards.

    Yields a list that contains SIGINT once it has arrived. A second Ctrl-C ends this process at once, and its ranks
    then receive SIGTERM.
    """
    received: list[int] = []
    first = StopRequest()
    first.training, first.promise = True, "the ranks stop"  # after their step, if they are training
    first.record = partial(run_dir.mark_interrupted, directory)

    def before_the_agent(number: int, _frame: FrameType | None) -> None:
        first.leave(received[0] if received else number, before_training(directory))  # no rank is running yet

    names = (signal.SIGINT, *_passed_on())
    before = {number: signal.getsignal(number) for number in names}

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(number)
            first.on_signal(number, frame)
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            first.on_signal(number, frame)  # ends at once, unless it repeats the first signal

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
    """Set the ranks' environment: the same gptexp in any working directory, and no wandb service of this process."""
    root = PACKAGE.parent
    before = dict(os.environ)
    if (root / "conf").is_dir():  # a checkout; an installed package is found without this
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [before.get("PYTHONPATH")])])
    os.environ[PARENT] = str(os.getpid())
    os.environ[DEADLINE] = str(deadline)
    os.environ.pop("WANDB_SERVICE", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
