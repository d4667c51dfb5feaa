"""`gptexp train -m` in real processes: the directories of cells, repeated and widened grids, failing cells."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import TINY, ForkServer, runs, summary
from real_runs import environment

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]


def config_of(cell: Path) -> dict[str, dict[str, object]]:
    config: dict[str, dict[str, object]] = yaml.safe_load((cell / "config.yaml").read_text())
    return config


@pytest.mark.e2e
def test_a_failing_cell_does_not_stop_the_others(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    path = next(o for o in tiny if o.startswith("data.path="))
    crashed = gptexp("train", "-m", *tiny, f"{path},short.txt", "sweep.name=crash")
    assert crashed.returncode == 1
    assert "1 of 2 cells failed" in crashed.stderr
    assert "fewer than one window" in crashed.stderr
    assert "Traceback" not in crashed.stderr
    assert len([d for d in runs(tmp_path / "outputs" / "crash") if summary(d)["status"] == "completed"]) == 1


@pytest.mark.e2e
def test_a_cell_with_a_damaged_file_is_named_before_any_cell_starts(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    cells = tmp_path / "outputs/s"
    assert gptexp("train", "-m", *tiny, "train.seed=1,2", "sweep.name=s").returncode == 0
    [damaged] = cells.glob("seed=1-*")
    (damaged / "summary.json").write_text("{")
    again = gptexp("train", "-m", *tiny, "train.seed=1,2,3", "sweep.name=s")
    assert (again.returncode, len(again.stderr.splitlines())) == (2, 1)
    assert f"{damaged.relative_to(tmp_path)}/summary.json: not JSON" in again.stderr
    assert not list(cells.glob("seed=3-*"))


def test_one_illegal_cell_is_refused_before_any_cell_starts(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    done = gptexp("train", "-m", *tiny, "batch.total_batch_size=128,100")
    assert done.returncode == 2
    assert "(cell batch.total_batch_size=100)" in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, corpus: Path, torch_server: ForkServer, cache: Path) -> Path:
    """The folder in which a grid of two learning rates and two batch sizes was run."""
    root = tmp_path_factory.mktemp("swept")
    grid = ["optim.lr=3e-4,6e-4", "batch.total_batch_size=128,256"]
    argv = ["train", "-m", *TINY, f"data.path={corpus}", *grid]
    done = torch_server.ask(argv, root, environment(cache), timeout=240)
    assert done["code"] == 0, done["stderr"]
    return root


@pytest.mark.e2e
def test_every_cell_trains_with_its_own_values_in_a_directory_of_one_sweep(swept: Path) -> None:
    cells = {directory: config_of(directory) for directory in runs(swept)}
    assert {(c["optim"]["lr"], c["batch"]["total_batch_size"], summary(d)["tokens"]) for d, c in cells.items()} == {
        (lr, batch, 4 * batch) for lr in (3e-4, 6e-4) for batch in (128, 256)
    }
    assert len(cells) == 4
    [sweep] = {directory.parent for directory in cells}
    assert {config["sweep"]["name"] for config in cells.values()} == {sweep.name}


@pytest.mark.e2e
def test_a_widened_grid_trains_the_new_cells_only_and_keeps_the_decisions(
    swept: Path, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    shutil.copytree(swept / "outputs", tmp_path / "outputs")
    cells = runs(tmp_path)
    stamp = {d: (d / "summary.json").stat().st_mtime_ns for d in cells}
    # All cells reuse the decisions of the first cell, also in a later command.
    effective = json.loads((cells[0].parent / "effective.json").read_text())
    assert effective["loss"] != "plain"
    (cells[0].parent / "effective.json").write_text(json.dumps({**effective, "loss": "plain"}))
    wider = ("optim.lr=0.0003,6e-4,1e-3", "batch.total_batch_size=choice(128)")
    widened = gptexp("train", "-m", *tiny, *wider, "world.size=2")  # the world size is not part of the grid
    assert widened.returncode == 0, widened.stderr
    assert widened.stdout.count("already completed") == 2
    assert widened.stdout.count("completed    val loss") == 3
    assert len(runs(tmp_path)) == 5
    assert {d: (d / "summary.json").stat().st_mtime_ns for d in cells} == stamp
    [new] = set(runs(tmp_path)) - set(cells)
    assert json.loads((new / "effective.json").read_text())["loss"] == "plain"


@pytest.mark.e2e
def test_a_diverged_cell_does_not_fail_the_sweep_and_is_not_repeated(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    grid = ("-m", *tiny, "optim.lr=1e-3,1e18", "optim.grad_clip=0", "train.max_steps=10", "sweep.name=s")
    first = gptexp("train", *grid)
    assert first.returncode == 0, first.stderr
    assert "diverged" in first.stderr
    again = gptexp("train", *grid)
    assert again.returncode == 0
    assert "already diverged" in again.stdout
    assert sorted(summary(d)["status"] for d in runs(tmp_path)) == ["completed", "diverged"]


def test_an_error_in_all_cells_of_a_named_grid_is_printed_once(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    illegal = gptexp("train", *tiny, "sweep=seeds", "model.n_head=3")
    assert illegal.returncode == 2
    assert "(all 5 cells)" in illegal.stderr
    assert not (tmp_path / "outputs").exists()
