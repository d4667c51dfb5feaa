"""Cells in separate processes: side by side on this machine, or each as a SLURM job."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from conftest import BYTES, e2e_then_slow, events, processes_of, runs, summary, wait_for

from gptexp.config.compose import compose
from gptexp.config.schema import Config
from gptexp.process.cores import count_cores
from gptexp.process.errors import ConfigError
from gptexp.storage import run_dir
from gptexp.sweep.cells import cell_name
from gptexp.sweep.launchers import CellLauncher, Places

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

needs_submitit = pytest.mark.skipif(find_spec("submitit") is None, reason="no submitit; pip install 'gptexp[slurm]'")

GPUS = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("overrides", "gpus", "places"),
    [
        ([], GPUS, Places(4, GPUS)),
        (["world.size=2"], GPUS, Places(2, GPUS)),
        (["world.size=8", "batch.micro_batch_size=4"], GPUS, Places(1, GPUS)),  # the run itself then fails
        (["train.device=cpu"], GPUS, Places(1)),
        (["train.device=cpu", "sweep.parallel=3"], GPUS, Places(3)),
        ([], [], Places(1)),
    ],
)
def test_the_number_of_parallel_cells_follows_from_the_gpus(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], gpus: list[str], places: Places
) -> None:
    monkeypatch.setattr("gptexp.sweep.launchers.visible_gpus", lambda: gpus)
    assert CellLauncher().places([compose(["model=nano", *overrides])] * 3) == places


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="no trial elsewhere")
def test_on_a_cpu_the_number_is_given_or_saved_or_found_by_a_trial(
    gptexp: Gptexp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gptexp.sweep.trial.count_cores", lambda: 4)
    long = ["model=bytes", "train.device=cpu", "train.max_steps=1000"]
    for overrides, at_once in ((long, None), ([*long, "sweep.parallel=3"], 3), ([*long, "train.max_steps=10"], 1)):
        given = {text.partition("=")[0]: text for text in overrides}
        assert CellLauncher().places([compose([*given.values()])] * 3) == Places(at_once)
    if count_cores() > 1:
        grid = ["plan", "-m", *long, "train.seed=1,2,3", "sweep.name=s", "--json"]
        (tmp_path / "outputs" / "s").mkdir(parents=True)
        for saved, planned in (({}, None), ({"runs_at_once": 2}, 2), ({"threads_per_rank": 2}, 1)):
            if saved:
                run_dir.write_json(tmp_path / "outputs" / "s" / run_dir.EFFECTIVE, saved)
            assert json.loads(gptexp(*grid).stdout)["at_once"] == planned


def test_more_parallel_cells_than_the_gpus_allow_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptexp.sweep.launchers.visible_gpus", lambda: GPUS)
    cells: list[Config] = [compose(["model=nano", "world.size=2", "sweep.parallel=3"])] * 3
    with pytest.raises(ConfigError, match=r"sweep\.parallel=3: needs 6 GPUs, up to 2 per cell; visible GPUs: 4"):
        CellLauncher().places(cells)


# --- on this machine -------------------------------------------------------------------------------------------------
@pytest.mark.e2e
def test_a_sweep_waits_for_a_cell_that_another_process_runs(start: Start, tiny: list[str], tmp_path: Path) -> None:
    """It trains the other cell meanwhile. The cell was not completed there, so it trains that too."""
    cells = tmp_path / "outputs" / "s"
    first = cells / cell_name(compose([*tiny, "train.seed=1"]), {"train.seed": "1"}, cells)
    with run_dir.held(first):
        process = start("train", "-m", *tiny, "train.seed=1,2", "sweep.name=s")
        wait_for(lambda: [d for d in runs(cells) if summary(d)["status"] == "completed"], process)
        assert process.poll() is None
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.index(f"{first.name}: running elsewhere; waiting for its end") < out.index("cell 1 of 2 begins: seed=2")
    assert [summary(directory)["status"] for directory in runs(cells)] == ["completed"] * 2
    assert list(final_table(cells)) == [("0.0006", "1"), ("0.0006", "2")]


@pytest.mark.e2e
def test_ctrl_c_ends_the_wait_for_a_cell_elsewhere(start: Start, tiny: list[str], tmp_path: Path) -> None:
    cells = tmp_path / "outputs" / "s"
    cell = cells / cell_name(compose([*tiny, "train.seed=1"]), {"train.seed": "1"}, cells)
    with run_dir.held(cell, run_dir.SWEEP_LOCK):
        process = start("train", "-m", *tiny, "train.seed=1", "sweep.name=s")
        assert process.stdout is not None
        while "running elsewhere" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("both to the end", marks=pytest.mark.e2e),
        pytest.param("the first is killed", marks=pytest.mark.slow),
    ],
)
def test_the_same_sweep_issued_twice_at_once_trains_each_cell_once(
    start: Start, tiny: list[str], tmp_path: Path, how: str
) -> None:
    options = [*BYTES, "train.max_steps=80", "train.eval_every=0", "sweep.name=s", "train.seed=1,2,3"]
    both = [start("train", "-m", *tiny, *options) for _ in range(2)]
    cells = tmp_path / "outputs" / "s"
    if how == "the first is killed":
        wait_for(lambda: any(cells.glob("*/metrics.jsonl")), both[0])
        both.pop(0).kill()
    begun = 0
    for process in both:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert "failed" not in out + err
        begun += out.count(" begins: ")
    assert begun == 3 or len(both) == 1
    for directory in runs(cells):
        assert summary(directory)["status"] == "completed"
        assert [event["step"] for event in events(directory, "step")] == list(range(80))
    assert len(final_table(cells)) == 3


def losses(root: Path) -> dict[str, list[tuple[int, float]]]:
    """The training losses of every cell, by its seed and learning rate."""
    found = {}
    for directory in runs(root):
        config = (directory / "config.yaml").read_text()
        key = "".join(line for line in config.splitlines(keepends=True) if "  lr:" in line or "  seed:" in line)
        found[key] = [(e["step"], e["train/loss"]) for e in events(directory, "step")]
    return found


@pytest.mark.e2e
def test_cells_have_the_same_losses_side_by_side_as_one_by_one(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    grid = ["-m", *tiny, *BYTES, "optim.lr=1e-3,2e-3,4e-3", "train.max_steps=60"]
    for parallel in (1, 2):
        done = gptexp("train", *grid, f"sweep.parallel={parallel}", f"sweep.name=p{parallel}", timeout=400)
        assert done.returncode == 0, done.stderr
        assert len(runs(tmp_path / "outputs" / f"p{parallel}")) == 3
    alone, beside = (losses(tmp_path / "outputs" / name) for name in ("p1", "p2"))
    assert len(alone) == 3
    assert alone == beside
    assert done.stdout.index("cell 3 of 3 begins") < done.stdout.index("(2 of 3)")  # two cells run at once
    assert {(d / "output.log").exists() for d in runs(tmp_path / "outputs" / "p2")} == {True}
    first, *others = [json.loads((d / "effective.json").read_text()) for d in runs(tmp_path / "outputs" / "p2")]
    assert all({**effective, "sources": first["sources"]} == first for effective in others)


@pytest.mark.e2e
def test_threads_are_those_with_which_a_sweep_began(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    """A later `sweep.parallel` changes no bit of a loss. Where the threads do not fit the cores, one line says so."""
    free = [text for text in tiny if not text.startswith("world.threads_per_rank")]
    found, cores = {}, count_cores()
    for first, later in ((1, 1), (1, 2), (2, 1)):
        grid = ["-m", *free, *BYTES, "train.max_steps=20", f"sweep.name=from-{first}-to-{later}"]
        for parallel, seeds in ((first, "1"), (later, "1,2,3")):
            done = gptexp("train", *grid, f"sweep.parallel={parallel}", f"train.seed={seeds}", timeout=400)
            assert done.returncode == 0, done.stderr
        directories = runs(tmp_path / "outputs" / f"from-{first}-to-{later}")
        chosen = [json.loads((directory / run_dir.EFFECTIVE).read_text()) for directory in directories]
        assert [each["threads_per_rank"] for each in chosen] == [max(1, cores // first)] * 3
        assert [each["runs_at_once"] for each in chosen] == [first] * 3
        assert ("threads with which the sweep began" in done.stderr) == (first != later and cores > 1)
        found[first, later] = losses(tmp_path / "outputs" / f"from-{first}-to-{later}")
    assert found[1, 1] == found[1, 2]
    assert len(found[1, 1]) == 3


needs_cores = pytest.mark.skipif(sys.platform != "linux" or count_cores() < 2, reason="no trial on one core")
LONG = [
    *BYTES,
    "train.max_steps=2000",
    "train.save_every=0",
    "train.eval_every=0",
    "sweep.name=s",
    "train.seed=1,2,3,4",
]


def of_trial(sweep: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of a sweep that is making its trial: what forks the runs, and two or three runs."""
    family = psutil.Process(sweep.pid).children()
    return family if len(family) >= 3 else []


