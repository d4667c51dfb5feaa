"""Cells side by side: the same numbers as one by one, devices that nobody shares, signals that reach all."""

import csv
import itertools
import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import events, processes_of, runs, summary, wait_for

from gptexp import run_dir
from gptexp.pool import run_all, start_here

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]


def losses(root: Path) -> dict[str, list[tuple[int, float]]]:
    """Of every cell, whatever its directory's name: the seed and learning rate, and all losses of the training."""
    found = {}
    for directory in runs(root):
        config = (directory / "config.yaml").read_text()
        key = "".join(line for line in config.splitlines(keepends=True) if "  lr:" in line or "  seed:" in line)
        found[key] = [(e["step"], e["train/loss"]) for e in events(directory, "step")]
    return found


def test_four_cells_two_by_two_have_the_losses_that_they_have_one_by_one(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    grid = ["-m", *tiny, "optim.lr=1e-3,2e-3", "train.seed=1,2", "world.size=2", "train.max_steps=30"]
    for parallel in (1, 2):
        done = gptexp("train", *grid, f"sweep.parallel={parallel}", f"sweep.name=p{parallel}", timeout=400)
        assert done.returncode == 0, done.stderr
        assert len(runs(tmp_path / "outputs" / f"p{parallel}")) == 4
    alone, beside = (losses(tmp_path / "outputs" / name) for name in ("p1", "p2"))
    assert len(alone) == 4
    assert alone == beside
    assert done.stdout.index("cell 2 of 4 begins") < done.stdout.index("(1 of 4)")  # before the first had ended
    assert {(d / "output.log").exists() for d in runs(tmp_path / "outputs" / "p2")} == {True}
    decided = [json.loads((d / "effective.json").read_text()) for d in runs(tmp_path / "outputs" / "p2")]
    assert all(effective == decided[0] for effective in decided)


def test_a_signal_reaches_every_cell_and_the_same_command_goes_on(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    options = ["train.max_steps=400", "train.save_every=0", "train.eval_every=0", "sweep.parallel=2", "sweep.name=s"]
    grid = ["-m", *tiny, *options, "train.seed=1,2,3"]
    process = start("train", *grid, start_new_session=True)
    cells = tmp_path / "outputs" / "s"

    def both_train() -> bool:
        return sum(len(events(path.parent, "step")) > 3 for path in cells.glob("*/metrics.jsonl")) == 2

    wait_for(both_train, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
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
        assert 3 < steps[directory] < 400
        assert [e["step"] for e in events(directory, "step")] == list(range(400))


def test_a_cell_that_is_killed_costs_itself_only(start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
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


def test_a_cell_that_is_in_use_costs_itself_only(start: Start, tiny: list[str], tmp_path: Path) -> None:
    process = start("train", "-m", *tiny, "train.seed=1,2,3", "sweep.name=s")
    cells = tmp_path / "outputs" / "s"
    wait_for(lambda: (cells / "sweep.json").exists(), process)
    second = cells / [*run_dir.read_json(cells / "sweep.json")["cells"]][1]
    with run_dir.held(second):
        _, err = process.communicate(timeout=240)
    assert process.returncode == 1, err
    assert f"{second.name}: another process is running in it" in err
    assert "1 of 3 cells failed" in err
    assert "Traceback" not in err
    assert [summary(directory)["status"] for directory in runs(cells)] == ["completed"] * 2


def final_table(root: Path) -> dict[tuple[str, str], float]:
    """Final validation loss by learning rate and seed, from the table that the report writes."""
    with (root / "cells.csv").open() as file:
        return {(row["lr"], row["seed"]): float(row["final_val_loss"]) for row in csv.DictReader(file)}


@pytest.mark.slow
def test_a_sweep_that_is_killed_three_times_comes_to_the_same_table(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """All its processes at once, at random moments."""
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
    assert "completed before" in again.stdout
    assert len(final_table(cells)) == 6
    assert final_table(cells) == final_table(tmp_path / "outputs" / "one")


@dataclass(frozen=True)
class Job:
    directory: Path
    world_size: int


def no_more() -> None:
    return None


def sleep(job: Job, gpus: Sequence[str], at_once: int) -> "subprocess.Popen[bytes]":
    """Instead of training."""
    return subprocess.Popen(["sleep", "0.3"])


# --- devices ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("sizes", "most"), [([1] * 8, 4), ([2] * 4, 2), ([4] * 2, 1), ([1, 2, 4, 1, 2, 3, 1], 3)])
def test_no_gpu_has_two_cells_and_none_is_idle_while_one_fits(sizes: list[int], most: int) -> None:
    using: dict[Path, list[str]] = {}
    at_most = 0

    def begins(job: Job, own: Sequence[str]) -> None:
        nonlocal at_most
        assert len(own) == job.world_size
        taken = list(itertools.chain(*using.values()))
        assert not {*own} & {*taken}
        using[job.directory] = list(own)
        at_most = max(at_most, len(using))

    def ended(job: Job, code: int) -> None:
        assert code == 0
        del using[job.directory]

    jobs = [Job(Path(str(number)), size) for number, size in enumerate(sizes)]
    assert run_all(jobs, no_more, 8, ["0", "1", "2", "3"], lambda: True, begins, ended, sleep) is None
    assert (at_most, using) == (most, {})


def test_more_is_asked_for_once_nothing_waits_and_a_place_is_free() -> None:
    """Whoever chooses the next cell wants to know how as many as possible have ended."""
    waiting = [Job(Path(str(number)), 1) for number in range(2)]
    happened: list[str] = []

    def more() -> Job | None:
        happened.append("asked")
        return Job(Path("more"), 1) if happened.count("asked") < 3 else None

    def begins(job: Job, own: Sequence[str]) -> None:
        happened.append(f"begins {job.directory}")

    def ended(job: Job, code: int) -> None:
        happened.append(f"ended {job.directory}")

    assert run_all(waiting, more, 1, None, lambda: True, begins, ended, sleep) is None
    assert happened == [
        "begins 0", "ended 0", "begins 1", "ended 1", "asked", "begins more", "ended more", "asked", "begins more",
        "ended more", "asked",
    ]  # fmt: skip


def test_a_signal_while_a_cell_is_prepared_starts_nothing() -> None:
    begun = []

    def begins(job: Job, own: Sequence[str]) -> None:
        begun.append(job)
        os.kill(os.getpid(), signal.SIGTERM)

    jobs = [Job(Path(str(number)), 1) for number in range(3)]
    ended: list[Job] = []
    told = run_all([*jobs], no_more, 1, None, lambda: True, begins, lambda job, _: ended.append(job), sleep)
    assert (told, begun, ended) == (signal.SIGTERM, jobs[:1], [])


def test_a_signal_just_after_a_cell_was_started_reaches_it() -> None:
    def started_and_asked(job: Job, gpus: Sequence[str], at_once: int) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(["sleep", "60"])
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    codes: list[int] = []

    def ended(job: Job, code: int) -> None:
        codes.append(code)

    run_all([Job(Path(), 1)], no_more, 1, None, lambda: True, lambda *_: None, ended, started_and_asked)
    assert codes == [-signal.SIGTERM]


def test_a_cell_that_cannot_be_prepared_costs_itself_only() -> None:
    def begins(job: Job, own: Sequence[str]) -> None:
        if job.directory.name == "1":
            raise OSError("no room")

    jobs = [Job(Path(str(number)), 1) for number in range(3)]
    codes: dict[str, int] = {}

    def ended(job: Job, code: int) -> None:
        codes[job.directory.name] = code

    run_all(jobs, no_more, 2, ["0", "1"], lambda: True, begins, ended, sleep)
    assert codes == {"0": 0, "1": 1, "2": 0}


def test_nothing_runs_beside_the_first_until_it_has_decided() -> None:
    running = 0
    decided = threading.Event()
    threading.Timer(0.6, decided.set).start()
    beside_before: list[int] = []

    def begins(job: Job, own: Sequence[str]) -> None:
        nonlocal running
        running += 1
        beside_before.append(running if not decided.is_set() else 0)

    def ended(job: Job, code: int) -> None:
        nonlocal running
        running -= 1

    jobs = [Job(Path(str(number)), 1) for number in range(6)]
    run_all(jobs, no_more, 3, None, decided.is_set, begins, ended, sleep)
    assert max(beside_before) == 1
    assert 0 in beside_before


def test_a_cells_environment_names_its_devices_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Popen:
        def __init__(self, command: list[str], env: dict[str, str], **kwargs: Any) -> None:
            seen.update(env=env, command=command, kwargs=kwargs)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    start_here(Job(tmp_path, 2), ["6", "7"], 2)
    assert (seen["env"]["CUDA_VISIBLE_DEVICES"], seen["env"]["GPTEXP_AT_ONCE"]) == ("6,7", "2")
    assert seen["command"][-2:] == ["gptexp.resume", str(tmp_path)]
    start_here(Job(tmp_path, 1), [], 1)
    assert seen["env"]["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from gptexp.distributed import Rank, cores_per_rank

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for at_once, local, threads in ((1, 1, 16), (4, 1, 4), (4, 2, 2), (32, 1, 1)):
        monkeypatch.setenv("GPTEXP_AT_ONCE", str(at_once))
        assert cores_per_rank(Rank(0, local, 0, local)) == threads


def test_more_cells_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gptexp.compose import compose
    from gptexp.config import Config
    from gptexp.errors import ConfigError
    from gptexp.sweep.launchers import side_by_side

    def cells(*overrides: str) -> list[Config]:
        return [compose(list(overrides))] * 3

    monkeypatch.setattr("gptexp.sweep.launchers.visible_gpus", lambda: ["a", "b", "c", "d"])
    assert side_by_side(cells()) == (4, ["a", "b", "c", "d"])
    assert side_by_side(cells("world.size=2")) == (2, ["a", "b", "c", "d"])
    assert side_by_side(cells("world.size=8", "batch.micro_batch_size=4")) == (
        1,
        ["a", "b", "c", "d"],
    )  # and the run says what it lacks
    assert side_by_side(cells("train.device=cpu")) == (1, None)
    assert side_by_side(cells("train.device=cpu", "sweep.parallel=3")) == (3, None)
    with pytest.raises(ConfigError, match=r"sweep\.parallel=3: so many cells of 2 GPUs need 6, and 4 are visible"):
        side_by_side(cells("world.size=2", "sweep.parallel=3"))
    monkeypatch.setattr("gptexp.sweep.launchers.visible_gpus", list)
    assert side_by_side(cells()) == (1, None)
