"""Optima and their intervals for losses with a known optimum: drawn from formulas, with noise of known size."""

import math

import numpy as np
import pytest
from drawn import SIGMA, draw, u_curve
from scipy import optimize, stats

from gptexp.reporting.curves import fit_curves, fit_parabola
from gptexp.reporting.noise import Noise


def test_the_parabola_and_its_covariance_equal_numpys_least_squares() -> None:
    rng = np.random.default_rng(0)
    losses = {
        2.0**x: [u_curve(0.3)(x) + rng.normal(0, 0.01) for _ in range(n)] for x, n in ((-2, 1), (-1, 2), (0, 3), (1, 1))
    }
    fit = fit_parabola(losses)
    x = np.array([math.log2(lr) for lr, of in losses.items() for _ in of])
    y = np.array([loss for of in losses.values() for loss in of])
    (a, b, c), covariance = np.polyfit(x - fit.centre, y, 2, cov="unscaled")
    assert (fit.a, fit.b, fit.c) == pytest.approx((a, b, c))
    np.testing.assert_allclose(fit.covariance, covariance)
    assert fit.minimum == pytest.approx(optimize.minimize_scalar(fit.at, bounds=(-2, 2)).x, abs=1e-4)
    means = np.array([np.mean(of) for of in losses.values()])
    off = [len(of) * (mean - fit.at(math.log2(lr))) ** 2 for (lr, of), mean in zip(losses.items(), means, strict=True)]
    assert fit.residual == pytest.approx(sum(off))


def test_the_interval_of_the_minimum_equals_a_scan_of_the_slope() -> None:
    """The interval of Fieller against its definition: a t-test of the slope at each learning rate of a fine grid."""
    rng = np.random.default_rng(1)
    fit = fit_parabola({2.0**x: [u_curve(0.2)(x) + rng.normal(0, 0.004)] for x in range(-2, 3)})
    noise = Noise(0.004, 7, "")
    low, high = fit.interval(noise) or pytest.fail("unbounded")
    x = np.linspace(-2, 2, 40_001) - fit.centre
    slope = 2 * fit.a * x + fit.b
    towards = np.stack([2 * x, np.ones_like(x)], axis=1)
    spread = noise.sigma * np.sqrt(np.einsum("ni,ij,nj->n", towards, fit.covariance[:2, :2], towards))
    inside = x[np.abs(slope / spread) <= stats.t.ppf(0.975, 7)] + fit.centre
    assert (low, high) == pytest.approx((inside.min(), inside.max()), abs=2e-4)
    assert fit.interval(Noise(0.1, 7, "")) is None  # the curvature may be zero


@pytest.mark.parametrize("sweeps", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kwargs", [{}, {"seeds": 1}, {"sigma": 0.006}, {"lrs": 7}, {"sizes": 3}, {"sizes": 3, "seeds": 2}, {"sizes": 1}],
    ids=str,
)  # fmt: skip
def test_intervals_of_optima_have_the_stated_coverage(sweeps: int, kwargs: dict[str, float]) -> None:
    kwargs = {**kwargs}
    rng = np.random.default_rng(2)
    sizes = int(kwargs.pop("sizes", 6))
    held = found = 0
    for _ in range(sweeps):
        truth = list(rng.uniform(-0.3, 0.3, sizes))
        curves = fit_curves(draw(rng, truth, **kwargs), {})  # type: ignore[arg-type]
        for optimum, curve in zip(truth, curves.of.values(), strict=True):
            if curve.optimum is not None:
                found += 1
                held += curve.optimum.low <= 2**optimum <= curve.optimum.high
    assert found > 0.9 * sweeps * len(truth)
    assert (0.92 if sweeps == 1000 else 0.88) <= held / found <= (0.98 if sweeps == 1000 else 0.99)


def test_learning_rates_that_tie_lie_within_the_grid() -> None:
    rng = np.random.default_rng(12)
    reached = set()
    for _ in range(50):
        for curve in fit_curves(draw(rng, [0.3, -0.3] * 3, sigma=0.01), {}).of.values():
            if (o := curve.optimum) is not None:
                assert 0.25 <= o.tie_low < o.lr < o.tie_high <= 4.0
                reached |= {o.tie_low, o.tie_high} & {0.25, 4.0}
    assert reached == {0.25, 4.0}


@pytest.mark.parametrize("sigma", [0.001, SIGMA])
@pytest.mark.parametrize("beyond", [0.0, 0.4, 1.5])
@pytest.mark.parametrize("side", [-1, 1])
def test_an_optimum_at_the_edge_of_the_grid_never_gets_a_number(side: int, beyond: float, sigma: float) -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        loss = u_curve(side * (2 + beyond))
        sweep = {
            2 ** (12 + b): {2.0**x: [loss(x) + sigma * rng.standard_normal()] for x in range(-2, 3)} for b in range(4)
        }
        sweep[4096][1.0] += [loss(0) + sigma * rng.standard_normal() for _ in range(4)]
        for curve in fit_curves(sweep, {}).of.values():
            assert (curve.status, curve.optimum) == ("not bracketed", None)
            assert curve.extend == pytest.approx(2.0 ** (3 * side))


