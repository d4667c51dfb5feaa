"""The checkpoints of a run while it trains: saved one at a time, by a thread, and loaded again after a bad step."""

import copy
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gptexp.distributed.group import agree
from gptexp.distributed.ranks import Rank
from gptexp.loggers.run_log import RunLog
from gptexp.process.errors import DivergedError, StorageError
from gptexp.process.terminal import warn
from gptexp.storage import checkpoint
from gptexp.storage.checkpoint import Keep, TrainState
from gptexp.training.snapshot import load_checkpoint, tensors_to_save
from gptexp.training.step import TrainStep
from gptexp.training.weight_average import WeightAverage

SLOW_DISK = 100e6  # bytes/s: assumed until a checkpoint has been timed
SAVES_TO_SPARE = 2.0  # time reserved for the final checkpoint, as a multiple of the previous one's duration


@dataclass
class Checkpoints:
    """The checkpoints of a run that trains. All methods except `reserve_s` are *collective*."""

    directory: Path
    step: TrainStep
    average: WeightAverage | None
    keep: Keep
    rank: Rank
    group: dist.ProcessGroup | None  # if all ranks write parts of a checkpoint; None: rank 0 writes it
    about: dict[str, Any]  # description of the run that every checkpoint contains

    def __post_init__(self) -> None:
        parameters = sum(shape.numel() for shape in self.step.parameters.shapes.values())
        # Duration of the previous checkpoint. Before the first: an estimate for weights, two moments and an average.
        self._seconds = (12 if self.average is None else 16) * parameters / SLOW_DISK
        self._begun_at = 0.0
        self._unlogged: tuple[TrainState, Future[Path]] | None = None  # what a thread is writing

    def reserve_s(self) -> float:
        """Return the seconds to leave for the final checkpoint, which waits for one that a thread is still writing."""
        if self._unlogged is None:
            return SAVES_TO_SPARE * self._seconds
        return (SAVES_TO_SPARE + 1) * max(self._seconds, time.perf_counter() - self._begun_at)

    def save(self, state: TrainState, log: RunLog, is_last: bool) -> None:
        """Begin to save a checkpoint; wait only for the final one.

        If the final one fails, raises `StorageError`; if an earlier one fails, only prints the error. Raises
        `DivergedError` if a weight is non-finite.
        """
        self.finish(log)
        log.sync()  # a checkpoint on disk must not be newer than the metrics there
        parameters = [p.detach() for p in self.step.parameters.named.values()]
        own = [p for p in parameters if p.numel()]
        largest = nn.utils.get_total_norm(own, math.inf) if own else torch.zeros((), device=parameters[0].device)
        if not self.step.parameters.norm(largest).isfinite():
            raise DivergedError(
                f"step {state.step}: non-finite weights: the run diverged; lower optim.lr, or clip gradients to a "
                "smaller norm"
            )

        def complete() -> None:
            if self.group is None:
                self._begin(state)
            self._publish(log)

        with self._warned_unless(is_last):
            if self.group is not None or (self.rank.is_main and not is_last):
                self._begin(state)
            if is_last:
                agree(complete, self.rank)  # all ranks fail if it cannot be saved

    def finish(self, log: RunLog, wait: bool = True) -> None:
        """Log the checkpoint that a thread writes, or print its error. Without `wait`, only if the thread is done.

        A rank without such a thread does nothing.
        """
        if self._unlogged is not None and (wait or self._unlogged[1].done()):
            with self._warned_unless(is_last=False):
                self._publish(log)

    def go_back(self, log: RunLog) -> tuple[Path, TrainState] | None:
        """Load the newest regular checkpoint, and set newer ones aside. Returns its path and state, or None."""
        self.finish(log)

        def newest() -> tuple[Path, TrainState] | None:
            loaded = checkpoint.load_latest(self.directory, regular=True)
            if loaded is not None:
                checkpoint.set_aside(self.directory, loaded[1].step)
            return loaded

        loaded: tuple[Path, TrainState] | None = agree(newest, self.rank)
        if loaded is not None:
            load_checkpoint(loaded[0], self.step.parameters, self.step.optimizer, self.average)
        return loaded

    def _begin(self, state: TrainState) -> None:
        tensors = tensors_to_save(self.step.parameters, self.step.optimizer, self.average)
        saved = copy.deepcopy(state)
        future = checkpoint.begin_to_save(self.directory, tensors, saved, self.keep, self.about, self.group)
        self._begun_at, self._unlogged = time.perf_counter(), (saved, future)
        future.add_done_callback(self._time)

    def _time(self, _: object) -> None:
        self._seconds = time.perf_counter() - self._begun_at

    def _publish(self, log: RunLog) -> None:
        """Wait for the checkpoint that a thread writes, if there is one, and log it. Raises `StorageError`."""
        if self._unlogged is not None:
            (state, future), self._unlogged = self._unlogged, None
            log.checkpoint(state, future.result())

    @contextmanager
    def _warned_unless(self, is_last: bool) -> Iterator[None]:
        """Only print the error of a checkpoint that cannot be saved; but raise it for the last checkpoint."""
        try:
            yield
        except StorageError as error:
            if is_last:
                raise
            if self.rank.is_main:
                warn(f"{error}; training continues")
