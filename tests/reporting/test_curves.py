"""Optima and their intervals for losses with a known optimum: drawn from formulas, with noise of known size."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from drawn import SIGMA, draw, steep, u_curve, wall
from scipy import stats

from gptexp.reporting.curves import fit_curves

USUAL = 0.003  # the spread of seeds that the shapes of curves without seeds are judged by
Truth = Callable[[float], float]


def held_and_given(rng: np.random.Generator, sweeps: int, sizes: int, **kwargs: Any) -> tuple[float, float, float]:
    """Shares of intervals that hold the optimum, and of batch sizes that have one; median width in octaves."""
    held = found = 0
    widths = []
    for _ in range(sweeps):
        optima = list(rng.uniform(-0.5, 0.5, sizes))
        curves = fit_curves(draw(rng, optima, **kwargs), {}, USUAL)
        for truth, o in zip(optima, (curve.optimum for curve in curves.of.values()), strict=True):
            if o is not None and o.low is not None and o.high is not None:
                found += 1
                held += o.low <= 2**truth <= o.high
                widths.append(math.log2(o.high / o.low))
    return held / found, found / (sweeps * sizes), float(np.median(widths))


SWEEPS = [
    {"sizes": 3}, {"sizes": 3, "seeds": 3, "lrs": 7}, {"sizes": 1}, {"sizes": 6, "lrs": 7},
    {"sizes": 3, "sigma": 0.001}, {"sizes": 4, "sigma": 0.0015, "growth": 2.0}, {"sizes": 3, "heavy_tails": True},
    {"sizes": 4, "seeds": 3, "sigma": 0.0015, "growth": 2.0, "lrs": 7},
]  # fmt: skip


@pytest.mark.parametrize(
    ("truth", "sweeps"),
    [
        pytest.param(None, 40, id="parabola-40"),
        pytest.param(steep, 40, id="steep-40", marks=pytest.mark.e2e),
        pytest.param(wall, 40, id="wall-40", marks=pytest.mark.e2e),
        pytest.param(None, 300, id="parabola-300", marks=pytest.mark.slow),
        pytest.param(steep, 300, id="steep-300", marks=pytest.mark.slow),
        pytest.param(wall, 300, id="wall-300", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kwargs", SWEEPS, ids=str)
def test_intervals_of_optima_hold_the_truth(truth: Truth | None, kwargs: dict[str, Any], sweeps: int) -> None:
    """Also for skewed curves, for heavy tails, and for noise that doubles from one batch size to the next."""
    held, given, width = held_and_given(np.random.default_rng(2), sweeps, truth=truth, **kwargs)
    print(f"held {held:.3f} given {given:.2f} width {width:.2f} octaves")
    assert held >= (0.92 if sweeps == 300 else 0.88)
    assert given >= 0.8
    assert width < 1.25


def test_without_seeds_there_is_no_interval_and_no_noise() -> None:
    rng = np.random.default_rng(3)
    curves = fit_curves(draw(rng, [0.2, -0.2], seeds=1), {}, USUAL)
    for truth, curve in zip((0.2, -0.2), curves.of.values(), strict=True):
        assert (curve.status, curve.noise) == ("bracketed", None)
        assert curve.optimum is not None
        assert curve.optimum.low is None
        assert curve.bracket is not None
        assert curve.bracket[0] < 2**truth < curve.bracket[1]
        assert curve.bracket[0] < curve.optimum.lr < curve.bracket[1]
    cells = [(4096, 1.0), (4096, 2.0)]
    assert curves.ties(*cells) is None


def test_the_first_sweep_of_a_new_user() -> None:
    """Two batch sizes, four learning rates, one seed: nats apart, which no seed explains."""
    grid = (3e-3, 1e-2, 3e-2, 9e-2)
    losses = {1024: (8.94, 5.23, 4.47, 4.18), 2048: (9.2, 6.1, 4.78, 5.01)}
    sweep = {b: {lr: [loss] for lr, loss in zip(grid, of, strict=True)} for b, of in losses.items()}
    curves = fit_curves(sweep, {}, 0.03)
    falls, bracketed = curves.of.values()
    assert (falls.status, falls.best, falls.next_lr) == ("not bracketed", 9e-2, pytest.approx(0.27))
    assert (bracketed.status, bracketed.bracket, bracketed.best) == ("bracketed", (1e-2, 9e-2), 3e-2)
    three = {b: {lr: of[lr] for lr in grid[:3]} for b, of in sweep.items()}
    assert [(c.status, c.next_lr) for c in fit_curves(three, {}, 0.03).of.values()] == [
        ("not bracketed", pytest.approx(9e-2))
    ] * 2


def test_seeds_of_one_batch_size_give_another_no_interval() -> None:
    rng = np.random.default_rng(4)
    sweep = draw(rng, [0.1, 0.1])
    sweep[8192] = {lr: of_seeds[:1] for lr, of_seeds in sweep[8192].items()}
    with_seeds, without = fit_curves(sweep, {}, USUAL).of.values()
    assert with_seeds.noise is not None
    assert without.noise is None
    assert without.optimum is not None
    assert without.optimum.low is None


def test_a_large_noise_at_one_batch_size_decides_what_is_clear_at_another() -> None:
    """The losses at 8,192 lie 0.2 nats apart: clear if seeds usually move 0.03, not beside seeds that move 0.14."""
    apart = {1.0: 4.2, 2.0: 4.0, 4.0: 4.2}
    sweep = {
        4096: {lr: [loss, loss + 0.2] for lr, loss in {0.5: 4.6, **apart, 8.0: 4.6}.items()},
        8192: {lr: [loss] for lr, loss in apart.items()},
    }
    with_seeds, without = fit_curves(sweep, {}, 0.03).of.values()
    assert with_seeds.noise is not None
    assert with_seeds.noise.is_sure
    assert without.status == "flat"
    assert fit_curves({8192: sweep[8192]}, {}, 0.03).of[8192].status == "bracketed"
    sweep[4096] = {lr: [loss, loss + 0.001] for lr, (loss, _) in sweep[4096].items()}
    assert fit_curves(sweep, {}, 0.05).of[8192].status == "flat"  # the noise may grow with the batch size


def test_a_falsely_low_cell_after_a_flat_part_is_left_out() -> None:
    losses = {2.0**x: [loss] for x, loss in enumerate((4.5, 4.3, 4.2, 4.25, 3.5))}
    [curve] = fit_curves({1: losses}, {}, 0.02).of.values()
    assert [outlier.lr for outlier in curve.outliers] == [16.0]
    assert (curve.status, curve.best) == ("not bracketed", 4.0)


def test_the_lowest_loss_below_an_unstable_part_is_no_outlier() -> None:
    """Above the best learning rate losses that go up and down are usual: the best one is not left out for them."""
    curve = fit_curves({8: {1.0: [3.0], 2.0: [4.2], 4.0: [4.1], 8.0: [4.5]}}, {}, USUAL).of[8]
    assert (curve.outliers, curve.best, curve.next_lr) == ([], 1.0, 0.5)


def test_a_cell_with_an_exploded_seed_is_not_the_best() -> None:
    """As with one that diverged: the mean over its other seeds would be too low."""
    cells = ([8.9, 8.95], [5.2, 5.3], [4.5, 4.45], [4.2, 4.3], [4.1, 9.5])
    losses = dict(zip((3e-3, 1e-2, 3e-2, 9e-2, 0.27), cells, strict=True))
    [curve] = fit_curves({1024: losses}, {}, 0.03).of.values()
    assert {(found.lr, found.loss) for found in curve.outliers} == {(0.27, 4.1), (0.27, 9.5)}
    assert (curve.status, curve.best) == ("not bracketed", 9e-2)
    assert curve.next_lr == pytest.approx(math.sqrt(0.09 * 0.27))  # not beyond it


def test_the_only_cell_is_not_left_out() -> None:
    [curve] = fit_curves({1024: {0.01: [4.1, 4.12, 4.11, 9.5]}}, {}, 0.03).of.values()
    assert [found.loss for found in curve.outliers] == [9.5]
    assert (curve.status, curve.best) == ("too few", 0.01)


def test_losses_that_fall_all_the_way_are_a_trend_and_no_tie() -> None:
    """By less than what counts as clear without seeds; noise alone orders eight losses in one of 20,160 sweeps."""
    means = [4.70, 4.66, 4.63, 4.60, 4.56, 4.53, 4.50, 4.47]
    for order, upwards in ((means, True), (means[::-1], False)):
        [curve] = fit_curves({1: {2.0**i: [loss] for i, loss in enumerate(order)}}, {}, 0.051).of.values()
        assert curve.status == "not bracketed"
        assert curve.next_lr is not None
        assert (curve.next_lr > 2.0**7) == upwards
    [few] = fit_curves({1: {2.0**i: [loss] for i, loss in enumerate(means[:4])}}, {}, 0.051).of.values()
    assert few.status == "flat"


def test_a_difference_of_nats_is_never_flat() -> None:
    """Not even if the seeds differ by as much."""
    losses = {1.0: [4.0, 5.6], 2.0: [4.2, 5.7], 4.0: [5.2, 6.9]}
    [curve] = fit_curves({1: losses}, {}, 0.05).of.values()
    assert curve.noise is not None
    assert curve.noise.sigma > 0.5
    assert curve.status == "not bracketed"


def test_losses_that_fall_and_rise_twice_are_jagged() -> None:
    losses = {2.0**i: [loss, loss + 0.01] for i, loss in enumerate((4.0, 5.0, 4.1, 5.0, 4.2))}
    [curve] = fit_curves({1: losses}, {}, 0.01).of.values()
    assert (curve.status, curve.optimum, curve.bracket) == ("jagged", None, None)


@pytest.mark.parametrize(
    "losses",
    [
        {0.001: 4.4, 0.002: 4.2, 0.0020001: 4.1999, 0.004: 4.3},  # one learning rate, written in two ways
        {0.004: 4.3, 0.008: 4.24, 0.016: 4.18, 0.032: 7.0},  # a wall
        {1e-4: 8.0, 1e-3: 5.0, 1e-2: 4.45, 1e-1: 9.7},
    ],
)
def test_without_seeds_the_optimum_stays_near_the_lowest_loss(losses: dict[float, float]) -> None:
    [curve] = fit_curves({1: {lr: [loss] for lr, loss in losses.items()}}, {}, 0.01).of.values()
    o = curve.optimum
    assert o is not None
    assert curve.best is not None
    assert o.loss == min(losses.values())  # three points do not say how far below it the minimum lies
    step = min(max(lr / curve.best, curve.best / lr) for lr in losses if abs(math.log2(lr / curve.best)) > 0.1)
    assert abs(math.log2(o.lr / curve.best)) <= 0.31 * math.log2(step)


def test_learning_rates_that_tie_lie_within_the_fit() -> None:
    rng = np.random.default_rng(12)
    reached = set()
    for _ in range(30):
        for curve in fit_curves(draw(rng, [0.3, -0.3] * 3, sigma=0.01), {}, USUAL).of.values():
            o = curve.optimum
            if o is not None and o.tie_low is not None and o.tie_high is not None:
                assert 0.25 <= o.tie_low < o.lr < o.tie_high <= 4.0
                reached |= {o.tie_low, o.tie_high} & {0.25, 4.0}
    assert reached == {0.25, 4.0}


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("beyond", [0.0, pytest.param(0.4, marks=pytest.mark.e2e), 1.5])
@pytest.mark.parametrize("side", [-1, 1])
def test_an_optimum_at_the_edge_of_the_grid_never_gets_a_number(side: int, beyond: float, seeds: int) -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        loss = u_curve(side * (2 + beyond))
        sweep = {
            4096 * 2**b: {2.0**x: [loss(x) + 0.001 * rng.standard_normal() for _ in range(seeds)] for x in range(-2, 3)}
            for b in range(4)
        }
        for curve in fit_curves(sweep, {}, 0.001).of.values():
            assert (curve.status, curve.optimum) == ("not bracketed", None)
            assert curve.next_lr == pytest.approx(2.0 ** (3 * side))


def test_the_range_of_ties_is_where_the_curve_rises_by_a_significant_difference_of_two_runs() -> None:
    spread = 0.002  # of two seeds around each loss
    losses = {2.0**x: [0.02 * x * x + 3 - spread, 0.02 * x * x + 3 + spread] for x in range(-3, 4)}
    curve = fit_curves({8: losses}, {}, 0.002).of[8]
    sigma = spread * math.sqrt(2)
    octaves = math.sqrt(stats.t.ppf(0.975, 5) * sigma * math.sqrt(2) / 0.02)  # five cells of two seeds count
    assert curve.optimum is not None
    assert curve.optimum.tie_low is not None
    assert curve.optimum.tie_high is not None
    assert math.log2(curve.optimum.tie_low) == pytest.approx(-octaves, rel=0.05)
    assert math.log2(curve.optimum.tie_high) == pytest.approx(octaves, rel=0.05)


def test_a_noise_from_too_few_seeds_makes_nothing_clearer() -> None:
    """Two cells with two seeds that hardly differ by chance: a rise of a fifth of the usual spread is none."""
    losses = {1.0: [3.5], 2.0: [3.0, 3.0001], 4.0: [3.01, 3.0101]}
    assert fit_curves({8: losses}, {}, 0.05).of[8].status == "not bracketed"
    sure = {lr: [loss, loss + 0.0001, loss - 0.0001] for lr, (loss, *_) in losses.items()}
    assert fit_curves({8: sure}, {}, 0.05).of[8].status == "bracketed"


def test_identical_losses_of_two_seeds_give_an_optimum() -> None:
    losses = {2.0**x: [u_curve(0.2)(x)] * 2 for x in range(-2, 3)}
    [curve] = fit_curves({4096: losses}, {}, USUAL).of.values()
    assert curve.optimum is not None
    assert curve.optimum.lr == pytest.approx(2**0.2, rel=0.01)


def test_the_grid_is_extended_to_below_a_learning_rate_that_diverged() -> None:
    losses = {2.0**x: [u_curve(3.0)(x)] for x in range(-2, 3)}
    [curve] = fit_curves({4096: losses}, {4096: [8.0]}, USUAL).of.values()
    assert curve.status == "not bracketed"
    assert "8 diverged" in curve.why
    assert curve.next_lr == pytest.approx(math.sqrt(4.0 * 8.0))


def test_nothing_is_proposed_above_a_learning_rate_that_diverged_even_if_a_higher_one_did_not() -> None:
    losses = {0.0005: [3.4], 0.001: [3.2], 0.002: [3.1], 0.008: [3.104]}
    curve = fit_curves({8: losses}, {8: [0.004]}, 0.002).of[8]
    assert (curve.status, curve.best) == ("not bracketed", 0.002)
    assert "0.004 diverged" in curve.why
    assert curve.next_lr is not None
    assert 0.002 < curve.next_lr < 0.004


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_grid_is_not_extended_far_from_the_best_learning_rate(mirrored: bool) -> None:
    """Its neighbours are near, and the losses beside it rise little on one side: only seeds help."""
    losses = (3.5, 3.3, 3.1, 3.105, 3.106, 3.107)
    grid = {1.4**x: [loss] for x, loss in enumerate(reversed(losses) if mirrored else losses)}
    curve = fit_curves({8: grid}, {}, 0.002).of[8]
    assert (curve.status, curve.next_lr) == ("not bracketed", None)
    assert f"clearly rise {'below' if mirrored else 'above'}" in curve.why


def test_a_learning_rate_that_diverged_ends_the_bracket_above_a_known_loss() -> None:
    losses = {0.004: [3.550], 0.008: [3.529], 0.016: [3.538]}
    assert fit_curves({8: losses}, {}, 0.002).of[8].status == "not bracketed"
    curve = fit_curves({8: losses}, {8: [0.032]}, 0.002).of[8]
    assert (curve.status, curve.bracket) == ("bracketed", (0.004, 0.032))
    assert curve.why == "the loss at 0.004 is clearly higher, and training diverged at 0.032"
    assert curve.optimum is not None
    assert 0.008 < curve.optimum.lr < 0.012


def test_a_curve_that_is_flat_within_noise_gets_no_optimum() -> None:
    """Losses of a 4x128 net after 205k tokens; the standard deviation over seeds is 0.026."""
    lrs = [1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2]
    losses = {lr: [loss] for lr, loss in zip(lrs, [3.852, 3.867, 3.875, 3.825, 3.883, 3.903], strict=True)}
    [alone] = fit_curves({8192: losses}, {}, 0.026).of.values()
    losses[1e-2] += [3.825 + 0.026 * z for z in (-1.2, 0.9, 1.1, -0.8)]
    [measured] = fit_curves({8192: losses}, {}, 0.026).of.values()
    for curve in (alone, measured):
        assert (curve.status, curve.optimum, curve.tied) == ("flat", None, (1.25e-3, 4e-2))


def test_fewer_than_three_learning_rates_are_too_few() -> None:
    for lrs in (1, 2):
        [curve] = fit_curves({4096: {2.0**x: [u_curve(1)(x)] for x in range(lrs)}}, {}, USUAL).of.values()
        assert (curve.status, curve.optimum) == ("too few", None)


def test_a_skewed_curve_does_not_pull_the_optimum() -> None:
    """The cubic term moves the minimum of a parabola over seven learning rates by half an octave."""
    rng = np.random.default_rng(4)
    off, parabola = [], []
    for _ in range(40):
        truth = list(rng.uniform(-0.3, 0.3, 6))
        sweep = draw(rng, truth, lrs=7, cubic=0.15)
        for x, at_batch, curve in zip(truth, sweep.values(), fit_curves(sweep, {}, USUAL).of.values(), strict=True):
            if curve.optimum is not None:
                off.append(math.log2(curve.optimum.lr) - x)
            a, b, _ = np.polyfit(np.log2([*at_batch]), [np.mean(of) for of in at_batch.values()], 2)
            parabola.append(-b / (2 * a) - x)
    assert abs(np.mean(off)) < 0.1 < 0.4 < abs(np.mean(parabola))


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_loss_far_above_all_others_is_left_out_and_named(seeds: int) -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        sweep = draw(rng, [0.0] * 4, seeds=seeds)
        sweep[4096][2.0][0] = 25.0
        curves = fit_curves(sweep, {}, USUAL)
        [found, *others] = curves.of[4096].outliers
        assert (found.lr, found.loss) == (2.0, 25.0)
        assert [other.lr for other in others] == [2.0] * (seeds - 1)  # their mean would be too low
        assert [curve.outliers for curve in curves.of.values()][1:] == [[]] * 3
        assert [curve.status for curve in curves.of.values()] == ["bracketed"] * 4
        assert all(noise.sigma < 3 * SIGMA for noise in curves.noises.values())


@pytest.mark.parametrize(
    ("losses", "named"),
    [
        ([4.5, 4.3, 4.2, 4.25, 4.4, 3.0], 5),  # falsely low at the edge
        ([4.5, 4.3, 3.0, 4.25, 4.5], 2),  # falsely low in the middle
        ([4.5, 9.0, 4.2, 4.25, 4.4], 1),  # falsely high on the way down
        ([5.0, 4.6, 4.4, 3.6, 4.6], 3),  # falsely low beside the edge
    ],
)
def test_a_cell_that_no_curve_explains_is_left_out(losses: list[float], named: int) -> None:
    at_batch = {2.0**x: [loss] for x, loss in enumerate(losses)}
    [curve] = fit_curves({4096: at_batch}, {}, 0.02).of.values()
    assert [outlier.lr for outlier in curve.outliers] == [2.0**named]
    assert curve.status == "bracketed"


def test_curves_without_a_bad_run_have_no_outliers() -> None:
    """Heavy tails, walls and the wobble of unstable training are no reason to leave out a run."""
    rng = np.random.default_rng(6)
    found = total = 0
    for truth in (None, steep, wall):
        for seeds in (1, 2, 3):
            for _ in range(30):
                curves = fit_curves(draw(rng, [0.2, -0.2], seeds=seeds, truth=truth), {}, USUAL)
                found += sum(len(curve.outliers) for curve in curves.of.values())
                total += 10 * seeds
    assert found <= 0.002 * total


@pytest.mark.parametrize("sweeps", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_losses_get_a_verdict(sweeps: int) -> None:
    """Also those without any shape: an interval, if there is one, holds the optimum and lies within its bracket."""
    rng = np.random.default_rng(2)
    for _ in range(sweeps):
        sweep: dict[int, dict[float, list[float]]] = {}
        diverged: dict[int, list[float]] = {}
        for batch in (1, 2, 4):
            for octave in rng.choice(10, rng.integers(1, 9), replace=False):
                lr, seeds = 2.0 ** float(octave), int(rng.choice([1, 1, 2, 3, 5]))
                losses = rng.choice([4.0, 4.1, 4.2, 5.0, 9.5]) + rng.choice([0.001, 0.05, 1, 3]) * rng.normal(
                    size=seeds
                )
                if rng.random() < 0.12:
                    diverged.setdefault(batch, []).append(lr)
                else:
                    sweep.setdefault(batch, {})[lr] = list(map(float, losses))
        for curve in fit_curves(sweep, diverged, float(rng.choice([0.002, 0.05]))).of.values():
            o = curve.optimum
            assert (o is not None) == (curve.status == "bracketed")
            if o is not None and o.low is not None and o.high is not None and curve.bracket is not None:
                low, high = curve.bracket
                assert low * 0.999 <= o.low <= o.lr <= o.high <= high * 1.001
