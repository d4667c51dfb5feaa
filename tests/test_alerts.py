"""Warnings: each comes when what it warns of is there, once, and not otherwise."""

from collections.abc import Iterator
from typing import Any

import pytest

from gptexp.alerts import WINDOW, Alerts

WARMUP_TOKENS = 500  # five steps


def steps(count: int, **changed: Any) -> Iterator[dict[str, Any]]:
    """A healthy run, but for what is `changed`: values, or functions of the step."""
    for step in range(count):
        values: dict[str, Any] = {
            "tokens": 100 * (step + 1),
            "epoch": 0.01 * step,
            "optim/clip_fraction": 0.3,
            "optim/grad_norm": 1.0 + 0.1 * (step % 3),
            "perf/data_ms": 1.0,
            "perf/step_ms": 100.0,
            "perf/slowest_rank": step % 4,
            "perf/straggler_ratio": 1.1,
        }
        yield {**values, **{key: value(step) if callable(value) else value for key, value in changed.items()}}


def lines(run: Iterator[dict[str, Any]]) -> list[tuple[int, str]]:
    alerts = Alerts(WARMUP_TOKENS, 1.0)
    return [(number, line) for number, step in enumerate(run) for line in alerts.look(step)]


def test_a_healthy_run_is_left_alone() -> None:
    assert lines(steps(90)) == []


@pytest.mark.parametrize(
    ("changed", "at", "words"),
    [
        ({"epoch": lambda s: s / 10}, 11, "the text repeats: epoch 2 has begun"),
        ({"optim/clip_fraction": 1.0}, WINDOW + 4, "more than 90% of the steps are clipped at optim.grad_clip=1"),
        ({"optim/grad_norm": lambda s: 1.0 if s < 40 else 4.0}, 40 + WINDOW // 2, "the gradient norm climbs"),
        ({"perf/data_ms": 30.0}, WINDOW - 1, "30% of a step's time is spent waiting for data"),
        ({"perf/slowest_rank": 2, "perf/straggler_ratio": 1.6}, WINDOW - 1, "rank 2 is 1.6 times as slow"),
    ],
)
def test_each_thing_is_said_once_and_when_it_shows(changed: dict[str, Any], at: int, words: str) -> None:
    [(step, line)] = lines(steps(90, **changed))
    assert words in line
    assert step == at


@pytest.mark.parametrize(
    "changed",
    [
        {"optim/clip_fraction": lambda s: 1.0 if s < 20 else 0.5},  # early, and no more
        {"optim/grad_norm": lambda s: 30.0 if s < 5 else 1.0},  # as every run begins
        {"optim/grad_norm": lambda s: 30.0 if s % 10 == 0 else 1.0},  # spikes
        {"perf/data_ms": lambda s: 90.0 if s == 0 else 1.0},  # the first step opens the files
        {"perf/straggler_ratio": 1.6},  # now this rank, now that
        {"perf/slowest_rank": 2},  # always the same, by little
    ],
)
def test_what_is_usual_is_not_worth_a_line(changed: dict[str, Any]) -> None:
    assert lines(steps(90, **changed)) == []


def test_a_run_without_peers_has_no_straggler() -> None:
    alone = ({k: v for k, v in step.items() if "slowest" not in k and "straggler" not in k} for step in steps(60))
    assert lines(alone) == []


def test_stopping_within_the_warm_up_is_said() -> None:
    alerts = Alerts(WARMUP_TOKENS, 1.0)
    assert "the learning rate has not reached its peak" in str(alerts.stopped(499))
    assert alerts.stopped(500) is None
