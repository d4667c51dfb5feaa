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


# Two ranks train three steps under each reduction. In the second, one number of rank 1's own gradient is infinite: one
# of the first row of wpe, which rank 0 keeps if the parameters are split.
GRADIENTS = """
import json, math, os
from contextlib import nullcontext
import torch, torch.distributed as dist
from gptexp.config.compose import compose
from gptexp.data.loader import MicroBatch
from gptexp.distributed.ranks import Rank
from gptexp.distributed.reduction import build_reduction
from gptexp.distributed.sharding import WholeParameters
from gptexp.machine.resolve import resolve
from gptexp.run.build import build_gpt, build_split_gpt, wrap
from gptexp.training.optimizer import build_optimizer
from gptexp.training.step import TrainStep

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, cpu, found = Rank(dist.get_rank(), 2), torch.device("cpu"), {}
cfg = compose(["model=nano", "model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.block_size=8",
               "model.vocab_size=320", "data=stdlib", "data.tokenizer=bytes", "train.device=cpu", "train.dtype=float32",
               "train.compile=off"])
effective = resolve(cfg, cpu, rank)

def spoil(gradient):
    gradient = gradient.clone()
    if rank.rank == 1 and number == 1:
        gradient[0, 0] = math.inf
    return gradient

for case in ("mean", "tree", "full"):
    if case == "full":
        gpt, parameters = build_split_gpt(cfg, effective, cpu)
        model = gpt
    else:
        gpt = build_gpt(cfg, effective, cpu)
        model, parameters = wrap(gpt, effective, case, rank, cpu), WholeParameters(gpt)
    gpt.wpe.register_forward_hook(lambda module, inputs, output: output.register_hook(spoil) and None)
    optimizer = build_optimizer(gpt, cfg.optim, effective.fused.value, parameters.named)
    reduction = build_reduction("mean" if case == "full" else case, model, rank)
    step, steps = TrainStep(model, optimizer, reduction, 1.0, nullcontext, False, parameters), []
    for number in range(3):
        before = [p.detach().clone() for p in parameters.named.values()]
        x = torch.randint(320, (2, 2, 8), generator=torch.Generator().manual_seed(2 * number + rank.rank))
        report = step(iter([MicroBatch(part, part, 0, 0) for part in x]), 2, 1.0)
        numbers, after = report.read(), parameters.named.values()
        changed = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        steps.append([math.isfinite(numbers.loss), report.finite.item(), numbers.finite, changed])
    found[case] = [None, None]
    dist.all_gather_object(found[case], steps)
if rank.rank == 0:
    print(json.dumps(found), flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.e2e
def test_a_gradient_that_is_not_finite_on_one_rank_keeps_all_ranks_from_the_update(tmp_path: Path) -> None:
    """Its loss is finite. No reduction of the norm says so: the ranks' gradients are the same."""
    script = tmp_path / "gradients.py"
    script.write_text(GRADIENTS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    steps = [[True, True, True, True], [True, False, False, False], [True, True, True, True]]
    assert json.loads(done.stdout) == {case: [steps, steps] for case in ("mean", "tree", "full")}
