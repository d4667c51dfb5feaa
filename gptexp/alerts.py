"""What somebody who watches a run would point out, from its logged steps alone; each thing once. No torch."""

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

WINDOW = 20  # logged steps that are looked at together
CLIPPED = 0.9  # share of steps
CLIMBED = 3.0  # times the lowest that the norm's median has been
WAITING = 0.1  # share of a step's time
BEHIND = 1.25  # times the median of the other ranks
MOSTLY = 0.8  # of the window


class Alerts:
    """Takes a run's logged steps, under the names of `loggers.METRICS`, and gives warnings.

    `deadline`: when the run must end, of the monotonic clock; `said`: what earlier attempts have warned of.
    """

    def __init__(
        self, warmup_tokens: int, grad_clip: float, deadline: float = math.inf, said: Iterable[str] = ()
    ) -> None:
        self._warmup_tokens, self._grad_clip, self._deadline = warmup_tokens, grad_clip, deadline
        self._newest: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._lowest_norm = math.inf  # of the medians of the gradient norm
        self._said = set(said)
        self._checks: dict[str, Callable[[], str | None]] = {
            "epoch": self._repeats,
            "warm-up": self._ends_too_soon,
            "clipping": self._clipped,
            "gradient norm": self._climbs,
            "data": self._waits_for_data,
            "straggler": self._straggles,
        }

    def look(self, step: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Take in the values of a logged step; yields (kind, line) for each thing that shows for the first time."""
        if not math.isfinite(step["optim/grad_norm"]):
            return  # the run itself says what it does about that
        self._newest.append(step)
        for about, check in self._checks.items():
            if about not in self._said and (line := check()):
                self._said.add(about)
                yield about, line

    def rewind(self) -> None:
        """Training went back: what comes now does not follow on what was seen."""
        self._newest.clear()

    def stopped(self, tokens: int) -> str | None:
        """What to say of a run that stops early, after `tokens`."""
        if tokens >= self._warmup_tokens:
            return None
        return (
            f"stopped within the warm-up of {self._warmup_tokens:,} tokens: the learning rate has not reached its "
            "peak, and this loss says nothing of it"
        )

    def _repeats(self) -> str | None:
        epoch = self._newest[-1]["epoch"]
        if epoch <= 1:
            return None
        return f"the text repeats: epoch {math.ceil(epoch)} has begun; the training loss now flatters the model"

    def _ends_too_soon(self) -> str | None:
        tokens = self._newest[-1]["tokens"]
        if len(self._newest) < WINDOW or tokens >= self._warmup_tokens or self._deadline == math.inf:
            return None
        rate = statistics.median(s["perf/tokens_per_s"] for s in self._newest)
        if tokens + rate * (self._deadline - time.monotonic()) >= self._warmup_tokens:
            return None
        return (
            f"train.max_minutes will be over within the warm-up of {self._warmup_tokens:,} tokens: the learning rate "
            "will not reach its peak; allow for more time, or shorten the warm-up"
        )

    def _settled(self) -> bool:
        """Whether all of a full window lies behind the warm-up."""
        return len(self._newest) == WINDOW and self._newest[0]["tokens"] > self._warmup_tokens

    def _clipped(self) -> str | None:
        if not self._settled() or statistics.fmean(s["optim/clip_fraction"] for s in self._newest) <= CLIPPED:
            return None
        return (
            f"more than {CLIPPED:.0%} of the steps are clipped at optim.grad_clip={self._grad_clip:g}: it and not the "
            "gradient decides how long an update is; raise it, or take that into account when comparing"
        )

    def _climbs(self) -> str | None:
        if not self._settled():
            return None
        norm = statistics.median(s["optim/grad_norm"] for s in self._newest)
        self._lowest_norm = min(norm, self._lowest_norm)
        if not norm > CLIMBED * self._lowest_norm:
            return None
        return (
            f"the gradient norm climbs: its median over {WINDOW} logged steps is {norm:.3g} and was "
            f"{self._lowest_norm:.3g}; runs that diverge begin like this, a lower optim.lr may help"
        )

    def _waits_for_data(self) -> str | None:
        if len(self._newest) < WINDOW:
            return None
        share = sum(s["perf/data_ms"] for s in self._newest) / sum(s["perf/step_ms"] for s in self._newest)
        if share <= WAITING:
            return None
        return f"{share:.0%} of a step's time is spent waiting for data; is the file system slow, or the CPU busy?"

    def _straggles(self) -> str | None:
        if len(self._newest) < WINDOW or "perf/slowest_rank" not in self._newest[-1]:
            return None
        steps = [s for s in self._newest if "perf/slowest_rank" in s]
        [(rank, often)] = Counter(s["perf/slowest_rank"] for s in steps).most_common(1)
        ratio = statistics.median(s["perf/straggler_ratio"] for s in steps)
        if often < MOSTLY * WINDOW or ratio <= BEHIND:
            return None
        return f"rank {rank} is {ratio:.1f} times as slow as the others, and all wait for it; look at its device"
