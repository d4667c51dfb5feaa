"""The log of a run: turns measurements into events and writes each event to every sink.

The sinks are metrics.jsonl, and the terminal and wandb if enabled. `METRICS` defines all metric names.
"""

import resource
import statistics
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from gptexp.loggers.alerts import Alerts
from gptexp.model.flops import Utilisation
from gptexp.model.loss import bits_per_byte, perplexity
from gptexp.storage.checkpoint import TrainState

METRICS = {
    # name: (unit, meaning)
    "time": ("s", "Unix time of the event"),
    "step": ("steps", "index of the optimizer update, from 0; text for people counts from 1"),
    "tokens": ("tokens", "training tokens consumed, this step's included; the x axis"),
    "flops": ("FLOPs", "training FLOPs done, as perf/mfu_palm counts them"),
    "epoch": ("epochs", "passes over the training windows"),
    "batch/tokens": ("tokens", "tokens of the step, over all ranks; a ramp makes it grow (batch.ramp_tokens)"),
    "train/loss": ("nats/token", "mean over all micro-steps of all ranks, before the update"),
    "val/loss": ("nats/token", "mean over the fixed validation windows, after the update"),
    "val/loss_ema": ("nats/token", "val/loss of the averaged weights (train.ema_half_life_tokens)"),
    "val/ppl": ("", "exp(val/loss)"),
    "val/bpb": ("bits/byte", "val/loss in bits over the bytes of text that a target stands for, on average"),
    "hellaswag/acc": ("", "share of HellaSwag's examples whose right ending has the lowest loss (train.eval_tasks)"),
    "hellaswag/acc_norm": ("", "the same by the loss per token of an ending"),
    "hellaswag/cut": ("", "share of the examples that are longer than the model's context, and lose their beginning"),
    "optim/lr": ("", "learning rate of the step, without the factors of a parametrisation"),
    "optim/grad_norm": ("", "global gradient norm before clipping"),
    "optim/clip_fraction": ("", "share of the steps since the last log that were clipped"),
    "optim/gradient_noise": ("", "norm of the noise on the gradient over the gradient's (optim.gradient_noise)"),
    "perf/tokens_per_s": ("tokens/s", "over all ranks, without evaluation and checkpoints"),
    "perf/step_ms": ("ms", "wall time of the step"),
    "perf/data_ms": ("ms", "rank 0: waiting for the step's micro-batches"),
    "perf/forward_ms": ("ms", "rank 0: forward passes, the loss included"),
    "perf/backward_ms": ("ms", "rank 0: backward passes, perf/reduce_ms included"),
    "perf/reduce_ms": ("ms", "rank 0: waiting for the reduction, as DDP last measured it; null if world.sharding=full"),
    "perf/clip_ms": ("ms", "rank 0: gradient norm, clipping, and the sums of the step's values over all ranks"),
    "perf/optimizer_ms": ("ms", "rank 0: the update"),
    "perf/peak_mem_gib": ("GiB", "rank 0: most memory allocated on the GPU; resident memory on a CPU"),
    "perf/mfu_palm": ("", "FLOPs done per second over the device's peak, full attention scores (PaLM appendix B)"),
    "perf/mfu_causal": ("", "the same with the causal half of the attention scores"),
    "perf/straggler_ratio": ("", "data and forward passes of the slowest rank over the median of the others'"),
    "perf/slowest_rank": ("", "the slowest rank; both are measured in the logged step before"),
    "gns/small_sq_norm": ("", "squared norm of one micro-batch's gradient: mean over the first two of each rank"),
    "gns/big_sq_norm": ("", "squared norm of the step's gradient, before clipping"),
    "gns/small_sequences": ("sequences", "sequences of that micro-batch"),
    "gns/grad_sq": ("", "running estimate of the true gradient's squared norm"),
    "gns/noise_trace": ("", "running estimate of the trace of one sequence's gradient covariance"),
    "gns/sequences": ("sequences", "gradient noise scale: gns/noise_trace over gns/grad_sq"),
    "gns/tokens": ("tokens", "the same in tokens: compare with the batch size"),
    "gns/cos": ("", "cosine of two micro-batches' gradients in this step"),
    "sharpness/hessian": ("", "largest eigenvalue of the Hessian of the loss on 64 sequences of training text"),
    "sharpness/preconditioned": ("", "that of the Hessian between two P^(-1/2) of AdamW's preconditioner P"),
    "sharpness/threshold": ("", "of sharpness/preconditioned: above it AdamW is unstable at the step's learning rate"),
    "sharpness/sam": ("nats/token", "rise of that loss over a distance of 0.05 along its gradient"),
    "data/fingerprint": ("", "sum of the hashes of all windows consumed, modulo 2^64, 16 hex digits"),
}


SHARPNESS = tuple(name for name in METRICS if name.startswith("sharpness/"))


