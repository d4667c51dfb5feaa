"""The job of a cell on its nodes. submitit pickles it, and calls it in each task of the job."""

import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptexp.distributed.ranks import requeues
from gptexp.process.errors import EXIT_DIVERGED, EXIT_FAILED, UserError
from gptexp.process.signals import EXIT_CODES, STOPPED, at_parents_death
from gptexp.run.own_process import resume_command
from gptexp.storage import run_dir

POLL_S = 1.0  # s: between two checks of the run
NOTICED_S = 20.0  # s: from another rank's failure to SIGTERM for rank 0, if it has not ended because of the failure
NAMED_S = 120.0  # s: time after world.timeout_s in which a training rank 0 finds out which rank it has lost
LOST_S = 300.0  # s: longest wait for the processes of an attempt whose node was lost


class CellJob:
    """Starts or resumes the run of a cell, as one of its ranks if the job has several tasks."""

    def __init__(self, directory: Path, saved: str | None = None) -> None:
        self.directory = directory
        self.saved = saved  # the newest checkpoint at the last time limit ("": none); None: no time limit so far
        self.run: subprocess.Popen[bytes] | None = None
        self.cause = ""  # number and exit code of a rank that failed while rank 0 still ran

    def __call__(self) -> int:
        """Run the cell and return its exit code; in the first task, that of the rank whose failure ended the run."""
        from submitit import JobEnvironment

        task = JobEnvironment()
        task.paths.result_pickle.unlink(missing_ok=True)  # from an earlier attempt, if SLURM has requeued the job
        failure = task.paths.folder / f"failed-{requeues()}"
        if task.global_rank:
            # All tasks but the first write their output to submitit's own files, one file each.
            code = self._run()
            if code not in (0, EXIT_DIVERGED, -signal.SIGTERM, *STOPPED):
                own = failure.with_name(f"{failure.name}-{task.global_rank}")
                own.write_text(f"{task.global_rank} {code}")
                with suppress(FileExistsError):  # the first rank that fails is the cause
                    failure.hardlink_to(own)  # so the file is never empty
                own.unlink()
            return code
        if requeues():
            self._wait_for_lost_attempt()
        with (self.directory / run_dir.OUTPUT).open("ab") as output:
            code = self._run(output, failure)
            # Another exit code has a cause of its own, which rank 0 has printed.
            if self.cause and (code < 0 or code in (EXIT_FAILED, EXIT_CODES["SIGTERM"])):
                rank, its_code = self.cause.split()
                output.write(f"rank {rank} has failed with exit code {its_code}; see {task.paths.folder}\n".encode())
                if run_dir.status(self.directory) == "interrupted":  # by this task's SIGTERM
                    stopped = run_dir.read_json(self.directory / run_dir.SUMMARY)
                    run_dir.write_summary(self.directory, {**stopped, "status": "failed"})
                return int(its_code)
        return code

    def _run(self, output: Any = None, failure: Path | None = None) -> int:
        """Run to the end. Returns the exit code, or minus the number of the signal that has killed the run.

        `failure` is a file that appears when another rank has failed. If that rank has never connected to rank 0, rank
        0 may wait for it for days, and SIGTERM ends the wait. If rank 0 is training, it goes on after SIGTERM until the
        step fails, and names the lost rank.
        """
        due: list[tuple[float, int]] = []  # s of the monotonic clock, and the signal to send then
        self.run = subprocess.Popen(
            resume_command(self.directory),
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            preexec_fn=_in_run_process,
        )
        # Not `wait`: it holds a lock, so `poll` in `checkpoint`, a signal handler, would never see the exit.
        while (code := self.run.poll()) is None:
            now = time.monotonic()
            if failure is not None and not self.cause and failure.exists():
                self.cause = failure.read_text()
                timeout_s = run_dir.load_config(self.directory).world.timeout_s
                due = [(now + NOTICED_S, signal.SIGTERM), (now + timeout_s + NAMED_S, signal.SIGKILL)]
            if due and now > due[0][0]:
                self.run.send_signal(due.pop(0)[1])
            time.sleep(POLL_S)
        return code

    def _wait_for_lost_attempt(self) -> None:
        """Wait until no process of an earlier attempt uses the directory: processes on a lost node may live on."""
        end = time.monotonic() + LOST_S
        while run_dir.is_locked(self.directory) and time.monotonic() < end:
            time.sleep(POLL_S)

    def checkpoint(self) -> Any:
        """Stop the run with a checkpoint, and resubmit it.

        submitit calls this in its signal handler, shortly before the time limit and when the cluster announces a
        preemption. Only the first task calls it. Rank 0 stops the other ranks, and their tasks end with them. Raises
        `UserError` at a time limit if the run has saved nothing since the last one.
        """
        from submitit.helpers import DelayedSubmission

        if self.run is not None:
            self.run.send_signal(signal.SIGUSR1)
            while self.run.poll() is None:
                time.sleep(POLL_S)
        if not _at_time_limit():
            return DelayedSubmission(CellJob(self.directory, self.saved))
        saved = next((path.name for path in run_dir.published(self.directory / run_dir.CHECKPOINTS)), "")
        if saved == self.saved:
            raise UserError(
                f"no checkpoint was saved between two time limits (the newest: {saved or 'none'}); raise "
                "hydra.launcher.timeout_min"
            )
        return DelayedSubmission(CellJob(self.directory, saved))


def _at_time_limit() -> bool:
    """Whether submitit's running signal handler takes its signal for a time limit; if not, it is a preemption."""
    from submitit import JobEnvironment

    handler: Any = signal.getsignal(signal.Signals[f"SIG{JobEnvironment.USR_SIG}"])
    return bool(handler.__self__.has_timed_out())


def _in_run_process() -> None:
    """Ignore SIGUSR2, SLURM's warning of the time limit: the parent handles it. Die with the parent."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    at_parents_death(signal.SIGTERM)
