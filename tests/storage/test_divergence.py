"""A loss that rises and stays high is a divergence. A loss with spikes or noise is not."""

import math
import random
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import events, summary
from real_runs import equal

from gptexp.config.compose import compose
from gptexp.config.schema import from_dict
from gptexp.distributed.ranks import Rank
from gptexp.process.signals import StopRequest
from gptexp.run.job import Job
from gptexp.run.rank import run
from gptexp.storage.checkpoint import TrainState
from gptexp.storage.divergence import LossTrend

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

STEPS = 10_000


def first_flagged(losses: Iterable[float], nats: float | None = 1.0, steps: int = STEPS) -> int | None:
    """The step after which the run counts as diverged; None if it never does."""
    trend = LossTrend()
    return next((step for step, loss in enumerate(losses) if trend.diverged(loss, 64, 64 * steps, nats)), None)


def falling(step: int) -> float:
    """The loss of a normal run: from 10.8 to 3.3, with noise."""
    return 3.3 + 7.5 * math.exp(-step / 300) + random.Random(step).gauss(0, 0.15)


def test_a_falling_loss_with_or_without_spikes_is_not_a_divergence() -> None:
    def spiking(step: int) -> float:
        since = step % 1000  # spikes of 1.5 nats that decay within half a percent of the run
        return falling(step) + 1.5 * math.exp(-since / 15)

    assert first_flagged(map(falling, range(STEPS))) is None
    assert first_flagged(map(spiking, range(STEPS))) is None
    assert max(spiking(step) - falling(step) for step in range(STEPS)) == pytest.approx(1.5)


@pytest.mark.parametrize("begins", [0, 200, 5000])
def test_a_loss_that_stays_high_is_detected_within_two_and_a_half_percent_of_the_run(begins: int) -> None:
    def rising(step: int) -> float:
        return falling(min(step, begins)) + min(3.0, max(0, step - begins) / 50)

    flagged = first_flagged(map(rising, range(STEPS)))
    assert flagged is not None
    assert begins + 0.01 * STEPS < flagged < begins + 0.025 * STEPS
    assert first_flagged(map(rising, range(STEPS)), nats=None) is None
    assert first_flagged(map(rising, range(STEPS)), nats=4.0) is None


def test_bumps_in_a_short_run_are_not_a_divergence() -> None:
    """The first losses are those of a nano model at 8,192 tokens a step and lr 0.032."""
    losses = [10.71, 10.2, 9.6, 8.8, 7.94, 6.9, 6.0, 5.2, 4.74, 5.0, 5.6, 6.0, 6.14, 6.0, 5.8, 5.6, 5.46]
    assert first_flagged([*losses, *[4.8] * 33], steps=50) is None
    assert first_flagged([*[10.7] * 5, *[5.0] * 20, *[9.0] * 12, *[5.0] * 13], steps=50) is None
    assert first_flagged([*[10.7] * 5, *[5.0] * 20, *[9.0] * 25], steps=50) is not None


def test_in_a_ramp_it_is_the_tokens_that_count() -> None:
    """Steps of 16 tokens, then of 64: the loss rises in the one part or in the other, and is smoothed over as many."""
    sizes = [16] * 8000 + [64] * 8000
    run, rise = sum(sizes), 0.01 * sum(sizes)

    def flagged_after(begins: int) -> float:
        """The tokens from the rise to the detection, as a share of the run."""
        trend, tokens, before = LossTrend(), 0, sum(sizes[:begins])
        for size in sizes:
            tokens += size
            since = tokens - before
            loss = 3.0 + min(3.0, max(0, since) / rise)
            if trend.diverged(loss, size, run, 1.0):
                return since / run
        raise AssertionError(f"no divergence after step {begins}")

    early, late = flagged_after(2000), flagged_after(12_000)
    assert early == pytest.approx(late, rel=0.02)
    assert 0.01 < early < 0.025


def test_a_divergence_lasts_at_least_twenty_steps() -> None:
    trend, flagged = LossTrend(), None
    for step in range(60):
        if trend.diverged(3.0 if step < 10 else 9.0, 64, 6400, 1.0) and flagged is None:
            flagged = step
    assert flagged is not None
    assert flagged >= 10 + 19


def test_repeated_bumps_do_not_accumulate() -> None:
    def bumpy(step: int) -> float:
        return falling(step) + (2.5 if step % 500 < 45 and step > 1000 else 0.0)

    assert first_flagged(map(bumpy, range(STEPS))) is None


def test_a_resumed_run_diverges_at_the_same_step() -> None:
    losses = [falling(step) for step in range(300)] + [12.0] * 300
    straight = first_flagged(losses)
    assert straight is not None
    state = TrainState()
    for step, loss in enumerate(losses):
        if step % 7 == 0:  # saved and loaded again
            state = from_dict(asdict(state), TrainState)
        if state.trend.diverged(loss, 64, 64 * STEPS, 1.0):
            break
    assert step == straight


@pytest.fixture
def wild(tiny: list[str]) -> list[str]:
    return [*tiny, "optim.lr=10", "train.max_steps=1000", "train.eval_every=0", "log.sample_tokens=0"]


def test_a_run_whose_loss_stays_high_ends_early_as_diverged(
    wild: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Job(compose(wild), tmp_path, Rank(), StopRequest())) == 5
    assert summary(tmp_path)["status"] == "diverged"
    assert len(events(tmp_path, "step")) < 60  # of 1,000
    assert "has stayed 1 nats above its minimum" in capsys.readouterr().err


@pytest.mark.e2e
def test_text_of_another_kind_ends_a_sequential_run_which_goes_on_without_the_limit(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(0)
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 500)
    (tmp_path / "b.txt").write_text("".join(draw.choices("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=12_000)))
    overrides = [
        *tiny, f"data.path=[{tmp_path / 'a.txt'},{tmp_path / 'b.txt'}]", "data.order=sequential", "optim.lr=1e-2",
        "data.tokenizer=bytes", "train.max_steps=150", "train.eval_every=0", "log.sample_tokens=0",
        "train.save_every=25",
    ]  # fmt: skip

    def outcome(name: str, *changed: str) -> tuple[int, str]:
        (tmp_path / name).mkdir(exist_ok=True)
        code = run(Job(compose([*overrides, *changed]), tmp_path / name, Rank(), StopRequest()))
        return code, capsys.readouterr().err

    code, said = outcome("ended")
    assert code == 5
    assert "data.order=sequential" in said
    assert outcome("ended", "train.divergence_nats=null")[0] == 0
    assert outcome("whole", "train.divergence_nats=null")[0] == 0
    assert equal(tmp_path / "ended", tmp_path / "whole")


@pytest.mark.slow
def test_without_the_check_the_same_run_completes(gptexp: Gptexp, wild: list[str]) -> None:
    done = gptexp("train", *wild, "train.max_steps=100", "train.divergence_nats=null")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_diverged_cell_does_not_fail_its_sweep(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    """The sweep succeeds. The same command does not run the cell again."""
    grid = ["-m", *tiny, "optim.lr=1e-3,10", "train.max_steps=200", "train.eval_every=0", "sweep.name=s"]
    done = gptexp("train", *grid)
    assert done.returncode == 0, done.stderr
    cells = tmp_path / "outputs" / "s"
    [calm], [wild] = cells.glob("lr=0.001-*"), cells.glob("lr=10.0-*")
    assert (summary(calm)["status"], summary(wild)["status"]) == ("completed", "diverged")
    assert len(events(wild, "step")) < 60
    assert "has stayed 1 nats above its minimum" in done.stderr
    again = gptexp("train", *grid)
    assert "already diverged" in again.stdout
