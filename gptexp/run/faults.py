"""Turns exhausted memory and lost or silent ranks into errors that tell the user what to do."""

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist

from gptexp.config.batch import legal_micro_batches
from gptexp.config.parts import in_one_line, name_of, own_lines, source_file
from gptexp.config.schema import LISTS, Config, parts_of
from gptexp.distributed.group import wait_for
from gptexp.distributed.ranks import Rank
from gptexp.machine.device import is_out_of_memory
from gptexp.machine.effective import Choice, Effective, save_effective
from gptexp.process.errors import (
    ConfigError,
    LostRankError,
    MemoryExhaustedError,
    MicroBatchError,
    PartError,
    SilentRankError,
    UserError,
)
from gptexp.process.fields import AUTO
from gptexp.process.terminal import as_command
from gptexp.run.job import Job
from gptexp.storage.checkpoint import TrainState
from gptexp.training.step_report import StepTimeout

ANSWER_S = 5.0  # longest time between the failures of one collective on two live ranks
ASKING_S = 60.0  # longest time in which one rank asks about all others


@contextmanager
def explained(job: Job, store: dist.Store | None, effective: Effective, state: TrainState) -> Iterator[None]:
    """Context for building the model and training from `state`, which the body advances.

    Raises a `UserError` for exhausted memory, for an error in a part of the user's own, and for ranks that have ended
    or do not answer. If memory is exhausted in the first step and the micro-batch is `auto`, saves a smaller one first.
    Raises any other error unchanged.
    """
    resumed_at = state.step
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise _too_large(job, effective, at_the_start=state.step == resumed_at) from error
        if part := _failing_part(job.cfg, error):
            again = f"{as_command(['resume', str(job.directory)])} goes on from the newest checkpoint"
            line = f"{part}: in step {state.step + 1:,}: {in_one_line(error)}; {again}"
            raise PartError("\n".join([line, *own_lines(error)])) from error
        if store is None or not isinstance(error, RuntimeError) or not _of_a_collective(error):
            raise
        missing = _missing(store, job.rank)
        ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        again = f"{as_command(['resume', str(job.directory)])} continues from the newest checkpoint"
        waited = f"world.timeout_s={job.cfg.world.timeout_s:g} s"
        if isinstance(error, StepTimeout) or "timed out" in str(error).lower():
            if missing:
                raise SilentRankError(f"{ranks}: no answer for {waited}; {again}") from error
            raise SilentRankError(
                f"every rank answers, but a step took longer than {waited}; raise world.timeout_s, or check the "
                f"network and the devices; {again}"
            ) from error
        if missing:
            ended = "its process has ended" if len(missing) == 1 else "their processes have ended"
            raise LostRankError(f"{ranks}: {ended}; {again}") from error
        raise


def _failing_part(cfg: Config, error: Exception) -> str | None:
    """The setting of the part of the user's own that has raised the error, or has called what raised it."""
    files = {at.filename for at in traceback.extract_tb(error.__traceback__)}
    sections = (found for found in parts_of(cfg) if found[0] not in LISTS)
    return next((f"{group}={name_of(own)}" for group, own in sections if source_file(group, own) in files), None)


def _too_large(job: Job, effective: Effective, at_the_start: bool) -> UserError:
    """Return the error for exhausted memory. At the start, if the micro-batch is `auto`, saves a smaller size."""
    cfg, size = job.cfg, effective.micro_batch_size.value
    sizes = legal_micro_batches(cfg.batch.step_sizes.quantum, cfg.seq_len, job.rank.world_size)
    smaller = [s for s in sizes if s < size]
    if cfg.batch.micro_batch_size == AUTO and at_the_start and smaller:
        chosen = Choice(smaller[0], "decided", f"the next smaller size, because {size} did not fit into memory")
        save_effective(job.directory, replace(effective, micro_batch_size=chosen))
        return MicroBatchError(
            f"batch.micro_batch_size=auto: a step of {size} sequences needs more memory than this {effective.device} "
            f"has free; the next start uses {smaller[0]}"
        )
    more = "more ranks" if cfg.world.sharding == "full" else "several ranks with world.sharding=full"
    or_auto = "" if cfg.batch.micro_batch_size == AUTO else " or auto"
    line = (
        f"batch.micro_batch_size={size}: a step needs more memory than this {effective.device} has free; use a smaller "
        f"size{or_auto}, train.loss=chunked, train.activation_checkpointing=true, or {more}"
    )
    again = f"{as_command(['resume', str(job.directory)])} continues from the newest checkpoint"
    return ConfigError(line) if at_the_start else MemoryExhaustedError(f"{line}; {again}")


def _of_a_collective(error: RuntimeError) -> bool:
    """Whether a collective failed. gloo's errors have no type of their own, but contain the word gloo."""
    return isinstance(error, StepTimeout | dist.DistError) or "gloo" in str(error)


def _missing(store: dist.Store, rank: Rank) -> list[int]:
    """Return the ranks that do not report, within `ANSWER_S`, that the collective failed for them too.

    One rank asks the store about every rank, and stores the answer for the others.
    """
    try:
        store.set(f"failed/{rank.rank}", "")
        if store.add("failures", 1) == rank.world_size:
            store.set("all failed", "")
        if wait_for(store, "all failed", ANSWER_S):
            return []
        missing: list[int]
        if store.add("asking", 1) > 1 and wait_for(store, "missing", ASKING_S):
            missing = json.loads(store.get("missing"))
        else:  # this rank is the first to ask, or replaces one that has ended
            missing = [r for r in range(rank.world_size) if not store.check([f"failed/{r}"])]
            store.set("missing", json.dumps(missing))
        return missing
    except RuntimeError:
        return [0]  # under srun rank 0 hosts the store
