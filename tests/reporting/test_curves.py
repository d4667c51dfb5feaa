"""What is said of each batch size: that it agrees with itself, with the data, and with what a reader sees."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import SIGMA, draw, power_law, steep, u_curve, wall
from scipy import stats

from gptexp.reporting.statistics.curves import Curves, fit_curves
from gptexp.reporting.statistics.law import fit_law
from gptexp.reporting.statistics.posterior import NARROWEST, interval

USUAL = 0.003  # nats: the prior of the noise


def real_sweep() -> Curves:
    """44 runs of 74,688 parameters on bytes, with up to four seeds."""
    losses: dict[int, dict[float, list[float]]] = {}
    with (Path(__file__).with_name("real_sweep.csv")).open() as file:
        for row in csv.DictReader(file):
            at_batch = losses.setdefault(int(row["total_batch_size"]), {})
            at_batch.setdefault(float(row["lr"]), []).append(float(row["final_val_loss"]))
    return fit_curves(losses, {}, 0.05)


def test_a_real_sweep_with_unequal_noise() -> None:
    """Welch's test finds that 0.004 and 0.008 differ (p = 0.001), and not that 0.008 and 0.016 do (p = 0.07)."""
    curves = real_sweep()
    best = (1024, 0.008)
    others = [(1024, lr) for lr in curves.losses[1024] if lr != 0.008]
    worse = curves.worse(others, best)
    assert (1024, 0.004) in worse
    assert (1024, 0.016) not in worse
    assert (4096, 0.001) in curves.worse([(4096, 0.001)], (4096, 0.004))
    elsewhere = [(batch, lr) for batch in (4096, 16384) for lr in curves.losses[batch]]
    assert curves.worse(elsewhere, best) == set(elsewhere)  # half a nat higher, also at their own best learning rate
    assert curves.means.keys() == {(batch, lr) for batch, at_batch in curves.losses.items() for lr in at_batch}
    optimum = curves.optima[1024]
    assert 0.006 < optimum.lr < 0.010
    assert optimum.loss == pytest.approx(2.111, abs=0.02)  # the mean of four seeds at 0.008
    law = fit_law(curves.octaves)
    assert law is not None
    assert law.high < 0.5


def test_the_best_cell_is_judged_by_its_seeds_if_no_curve_explains_it() -> None:
    """Seeds that agree lie 0.3 nats below the curve: then every other cell is worse."""
    losses = {2.0**x: [3.3 + 0.01 * x, 3.31 + 0.01 * x, 3.32 + 0.01 * x, 3.305] for x in range(7)}
    losses[8.0] = [2.961, 2.985, 2.971, 2.962]
    curves = fit_curves({1024: losses}, {}, 0.05)
    best = (1024, 8.0)
    assert curves.of[1024].optimum is None
    others = {cell for cell in curves.means if cell != best}
    assert curves.worse(list(others), best) == others


def test_a_learning_rate_that_was_not_run_is_judged_by_the_curve() -> None:
    """Also beside a best cell whose seeds vary more than the noise of the curve."""
    losses = {2.0**x: [3 + 0.05 * x * x, 3.005 + 0.05 * x * x, 3.01 + 0.05 * x * x] for x in range(-3, 4)}
    losses[1.0] = [2.93, 3.0, 3.06]
    curves = fit_curves({1024: losses}, {}, 0.01)
    assert curves.worse([(1024, 5.0)], (1024, 1.0)) == {(1024, 5.0)}


def test_no_cell_beyond_a_worse_one_is_a_tie() -> None:
    """Two seeds far up on the wall, which no form explains, measure little by themselves."""
    losses = {2.0**x: [3 + 0.05 * x * x, 3.01 + 0.05 * x * x] for x in range(-2, 3)}
    losses[2.0**-3] = [4.6, 5.2]
    curves = fit_curves({1024: losses}, {}, 0.02)
    best = (1024, curves.of[1024].best)
    assert {(1024, 0.25), (1024, 0.125)} <= curves.worse([cell for cell in curves.means if cell != best], best)


