"""The report's statistics on data whose truth is known: drawn from formulas, with noise of known size."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy import optimize, stats

from gptexp.report.critical import critical_batch_size, steps_to
from gptexp.report.curves import Losses, fit_curves, fit_parabola
from gptexp.report.law import fit_law
from gptexp.report.noise import Noise, pool, seed_noise, seeds_needed

CURVATURE, SIGMA = 0.01, 0.003  # nats per octave squared; nats (science: a small net's seeds)
Rng = np.random.Generator


def u_curve(optimum: float, cubic: float = 0.0) -> Callable[[float], float]:
    """A loss over log2(lr) that is lowest at `optimum`."""
    return lambda x: 3 + CURVATURE * ((x - optimum) ** 2 + cubic * (x - optimum) ** 3)


def draw(
    rng: Rng, optima: Sequence[float], sigma: float = SIGMA, lrs: int = 5, seeds: int = 5, cubic: float = 0.0
) -> dict[int, Losses]:
    """A sweep over learning rates an octave apart, one batch size for each optimum; seeds at the centre cell."""
    sweep: dict[int, Losses] = {}
    for number, optimum in enumerate(optima):
        loss = u_curve(optimum, cubic)
        grid = round(optimum) + np.arange(lrs) - lrs // 2
        at_batch = {2.0**x: [loss(x) + sigma * rng.standard_normal()] for x in map(float, grid)}
        if number == len(optima) // 2:
            x = float(grid[lrs // 2])
            at_batch[2.0**x] += [loss(x) + sigma * rng.standard_normal() for _ in range(seeds - 1)]
        sweep[2 ** (12 + number)] = at_batch
    return sweep


def power_law(alpha: float, sizes: int = 6) -> list[float]:
    """log2 of the best learning rates at batch sizes a factor of two apart."""
    return [alpha * (number - (sizes - 1) / 2) for number in range(sizes)]


# --- one curve -------------------------------------------------------------------------------------------------------


def test_the_parabola_is_numpys_and_its_errors_are_those_of_least_squares() -> None:
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


def test_the_interval_is_where_the_slope_may_be_zero() -> None:
    """Fieller's against its definition: a t-test of the slope at each learning rate of a fine grid."""
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
def test_intervals_of_optima_hold_the_truth_as_often_as_they_say(sweeps: int, kwargs: dict[str, float]) -> None:
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


def test_a_minimum_whose_interval_is_wider_than_the_grid_is_no_reason_to_widen_it() -> None:
    """Both ends are worse by more than noise, and between them the curve is too flat to say where it is lowest."""
    grid = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # half a decade apart, and with few seeds: a real sweep's losses
    losses = {
        1024: [3.7329, 3.3086, 3.0226, 3.0627, 3.5716],
        2048: [4.0299, 3.5741, 3.1586, 3.3246, 3.5094],
        4096: [5.7502, 3.8724, 3.7187, 3.7357, 3.8516],
    }
    sweep = {b: {lr: [loss] for lr, loss in zip(grid, of, strict=True)} for b, of in losses.items()}
    sweep[2048][1e-2] += [3.1842, 3.2195, 3.2101, 3.1982]
    curve = fit_curves(sweep, {}).of[1024]
    assert (curve.status, curve.tied, curve.extend) == ("flat", (1e-2, 3e-2), None)
    assert "wider than the grid" in curve.why


@pytest.mark.parametrize("side", [-1, 1])
def test_an_edge_is_seen_without_any_measure_of_noise(side: int) -> None:
    sweep = {b: {2.0**x: [u_curve(4.0 * side)(x)] for x in range(-2, 3)} for b in (4096, 8192)}
    for curve in fit_curves(sweep, {}).of.values():
        assert (curve.status, curve.extend) == ("not bracketed", pytest.approx(2.0 ** (3 * side)))


