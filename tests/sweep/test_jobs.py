"""Cells as jobs: of a real SLURM with two nodes, through submitit."""

import csv
import json
import re
import signal
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import events, runs, summary, wait_for
from real_runs import begun

from gptexp.config.compose import compose
from gptexp.process.errors import ConfigError
from gptexp.sweep.jobs import spread

if TYPE_CHECKING:
    from slurm_cluster import Cluster

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

needs_submitit = pytest.mark.skipif(find_spec("submitit") is None, reason="no submitit; pip install 'gptexp[slurm]'")

LONG = ("train.max_steps=80", "train.eval_every=0", "train.save_every=0", "sweep.name=s")
SLURM = "hydra/launcher=submitit_slurm"
# Values that measure time, or say where and with which commit the code ran.
OTHER = re.compile(r"time|_s$|_ms$|_h$|per_s|mfu|perf/|minutes|git_commit|^name$|^command$")


# --- how many nodes and tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "nodes", "tasks", "gpus", "expected"),
    [
        (1, None, None, None, (1, 1)),
        (8, None, None, None, (1, 1)),  # one task, which starts the eight ranks
        (8, 1, 1, None, (1, 1)),  # the defaults of hydra-submitit-launcher
        (8, 1, 8, None, (1, 8)),
        (8, None, 8, None, (1, 8)),
        (2, None, None, 8, (1, 1)),
        (16, None, None, 8, (2, 8)),
        (12, None, None, 8, (2, 6)),
        (6, None, None, 4, (2, 3)),
        (16, 4, None, 8, (4, 4)),
        (16, 4, None, None, (4, 4)),
        (16, None, 4, None, (4, 4)),
        (16, 2, 8, 8, (2, 8)),
    ],
)
def test_the_ranks_of_a_cell_are_spread_over_nodes(
    ranks: int, nodes: int | None, tasks: int | None, gpus: int | None, expected: tuple[int, int]
) -> None:
    config = compose(["model=nano", f"world.size={ranks}", "batch.total_batch_size=196608"])
    assert spread(config, nodes, tasks, gpus) == expected


def test_cells_on_a_cpu_have_one_node_unless_more_are_given() -> None:
    config = compose(["model=nano", "world.size=16", "train.device=cpu", "batch.micro_batch_size=1"])
    assert spread(config, None, None, 8) == (1, 1)
    assert spread(config, 2, None, 4) == (2, 8)


@pytest.mark.parametrize(
    ("ranks", "nodes", "tasks", "gpus", "why"),
    [
        (12, 2, 8, 8, "hydra.launcher.nodes × tasks_per_node = 2 × 8 = 16 ranks; use another world.size, or nodes × "
         "tasks_per_node = 2 × 6, 3 × 4, 4 × 3, 6 × 2, 12 × 1"),
        (16, 2, 1, None, "hydra.launcher.nodes × tasks_per_node = 2 × 1 = 2 ranks; use another world.size, or nodes × "
         "tasks_per_node = 1 × 16, 2 × 8, 4 × 4, 8 × 2, 16 × 1"),
        (16, 3, None, None, "3 nodes cannot have the same number of ranks each"),
        (16, 1, 1, 8, "16 ranks on each node, which has 8 GPUs"),
        (16, 1, 16, 8, "16 ranks on each node, which has 8 GPUs"),
        (4, 0, None, None, "0 nodes cannot"),
        (16, None, None, 6, "3 nodes cannot have the same number of ranks each; use another world.size, or nodes × "
         "tasks_per_node = 4 × 4, 8 × 2, 16 × 1"),
    ],
)  # fmt: skip
def test_a_world_size_that_nodes_and_tasks_cannot_give_is_refused_with_those_that_can(
    ranks: int, nodes: int | None, tasks: int | None, gpus: int | None, why: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"world.size={ranks}: {why}")):
        spread(_of_ranks(ranks), nodes, tasks, gpus)


def _of_ranks(ranks: int) -> Any:
    return compose(["model=nano", f"world.size={ranks}", "batch.total_batch_size=196608"])


