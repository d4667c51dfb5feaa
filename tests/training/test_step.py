"""`TrainStep` against the same step in plain torch: one batch, no accumulation, clipping by hand."""

import copy
from contextlib import nullcontext

import pytest
import torch

from gptexp.config.schema import ModelConfig
from gptexp.data.loader import MicroBatch
from gptexp.distributed.reduction import MeanReduction
from gptexp.model.gpt import GPT
from gptexp.training.step import TrainStep


def small_model() -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=64))


def sgd_step(model: GPT, peak_lr: float, grad_clip: float) -> TrainStep:
    """Uses SGD: its update is proportional to the gradient, so clipping has an effect. Adam would hide it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=peak_lr)
    optimizer.param_groups[0]["initial_lr"] = peak_lr
    return TrainStep(model, optimizer, MeanReduction(None), grad_clip, nullcontext, dropout=False)


@pytest.mark.parametrize("grad_clip", [0.0, 0.05, 100.0])
def test_a_step_is_one_update_by_the_clipped_mean_gradient(grad_clip: float) -> None:
    model = small_model()
    reference = copy.deepcopy(model)
    tokens = torch.randint(64, (6, 9))
    # Three micro-batches of two sequences, each with the largest possible fingerprint.
    batches = [MicroBatch(t[:, :-1], t[:, 1:], 2**64 - 1, 0) for t in tokens.split(2)]
    step = sgd_step(model, peak_lr=2.0, grad_clip=grad_clip)
    numbers = step(iter(batches), 3, lr_factor=0.25).read()

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


@pytest.mark.parametrize("kept", [False, True])
def test_gradients_of_the_previous_step_are_cleared(kept: bool) -> None:
    """DDP's gradients lie in its buckets, and must stay there."""
    step = sgd_step(small_model(), peak_lr=0.0, grad_clip=0.0)
    step.reduction.keeps_gradients = kept
    tokens = torch.randint(64, (2, 9))
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:], 1, 0)
    norms = [step(iter([batch]), 1, lr_factor=0.0).read().grad_norm for _ in range(2)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert all((p.grad is not None and not p.grad.any()) if kept else p.grad is None for p in step.model.parameters())


def test_the_learning_rate_of_a_step_is_the_peak_times_its_own_factor() -> None:
    """Each step's factor applies to the peak, not to the learning rate of the step before."""
    model = small_model()
    step = sgd_step(model, peak_lr=2.0, grad_clip=0.0)
    tokens = torch.randint(64, (2, 9))
    for factor in (0.5, 0.25, 1.0):
        before = model.wpe.weight.detach().clone()
        reference = copy.deepcopy(model)
        reference(tokens[:, :-1], tokens[:, 1:]).backward()
        step(iter([MicroBatch(tokens[:, :-1], tokens[:, 1:], 1, 0)]), 1, lr_factor=factor)
        assert reference.wpe.weight.grad is not None
        torch.testing.assert_close(model.wpe.weight, before - 2.0 * factor * reference.wpe.weight.grad)
