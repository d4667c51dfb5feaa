"""A request to stop, by a signal or by the clock."""

import os
import signal
import subprocess
import sys
import time

import pytest

from gptexp.process.signals import (
    DEADLINE,
    EXIT_CODES,
    REASONS,
    StopRequest,
    deadline_after,
    start_a_run,
)

SCRIPT = """
import os, signal, sys, time
from gptexp.process.signals import StopRequest
stop = StopRequest()
stop.install(ignore_sigint=sys.argv[1] == "rank")
if sys.argv[1] != "starting":
    stop.begin()
print("ready", flush=True)
while True:
    time.sleep(0.01)
    if stop.reason():
        print(stop.reason(), stop.flags(), flush=True)
        time.sleep(60)
"""


def start(kind: str, ignored: signal.Signals | None = None) -> subprocess.Popen[str]:
    def before() -> None:  # this process may have been started by nohup
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, kind], stdout=subprocess.PIPE, text=True, preexec_fn=before
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGUSR1", "SIGTERM"])
def test_the_first_signal_requests_a_stop_and_a_later_one_ends_the_process(name: str) -> None:
    process = start("single")
    assert process.stdout is not None
    process.send_signal(getattr(signal, name))
    assert process.stdout.readline().startswith(name)
    process.send_signal(getattr(signal, name))  # a signal this soon after is the same request
    time.sleep(0.3)
    assert process.poll() is None
    time.sleep(1)
    process.send_signal(getattr(signal, name))
    assert process.wait(timeout=5) == EXIT_CODES[name]


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGUSR1", "SIGTERM"])
def test_before_training_the_first_signal_ends_the_process(name: str) -> None:
    process = start("starting")
    process.send_signal(getattr(signal, name))
    assert process.wait(timeout=5) == EXIT_CODES[name]


@pytest.mark.parametrize("kind", ["starting", "single", "rank"])
def test_the_end_of_a_terminal_is_ignored_under_nohup(kind: str) -> None:
    process = start(kind, ignored=signal.SIGHUP)
    assert process.stdout is not None
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert kind == "starting" or process.stdout.readline().startswith("SIGTERM")
    process.kill()
    process.wait()


def test_a_process_that_is_just_starting_loses_no_signal_and_prints_no_traceback() -> None:
    command = [sys.executable, "-c", SCRIPT, "starting"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=start_a_run)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (130, "gptexp: SIGINT: interrupted before the first step\n")


def test_a_process_whose_parent_ended_before_it_could_ask_for_the_signal_ends() -> None:
    code = "from gptexp.process.signals import die_with_parent; die_with_parent({}, 9); print('alive')"
    for parent, expected in ((os.getpid(), (0, "alive\n")), (os.getppid(), (128 + 9, ""))):
        done = subprocess.run([sys.executable, "-c", code.format(parent)], stdout=subprocess.PIPE, text=True)
        assert (done.returncode, done.stdout) == expected


def test_a_launched_rank_ignores_ctrl_c_which_its_parent_handles() -> None:
    process = start("rank")
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline().startswith("SIGTERM")
    process.kill()
    process.wait()


def test_the_launchers_deadline_takes_precedence_over_the_ranks_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest()
    monkeypatch.setenv(DEADLINE, str(deadline_after(-0.001)))
    stop.limit(60.0)
    assert stop.reason() == "time"
    monkeypatch.setenv(DEADLINE, str(deadline_after(None)))
    stop.limit(0.0)
    assert stop.reason() is None
    monkeypatch.delenv(DEADLINE)
    stop.limit(1.0)
    assert stop.reason() is None
    stop.spare_s = 61.0  # what a step and a checkpoint take
    assert stop.reason() == "time"


def test_a_passed_time_limit_requests_a_stop() -> None:
    stop = StopRequest()
    assert (stop.reason(), stop.flags()) == (None, [0.0] * len(REASONS))
    stop.limit(1e-9)
    time.sleep(0.01)
    assert stop.reason() == "time"
    assert stop.flags() == [float(name == "time") for name in REASONS]