@needs_submitit
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["hydra/launcher=submitit_local", "sweep.parallel=2"], "submitit_local runs one cell at a time"),
        (["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2", "world.size=2"],
         "hydra.launcher.tasks_per_node=2: with submitit_local a cell is one task; leave it out"),
        ([SLURM, "hydra.launcher.timeout_min=soon"], "timeout_min"),
        ([SLURM, "hydra.launcher.additional_parameters=reservation"], "hydra.launcher: "),
        (["hydra/launcher=submitit_local", "hydra.launcher.nodes=2"], "LocalExecutor can use only one node"),
        ([SLURM, "hydra.launcher.nodes=two"], 'hydra.launcher: Parameter "nodes" expected type'),
        ([SLURM, "hydra.launcher.nodes=2", "world.size=1"],
         "world.size=1: 2 nodes cannot have the same number of ranks each; use another world.size, or nodes × "
         "tasks_per_node = 1 × 1"),
        ([SLURM, "hydra.launcher.nodes=2", "world.size=2", "hydra.launcher.use_srun=false"], "srun starts the ranks"),
        ([SLURM, "hydra.launcher.nodes=2", "world.size=2", "hydra.launcher.gpus_per_task=2"],
         "hydra.launcher.gpus_per_task=2: each of the 2 tasks is a rank, which uses one GPU; use 1"),
        ([SLURM, "hydra.launcher.array_parallelism=4"],
         "hydra.launcher.array_parallelism=4: each cell is a job of its own; use sweep.parallel=4"),
        ([SLURM, "hydra.launcher.submitit_folder=jobs"], "hydra.launcher.submitit_folder=jobs: needs %j"),
    ],
)  # fmt: skip
def test_a_wrong_option_of_the_launcher_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, gptexp: Gptexp, tiny: list[str], tmp_path: Path, options: list[str], why: str
) -> None:
    srun = tmp_path / "bin" / "srun"  # submitit looks for it, and does not call it
    srun.parent.mkdir()
    srun.write_text("")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(srun.parent), prepend=":")
    done = gptexp("train", "-m", *tiny, *options, "optim.lr=1e-3,2e-3")
    assert done.returncode == 2
    assert why in done.stderr
    assert len(done.stderr.splitlines()) <= 2  # a line may say that the text was tokenised
    assert not [*(tmp_path / "outputs").rglob("config.yaml")]


# --- jobs ------------------------------------------------------------------------------------------------------------


def job_ids(cells: Path) -> dict[str, str]:
    """The number of each cell's job, by the name of the cell."""
    return {path.parent.name: json.loads(path.read_text())["id"] for path in sorted(cells.glob("*/job.json"))}


@pytest.mark.e2e
@needs_submitit
def test_jobs_outlive_their_command_and_the_same_command_waits_for_them(
    slurm: "Cluster", start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """Their options come from the user's file and from the command line. One task of each job starts two ranks."""
    file = tmp_path / "conf" / "experiment" / "lab.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "# @package _global_\ndefaults:\n  - override /hydra/launcher: submitit_slurm\n"
        "hydra:\n  launcher: {partition: debug, comment: ours}\n"
    )
    options = ["timeout_min=30", "cpus_per_task=2", "mem_gb=0.25", 'setup=["echo >> setups"]',
               "additional_parameters={nice: 7}"]  # fmt: skip
    grid = ["-m", *tiny, *LONG, "train.seed=1,2", "world.size=2", "experiment=lab", "--config-dir", "conf",
            *[f"hydra.launcher.{option}" for option in options]]  # fmt: skip
    cells = tmp_path / "outputs" / "s"
    process = start("train", *grid)
    wait_for(lambda: len(job_ids(cells)) == 2, process)
    process.kill()
    process.wait()
    done = gptexp("train", *grid)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" of an earlier command: seed=") == 2
    assert slurm("scontrol", "show", "job").count("Comment=ours") == 2
    for name, number in job_ids(cells).items():
        job = slurm.job(number)
        wanted = {"JobName": name, "Partition": "debug", "TimeLimit": "00:30:00", "CPUs/Task": "2", "NumNodes": "1",
                  "NumTasks": "1", "Requeue": "1", "MinMemoryNode": "256M"}  # fmt: skip
        assert {key: job[key] for key in wanted} == wanted
    assert (tmp_path / "setups").read_text() == "\n\n"
    assert [summary(directory)["world_size"] for directory in runs(cells)] == [2, 2]
    for directory in runs(cells):
        assert summary(directory)["status"] == "completed"
        assert [event["step"] for event in events(directory, "step")] == list(range(80))


