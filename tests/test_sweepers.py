"""Which cells a random sample and Optuna choose, what they remember, and cells that run as jobs of SLURM."""

import json
import math
import os
import signal
import stat
import subprocess
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import optuna
import pytest
from conftest import events, processes_of, runs, summary, wait_for
from scipy import stats

from gptexp import run_dir
from gptexp.compose import compose
from gptexp.errors import ConfigError
from gptexp.sweep.cells import Cell
from gptexp.sweep.space import Axis, Interval
from gptexp.sweep.study import STUDY, Study
from gptexp.sweep.sweepers import GridSweeper, OptunaSweeper, RandomSweeper

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

LR = Axis("optim.lr", True, Interval(1e-4, 1e-1, log=True, whole=False))
EPS = Axis("optim.eps", True, Interval(1e-4, 1e-1, log=True, whole=False))
LAYERS = Axis("model.n_layer", True, Interval(1, 6, log=False, whole=True))
BATCH = Axis("batch.total_batch_size", True, ["4096", "8192"])
SEED = Axis("train.seed", False, ["7"])


def drawn(n_cells: int, *space: Axis, seed: int = 0) -> list[dict[str, str]]:
    cells = RandomSweeper(None, n_cells, seed).combinations(space)
    return [dict(text.split("=") for text in cell) for cell in cells]


# --- at random -------------------------------------------------------------------------------------------------------
def test_more_cells_and_more_keys_keep_what_was_drawn() -> None:
    few, many = drawn(5, LR, BATCH), drawn(50, LAYERS, BATCH, SEED, LR)
    assert [{key: cell[key] for key in few[0]} for cell in many[:5]] == few
    assert drawn(5, LR, BATCH, seed=1) != few
    assert {cell["train.seed"] for cell in many} == {"7"}


def test_values_are_spread_evenly_on_their_scale() -> None:
    cells = drawn(2000, LR, LAYERS, BATCH)
    lrs = [math.log(float(cell["optim.lr"])) for cell in cells]
    low, width = math.log(1e-4), math.log(1e3)
    assert stats.kstest(lrs, stats.uniform(low, width).cdf).pvalue > 0.01
    others = [math.log(float(cell["optim.eps"])) for cell in drawn(2000, EPS)]
    assert stats.pearsonr(lrs, others).pvalue > 0.01  # a key's values do not follow another's
    layers = [int(cell["model.n_layer"]) for cell in cells]
    assert {*layers} == {1, 2, 3, 4, 5, 6}
    assert sum(cell["batch.total_batch_size"] == "4096" for cell in cells) == pytest.approx(1000, abs=100)


def test_a_grid_is_the_product_and_takes_no_interval() -> None:
    lr = Axis("optim.lr", True, ["1e-3", "2e-3", "4e-3"])
    cells = GridSweeper(None).combinations([BATCH, lr, SEED])
    assert len({tuple(cell) for cell in cells}) == 6
    assert all(cell[2] == "train.seed=7" for cell in cells)
    with pytest.raises(ConfigError, match=r"optim\.lr: a grid needs single values"):
        GridSweeper(None).combinations([LR])


# --- Optuna ----------------------------------------------------------------------------------------------------------
def told(directory: Path, status: str, loss: float | None) -> Cell:
    """A cell that ended so."""
    directory.mkdir(exist_ok=True)
    run_dir.write_json(directory / "summary.json", {"status": status, "final_val_loss": loss})
    config = compose([])
    return Cell(config, config, directory, {})  # type: ignore[arg-type]


def trials(directory: Path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="gptexp", storage=f"sqlite:///{directory / STUDY}").trials


def test_a_study_knows_how_its_cells_ended(tmp_path: Path) -> None:
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
    assert again.ask() == (3, asked[3])  # goes on where it was cut off,
    number, overrides = again.ask()
    assert (number, overrides) == (4, asked[2])  # then tries again what failed,
    again.tell(number, told(tmp_path / "cell", "completed", 3.4))
    assert again.ask()[1] not in asked  # then something new
    assert len(trials(tmp_path)) == 6
    once_more = Study(tmp_path, [LR, BATCH, SEED], 0)
    assert [once_more.ask()[0] for _ in range(3)] == [3, 5, 6]  # what failed has been made good


