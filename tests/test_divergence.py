"""A loss that leaves for good is told from one that spikes, and from noise."""

import math
import random
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import events, summary

from gptexp.checkpoint import TrainState
from gptexp.config import from_dict
from gptexp.divergence import LossTrend

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

STEPS = 10_000


def first_flagged(losses: Iterable[float], nats: float | None = 1.0, steps: int = STEPS) -> int | None:
    """The step after which a run has diverged."""
    trend = LossTrend()
    return next((step for step, loss in enumerate(losses) if trend.diverged(loss, steps, nats)), None)


def falling(step: int) -> float:
    """Of a run as it should be: from 10.8 to 3.3, with noise."""
    return 3.3 + 7.5 * math.exp(-step / 300) + random.Random(step).gauss(0, 0.15)


def test_a_run_that_falls_and_one_that_spikes_go_on() -> None:
    def spiking(step: int) -> float:
        since = step % 1000  # 1.5 nats, gone within half a hundredth of the run
        return falling(step) + 1.5 * math.exp(-since / 15)

    assert first_flagged(map(falling, range(STEPS))) is None
    assert first_flagged(map(spiking, range(STEPS))) is None
    assert max(spiking(step) - falling(step) for step in range(STEPS)) == pytest.approx(1.5)


@pytest.mark.parametrize("begins", [0, 200, 5000])
def test_a_loss_that_rises_for_good_is_seen_within_two_hundredths_of_the_run(begins: int) -> None:
    def rising(step: int) -> float:
        return falling(min(step, begins)) + min(3.0, max(0, step - begins) / 50)

    flagged = first_flagged(map(rising, range(STEPS)))
    assert flagged is not None
    assert begins + 0.01 * STEPS < flagged < begins + 0.025 * STEPS
    assert first_flagged(map(rising, range(STEPS)), nats=None) is None
    assert first_flagged(map(rising, range(STEPS)), nats=4.0) is None


def test_a_short_runs_bumps_are_no_divergence() -> None:
    """Of fifty steps one is two hundredths: a nano model's loss over its first steps, at 8,192 tokens and lr 0.032."""
    losses = [10.71, 10.2, 9.6, 8.8, 7.94, 6.9, 6.0, 5.2, 4.74, 5.0, 5.6, 6.0, 6.14, 6.0, 5.8, 5.6, 5.46]
    assert first_flagged([*losses, *[4.8] * 33], steps=50) is None
    assert first_flagged([*[10.7] * 5, *[5.0] * 20, *[9.0] * 12, *[5.0] * 13], steps=50) is None
    assert first_flagged([*[10.7] * 5, *[5.0] * 20, *[9.0] * 25], steps=50) is not None


def test_bumps_do_not_add_up() -> None:
    def bumpy(step: int) -> float:
        return falling(step) + (2.5 if step % 500 < 45 and step > 1000 else 0.0)

    assert first_flagged(map(bumpy, range(STEPS))) is None


def test_a_resumed_run_comes_to_the_same_step() -> None:
    losses = [falling(step) for step in range(300)] + [12.0] * 300
    straight = first_flagged(losses)
    assert straight is not None
    state = TrainState()
    for step, loss in enumerate(losses):
        if step % 7 == 0:  # saved and loaded again
            state = from_dict(asdict(state), TrainState)
        if state.trend.diverged(loss, STEPS, 1.0):
            break
    assert step == straight


def test_a_cell_whose_loss_leaves_ends_early_and_is_an_outcome(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    grid = ["-m", *tiny, "optim.lr=1e-3,10", "train.max_steps=1000", "train.eval_every=0", "sweep.name=s"]
    done = gptexp("train", *grid)
    assert done.returncode == 0, done.stderr
    cells = tmp_path / "outputs" / "s"
    [calm], [wild] = cells.glob("lr=0.001-*"), cells.glob("lr=10.0-*")
    assert (summary(calm)["status"], summary(wild)["status"]) == ("completed", "diverged")
    assert len(events(wild, "step")) < 60  # a twentieth of the run
    assert "has stayed 1 nats above its lowest" in done.stderr
    again = gptexp("train", *grid)
    assert "diverged before" in again.stdout
    stubborn = gptexp("train", *tiny, "optim.lr=10", "train.max_steps=100", "train.divergence_nats=null")
    assert stubborn.returncode == 0, stubborn.stderr
