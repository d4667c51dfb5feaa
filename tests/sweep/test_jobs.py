"""Cells as jobs: of a real SLURM with two nodes, through submitit."""

import csv
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import BYTES, events, runs, summary, wait_for
from real_runs import begun

from gptexp.storage import run_dir

if TYPE_CHECKING:
    from slurm_cluster import Cluster

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

needs_submitit = pytest.mark.skipif(find_spec("submitit") is None, reason="no submitit; pip install 'gptexp[slurm]'")

LONG = ("train.max_steps=80", "train.eval_every=0", "train.save_every=0", "sweep.name=s")
SLURM = "hydra/launcher=submitit_slurm"
# Values that measure time, or say where and with which commit the code ran.
OTHER = re.compile(r"time|_s$|_ms$|_h$|per_s|mfu|perf/|minutes|git_commit|^name$|^command$")
DURATION = re.compile(r"\d+ (second|minute|hour|day)s?")


def job_ids(cells: Path) -> dict[str, str]:
    """The number of each cell's job, by the name of the cell."""
    return {path.parent.name: json.loads(path.read_text())["id"] for path in sorted(cells.glob("*/job.json"))}


def watched(cells: Path, process: subprocess.Popen[str], jobs: int = 1) -> dict[str, str]:
    """Wait until the command has submitted so many jobs and all train; their numbers by the names of their cells."""
    wait_for(lambda: len(job_ids(cells)) == jobs and all(begun(cells / name)() for name in job_ids(cells)), process)
    return job_ids(cells)


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
    options = ["timeout_min=30", "cpus_per_task=2", "gpus_per_node=4", "mem_gb=0.25", 'setup=["echo >> setups"]',
               "additional_parameters={nice: 7}"]  # fmt: skip
    steps = 600  # so many that both jobs still run when the second command asks for them
    grid = ["-m", *tiny, *BYTES, *LONG, f"train.max_steps={steps}", "train.device=auto", "train.seed=1,2",
            "world.size=2", "experiment=lab", "--config-dir", "conf",
            *[f"hydra.launcher.{option}" for option in options]]  # fmt: skip
    cells = tmp_path / "outputs" / "s"
    process = start("train", *grid)
    wait_for(lambda: len(job_ids(cells)) == 2, process)
    process.kill()
    process.wait()
    done = gptexp("train", *grid, "hydra.launcher.submitit_folder=elsewhere/%j")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" of an earlier command: seed=") == 2
    assert slurm("scontrol", "show", "job").count("Comment=ours") == 2
    for name, number in job_ids(cells).items():
        job = slurm.job(number)
        wanted = {"JobName": name, "Partition": "debug", "TimeLimit": "00:30:00", "CPUs/Task": "4", "NumNodes": "1",
                  "NumTasks": "1", "Requeue": "1", "MinMemoryNode": "256M", "TresPerNode": "gres:gpu:2"}  # fmt: skip
        assert {key: job[key] for key in wanted} == wanted
    assert (tmp_path / "setups").read_text() == "\n\n"
    assert [summary(directory)["world_size"] for directory in runs(cells)] == [2, 2]
    for directory in runs(cells):
        assert summary(directory)["status"] == "completed"
        assert [event["step"] for event in events(directory, "step")] == list(range(steps))
    assert gptexp("rm", str(cells), "--yes").returncode == 0
    assert not cells.exists()


