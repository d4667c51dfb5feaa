"""`gptexp tune` with real runs: killed again and again, stopped by Ctrl-C, on SLURM. test_ray.py has one on Ray."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import BYTES, runs, summary, wait_for
from sweeps import wait_until_free
from test_jobs import SLURM, needs_submitit

from gptexp.storage.search_log import read_events
from gptexp.sweep.tune import USUAL_RUNS

if TYPE_CHECKING:
    from slurm_cluster import Cluster

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

LENGTH = ["train.max_steps=null", "train.max_tokens=8192", "train.eval_every=0", "train.save_every=0"]
SIZES = ["batch.total_batch_size=128,256", "optim.lr=1e-2", "--budget", "9", "runs"]


def search(tiny: list[str], name: str, *more: str) -> list[str]:
    return ["tune", *tiny, *BYTES, *LENGTH, *SIZES, f"sweep.name={name}", "sweep.parallel=1", *more]


def chosen(directory: Path) -> list[tuple[Any, ...]]:
    events = [event for event in read_events(directory) if event["event"] == "choose"]
    return [(event["cell"], event["why"], event["width"], event["expected_width"]) for event in events]


def answers(directory: Path) -> list[dict[str, Any]]:
    found = json.loads((directory / "report.json").read_text())["answers"]
    return [{key: value for key, value in answer.items() if key != "wanted"} for answer in found]


@pytest.mark.e2e
def test_a_search_that_is_killed_five_times_has_the_choices_and_answers_of_a_whole_one(
    gptexp: Gptexp, start: Start, tiny: list[str], tmp_path: Path
) -> None:
    whole, killed = tmp_path / "outputs/whole", tmp_path / "outputs/killed"
    done = gptexp(*search(tiny, "whole", "--json"), timeout=400)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # nothing else is on stdout
    count = len(chosen(whole))
    assert 6 <= count <= 9
    assert (result["runs"], result["tokens"], result["answers"]) == (
        count,
        count * 8192,
        json.loads((whole / "report.json").read_text())["answers"],
    )
    more, other = (
        json.loads(gptexp(*search(tiny, "whole", "--dry-run", "--json", *arm)).stdout)["runs"]
        for arm in ([], ["optim.beta2=0.9,0.99"])
    )
    assert more == max(2, 2 * USUAL_RUNS - count)
    assert other == 4 * USUAL_RUNS  # of other arms nothing is done
    for completed in (0, 1, 2, 4, 6):
        process = start(*search(tiny, "killed"))
        wait_for(lambda n=completed: len(begun(killed)) > n, process)  # type: ignore[misc]
        process.kill()
        process.communicate()
        wait_until_free(begun(killed))
    done = gptexp(*search(tiny, "killed"), timeout=400)
    assert done.returncode == 0, done.stderr
    assert chosen(killed) == chosen(whole)
    assert answers(killed) == answers(whole)
    assert gptexp("rm", str(whole), "--yes").returncode == 0
    assert not whole.exists()


def begun(directory: Path) -> list[Path]:
    return runs(directory) if directory.exists() else []


@pytest.mark.e2e
def test_a_dry_run_times_the_search_checks_its_budget_and_runs_nothing(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    whole = gptexp(*search(tiny, "s", "--dry-run"))
    assert whole.returncode == 0, whole.stderr
    titles = [line.split()[0] for line in whole.stdout.splitlines()]
    assert titles == ["search", "until", "begins", "runs", "time", "at"]
    counted = gptexp(*search(tiny, "s", "--dry-run", "--json"))
    assert json.loads(counted.stdout).keys() == {"runs", "seconds"}
    short = gptexp("tune", *tiny, *BYTES, *LENGTH, "--budget", "20k tokens", "--dry-run")
    assert short.returncode == 2
    assert "[budget-too-small]" in short.stderr
    sizes = "batch.total_batch_size=128,256,512,1024,2048"
    law = gptexp("tune", *tiny, *BYTES, *LENGTH, sizes, "--law", "--dry-run")
    assert law.returncode == 0, law.stderr
    assert f"about {3 * USUAL_RUNS}, " in law.stdout
    assert not (tmp_path / "outputs").exists()


@pytest.mark.e2e
def test_ctrl_c_saves_the_run_and_the_same_command_goes_on(start: Start, tiny: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "outputs/s"
    process = start(*search(tiny, "s"))
    wait_for(lambda: len(begun(directory)) > 1, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    stops = [event for event in read_events(directory) if event["event"] == "stop"]
    assert {one["why"] for one in stops[-1]["stopped"]} == {"interrupted"}
    again = start(*search(tiny, "s"))
    _, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    assert len(chosen(directory)) == len({cell for cell, *_ in chosen(directory)}) >= 6
    assert {summary(run)["status"] for run in runs(directory)} == {"completed"}


@pytest.mark.slow
@needs_submitit
def test_a_search_on_slurm_has_the_choices_and_answers_of_this_machine(
    slurm: "Cluster", gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    for name, launcher in (("here", []), ("there", [SLURM, "hydra.launcher.nodes=2"])):
        done = gptexp(*search(tiny, name, "world.size=2", *launcher), timeout=900)
        assert done.returncode == 0, done.stderr
    here, there = tmp_path / "outputs/here", tmp_path / "outputs/there"
    assert chosen(there) == chosen(here)
    assert answers(there) == answers(here)
