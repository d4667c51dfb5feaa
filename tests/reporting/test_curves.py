"""What is said of each batch size: that it agrees with itself, with the data, and with what a reader sees."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import SIGMA, draw, power_law, steep, u_curve, wall
from scipy import stats

from gptexp.reporting.statistics.curves import Curve, Curves, fit_curves
from gptexp.reporting.statistics.law import fit_law
from gptexp.reporting.statistics.posterior import NARROWEST, interval

USUAL = 0.003  # nats: the prior of the noise


def alone(losses: Mapping[float, Sequence[float]], diverged: Sequence[float] = (), spread: float = 0.01) -> Curve:
    """The curve of a single batch size."""
    return fit_curves({1024: losses}, {1024: list(diverged)}, spread).by_batch[1024]


def seeded(losses: Sequence[float], first: float = 1.0, apart: float = 0.02) -> dict[float, list[float]]:
    """Learning rates an octave apart, each with two seeds that differ by `apart` nats; one seed if that is 0."""
    return {first * 2.0**i: [loss, loss + apart][: 2 if apart else 1] for i, loss in enumerate(losses)}


PARABOLA = {2.0**x: [3 + 0.02 * x * x - 0.002, 3 + 0.02 * x * x + 0.002] for x in range(-3, 4)}
STEEPER = [7.1, 6.9, 6.5, 5.8, 4.8, 3.6]  # from a plateau, which no curve with one minimum near it explains
AT_THE_END = [3.327, 3.412, 3.678, 4.356, 5.189, 6.392]  # that the optimum is near it, the form of the curve says alone
FLAT = [3.852, 3.867, 3.875, 3.825, 3.883, 3.903]  # 4x128, 205k tokens; the standard deviation over seeds is 0.026
FALLING = [3.0, 2.9, 2.8, 2.7]
SEEDS_AT_THE_LOWEST = [3.825 + 0.026 * z for z in (0, -1.2, 0.9, 1.1, -0.8)]
VERDICTS: dict[str, tuple[Mapping[float, Sequence[float]], Sequence[float], float, str, str | None]] = {
    "steeper": (seeded([3 + loss for loss in STEEPER]), (), 0.02, "not bracketed", "higher"),
    "steeper, mirrored": (seeded([3 + 0.1 * loss for loss in STEEPER[::-1]]), (), 0.02, "not bracketed", "lower"),
    "lowest at the end": (seeded(AT_THE_END, 1e-4, 0.008), (), 0.011, "not bracketed", "lower"),
    "few steps": ({1e-4: [10.640], 3e-4: [10.567], 9e-4: [10.416]}, (), 0.04, "not bracketed", "higher"),
    "first sweep": ({3e-3: [8.94], 1e-2: [5.23], 3e-2: [4.47], 9e-2: [4.18]}, (), 0.03, "not bracketed", "higher"),
    "first sweep, minimum": ({3e-3: [9.2], 1e-2: [6.1], 3e-2: [4.78], 9e-2: [5.01]}, (), 0.03, "bracketed", None),
    "far below": (seeded([u_curve(-4.0)(x) for x in range(-2, 3)], apart=0), (), 0.001, "not bracketed", "lower"),
    "far above": (seeded([u_curve(4.0)(x) for x in range(-2, 3)], apart=0.001), (), 0.001, "not bracketed", "higher"),
    "all fall, a gap, diverged": (seeded(FALLING, apart=0), [32.0], 0.01, "not bracketed", "higher"),
    "all fall, diverged": (seeded(FALLING, apart=0), [9.0], 0.01, "bracketed", None),
    "diverged below the best": ({1.0: [3.2], 2.0: [3.1], 8.0: [3.0]}, [4.0], 0.01, "jagged", None),
    "seeds agree below the curve": ({**PARABOLA, 4.0: [2.97, 2.971]}, (), 0.01, "jagged", None),
    "seeds agree far below": ({**PARABOLA, 4.0: [2.0, 2.003]}, (), 0.01, "jagged", None),
    "up and down": (seeded([4.0, 5.0, 4.1, 5.0, 4.2], apart=0.01), (), 0.01, "jagged", None),
    "flat": (seeded(FLAT, 1.25e-3, 0), (), 0.026, "flat", None),
    "flat, measured": ({**seeded(FLAT, 1.25e-3, 0), 1e-2: SEEDS_AT_THE_LOWEST}, (), 0.026, "flat", None),
    "one rate": ({1.0: [3.0, 3.1]}, (), USUAL, "too few", None),
    "two rates show a side": ({1e-3: [3.0, 3.01], 2e-3: [3.5, 3.51]}, (), 0.03, "too few", "lower"),
}  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_is_that_of_a_reader(name: str) -> None:
    losses, diverged, spread, status, side = VERDICTS[name]
    curve = alone(losses, diverged, spread)
    assert curve.status == status
    if side is not None:
        assert curve.side == side
        assert (curve.below if side == "higher" else curve.above) < 0.5
    assert (curve.optimum is not None) == (status == "bracketed")
    assert curve.outliers == []


@pytest.mark.e2e
def test_a_real_sweep_with_unequal_noise() -> None:
    """44 runs of 74,688 parameters on bytes, with up to four seeds.

    Welch's test finds that 0.004 and 0.008 differ (p = 0.001), and not that 0.008 and 0.016 do (p = 0.07).
    """
    losses: dict[int, dict[float, list[float]]] = {}
    with (Path(__file__).with_name("real_sweep.csv")).open() as file:
        for row in csv.DictReader(file):
            at_batch = losses.setdefault(int(row["total_batch_size"]), {})
            at_batch.setdefault(float(row["lr"]), []).append(float(row["final_val_loss"]))
    curves = fit_curves(losses, {}, 0.05)
    best = (1024, 0.008)
    worse = curves.worse([(1024, lr) for lr in curves.losses[1024] if lr != 0.008], best)
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


def worse_than_the_best(losses: Mapping[float, Sequence[float]], spread: float) -> tuple[set[float], set[float]]:
    """The learning rates other than the best one, and those of them that are significantly worse."""
    curves = fit_curves({1024: losses}, {}, spread)
    best = (1024, curves.by_batch[1024].best)
    others = {cell for cell in curves.means if cell != best}
    return {lr for _, lr in others}, {lr for _, lr in curves.worse(list(others), best)}


@pytest.mark.e2e
def test_cells_are_judged_by_their_seeds_where_no_curve_explains_them() -> None:
    """Seeds that agree lie 0.3 nats below the curve: then every other cell is worse."""
    losses = {2.0**x: [3.3 + 0.01 * x, 3.31 + 0.01 * x, 3.32 + 0.01 * x, 3.305] for x in range(7)}
    others, worse = worse_than_the_best({**losses, 8.0: [2.961, 2.985, 2.971, 2.962]}, 0.05)
    assert worse == others
    # Two seeds far up on the wall measure little by themselves, but no cell beyond a worse one is a tie.
    losses = {2.0**x: [3 + 0.05 * x * x, 3.01 + 0.05 * x * x] for x in range(-2, 3)}
    assert {0.25, 0.125} <= worse_than_the_best({**losses, 0.125: [4.6, 5.2]}, 0.02)[1]
    # A learning rate that was not run is judged by the curve, also beside a best cell whose seeds vary more than that.
    losses = {2.0**x: [3 + 0.05 * x * x, 3.005 + 0.05 * x * x, 3.01 + 0.05 * x * x] for x in range(-3, 4)}
    curves = fit_curves({1024: {**losses, 1.0: [2.93, 3.0, 3.06]}}, {}, 0.01)
    assert curves.worse([(1024, 5.0)], (1024, 1.0)) == {(1024, 5.0)}


@pytest.mark.parametrize(("higher", "is_worse"), [((3.01, 3.1, 3.21), False), ((5.01, 5.1, 5.21), True)])
def test_batch_sizes_without_a_curve_are_judged_by_their_seeds(higher: tuple[float, ...], is_worse: bool) -> None:
    lowest, other = (1024, 0.01), (2048, 0.01)
    sweep = {1024: {0.01: [3.0, 3.2, 3.1]}, 2048: {0.01: list(higher)}}
    curves = fit_curves(sweep, {}, 0.05)
    assert curves.worse([other], lowest) == ({other} if is_worse else set())
    assert (curves.posterior, curves.by_batch[1024].noise.sigma) == (None, pytest.approx(0.1))
    sweep[1024] |= {0.005: [3.4], 0.02: [3.5]}
    assert fit_curves(sweep, {}, 0.05).worse([other], lowest) == ({other} if is_worse else set())


def test_batch_sizes_with_optima_on_both_sides_of_their_grids_get_the_right_side() -> None:
    rises = seeded([3.7 + 0.05 * i + 0.008 * i * i for i in range(6)], apart=0.01)
    falls = seeded([3.6 - 0.05 * i for i in range(6)], apart=0.01)
    curves = fit_curves({1024: rises, 2048: falls}, {}, 0.01)
    assert [curve.side for curve in curves.by_batch.values()] == ["lower", "higher"]


@pytest.mark.e2e
@pytest.mark.parametrize("slope", [-0.05, 0.05])
def test_the_probability_inside_a_grid_grows_with_the_grid(slope: float) -> None:
    """A proposal that widens a grid says with which probability it brackets the optimum."""
    at = fit_curves({8: {2.0**x: [3.0 + slope * x] for x in range(4)}}, {}, 0.02).fits[8]
    assert max(at.below, at.above) > 0.5
    assert at.inside(1.0, 8.0) == pytest.approx(1 - at.below - at.above)
    wider = [at.inside(1.0 / factor, 8.0 * factor) for factor in (1, 2, 3, 4, 2.0**20)]
    assert wider == sorted({*wider})
    assert wider[-2] < 0.98  # two octaves beyond the grid is no bound
    assert wider[-1] == 1


@pytest.mark.e2e
def test_a_learning_rate_that_diverged_ends_the_grid() -> None:
    losses = {0.004: [3.550], 0.008: [3.529], 0.016: [3.531]}
    assert alone(losses, [0.032], 0.002).above < alone(losses, (), 0.002).above
    just_above = alone(seeded(FALLING, apart=0), [8.02], 0.002)
    assert just_above.above < 0.5
    assert just_above.optimum is None or just_above.optimum.high < 9


def test_more_seeds_of_one_cell_do_not_silence_the_others() -> None:
    rng = np.random.default_rng(6)
    losses = {
        2.0**x: [3 + 0.02 * x * x + 0.002 * rng.standard_normal() for _ in range(8 if x == 3 else 1)]
        for x in range(-3, 4)
    }
    curve = alone(losses, (), 0.002)
    assert (curve.status, curve.best, curve.side) == ("bracketed", 1.0, None)


def test_seeds_of_one_batch_size_tell_another_ones_noise() -> None:
    sweep = draw(np.random.default_rng(4), [0.1, 0.1], sigma=0.01, seeds=4)
    sweep[8192] = {lr: seeds[:1] for lr, seeds in sweep[8192].items()}
    with_seeds, without = fit_curves(sweep, {}, 0.0001).by_batch.values()
    assert (with_seeds.noise_is_known, without.noise_is_known) == (True, False)
    assert without.noise.sigma == pytest.approx(with_seeds.noise.sigma, rel=0.8)


def test_a_run_within_the_range_loses_less_than_a_seeds_spread() -> None:
    curve = alone({2.0**x: [0.02 * x * x + 3 + SIGMA * z for z in (-1, 0, 1)] for x in range(-3, 4)}, (), SIGMA)
    octaves = math.sqrt(curve.noise.sigma / 0.02)
    assert curve.optimum is not None
    assert math.log2(curve.optimum.tie_low) == pytest.approx(-octaves, rel=0.25)
    assert math.log2(curve.optimum.tie_high) == pytest.approx(octaves, rel=0.25)


def test_identical_losses_of_two_seeds_give_an_optimum() -> None:
    curve = alone({2.0**x: [u_curve(0.2)(x)] * 2 for x in range(-2, 3)}, (), USUAL)
    assert curve.optimum is not None
    assert curve.optimum.lr == pytest.approx(2**0.2, rel=0.03)


def test_one_learning_rate_in_two_roundings() -> None:
    """As two factors of a scaling rule may give it."""
    rounded = {0.003: [3.0, 3.01], float(np.nextafter(0.003, 1)): [3.02, 3.0], 0.0015: [3.1, 3.11], 0.006: [3.1, 3.09]}
    optimum = alone(rounded).optimum
    assert optimum is not None
    assert optimum.low < 0.003 < optimum.high


@pytest.mark.e2e
@pytest.mark.parametrize(
    "losses",
    [
        {0.001: 4.4, 0.002: 4.2, 0.0020001: 4.1999, 0.004: 4.3},  # one learning rate, written in two ways
        {0.004: 4.3, 0.008: 4.24, 0.016: 4.18, 0.032: 7.0},  # a wall
        {1e-4: 8.0, 1e-3: 5.0, 1e-2: 4.45, 1e-1: 9.7},
    ],
)
def test_without_seeds_the_optimum_stays_near_the_lowest_loss(losses: dict[float, float]) -> None:
    curve = alone({lr: [loss] for lr, loss in losses.items()})
    assert curve.optimum is not None
    neighbours = sorted(abs(math.log2(lr / curve.best)) for lr in losses if abs(math.log2(lr / curve.best)) > 0.1)
    assert abs(math.log2(curve.optimum.lr / curve.best)) <= 0.4 * neighbours[0]


# --- Outliers


def test_seeds_that_agree_far_above_a_curve_are_named() -> None:
    curve = alone({**PARABOLA, 4.0: [4.0, 4.001]})
    assert curve.optimum is not None
    assert [(outlier.lr, outlier.loss) for outlier in curve.outliers] == [(4.0, 4.0), (4.0, 4.001)]


@pytest.mark.parametrize("plateau", [[3.5, 3.49], [3.5, 3.51, 3.45, 3.6], [3.5, 3.55, 3.4, 3.5, 3.3], [3.9, 3.6, 3.7]])
def test_a_plateau_far_above_a_minimum_does_not_move_it(plateau: list[float]) -> None:
    """But losses do if nothing nearer is worse for sure, if they rise on, or fall to half and lower."""
    near = {2.0**x: [3 + 0.05 * x * x - 0.002, 3 + 0.05 * x * x + 0.002] for x in range(-3, 2)}
    jump = near | {4.0: [plateau[0]]}
    flat = jump | {2.0 ** (3 + number): [loss] for number, loss in enumerate(plateau[1:])}
    assert fit_curves({1024: flat}, {}, 0.01).near == {1024: near}
    optimum = alone(flat).optimum
    assert optimum == alone(near, diverged=[4.0]).optimum
    assert optimum is not None
    assert optimum.holds(1.0)
    curves = fit_curves({1024: flat}, {}, 0.01)
    cells = [(1024, 2.0), (1024, 4.0), (1024, 2.0 ** (1 + len(plateau)))]
    known, first, last = np.median(curves.cell_losses(cells), axis=0)  # as measured, relative to the curve's last one
    assert (first - known, last - known) == pytest.approx((plateau[0] - 3.05, plateau[-1] - 3.05), abs=0.003)
    assert curves.worse(cells, (1024, 1.0)) >= {*cells[1:]}
    small = fit_curves({1024: near | {4.0: [3.08], 8.0: [3.085], 16.0: [3.09]}}, {}, 0.01)  # no jump
    assert small.near == small.losses
    unknown = fit_curves({1024: {lr: seeds[:1] for lr, seeds in flat.items()}}, {}, 0.5)
    assert unknown.near == unknown.losses
    wall = fit_curves({1024: jump | {8.0: [plateau[0] + 0.5], 16.0: [plateau[0] + 1.5]}}, {}, 0.01)
    assert wall.near == wall.losses
    spike = fit_curves({1024: near | {4.0: [3.9], 8.0: [3.4]}}, {}, 0.01)
    assert spike.near == spike.losses


@pytest.mark.e2e
@pytest.mark.parametrize("seeds", [1, 3])
def test_a_loss_far_above_all_others_hardly_counts_and_is_named(seeds: int) -> None:
    sweep = draw(np.random.default_rng(5), [0.0] * 3, seeds=seeds)
    clean = fit_curves(sweep, {}, USUAL)
    sweep[4096][2.0][0] = 25.0
    curves = fit_curves(sweep, {}, USUAL)
    named = [[(outlier.lr, outlier.loss) for outlier in curve.outliers] for curve in curves.by_batch.values()]
    assert named == [[(2.0, 25.0)], [], []]
    for before, after in zip(clean.optima.values(), curves.optima.values(), strict=True):
        assert abs(math.log2(after.lr / before.lr)) < 0.15
        assert after.octaves < 2 * before.octaves


@pytest.mark.parametrize("sweeps", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_curves_without_a_bad_run_have_no_outliers(sweeps: int) -> None:
    """Heavy tails, walls and the wobble of unstable training are no reason to distrust a run."""
    rng = np.random.default_rng(6)
    outliers = total = 0
    for truth, seeds in sweeps * [(None, 3), (steep, 1), (wall, 2)]:
        curves = fit_curves(draw(rng, [0.2, -0.2], seeds=seeds, truth=truth), {}, USUAL)
        outliers += sum(len(curve.outliers) for curve in curves.by_batch.values())
        total += 10 * seeds
    assert outliers <= 0.01 * total


# --- What holds of any sweep


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
    false, sweeps = 0, 100
    curve = {x: height * ((x + 0.5) ** 2 - 0.25) for x in range(-rates // 2, rates // 2)}
    for sweep in range(sweeps):
        rng = np.random.default_rng([rates, seeds, sizes, sweep])
        cells = {
            b: {2.0**x: list(3 + above + 0.01 * rng.standard_normal(seeds)) for x, above in curve.items()}
            for b in range(1, sizes + 1)
        }
        curves = fit_curves(cells, {}, 0.01)
        lowest = min(((b, c.best) for b, c in curves.by_batch.items()), key=lambda cell: curves.means[cell])
        others = [cell for cell in curves.means if cell != lowest]
        called_worse = [lr for _, lr in curves.worse(others, lowest)]
        false += any(curve[math.log2(lr)] == curve[math.log2(lowest[1])] == 0 for lr in called_worse)
    print(false / sweeps)
    assert false <= stats.binom.ppf(0.99, sweeps, 0.06)


@pytest.mark.parametrize(
    ("sweeps", "kwargs"),
    [
        (1, {}), (1, {"truth": steep, "seeds": 1, "lrs": 7}),
        (1, {"truth": wall, "sigma": 0.01, "heavy_tails": True, "growth": 2.0}),
        *(pytest.param(40, case, marks=pytest.mark.slow) for case in (
            {}, {"seeds": 1, "sigma": 0.01}, {"truth": steep, "sigma": 0.01}, {"truth": wall})),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_statements_agree_with_each_other_and_do_not_depend_on_the_order_of_runs(
    sweeps: int, kwargs: dict[str, Any]
) -> None:
    rng = np.random.default_rng(3)
    for _ in range(sweeps):
        sweep = draw(rng, power_law(0.4, 4) + rng.uniform(-0.4, 0.4, 4), **kwargs)
        curves = fit_curves(sweep, {}, USUAL)
        turned = {b: {lr: seeds[::-1] for lr, seeds in reversed(at.items())} for b, at in reversed(sweep.items())}
        other = fit_curves(turned, {}, USUAL)
        assert (other.by_batch, other.means) == (curves.by_batch, curves.means)
        assert_consistent(curves)


def assert_consistent(curves: Curves) -> None:
    for batch, o in curves.optima.items():
        curve = curves.by_batch[batch]
        assert o.low < o.lr < o.high
        assert math.log2(o.high / o.low) >= NARROWEST - 1e-9
        assert o.loss_low <= o.loss <= o.loss_high
        assert o.tie_low <= o.lr <= o.tie_high
        cells = [(batch, lr) for lr in curves.losses[batch] if lr != curve.best]
        assert not [lr for _, lr in curves.worse(cells, (batch, curve.best)) if o.low <= lr <= o.high]
        drawn = np.median(curves.cell_losses([(batch, o.lr)]))  # the curve of the chart
        assert drawn == pytest.approx(o.loss, abs=2 * curve.noise.sigma)
    law = fit_law(curves.octaves)
    if law is not None:
        x = np.log2(law.sizes)
        ends = [interval(curves.octaves[size], 0.68) for size in law.sizes]
        for slope in np.linspace(law.exponent - 2, law.exponent + 2, 401):
            levels = [(low - slope * at, high - slope * at) for (low, high), at in zip(ends, x, strict=True)]
            if max(low for low, _ in levels) <= min(high for _, high in levels):
                assert law.low - 1e-9 <= slope <= law.high + 1e-9


@pytest.mark.parametrize("sweeps", [2, pytest.param(400, marks=pytest.mark.slow)])
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
        for curve in curves.by_batch.values():
            assert (curve.optimum is not None) == (curve.status == "bracketed")
            if (o := curve.optimum) is not None:
                assert all(map(math.isfinite, vars(o).values()))
                assert o.low < o.lr < o.high