FALLING_AND_FLAT = [7.1, 6.9, 6.5, 5.8, 4.8, 3.6]


@pytest.mark.parametrize("scale", [0.1, 0.3, 1.0])
@pytest.mark.parametrize(("losses", "side"), [(FALLING_AND_FLAT, "higher"), (FALLING_AND_FLAT[::-1], "lower")])
def test_a_fall_that_grows_steeper_goes_on(losses: list[float], side: str, scale: float) -> None:
    """From a plateau, which no curve with one minimum near it explains by a skew of its own."""
    sweep = {2.0**i: [3 + scale * loss, 3.02 + scale * loss] for i, loss in enumerate(losses)}
    curve = fit_curves({1024: sweep}, {}, 0.02).of[1024]
    assert (curve.status, curve.side) == ("not bracketed", side)
    assert (curve.below if side == "higher" else curve.above) < 0.1


def test_batch_sizes_with_optima_on_both_sides_of_their_grids_get_the_right_side() -> None:
    rises = {2.0**i: [3.7 + 0.05 * i + 0.008 * i * i, 3.71 + 0.05 * i + 0.008 * i * i] for i in range(6)}
    falls = {2.0**i: [3.6 - 0.05 * i, 3.61 - 0.05 * i] for i in range(6)}
    curves = fit_curves({1024: rises, 2048: falls}, {}, 0.01)
    assert [curve.side for curve in curves.of.values()] == ["lower", "higher"]


def test_an_optimum_below_which_nothing_was_run_is_not_bracketed() -> None:
    """The lowest loss is at the end of the grid: that the optimum is near it is said by the form of the curve alone."""
    losses = [(3.327, 3.335), (3.412, 3.392), (3.678, 3.738), (4.356, 4.35), (5.189, 5.194), (6.392, 6.411)]
    curve = fit_curves({16384: {1e-4 * 2**i: list(of) for i, of in enumerate(losses)}}, {}, 0.011).of[16384]
    assert (curve.status, curve.side, curve.optimum) == ("not bracketed", "lower", None)


@pytest.mark.parametrize("slope", [-0.05, 0.05])
def test_the_probability_inside_a_grid_grows_with_the_grid(slope: float) -> None:
    """A proposal that widens a grid says with which probability it brackets the optimum."""
    curves = fit_curves({8: {2.0**x: [3.0 + slope * x] for x in range(4)}}, {}, 0.02)
    curve = curves.of[8]
    assert max(curve.below, curve.above) > 0.5
    assert curves.inside(8, 1.0, 8.0) == pytest.approx(1 - curve.below - curve.above)
    wider = [curves.inside(8, 1.0 / factor, 8.0 * factor) for factor in (1, 2, 3, 4, 2.0**20)]
    assert wider == sorted({*wider})
    assert wider[-2] < 0.98  # two octaves beyond the grid is no bound
    assert wider[-1] == 1


PARABOLA = {2.0**x: [3 + 0.02 * x * x - 0.002, 3 + 0.02 * x * x + 0.002] for x in range(-3, 4)}


@pytest.mark.parametrize("seeds", [[2.9, 2.901, 2.899, 2.9], [2.97, 2.971], [2.0, 2.003]])
def test_no_optimum_is_given_where_a_curve_runs_above_seeds_that_agree(seeds: list[float]) -> None:
    curve = fit_curves({1: {**PARABOLA, 4.0: seeds}}, {}, 0.01).of[1]
    assert (curve.status, curve.optimum, curve.best) == ("jagged", None, 4.0)


def test_seeds_that_agree_far_above_a_curve_are_named() -> None:
    curve = fit_curves({1: {**PARABOLA, 4.0: [4.0, 4.001]}}, {}, 0.01).of[1]
    assert curve.optimum is not None
    assert [(outlier.lr, outlier.loss) for outlier in curve.outliers] == [(4.0, 4.0), (4.0, 4.001)]


