"""How well curves explain the losses of a sweep: the marginal likelihood of the best learning rate at each batch size.

At batch size j the loss of a run at x = log2(lr) is

    c_j + a_j h(u) (1 + t_j s(u)) + misfit + noise,    u = x - m_j.

- h is the form (forms.py), the same at all batch sizes. The height a_j is how far the loss rises over about an octave.
- t_j is a skew that only this batch size has: normal with standard deviation `own_skew`, up to `MOST_SKEW`; s = `side`.
- Misfit is the error of the form, independent between learning rates. Its standard deviation is a share of a_j h(u), so
  misfit cannot turn a point far above the minimum into the minimum.
- The standard deviation of the noise is sigma_j 2^(rise d). Here d is how many octaves the learning rate lies above
  that with the lowest mean, at most `NOISE_REACH`, and 0 below: on real sweeps noise rises above the minimum only.
  sigma_j^2 has an inverse gamma prior around a power of the batch size, so one with few seeds takes its noise mostly
  from the others.

Given the shared parameters and m_j, the losses are linear in c_j, a_j and t_j. Their integrals have a closed form
(with a_j >= 0). The integral over sigma_j is a mean over quantiles of its posterior given the seeds.

Letters in shapes: J batch sizes, n learning rates, T sets of shared parameters, S levels of noise, and M places, which
are the values of m_j that are tried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy import special

from gptexp.reporting.statistics.forms import SIDE_REACH, Array, Indices, read, side

Losses = Mapping[float, Sequence[float]]  # learning rate -> the final loss of each seed, in nats per token

BEYOND = 3.0  # octaves beyond the tested learning rates up to which an optimum may lie
BEYOND_SD = 1.2  # octaves: the prior of the optimum is flat between the tested rates, and has normal tails outside
NOISE_REACH = 2.0  # octaves above the learning rate with the lowest mean, beyond which the noise is constant
SMALLEST_SIGMA = 1e-6  # nats: smaller differences are rounding errors of float32
NOISE_DOF = 3.0  # degrees of freedom of the prior of sigma_j^2 around the usual sigma^2
NOISE_LEVELS = 3
HEIGHT_SPREAD = 0.7  # standard deviation of a_j around the shared height, as a share of that height
MISFIT_REACH, LARGEST_MISFIT = 0.7, 0.6  # distance in octaves beyond which the share of misfit grows; the largest share
MOST_SKEW = 0.9 / SIDE_REACH  # largest |t_j|; with a larger one the curve could turn down
OUTLYING = 0.2  # runs with less than this share of the usual weight are outliers
STEEP = 30.0  # per octave: how sharply the learning rates above one that diverged are excluded


@dataclass
class Cells:
    """The losses of all batch sizes as padded arrays of shape (J, n); learning rates rise along each row.

    A cell has the runs of one batch size and learning rate. Each run counts by its weight, below 1 for outliers.
    """

    sizes: tuple[int, ...]  # tokens per step
    losses: list[list[Array]]  # by batch size and learning rate: the losses of the runs
    x: Array  # log2(lr)
    on: Array  # 1.0 for a cell, 0.0 for padding
    limit: Array = field(init=False)  # (J,): log2 of the lowest learning rate above `lowest` that diverged, or infinity
    # Set by `weigh`:
    weights: list[list[Array]] = field(init=False)
    count: Array = field(init=False)  # sum of the weights
    mean: Array = field(init=False)
    squares: Array = field(init=False)  # weighted sum of squared distances to the mean
    lowest: Indices = field(init=False)  # (J,): index of the lowest mean, see `_lowest`
    base: Array = field(init=False)  # (J,): the lowest mean
    distance: Array = field(init=False)  # octaves above the learning rate with the lowest mean, at most `NOISE_REACH`

    @property
    def low(self) -> Array:
        return self.x[:, 0]

    @property
    def high(self) -> Array:
        return np.asarray(self.x.max(axis=1))

    @cached_property
    def dof(self) -> Array:
        """Degrees of freedom of the noise in each cell: the seeds beyond its first."""
        counts = [[len(cell) - 1 for cell in row] for row in self.losses]
        return np.array([[*row, *[0] * (self.x.shape[1] - len(row))] for row in counts])

    def weigh(self, weights: list[list[Array]]) -> None:
        """Set the weights of the runs, and all sums over runs."""
        self.weights = weights
        self.count, self.mean, self.squares = (np.zeros_like(self.x) for _ in range(3))
        for j, (row, row_weights) in enumerate(zip(self.losses, weights, strict=True)):
            for i, (losses, w) in enumerate(zip(row, row_weights, strict=True)):
                mean = float(w @ losses / w.sum())
                self.count[j, i], self.mean[j, i] = w.sum(), mean
                self.squares[j, i] = w @ (losses - mean) ** 2 + (len(losses) - 1) * SMALLEST_SIGMA**2
        self.lowest = np.array([_lowest(*row) for row in zip(self.mean, weights, strict=True)])
        rows = np.arange(len(self.sizes))
        self.base = self.mean[rows, self.lowest]
        self.distance = np.clip(self.x - self.x[rows, self.lowest, None], 0.0, NOISE_REACH)


def _lowest(means: Array, weights: Sequence[Array]) -> int:
    """The index of the lowest mean, without cells whose only run is an outlier. `weights`: by cell, of its runs."""
    usual = np.array([w.mean() for w in weights])
    trusted = (usual > OUTLYING * np.median(usual)) | (np.array([len(w) for w in weights]) > 1)
    return int(np.where(trusted, means[: len(trusted)], np.inf).argmin())


def cells_of(losses: Mapping[int, Losses], diverged: Mapping[int, Sequence[float]]) -> Cells:
    """The cells, with all weights 1. `losses`, `diverged`: batch size -> losses, and learning rates that diverged."""
    sizes = tuple(sorted(losses))
    rows = [[(float(np.log2(lr)), np.array(sorted(losses[b][lr]))) for lr in sorted(losses[b])] for b in sizes]
    n = max(map(len, rows))
    x = np.array([[row[min(i, len(row) - 1)][0] for i in range(n)] for row in rows])
    on = np.array([[float(i < len(row)) for i in range(n)] for row in rows])
    cells = Cells(sizes, [[cell for _, cell in row] for row in rows], x, on)
    cells.weigh([[np.ones(len(cell)) for cell in row] for row in cells.losses])
    above = [[lr for lr in diverged.get(b, ()) if np.log2(lr) > x[j, cells.lowest[j]]] for j, b in enumerate(sizes)]
    cells.limit = np.array([np.log2(min(rates, default=np.inf)) for rates in above])
    return cells


class Shared(NamedTuple):
    """Parameters that all batch sizes share, each of shape (T,) but `sigma`, and the table of h, (T, len(U))."""

    rise: Array  # octaves by which the noise rises per octave of the learning rate above the minimum
    sigma: Array  # (J, T), in nats: the usual noise at the learning rate with the lowest mean
    misfit: Array  # standard deviation of the misfit as a share of a_j h(u), near the minimum
    height: Array  # nats: the shared height, around which the a_j lie
    own_skew: Array  # standard deviation of t_j
    table: Array


class Evidence(NamedTuple):
    """Log marginal likelihoods, and for draws the conditional normal distributions of c_j, a_j and t_j."""

    log: Array  # (J, T, M)
    by_noise: Array  # (J, T, M, S): `log` for each noise level
    variance: Array  # (J, T, S): squared noise levels
    a: Array  # (J, T, M, S): mean of a_j before it is cut at 0
    a_sd: Array
    t: tuple[Array, Array, Array]  # t_j given a_j is (t[0] - a_j t[1]) / t[2] on average, with variance 1 / t[2]
    c: tuple[Array, Array, Array, Array]  # c_j is (c[0] - a_j c[1] - t_j c[2]) / c[3], with variance 1 / c[3]
    t_scale: Array  # (J, T, M): one prior standard deviation of t_j, in nats; the unit of t_j here


def evidence(cells: Cells, shared: Shared, grid: Array, levels: int = NOISE_LEVELS) -> Evidence:
    """Evidence for an optimum at each place of `grid`, shape (J, M), in log2(lr)."""
    rise = 4.0 ** (shared.rise[:, None] * cells.distance[:, None, :])  # (J, T, n): factor of the variance
    variance, seeds = _noise(cells, shared, rise, levels)
    u = cells.x[:, None, :] - grid[:, :, None]  # (J, M, n)
    growth, skew = np.sqrt(1 + (u / MISFIT_REACH) ** 2), side(u)
    rates = []
    for i in range(cells.x.shape[1]):
        h = np.swapaxes(read(shared.table, slice(None), u[..., i]), 0, 1)
        misfit = np.minimum(shared.misfit[:, None] * growth[:, None, :, i], LARGEST_MISFIT) * h
        runs, y = cells.count[:, i, None, None], (cells.mean - cells.base[:, None])[:, i, None, None]
        rates.append(_Rate(runs, y, rise[..., i], h, misfit * misfit, skew[:, None, :, i]))
    rough = _rough_height(rates, shared, variance[..., levels // 2])
    t_scale = rough * shared.own_skew[:, None]
    sums, log_weight = _sums(cells, rates, variance, rough, t_scale)
    e = _integrated(sums, log_weight, shared.height[:, None, None], variance, t_scale)
    log = e.log + seeds[..., None]
    outside = np.maximum(0, np.maximum(cells.low[:, None] - grid, grid - cells.high[:, None]))
    log += (np.log(grid[:, 1] - grid[:, 0])[:, None] - 0.5 * (outside / BEYOND_SD) ** 2)[:, None, :]
    log += special.log_expit(STEEP * (cells.limit[:, None] - grid))[:, None, :]
    return e._replace(log=log)


class _Rate(NamedTuple):
    """What `evidence` needs of one learning rate at each batch size."""

    runs: Array  # (J, 1, 1): number of runs, each counted by its weight
    y: Array  # (J, 1, 1): mean loss minus the lowest one
    rise: Array  # (J, T): factor of the variance
    h: Array  # (J, T, M)
    misfit: Array  # (J, T, M): variance of the misfit, divided by a_j^2
    skew: Array  # (J, 1, M)


def _noise(cells: Cells, shared: Shared, rise: Array, levels: int) -> tuple[Array, Array]:
    """Quantiles of the variance given the seeds (J, T, S), and the log marginal likelihood of the seeds (J, T)."""
    dof = cells.dof
    shape = (NOISE_DOF + dof.sum(1, keepdims=True)) / 2  # (J, 1): shape parameter of the inverse gamma distribution
    prior = NOISE_DOF * shared.sigma**2 / 2  # (J, T)
    scale = prior + (cells.squares[:, None] / rise).sum(2) / 2  # (J, T)
    seeds = (NOISE_DOF / 2 * np.log(prior) - special.gammaln(NOISE_DOF / 2) + special.gammaln(shape)
             - shape * np.log(scale) - 0.5 * (dof[:, None] * np.log(rise)).sum(2))  # fmt: skip
    quantiles = (np.arange(levels) + 0.5) / levels
    return scale[..., None] / special.gammaincinv(shape[..., None], quantiles), seeds


def _rough_height(rates: Sequence[_Rate], shared: Shared, variance: Array) -> Array:
    """A first estimate of a_j, shape (J, T, M), by weighted least squares: it scales misfit and skew."""
    height = shared.height[:, None]
    s = np.zeros((5, *rates[0].h.shape))
    for r in rates:
        w = r.runs / ((variance * r.rise)[..., None] + r.runs * height**2 * r.misfit)
        wh = w * r.h
        for row, term in enumerate((w, w * r.y, wh, wh * r.y, wh * r.h)):
            s[row] += term
    w, wy, wh, why, whh = s
    precision = (HEIGHT_SPREAD * height) ** -2.0
    a = (why - wh * wy / w + height * precision) / (whh - wh * wh / w + precision)
    return np.asarray(np.clip(a, 0.1 * height, 10 * height))


def _sums(cells: Cells, rates: Sequence[_Rate], variance: Array, rough: Array, t_scale: Array) -> tuple[Array, Array]:
    """Sums over the learning rates, weighted by precision, of the products of 1, y, h and tau: (10, J, T, M, S).

    tau is what one prior standard deviation of t_j adds to the loss. Also returns the sum of log weights, (J, T, M, S).
    """
    levels_first = np.moveaxis(variance, 2, 0)[..., None]  # (S, J, T, 1)
    log_weight = np.zeros((len(levels_first), *rough.shape))
    sums = np.zeros((10, *log_weight.shape))
    rough_squared = rough * rough
    for i, (runs, y, rise, h, misfit, skew) in enumerate(rates):
        tau = h * skew * t_scale
        inverse = levels_first * rise[..., None] + (runs * rough_squared) * misfit
        w = runs / inverse  # (S, J, T, M)
        wy, wh, wt = w * y, w * h, w * tau
        for row, term in enumerate((w, wy, wh, wt, wy * y, wh * y, wt * y, wh * h, wt * h, wt * tau)):
            sums[row] += term
        log_weight -= cells.on[:, i, None, None] * np.log(inverse)
    log_weight += (cells.on * np.log(np.where(cells.on > 0, cells.count, 1.0))).sum(1)[:, None, None]
    return np.moveaxis(sums, 1, -1), np.moveaxis(log_weight, 0, -1)


def _integrated(sums: Array, log_weight: Array, height: Array, variance: Array, t_scale: Array) -> Evidence:
    """Integrate over c_j (flat prior), then t_j, then a_j. `evidence` adds the seeds and the prior of m_j to `log`."""
    w, y1, h1, t1, yy, yh, yt, hh, ht, tt = sums  # each (J, T, M, S)
    yy, yh, yt, hh, ht, tt = (yy - y1 * y1 / w, yh - y1 * h1 / w, yt - y1 * t1 / w, hh - h1 * h1 / w,
                              ht - h1 * t1 / w, tt - t1 * t1 / w + 1)  # fmt: skip
    precision = (HEIGHT_SPREAD * height) ** -2.0
    curvature = hh - ht * ht / tt + precision
    a = (yh - yt * ht / tt + height * precision) / curvature
    rest = yy - yt * yt / tt + height**2 * precision - curvature * a * a
    by_noise = (-0.5 * (rest + np.log(curvature / precision * w * tt) - log_weight)
                + special.log_ndtr(a * np.sqrt(curvature)) - special.log_ndtr(1 / HEIGHT_SPREAD))  # fmt: skip
    # t_j is bounded. The probability that it lies within its bounds is taken at the mean of a_j.
    usual = np.maximum(a, curvature**-0.5)
    most = MOST_SKEW * usual / t_scale[..., None]
    by_noise += _log_share(most, np.abs(yt - usual * ht) / tt, np.sqrt(tt)) - _log_share(most, 0.0, 1.0)
    top = by_noise.max(axis=3)
    log = top + np.log(np.exp(by_noise - top[..., None]).mean(axis=3))
    return Evidence(log, by_noise, variance, a, curvature**-0.5, (yt, ht, tt), (y1, h1, t1, w), t_scale)


def _log_share(most: Array, mean: Array | float, root: Array | float) -> Array:
    """The logarithm of the share of a normal distribution within +-`most`; `mean` >= 0; `root`: 1 / its sd."""
    high, low = special.log_ndtr((most - mean) * root), special.log_ndtr((-most - mean) * root)
    return np.asarray(high + np.log1p(-np.minimum(np.exp(low - high), 1 - 1e-12)))