@pytest.mark.e2e
@needs_submitit
def test_a_cell_on_two_nodes_continues_after_its_time_limit_and_the_loss_of_a_node(
    slurm: "Cluster", start: Start, tiny: list[str], tmp_path: Path
) -> None:
    """A process of the lost node lives on for a moment: it still holds the lock of the run."""
    nodes = [SLURM, "hydra.launcher.nodes=2", "hydra.launcher.cpus_per_task=2"]
    process = start("train", "-m", *tiny, *LONG, "train.save_every=10", "train.seed=1", "world.size=2", *nodes)
    cells = tmp_path / "outputs" / "s"
    [(name, number)] = watched(cells, process).items()
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
    wait_for(lambda: not run_dir.is_locked(directory), process)
    with run_dir.held(directory):
        wait_for(lambda: slurm.job(number)["Restarts"] == "2", process)
        slurm.start_node("n2")
        wait_for(lambda: slurm.job(number)["JobState"] == "RUNNING", process)
        time.sleep(5)  # more than the time for which a run waits for its lock
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    slurm.wait_for(lambda: slurm.job(number)["JobState"] == "COMPLETED")  # its result comes before its end
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
def test_jobs_that_are_requeued_run_out_of_time_limits_or_leave_no_result(
    slurm: "Cluster", start: Start, tiny: list[str], tmp_path: Path
) -> None:
    """Three cells on one node each: one is requeued, as to preempt it, and continues. The others end with a line."""
    options = [SLURM, "hydra.launcher.timeout_min=5", "hydra.launcher.max_num_timeout=1", "train.max_steps=200"]
    process = start("train", "-m", *tiny, *LONG, *options, "train.seed=1,2,3")
    cells = tmp_path / "outputs" / "s"
    jobs = watched(cells, process, 3)
    (requeued, first), (late, second), (killed, third) = jobs.items()
    tasks = [p for p in slurm.steps("n1", "n2") if "submitit.core._submit" in p.cmdline()]
    [task] = [p for p in tasks if p.environ()["SLURM_JOB_ID"] == third and p.name() != "srun"]
    task.kill()
    slurm("scontrol", "requeue", first)
    slurm("scancel", "--signal=USR2", second)
    wait_for(lambda: slurm.job(second)["Restarts"] == "1", process)
    before = summary(cells / late)["steps"]
    assert (cells / late / "checkpoints" / f"step-{before:08d}").exists()
    wait_for(begun(cells / late, before + 2), process)
    slurm("scancel", "--signal=USR2", second)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert slurm.job(first)["Restarts"] == "1"
    assert summary(cells / requeued)["status"] == "completed"
    assert [event["step"] for event in events(cells / requeued, "step")] == list(range(200))
    log = cells / ".submitit" / third / f"{third}_0_log.err"
    assert {line for line in err.splitlines() if "gptexp: job " in line} == {
        f"gptexp: job {third}: ended without a result (FAILED by scontrol show job); see {log}",
        f"gptexp: job {second}: requeued hydra.launcher.max_num_timeout times after its time limit; the same command "
        "continues",
    }, err
    assert "2 of 3 cells failed" in err, (out, killed)


@pytest.mark.e2e
@needs_submitit
def test_a_rank_that_fails_before_the_others_know_it_ends_the_cell(
    slurm: "Cluster",
    gptexp: Gptexp,
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Callable[[str, str], dict[str, str]],
) -> None:
    """Rank 0 waits for it meanwhile. The exit code is that of the rank that failed."""
    code = """
    import os
    def broken(*args):
        raise m.DataError("no text on this node")
    if os.environ.get("SLURM_PROCID") == "1":
        m._examples = broken
    """
    monkeypatch.setenv("PYTHONPATH", sabotage("gptexp.run.rank", code)["PYTHONPATH"])
    failed = gptexp("train", "-m", *tiny, *LONG, "train.seed=1", "world.size=2", SLURM, "hydra.launcher.nodes=2")
    assert failed.returncode == 1, failed.stderr
    assert "1 of 1 cell failed" in failed.stderr
    [(name, number)] = job_ids(tmp_path / "outputs" / "s").items()
    folder = tmp_path / "outputs" / "s" / ".submitit" / number
    said = (tmp_path / "outputs" / "s" / name / "output.log").read_text()
    assert f"rank 1 has failed with exit code 3; see {folder}\n" in said
    assert summary(tmp_path / "outputs" / "s" / name)["status"] == "failed"
    assert "no text on this node" in (folder / f"{number}_1_log.err").read_text()


@pytest.mark.e2e
@needs_submitit
def test_a_job_that_slurm_refuses_does_not_stop_the_other_cells(
    slurm: "Cluster", gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """And a model that does not fit the GPUs of the partition is refused before a job is submitted."""
    done = gptexp("train", "-m", *tiny, "train.device=auto,cpu", SLURM, "hydra.launcher.partition=small")
    assert done.returncode == 1
    assert done.stderr.count("not submitted: ") == 1
    assert (
        "not submitted: sbatch: error: Batch job submission failed: Requested node configuration is not available "
        "(train.device=cpu asks for no GPU)\n"
    ) in done.stderr
    assert "1 of 2 cells failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(summary(directory)["status"] for directory in runs(tmp_path)) == ["completed"]
    large = ["train.device=auto", "model.n_layer=24", "model.n_embd=8192", "world.size=2", "sweep.name=large"]
    refused = gptexp("train", "-m", *tiny, *large, SLURM, "train.seed=1,2")
    assert refused.returncode == 2
    assert " GiB, and the H100 has 74.5 GiB; use " in refused.stderr
    assert not (tmp_path / "outputs" / "large").exists()


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
    """`value` without the entries of `OTHER`, and without durations in text."""
    if isinstance(value, dict):
        return {key: _comparable(inner) for key, inner in value.items() if not OTHER.search(key)}
    if isinstance(value, list):
        return [*map(_comparable, value)]
    return DURATION.sub("", value) if isinstance(value, str) else value


def _cells(directory: Path) -> list[dict[str, Any]]:
    with (directory / "cells.csv").open() as file:
        return [_comparable(row) for row in csv.DictReader(file)]
