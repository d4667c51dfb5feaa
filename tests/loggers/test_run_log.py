"""The events of a run: rates, utilisation, stragglers and alerts."""

from dataclasses import replace
from typing import Any

from gptexp.loggers.alerts import Alerts
from gptexp.loggers.run_log import RunLog, StepRecord, straggler
from gptexp.model.flops import Utilisation
from gptexp.storage.checkpoint import TrainState

STEP = StepRecord(
    step=3, tokens=400, epoch=0.5, loss=2.5, lr=6e-4, grad_norm=1.25, clip_fraction=0.25, seconds=0.5,
    phases_ms={"forward": 20.0}, work_ms=[20.0], noise_scale={"gns/cos": 0.5}, fingerprint=255,
)  # fmt: skip


class Memory:
    """A sink that keeps the events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def rewind(self, state: TrainState) -> None: ...

    def close(self, summary: dict[str, Any], exit_code: int) -> None: ...


def log_to(sink: Memory, peak: float | None = None) -> RunLog:
    return RunLog([sink], 100, Utilisation(150, 1000, 800, peak, "somebody said so"), Alerts(0, 1.0))


def test_a_step_has_rates_and_utilisation() -> None:
    with_peak, without = Memory(), Memory()
    log_to(with_peak, 1e6).step(STEP)
    log_to(without).step(STEP)
    [known], [unknown] = with_peak.events, without.events
    assert known["perf/tokens_per_s"] == 200
    assert known["perf/step_ms"] == 500
    assert known["perf/forward_ms"] == 20
    assert (known["perf/mfu_palm"], known["perf/mfu_causal"]) == (0.2, 0.16)
    assert (unknown["perf/mfu_palm"], unknown["perf/mfu_causal"]) == (None, None)
    assert known["flops"] == 400 * 1000
    assert known["gns/cos"] == 0.5
    assert known["data/fingerprint"] == "00000000000000ff"
    assert known["optim/clip_fraction"] == 0.25
    assert "perf/slowest_rank" not in known  # there is one rank only


def test_the_straggler_is_the_slowest_rank_against_the_median_of_the_others() -> None:
    assert straggler([10.0, 30.0, 12.0, 8.0]) == {"perf/straggler_ratio": 3.0, "perf/slowest_rank": 1}
    assert straggler([10.0, 20.0]) == {"perf/straggler_ratio": 2.0, "perf/slowest_rank": 1}
    assert straggler([0.0, 0.0]) == {}  # no rank has reported yet


def test_an_alert_is_an_event_of_its_own() -> None:
    sink = Memory()
    log_to(sink).step(replace(STEP, epoch=1.5))
    assert [event["event"] for event in sink.events] == ["step", "alert"]
    assert sink.events[1]["text"].startswith("the text repeats")
