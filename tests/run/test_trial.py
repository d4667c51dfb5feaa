"""The micro-batch that trials select, on a simulated GPU. test_gpu.py has the tests on a real one."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gptexp.config.schema import Config, ModelConfig
from gptexp.distributed.ranks import Rank
from gptexp.machine.effective import Choice, Effective
from gptexp.machine.resolve import resolve
from gptexp.process.errors import ConfigError
from gptexp.run import trial
from gptexp.training.step import TrainStep
from gptexp.training.step_report import StepReport
from gptexp.training.weight_average import WeightAverage

SIZES = [64, 32, 16, 8, 4, 2, 1]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("first", SIZES)
@pytest.mark.parametrize("limit", [0, 1, 5, 8, 63, 1000])
def test_the_search_finds_the_largest_size_that_runs_and_tries_no_size_twice(first: int, limit: int) -> None:
    tried: list[int] = []

    def runs(size: int) -> bool:
        tried.append(size)
        return size <= limit

    assert trial.largest(SIZES, first, runs) == next((size for size in SIZES if size <= limit), None)
    assert len(tried) == len(set(tried))


class Gpu:
    """Simulates torch's allocator: it caches freed memory and keeps its peak until the peak is reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = self.most = 0
        for name, function in {
            "reset_peak_memory_stats": self.reset,
            "empty_cache": self.empty,
            "max_memory_reserved": lambda *_: self.most,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def reset(self, *_: object) -> None:
        self.most = self.held

    def empty(self) -> None:
        self.held = 0

    def hold(self, size: int) -> None:
        self.held = max(self.held, size)
        self.most = max(self.most, self.held)


def taken(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, size: int, error: RuntimeError | None = None) -> float:
    def two_steps(*_: Any) -> None:
        gpu.hold(size)
        if error is not None:
            raise error

    monkeypatch.setattr(trial, "_two_steps", two_steps)
    args: Any = (None, None, GPU, 1, 1)
    return trial.taken(*args)


def test_each_trial_measures_its_own_peak_and_frees_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    for size in (70, 7, 20):
        assert taken(monkeypatch, gpu, size) == size
        assert gpu.held == 0


def test_a_size_that_does_not_fit_counts_as_infinite_and_frees_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch)
    assert taken(monkeypatch, gpu, 70, torch.OutOfMemoryError("CUDA out of memory")) == math.inf
    assert gpu.held == 0
    assert taken(monkeypatch, gpu, 7) == 7


def test_any_other_error_of_a_trial_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        taken(monkeypatch, Gpu(monkeypatch), 7, RuntimeError("shapes"))


@pytest.mark.parametrize("half_life_tokens", [None, 10_000])
def test_a_trial_averages_the_weights_if_the_run_does(
    monkeypatch: pytest.MonkeyPatch, half_life_tokens: int | None
) -> None:
    """From before the first step to after the last: the copy of the weights takes memory in every step."""
    cfg = Config(model=ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=16))
    cfg.batch.total_batch_size, cfg.train.ema_half_life_tokens = 4 * 8, half_life_tokens
    course: list[object] = []

    class Step(TrainStep):
        def __call__(self, *args: Any, **kwargs: Any) -> StepReport:
            course.append("step")
            return super().__call__(*args, **kwargs)

    class Average(WeightAverage):
        def __init__(self, model: nn.Module, half_life_tokens: int) -> None:
            course.append(half_life_tokens)
            super().__init__(model, half_life_tokens)

        def update(self, step_tokens: int, updated: torch.Tensor) -> None:
            course.append(step_tokens)
            super().update(step_tokens, updated)

    monkeypatch.setattr(trial, "TrainStep", Step)
    monkeypatch.setattr(trial, "WeightAverage", Average)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    trial._two_steps(cfg, resolve(cfg, CPU, Rank()), CPU, size=2, micro_steps=2)
    assert course == (["step", "step"] if half_life_tokens is None else [10_000, "step", 32, "step", 32])


GRADIENTS = 10  # units of memory; a sequence takes one


@pytest.fixture
def cfg() -> Config:
    cfg = Config()
    cfg.batch.micro_batch_size, cfg.batch.total_batch_size = "auto", 64 * cfg.seq_len
    return cfg


@pytest.fixture
def estimated(cfg: Config) -> Effective:
    return replace(resolve(cfg, CPU, Rank()), micro_batch_size=Choice(8, "decided", "any words"))


def settle(
    monkeypatch: pytest.MonkeyPatch, cfg: Config, estimated: Effective, free: int, world_size: int = 1
) -> Effective:
    """Settle with `free` units of free memory. From the second micro-step on, accumulated gradients take some."""
    monkeypatch.setattr(trial, "taken", lambda cfg, effective, device, size, steps: size + GRADIENTS * (steps > 1))
    monkeypatch.setattr(trial, "apply", lambda effective, deterministic: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**6))
    return trial.settle_micro_batch(cfg, estimated, GPU, world_size)


@pytest.mark.parametrize(
    ("free", "world_size", "expected"),
    [
        (10**6, 1, 64),
        (10**6, 2, 32),  # the whole share of a rank
        (70, 1, 64),  # the whole batch at once: no gradients of earlier micro-steps
        (60, 1, 32),  # 32 + 10, not 64
        (40, 1, 16),  # 32 + 10 does not fit
        (40, 2, 16),  # DDP's buckets hold gradients also with one micro-step
        (26, 1, 8),  # 16 + 10 would take all that is free
        (12, 1, 1),  # smaller than the estimate
    ],
)
def test_the_largest_size_whose_step_fits_is_taken(
    monkeypatch: pytest.MonkeyPatch, cfg: Config, estimated: Effective, free: int, world_size: int, expected: int
) -> None:
    settled = settle(monkeypatch, cfg, estimated, free, world_size)
    assert (settled.micro_batch_size.value, settled.micro_batch_size.source) == (expected, "decided")
    assert replace(settled, micro_batch_size=estimated.micro_batch_size) == estimated  # nothing else changes


def test_an_error_is_raised_if_one_sequence_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, cfg: Config, estimated: Effective
) -> None:
    with pytest.raises(ConfigError, match="not even one sequence fits"):
        settle(monkeypatch, cfg, estimated, free=5)


@pytest.mark.parametrize("source", ["asked", "saved"])
def test_a_requested_or_saved_size_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, cfg: Config, estimated: Effective, source: Any
) -> None:
    given = replace(estimated, micro_batch_size=Choice(8, source, estimated.micro_batch_size.reason))
    assert settle(monkeypatch, cfg, given, free=10**6) == given


def test_a_decided_size_is_not_tried_again_at_the_next_start(
    monkeypatch: pytest.MonkeyPatch, cfg: Config, estimated: Effective
) -> None:
    settled = settle(monkeypatch, cfg, replace(estimated, device="cpu"), free=60)
    resumed = resolve(cfg, CPU, Rank(), Effective.from_dict(settled.to_dict()))
    assert settle(monkeypatch, cfg, resumed, free=10**6).micro_batch_size.value == 32


def test_a_cpu_needs_no_trial(cfg: Config, estimated: Effective) -> None:
    assert trial.settle_micro_batch(cfg, estimated, CPU, 1) == estimated
