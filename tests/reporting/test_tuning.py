"""Which run a search makes next, from losses alone: brackets, plateaus, repeats, and how much a run will tell."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gptexp.reporting.statistics.curves import fit_curves
from gptexp.reporting.statistics.tuning import (
    FLAT,
    Goal,
    Search,
    Step,
    Trial,
    law_sizes,
    most_useful,
    next_law_steps,
    next_steps,
    regret,
    variance_left,
)

BATCH, SPREAD = 1024, 0.01
Losses = dict[float, float]


def next_lr(
    losses: Losses, diverged: tuple[float, ...] = (), running: tuple[float, ...] = (), seeds: int = 1, **goal: Any
) -> float | None:
    """The learning rate of the run that brackets the optimum next; None if it is bracketed."""
    curves = fit_curves({BATCH: {lr: [loss] for lr, loss in losses.items()}}, {BATCH: diverged}, SPREAD)
    search = Search(curves, BATCH, [Trial(BATCH, lr) for lr in running], Goal(0.25, seeds, **goal))
    step = search.bracketing()
    return None if step is None else step.trial.lr


@pytest.mark.parametrize(
    ("losses", "diverged", "running", "wanted"),
    [
        ({4.0: 3.1, 8.0: 3.0, 16.0: 3.2}, (), (), None),
        ({8.0: 3.0}, (), (), 16.0),
        ({8.0: 3.0, 16.0: 3.2}, (), (), 4.0),
        ({8.0: 3.0, 16.0: 2.8}, (), (), 32.0),
        ({4.0: 2.9, 8.0: 3.0, 16.0: 3.2}, (), (), 2.0),
        ({8.0: 3.0}, (16.0,), (), 4.0),  # a run that diverged is too high
        ({4.0: 3.1, 8.0: 3.0}, (16.0,), (), None),
        ({}, (8.0,), (), 4.0),
        ({}, (4.0, 8.0), (), 2.0),
        ({}, (8.0,), (4.0,), None),  # a lower one runs already
        ({}, (), (8.0,), 16.0),  # while it runs, the next places go to both sides
        ({}, (), (8.0, 16.0), 4.0),
    ],
)
def test_an_optimum_is_bracketed_by_octaves(
    losses: Losses, diverged: tuple[float, ...], running: tuple[float, ...], wanted: float | None
) -> None:
    assert next_lr(losses, diverged, running) == wanted


def test_a_search_begins_where_the_prior_expects_the_best_learning_rate() -> None:
    steps = next_steps(fit_curves({}, {}, SPREAD), [], Goal(0.25, 1), {BATCH: 8.0}, 0.85)
    assert steps == {BATCH: Step(Trial(BATCH, 8.0), "first")}


def test_learning_rates_stay_within_limits_and_lists() -> None:
    assert next_lr({8.0: 3.0}, high=10.0) == pytest.approx(10.0)
    assert next_lr({8.0: 3.0, 10.0: 2.9}, high=10.0) is None
    assert next_lr({8.0: 3.0}, rates={BATCH: (1.0, 8.0, 20.0)}) == 20.0
    assert next_lr({8.0: 3.0}, rates={BATCH: (0.8, 8.0, 80.0)}) == 80.0  # however wide its gaps are
    assert next_lr({8.0: 3.0, 80.0: 3.1}, rates={BATCH: (80.0, 8.0, 0.8)}) == 0.8
    assert next_lr({8.0: 3.0, 0.8: 2.9}, rates={BATCH: (0.8, 8.0)}) is None


def test_a_plateau_is_followed_until_a_loss_is_higher_than_seeds_explain() -> None:
    """Where nothing trains, or all diverge slowly, seeds decide which of three losses is lowest."""
    plateau = {4.0: 3.01, 8.0: 3.0, 16.0: 3.02}
    assert next_lr(plateau) == pytest.approx(32.0)
    assert next_lr(plateau | {32.0: 3.2}) == pytest.approx(2.0)
    assert next_lr(plateau | {32.0: 3.2, 2.0: 2.5}) == pytest.approx(1.0)  # the optimum lies there
    assert next_lr(plateau | {32.0: 3.2, 2.0: 3.2}) is None
    assert next_lr(plateau | {2.0: 3.2}, diverged=(32.0,)) is None
    assert next_lr(plateau, running=(32.0,)) == pytest.approx(2.0)
    assert next_lr(plateau, running=(2.0, 32.0)) is None
    assert next_lr(plateau, seeds=8) is None  # a second seed comes first, to know what seeds explain


def test_a_loss_far_below_that_rises_less_than_half_as_steeply_as_a_nearer_one_closes_nothing() -> None:
    """Then the lowest one may lie in a dip of a plateau, and the optimum below."""
    dip = {4.0: 2.83, 8.0: 2.9, 16.0: 2.8, 32.0: 3.2}  # 0.1 nats in the next octave, 0.015 for each in two
    assert next_lr(dip) == pytest.approx(2.0)
    assert next_lr(dip | {2.0: 2.94}) == pytest.approx(1.0)  # 0.047
    assert next_lr(dip | {2.0: 2.96}) is None  # 0.053
    assert next_lr(dip | {2.0: 2.94}, running=(1.0,)) is None
    assert next_lr({8.0: 2.9, 16.0: 2.8, 32.0: 3.2}) is None
    assert next_lr({2.0: 3.02, 4.0: 3.01, 8.0: 2.9, 16.0: 2.8, 32.0: 3.2}) is None
    assert next_lr({2.0: 2.92, 4.0: 2.91, 8.0: 2.9, 16.0: 2.8, 32.0: 3.2}) is None  # there nothing trains


def test_of_two_open_sides_the_one_with_fewer_learning_rates_is_next() -> None:
    """Else a plateau above takes all that may be tried, and an optimum below is never seen."""
    assert next_lr({4.0: 3.01, 8.0: 3.0, 16.0: 3.01, 32.0: 3.01}) == pytest.approx(2.0)


def test_three_learning_rates_that_do_not_matter_are_seldom_called_worse() -> None:
    rng, tries, wrong = np.random.default_rng(0), 2000, 0
    for losses in rng.normal(3.0, SPREAD, (tries, 3)):
        curves = fit_curves({BATCH: {2.0**i: [float(loss)] for i, loss in enumerate(losses)}}, {}, SPREAD)
        wrong += bool(curves.worse_rates(BATCH))
    assert 0.035 < wrong / tries < 0.065


def test_a_batch_size_that_is_closed_keeps_its_verdict_and_gets_no_run() -> None:
    cells = {2.0**i: [3 + 0.02 * (i - 3) ** 2, 3.0005 + 0.02 * (i - 3) ** 2] for i in (1, 2, 2.5, 3, 3.5, 4, 5)}
    open_ones = Goal(0.25, 2), Goal(0.25, 2, closed={BATCH})
    known, closed = (next_steps(fit_curves({BATCH: cells}, {}, SPREAD), [], goal, {BATCH: 8.0}, 0.85)[BATCH]
                     for goal in open_ones)  # fmt: skip
    assert known == closed == "narrow"
    few = {lr: cells[lr] for lr in (2.0, 4.0)}
    known, closed = (next_steps(fit_curves({BATCH: few}, {}, SPREAD), [], goal, {BATCH: 8.0}, 0.85)[BATCH]
                     for goal in open_ones)  # fmt: skip
    assert isinstance(known, Step)
    assert closed is None


def test_of_three_batch_sizes_for_a_law_the_order_given_does_not_choose() -> None:
    assert law_sizes([2048, 4096, 16384, 32768]) == law_sizes([32768, 16384, 4096, 2048]) == [2048, 4096, 32768]


@pytest.mark.e2e
def test_a_law_counts_a_batch_size_that_a_plateau_bounds() -> None:
    """Its two losses and a plateau are three learning rates."""
    cells = {batch: {4.0: [3.3], 8.0: [3.0, 3.01], 16.0: [3.5], 32.0: [3.52]} for batch in (1024, 4096, 16384)}
    steps = next_law_steps(fit_curves(cells, {}, SPREAD), [], Goal(0.06, 2), dict.fromkeys(cells, 8.0), 0.85)
    assert all(isinstance(step, Step) and step.why == "narrow" for step in steps.values())


@pytest.mark.e2e
def test_a_wide_interval_that_tells_the_law_little_is_not_called_narrow() -> None:
    sizes = (1024, 4096, 16384)
    cells = {b: {2.0**i: [3 + 0.01 * i * i + 0.002 * s for s in range(8)] for i in range(-3, 4)} for b in sizes}
    steps = next_law_steps(fit_curves(cells, {}, SPREAD), [], Goal(0.06, 9), dict.fromkeys(sizes, 1.0), 0.85)
    assert set(steps.values()) == {"law"}


@pytest.mark.e2e
def test_losses_that_no_curve_explains_are_not_called_flat() -> None:
    cells = {1.0: [3.1], 2.0: [3.0, 3.0001, 3.0002], 4.0: [3.1]}
    curves = fit_curves({BATCH: cells}, {BATCH: [1.5]}, 0.05)
    assert curves.by_batch[BATCH].status == "jagged"
    fit = curves.fits[BATCH]
    assert regret(fit) <= FLAT * fit.sigma
    step = Search(curves, BATCH, [], Goal(0.25, 8)).next_step()
    assert isinstance(step, Step)
    assert step.why == "narrow"


@pytest.mark.e2e
def test_a_run_between_the_lowest_loss_and_a_jump_is_made_once() -> None:
    """Also while it runs, and if it diverges; learning rates are rounded to three digits then."""
    cells = {0.00125: [3.4], 0.0025: [3.2], 0.005: [3.0], 0.01: [3.3]}

    def wanted(lr: float | None = None, loss: float | None = None, *, runs: bool = False) -> float | None:
        """The learning rate of the run that asks for the form, after one at `lr`."""
        new = {} if lr is None or loss is None else {lr: [loss]}
        diverged = [lr] if lr is not None and loss is None and not runs else []
        running = [Trial(BATCH, lr)] if lr is not None and runs else []
        curves = fit_curves({BATCH: {**cells, **new}}, {BATCH: diverged}, SPREAD)
        step = Search(curves, BATCH, running, Goal(4.0, 1)).next_step()
        return step.trial.lr if isinstance(step, Step) and step.why == "form" else None

    assert wanted() == pytest.approx(0.00707, rel=1e-3)
    assert wanted(0.00707, runs=True) is None
    assert wanted(0.00707) is None
    assert wanted(0.00707, 3.2) is None


def test_the_noise_is_measured_at_the_lowest_loss() -> None:
    curves = fit_curves({BATCH: {4.0: [3.2], 8.0: [3.0], 16.0: [3.1], 32.0: [3.6]}}, {}, SPREAD)
    step = next_steps(curves, [], Goal(0.25, 8), {BATCH: 8.0}, 0.85)[BATCH]
    assert isinstance(step, Step)
    assert (step.trial, step.why) == (Trial(BATCH, 8.0, repeat=1), "noise")


def test_the_variance_that_a_run_leaves_is_that_of_a_normal_distribution() -> None:
    rng = np.random.default_rng(0)
    root = rng.standard_normal((4, 4))  # of the optimum and of the losses at three learning rates
    draws = rng.standard_normal((500_000, 4)) @ root.T
    noise = np.array([0.5, 1.0, 2.0])
    posterior = SimpleNamespace(loss=lambda batch, x: draws[:, 1:], noise=lambda batch, x: np.tile(noise, (2, 1)))
    fit: Any = SimpleNamespace(batch=BATCH, posterior=posterior)
    shares = variance_left(fit, draws[:, 0], [1.0], [2.0, 4.0])  # a run at the first one goes on
    covariance = root @ root.T + np.diag([0, *noise**2])

    def left(known: list[int]) -> float:
        gained = np.linalg.solve(covariance[np.ix_(known, known)], covariance[known, 0])
        return float(covariance[0, 0] - covariance[0, known] @ gained)

    assert shares == pytest.approx([left([1, i]) / left([1]) for i in (2, 3)], abs=0.01)


def test_brackets_come_first_and_then_the_most_octaves_for_the_cost() -> None:
    narrow = {1: Step(Trial(1, 1.0), "narrow", 1.0, 0.5), 2: Step(Trial(2, 1.0), "narrow", 1.0, 0.25)}
    costs = {1: 1.0, 2: 3.0, 3: 9.0}
    bracket = Step(Trial(3, 1.0), "bracket")
    assert most_useful({**narrow, 3: bracket}, costs, {1, 2, 3}) is bracket
    assert most_useful({**narrow, 3: "flat"}, costs, {1, 2}) is narrow[1]
    assert most_useful(narrow, {1: 1.0, 2: 1.0}, {1, 2}) is narrow[2]
    assert most_useful({1: "flat", 2: None}, costs, {1, 2}) is None
