"""The job of a cell on its nodes. submitit pickles it, and calls it in each task of the job."""

import math
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptexp.distributed.ranks import requeues
from gptexp.process.errors import EXIT_DIVERGED, UserError
from gptexp.process.signals import STOPPED, at_parents_death
from gptexp.run.pool import OUTPUT, resume_command
from gptexp.storage import run_dir

POLL_S = 1.0  # s: between two checks of the run
GRACE_S = 20.0  # s: from another rank's failure to the kill of a rank 0 that has not noticed it
LOST_S = 300.0  # s: longest wait for the processes of an attempt whose node was lost


class CellJob:
    """Starts or resumes the run of a cell, as one of its ranks if the job has several tasks."""

    def __init__(self, directory: Path, saved: str | None = None) -> None:
        self.directory = directory
        self.saved = saved  # the newest checkpoint at the last time limit, "" if there was none; None: the first limit
        self.run: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Return the exit code of the run; in the first task that of the rank whose failure has ended it."""
        from submitit import JobEnvironment

        task = JobEnvironment()
        task.paths.result_pickle.unlink(missing_ok=True)  # of an earlier attempt, if SLURM has requeued the job
        failure = task.paths.folder / f"failed-{requeues()}"
        if task.global_rank:
            # The output of other tasks than the first is in submitit's own files, one for each.
            code = self._run()
            if code not in (0, EXIT_DIVERGED, *STOPPED):
                with suppress(FileExistsError), failure.open("x") as file:  # the first rank that fails is the cause
                    file.write(f"{task.global_rank} {code}")
            return code
        if requeues():
            self._wait_for_lost_attempt()
        with (self.directory / OUTPUT).open("ab") as output:
            code = self._run(output, failure)
            if code and failure.exists():
                rank, its_code = failure.read_text().split()
                output.write(f"rank {rank} has failed with exit code {its_code}; see {task.paths.folder}\n".encode())
                code = code if code > 0 else int(its_code)
        return code

    def _run(self, output: Any = None, failure: Path | None = None) -> int:
        """Run to the end. Returns the exit code, -9 if the run was killed.

        `failure` is a file that appears when another rank has failed. Rank 0 may wait for days for a rank that has
        never connected to it, so it is killed then if it has not noticed the failure itself.
        """
        kill_at = math.inf
        self.run = subprocess.Popen(
            resume_command(self.directory),
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            preexec_fn=_in_run_process,
        )
        # Not `wait`: it holds a lock, so `poll` in `checkpoint`, a signal handler, would never see the exit.
        while (code := self.run.poll()) is None:
            if failure is not None and kill_at == math.inf and failure.exists():
                kill_at = time.monotonic() + GRACE_S
            if time.monotonic() > kill_at:
                self.run.kill()
            time.sleep(POLL_S)
        return code

    def _wait_for_lost_attempt(self) -> None:
        """Wait until no process of an earlier attempt uses the directory: those of a lost node may live on."""
        end = time.monotonic() + LOST_S
        while run_dir.is_locked(self.directory) and time.monotonic() < end:
            time.sleep(POLL_S)

    def checkpoint(self) -> Any:
        """Stop the run with a checkpoint, and resubmit it. submitit calls this shortly before the time limit.

        Only the first task calls it. Rank 0 stops the other ranks, and their tasks end with them. Raises `UserError`
        if the run has saved nothing since the last time limit.
        """
        from submitit.helpers import DelayedSubmission

        if self.run is not None:
            self.run.send_signal(signal.SIGUSR1)
            while self.run.poll() is None:
                time.sleep(POLL_S)
        saved = next((path.name for path in run_dir.published(self.directory / run_dir.CHECKPOINTS)), "")
        if saved == self.saved:
            raise UserError(
                f"no checkpoint was saved between two time limits (the newest: {saved or 'none'}); raise "
                "hydra.launcher.timeout_min"
            )
        return DelayedSubmission(CellJob(self.directory, saved))


def _in_run_process() -> None:
    """Ignore SIGUSR2, SLURM's warning of the time limit: the parent handles it. Die with the parent."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    at_parents_death(signal.SIGTERM)