@pytest.mark.parametrize(("higher", "is_worse"), [((3.01, 3.1, 3.21), False), ((5.01, 5.1, 5.21), True)])
def test_cells_without_a_curve_are_judged_by_their_seeds(higher: tuple[float, ...], is_worse: bool) -> None:
    lowest, other = (1024, 0.01), (2048, 0.01)
    sweep = {1024: {0.01: [3.0, 3.2, 3.1]}, 2048: {0.01: list(higher)}}
    assert fit_curves(sweep, {}, 0.05).worse([other], lowest) == ({other} if is_worse else set())
    assert fit_curves(sweep, {}, 0.05).of[1024].noise.sigma == pytest.approx(0.1)
    sweep[1024] |= {0.005: [3.4], 0.02: [3.5]}
    assert fit_curves(sweep, {}, 0.05).worse([other], lowest) == ({other} if is_worse else set())


@pytest.mark.parametrize(("limit", "is_open"), [(32.0, True), (16.0, True), (9.0, False)])
def test_an_optimum_above_all_rates_that_completed_is_not_bracketed(limit: float, is_open: bool) -> None:
    """Unless the learning rate that diverged is so close that none between them is worth a run."""
    curve = fit_curves({1: {2.0**x: [3.0 - 0.1 * x] for x in range(4)}}, {1: [limit]}, 0.01).of[1]
    assert (curve.side == "higher") == is_open
    assert (curve.optimum is None) == is_open


def test_one_learning_rate_in_two_roundings() -> None:
    """As two factors of a scaling rule may give it."""
    rounded = {0.003: [3.0, 3.01], float(np.nextafter(0.003, 1)): [3.02, 3.0], 0.0015: [3.1, 3.11], 0.006: [3.1, 3.09]}
    optimum = fit_curves({1: rounded}, {}, 0.01).of[1].optimum
    assert optimum is not None
    assert optimum.low < 0.003 < optimum.high