def test_each_command_draws_anew(tmp_path: Path) -> None:
    """A sampler with the seed alone would begin with the same trials each time."""
    seen = []
    for _ in range(3):
        study = Study(tmp_path, [LR], 0)
        number, overrides = study.ask()
        study.tell(number, told(tmp_path / "cell", "completed", 3.0))
        seen.append(overrides)
    assert len({*seen}) == 3


def test_a_study_with_other_choices_is_refused(tmp_path: Path) -> None:
    Study(tmp_path, [BATCH], 0).ask()
    with pytest.raises(ConfigError, match=r"total_batch_size: the study in .* chose from 4096, 8192"):
        Study(tmp_path, [Axis(BATCH.key, True, ["4096", "16384"])], 0)
    with pytest.raises(ConfigError, match="chose from 4096, 8192"):
        Study(tmp_path, [Axis(BATCH.key, True, Interval(1, 2, log=False, whole=True))], 0)


def test_the_losses_lead_to_the_optimum(tmp_path: Path) -> None:
    """Of 40 trials far more come close to it than at random."""
    study = Study(tmp_path, [LR], 1)
    for _ in range(40):
        number, [text] = study.ask()
        loss = (math.log10(float(text.partition("=")[2])) + 2.5) ** 2
        study.tell(number, told(tmp_path / "cell", "completed", loss))
    values = [trial.value for trial in trials(tmp_path)]
    assert sum(value < 0.05 for value in values if value is not None) > 12  # 6 of 40 at random


def test_samples_hold_every_value_and_both_ends() -> None:
    assert OptunaSweeper(None, 20, 0).combinations([LR, BATCH, SEED]) == [
        ["optim.lr=0.0001", "batch.total_batch_size=4096", "train.seed=7"],
        ["optim.lr=0.1", "batch.total_batch_size=8192", "train.seed=7"],
    ]


def test_what_no_study_is_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / STUDY).write_text("no database")
    with pytest.raises(ConfigError, match=r"study\.db: no study of Optuna \(.*\); remove it") as caught:
        Study(tmp_path, [LR], 0)
    assert len(caught.value.problems) == 1


