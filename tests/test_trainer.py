"""`train_step` against the same step written out with plain torch: one batch, no accumulation, clipping by hand."""

import copy
from contextlib import nullcontext

import pytest
import torch

from gptexp.config import ModelConfig
from gptexp.data.loader import MicroBatch
from gptexp.distributed import MeanReduction
from gptexp.model import GPT
from gptexp.signals import REASONS
from gptexp.step_report import StepReport, StepTimeout
from gptexp.trainer import train_step


@pytest.mark.parametrize("grad_clip", [0.0, 0.05, 100.0])
def test_a_step_is_one_update_by_the_clipped_mean_gradient(grad_clip: float) -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=64))
    reference = copy.deepcopy(model)
    tokens = torch.randint(64, (6, 9))
    # Three micro-batches of two sequences, their fingerprints as large as they get.
    batches = [MicroBatch(t[:, :-1], t[:, 1:], 2**64 - 1, 0) for t in tokens.split(2)]
    # SGD moves in proportion to the gradient, so that clipping shows; Adam would hide it.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    report = train_step(model, optimizer, MeanReduction(None), iter(batches), 3, 0.5, grad_clip, nullcontext, False)
    numbers = report.read()

    expected = reference(tokens[:, :-1], tokens[:, 1:])
    expected.backward()
    gradients = [p.grad for p in reference.parameters() if p.grad is not None]
    expected_norm = torch.sqrt(sum((g.double() ** 2).sum() for g in gradients)).item()  # type: ignore[arg-type]
    factor = min(1.0, grad_clip / expected_norm) if grad_clip else 1.0
    assert (factor < 1) == (grad_clip == 0.05)
    assert numbers.loss == pytest.approx(expected.item(), rel=1e-6)
    assert numbers.grad_norm == pytest.approx(expected_norm, rel=1e-5)
    assert numbers.fingerprint == (3 * (2**64 - 1)) % 2**64
    for new, old in zip(model.parameters(), reference.parameters(), strict=True):
        assert old.grad is not None
        torch.testing.assert_close(new, old - 0.5 * factor * old.grad, rtol=1e-4, atol=1e-7)


def test_gradients_of_the_step_before_are_gone() -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tokens = torch.randint(64, (2, 9))
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:], 1, 0)
    mean = MeanReduction(None)
    reports = [train_step(model, optimizer, mean, iter([batch]), 1, 0.0, 0.0, nullcontext, False) for _ in range(2)]
    norms = [report.read().grad_norm for report in reports]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_a_device_is_waited_for_until_it_is_done_or_the_time_is_over() -> None:
    class Event:
        """A GPU's, that is past it when looked at the third time."""

        looks = 0

        def query(self) -> bool:
            self.looks += 1
            return self.looks > 2

    report = StepReport(torch.tensor(2.5), torch.tensor(1.0), 7, [0.0] * len(REASONS))
    event = Event()
    report._event = event  # type: ignore[assignment]
    with pytest.raises(StepTimeout, match="not there after -1 s"):
        report.read(timeout_s=-1)
    assert event.looks == 1
    assert (report.read(timeout_s=60).loss, event.looks) == (2.5, 3)
