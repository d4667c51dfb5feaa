"""`Stopwatch` with a simulated clock."""

import time

import pytest

from gptexp.training.phases import Stopwatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_a_lap_lasts_from_the_start_or_the_previous_lap(clock: Clock) -> None:
    watch = Stopwatch()
    clock.now += 3
    assert watch.lap() == 3
    clock.now += 5
    assert watch.lap() == 5
    assert watch.lap() == 0


def test_paused_time_belongs_to_no_lap(clock: Clock) -> None:
    watch = Stopwatch()
    clock.now += 1
    for _ in range(2):
        with watch.paused():
            clock.now += 50
        clock.now += 2
    assert watch.lap() == 5
    clock.now += 4
    assert watch.lap() == 4


def test_time_paused_before_an_error_belongs_to_no_lap(clock: Clock) -> None:
    watch = Stopwatch()
    clock.now += 1

    def fail() -> None:
        clock.now += 50
        raise OSError("full")

    with pytest.raises(OSError, match="full"), watch.paused():
        fail()
    clock.now += 2
    assert watch.lap() == 3
