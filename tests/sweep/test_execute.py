"""The way of a sweep's cells: a GPU has at most one, signals reach every one, and none stops another."""

import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gptexp.config.schema import Config
from gptexp.distributed.ranks import Rank, cores_per_rank
from gptexp.process.errors import InUseError
from gptexp.storage import run_dir
from gptexp.sweep import sweepers
from gptexp.sweep.cells import Cell
from gptexp.sweep.launchers import CellLauncher, Places, Process
from gptexp.sweep.sweepers import CellSweeper


class Launcher(CellLauncher):
    """Each cell is a process of `command`. `gpus` are those of the cells that run."""

    command = ("sleep", "0.2")
    on_start: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.gpus: dict[str, list[str]] = {}
        self.at_most = 0  # the largest number of cells at the same time

    def start(self, cell: Cell, gpus: Sequence[str], at_once: int) -> Process:
        assert not {*gpus} & {*itertools.chain(*self.gpus.values())}
        self.gpus[cell.name] = [*gpus]
        self.at_most = max(self.at_most, len(self.gpus))
        process = subprocess.Popen(self.command)
        self.on_start()
        return process


class Sweep(CellSweeper):
    """Cells with numbers as names, by default beyond the first one's decision. `codes` are those of ended cells."""

    launcher: Launcher

    def __init__(self, directory: Path, *sizes: int, at_once: int = 1, gpus: list[str] | None = None) -> None:
        super().__init__(None)
        self.directory, self.on_ranks, self.launcher, self.later = directory, False, Launcher(), list[Cell]()
        self.places, self.free_gpus = Places(at_once, gpus), [*(gpus or [])]
        self.waiting = [self.cell(str(number), size) for number, size in enumerate(sizes)]
        self.cells, self.codes, self.begun_cells = [*self.waiting], dict[str, int](), list[str]()
        self.on_begin: Callable[[str], None] = lambda name: None
        self.on_choose: Callable[[], None] = lambda: None
        run_dir.write_json(directory / run_dir.EFFECTIVE, {"dtype": "float32"})

    def cell(self, name: str, size: int = 1) -> Cell:
        config = Config()
        config.world.size = size
        return Cell(None, config, self.directory / name, {})  # type: ignore[arg-type]

    def choose(self) -> Cell | None:
        self.on_choose()
        return self.later.pop(0) if self.later else None

    def begin_cell(self, cell: Cell, gpus: Sequence[str], job: object) -> int:
        self.begun_cells.append(cell.name)
        self.on_begin(cell.name)
        return 0

    def end_cell(self, cell: Cell, code: int) -> None:
        self.launcher.gpus.pop(cell.name, None)
        self.codes[cell.name] = code
        super().end_cell(cell, code)

    def signals(self) -> list[int]:
        """Run all cells. Returns the signals that came."""
        signals: list[int] = []
        self.run(signals)
        assert sorted(self.free_gpus) == sorted(self.places.gpus or [])
        return signals


@pytest.mark.e2e
@pytest.mark.parametrize(("sizes", "most"), [([1] * 8, 4), ([2] * 4, 2), ([4] * 2, 1), ([1, 2, 4, 1, 2, 3, 1], 3)])
def test_no_gpu_has_two_cells_and_none_is_idle_while_a_cell_fits(sizes: list[int], most: int, tmp_path: Path) -> None:
    sweep, given = Sweep(tmp_path, *sizes, at_once=8, gpus=["0", "1", "2", "3"]), dict[str, int]()
    sweep.launcher.on_start = lambda: given.update({name: len(gpus) for name, gpus in sweep.launcher.gpus.items()})
    assert sweep.signals() == []
    assert given == {str(number): size for number, size in enumerate(sizes)}
    assert sweep.launcher.at_most == most
    assert sweep.codes == dict.fromkeys(given, 0)


@pytest.mark.parametrize("at_once", [1, 2])
def test_the_next_cell_is_chosen_only_if_none_waits_and_a_place_is_free(at_once: int, tmp_path: Path) -> None:
    """An optimiser that chooses the next cell needs the results of as many cells as possible."""
    sweep = Sweep(tmp_path, 1, 1, at_once=at_once)
    sweep.later = [sweep.cell("more"), sweep.cell("and more")]
    seen: list[tuple[int, bool]] = []
    sweep.on_choose = lambda: seen.append((len(sweep.waiting), len(sweep.launcher.gpus) < at_once))
    assert sweep.signals() == []
    assert {*seen} == {(0, True)}
    assert sweep.codes == {"0": 0, "1": 0, "more": 0, "and more": 0}


def test_no_cell_starts_after_a_signal_during_preparation(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, 1, 1, 1)
    sweep.on_begin = lambda name: os.kill(os.getpid(), signal.SIGTERM)
    assert (sweep.signals(), sweep.begun_cells) == ([signal.SIGTERM], ["0"])
    assert sweep.codes == {"0": 143}  # its directory is there, so it must count as interrupted
    assert not sweep.launcher.gpus


