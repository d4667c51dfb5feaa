"""Where a run's numbers go: `metrics.jsonl` always; the terminal and wandb as asked.

`METRICS` is the one table of names; every sink takes the same records.
"""

import errno
import json
import os
import resource
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from gptexp.alerts import Alerts
from gptexp.checkpoint import TrainState
from gptexp.errors import StorageError
from gptexp.flops import Utilisation
from gptexp.loss import perplexity
from gptexp.run_dir import METRICS as METRICS_FILE
from gptexp.run_dir import atomic, finite, storage

METRICS = {
    # name: (unit, meaning)
    "time": ("s", "Unix time of the event"),
    "step": ("steps", "index of the optimizer update, from 0"),
    "tokens": ("tokens", "training tokens consumed, this step's included; the x axis"),
    "flops": ("FLOPs", "training FLOPs done, as perf/mfu_palm counts them"),
    "epoch": ("epochs", "passes over the training windows"),
    "train/loss": ("nats/token", "mean over all micro-steps of all ranks, before the update"),
    "val/loss": ("nats/token", "mean over the fixed validation windows, after the update"),
    "val/ppl": ("", "exp(val/loss)"),
    "optim/lr": ("", "learning rate of the step"),
    "optim/grad_norm": ("", "global gradient norm before clipping"),
    "optim/clip_fraction": ("", "share of the steps since the last log that were clipped"),
    "perf/tokens_per_s": ("tokens/s", "over all ranks, without evaluation and checkpoints"),
    "perf/step_ms": ("ms", "wall time of the step"),
    "perf/data_ms": ("ms", "rank 0: waiting for the step's micro-batches"),
    "perf/forward_ms": ("ms", "rank 0: forward passes, the loss included"),
    "perf/backward_ms": ("ms", "rank 0: backward passes, perf/reduce_ms included"),
    "perf/reduce_ms": ("ms", "rank 0: waiting for the gradients' reduction, when DDP last measured it"),
    "perf/clip_ms": ("ms", "rank 0: norm, clipping, and the step's numbers over all ranks"),
    "perf/optimizer_ms": ("ms", "rank 0: the update"),
    "perf/peak_mem_gib": ("GiB", "rank 0: most memory allocated on the GPU; resident memory on a CPU"),
    "perf/mfu_palm": ("", "FLOPs done per second over the device's peak, full attention scores (PaLM appendix B)"),
    "perf/mfu_causal": ("", "the same, causal half of the scores"),
    "perf/straggler_ratio": ("", "data and forward passes of the slowest rank over the median of the others'"),
    "perf/slowest_rank": ("", "which rank that was, in the logged step before"),
    "gns/small_sq_norm": ("", "squared norm of one micro-batch's gradient: mean over the first two of each rank"),
    "gns/big_sq_norm": ("", "squared norm of the step's gradient, before clipping"),
    "gns/small_sequences": ("sequences", "in the one micro-batch"),
    "gns/grad_sq": ("", "running estimate of the true gradient's squared norm"),
    "gns/noise_trace": ("", "running estimate of the trace of one sequence's gradient covariance"),
    "gns/sequences": ("sequences", "gradient noise scale: gns/noise_trace over gns/grad_sq"),
    "gns/tokens": ("tokens", "the same in tokens: compare with the batch size"),
    "gns/cos": ("", "cosine of two micro-batches' gradients in this step"),
    "data/fingerprint": ("", "sum of the hashes of all windows consumed, modulo 2^64, 16 hex digits"),
}


class Sink(Protocol):
    """Takes every event of a run, in order."""

    def write(self, event: dict[str, Any]) -> None: ...

    def rewind(self, state: TrainState) -> None:
        """What was written of steps after `state` no longer holds: training went back."""

    def close(self, summary: dict[str, Any], exit_code: int) -> None: ...