def test_seeds_that_agree_to_the_last_bit_are_no_reason_to_fail() -> None:
    losses = {2.0**x: [u_curve(0.2)(x)] * 2 for x in range(-2, 3)}
    [curve] = fit_curves({4096: losses}, {}).of.values()
    assert curve.optimum is not None
    assert curve.optimum.lr == pytest.approx(2**0.2)


def test_above_the_grid_a_diverged_run_bounds_what_to_try_next() -> None:
    losses = {2.0**x: [u_curve(3.0)(x)] for x in range(-2, 3)}
    losses[4.0] *= 2
    losses[4.0][1] += 1e-6  # noise, of a kind
    [curve] = fit_curves({4096: losses}, {4096: [8.0]}).of.values()
    assert curve.status == "not bracketed"
    assert "8 diverged" in curve.why
    assert curve.extend == pytest.approx(math.sqrt(4.0 * 8.0))


def test_what_is_flat_within_noise_is_called_so() -> None:
    """A 4x128 net after 205k tokens: facts that allow no optimum (seeds' standard deviation 0.026)."""
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
    """A cubic term that would pull a parabola over seven learning rates by half an octave."""
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
def test_what_is_steeper_far_from_the_minimum_does_not_pass_for_noise(seeds: int, steep: tuple[int, ...]) -> None:
    """Losses of a grid half a decade apart: at an end the model was hardly trained, and no parabola holds that."""
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


def test_straight_curves_are_rarely_called_skewed() -> None:
    rng = np.random.default_rng(5)
    assert sum(fit_curves(draw(rng, [0.1] * 6, lrs=7), {}).skewed for _ in range(100)) <= 12


# --- the law ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sweeps", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("alpha", "sizes", "seeds"), [(0.5, 6, 5), (0.0, 6, 5), (0.1, 6, 1), (1.0, 4, 5)])
def test_the_exponent_is_recovered_and_its_interval_is_honest(
    alpha: float, sizes: int, seeds: int, sweeps: int
) -> None:
    rng = np.random.default_rng(6)
    found, held = [], 0
    for _ in range(sweeps):
        law = fit_law(fit_curves(draw(rng, power_law(alpha, sizes), seeds=seeds), {}))
        if law is None:  # fits to few learning rates, and noise that is much by chance: no answer
            continue
        found.append(law.exponent)
        held += law.admits(alpha)
        assert law.at(law.tokens) == pytest.approx(law.lr)
        assert law.at(4 * law.tokens) == pytest.approx(law.lr * 4**law.exponent)
    assert len(found) >= 0.99 * sweeps
    errors = np.abs(np.array(found) - alpha)
    assert np.median(errors) < (0.02 if sizes == 6 else 0.03)
    assert np.quantile(errors, 0.95) < (0.04 if sizes == 6 else 0.08)
    assert abs(np.mean(found) - alpha) < 0.006
    assert 0.92 <= held / len(found) <= 0.985


def test_rules_that_the_data_refuse_are_refused() -> None:
    rng = np.random.default_rng(7)
    for alpha in (0.0, 0.5, 1.0):
        law = fit_law(fit_curves(draw(rng, power_law(alpha)), {}))
        assert law is not None
        assert [rule for rule in (0.0, 0.5, 1.0) if law.admits(rule)] == [alpha]


def test_optima_that_bend_in_log_log_are_said_to() -> None:
    """Rise and saturation: four octaves of sqrt, then none."""
    rng = np.random.default_rng(8)
    surge = [0.0, 0.5, 1.0, 1.4, 1.5, 1.5]
    law = fit_law(fit_curves(draw(rng, surge, sigma=0.001), {}))
    assert law is not None
    assert law.bends
    straight = [fit_law(fit_curves(draw(rng, power_law(0.5), sigma=0.001), {})) for _ in range(60)]
    assert sum(law is not None and bool(law.bends) for law in straight) <= 8


def test_one_optimum_makes_no_law() -> None:
    assert fit_law(fit_curves(draw(np.random.default_rng(9), [0.2]), {})) is None


