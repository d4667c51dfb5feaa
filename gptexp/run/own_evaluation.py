"""Metrics of the user's own: the entries of train.evaluations and log.metrics, which rank 0 calls."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gptexp.config.parts import EVALUATIONS, METRICS, bound, in_one_line, own_lines
from gptexp.data.loader import val_batches
from gptexp.data.tokenizer import load_tokenizer
from gptexp.distributed.group import agree
from gptexp.machine.effective import ForwardContext
from gptexp.model.own_model import Model
from gptexp.process.terminal import warn
from gptexp.process.words import duration
from gptexp.run.job import Job, Prepared
from gptexp.storage.checkpoint import TrainState


class OwnEvaluation:
    """It neither changes a run nor ends it: random numbers are restored, and an error is a warning."""

    def __init__(
        self, entry: Mapping[str, Any], job: Job, prepared: Prepared, gpt: Model, batch: int, context: ForwardContext
    ) -> None:
        self.name, self.call = entry["name"], bound(EVALUATIONS, SimpleNamespace(**entry))
        self.job, self.prepared, self.gpt, self.batch, self.context = job, prepared, gpt, batch, context
        self.ended = time.perf_counter()
        self.is_slow = False

    def measure(self, _: TrainState) -> Mapping[str, float | None]:
        """The metrics eval/NAME, or eval/NAME/KEY; none if the evaluation fails. *Collective.*"""
        found: Mapping[str, float | None] = agree(self._measured, self.job.rank, self.prepared.long_wait_group)
        return found

    def _measured(self) -> dict[str, float | None]:
        started, device = time.perf_counter(), self.prepared.device
        tokenizer = load_tokenizer(self.job.cfg.data.tokenizer, self.prepared.dataset.directory)
        was_training, gradients = self.gpt.training, [p.grad for p in self.gpt.parameters()]
        self.gpt.eval()
        try:
            with torch.no_grad(), self.context(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                metrics = self._metrics(self.call(self.gpt, tokenizer, self._batches()))
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            _warn_of(EVALUATIONS, self.name, error, "training continues")
            metrics = {}
        self.gpt.train(was_training)
        for p, gradient in zip(self.gpt.parameters(), gradients, strict=True):
            p.grad = gradient  # as it was, if the evaluation computes gradients of its own
        now = time.perf_counter()
        if now - started > started - self.ended and not self.is_slow:
            self.is_slow = True
            warn(
                f"{EVALUATIONS}: {self.name}: takes {duration(now - started)}, more than the training since the last "
                "evaluation; give a larger every_tokens"
            )
        self.ended = now
        return metrics

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(val_batches(self.prepared.dataset, self.batch, 0, 1, self.prepared.device))

    def _metrics(self, result: Any) -> dict[str, float | None]:
        """The numbers that the evaluation has returned. Raises `TypeError` if it has returned something else."""
        metrics = dict[str, float | None]()
        for metric, value in _named(f"eval/{self.name}", result).items():
            number = float(_scalar(value))
            metrics[metric] = number if math.isfinite(number) else None
            if metrics[metric] is None:
                warn(f"{EVALUATIONS}: {metric} is {number}, which is logged as null")
        return metrics


class OwnMetrics:
    """All entries of log.metrics. One that fails prints a warning and is not called again."""

    def __init__(self, entries: Sequence[Mapping[str, Any]], gpt: Model, device: torch.device) -> None:
        self.calls = {entry["name"]: bound(METRICS, SimpleNamespace(**entry)) for entry in entries}
        self.gpt, self.devices = gpt, [device] if device.type == "cuda" else []

    def __call__(self) -> dict[str, float | Tensor]:
        """The metrics own/NAME, or own/NAME/KEY, of the weights and gradients now."""
        found: dict[str, float | Tensor] = {}
        was_training = self.gpt.training
        for name, call in [*self.calls.items()]:
            try:
                with torch.no_grad(), torch.random.fork_rng(self.devices):
                    found |= {key: _scalar(value) for key, value in _named(f"own/{name}", call(self.gpt)).items()}
            except (Exception, SystemExit) as error:  # whatever the user's code raises
                _warn_of(METRICS, name, error, "it is not called again")
                del self.calls[name]
        if self.calls and self.gpt.training != was_training:
            self.gpt.train(was_training)
        return found


def _named(metric: str, result: Any) -> dict[str, Any]:
    """The values that the user's code has returned, by the names of their metrics."""
    if isinstance(result, Mapping):
        return {f"{metric}/{key}": value for key, value in result.items()}
    return {metric: result}


def _scalar(value: Any) -> float | Tensor:
    """A copy of a number, without waiting for a GPU. Raises an error for anything else."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"returned a {type(value).__name__}, and not a number")
    if not isinstance(value, Tensor):
        return float(value)
    if value.is_complex():
        raise TypeError(f"a {value.dtype} is no real number")
    return value.detach().reshape(()).clone()


def _warn_of(key: str, name: str, error: BaseException, then: str) -> None:
    for line in (f"{key}: {name}: {in_one_line(error)}; {then}", *own_lines(error)):
        warn(line)
