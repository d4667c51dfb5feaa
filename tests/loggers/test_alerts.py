"""Warnings: each is given once, when its condition holds, and not otherwise."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from gptexp.loggers.alerts import WINDOW, Alerts

WARMUP_TOKENS = 500  # five steps


def steps(count: int, **changed: Any) -> Iterator[dict[str, Any]]:
    """The steps of a healthy run; `changed` replaces values, by a value or a function of the step."""
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
    return [(number, line) for number, step in enumerate(run) for _, line in alerts.look(step)]


def test_a_healthy_run_gets_no_warning() -> None:
    assert lines(steps(90)) == []


@pytest.mark.parametrize(
    ("changed", "at", "words"),
    [
        ({"epoch": lambda s: s / 10}, 11, "the text repeats: epoch 2 has started"),
        ({"optim/clip_fraction": 1.0}, WINDOW + 4, "more than 90% of the steps are clipped at optim.grad_clip=1"),
        ({"optim/grad_norm": lambda s: 1.0 if s < 40 else 4.0}, 40 + WINDOW // 2, "the gradient norm rises"),
        ({"perf/data_ms": 30.0}, WINDOW - 1, "30% of a step's time is spent waiting for data"),
        (
            {"perf/slowest_rank": 2, "perf/straggler_ratio": 1.6},
            WINDOW - 1,
            "rank 2 takes 1.6 times as long as the mean of the others",
        ),
    ],
)
def test_each_warning_is_given_once_at_the_step_where_its_condition_holds(
    changed: dict[str, Any], at: int, words: str
) -> None:
    [(step, line)] = lines(steps(90, **changed))
    assert words in line
    assert step == at


@pytest.mark.parametrize(
    "changed",
    [
        {"optim/clip_fraction": lambda s: 1.0 if s < 20 else 0.5},  # at the start only
        {"optim/grad_norm": lambda s: 30.0 if s < 5 else 1.0},  # every run starts like this
        {"optim/grad_norm": lambda s: 30.0 if s % 10 == 0 else 1.0},  # single spikes
        {"perf/data_ms": lambda s: 90.0 if s == 0 else 1.0},  # the first step opens the files
        {"perf/straggler_ratio": 1.6},  # another rank each time
        {"perf/slowest_rank": 2},  # always rank 2, but by little
    ],
)
def test_usual_fluctuations_get_no_warning(changed: dict[str, Any]) -> None:
    assert lines(steps(90, **changed)) == []


def test_a_run_of_one_rank_has_no_straggler() -> None:
    alone = ({k: v for k, v in step.items() if "slowest" not in k and "straggler" not in k} for step in steps(60))
    assert lines(alone) == []


def test_a_warning_of_an_earlier_attempt_is_not_repeated() -> None:
    repeating = list(steps(30, epoch=1.5))
    first = Alerts(WARMUP_TOKENS, 1.0)
    assert [about for step in repeating for about, _ in first.look(step)] == ["epoch"]
    again = Alerts(WARMUP_TOKENS, 1.0, said={"epoch"})
    assert [about for step in repeating for about, _ in again.look(step)] == []


def test_a_time_limit_too_short_for_the_warm_up_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    slow = list(steps(30, **{"perf/tokens_per_s": 10.0}))  # 2,000 tokens after 20 steps; 8,000 more take 800 s
    for deadline, said in ((799.0, ["warm-up"]), (801.0, [])):
        alerts = Alerts(10_000, 1.0, deadline)
        assert [about for step in slow for about, _ in alerts.look(step)] == said


def test_non_finite_gradient_norms_are_ignored() -> None:
    norms = [float("nan") if s % 7 == 3 else 1.0 if s < 40 else 4.0 for s in range(90)]
    [(_, line)] = lines(steps(90, **{"optim/grad_norm": lambda s: norms[s]}))
    assert "the gradient norm rises" in line


def test_stopping_within_the_warm_up_gives_a_warning() -> None:
    alerts = Alerts(WARMUP_TOKENS, 1.0)
    assert "the learning rate has not reached its peak" in str(alerts.stopped(499))
    assert alerts.stopped(500) is None
