"""The log of a run: turns measurements into events and writes each event to every sink.

The sinks are metrics.jsonl, and the terminal and wandb if enabled.
"""

import resource
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from gptexp.config.metrics import Metric, bits_metric
from gptexp.loggers.alerts import Alerts
from gptexp.model.flops import Utilisation
from gptexp.model.loss import bits_per_byte, perplexity
from gptexp.storage.checkpoint import TrainState


class Sink:
    """Receives every event of a run, in order."""

    @property
    def takes_report(self) -> bool:
        """Whether it uploads the report of the run."""
        return False

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
        val_bytes_per_token: Mapping[str, float] = MappingProxyType({}),
        earlier_steps: Mapping[str, Collection[int]] = MappingProxyType({}),
    ) -> None:
        self.sinks, self.utilisation, self.alerts = sinks, utilisation, alerts
        self.val_bytes_per_token = val_bytes_per_token  # name of a validation loss -> bytes of a target of its text
        self.earlier_steps = earlier_steps  # kind of event -> the steps for which earlier attempts have logged it
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def step(self, values: dict[str, Any]) -> None:
        """Log a step, with the metrics that follow from its `values`, and the alerts that it causes."""
        if not self.sinks:
            return
        rate = 1e3 * values[Metric.BATCH_TOKENS] / values[Metric.STEP_MS]
        palm, causal = self.utilisation.mfu(rate)
        values = {
            **values,
            "flops": values["tokens"] * self.utilisation.flops_per_token_palm,
            Metric.TOKENS_PER_S: rate,
            Metric.PEAK_MEM_GIB: peak_memory_gib(),
            Metric.MFU_PALM: palm,
            Metric.MFU_CAUSAL: causal,
        }
        self._emit("step", values)
        for about, line in self.alerts.look(values):
            self.alert(values["step"], values["tokens"], about, line)

    def evaluation(self, step: int, tokens: int, found: Mapping[str, float | None]) -> None:
        """Log what is measured of the weights, and what follows from the validation loss."""
        values = {"step": step, "tokens": tokens, "flops": tokens * self.utilisation.flops_per_token_palm, **found}
        if (loss := found.get(Metric.VAL_LOSS)) is not None:
            values[Metric.VAL_PPL] = perplexity(loss)
        for name, bytes_per_token in self.val_bytes_per_token.items():
            if (loss := found.get(name)) is not None:
                values[bits_metric(name)] = bits_per_byte(loss, bytes_per_token)
        self._emit("eval", values)

    def evaluation_of_checkpoint(self, name: str, step: int, tokens: int, found: Mapping[str, float | None]) -> None:
        """Log what the evaluation `name` measures, as an event of that name."""
        self._emit(name, {"step": step, "tokens": tokens, **found})

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

    @property
    def takes_report(self) -> bool:
        """Whether a sink uploads the report of the run."""
        return any(sink.takes_report for sink in self.sinks)

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


def straggler(sum_ms: float, slowest_ms: float, slowest_rank: int, ranks: int) -> dict[str, float]:
    """Compare the slowest rank's own work in a step with the mean of the others', given the sum over all `ranks`."""
    others_ms = sum_ms - slowest_ms
    if ranks == 1 or others_ms <= 0:
        return {}
    return {Metric.STRAGGLER_RATIO: slowest_ms * (ranks - 1) / others_ms, Metric.SLOWEST_RANK: slowest_rank}


def peak_memory_gib() -> float:
    """Peak memory of this process: allocated on the GPU, or resident on a CPU."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    with suppress(OSError), Path("/proc/self/status").open() as status:  # Linux, where ru_maxrss counts the parent too
        for line in status:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