def test_a_signal_right_after_a_cell_was_started_reaches_it(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, 1)
    sweep.launcher.command = ("sleep", "60")
    sweep.launcher.on_start = lambda: os.kill(os.getpid(), signal.SIGTERM)
    assert sweep.signals() == [signal.SIGTERM]
    assert sweep.codes == {"0": -signal.SIGTERM}


def test_an_error_of_the_sweep_itself_stops_the_cells_that_run(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, 1, 1, at_once=2)
    sweep.launcher.command = ("sleep", "60")

    def fail(name: str) -> None:
        if name == "1":
            raise ZeroDivisionError

    sweep.on_begin = fail
    with pytest.raises(ZeroDivisionError):
        sweep.run([])
    assert sweep.codes == {"0": -signal.SIGTERM}


def test_a_cell_that_cannot_be_prepared_does_not_stop_the_others(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, 1, 1, 1, at_once=2, gpus=["0", "1"])

    def fail(name: str) -> None:
        if name == "1":
            raise OSError("no room")

    sweep.on_begin = fail
    assert sweep.signals() == []
    assert sweep.codes == {"0": 0, "1": 1, "2": 0}
    assert [cell.name for cell in sweep.failed] == ["1"]


@pytest.mark.e2e
def test_the_first_cell_runs_alone_until_it_has_decided(tmp_path: Path) -> None:
    sweep, beside = Sweep(tmp_path, *[1] * 6, at_once=3), list[tuple[bool, int]]()
    (tmp_path / run_dir.EFFECTIVE).unlink()

    def decide() -> None:
        run_dir.write_json(tmp_path / "0" / run_dir.EFFECTIVE, {"dtype": "float32"})

    sweep.launcher.command = ("sleep", "1")
    sweep.on_begin = lambda name: beside.append(((tmp_path / run_dir.EFFECTIVE).exists(), len(sweep.launcher.gpus)))
    threading.Timer(0.5, decide).start()
    sweep.signals()
    assert {others for is_decided, others in beside if not is_decided} == {0}
    assert max(others for is_decided, others in beside if is_decided) == 2


def test_a_cells_process_sees_its_own_gpus_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    cell = Cell(None, Config(), tmp_path, {})  # type: ignore[arg-type]
    for gpus, at_once, seen in (([], 1, "4,5,6,7"), (["6", "7"], 2, "6,7")):
        process = CellLauncher().start(cell, gpus, at_once)
        assert isinstance(process, subprocess.Popen)
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        finally:
            process.kill()
            process.wait()
        assert f"CUDA_VISIBLE_DEVICES={seen}".encode() in environment
        assert f"GPTEXP_AT_ONCE={at_once}".encode() in environment
        assert (tmp_path / run_dir.OUTPUT).exists() == (at_once > 1)  # a single cell has the terminal


def test_cells_side_by_side_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for at_once, local, threads in ((1, 1, 16), (4, 1, 4), (4, 2, 2), (32, 1, 1)):
        assert cores_per_rank(Rank(0, local, 0, local), at_once) == threads


def test_a_cell_that_another_command_runs_is_waited_for_while_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweepers, "LOOK_S", 0.0)
    sweep = Sweep(tmp_path, 1, 1, 1)
    lock = run_dir.acquire(tmp_path / "0", run_dir.SWEEP_LOCK)
    sweep.on_choose = lambda: lock.release() if len(sweep.codes) == 2 else None  # both others have ended
    assert sweep.signals() == []
    assert [*sweep.codes.items()] == [("1", 0), ("2", 0), ("0", 0)]
    assert sweep.begun_cells == ["1", "2", "0"]


def test_a_signal_ends_the_wait_for_a_cell_elsewhere(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, 1)
    with run_dir.held(tmp_path / "0"):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert sweep.signals() == [signal.SIGTERM]
    assert (sweep.codes, len(sweep.elsewhere)) == ({}, 1)


def test_a_cell_is_claimed_by_one_command_and_not_run_again_once_it_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweepers, "LOOK_S", 0.0)
    one, other = Sweep(tmp_path, 1), Sweep(tmp_path, 1)
    [cell] = one.waiting
    with one.claimed(cell), pytest.raises(InUseError), other.claimed(cell):
        pass
    with run_dir.held(cell.directory):  # its run was started by hand
        with pytest.raises(InUseError), one.claimed(cell):
            pass
        with one.claimed(cell, is_running=True):  # as a job of an earlier command
            pass
        assert [*one.execute(cell, [])] == []
    assert one.returned() is cell
    run_dir.write_json(cell.directory / run_dir.SUMMARY, {"status": "completed"})
    assert [*other.execute(cell, [])] == []
    assert (other.returned(), other.elsewhere, other.codes) == (None, [], {})