class Sink:
    """Receives every event of a run, in order."""

    def write(self, event: dict[str, Any]) -> None:
        raise NotImplementedError

    def rewind(self, state: TrainState) -> None:
        """Discard the steps after `state`: training has gone back to that checkpoint."""

    def sync(self) -> None:
        """Force all events to disk, if the sink has a file that results depend on."""

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        """End the log, given the content of summary.json and the exit code of the process."""


class RunLog:
    """Turns measurements into events for the sinks. On ranks other than 0 there are no sinks."""

    def __init__(
        self,
        sinks: list[Sink],
        utilisation: Utilisation,
        alerts: Alerts,
        val_bytes_per_token: float | None = None,
        sharpness_steps: Collection[int] = (),
    ) -> None:
        self.sinks, self.utilisation, self.alerts = sinks, utilisation, alerts
        self.val_bytes_per_token = val_bytes_per_token
        self.sharpness_steps = sharpness_steps  # whose sharpness an earlier attempt has logged
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def step(self, values: dict[str, Any]) -> None:
        """Log a step, with the metrics that follow from its `values`, and the alerts that it causes."""
        if not self.sinks:
            return
        rate = 1e3 * values["batch/tokens"] / values["perf/step_ms"]
        palm, causal = self.utilisation.mfu(rate)
        values = {
            **values,
            "flops": values["tokens"] * self.utilisation.flops_per_token_palm,
            "perf/tokens_per_s": rate,
            "perf/peak_mem_gib": peak_memory_gib(),
            "perf/mfu_palm": palm,
            "perf/mfu_causal": causal,
        }
        self._emit("step", values)
        for about, line in self.alerts.look(values):
            self.alert(values["step"], values["tokens"], about, line)

    def evaluation(self, step: int, tokens: int, loss: float, others: Mapping[str, float]) -> None:
        """Log a validation loss, what follows from it, and `others` that were found beside it."""
        flops = tokens * self.utilisation.flops_per_token_palm
        values = {"step": step, "tokens": tokens, "flops": flops, "val/loss": loss, "val/ppl": perplexity(loss)}
        if self.val_bytes_per_token is not None:
            values["val/bpb"] = bits_per_byte(loss, self.val_bytes_per_token)
        self._emit("eval", {**values, **others})

    def sharpness(self, step: int, tokens: int, found: Mapping[str, float | None]) -> None:
        self._emit("sharpness", {"step": step, "tokens": tokens, **found})

    def checkpoint(self, state: TrainState, path: Path) -> None:
        self._emit("checkpoint", {"step": state.step - 1, "tokens": state.tokens, "path": str(path)})

    def alert(self, step: int, tokens: int, about: str, text: str) -> None:
        """Log a warning of the kind `about`."""
        self._emit("alert", {"step": step, "tokens": tokens, "about": about, "text": text})

    def fault(self, step: int, tokens: int, text: str) -> None:
        """Log an error from which training recovers."""
        self._emit("fault", {"step": step, "tokens": tokens, "text": text})

    def profile(self, step: int, tokens: int, found: dict[str, Any]) -> None:
        self._emit("profile", {"step": step, "tokens": tokens, **found})

    def rewind(self, state: TrainState) -> None:
        self.alerts.rewind()
        for sink in self.sinks:
            sink.rewind(state)

    def sync(self) -> None:
        """Force metrics.jsonl to disk."""
        for sink in self.sinks:
            sink.sync()

    def sample(self, state: TrainState, text: str) -> None:
        self._emit("sample", {"step": state.step - 1, "tokens": state.tokens, "text": text})

    def report(self, state: TrainState, files: list[Path]) -> None:
        """Log that the files of the report have been written."""
        self._emit("report", {"step": state.step - 1, "tokens": state.tokens, "paths": list(map(str, files))})

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        """Close the sinks, given the content of summary.json and the exit code of the process."""
        if self.sinks and summary["status"] == "interrupted" and (line := self.alerts.stopped(summary["tokens"])):
            self.alert(summary["steps"] - 1, summary["tokens"], "stopped", line)
        for sink in self.sinks:
            sink.close(summary, exit_code)

    def _emit(self, kind: str, values: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write({"event": kind, "time": time.time(), **values})


def straggler(work_ms: list[float]) -> dict[str, float]:
    """Compare the slowest rank with the median of the others, from each rank's own work in a step, in ms."""
    if not work_ms:
        return {}
    slowest = max(range(len(work_ms)), key=lambda rank: work_ms[rank])
    others = [ms for rank, ms in enumerate(work_ms) if rank != slowest]
    if not others or not (usual := statistics.median(others)):
        return {}
    return {"perf/straggler_ratio": work_ms[slowest] / usual, "perf/slowest_rank": slowest}


def peak_memory_gib() -> float:
    """Peak memory of this process: allocated on the GPU, or resident on a CPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
