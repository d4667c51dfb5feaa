"""Which micro-batch a trial settles on; that a step really runs is for a GPU (test_gpu.py)."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from gptexp import trial
from gptexp.config import Config
from gptexp.distributed import Rank
from gptexp.effective import ESTIMATED, resolve
from gptexp.errors import ConfigError

SIZES = [64, 32, 16, 8, 4, 2, 1]


@pytest.mark.parametrize("first", SIZES)
@pytest.mark.parametrize("limit", [0, 1, 5, 8, 63, 1000])
def test_the_search_ends_at_the_largest_that_runs(first: int, limit: int) -> None:
    tried: list[int] = []

    def runs(size: int) -> bool:
        tried.append(size)
        return size <= limit

    assert trial.largest(SIZES, first, runs) == next((size for size in SIZES if size <= limit), None)
    assert len(tried) == len(set(tried))


def test_only_an_error_of_memory_means_that_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each trial begins with an empty cache and counts its own peak."""
    done: list[str] = []
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: done.append(name))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7)
    errors: list[RuntimeError] = []

    def two_steps(*_: Any) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(trial, "_two_steps", two_steps)
    args: Any = (None, None, torch.device("cuda"), 1, 1)
    assert trial.taken(*args) == 7
    errors.append(torch.OutOfMemoryError("CUDA out of memory"))
    assert trial.taken(*args) == math.inf
    assert done == 2 * ["reset_peak_memory_stats", "empty_cache"]
    errors.append(RuntimeError("shapes"))
    with pytest.raises(RuntimeError, match="shapes"):
        trial.taken(*args)


def test_only_an_estimated_size_of_a_gpu_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = Config()
    cfg.batch.micro_batch_size, cfg.batch.total_batch_size = "auto", 64 * cfg.seq_len
    estimated = resolve(cfg, torch.device("cpu"), Rank())
    estimated = replace(estimated, micro_batch_size=8, reasons={**estimated.reasons, "micro_batch_size": ESTIMATED})
    asked: list[tuple[int, int]] = []

    def taken(cfg: Config, effective: object, device: object, size: int, micro_steps: int) -> float:
        asked.append((size, micro_steps))
        return size if size <= most else math.inf

    most = 32
    monkeypatch.setattr(trial, "taken", taken)
    monkeypatch.setattr(trial, "apply", lambda effective, deterministic: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    assert trial.settle_micro_batch(cfg, estimated, torch.device("cpu"), 1) == estimated
    gpu = torch.device("cuda")
    settled = trial.settle_micro_batch(cfg, estimated, gpu, 1)
    assert (settled.micro_batch_size, settled.reasons["micro_batch_size"]) == (32, trial.TRIED)
    assert asked == [(8, 2), (16, 2), (32, 2), (64, 1)]  # 64 is the whole batch: no gradients of earlier micro-steps
    asked.clear()
    most = 10**6
    assert trial.settle_micro_batch(replace(cfg), estimated, gpu, 2).micro_batch_size == 32
    assert asked == [(8, 2), (16, 2), (32, 2)]  # the whole share of a rank, beside DDP's buckets
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (16, 2000))
    assert trial.settle_micro_batch(cfg, estimated, gpu, 1).micro_batch_size == 8  # 16 would take all that is free
    assert trial.settle_micro_batch(cfg, settled, gpu, 1) == settled  # once
    most = 0
    with pytest.raises(ConfigError, match="not even one sequence fits"):
        trial.settle_micro_batch(cfg, estimated, gpu, 1)
