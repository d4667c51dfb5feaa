"""Training under a launcher (torchrun, srun): rank 0 composes and publishes jobs, the other ranks train them too."""

import json
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gptexp.config.schema import Config, from_dict, to_dict
from gptexp.distributed.group import connect
from gptexp.distributed.ranks import Rank
from gptexp.process.errors import EXIT_DIVERGED, UserError
from gptexp.process.signals import EXIT_CODES, StopRequest, ignore_stops
from gptexp.process.terminal import warn
from gptexp.run.job import Job
from gptexp.run.rank import run
from gptexp.storage import run_dir

LEAVE_S = 10.0  # longest wait of rank 0 at the end: other ranks may have died


class Leader:
    """Rank 0: publishes each job to the other ranks, then trains it with them."""

    def __init__(self, stop: StopRequest, rank: Rank) -> None:
        self.stop, self.rank = stop, rank
        self.store = connect(rank)
        self.jobs = 0

    def run(self, config: Config, directory: Path) -> int:
        """Train `config` with all ranks. Returns the exit code."""
        self._publish({"directory": str(directory), "config": to_dict(config)})
        return _run_published(self.stop, self.rank, self.store, self.jobs - 1, config, directory)

    def finish(self) -> None:
        """Publish the end of all jobs, and wait until the other ranks have read it.

        Under srun this process hosts the store, so it must not end first.
        """
        deadline = time.monotonic() + LEAVE_S
        with suppress(RuntimeError):  # under torchrun an agent hosts the store, and it may have been killed
            self._publish(None)
            while self.store.add("left", 0) < self.rank.world_size - 1 and time.monotonic() < deadline:
                time.sleep(0.02)

    def _publish(self, job: dict[str, Any] | None) -> None:
        self.store.set(f"job/{self.jobs}", json.dumps(job))
        self.jobs += 1


def follow(stop: StopRequest, rank: Rank) -> None:
    """Train each job that rank 0 publishes, then exit."""
    store = connect(rank)
    number = code = 0
    while True:
        store.wait([f"job/{number}"], timedelta(days=7))
        job = json.loads(store.get(f"job/{number}"))
        if job is None:
            break
        try:
            code = _run_published(stop, rank, store, number, from_dict(job["config"]), Path(job["directory"]))
        except UserError as error:
            if rank.local_rank == 0:  # one rank per node prints; rank 0 prints its own errors
                warn(f"rank {rank.rank}: {error}")
            code = error.exit_code
        if code not in (0, EXIT_DIVERGED):
            break
        number += 1
    with suppress(RuntimeError):  # rank 0, which hosts the store, may have ended
        store.add("left", 1)
    sys.exit(code)


def _run_published(
    stop: StopRequest, rank: Rank, store: dist.Store, number: int, config: Config, directory: Path
) -> int:
    """Train one published job as `rank`, with its own key prefix in the store. *Collective.*"""
    stop.limit(config.train.max_minutes)
    if rank.is_main:
        stop.directory = directory
        stop.record = partial(run_dir.mark_interrupted, directory)
    code = run(Job(config, directory, rank, stop, dist.PrefixStore(f"group{number}", store)))
    stop.training = False  # nothing is left to save, so a signal may end this process while it waits for a job
    if code in (0, EXIT_DIVERGED) and (reason := stop.reason()) is not None:
        code = EXIT_CODES[reason] or code  # a signal that came after the last step; `time` concerns only one run
    if code > 128:  # after a signal; otherwise the next cell of a sweep still needs the handlers
        ignore_stops()  # srun signals the tasks that still run; their exit code must not change
    return code
