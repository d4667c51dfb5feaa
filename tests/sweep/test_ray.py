"""Cells on a Ray cluster of two raylets, each with one CPU, which are killed, added and used up."""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import BYTES, events, processes_of, runs, summary, wait_for
from sweeps import report_of, wait_until_free
from test_tune_runs import answers, begun, chosen, search

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="no Ray; pip install 'gptexp[ray]'")
ON_RAY = "hydra/launcher=ray"
FAST = [*BYTES, "train.eval_every=0"]


class Nodes:
    """A head and further nodes of one CPU each, all on this machine; ports and files are its own."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.arguments = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
        self.cluster = Cluster(True, head_node_args=self.arguments)

    def add(self, **more: Any) -> Any:
        return self.cluster.add_node(**self.arguments, **more)

    def kill(self, node: Any) -> None:
        """Kill the processes of a node, as if the machine had lost power."""
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture
def ray_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # not 15: other tests run at the same time
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)  # short: the path of a socket has at most 107 characters
        Path(folder, "ray").mkdir()
        found = Nodes()
        monkeypatch.setenv("RAY_ADDRESS", found.cluster.address)
        yield found
        found.cluster.shutdown()


def steps_of(cells: Path) -> dict[str, list[tuple[int, float]]]:
    """The losses of the steps of each cell."""
    return {
        directory.name: [(event["step"], event["train/loss"]) for event in events(directory, "step")]
        for directory in runs(cells)
    }


def trains(directory: Path, after: int = 0) -> bool:
    """Whether a run trains and has done more steps than `after`, and saved a checkpoint."""
    saved = any((directory / "checkpoints").glob("step-*"))
    return saved and len(events(directory, "step")) > after and bool(processes_of(directory))


def saved_at(directory: Path) -> int:
    """The number of steps in the newest checkpoint."""
    return max(int(path.name.removeprefix("step-")) for path in (directory / "checkpoints").glob("step-*"))


def results(cells: Path) -> dict[str, Any]:
    """What a report says of a sweep, without times, paths and the name."""
    report = report_of(cells)
    arms = json.loads(re.sub(r'"(time|wall_s|train_s|tokens_per_s)": [^,}]*,?', "", json.dumps(report["arms"])))
    return {"arms": arms, "verdict": report["verdict"]}


@pytest.mark.e2e
@needs_ray
def test_a_sweep_of_cells_on_two_nodes_that_loses_one_has_the_results_of_this_machine(
    ray_nodes: Nodes, start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """Each cell has a rank on each node. A node is killed after the first of four; the sweep waits for another one."""
    other, cells = ray_nodes.add(), tmp_path / "outputs" / "ray"
    lengths = ["train.max_tokens=16384", "train.max_steps=null", "train.save_every_tokens=2048"]
    swept = ["optim.lr=4e-3,2e-2", "batch.total_batch_size=64,128"]
    grid = ["train", "-m", *tiny, *FAST, *lengths, *swept, "world.size=2"]
    process = start(*grid, ON_RAY, "sweep.name=ray")

    def in_the_middle() -> list[Path]:
        """A cell of many steps that trains, once another one has ended."""
        status = {path: summary(path)["status"] for path in runs(cells)}
        now = [path for path in status if "=64-" in path.name and status[path] == "running" and trains(path)]
        return now if "completed" in status.values() else []

    [cell] = wait_for(in_the_middle, process, 240)
    ray_nodes.kill(other)
    wait_for(lambda: not processes_of(cell), process, 240)
    saved, killed = saved_at(cell), time.time()
    time.sleep(1)  # with one CPU it cannot start
    assert not processes_of(cell)
    ray_nodes.add()
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    died = [line for line in err.splitlines() if not line.startswith("tokenised text")]
    assert died[0].endswith(f"{cell.name}: its node has died; starting again from its newest checkpoint"), err
    assert len(died) == 1 + died[-1].endswith("has room for 1 rank"), err  # if a waiting cell has looked meanwhile
    assert "aylet" not in out  # no message of Ray
    assert out.count("--- completed") == len(runs(cells)) == 4
    assert out.count(": runs on ") == 5
    assert sum(event["time"] < killed for event in events(cell, "step")) == saved  # the rest is of the second attempt
    here = gptexp(*grid, "sweep.name=here", timeout=400)
    assert here.returncode == 0, here.stderr
    assert steps_of(cells) == steps_of(tmp_path / "outputs" / "here")
    assert results(cells) == results(tmp_path / "outputs" / "here")


@pytest.mark.slow
@needs_ray
def test_a_sweep_follows_a_growing_cluster_and_survives_its_command(
    ray_nodes: Nodes, start: Start, tiny: list[str], tmp_path: Path
) -> None:
    """One CPU, then two; SIGKILL of the command; the next one continues both cells, until Ctrl-C."""
    cells = tmp_path / "outputs" / "s"
    grid = ["train", "-m", *tiny, *FAST, "train.max_steps=100000", "train.save_every=200", "sweep.name=s", ON_RAY]
    grid.append("train.seed=1,2")
    killed = start(*grid)
    wait_for(lambda: any(map(trains, cells.glob("seed=1-*"))), killed, 240)
    [first], [waiting] = cells.glob("seed=1-*"), cells.glob("seed=2-*")
    assert not processes_of(waiting)
    ray_nodes.add()
    wait_for(lambda: trains(first) and trains(waiting), killed, 240)
    killed.kill()
    out, err = killed.communicate()
    assert "2 of 2 begins on Ray: seed=2" in out
    assert err.startswith("tokenised text") or not err
    assert err.count("\n") <= 1  # no message of Ray
    wait_until_free(runs(cells))  # Ray ends the cells

    before = [len(events(directory, "step")) for directory in (first, waiting)]
    stopped = start(*grid, start_new_session=True)
    wait_for(lambda: trains(first, before[0] + 10) and trains(waiting, before[1] + 10), stopped, 240)
    os.killpg(stopped.pid, signal.SIGINT)  # a terminal sends Ctrl-C to the whole group
    out, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 130, err
    assert "Traceback" not in err
    assert [summary(directory)["status"] for directory in runs(cells)] == ["interrupted"] * 2
    assert [processes_of(directory) for directory in runs(cells)] == [[], []]
    for directory in runs(cells):
        steps = [event["step"] for event in events(directory, "step")]
        assert steps == list(range(summary(directory)["steps"]))
        assert saved_at(directory) == steps[-1] + 1


@pytest.mark.e2e
@needs_ray
def test_a_cell_that_fails_is_reported_and_not_tried_again(
    ray_nodes: Nodes, start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    cells = tmp_path / "outputs" / "s"
    grid = ["train", "-m", *tiny, *FAST, "sweep.name=s", ON_RAY]
    too_large = gptexp(*grid, "train.seed=1,2", "world.size=2")
    assert too_large.returncode == 2
    shortage = (
        r"world\.size=2 needs CPU 2 in all; the cluster at \S+ \(1 node\) has room for 1 rank; add nodes, or lower"
    )
    assert re.search(shortage, too_large.stderr)
    kind = gptexp(*grid, "train.seed=1,2", "hydra.launcher.ray.remote.accelerator_type=3")
    assert (kind.returncode, kind.stderr.count("\n")) == (2, 1)
    assert "config error: hydra.launcher.ray.remote: The type of keyword 'accelerator_type' must be" in kind.stderr
    assert not cells.exists()

    done = gptexp(*grid, "optim.lr=1e-3,1e18", "optim.grad_clip=0")
    assert done.returncode == 0, done.stderr
    assert sorted(summary(directory)["status"] for directory in runs(cells)) == ["completed", "diverged"]

    # A node on which gptexp cannot be imported. Its cell fails at once, and is not started again.
    folder = tmp_path / "broken" / "gptexp"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('gptexp is broken here')")
    ray_nodes.add(resources={"broken": 1}, env_vars={"PYTHONPATH": str(folder.parent)})
    failed = gptexp(*grid, "train.seed=2", "hydra.launcher.ray.remote.resources={broken: 1}")
    assert failed.returncode == 1
    assert "Ray: ImportError: gptexp is broken here" in failed.stderr
    assert "1 of 1 cell failed" in failed.stderr
    assert "Traceback" not in failed.stderr

    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "sitecustomize.py").write_text("import ray\nray.__version__ = '2.1.0'")
    process = start(*grid, "train.seed=3", env={**os.environ, "PYTHONPATH": str(tmp_path / "older")})
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "Version mismatch: The cluster was started with: Ray: " in err
    assert err.count("\n") == 1


@pytest.mark.e2e
@needs_ray
def test_a_cluster_of_this_machine_ends_with_its_command(
    start: Start, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGKILL too. Its cell has ended then, and nothing of Ray is on the terminal."""
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes a token there
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        grid = ["train", "-m", *tiny, *FAST, "train.seed=1", "sweep.name=s", ON_RAY]
        killed = start(*grid, "train.max_steps=100000", "train.save_every=100")
        cells = tmp_path / "outputs" / "s"
        wait_for(lambda: any(map(trains, runs(cells))), killed, 240)
        assert of_ray(folder)
        killed.kill()
        killed.wait()
        idle = start("watch", str(cells), "--port", "0")
        wait_for(lambda: not of_ray(folder) and not any(map(processes_of, runs(cells))), idle)
        done = start(*grid)
        out, err = done.communicate(timeout=240)
        assert (done.returncode, err) == (0, "")
        assert [line[:4] for line in out.splitlines() if not line.startswith("completed")] == ["--- "] * 5
        assert not of_ray(folder)


def of_ray(folder: str) -> list[int]:
    """The processes of a local cluster whose files are in `folder`."""
    return [
        process.pid for process in psutil.process_iter(["cmdline"]) if folder in " ".join(process.info["cmdline"] or [])
    ]


@pytest.mark.slow
@needs_ray
def test_a_search_on_ray_that_loses_a_node_has_the_choices_and_answers_of_this_machine(
    ray_nodes: Nodes, start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    other, there = ray_nodes.add(), tmp_path / "outputs/there"
    process = start(*search(tiny, "there", "world.size=2", ON_RAY))
    wait_for(lambda: len(begun(there)) > 1, process, 240)
    ray_nodes.kill(other)
    ray_nodes.add()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    done = gptexp(*search(tiny, "here", "world.size=2"), timeout=600)
    assert done.returncode == 0, done.stderr
    assert chosen(there) == chosen(tmp_path / "outputs/here")
    assert answers(there) == answers(tmp_path / "outputs/here")
