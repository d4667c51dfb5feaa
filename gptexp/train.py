"""`gptexp train`: compose, freeze the config into a run directory, start the ranks.

Three ways in, one rank body (gptexp.run):
  - one rank, one run: in this process, so that a debugger works;
  - several ranks, or a cell of a multirun: fresh processes under torch's elastic agent;
  - this process is a rank already (torchrun, srun): rank 0 composes and the others follow it through the store.
"""

import gc
import json
import sys
import time
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptexp.distributed import Rank, launcher_rank, leaving
from gptexp.errors import EXIT_DIVERGED, MicroBatchError
from gptexp.signals import StopRequest, ignore_stops
from gptexp.terminal import say

if TYPE_CHECKING:
    import torch.distributed as dist

    from gptexp.config import Config

STOP = StopRequest()
LEAVE_S = 10.0  # how long rank 0 waits for ranks that may have died


def main() -> None:
    """Entry of `python -m gptexp.train` and `gptexp train`."""
    STOP.install(ignore_sigint=False)  # from the first moment: a signal has one meaning, before training and in it
    rank = launcher_rank()
    if rank is None:
        lead(None)
        return
    with leaving():
        if rank.is_main:
            lead(Leader(rank))
        else:
            follow(rank)


def lead(leader: "Leader | None") -> None:
    """Compose, and run each job: with the ranks that follow `leader`, or without any."""
    from gptexp.compose import hydra_main, report_errors

    with report_errors():
        try:
            hydra_main(lambda cfg: task(cfg, leader))
        finally:
            if leader is not None:
                leader.finish()


def task(cfg: Any, leader: "Leader | None") -> int:
    """Train one composition; what Hydra calls for each job. The exit code: returned for a cell, else raised.

    A cell of a sweep is only prepared here: `sweep` has it trained by processes of its own.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from gptexp import run_dir
    from gptexp.compose import lr_source, report_errors, to_config

    with report_errors():  # in here: Hydra would add a line of its own to an exception
        hydra = HydraConfig.get()
        is_cell = hydra.mode == RunMode.MULTIRUN
        config = to_config(cfg, hydra.overrides.task, hydra.runtime.cwd)
        if config.log.wandb.name is None:
            config.log.wandb.name = readable_name(hydra.runtime.choices["model"], config)
        directory = Path(hydra.runtime.output_dir)
        with run_dir.held(directory):
            run_dir.check_same(directory, config)
            run_dir.save_config(directory, config)
            if config.log.progress not in ("off", "json"):
                say(f"learning rate   {config.optim.lr:g}, from {lr_source(hydra)}")
            if leader is not None:
                code = leader.run(config, directory)
            else:
                code = 0 if is_cell else start(config, directory)
    stopped = code > 128
    if code and (not is_cell or stopped or (leader is not None and code != EXIT_DIVERGED)):
        raise SystemExit(code)
    return code


def readable_name(model: str, config: "Config") -> str:
    """What wandb calls a run: `gpt2-lr6e-4-b524288`, with the seed where that is not the usual one."""
    from gptexp.config import TrainConfig

    name = f"{model}-lr{Decimal(repr(config.optim.lr)).normalize():e}-b{config.batch.total_batch_size}"
    return name if config.train.seed == TrainConfig.seed else f"{name}-seed{config.train.seed}"


def start(config: "Config", directory: Path) -> int:
    """Train `config` in `directory` on this machine: in this process, or in one for each of several ranks."""
    if config.world.size == 1 and not config.world.max_restarts:
        from gptexp.machine import release_memory
        from gptexp.run import run

        STOP.limit(config.train.max_minutes)
        while True:
            try:
                return run(config, directory, STOP, Rank())
            except MicroBatchError as error:
                print(f"gptexp: {error}", file=sys.stderr)
            gc.unfreeze()
            gc.collect()  # what the error's frames hold is in cycles: model and optimizer of the last attempt
            release_memory()
    from gptexp.launch import launch

    assert config.world.size is not None
    return launch(directory, config.world.size, config.world.max_restarts, config.train.max_minutes)


class Leader:
    """Rank 0 under a launcher: publishes each job to the other ranks, then trains it with them."""

    def __init__(self, rank: Rank) -> None:
        from gptexp.distributed import connect

        self.rank = rank
        self.store = connect()
        self.jobs = 0

    def run(self, config: "Config", directory: Path) -> int:
        from gptexp.config import to_dict

        self._publish({"directory": str(directory), "config": to_dict(config)})
        return run_job_as(self.rank, self.store, self.jobs - 1, config, directory)

    def finish(self) -> None:
        """Let the followers go, and stay until they have: under srun the store lives in this process."""
        self._publish(None)
        deadline = time.monotonic() + LEAVE_S
        while self.store.add("left", 0) < self.rank.world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.02)

    def _publish(self, job: dict[str, Any] | None) -> None:
        self.store.set(f"job/{self.jobs}", json.dumps(job))
        self.jobs += 1


def follow(rank: Rank) -> None:
    """Train what rank 0 publishes, job after job, until it says that there are no more."""
    from datetime import timedelta

    from gptexp.config import from_dict
    from gptexp.distributed import connect
    from gptexp.errors import UserError

    store = connect()
    number = code = 0
    while True:
        store.wait([f"job/{number}"], timedelta(days=7))
        job = json.loads(store.get(f"job/{number}"))
        if job is None:
            break
        try:
            code = run_job_as(rank, store, number, from_dict(job["config"]), Path(job["directory"]))
        except UserError as error:
            if rank.local_rank == 0:  # what is wrong on this node, rank 0 says what is wrong on its own
                print(f"gptexp: rank {rank.rank}: {error}", file=sys.stderr)
            code = error.exit_code
        if code not in (0, EXIT_DIVERGED):
            break
        number += 1
    with suppress(RuntimeError):  # the store may have gone with rank 0
        store.add("left", 1)
    sys.exit(code)


def run_job_as(rank: Rank, store: "dist.Store", number: int, config: "Config", directory: Path) -> int:
    """Train one published job as `rank`, in a process group with keys of its own. *Collective.*"""
    import torch.distributed as dist

    from gptexp.run import run

    STOP.limit(config.train.max_minutes)
    code = run(config, directory, STOP, rank, dist.PrefixStore(f"group{number}", store))
    if code > 128:  # after any other the next cell of a sweep may be asked to stop
        ignore_stops()  # srun ends the tasks that have not left yet: all is saved, and the exit code is this one
    return code


if __name__ == "__main__":
    main()
