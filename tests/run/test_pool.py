"""Runs side by side: a GPU has at most one run, signals reach every process, and runs do not stop one another."""

import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gptexp.distributed.ranks import Rank, cores_per_rank
from gptexp.process.errors import InUseError
from gptexp.run.pool import OUTPUT, Places, Process, run_all, start_here


@dataclass(frozen=True)
class Run:
    directory: Path
    world_size: int = 1


@dataclass
class Runs:
    """A source and a starter of runs. Each run is a `sleep`. `codes` has the exit codes of runs that ended."""

    waiting: list[Run]
    later: list[Run] = field(default_factory=list)  # the runs that `more` returns
    on_begin: Callable[[Run], None] = lambda _: None
    on_more: Callable[["Runs"], None] = lambda _: None
    is_decided: Callable[[], bool] = lambda: True
    command: Sequence[str] = ("sleep", "0.2")
    elsewhere: list[Run] = field(default_factory=list)
    begun: list[Run] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    gpus: dict[Run, list[str]] = field(default_factory=dict)  # of the runs that are running
    at_most: int = 0  # the largest number of runs at the same time

    def more(self) -> Run | None:
        self.on_more(self)
        return self.later.pop(0) if self.later else None

    def set_aside(self, run: Run) -> None:
        self.elsewhere.append(run)

    def share_decisions(self) -> bool:
        return self.is_decided()

    def begin(self, run: Run, gpus: Sequence[str]) -> None:
        self.begun.append(run)
        self.on_begin(run)

    def start(self, run: Run, gpus: Sequence[str], at_once: int) -> Process:
        assert not {*gpus} & {*itertools.chain(*self.gpus.values())}
        self.gpus[run] = [*gpus]
        self.at_most = max(self.at_most, len(self.gpus))
        return subprocess.Popen(self.command)

    def ended(self, run: Run, code: int) -> None:
        self.gpus.pop(run, None)
        self.codes[run.directory.name] = code

    def run(self, at_once: int, gpus: list[str] | None = None) -> int | None:
        return run_all(self, self, Places(at_once, gpus))


def numbered(*sizes: int) -> list[Run]:
    return [Run(Path(str(number)), size) for number, size in enumerate(sizes)]


@pytest.mark.parametrize(("sizes", "most"), [([1] * 8, 4), ([2] * 4, 2), ([4] * 2, 1), ([1, 2, 4, 1, 2, 3, 1], 3)])
def test_no_gpu_has_two_runs_and_none_is_idle_while_a_run_fits(sizes: list[int], most: int) -> None:
    runs = Runs(numbered(*sizes))
    given: list[tuple[int, int]] = []
    start = runs.start

    def counted(run: Run, gpus: Sequence[str], at_once: int) -> Process:
        given.append((run.world_size, len(gpus)))
        return start(run, gpus, at_once)

    runs.start = counted  # type: ignore[method-assign]
    assert runs.run(8, ["0", "1", "2", "3"]) is None
    assert all(size == gpus for size, gpus in given)
    assert (runs.at_most, runs.gpus) == (most, {})
    assert [*runs.codes.values()] == [0] * len(sizes)


@pytest.mark.parametrize("at_once", [1, 2])
def test_the_next_run_is_requested_only_if_none_waits_and_a_place_is_free(at_once: int) -> None:
    """An optimiser that chooses the next run needs the results of as many runs as possible."""

    def asked(runs: Runs) -> None:
        assert runs.waiting == []
        assert len(runs.gpus) < at_once

    runs = Runs(numbered(1, 1), later=[Run(Path("more")), Run(Path("and more"))], on_more=asked)
    assert runs.run(at_once) is None
    assert runs.codes == {"0": 0, "1": 0, "more": 0, "and more": 0}


def test_no_run_starts_after_a_signal_during_preparation() -> None:
    runs = Runs(numbered(1, 1, 1), on_begin=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    told = runs.run(1)
    assert (told, runs.begun) == (signal.SIGTERM, numbered(1))
    assert runs.codes == {"0": 143}  # its directory is there, so the source must hear of its end


def test_a_signal_right_after_a_run_was_started_reaches_it() -> None:
    runs = Runs(numbered(1), command=("sleep", "60"))
    start = runs.start

    def started_and_signalled(run: Run, gpus: Sequence[str], at_once: int) -> Process:
        process = start(run, gpus, at_once)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    runs.start = started_and_signalled  # type: ignore[method-assign]
    assert runs.run(1) == signal.SIGTERM
    assert runs.codes == {"0": -signal.SIGTERM}


def test_a_run_that_cannot_be_prepared_does_not_stop_the_others() -> None:
    def begin(run: Run) -> None:
        if run.directory.name == "1":
            raise OSError("no room")

    runs = Runs(numbered(1, 1, 1), on_begin=begin)
    assert runs.run(2, ["0", "1"]) is None
    assert runs.codes == {"0": 0, "1": 1, "2": 0}


def test_the_first_run_runs_alone_until_it_has_decided() -> None:
    decided = threading.Event()
    timer = threading.Timer(0.5, decided.set)
    beside: list[tuple[bool, int]] = []
    runs = Runs(numbered(*[1] * 6), is_decided=decided.is_set)
    runs.on_begin = lambda _: beside.append((decided.is_set(), len(runs.gpus)))
    timer.start()
    runs.run(3)
    assert {others for is_decided, others in beside if not is_decided} == {0}
    assert max(others for is_decided, others in beside if is_decided) == 2


def test_a_runs_process_sees_its_own_gpus_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    for gpus, at_once, seen in ((["6", "7"], 2, "6,7"), ([], 1, "4,5,6,7")):
        process = start_here(Run(tmp_path, 2), gpus, at_once)
        assert isinstance(process, subprocess.Popen)
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        finally:
            process.kill()
            process.wait()
        assert f"CUDA_VISIBLE_DEVICES={seen}".encode() in environment
        assert f"GPTEXP_AT_ONCE={at_once}".encode() in environment
        assert (
            tmp_path / OUTPUT
        ).exists()  # written since the first process, which shares the terminal with another run


def test_runs_side_by_side_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for at_once, local, threads in ((1, 1, 16), (4, 1, 4), (4, 2, 2), (32, 1, 1)):
        monkeypatch.setenv("GPTEXP_AT_ONCE", str(at_once))
        assert cores_per_rank(Rank(0, local, 0, local)) == threads


def test_a_run_that_another_command_runs_is_waited_for_while_others_run() -> None:
    in_use = True

    def refuse_the_first(run: Run) -> None:
        if run.directory.name == "0" and in_use:
            raise InUseError("in use")

    def look(runs: Runs) -> None:
        nonlocal in_use
        if runs.elsewhere and len(runs.codes) == 2:  # both others have ended
            in_use = False
            runs.later.append(runs.elsewhere.pop())

    runs = Runs(numbered(1, 1, 1), on_begin=refuse_the_first, on_more=look)
    assert runs.run(1) is None
    assert [*runs.codes.items()] == [("1", 0), ("2", 0), ("0", 0)]


def test_a_signal_ends_the_wait_for_a_run_elsewhere() -> None:
    def refuse(run: Run) -> None:
        raise InUseError("in use")

    runs = Runs(numbered(1), on_begin=refuse)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert runs.run(1) == signal.SIGTERM
    assert (runs.codes, len(runs.elsewhere)) == ({}, 1)
