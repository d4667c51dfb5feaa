"""The study of an Optuna sweep: the cells that it chooses, the results that it records, and real sweeps."""

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import events, runs, summary, wait_for
from sweeps import wait_until_free

from gptexp.config.schema import Config
from gptexp.process.errors import ConfigError
from gptexp.storage import run_dir
from gptexp.sweep.cells import Cell
from gptexp.sweep.space import Axis, Interval
from gptexp.sweep.study import STUDY, Study

optuna = pytest.importorskip("optuna", reason="no Optuna; pip install 'gptexp[optuna]'")

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

LR = Axis("optim.lr", True, Interval(1e-4, 1e-1, log=True, whole=False))
BATCH = Axis("batch.total_batch_size", True, ["4096", "8192"])
SEED = Axis("train.seed", False, ["7"])
CONFIG = Config()


def told(directory: Path, status: str, loss: float | None) -> Cell:
    """A cell with this status and final loss."""
    directory.mkdir(exist_ok=True)
    run_dir.save_config(directory, Config())
    run_dir.write_json(directory / "summary.json", {"status": status, "final_val_loss": loss})
    return Cell(CONFIG, CONFIG, directory, {})  # type: ignore[arg-type]


def trials(directory: Path) -> list[Any]:
    """All trials of the study in `directory`, as Optuna reads them."""
    return optuna.load_study(study_name="gptexp", storage=f"sqlite:///{directory / STUDY}").trials


def test_a_study_records_how_its_cells_ended_and_repeats_failed_trials(tmp_path: Path) -> None:
    study = Study(tmp_path, [LR, BATCH, SEED], 0)
    endings = (("completed", 3.5), ("diverged", None), ("failed", None), ("interrupted", None))
    asked = []
    for status, loss in endings:
        number, overrides = study.ask()
        assert overrides[2] == "train.seed=7"
        assert 1e-4 <= float(overrides[0].partition("=")[2]) <= 1e-1
        study.tell(number, told(tmp_path / "cell", status, loss))
        asked.append(overrides)
    found = trials(tmp_path)
    assert [trial.value for trial in found] == [3.5, pytest.approx(math.log(50304)), None, None]
    assert [trial.state.name for trial in found] == ["COMPLETE", "COMPLETE", "FAIL", "RUNNING"]
    again = Study(tmp_path, [LR, BATCH, SEED], 0)
    assert again.completed == 2
    assert again.ask() == (3, asked[3])  # first the interrupted trial
    number, overrides = again.ask()
    assert (number, overrides) == (4, asked[2])  # then the one that failed
    again.tell(number, told(tmp_path / "cell", "completed", 3.4))
    assert again.ask()[1] not in asked  # then a new one
    assert len(trials(tmp_path)) == 6
    once_more = Study(tmp_path, [LR, BATCH, SEED], 0)
    assert [once_more.ask()[0] for _ in range(3)] == [3, 5, 6]  # the failed one completed at the second attempt


def test_each_command_draws_other_values(tmp_path: Path) -> None:
    """A sampler with a constant seed would draw the same first trial each time."""
    seen = []
    for _ in range(3):
        study = Study(tmp_path, [LR], 0)
        number, overrides = study.ask()
        study.tell(number, told(tmp_path / "cell", "completed", 3.0))
        seen.append(overrides)
    assert len({*seen}) == 3


def test_two_commands_share_the_trials_of_a_study(tmp_path: Path) -> None:
    """The second takes up what the first still runs, and neither tells a result twice or asks for too many."""
    first = Study(tmp_path, [LR], seed=0)
    number, overrides = first.ask()
    second = Study(tmp_path, [LR], seed=0)
    assert second.ask() == (number, overrides)
    others = second.ask()[0], first.ask()[0]
    assert not first.wants(3)
    assert first.wants(4)
    for study in (first, second):
        study.tell(number, told(tmp_path / "cell", "completed", 4.0))
        study.fail(others[0])
        study.tell(others[1], told(tmp_path / "other", "diverged", None))
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE", "FAIL", "COMPLETE"]


