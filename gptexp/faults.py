"""What a machine refuses or a peer does in the middle of a run, as errors that say what to do about it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gptexp import run_dir
from gptexp.batch import legal_micro_batches
from gptexp.checkpoint import TrainState
from gptexp.config import AUTO, Config
from gptexp.distributed import Rank
from gptexp.effective import Effective
from gptexp.errors import ConfigError, LostRankError, MemoryExhaustedError, MicroBatchError, SilentRankError, UserError
from gptexp.machine import is_out_of_memory
from gptexp.step_report import StepTimeout

if TYPE_CHECKING:
    import torch.distributed as dist

ANSWER_S = 5.0  # between a collective's failure on the first and on the last rank that is there
SMALLER_ONE = "the next smaller one, as {} needed more memory than there was"


@contextmanager
def explained(
    cfg: Config, effective: Effective, directory: Path, rank: Rank, store: "dist.Store | None", state: TrainState
) -> Iterator[None]:
    """Run what builds the model and trains it from `state`, whose counters it moves on.

    Raises a `UserError` for memory that ran out, with the smaller micro-batch already chosen where that was `auto` and
    no step had been made, and for ranks that are gone or silent. Anything else is raised as it is.
    """
    first = state.step
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise _too_large(cfg, effective, directory, rank, at_the_start=state.step == first) from error
        if store is None or not _of_a_collective(error):
            raise
        missing = _missing(store, rank)
        ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        again = f"gptexp resume {directory} goes on from the newest checkpoint"
        waited = f"world.timeout_s={cfg.world.timeout_s:g} s"
        if isinstance(error, StepTimeout) or "timed out" in str(error).lower():
            if missing:
                raise SilentRankError(f"{ranks}: silent for {waited}; {again}") from error
            raise SilentRankError(
                f"every rank is there, but a step took longer than {waited}; raise it, or see what holds the network "
                f"or a device up; {again}"
            ) from error
        if missing:
            raise LostRankError(f"{ranks}: gone; {again}") from error
        raise


def _too_large(cfg: Config, effective: Effective, directory: Path, rank: Rank, at_the_start: bool) -> UserError:
    """The error of a step that memory did not hold; under `auto` the next one will be smaller."""
    size = effective.micro_batch_size
    sizes = legal_micro_batches(cfg.batch.total_batch_size, cfg.seq_len, rank.world_size)
    smaller = [s for s in sizes if s < size]
    if cfg.batch.micro_batch_size == AUTO and at_the_start and smaller:
        reasons = {**effective.reasons, "micro_batch_size": SMALLER_ONE.format(size)}
        chosen = replace(effective, micro_batch_size=smaller[0], reasons=reasons)
        run_dir.write_json(directory / run_dir.EFFECTIVE, chosen.to_dict())
        return MicroBatchError(
            f"batch.micro_batch_size=auto: a step of {size} sequences needs more memory than this {effective.device} "
            f"has left; the next start takes {smaller[0]}"
        )
    or_auto = "" if cfg.batch.micro_batch_size == AUTO else " or auto"
    line = (
        f"batch.micro_batch_size={size}: a step needs more memory than this {effective.device} has left; use a smaller "
        f"one{or_auto}, train.loss=chunked, or train.activation_checkpointing=true"
    )
    return ConfigError(line) if at_the_start else MemoryExhaustedError(f"{line}, and gptexp resume {directory}")


def _of_a_collective(error: RuntimeError) -> bool:
    """Whether ranks did not find together; gloo's errors have no type, but its name in them."""
    import torch.distributed as dist

    return isinstance(error, StepTimeout | dist.DistError) or "gloo" in str(error)


def _missing(store: "dist.Store", rank: Rank) -> list[int]:
    """After a collective failed: the ranks that do not say, within some seconds, that it failed for them as well."""
    deadline = time.monotonic() + ANSWER_S
    missing = list(range(rank.world_size))
    try:
        store.set(f"failed/{rank.rank}", "")
        while missing and time.monotonic() < deadline:
            time.sleep(0.1)
            missing = [r for r in missing if not store.check([f"failed/{r}"])]
    except RuntimeError:
        return [0]  # under srun the store is rank 0's, and gone with it
    return missing
