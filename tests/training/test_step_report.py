"""Reading the numbers of a step: the host waits until the device has them, or until the timeout."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from gptexp.process.signals import REASONS
from gptexp.training.step_report import StepReport, StepTimeout


class Event:
    """A GPU's event that completes at the third query."""

    queries = 0

    def query(self) -> bool:
        self.queries += 1
        return self.queries > 2


def report_behind(event: Event) -> StepReport:
    report = StepReport(torch.tensor(2.5), 7, [0.0] * len(REASONS))
    report.complete(torch.tensor(1.0))
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


@pytest.mark.parametrize("loss", [0.0, 2.5, math.nan, math.inf])
@pytest.mark.parametrize("norm", [0.0, 1.0, 3e38, math.nan, math.inf])
def test_a_step_is_finite_if_its_loss_and_its_norm_are(loss: float, norm: float) -> None:
    report = StepReport(torch.tensor(loss), 7)
    report.complete(torch.tensor(norm))
    assert report.finite.item() is report.read().finite is (math.isfinite(loss) and math.isfinite(norm))


# Three ranks report two logged steps. Each prints what it has read of the work of all.
RANKS = """
import json, os, sys
import torch, torch.distributed as dist
from gptexp.process.signals import REASONS
from gptexp.training.step_report import SlowestRank, StepReport

rank = 0 if os.fork() else 1 if os.fork() else 2
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 3), rank=rank, world_size=3)
found = []
for work_ms in ([10.0, 30.5, 12.25], [20.0, 10.0, 20.0]):
    slowest = SlowestRank(work_ms[rank], torch.device("cpu"))
    flags = [float(rank == 1)] + [0.0] * (len(REASONS) - 1)
    report = StepReport(torch.tensor(3.0 * rank), 7, flags, None, slowest)
    report.complete(torch.tensor(1.0))
    numbers = report.read()
    found.append([numbers.work, numbers.loss, numbers.fingerprint, numbers.asked])
print(json.dumps(found) + "\\n", end="", flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.e2e
def test_all_ranks_read_the_sum_of_the_work_and_the_slowest_rank(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANKS, str(tmp_path / "store")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    read = [json.loads(line) for line in done.stdout.splitlines()]
    # Of two that are equally slow, the later one.
    expected = [[[52.75, 30.5, 1], 3.0, 21, REASONS[0]], [[50.0, 20.0, 2], 3.0, 21, REASONS[0]]]
    assert read == [expected] * 3, done.stderr