@pytest.mark.e2e
@needs_submitit
def test_a_cell_on_two_nodes_continues_after_its_time_limit_and_the_loss_of_a_node(
    slurm: "Cluster", start: Start, tiny: list[str], tmp_path: Path
) -> None:
    nodes = [SLURM, "hydra.launcher.nodes=2", "hydra.launcher.cpus_per_task=2"]
    process = start("train", "-m", *tiny, *LONG, "train.save_every=10", "train.seed=1", "world.size=2", *nodes)
    cells = tmp_path / "outputs" / "s"
    wait_for(lambda: job_ids(cells) and begun(cells / next(iter(job_ids(cells))))(), process)
    [(name, number)] = job_ids(cells).items()
    directory = cells / name
    ranks = [p for p in slurm.steps("n1", "n2") if "gptexp.resume" in p.cmdline()]
    assert sorted((p.environ()["SLURMD_NODENAME"], p.environ()["SLURM_PROCID"]) for p in ranks) == [
        ("n1", "0"), ("n2", "1"),
    ]  # fmt: skip
    slurm("scancel", "--signal=USR2", number)  # as SLURM does before the time limit, to all tasks
    wait_for(lambda: slurm.job(number)["Restarts"] == "1", process)
    stopped_at = summary(directory)["steps"]
    assert (directory / "checkpoints" / f"step-{stopped_at:08d}").exists()
    wait_for(begun(directory, stopped_at + 12), process)  # past a checkpoint
    slurm.kill_node("n2")
    wait_for(lambda: slurm.job(number)["Restarts"] == "2", process)
    slurm.start_node("n2")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    job = slurm.job(number)
    assert (job["JobState"], job["NumNodes"], job["NumTasks"], job["CPUs/Task"]) == ("COMPLETED", "2", "2", "2"), out
    assert (summary(directory)["status"], summary(directory)["world_size"]) == ("completed", 2)
    assert [event["step"] for event in events(directory, "step")] == list(range(80))
    output = (directory / "output.log").read_text()
    assert output.count("the run stops after this step") == 1  # the other rank's output is elsewhere
    assert output.count("interrupted after") == output.count("completed after") == 1
    assert {path.name for path in (cells / ".submitit" / number).glob("*_log.out")} == {
        f"{number}_0_log.out", f"{number}_1_log.out",
    }  # fmt: skip


@pytest.mark.e2e
@needs_submitit
def test_a_job_that_slurm_refuses_does_not_stop_the_other_cells(
    slurm: "Cluster", gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    done = gptexp("train", "-m", *tiny, "train.seed=1,2", SLURM, "hydra.launcher.partition=none")
    assert done.returncode == 1
    assert done.stderr.count("not submitted: sbatch: error: invalid partition specified: none") == 2
    assert "2 of 2 cells failed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.e2e
@needs_submitit
def test_a_signal_cancels_the_jobs_on_all_their_nodes(
    slurm: "Cluster", start: Start, tiny: list[str], tmp_path: Path
) -> None:
    """One job trains and saves, the other waits for the nodes."""
    nodes = [SLURM, "hydra.launcher.nodes=2", "hydra.launcher.exclusive=true"]
    process = start("train", "-m", *tiny, *LONG, "train.max_steps=100000", "train.seed=1,2", "world.size=2", *nodes)
    cells = tmp_path / "outputs" / "s"
    wait_for(lambda: len(job_ids(cells)) == 2 and begun(cells / next(iter(job_ids(cells))))(), process)
    trains, waits = job_ids(cells).items()
    assert slurm.job(waits[1])["JobState"] == "PENDING"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "Traceback" not in err
    assert [slurm.job(number)["JobState"] for _, number in (trains, waits)] == ["CANCELLED"] * 2
    assert [summary(cells / name)["status"] for name, _ in (trains, waits)] == ["interrupted"] * 2
    assert summary(cells / trains[0])["steps"] >= 4
    assert len([*(cells / trains[0] / "checkpoints").iterdir()]) == 1


@pytest.mark.slow
@needs_submitit
def test_a_sweep_of_cells_on_two_nodes_equals_the_same_sweep_on_this_machine(
    slurm: "Cluster", gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """Every loss, every fit and the verdict are the same to the last digit. Only times differ."""
    length = ["train.max_steps=null", "train.max_tokens=16_384", "train.eval_every=0", "train.save_every=0"]
    grid = ["-m", *tiny, *length, "world.size=2", "optim.lr=2e-2,8e-2,3.2e-1", "batch.total_batch_size=128,256"]
    outputs = tmp_path / "outputs"
    for name, launcher in (("here", []), ("there", [SLURM, "hydra.launcher.nodes=2"])):
        done = gptexp("train", *grid, f"sweep.name={name}", *launcher, timeout=900)
        assert done.returncode == 0, done.stderr
    for directory in runs(outputs / "there"):
        alone = outputs / "here" / directory.name
        assert slurm.job(job_ids(outputs / "there")[directory.name])["NumNodes"] == "2"
        for kind in ("step", "eval"):
            assert [*map(_comparable, events(directory, kind))] == [*map(_comparable, events(alone, kind))]
        assert _comparable(summary(directory)) == _comparable(summary(alone))
    assert len(runs(outputs / "there")) == 6
    assert _cells(outputs / "there") == _cells(outputs / "here")
    reports = [json.loads((outputs / name / "report.json").read_text()) for name in ("here", "there")]
    assert _comparable(reports[0]) == _comparable(reports[1])
    assert reports[0]["verdict"]


def _comparable(value: Any) -> Any:
    """`value` without the entries of `OTHER`."""
    if isinstance(value, dict):
        return {key: _comparable(inner) for key, inner in value.items() if not OTHER.search(key)}
    if isinstance(value, list):
        return [*map(_comparable, value)]
    return value


def _cells(directory: Path) -> list[dict[str, Any]]:
    with (directory / "cells.csv").open() as file:
        return [_comparable(row) for row in csv.DictReader(file)]
