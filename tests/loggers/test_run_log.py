"""The events of a run: rates, utilisation, stragglers and alerts."""

from typing import Any

from gptexp.loggers.alerts import Alerts
from gptexp.loggers.run_log import RunLog, straggler
from gptexp.model.flops import Utilisation
from gptexp.storage.checkpoint import TrainState

STEP = {
    "step": 3, "tokens": 400, "batch/tokens": 100, "epoch": 0.5, "optim/grad_norm": 1.25, "perf/step_ms": 500.0,
    "gns/cos": 0.5,
}  # fmt: skip


class Memory:
    """A sink that keeps the events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def rewind(self, state: TrainState) -> None: ...

    def close(self, summary: dict[str, Any], exit_code: int) -> None: ...


def log_to(sink: Memory, peak: float | None = None) -> RunLog:
    return RunLog([sink], Utilisation(150, 1000, 800, peak, "somebody said so"), Alerts(0, 1.0))


def test_a_step_has_rates_and_utilisation() -> None:
    with_peak, without = Memory(), Memory()
    log_to(with_peak, 1e6).step(STEP)
    log_to(without).step(STEP)
    [known], [unknown] = with_peak.events, without.events
    assert known["perf/tokens_per_s"] == 200
    assert (known["perf/mfu_palm"], known["perf/mfu_causal"]) == (0.2, 0.16)
    assert (unknown["perf/mfu_palm"], unknown["perf/mfu_causal"]) == (None, None)
    assert known["flops"] == 400 * 1000
    assert STEP.items() <= known.items()


def test_the_straggler_is_the_slowest_rank_against_the_mean_of_the_others() -> None:
    assert straggler(60.0, 30.0, 1, ranks=4) == {"perf/straggler_ratio": 3.0, "perf/slowest_rank": 1}
    assert straggler(30.0, 20.0, 1, ranks=2) == {"perf/straggler_ratio": 2.0, "perf/slowest_rank": 1}
    assert straggler(0.0, 0.0, 1, ranks=2) == {}  # no rank has reported yet
    assert straggler(20.0, 20.0, 0, ranks=1) == {}


def test_an_alert_is_an_event_of_its_own() -> None:
    sink = Memory()
    log_to(sink).step({**STEP, "epoch": 1.5})
    assert [event["event"] for event in sink.events] == ["step", "alert"]
    assert sink.events[1]["text"].startswith("the text repeats")
