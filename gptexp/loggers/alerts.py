"""Warnings about a run, derived from its logged steps. Each kind of warning is given once. No torch."""

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

from gptexp.config.metrics import Metric

WINDOW = 20  # logged steps over which a check takes its mean or median
CLIPPED = 0.9  # share of clipped steps
CLIMBED = 3.0  # median gradient norm, relative to its lowest so far
WAITING = 0.1  # share of a step's time spent waiting for data
BEHIND = 1.25  # time of the slowest rank, relative to the mean of the others
USUALLY_SLOWEST = 0.8  # share of the window in which one rank is the slowest


class Alerts:
    """Checks the logged steps of a run, whose values have the names in `config/metrics.py`.

    `deadline` is the time of the monotonic clock, in seconds, at which the run must end. `said` are the kinds of
    warnings that earlier attempts have logged.
    """

    def __init__(
        self, warmup_tokens: int, grad_clip: float, deadline: float = math.inf, said: Iterable[str] = ()
    ) -> None:
        self._warmup_tokens, self._grad_clip, self._deadline = warmup_tokens, grad_clip, deadline
        self._newest: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._lowest_norm = math.inf  # lowest median of the gradient norm
        self._said = set(said)

    def look(self, step: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Check a logged step; yields (kind, line) for each new warning."""
        if not math.isfinite(step[Metric.GRAD_NORM]):
            return  # the training loop logs a fault for it
        self._newest.append(step)
        for about, line in self._warnings():
            if about not in self._said:
                self._said.add(about)
                yield about, line

    def rewind(self) -> None:
        """Forget the window after training has gone back to a checkpoint."""
        self._newest.clear()

    def stopped(self, tokens: int) -> str | None:
        """Return the warning for a run that stops early, after `tokens`, or None."""
        if tokens >= self._warmup_tokens:
            return None
        return (
            f"stopped within the warm-up of {self._warmup_tokens:,} tokens: the learning rate has not reached its "
            "peak, so this loss gives no evidence about that learning rate"
        )

    def _warnings(self) -> Iterator[tuple[str, str]]:
        """Yield (kind, line) for each warning that holds now, whether or not it was given before."""
        newest = self._newest[-1]
        if newest["epoch"] > 1:
            epoch = math.ceil(newest["epoch"])
            line = f"the text repeats: epoch {epoch} has started; the training loss can now be lower than on new text"
            yield "epoch", line
        if len(self._newest) < WINDOW:
            return
        if newest["tokens"] < self._warmup_tokens and self._deadline < math.inf:
            rate = self._median(Metric.TOKENS_PER_S)
            if newest["tokens"] + rate * (self._deadline - time.monotonic()) < self._warmup_tokens:
                yield (
                    "warm-up",
                    f"train.max_minutes will end within the warm-up of {self._warmup_tokens:,} tokens: at this speed "
                    "the learning rate does not reach its peak; raise train.max_minutes, or shorten the warm-up",
                )
        if self._newest[0]["tokens"] > self._warmup_tokens:
            if statistics.fmean(step[Metric.CLIP_FRACTION] for step in self._newest) > CLIPPED:
                yield (
                    "clipping",
                    f"more than {CLIPPED:.0%} of the steps are clipped at optim.grad_clip={self._grad_clip:g}: "
                    "after clipping nearly all gradients have this norm; raise optim.grad_clip, or consider this when "
                    "you compare runs",
                )
            norm = self._median(Metric.GRAD_NORM)
            self._lowest_norm = min(norm, self._lowest_norm)
            if norm > CLIMBED * self._lowest_norm:
                yield (
                    "gradient norm",
                    f"the gradient norm rises: its median over {WINDOW} logged steps is {norm:.3g}, and the lowest was "
                    f"{self._lowest_norm:.3g}; this often precedes divergence, and a lower optim.lr may help",
                )
        share = sum(s[Metric.DATA_MS] for s in self._newest) / sum(s[Metric.STEP_MS] for s in self._newest)
        if share > WAITING:
            line = f"{share:.0%} of a step's time is spent waiting for data: check the file system and the CPU's load"
            yield "data", line
        if Metric.SLOWEST_RANK in newest:
            steps = [step for step in self._newest if Metric.SLOWEST_RANK in step]
            [(rank, count)] = Counter(step[Metric.SLOWEST_RANK] for step in steps).most_common(1)
            ratio = statistics.median(step[Metric.STRAGGLER_RATIO] for step in steps)
            if count >= USUALLY_SLOWEST * WINDOW and ratio > BEHIND:
                line = (
                    f"rank {rank} takes {ratio:.1f} times as long as the mean of the others, and all ranks wait for "
                    "it: check its device"
                )
                yield "straggler", line

    def _median(self, key: str) -> float:
        return float(statistics.median(step[key] for step in self._newest))