# --- noise -----------------------------------------------------------------------------------------------------------


def test_noise_is_pooled_within_cells() -> None:
    cells = [[1.0, 3.0], [10.0], [5.0, 6.0, 7.0]]
    noise = seed_noise(cells)
    assert noise is not None
    assert (noise.sigma**2 * noise.dof, noise.dof) == pytest.approx((2.0 + 2.0, 3))
    assert seed_noise([[1.0], [2.0]]) is None
    both = pool(noise, [(6.0, 2), (0.0, 0)])
    assert both is not None
    assert (both.sigma**2 * both.dof, both.dof) == pytest.approx((10.0, 5))
    assert noise.t == pytest.approx(stats.t.ppf(0.975, 3))


@pytest.mark.parametrize(
    ("sigma", "difference", "seeds"),
    [(0.002, 0.005, 3), (0.002, 0.003, 7), (0.005, 0.005, 16), (0.005, 0.01, 4), (0.001, 1.0, 1)],
)
def test_seeds_that_a_difference_needs(sigma: float, difference: float, seeds: int) -> None:
    assert seeds_needed(difference, sigma) == seeds


def test_as_many_seeds_show_the_difference_as_often_as_promised() -> None:
    rng = np.random.default_rng(10)
    n = seeds_needed(0.005, 0.005)
    a, b = rng.normal(0, 0.005, (2000, n)), rng.normal(0.005, 0.005, (2000, n))
    shown = np.mean([stats.ttest_ind(x, y).pvalue < 0.05 for x, y in zip(a, b, strict=True)])
    assert 0.76 < shown < 0.85


# --- the critical batch size -----------------------------------------------------------------------------------------


def hyperbola(rng: Rng, critical: float, sizes: Sequence[int], noise: float = 0.03) -> dict[int, float]:
    return {b: 100 * (1 + critical / b) * math.exp(noise * rng.standard_normal()) for b in sizes}


SIZES = [2**n for n in range(12, 18)]


def test_a_critical_batch_size_that_the_sizes_straddle_is_found() -> None:
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
    [(18.5, "lower bound only"), (22, "lower bound only"), (26, "lower bound only"), (11, "upper bound only")],
)
def test_one_sided_data_give_a_bound_only(octave: float, status: str) -> None:
    """A bound that holds, also where steps go as one over the batch size, and no critical one can be seen."""
    rng, critical = np.random.default_rng(12), 2.0**octave
    fits = [critical_batch_size(hyperbola(rng, critical, SIZES)) for _ in range(200)]
    assert {(fit.status, fit.hyperbola) for fit in fits} == {(status, None)}
    bounds = np.array([fit.bound for fit in fits], dtype=float)
    holds = bounds <= critical if status.startswith("lower") else bounds >= critical
    assert np.mean(holds) > 0.93  # one end of a 95% interval
    assert np.all(bounds > SIZES[-1] / 8 if status.startswith("lower") else bounds < 8 * SIZES[0])


def test_the_twenty_percent_rule_needs_no_fit() -> None:
    exact = {b: 100 * (1 + 1000 / b) for b in (50, 100, 200, 400, 800)}  # 5% to 80% more tokens than the fewest
    fit = critical_batch_size(exact)
    assert (fit.twenty_percent, fit.twenty_percent_open) == (200, False)
    assert critical_batch_size({b: exact[b] for b in (50, 100)}).twenty_percent_open
    assert critical_batch_size({b: exact[b] for b in (50, 100)}).status == "too few"


def test_a_noisy_quadratic_model_does_not_lie_on_the_hyperbola() -> None:
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


def test_steps_to_a_loss_are_read_between_evaluations() -> None:
    course = [(10, 5.0), (20, 4.0), (30, 3.0), (40, 3.5)]
    assert steps_to(3.25, course) == pytest.approx(27.5)
    assert steps_to(4.0, course) == 20
    assert steps_to(2.0, course) is None
    assert steps_to(6.0, course) is None  # before anything was evaluated