@pytest.mark.slow
def test_an_optuna_sweep_issued_twice_at_once_runs_its_trials_once(
    start: Start, tiny: list[str], tmp_path: Path
) -> None:
    sweep = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "sweep.name=s"]
    lr = "optim.lr=tag(log,interval(1e-3,1e-1))"
    both = [start("train", "-m", *tiny, *sweep, lr) for _ in range(2)]
    outputs = [process.communicate(timeout=400) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert not any("failed" in out + err for out, err in outputs)
    states = [trial.state.name for trial in trials(tmp_path / "outputs/s")]
    assert set(states) == {"COMPLETE"}
    assert 4 <= len(states) <= 5  # both may ask for the last one
    for directory in runs(tmp_path / "outputs/s"):
        assert [event["step"] for event in events(directory, "step")] == list(range(4))


def test_a_study_with_other_choices_is_refused(tmp_path: Path) -> None:
    Study(tmp_path, [BATCH], 0).ask()
    with pytest.raises(ConfigError, match=r"total_batch_size: the study in .* was created with 4096, 8192"):
        Study(tmp_path, [Axis(BATCH.key, True, ["4096", "16384"])], 0)
    with pytest.raises(ConfigError, match="created with 4096, 8192"):
        Study(tmp_path, [Axis(BATCH.key, True, Interval(1, 2, log=False, whole=True))], 0)


def test_a_file_that_is_not_a_study_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / STUDY).write_text("no database")
    with pytest.raises(ConfigError, match=r"study\.db: not a study of Optuna \(.*\); delete it") as caught:
        Study(tmp_path, [LR], 0)
    assert len(caught.value.problems) == 1


@pytest.mark.e2e
def test_an_illegal_choice_of_optuna_is_pruned_and_not_repeated(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """Both ends of the interval are legal. Few values between them are."""
    command = ["-m", *tiny, "hydra/sweeper=optuna", "sweep.name=s", "batch.total_batch_size=interval(32,4064)"]
    for trial in (1, 2):
        done = gptexp("train", *command, "hydra.sweeper.n_trials=1")
        assert done.returncode == 1, done.stderr
        assert "is not divisible by" in done.stderr
        assert "all combinations that Optuna chose are illegal" in done.stderr
        assert [found.state.name for found in trials(tmp_path / "outputs" / "s")] == ["PRUNED"] * trial


@pytest.mark.e2e
def test_a_finished_study_has_nothing_left_to_run(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    command = ["train", "-m", *tiny, "hydra/sweeper=optuna", "sweep.name=s", "train.max_steps=4", "train.eval_every=0"]
    swept = "optim.lr=tag(log,interval(1e-4,1e-2))"
    for number in (2, 2, 1):  # the same again, and one of fewer trials
        done = gptexp(*command, swept, f"hydra.sweeper.n_trials={number}")
        assert done.returncode == 0, done.stderr
        assert len(runs(tmp_path / "outputs" / "s")) == 2
    assert "2 trials of 1 completed; nothing is left to run" in done.stderr + done.stdout


@pytest.mark.slow
def test_a_killed_optuna_sweep_continues_its_trials(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    options = ["hydra/sweeper=optuna", "sweep.name=s", "sweep.parallel=2", "train.max_steps=300", "train.eval_every=0"]
    command = ["-m", *tiny, *options, "train.save_every=50", "optim.lr=tag(log,interval(1e-4,1e-2))"]
    process = start("train", *command, "hydra.sweeper.n_trials=3")
    cells = tmp_path / "outputs" / "s"

    def half_way() -> bool:
        return any(len(events(path.parent, "step")) > 100 for path in cells.glob("*/metrics.jsonl"))

    wait_for(half_way, process)
    process.kill()
    process.wait()
    begun = sorted(path.parent for path in cells.glob("*/metrics.jsonl"))
    assert len(begun) == 2
    wait_until_free(begun)
    done = gptexp("train", *command, "hydra.sweeper.n_trials=4")
    assert done.returncode == 0, done.stderr
    found = runs(cells)
    assert len(found) == 4  # an interrupted trial keeps its cell
    assert {*begun} < {*found}
    for directory in found:
        assert summary(directory)["status"] == "completed"
        assert [event["step"] for event in events(directory, "step")] == list(range(300))
    told_losses = sorted(trial.value for trial in trials(cells) if trial.value is not None)
    assert told_losses == sorted(summary(directory)["final_val_loss"] for directory in found)
    assert json.loads((cells / "report.json").read_text())["arms"]