def test_an_interval_wider_than_the_grid_does_not_extend_the_grid() -> None:
    """Both ends are worse by more than the noise. Between them, the curve is too flat to locate the minimum."""
    grid = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # half a decade apart, few seeds: the losses of a real sweep
    losses = {
        1024: [3.7329, 3.3086, 3.0226, 3.0627, 3.5716],
        2048: [4.0299, 3.5741, 3.1586, 3.3246, 3.5094],
        4096: [5.7502, 3.8724, 3.7187, 3.7357, 3.8516],
    }
    sweep = {b: {lr: [loss] for lr, loss in zip(grid, of, strict=True)} for b, of in losses.items()}
    sweep[2048][1e-2] += [3.1842, 3.2195, 3.2101, 3.1982]
    curve = fit_curves(sweep, {}).of[1024]
    assert (curve.status, curve.tied, curve.extend) == ("flat", (1e-2, 3e-2), None)
    assert "interval of the minimum is not within the grid" in curve.why


@pytest.mark.parametrize("side", [-1, 1])
def test_an_edge_is_detected_without_any_measure_of_noise(side: int) -> None:
    sweep = {b: {2.0**x: [u_curve(4.0 * side)(x)] for x in range(-2, 3)} for b in (4096, 8192)}
    for curve in fit_curves(sweep, {}).of.values():
        assert (curve.status, curve.extend) == ("not bracketed", pytest.approx(2.0 ** (3 * side)))


def test_identical_losses_of_two_seeds_give_an_optimum() -> None:
    losses = {2.0**x: [u_curve(0.2)(x)] * 2 for x in range(-2, 3)}
    [curve] = fit_curves({4096: losses}, {}).of.values()
    assert curve.optimum is not None
    assert curve.optimum.lr == pytest.approx(2**0.2)


def test_the_grid_is_extended_to_below_a_learning_rate_that_diverged() -> None:
    losses = {2.0**x: [u_curve(3.0)(x)] for x in range(-2, 3)}
    losses[4.0] *= 2
    losses[4.0][1] += 1e-6  # a tiny difference between two seeds
    [curve] = fit_curves({4096: losses}, {4096: [8.0]}).of.values()
    assert curve.status == "not bracketed"
    assert "8 diverged" in curve.why
    assert curve.extend == pytest.approx(math.sqrt(4.0 * 8.0))


def test_a_curve_that_is_flat_within_noise_gets_no_optimum() -> None:
    """Losses of a 4x128 net after 205k tokens; the standard deviation over seeds is 0.026."""
    lrs = [1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2]
    losses = {lr: [loss] for lr, loss in zip(lrs, [3.852, 3.867, 3.875, 3.825, 3.883, 3.903], strict=True)}
    losses[1e-2] += [3.825 + 0.026 * z for z in (-1.2, 0.9, 1.1, -0.8)]
    [curve] = fit_curves({8192: losses}, {}).of.values()
    assert (curve.status, curve.optimum, curve.tied) == ("flat", None, (1.25e-3, 4e-2))


def test_a_curve_of_few_learning_rates_or_without_a_measure_of_noise_gets_no_number() -> None:
    for lrs in (1, 2, 3):
        [curve] = fit_curves({4096: {2.0**x: [u_curve(1)(x)] for x in range(lrs)}}, {}).of.values()
        assert (curve.status, curve.optimum) == ("too few", None)


def test_skewed_curves_are_flagged_and_fitted_near_their_minimum() -> None:
    """The cubic term would move the minimum of a parabola over seven learning rates by half an octave."""
    rng = np.random.default_rng(4)
    flagged, off, wide = 0, [], []
    for _ in range(40):
        truth = list(rng.uniform(-0.3, 0.3, 6))
        sweep = draw(rng, truth, lrs=7, cubic=0.15)
        curves = fit_curves(sweep, {})
        flagged += curves.skewed
        off += [math.log2(c.optimum.lr) - x for x, c in zip(truth, curves.of.values(), strict=True) if c.optimum]
        wide += [fit_parabola(at_batch).minimum - x for x, at_batch in zip(truth, sweep.values(), strict=True)]
    assert flagged == 40
    assert abs(np.mean(off)) < 0.15 < 0.4 < abs(np.mean(wide))


@pytest.mark.parametrize(("seeds", "steep"), [(1, (-2,)), (5, (-2,)), (5, (-2, 2))])
def test_a_steep_rise_far_from_the_minimum_is_not_counted_as_noise(seeds: int, steep: tuple[int, ...]) -> None:
    """Learning rates half a decade apart. At one end the model hardly learned, which no parabola fits."""
    rng = np.random.default_rng(8)
    octaves = math.log2(10) / 2

    def loss(steps: int) -> float:
        return 3 + 0.05 * (octaves * steps) ** 2 + (1.5 if steps in steep else 0.0) + SIGMA * rng.standard_normal()

    for _ in range(20):
        sweep = {b: {0.01 * 10 ** (k / 2): [loss(k)] for k in range(-2, 3)} for b in (1024, 2048, 4096)}
        sweep[2048][0.01] += [loss(0) for _ in range(seeds - 1)]
        curves = fit_curves(sweep, {})
        assert curves.noise is not None
        assert curves.noise.sigma < 4 * SIGMA
        for curve in curves.of.values():
            assert curve.optimum is not None
            assert curve.optimum.lr == pytest.approx(0.01, rel=0.1)


def test_symmetric_curves_are_rarely_flagged_as_skewed() -> None:
    rng = np.random.default_rng(5)
    assert sum(fit_curves(draw(rng, [0.1] * 6, lrs=7), {}).skewed for _ in range(100)) <= 12