@pytest.mark.e2e
@needs_cores
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_during_the_trial_leaves_no_process_and_no_cell(
    start: Start, tiny: list[str], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = start("train", "-m", *tiny, *LONG)
    wait_for(lambda: of_trial(process), process)
    family = of_trial(process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert not runs(tmp_path / "outputs" / "s")


@pytest.mark.e2e
@needs_cores
def test_a_trial_is_made_once_and_its_number_is_kept(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    process = start("train", "-m", *tiny, *LONG)
    assert process.stdout is not None
    while " times as fast as " not in (line := process.stdout.readline()):
        assert line, process.communicate()[1]
    cells = tmp_path / "outputs" / "s"
    wait_for((cells / run_dir.EFFECTIVE).exists, process)
    at_once = json.loads((cells / run_dir.EFFECTIVE).read_text())["runs_at_once"]
    wait_for(lambda: len([*cells.glob("*/metrics.jsonl")]) == at_once, process)
    process.send_signal(signal.SIGINT)
    out = process.stdout.read()  # `communicate` would lose what `readline` has read ahead
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out.count(" begins: ") == at_once
    planned = gptexp("plan", "-m", *tiny, *LONG, "--json")
    assert json.loads(planned.stdout)["at_once"] == at_once, planned.stderr
    again = start("train", "-m", *tiny, *LONG)
    wait_for(lambda: sum(len(processes_of(cell)) for cell in runs(cells)) == at_once, again)
    again.send_signal(signal.SIGINT)
    out, err = again.communicate(timeout=60)
    assert " times as fast as " not in out


@pytest.mark.e2e
def test_a_signal_stops_every_cell_and_the_same_command_continues_them(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    options = ["train.max_steps=800", "train.save_every=0", "train.eval_every=0", "sweep.parallel=2", "sweep.name=s"]
    grid = ["-m", *tiny, *BYTES, *options, "train.seed=1,2,3"]
    process = start("train", *grid, start_new_session=True)
    cells = tmp_path / "outputs" / "s"

    def both_train() -> bool:
        return sum(len(events(path.parent, "step")) > 3 for path in cells.glob("*/metrics.jsonl")) == 2

    wait_for(both_train, process)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends Ctrl-C to the whole group
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    stopped = runs(cells)
    assert [summary(directory)["status"] for directory in stopped] == ["interrupted"] * 2
    assert [processes_of(directory) for directory in stopped] == [[], []]
    assert (cells / "report.html").exists()
    steps = {directory: summary(directory)["steps"] for directory in stopped}
    done = gptexp("train", *grid)
    assert done.returncode == 0, done.stderr
    assert [summary(directory)["status"] for directory in runs(cells)] == ["completed"] * 3
    for directory in stopped:
        assert 3 < steps[directory] < 800
        assert [e["step"] for e in events(directory, "step")] == list(range(800))


def preloaded_of(sweep: subprocess.Popen[str]) -> list[psutil.Process]:
    """The process of a sweep that forks its cells."""
    return [child for child in psutil.Process(sweep.pid).children() if "gptexp.run.preloaded" in child.cmdline()]


@pytest.mark.skipif(sys.platform != "linux", reason="cells are forked on Linux only")
@pytest.mark.parametrize("victim", e2e_then_slow(["sweep", "preloaded"]))
def test_after_sigkill_of_a_sweep_or_of_what_forks_its_cells_nothing_is_lost(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path, victim: str
) -> None:
    """The first cell has a new interpreter, and the others are forked."""
    options = ["sweep.parallel=2", "sweep.name=s", "train.save_every=0", "train.eval_every=0", "train.max_steps=2,900"]
    grid = ["-m", *tiny, *BYTES, *options, "train.seed=1,2"]
    process = start("train", *grid)
    cells = tmp_path / "outputs" / "s"

    def trains(cell: Path) -> bool:
        return (cell / "metrics.jsonl").exists() and len(events(cell, "step")) > 3

    wait_for(lambda: sum(map(trains, cells.glob("max_steps=900*"))) == 2, process)
    [forking] = preloaded_of(process)
    running = [psutil.Process(pid) for cell in cells.glob("max_steps=900*") for pid in processes_of(cell)]
    assert [cell.ppid() for cell in running] == [process.pid] * 2
    if victim == "sweep":
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs([forking, *running], timeout=30)
        assert not alive
        states = [summary(cell) for cell in cells.glob("max_steps=900*")]
        assert [state["status"] for state in states] == ["interrupted"] * 2
        assert all(3 < state["steps"] < 900 for state in states)
        done = gptexp("train", *grid)
        assert done.returncode == 0, done.stderr
    else:
        forking.kill()
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert [summary(cell)["status"] for cell in runs(cells)] == ["completed"] * 4
    for cell in cells.glob("max_steps=900*"):
        assert [event["step"] for event in events(cell, "step")] == list(range(900))


@pytest.mark.slow
def test_a_killed_cell_does_not_stop_the_others(start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    grid = ["-m", *tiny, "train.max_steps=300", "train.seed=1,2", "sweep.parallel=2", "sweep.name=s"]
    process = start("train", *grid)
    cells = tmp_path / "outputs" / "s"
    wait_for(lambda: any(len(events(p.parent, "step")) > 3 for p in cells.glob("seed=1-*/metrics.jsonl")), process)
    [victim] = cells.glob("seed=1-*")
    [rank] = processes_of(victim)
    os.kill(rank, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "1 of 2 cells failed" in err
    done = gptexp("train", *grid)
    assert done.returncode == 0, done.stderr
    assert [summary(directory)["status"] for directory in runs(cells)] == ["completed"] * 2


def final_table(root: Path) -> dict[tuple[str, str], float]:
    """Final validation loss by learning rate and seed, from the table of the report."""
    with (root / "cells.csv").open() as file:
        return {(row["lr"], row["seed"]): float(row["final_val_loss"]) for row in csv.DictReader(file)}


@pytest.mark.slow
def test_a_sweep_killed_three_times_ends_with_the_same_table(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """Each kill sends SIGKILL to all its processes, at a random moment."""
    options = ["sweep.parallel=2", "train.max_steps=400", "train.save_every=40", "train.eval_every=0"]
    grid = ["-m", *tiny, *options, "optim.lr=1e-3,2e-3,4e-3", "train.seed=1,2"]
    undisturbed = gptexp("train", *grid, "sweep.name=one", timeout=400)
    assert undisturbed.returncode == 0, undisturbed.stderr
    cells, draw = tmp_path / "outputs" / "two", random.Random(9)
    for done_before in sorted(draw.sample(range(5), 3)):
        process = start("train", *grid, "sweep.name=two")

        def far_enough(so_many: int = done_before) -> bool:
            done = [run_dir.status(path.parent) for path in cells.glob("*/summary.json")].count("completed")
            trains = any(
                run_dir.status(path.parent) == "running" and len(events(path.parent, "step")) > 50
                for path in cells.glob("*/metrics.jsonl")
            )
            return done >= so_many and trains

        wait_for(far_enough, process)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        psutil.wait_procs(family)
    again = gptexp("train", *grid, "sweep.name=two", timeout=400)
    assert again.returncode == 0, again.stderr
    assert "already completed" in again.stdout
    assert len(final_table(cells)) == 6
    assert final_table(cells) == final_table(tmp_path / "outputs" / "one")
