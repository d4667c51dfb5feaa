"""The critical batch size on steps drawn from a hyperbola, and on a model that does not follow one."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize
from sweeps import write_run

from gptexp.reporting.listings.records import Point, Run, find_runs
from gptexp.reporting.statistics.analysis import analyse
from gptexp.reporting.statistics.critical import critical_batch_size, steps_to
from gptexp.reporting.words.verdict import verdict

Rng = np.random.Generator


def hyperbola(rng: Rng, critical: float, sizes: Sequence[int], noise: float = 0.03) -> dict[int, float]:
    return {b: 100 * (1 + critical / b) * math.exp(noise * rng.standard_normal()) for b in sizes}


SIZES = [2**n for n in range(12, 18)]


@pytest.mark.e2e
def test_a_critical_batch_size_within_the_tested_sizes_is_recovered() -> None:
    rng = np.random.default_rng(11)
    truth = 2**14.5
    fits = [critical_batch_size(hyperbola(rng, truth, SIZES)) for _ in range(400)]
    assert {fit.status for fit in fits} == {"bracketed"}
    found = [fit.hyperbola for fit in fits if fit.hyperbola is not None]
    assert np.mean([abs(h.tokens / truth - 1) < 0.15 for h in found]) >= 0.95
    assert 0.92 <= np.mean([h.low <= truth <= h.high for h in found]) <= 0.98
    assert np.mean([fit.misfit for fit in fits]) < 0.1


@pytest.mark.parametrize(
    ("octave", "status"),
    [
        (18.5, "lower bound only"),
        pytest.param(22, "lower bound only", marks=pytest.mark.e2e),
        pytest.param(26, "lower bound only", marks=pytest.mark.e2e),
        (11, "upper bound only"),
    ],
)
def test_one_sided_data_give_a_bound_only(octave: float, status: str) -> None:
    """The bound holds even if the steps fall as one over the batch size, without a visible critical batch size."""
    rng, critical = np.random.default_rng(12), 2.0**octave
    fits = [critical_batch_size(hyperbola(rng, critical, SIZES)) for _ in range(200)]
    assert {(fit.status, fit.hyperbola) for fit in fits} == {(status, None)}
    bounds = np.array([fit.bound for fit in fits], dtype=float)
    holds = bounds <= critical if status.startswith("lower") else bounds >= critical
    assert np.mean(holds) > 0.93  # one end of a 95% interval
    assert np.all(bounds > SIZES[-1] / 8 if status.startswith("lower") else bounds < 8 * SIZES[0])


def test_the_twenty_percent_rule_needs_no_fit() -> None:
    exact = {
        b: 100 * (1 + 1000 / b) for b in (50, 100, 200, 400, 800)
    }  # these sizes need 5% to 80% more tokens than the least
    fit = critical_batch_size(exact)
    assert (fit.twenty_percent, fit.twenty_percent_open) == (200, False)
    assert critical_batch_size({b: exact[b] for b in (50, 100)}).twenty_percent_open
    assert critical_batch_size({b: exact[b] for b in (50, 100)}).status == "too few"


def test_a_noisy_quadratic_model_is_flagged_as_a_misfit() -> None:
    """SGD on H = diag(1/i) with gradient noise of covariance H / B (Zhang et al. 2019, arXiv 1907.04164), best lr."""
    h = 1 / np.arange(1, 201)

    def loss(lr: float, batch: int, steps: float) -> float:
        decay, settled = (1 - lr * h) ** 2, lr * lr * h / batch / (1 - (1 - lr * h) ** 2)
        return float(0.5 * np.sum(h * (settled + (1 - settled) * decay**steps)))

    def steps(lr: float, batch: int) -> float:
        if loss(lr, batch, 1e7) > 0.05:
            return math.inf
        return float(optimize.brentq(lambda s: loss(lr, batch, s) - 0.05, 0, 1e7))

    best = {
        batch: min(steps(lr, batch) for lr in np.geomspace(0.02, 1.9, 40)) for batch in [2**n for n in range(1, 14)]
    }
    assert critical_batch_size(best).misfit


def test_steps_to_a_loss_are_interpolated_between_evaluations() -> None:
    course = [(10, 5.0), (20, 4.0), (30, 3.0), (40, 3.5)]
    assert steps_to(3.25, course) == pytest.approx(27.5)
    assert steps_to(4.0, course) == 20
    assert steps_to(2.0, course) is None
    assert steps_to(6.0, course) is None  # before anything was evaluated


def test_losses_of_averaged_weights_count_if_all_runs_have_them(tmp_path: Path) -> None:
    """Those of the weights themselves never get there here."""
    sizes = [256 * 2**n for n in range(5)]
    for batch in sizes:
        write_run(tmp_path / f"{batch}", batch, 0.01, 1, 4.0, schedule="constant")

    def averaged(run: Run) -> Run:
        reached = round(100 * (1 + 1024 / run.batch))  # steps to a loss of 3
        losses = ((reached // 2, 3.5), (reached, 3.0), (2 * reached, 2.9))
        return replace(run, val_ema=[Point(step, step * run.batch, 0.0, loss) for step, loss in losses])

    runs = [averaged(run) for run in find_runs(tmp_path)]
    analysis = analyse("critical", runs)
    [arm] = analysis.arms
    assert arm.target_loss == 2.9
    assert arm.critical is not None
    assert arm.critical.steps == pytest.approx({batch: 2 * round(100 * (1 + 1024 / batch)) for batch in sizes})
    assert arm.critical.hyperbola is not None
    assert arm.critical.hyperbola.tokens == pytest.approx(1024, rel=0.02)
    assert arm.averages
    assert any("of the averaged weights of 2.9000" in f.text for f in verdict(analysis).findings)

    [arm] = analyse("critical", [*runs[:-1], replace(runs[-1], val_ema=[])]).arms
    assert arm.target_loss == 4.0
    assert not arm.averages


@pytest.mark.e2e
def test_the_fewest_steps_are_those_of_a_curve_and_not_of_a_lucky_run(tmp_path: Path) -> None:
    """Seeds vary the steps by 10%, and the fastest of seven learning rates is too fast by nearly as much."""
    rng = np.random.default_rng(0)
    for batch in (2048, 4096, 8192):
        for octave in range(-3, 4):
            write_run(tmp_path / f"{batch}-{octave}", batch, 0.01 * 2.0**octave, 1, 4.0, schedule="constant")

    def noisy(run: Run) -> Run:
        least = 1000 * (1 + 4096 / run.batch)
        reached = least * math.exp(0.02 * math.log2(run.lr / 0.01) ** 2 + 0.1 * rng.standard_normal())
        return replace(run, val=[Point(0, 0, 0.0, 5.0), Point(round(reached), round(reached) * run.batch, 0.0, 3.0)])

    runs, errors, of_fastest = find_runs(tmp_path), [], []
    for _ in range(6):
        drawn = [noisy(run) for run in runs]
        [arm] = analyse("critical", drawn).arms
        assert arm.critical is not None
        for batch, steps in arm.critical.steps.items():
            least = 1000 * (1 + 4096 / batch)
            errors.append(math.log(steps / least))
            of_fastest.append(math.log(min(run.val[-1].step for run in drawn if run.batch == batch) / least))
    assert np.mean(of_fastest) < -0.06
    assert abs(np.mean(errors)) < 0.05