def test_what_the_launcher_cannot_run_is_refused_before_there_is_a_study(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    how = ["hydra/sweeper=optuna", "hydra/launcher=submitit_local", "sweep.parallel=2"]
    done = gptexp("train", "-m", *tiny, *how, "optim.lr=1e-3,2e-3")
    assert done.returncode == 2
    assert "submitit_local runs one at a time" in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_what_optuna_cannot_choose_costs_a_trial_and_is_not_tried_again(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """Both ends of the interval are legal, and hardly anything between."""
    command = ["-m", *tiny, "hydra/sweeper=optuna", "sweep.name=s", "batch.total_batch_size=interval(32,4064)"]
    for trial in (1, 2):
        done = gptexp("train", *command, "hydra.sweeper.n_trials=1")
        assert done.returncode == 1, done.stderr
        assert "is not divisible by" in done.stderr
        assert "nothing that Optuna chose can run" in done.stderr
        assert [found.state.name for found in trials(tmp_path / "outputs" / "s")] == ["PRUNED"] * trial


def test_optuna_goes_on_after_a_kill(start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    options = ["hydra/sweeper=optuna", "sweep.name=s", "sweep.parallel=2", "train.max_steps=300", "train.eval_every=0"]
    command = ["-m", *tiny, *options, "train.save_every=20", "optim.lr=tag(log,interval(1e-4,1e-2))"]
    process = start("train", *command, "hydra.sweeper.n_trials=3")
    cells = tmp_path / "outputs" / "s"

    def half_way() -> bool:
        return any(len(events(path.parent, "step")) > 100 for path in cells.glob("*/metrics.jsonl"))

    wait_for(half_way, process)
    process.kill()
    process.wait()
    begun = sorted(path.parent for path in cells.glob("*/metrics.jsonl"))
    assert len(begun) == 2
    wait_for_free(begun)
    done = gptexp("train", *command, "hydra.sweeper.n_trials=4")
    assert done.returncode == 0, done.stderr
    found = runs(cells)
    assert len(found) == 4  # no cell of its own for a trial that was cut off
    assert {*begun} < {*found}
    for directory in found:
        assert summary(directory)["status"] == "completed"
        assert [event["step"] for event in events(directory, "step")] == list(range(300))
    told_losses = sorted(trial.value for trial in trials(cells) if trial.value is not None)
    assert told_losses == sorted(summary(directory)["final_val_loss"] for directory in found)
    assert json.loads((cells / "report.json").read_text())["arms"]


def wait_for_free(directories: Sequence[Path]) -> None:
    """Until what ran in `directories` has noticed that its parent is gone, and has left."""
    idle = subprocess.Popen(["sleep", "60"], text=True)
    try:
        wait_for(lambda: not any(run_dir.is_locked(directory) for directory in directories), idle, 60)
    finally:
        idle.kill()
        idle.wait()


# --- jobs ------------------------------------------------------------------------------------------------------------
def test_a_job_whose_time_is_over_saves_and_goes_on_in_the_next(start: Start, tiny: list[str], tmp_path: Path) -> None:
    """SLURM gives the signal to all processes of the job; so does this, to one of submitit's local executor."""
    grid = ["-m", *tiny, "train.seed=1,2", "train.max_steps=800", "train.eval_every=0", "train.save_every=0"]
    process = start("train", *grid, "hydra/launcher=submitit_local", "sweep.name=s")
    cells = tmp_path / "outputs" / "s"
    wait_for(
        lambda: any(len(events(path.parent, "step")) > 3 for path in cells.glob("seed=1-*/metrics.jsonl")), process
    )
    for number in jobs_of(cells) + processes_of(next(cells.glob("seed=1-*"))):
        os.kill(number, signal.SIGUSR2)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    found = runs(cells)
    assert [summary(directory)["status"] for directory in found] == ["completed"] * 2
    for directory in found:
        assert [event["step"] for event in events(directory, "step")] == list(range(800))
    assert "stopping after this step" in (found[0] / "output.log").read_text()
    decided = [json.loads((directory / "effective.json").read_text()) for directory in found]
    assert decided[0] == decided[1]


def jobs_of(cells: Path) -> list[int]:
    """Process ids of submitit's jobs of a sweep."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        argv = path.read_bytes().split(b"\0")
        if b"submitit.core._submit" in argv and str(cells).encode() in b" ".join(argv):
            found.append(int(path.parent.name))
    return found


SBATCH = """
    #!/usr/bin/env python3
    import os, subprocess, sys
    from pathlib import Path
    script = Path(sys.argv[1])
    number = str(os.getpid())
    if len(list(Path(os.environ["STAND_IN"]).glob("*.sh"))) == int(os.environ.get("MOST", 100)):
        sys.exit("sbatch: error: QOSMaxSubmitJobPerUserLimit")
    Path(os.environ["STAND_IN"], f"{number}.sh").write_text(script.read_text())
    env = {**os.environ, "SLURM_JOB_ID": number, "SLURM_JOBID": number, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1",
           "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    output = open(Path(os.environ["STAND_IN"], f"{number}.out"), "w")
    job = subprocess.Popen(["bash", str(script)], env=env, start_new_session=True, stdout=output, stderr=output)
    Path(os.environ["STAND_IN"], number).write_text(str(job.pid))
    print(f"Submitted batch job {number}")
"""
SRUN = """
    #!/usr/bin/env python3
    import os, sys
    words = sys.argv[1:]
    while words[0].startswith("-"):
        del words[: 1 if "=" in words[0] or words[0] == "--unbuffered" else 2]
    os.execvp(words[0], words)
"""
SACCT = """
    #!/usr/bin/env python3
    import os
    from pathlib import Path
    print("JobID|State|NodeList")
    for path in Path(os.environ["STAND_IN"]).glob("[0-9]*"):
        if path.suffix == "":
            alive = Path(f"/proc/{path.read_text()}/status")
            running = alive.exists() and "State:\\tZ" not in alive.read_text()
            print(f"{path.name}|{'RUNNING' if running else 'COMPLETED'}|here")
"""
SCANCEL = """
    #!/usr/bin/env python3
    import os, signal, sys
    from pathlib import Path
    os.killpg(int(Path(os.environ["STAND_IN"], sys.argv[1]).read_text()), signal.SIGTERM)
    sys.exit("scancel: error: Socket timed out")  # which may happen after all
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands that submitit calls, standing in for SLURM's: jobs run here, at once."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, source in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT), ("scancel", SCANCEL)):
        path = folder / name
        path.write_text(textwrap.dedent(source).lstrip())
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(folder))
    return folder


def test_cells_run_as_jobs_of_slurm(slurm: Path, gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    grid = ["-m", *tiny, "train.seed=1,2", "sweep.name=s", "hydra/launcher=submitit_slurm"]
    job = ["hydra.launcher.partition=debug", "hydra.launcher.timeout_min=30", "hydra.launcher.cpus_per_task=3"]
    wrong = gptexp("train", *grid, *job, "hydra.launcher.timeout_min=soon")
    assert wrong.returncode == 2
    assert "hydra.launcher: " in wrong.stderr
    assert "timeout_min" in wrong.stderr
    done = gptexp("train", *grid, *job, "hydra.launcher.additional_parameters={reservation: ours}", timeout=400)
    assert done.returncode == 0, done.stderr
    assert [summary(directory)["status"] for directory in runs(tmp_path / "outputs" / "s")] == ["completed"] * 2
    scripts = [path.read_text() for path in slurm.glob("*.sh")]
    assert len(scripts) == 2
    for asked in ("--partition=debug", "--time=30", "--cpus-per-task=3", "--reservation=ours", "--signal=USR2@120"):
        assert all(asked in script for script in scripts), asked


def test_a_signal_cancels_jobs_which_save(slurm: Path, start: Start, tiny: list[str], tmp_path: Path) -> None:
    grid = ["-m", *tiny, "train.seed=1,2", "train.max_steps=100000", "train.eval_every=0", "train.save_every=0"]
    process = start("train", *grid, "sweep.name=s", "hydra/launcher=submitit_slurm", "sweep.parallel=2")
    cells = tmp_path / "outputs" / "s"

    def both_train() -> bool:
        return sum(len(events(path.parent, "step")) > 3 for path in cells.glob("*/metrics.jsonl")) == 2

    wait_for(both_train, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "Traceback" not in err
    wait_for_free(runs(cells))
    assert [summary(directory)["status"] for directory in runs(cells)] == ["interrupted"] * 2


def test_a_job_that_is_refused_costs_itself_only(slurm: Path, gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    grid = ["-m", *tiny, "train.seed=1,2,3", "sweep.name=s", "hydra/launcher=submitit_slurm"]
    done = gptexp("train", *grid, env={"MOST": "2"})
    assert done.returncode == 1
    assert "not submitted: sbatch: error: QOSMaxSubmitJobPerUserLimit" in done.stderr
    assert "1 of 3 cells failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert [summary(directory)["status"] for directory in runs(tmp_path / "outputs" / "s")] == ["completed"] * 2
    again = gptexp("train", *grid)
    assert again.returncode == 0, again.stderr
    assert len(list(slurm.glob("*.sh"))) == 3


def test_jobs_that_outlive_the_command_are_found_again(
    slurm: Path, start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    grid = ["-m", *tiny, "train.seed=1,2", "train.max_steps=1500", "train.eval_every=0", "sweep.name=s"]
    process = start("train", *grid, "hydra/launcher=submitit_slurm")
    cells = tmp_path / "outputs" / "s"
    wait_for(lambda: len([*cells.glob("*/job.json")]) == 2, process)
    process.kill()
    process.wait()
    done = gptexp("train", *grid, "hydra/launcher=submitit_slurm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(", of an earlier command: seed=") == 2
    assert len(list(slurm.glob("*.sh"))) == 2
    for directory in runs(cells):
        assert [event["step"] for event in events(directory, "step")] == list(range(1500))