class RunLog:
    """Turns what the trainer measures into events and hands them to the sinks; has none on other ranks than 0."""

    def __init__(
        self,
        sinks: list[Sink],
        step_tokens: int,
        utilisation: Utilisation | None = None,
        alerts: Alerts | None = None,
    ) -> None:
        self.sinks = sinks
        self.step_tokens = step_tokens
        self.utilisation = utilisation
        self.alerts = alerts
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def step(
        self,
        step: int,
        tokens: int,
        epoch: float,
        loss: float,
        lr: float,
        grad_norm: float,
        clip_fraction: float,
        seconds: float,
        phases_ms: dict[str, float],
        work_ms: list[float],
        noise_scale: dict[str, float],
        fingerprint: int,
    ) -> None:
        if not self.sinks:
            return
        assert self.utilisation is not None
        assert self.alerts is not None
        rate = self.step_tokens / seconds
        palm, causal = self.utilisation.mfu(rate)
        values = {
            "step": step,
            "tokens": tokens,
            "flops": tokens * self.utilisation.flops_per_token_palm,
            "epoch": epoch,
            "train/loss": loss,
            "optim/lr": lr,
            "optim/grad_norm": grad_norm,
            "optim/clip_fraction": clip_fraction,
            "perf/tokens_per_s": rate,
            "perf/step_ms": 1e3 * seconds,
            **{f"perf/{phase}_ms": ms for phase, ms in phases_ms.items()},
            **straggler(work_ms),
            "perf/peak_mem_gib": peak_memory_gib(),
            "perf/mfu_palm": palm,
            "perf/mfu_causal": causal,
            **noise_scale,
            "data/fingerprint": f"{fingerprint:016x}",
        }
        self._emit("step", values)
        for about, line in self.alerts.look(values):
            self.alert(step, tokens, about, line)

    def evaluation(self, step: int, tokens: int, loss: float) -> None:
        flops = tokens * self.utilisation.flops_per_token_palm if self.utilisation else 0
        values = {"step": step, "tokens": tokens, "flops": flops, "val/loss": loss, "val/ppl": perplexity(loss)}
        self._emit("eval", values)

    def checkpoint(self, step: int, path: Path) -> None:
        self._emit("checkpoint", {"step": step - 1, "tokens": step * self.step_tokens, "path": str(path)})

    def alert(self, step: int, tokens: int, about: str, text: str) -> None:
        """Something worth a look, of the kind `about`."""
        self._emit("alert", {"step": step, "tokens": tokens, "about": about, "text": text})

    def fault(self, step: int, tokens: int, text: str) -> None:
        """Something that training had to get over."""
        self._emit("fault", {"step": step, "tokens": tokens, "text": text})

    def profile(self, step: int, tokens: int, found: dict[str, Any]) -> None:
        self._emit("profile", {"step": step, "tokens": tokens, **found})

    def rewind(self, state: TrainState) -> None:
        if self.alerts is not None:
            self.alerts.rewind()
        for sink in self.sinks:
            sink.rewind(state)

    def sync(self) -> None:
        """Have on the disk what metrics.jsonl holds."""
        for sink in self.sinks:
            if isinstance(sink, JsonlSink):
                sink.sync()

    def sample(self, step: int, text: str) -> None:
        self._emit("sample", {"step": step - 1, "tokens": step * self.step_tokens, "text": text})

    def report(self, step: int, files: list[Path]) -> None:
        """What the run shows has been written."""
        self._emit("report", {"step": step - 1, "tokens": step * self.step_tokens, "paths": list(map(str, files))})

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        """Finish with what summary.json says of a process that ends with `exit_code`."""
        if self.alerts is not None and summary["status"] == "interrupted":
            step, tokens = summary["steps"] - 1, summary["tokens"]
            if line := self.alerts.stopped(tokens):
                self.alert(step, tokens, "stopped", line)
        for sink in self.sinks:
            sink.close(summary, exit_code)

    def _emit(self, kind: str, values: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write({"event": kind, "time": time.time(), **values})


def straggler(work_ms: list[float]) -> dict[str, float]:
    """How far the slowest of several ranks is behind, given what each was busy for without the others."""
    slowest = max(range(len(work_ms)), key=lambda rank: work_ms[rank])
    others = [ms for rank, ms in enumerate(work_ms) if rank != slowest]
    if not others or not (usual := statistics.median(others)):
        return {}
    return {"perf/straggler_ratio": work_ms[slowest] / usual, "perf/slowest_rank": slowest}


def peak_memory_gib() -> float:
    """Most memory this process has held so far: allocated on the GPU, or resident."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class JsonlSink:
    """One JSON object per event, with the file system after each line. Raises `StorageError` where it takes no more."""

    def __init__(self, directory: Path, state: TrainState) -> None:
        self._path = directory / METRICS_FILE
        self.alerts_before: set[str] = set()  # what earlier attempts have warned of
        self._open(state)

    def write(self, event: dict[str, Any]) -> None:
        line = (json.dumps(finite(event)) + "\n").encode()
        whole = self._file.tell()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(whole)  # no half line
            raise StorageError(
                f"{self._path}: cannot be written ({error.strerror}); make room, and gptexp resume {self._path.parent} "
                "goes on from the newest checkpoint"
            ) from None

    def sync(self) -> None:
        with storage(self._path):
            os.fsync(self._file.fileno())

    def rewind(self, state: TrainState) -> None:
        self._file.close()
        self._open(state)

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        self._file.close()

    def _open(self, state: TrainState) -> None:
        if self._path.exists():
            with storage(self._path), atomic(self._path) as kept, self._path.open(errors="replace") as lines:
                for line in lines:
                    event = _event(line)
                    if event is not None and _holds(event, state):
                        kept.write(line)
                        if event.get("event") == "alert":
                            self.alerts_before.add(str(event.get("about")))
        with storage(self._path):
            self._file = self._path.open("ab", buffering=0)


def _event(line: str) -> dict[str, Any] | None:
    """What a line holds; None for the last one of a killed process."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _holds(event: dict[str, Any], state: TrainState) -> bool:
    """Whether an event that an earlier attempt logged happened before the checkpoint `state` was saved."""
    tokens: float = event.get("tokens", 0)
    return tokens <= (state.evaluated_tokens if event.get("event") == "eval" else state.tokens)
