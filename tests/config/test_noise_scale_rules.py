"""Configs whose noise scale cannot be measured, and the fix that the message proposes."""

import pytest

from gptexp.config.noise_scale import unmeasurable
from gptexp.config.rules import problems
from gptexp.config.schema import Config


def config(micro_batch_size: int | str, noise_scale: str = "on") -> Config:
    """A step of eight sequences."""
    cfg = Config()
    cfg.batch.total_batch_size, cfg.batch.micro_batch_size = 8 * cfg.seq_len, micro_batch_size
    cfg.log.noise_scale = noise_scale
    return cfg


def test_one_micro_batch_on_one_rank_is_refused() -> None:
    [problem] = problems(config(8), 1)
    assert "log.noise_scale=on: the estimate compares micro-batches, and a step on one rank has only one" in problem
    assert "use batch.micro_batch_size=4" in problem


@pytest.mark.parametrize(("micro_batch_size", "world_size"), [(4, 1), (4, 2), (1, 1)])
def test_two_micro_batches_are_accepted(micro_batch_size: int, world_size: int) -> None:
    assert problems(config(micro_batch_size), world_size) == []


def test_an_automatic_micro_batch_is_not_refused_at_composition() -> None:
    """Only the ranks know its size."""
    assert problems(config("auto"), 1) == []


def test_the_noise_scale_is_refused_for_sequential_order() -> None:
    cfg = Config()
    assert unmeasurable(cfg, 8, 2, cfg.batch.total_batch_size) is None
    cfg.data.order = "sequential"
    assert "use data.order=shuffled" in str(unmeasurable(cfg, 8, 2, cfg.batch.total_batch_size))
