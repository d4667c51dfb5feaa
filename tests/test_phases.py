"""A step's phases: micro-steps add up, and the parts of a real step make the whole."""

import time
from contextlib import nullcontext

import pytest
import torch

from gptexp.config import ModelConfig
from gptexp.data.loader import MicroBatch
from gptexp.model import GPT
from gptexp.phases import PHASES, StepTimer, exposed_reduce_ms
from gptexp.trainer import train_step

CPU = torch.device("cpu")


def test_micro_steps_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 11.5, 11.75, 14.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timer = StepTimer(CPU)
    for phase in ("data", "forward", "data", "forward"):
        timer.mark(phase)
    assert timer.read() == {"data": 750.0, "forward": 3250.0, "backward": 0.0, "clip": 0.0, "optimizer": 0.0}


def test_every_part_of_a_step_is_in_one_phase() -> None:
    """A slow reader, a slow model and a slow update each show up where they belong, and nothing goes missing."""
    model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=32))
    slow = {"data": 0.05, "forward": 0.1, "optimizer": 0.2}
    x = torch.zeros(1, 8, dtype=torch.int64)

    def batches():  # type: ignore[no-untyped-def]
        while True:
            time.sleep(slow["data"])
            yield MicroBatch(x, x, 0, 0)

    class SlowSGD(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            time.sleep(slow["optimizer"])

    model.register_forward_pre_hook(lambda *_: time.sleep(slow["forward"]))
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    train_step(model, optimizer, batches(), 1, 0.1, 1.0, nullcontext, False)  # what only a first step pays
    before = time.perf_counter()
    timer = StepTimer(CPU)
    train_step(model, optimizer, batches(), 2, 0.1, 1.0, nullcontext, False, timer.mark)
    whole = 1e3 * (time.perf_counter() - before)
    phases = timer.read()
    assert phases.keys() == set(PHASES)
    assert 0.9 * whole < sum(phases.values()) <= whole
    assert phases["data"] >= 2 * 50
    assert phases["forward"] >= 2 * 100
    assert phases["optimizer"] >= 200


def test_without_ddp_nothing_is_reduced() -> None:
    assert exposed_reduce_ms(torch.nn.Linear(1, 1)) == 0.0