@pytest.mark.parametrize("many", [0, 3, 6])
def test_more_seeds_of_one_cell_do_not_silence_the_others(many: int) -> None:
    rng = np.random.default_rng(many)
    losses = {
        2.0**x: [3 + 0.02 * x * x + 0.002 * rng.standard_normal() for _ in range(8 if i == many else 1)]
        for i, x in enumerate(range(-3, 4))
    }
    curves = fit_curves({1: losses}, {}, 0.002)
    assert set(curves.means) == {(1, lr) for lr in losses}
    curve = curves.of[1]
    assert (curve.status, curve.best, curve.side) == ("bracketed", 1.0, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rates", "seeds", "sizes", "height"),
    [
        pytest.param(5, 3, 1, 0.02, marks=pytest.mark.xfail(reason="14 of 100: so few cells leave the form unknown")),
        (5, 3, 1, 0.0), (5, 3, 1, 0.1),
        *((*grid, height) for grid in ((6, 1, 3), (7, 3, 3), (5, 2, 6)) for height in (0.0, 0.02, 0.1)),
    ],
)  # fmt: skip
def test_equally_low_cells_are_rarely_called_worse(rates: int, seeds: int, sizes: int, height: float) -> None:
    """At each batch size two cells beside the optimum, or all on a flat curve, have one expected loss."""
    found, sweeps = 0, 100
    curve = {x: height * ((x + 0.5) ** 2 - 0.25) for x in range(-rates // 2, rates // 2)}
    for sweep in range(sweeps):
        rng = np.random.default_rng([rates, seeds, sizes, sweep])
        cells = {
            b: {2.0**x: list(3 + above + 0.01 * rng.standard_normal(seeds)) for x, above in curve.items()}
            for b in range(1, sizes + 1)
        }
        curves = fit_curves(cells, {}, 0.01)
        lowest = min(((b, of_batch.best) for b, of_batch in curves.of.items()), key=lambda cell: curves.means[cell])
        others = [cell for cell in curves.means if cell != lowest]
        called_worse = [lr for _, lr in curves.worse(others, lowest)]
        found += any(curve[math.log2(lr)] == curve[math.log2(lowest[1])] == 0 for lr in called_worse)
    print(found / sweeps)
    assert found <= stats.binom.ppf(0.99, sweeps, 0.06)


def test_a_steady_fall_in_a_short_sweep_is_no_tie() -> None:
    """Eight steps, a loss near that of a guess: seeds move it by hundredths."""
    [curve] = fit_curves({8192: {1e-4: [10.640], 3e-4: [10.567], 9e-4: [10.416]}}, {}, 0.04).of.values()
    assert curve.status == "not bracketed"
    assert curve.above > 0.5 > curve.below


def test_the_first_sweep_of_a_new_user() -> None:
    """Two batch sizes, four learning rates, one seed: nats apart, which no seed explains."""
    grid = (3e-3, 1e-2, 3e-2, 9e-2)
    losses = {1024: (8.94, 5.23, 4.47, 4.18), 2048: (9.2, 6.1, 4.78, 5.01)}
    sweep = {b: {lr: [loss] for lr, loss in zip(grid, of, strict=True)} for b, of in losses.items()}
    falls, bracketed = fit_curves(sweep, {}, 0.03).of.values()
    assert (falls.status, falls.best) == ("not bracketed", 9e-2)
    assert falls.side == "higher"
    assert (bracketed.status, bracketed.best, bracketed.noise_is_known) == ("bracketed", 3e-2, False)


@pytest.mark.parametrize(
    ("sweeps", "kwargs"),
    [
        (1, {}), (1, {"seeds": 1, "sigma": 0.01}), (1, {"truth": steep, "seeds": 3, "lrs": 7}),
        (1, {"truth": wall, "sigma": 0.01, "heavy_tails": True}), (1, {"growth": 3.0, "lrs": 4}),
        *(pytest.param(40, case, marks=pytest.mark.slow) for case in (
            {}, {"seeds": 1, "sigma": 0.01}, {"truth": steep, "sigma": 0.01}, {"truth": wall})),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_statements_agree_with_each_other(sweeps: int, kwargs: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    for _ in range(sweeps):
        curves = fit_curves(draw(rng, power_law(0.4, 4) + rng.uniform(-0.4, 0.4, 4), **kwargs), {}, USUAL)
        for batch, curve in curves.of.items():
            if (o := curve.optimum) is None:
                continue
            assert o.low < o.lr < o.high
            assert math.log2(o.high / o.low) >= NARROWEST - 1e-9
            assert o.loss_low <= o.loss <= o.loss_high
            assert o.tie_low <= o.lr <= o.tie_high
            cells = [(batch, lr) for lr in curves.losses[batch] if lr != curve.best]
            for _, lr in curves.worse(cells, (batch, curve.best)):
                assert not o.low <= lr <= o.high
            assert curves.posterior is not None
            drawn = np.median(curves.posterior.loss(batch, [math.log2(o.lr)]))  # the curve of the chart
            assert drawn == pytest.approx(o.loss, abs=2 * curve.noise.sigma)
        law = fit_law(curves.octaves)
        if law is not None:
            x = np.log2(law.sizes)
            ends = [interval(curves.octaves[size], 0.68) for size in law.sizes]
            for slope in np.linspace(law.exponent - 2, law.exponent + 2, 401):
                levels = [(low - slope * at, high - slope * at) for (low, high), at in zip(ends, x, strict=True)]
                if max(low for low, _ in levels) <= min(high for _, high in levels):
                    assert law.low - 1e-9 <= slope <= law.high + 1e-9


def test_the_order_of_runs_changes_nothing() -> None:
    sweep = draw(np.random.default_rng(5), [0.3, -0.2], seeds=3)
    turned = {b: {lr: of[::-1] for lr, of in reversed(at.items())} for b, at in reversed(sweep.items())}
    one, other = (fit_curves(losses, {}, USUAL) for losses in (sweep, turned))
    assert one.of == other.of
    assert one.means == other.means


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("side", [-1, 1])
def test_an_optimum_far_outside_the_grid_gets_no_number(side: int, seeds: int) -> None:
    rng = np.random.default_rng(3)
    loss = u_curve(side * 4.0)
    sweep = {
        4096 * 2**b: {2.0**x: [loss(x) + 0.001 * rng.standard_normal() for _ in range(seeds)] for x in range(-2, 3)}
        for b in range(3)
    }
    for curve in fit_curves(sweep, {}, 0.001).of.values():
        assert (curve.status, curve.optimum) == ("not bracketed", None)
        assert (curve.above if side > 0 else curve.below) > 0.9


def test_a_learning_rate_that_diverged_ends_the_grid() -> None:
    losses = {0.004: [3.550], 0.008: [3.529], 0.016: [3.531]}
    alone = fit_curves({8: losses}, {}, 0.002).of[8]
    beside = fit_curves({8: losses}, {8: [0.032]}, 0.002).of[8]
    assert beside.above < alone.above
    falling = {2.0**x: [3.0 - 0.1 * x] for x in range(4)}
    just_above = fit_curves({8: falling}, {8: [8.02]}, 0.002).of[8]
    assert just_above.above < 0.5
    assert just_above.optimum is None or just_above.optimum.high < 9


def test_a_learning_rate_that_diverged_below_the_best_one_is_jagged() -> None:
    curve = fit_curves({8: {1.0: [3.2], 2.0: [3.1], 8.0: [3.0]}}, {8: [4.0]}, 0.01).of[8]
    assert (curve.status, curve.optimum) == ("jagged", None)


def test_a_curve_that_is_flat_within_noise_gets_no_optimum() -> None:
    """Losses of a 4x128 net after 205k tokens; the standard deviation over seeds is 0.026."""
    lrs = [1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2]
    losses = {lr: [loss] for lr, loss in zip(lrs, [3.852, 3.867, 3.875, 3.825, 3.883, 3.903], strict=True)}
    [alone] = fit_curves({8192: losses}, {}, 0.026).of.values()
    losses[1e-2] += [3.825 + 0.026 * z for z in (-1.2, 0.9, 1.1, -0.8)]
    [measured] = fit_curves({8192: losses}, {}, 0.026).of.values()
    for curve in (alone, measured):
        assert (curve.status, curve.optimum) == ("flat", None)


def test_one_learning_rate_is_too_few() -> None:
    curves = fit_curves({4096: {1.0: [3.0, 3.1]}}, {}, USUAL)
    assert (curves.of[4096].status, curves.posterior, curves.worse([], (4096, 1.0))) == ("too few", None, set())


def test_seeds_of_one_batch_size_tell_another_ones_noise() -> None:
    sweep = draw(np.random.default_rng(4), [0.1, 0.1], sigma=0.01, seeds=4)
    sweep[8192] = {lr: of_seeds[:1] for lr, of_seeds in sweep[8192].items()}
    with_seeds, without = fit_curves(sweep, {}, 0.0001).of.values()
    assert (with_seeds.noise_is_known, without.noise_is_known) == (True, False)
    assert without.noise.sigma == pytest.approx(with_seeds.noise.sigma, rel=0.8)


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_loss_far_above_all_others_hardly_counts_and_is_named(seeds: int) -> None:
    rng = np.random.default_rng(5)
    sweep = draw(rng, [0.0] * 4, seeds=seeds)
    clean = fit_curves(sweep, {}, USUAL)
    sweep[4096][2.0][0] = 25.0
    curves = fit_curves(sweep, {}, USUAL)
    assert [(found.lr, found.loss) for found in curves.of[4096].outliers] == [(2.0, 25.0)]
    assert [curve.outliers for curve in curves.of.values()][1:] == [[]] * 3
    for before, after in zip(clean.optima.values(), curves.optima.values(), strict=True):
        assert abs(math.log2(after.lr / before.lr)) < 0.15
        assert after.octaves < 2 * before.octaves


@pytest.mark.parametrize("sweeps", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_curves_without_a_bad_run_have_no_outliers(sweeps: int) -> None:
    """Heavy tails, walls and the wobble of unstable training are no reason to distrust a run."""
    rng = np.random.default_rng(6)
    found = total = 0
    for truth, seeds in sweeps * [(None, 3), (steep, 1), (wall, 2)]:
        curves = fit_curves(draw(rng, [0.2, -0.2], seeds=seeds, truth=truth), {}, USUAL)
        found += sum(len(curve.outliers) for curve in curves.of.values())
        total += 10 * seeds
    assert found <= 0.01 * total


def test_seeds_that_agree_are_no_outlier() -> None:
    """Nowhere can a curve explain them: it is jagged, and no optimum is made of the other learning rates."""
    losses = {2.0**i: [loss, loss + 0.01, loss - 0.01] for i, loss in enumerate((4.0, 5.0, 4.1, 5.0, 4.2))}
    [curve] = fit_curves({1: losses}, {}, 0.01).of.values()
    assert (curve.status, curve.optimum, curve.best, curve.outliers) == ("jagged", None, 1.0, [])


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
    assert curve.optimum is not None
    neighbours = sorted(abs(math.log2(lr / curve.best)) for lr in losses if abs(math.log2(lr / curve.best)) > 0.1)
    assert abs(math.log2(curve.optimum.lr / curve.best)) <= 0.4 * neighbours[0]


@pytest.mark.parametrize("sweeps", [3, pytest.param(400, marks=pytest.mark.slow)])
def test_any_losses_get_a_verdict(sweeps: int) -> None:
    """Also those without any shape."""
    rng = np.random.default_rng(2)
    for _ in range(sweeps):
        sweep: dict[int, dict[float, list[float]]] = {}
        diverged: dict[int, list[float]] = {}
        for batch in (1, 2, 4):
            for octave in rng.choice(10, rng.integers(1, 9), replace=False):
                lr, seeds = 2.0 ** float(octave), int(rng.choice([1, 1, 2, 3, 5]))
                level = rng.choice([4.0, 4.1, 4.2, 5.0, 9.5])
                losses = level + rng.choice([0.0, 0.001, 0.05, 1, 3]) * rng.normal(size=seeds)
                if rng.random() < 0.12:
                    diverged.setdefault(batch, []).append(lr)
                else:
                    sweep.setdefault(batch, {})[lr] = list(map(float, losses))
        curves = fit_curves(sweep, diverged, float(rng.choice([0.002, 0.05])))
        fit_law(curves.octaves)
        for curve in curves.of.values():
            assert (curve.optimum is not None) == (curve.status == "bracketed")
            if (o := curve.optimum) is not None:
                assert all(map(math.isfinite, (o.lr, o.low, o.high, o.loss, o.loss_low, o.loss_high)))
                assert o.low < o.lr < o.high


def test_identical_losses_of_two_seeds_give_an_optimum() -> None:
    losses = {2.0**x: [u_curve(0.2)(x)] * 2 for x in range(-2, 3)}
    [curve] = fit_curves({4096: losses}, {}, USUAL).of.values()
    assert curve.optimum is not None
    assert curve.optimum.lr == pytest.approx(2**0.2, rel=0.03)


def test_a_run_within_the_range_loses_less_than_a_seeds_spread() -> None:
    losses = {2.0**x: [0.02 * x * x + 3 + SIGMA * z for z in (-1, 0, 1)] for x in range(-3, 4)}
    curve = fit_curves({8: losses}, {}, SIGMA).of[8]
    octaves = math.sqrt(curve.noise.sigma / 0.02)
    assert curve.optimum is not None
    assert math.log2(curve.optimum.tie_low) == pytest.approx(-octaves, rel=0.25)
    assert math.log2(curve.optimum.tie_high) == pytest.approx(octaves, rel=0.25)
