"""The job of a cell: what it does when another rank fails, and before a time limit or a preemption."""

import resource
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Timer

import pytest
from conftest import summary

from gptexp.config.schema import Config, WorldConfig
from gptexp.process.errors import UserError
from gptexp.storage import run_dir
from gptexp.sweep import cell_job
from gptexp.sweep.cell_job import CellJob

pytestmark = pytest.mark.skipif(find_spec("submitit") is None, reason="no submitit; pip install 'gptexp[slurm]'")

Task = Callable[[int, str], int]


@pytest.fixture(autouse=True)
def slurm_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SUBMITIT_EXECUTOR": "slurm", "SUBMITIT_FOLDER": str(tmp_path), "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def sigterm_ends() -> Iterator[None]:
    """The scripts inherit what this process does at SIGTERM, and an earlier test may have left it ignored."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """The exit code of a cell's job in its task of this rank, with a shell script as the run."""
    run_dir.save_config(tmp_path, Config(world=WorldConfig(timeout_s=0.5)))
    monkeypatch.setattr(cell_job, "POLL_S", 0.05)
    monkeypatch.setattr(cell_job, "NOTICED_S", 0.5)

    def code(rank: int, script: str) -> int:
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        monkeypatch.setattr(cell_job, "resume_command", lambda directory: ["sh", "-c", script])
        return CellJob(tmp_path)()

    return code


def test_rank_0_that_waits_for_a_rank_that_has_failed_gets_sigterm(task: Task, tmp_path: Path) -> None:
    """It ends in order, as failed. The first failure counts, and a rank that SLURM has stopped has not failed."""
    assert [task(3, "kill $$"), task(2, "exit 3"), task(1, "exit 4")] == [-signal.SIGTERM, 3, 4]
    run_dir.write_json(tmp_path / "summary.json", {"status": "interrupted", "steps": 4})
    assert task(0, "trap 'echo ends in order; exit 143' TERM; for i in $(seq 400); do sleep 0.05; done") == 3
    said = (tmp_path / "output.log").read_text()
    assert said == f"ends in order\nrank 2 has failed with exit code 3; see {tmp_path}\n"
    assert summary(tmp_path) == {"status": "failed", "steps": 4}
    assert [path.name for path in tmp_path.glob("failed*")] == ["failed-0"]


def test_rank_0_that_trains_has_time_to_name_the_rank_that_it_has_lost(task: Task, tmp_path: Path) -> None:
    """A run that has written its last result stays completed, whatever happens to its ranks at their end."""
    task(1, "exit 3")
    run_dir.write_json(tmp_path / "summary.json", {"status": "completed"})
    assert task(0, "trap '' TERM; sleep 1; echo the lost rank is 1; exit 1") == 3
    assert (tmp_path / "output.log").read_text().startswith("the lost rank is 1\nrank 1 has failed with exit code 3")
    assert summary(tmp_path) == {"status": "completed"}


def test_rank_0_that_does_not_end_is_killed(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_job, "NAMED_S", 0)
    task(1, "exit 3")
    assert task(0, "trap '' TERM; exec sleep 20") == 3


def test_the_cause_is_rank_0_if_the_others_have_failed_after_it(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fail before its task sees that it has ended."""
    monkeypatch.setattr(cell_job, "POLL_S", 1.0)
    peers = Timer(0.5, (tmp_path / "failed-0").write_text, ["1 1"])
    peers.start()
    assert task(0, "sleep 0.2; exit 1") == 1
    peers.join()
    assert (tmp_path / "output.log").read_text() == ""


def test_an_exit_code_of_rank_0_that_says_more_is_kept(task: Task, tmp_path: Path) -> None:
    task(1, "exit 1")
    assert task(0, "trap '' TERM; sleep 0.3; exit 2") == 2
    assert (tmp_path / "output.log").read_text() == ""


def test_no_task_sees_a_failure_without_its_content(task: Task, tmp_path: Path) -> None:
    """Where a file cannot be written, there is no empty one either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            task(1, "exit 3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "failed-0").exists()


@pytest.fixture
def warned() -> Iterator[Callable[[CellJob, int], CellJob]]:
    """The job that a job is followed by when submitit handles SLURM's signal soon after the start.

    submitit takes it for that of the time limit if less than ten minutes are left, or a fifth.
    """
    from submitit.core.job_environment import JobEnvironment, SignalHandler
    from submitit.core.utils import DelayedSubmission

    def next_job(job: CellJob, timeout_min: int) -> CellJob:
        submission = DelayedSubmission(job)
        submission.set_timeout(timeout_min, 3)
        task = JobEnvironment()
        signal.signal(signal.SIGUSR2, SignalHandler(task, task.paths, submission).checkpoint_and_try_requeue)
        following: CellJob = submission._checkpoint_function().function
        return following

    before = signal.getsignal(signal.SIGUSR2)
    yield next_job
    signal.signal(signal.SIGUSR2, before)


def test_a_job_that_saves_nothing_between_two_time_limits_is_not_requeued(
    warned: Callable[[CellJob, int], CellJob], tmp_path: Path
) -> None:
    """At both limits the run has not begun yet, so that there is nothing to stop. A preemption is no limit."""
    first = warned(CellJob(tmp_path), 5)
    with pytest.raises(UserError, match="no checkpoint was saved between two time limits"):
        warned(first, 5)
    preempted = warned(warned(first, 600), 600)
    with pytest.raises(UserError, match="no checkpoint was saved between two time limits"):
        warned(preempted, 5)
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    second = warned(preempted, 5)
    with pytest.raises(UserError, match=r"\(the newest: step-00000004\); raise hydra\.launcher\.timeout_min"):
        warned(second, 5)
