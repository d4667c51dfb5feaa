"""The phases of a step: micro-steps are summed, and the phases of a step add up to all of it."""

import time
from contextlib import nullcontext

import pytest
import torch

from gptexp.config.metrics import Metric
from gptexp.config.schema import ModelConfig
from gptexp.data.loader import MicroBatch
from gptexp.distributed.reduction import MeanReduction
from gptexp.model.gpt import GPT
from gptexp.training.phases import StepTimer, Stopwatch, exposed_reduce_ms
from gptexp.training.step import TrainStep

CPU = torch.device("cpu")


def in_ms(data: float, forward: float, backward: float, clip: float, optimizer: float) -> dict[str, float]:
    return {"perf/data_ms": data, "perf/forward_ms": forward, "perf/backward_ms": backward, "perf/clip_ms": clip,
            "perf/optimizer_ms": optimizer}  # fmt: skip


def test_the_time_of_a_phase_is_summed_over_micro_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 11.5, 11.75, 14.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timer = StepTimer(CPU)
    for phase in (Metric.DATA_MS, Metric.FORWARD_MS) * 2:
        timer.mark(phase)
    assert timer.read() == in_ms(750.0, 3250.0, 0.0, 0.0, 0.0)


def test_every_part_of_a_step_is_in_one_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the reader, the model, a gradient, clipping and the update advance the clock, each in its own phase."""
    now = 0.0

    def take(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=32))
    x = torch.zeros(1, 8, dtype=torch.int64)

    def batches():  # type: ignore[no-untyped-def]
        while True:
            take(0.5)
            yield MicroBatch(x, x, 0, 0)

    class SlowSGD(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            take(4)

    model.register_forward_pre_hook(lambda *_: take(1))
    model.wpe.weight.register_post_accumulate_grad_hook(lambda _: take(2))
    plain_clip = torch.nn.utils.clip_grads_with_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda *args: (take(8), plain_clip(*args))[1])
    timer = StepTimer(CPU)
    optimizer, mean = SlowSGD(model.parameters(), lr=0.1), MeanReduction(None)
    optimizer.param_groups[0]["initial_lr"] = 0.1
    step = TrainStep(model, optimizer, mean, 1.0, nullcontext, dropout=False)
    step(batches(), 2, lr_factor=1.0, timer=timer)
    phases = timer.read()
    assert phases == in_ms(1000.0, 2000.0, 4000.0, 8000.0, 4000.0)
    assert sum(phases.values()) == 1e3 * now


def test_the_reduction_time_is_zero_without_ddp() -> None:
    assert exposed_reduce_ms(torch.nn.Linear(1, 1)) == 0.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lap_lasts_since_the_previous_one_without_the_paused_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the paused work fails."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    watch = Stopwatch()
    clock.now += 3
    assert watch.lap() == 3

    def fail() -> None:
        clock.now += 50
        raise OSError("full")

    for _ in range(2):
        clock.now += 1
        with pytest.raises(OSError, match="full"), watch.paused():
            fail()
        clock.now += 2
    assert (watch.lap(), watch.lap()) == (6, 0)
    clock.now += 4
    assert watch.lap() == 4
