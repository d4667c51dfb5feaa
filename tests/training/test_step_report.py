"""Reading the numbers of a step: the host waits until the device has them, or until the timeout."""

import pytest
import torch

from gptexp.process.signals import REASONS
from gptexp.training.step_report import StepReport, StepTimeout


class Event:
    """A GPU's event that completes at the third query."""

    queries = 0

    def query(self) -> bool:
        self.queries += 1
        return self.queries > 2


def report_behind(event: Event) -> StepReport:
    report = StepReport(torch.tensor(2.5), torch.tensor(1.0), 7, [0.0] * len(REASONS))
    report._event = event  # type: ignore[assignment]
    return report


def test_reading_raises_once_the_timeout_has_passed() -> None:
    event = Event()
    with pytest.raises(StepTimeout, match="did not arrive within -1 s"):
        report_behind(event).read(timeout_s=-1)
    assert event.queries == 1  # a device that is done is never reported as late


def test_reading_returns_once_the_device_is_done() -> None:
    event = Event()
    assert report_behind(event).read(timeout_s=60).loss == 2.5
    assert event.queries >= 3


def test_numbers_can_be_read_after_a_timeout() -> None:
    report = report_behind(Event())
    with pytest.raises(StepTimeout):
        report.read(timeout_s=-1)
    assert report.read(timeout_s=60).loss == 2.5
