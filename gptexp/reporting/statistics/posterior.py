"""The posterior of a sweep, as draws. Reports compute all that they say about learning rates from these draws.

`likelihood` integrates over the parameters of each batch size. This module integrates over the shared parameters: for
each form of the curve, Newton's method finds the mode, and importance sampling starts there. The proposal is a t
distribution with the mode's curvature, adapted to its own sample (Cappé et al. 2004, Population Monte Carlo, JCGS
13:907). The forms are averaged by their evidence (Hoeting et al. 1999, Bayesian Model Averaging, Statistical Science
14:382). The points are quasi-random and fixed, so the same losses always give the same draws.

Noise has heavy tails: a run or a cell that lies more than two standard deviations from the curve loses weight, as in a
Student t distribution (iteratively reweighted least squares; Lange et al. 1989, JASA 84:881). The first weights are set
before there is a curve.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from scipy import special

from gptexp.reporting.statistics.forms import FORMS, Array, Form, Indices, departure, read, side, table_of
from gptexp.reporting.statistics.likelihood import (
    BEYOND,
    MOST_SKEW,
    NOISE_REACH,
    SMALLEST_SIGMA,
    Cells,
    Losses,
    Shared,
    cells_of,
    evidence,
)
from gptexp.reporting.statistics.noise import CONFIDENCE

DRAWS = 2000
NARROWEST = 0.1  # octaves: the narrowest interval of an optimum, because no form of a curve is more exact
POINTS = 128  # points of importance sampling, for each form and stage
STAGES, ENOUGH = 10, 80.0  # importance sampling: most stages; effective sample size at which it ends earlier
PROPOSAL_DOF = 6.0
MOST_STEPS, SMALL_GAIN = 9, 0.1  # Newton's method: most steps; gain of the log posterior below which it ends
FIRST_STEP, LONGEST_STEP = 0.15, 3.0  # first finite difference, longest Newton step, in standard deviations of priors
STEP_SHARES = np.array([0.0, 0.1, 0.3, 0.6, 1.0, 1.5])  # the shares of a Newton step that are tried
FIRST, COARSE, FINE = 100, 16, 24  # places (values of m_j) that are tried: at first, in the search, at the mode
FORM_ERROR = 0.03  # octaves: standard deviation of a form's error in the optimum; larger for curves unlike a parabola
# A form is left out if the best form's log evidence is higher by more than this: in the final draws; before
# outliers are known; in the draws that find outliers.
NEGLIGIBLE, NEGLIGIBLE_BEFORE, NEGLIGIBLE_FOR_OUTLIERS = 6.0, 9.0, 2.0
RUN_DOF, CELL_DOF = 5.0, 1.5  # degrees of freedom of the t distributions that weigh single runs, and whole cells
USUAL = 2.0  # standard deviations within which a run, and the sum of squares of a cell, keep full weight
FAR = 2.5  # in the first weights, a run further off than so many median heights or sigmas counts less
TIMES_WEIGHED = 2  # how often the posterior sets the weights
KNOWN = 3  # seeds beyond the first that tell which runs of a batch size are outliers
MANY = 10  # with so many, the prior of the noise is centred on theirs, and not on the usual spread

# Normal priors of shared parameters: mean, sd. All but `rise` and `trend` are logs; `sigma`, `height` are relative to
# first guesses.
PRIORS = {
    "rise": (0.3, 0.35),  # octaves of noise per octave of learning rate above the minimum; up to 3 on real sweeps
    "sigma": (0.0, 1.0),
    # `misfit` and `own_skew` may be nearly 0: where losses show neither, they must not widen every interval.
    "misfit": (np.log(0.006), 1.5),
    "height": (0.0, 1.2),
    "own_skew": (np.log(0.03), 1.5),  # skews differ between the batch sizes of some real sweeps
    # Octaves of noise per octave of the batch size: 0.2 and 0.5 at the best learning rates of two real sweeps of equal
    # tokens. Around 0, so that without seeds no batch size is assumed to be noisier than others.
    "trend": (0.0, 0.3),
}


@dataclass(frozen=True)
class Posterior:
    """Draws of the optima and curves. `m` to `sigma`: (draws, batch sizes); `a`, `t`: a_j, a_j t_j of likelihood.py."""

    cells: Cells
    m: Array  # log2 of the best learning rate
    c: Array  # the loss there
    a: Array
    t: Array
    sigma: Array  # nats: noise of one run at the tested learning rate with the lowest mean
    rise: Array  # (draws,)
    shift: Array  # (draws,): error of the form: octaves from its minimum to the best learning rate
    table: Array
    rows: Indices  # (draws,): row of `table`

    @cached_property
    def column(self) -> dict[int, int]:
        """Batch size in tokens -> its column in the draws."""
        return {batch: j for j, batch in enumerate(self.cells.sizes)}

    def loss(self, batch: int, x: Array | Sequence[float]) -> Array:
        """Draws of the expected loss at log2(lr) = `x`, shape (draws, len(x))."""
        j = self.column[batch]
        u = np.asarray(x, float) - (self.m[:, j] - self.shift)[:, None]
        h = read(self.table, self.rows[:, None], u)
        return np.asarray(self.c[:, j, None] + h * (self.a[:, j, None] + self.t[:, j, None] * side(u)))

    def noise(self, batch: int, x: Array | Sequence[float]) -> Array:
        """Draws of the standard deviation of one run at log2(lr) = `x`, shape (draws, len(x))."""
        j = self.column[batch]
        best = self.cells.x[j, self.cells.lowest[j]]
        distance = np.clip(np.asarray(x, float) - best, 0.0, NOISE_REACH)
        return np.asarray(self.sigma[:, j, None] * 2.0 ** (self.rise[:, None] * distance))


def interval(draws: Array, level: float = CONFIDENCE, narrowest: float = 0.0) -> tuple[float, float]:
    """The central interval of `level`, widened to `narrowest` if it is narrower."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    missing = max(0.0, narrowest - (high - low)) / 2
    return float(low - missing), float(high + missing)


def middle(draws: Array) -> tuple[float, float]:
    """The median, and half the width of the 95% interval."""
    low, high = interval(draws)
    return float(np.median(draws)), (high - low) / 2


def fit(losses: Mapping[int, Losses], diverged: Mapping[int, Sequence[float]], usual_spread: float) -> Posterior:
    """The posterior of a sweep. Each batch size of `losses` must have two learning rates or more.

    `losses`: batch size -> losses; `diverged`: batch size -> learning rates that diverged; `usual_spread`: standard
    deviation over seeds that such runs have had, in nats; the prior of the noise comes from it.
    """
    cells = cells_of(losses, diverged)
    _weigh(cells, lambda j: _first_weights(cells, j, usual_spread))
    # Search from equal and from different skews of the batch sizes: the posterior may have a peak near each.
    starts = (_Sample("linex", cells, usual_spread).start(own_skew).find_mode() for own_skew in (0.0, 1.5))
    first = max(starts, key=lambda sample: sample.rough_evidence)
    samples = [first, *(_Sample(name, cells, usual_spread, first).find_mode() for name in FORMS if name != "linex")]
    for _ in range(TIMES_WEIGHED):
        likely = _likely(samples, NEGLIGIBLE_FOR_OUTLIERS)
        rough = _draw([sample.importance_sample(POINTS // 2, stages=1) for sample in likely], draws=300)
        _weigh(cells, partial(_weights, rough))
        samples = [sample.find_mode() for sample in _likely(samples, NEGLIGIBLE_BEFORE)]
    return _draw([sample.importance_sample() for sample in _likely(samples, NEGLIGIBLE)])


def _likely(samples: "Sequence[_Sample]", within: float) -> "list[_Sample]":
    """The samples whose log evidence is at most `within` below that of the best one."""
    best = max(sample.rough_evidence for sample in samples)
    return [sample for sample in samples if sample.rough_evidence > best - within]


class _Sample:
    """The shared parameters of one form: their mode, and an importance sample around it.

    A vector z holds the parameters standardised by their priors, so its prior is a standard normal distribution.
    """

    def __init__(self, name: str, cells: Cells, usual_spread: float, like: "_Sample | None" = None) -> None:
        """`like`: a sample of another form, from whose mode and places the search begins."""
        self.form: Form = FORMS[name]
        self.cells = cells
        self.usual_sigma, self.usual_height = _first_guesses(cells, usual_spread)
        self.priors = {**PRIORS, **self.form.parameters}
        self.sizes = np.log2(cells.sizes) - np.mean(np.log2(cells.sizes))
        self.mode: Array = np.zeros(len(self.priors))
        self.root: Array = FIRST_STEP * np.eye(len(self.mode))  # its columns are the steps of finite differences
        self.grid = np.linspace(cells.low - BEYOND, cells.high + BEYOND, FIRST, axis=1)
        if like is not None:
            known = dict(zip(like.priors, like.mode, strict=True))
            self.mode = np.array([known.get(name, 0.0) for name in self.priors])
            self._set_grid(like.grid[:, 0], like.grid[:, -1], like.grid[:, -1] - like.grid[:, 0], FINE)

    def shared(self, z: Array) -> Shared:
        values = {name: mean + sd * z[:, i] for i, (name, (mean, sd)) in enumerate(self.priors.items())}
        sigma = self.usual_sigma * np.exp(values["sigma"]) * 2.0 ** (values["trend"] * self.sizes[:, None])
        height = self.usual_height * np.exp(values["height"])
        table = table_of(self.form, [values[name] for name in self.form.parameters])
        return Shared(values["rise"], sigma, np.exp(values["misfit"]), height, np.exp(values["own_skew"]), table)

    def log_posterior(self, z: Array) -> tuple[Array, Array]:
        """Log of prior times likelihood of each z, and log evidence of each place, shape (J, T, M).

        The noise is set to its median: its uncertainty hardly moves the shared parameters, and the draws include it.
        """
        log = evidence(self.cells, self.shared(z), self.grid, levels=1).log
        normal = -0.5 * (z**2).sum(1) - z.shape[1] / 2 * np.log(2 * np.pi)
        return normal + special.logsumexp(log, axis=2).sum(0), log

    def start(self, own_skew: float) -> "_Sample":
        """Begin at the best of several skews, misfits and heights. `own_skew`: first value of this parameter in z."""
        names = ("skew", "misfit", "height")
        combinations = itertools.product((-2.0, -1.0, 0.0, 1.0, 2.0), (0.0, 1.5), (-2.0, -1.0, 0.0, 1.0))
        starts = [{"own_skew": own_skew, **dict(zip(names, values, strict=True))} for values in combinations]
        tried = np.array([[start.get(name, 0.0) for name in self.priors] for start in starts])
        values, log = self.log_posterior(tried)
        self.mode = tried[values.argmax()]
        self._zoom(log[:, values.argmax()], COARSE)
        return self

    def find_mode(self) -> "_Sample":
        """Move to the mode by Newton steps. After each step, the places are set closer around the optima."""
        for number in range(MOST_STEPS):
            gradient, self.covariance = self._derivatives()
            step = self.covariance @ gradient
            step *= min(1.0, LONGEST_STEP / max(float(np.linalg.norm(step)), 1e-12))
            tried = self.mode + STEP_SHARES[:, None] * step
            values, log = self.log_posterior(tried)
            best = values.argmax()
            value, self.mode = values[best], tried[best]
            has_converged = number > 0 and value - values[0] < SMALL_GAIN
            self.root = 0.7 * np.linalg.cholesky(self.covariance)
            self._zoom(log[:, best], FINE if has_converged else COARSE)
            if has_converged:
                break
        self.rough_evidence = (np.log(self.form.weight) + value + len(self.mode) / 2 * np.log(2 * np.pi)
                               + 0.5 * np.linalg.slogdet(self.covariance)[1])  # fmt: skip
        return self

    def _zoom(self, log: Array, points: int) -> None:
        """Set the places around where the optima may lie. `log`: the log evidence of each place, shape (J, M)."""
        share = np.cumsum(special.softmax(log, axis=1), axis=1)
        rows, last = np.arange(len(share)), share.shape[1] - 1
        low = self.grid[rows, (share < 1e-4).sum(1)]
        high = self.grid[rows, np.minimum((share < 1 - 1e-4).sum(1), last)]
        self._set_grid(low, high, 1.5 * (self.grid[:, 1] - self.grid[:, 0]), points)

    def _set_grid(self, low: Array, high: Array, margin: Array, points: int) -> None:
        """Set the places from `low` to `high`, with a margin."""
        low = np.maximum(low - margin, self.cells.low - BEYOND)
        high = np.minimum(high + margin, self.cells.high + BEYOND)
        self.grid = np.linspace(low, high, points, axis=1)

    def _derivatives(self) -> tuple[Array, Array]:
        """The gradient at the mode, and the covariance: the inverse of the negative Hessian.

        Both are finite differences, whose steps from the mode are the columns of `self.root`.
        """
        size = len(self.mode)
        ahead = self.root.T
        first, second = np.tril_indices(size, -1)
        points = np.vstack([self.mode, self.mode + ahead, self.mode - ahead, self.mode + ahead[first] + ahead[second]])
        values, _ = self.log_posterior(points)
        value, plus, minus, mixed = values[0], *np.split(values[1 : 2 * size + 1], 2), values[2 * size + 1 :]
        curvature = np.diag(plus + minus - 2 * value)
        curvature[first, second] = curvature[second, first] = mixed - plus[first] - plus[second] + value
        inverse = np.linalg.inv(self.root)
        curvatures, axes = np.linalg.eigh(-inverse.T @ curvature @ inverse)
        covariance = (axes / np.maximum(curvatures, 0.6)) @ axes.T  # the prior alone has a curvature of 1
        return inverse.T @ (plus - minus) / 2, covariance

    def importance_sample(self, points: int = POINTS, stages: int = STAGES) -> "_Sample":
        """Set the points `z`, their normalised `weights`, and `log_evidence`, which includes the form's prior."""
        size = len(self.mode)
        proposals = [(self.mode, np.linalg.cholesky(1.3 * self.covariance))]
        z, log_posterior = np.empty((0, size)), np.empty(0)
        for stage in range(stages):
            centre, root = proposals[-1]
            new = centre + _student_points(points, size, skip=stage * points) @ root.T
            z, log_posterior = np.vstack([z, new]), np.append(log_posterior, self.log_posterior(new)[0])
            densities = [_log_student(z, *proposal) for proposal in proposals]
            log_weights = log_posterior - special.logsumexp(densities, axis=0) + np.log(len(proposals))
            if _effective_size(log_weights) > ENOUGH or stage == stages - 1:
                break
            flat = 1.0  # power of the weights: below 1 if few points have nearly all of the weight
            while _effective_size(flat * log_weights) < 2 * size:
                flat *= 0.7
            weights = special.softmax(flat * log_weights)
            centre = weights @ z
            spread = (z - centre).T @ ((z - centre) * weights[:, None]) + 1e-3 * np.eye(size)
            proposals.append((centre, np.linalg.cholesky(1.2 * spread)))
        self.z, self.weights = z, special.softmax(log_weights)
        self.log_evidence = np.log(self.form.weight) + special.logsumexp(log_weights) - np.log(len(z))
        return self


def _first_guesses(cells: Cells, usual_spread: float) -> tuple[float, float]:
    """First guesses of the noise, and of the height at an octave from the minimum, in nats."""
    dof = cells.dof.sum(1)
    seeded = dof > 0
    sigma = usual_spread
    if dof.sum() >= MANY:
        sigma = float(np.sqrt(np.median(cells.squares.sum(1)[seeded] / dof[seeded])))
    octaves = np.maximum(1.0, (cells.high - cells.low) / 2)
    rises = (np.where(cells.on > 0, cells.mean, -np.inf).max(1) - cells.base) / octaves**2
    return max(sigma, SMALLEST_SIGMA), max(float(np.median(rises)), SMALLEST_SIGMA)


def _student_points(count: int, size: int, skip: int) -> Array:
    """Quasi-random points of a multivariate t distribution: a Kronecker sequence with Roberts' irrational numbers."""
    ratio = 2.0
    for _ in range(50):
        ratio = (1 + ratio) ** (1 / (size + 2))  # for `size` + 1 dimensions
    uniform = (0.5 + np.arange(skip + 1, skip + count + 1)[:, None] * ratio ** -np.arange(1.0, size + 2)) % 1
    chi2 = 2 * special.gammaincinv(PROPOSAL_DOF / 2, uniform[:, -1:])
    return np.asarray(special.ndtri(uniform[:, :-1]) * np.sqrt(PROPOSAL_DOF / chi2))


def _log_student(z: Array, centre: Array, root: Array) -> Array:
    """The log density of a multivariate t distribution with the scale matrix `root` `root`.T."""
    size, dof = len(centre), PROPOSAL_DOF
    squares = (np.linalg.solve(root, (z - centre).T) ** 2).sum(0)
    constant = special.gammaln((dof + size) / 2) - special.gammaln(dof / 2) - size / 2 * np.log(dof * np.pi)
    return np.asarray(constant - np.log(np.diag(root)).sum() - (dof + size) / 2 * np.log1p(squares / dof))


def _effective_size(log_weights: Array) -> float:
    return float(np.exp(2 * special.logsumexp(log_weights) - special.logsumexp(2 * log_weights)))


def _draw(samples: Sequence[_Sample], draws: int = DRAWS) -> Posterior:
    """Draws from the samples of several forms, in proportion to their evidence."""
    shares = special.softmax([sample.log_evidence for sample in samples])
    edges = np.round(np.cumsum([0.0, *shares]) * draws).astype(int)
    parts = [_draw_form(s, number) for s, number in zip(samples, np.diff(edges), strict=True) if number]
    offsets = np.cumsum([0, *(len(part.table) for part in parts)])
    rows = [part.rows + offset for part, offset in zip(parts, offsets, strict=False)]
    joined = {name: np.concatenate([getattr(part, name) for part in parts])
              for name in ("m", "c", "a", "t", "sigma", "rise", "shift", "table")}  # fmt: skip
    return Posterior(samples[0].cells, **joined, rows=np.concatenate(rows))


def _draw_form(sample: _Sample, draws: int) -> Posterior:
    """Draws from one form."""
    rng = np.random.default_rng(0)
    cells, grid = sample.cells, sample.grid
    chosen = np.searchsorted(np.cumsum(sample.weights), (np.arange(draws) + 0.5) / draws).clip(0, len(sample.z) - 1)
    used, rows = np.unique(rng.permutation(chosen), return_inverse=True)
    shared = sample.shared(sample.z[used])
    e = evidence(cells, shared, grid)
    m, c, a, t, sigma = np.empty((5, draws, len(cells.sizes)))
    # No form is the true one. All batch sizes share one form, so its error moves all optima alike.
    normal = special.ndtri((rng.permutation(draws) + 0.5) / draws)
    shift = FORM_ERROR * (1 + departure(shared.table)[rows]) * normal
    for j in range(len(cells.sizes)):
        place = _pick(special.softmax(e.log[j], axis=1)[rows], (rng.permutation(draws) + 0.5) / draws)
        noise = _pick(special.softmax(e.by_noise[j][rows, place], axis=1), rng.random(draws))
        at = (j, rows, place, noise)
        mean, sd = e.a[at], e.a_sd[at]
        below = special.ndtr(-mean / sd)  # the share of the normal distribution at negative heights
        share = below + (1 - below) * rng.random(draws)
        a[:, j] = np.maximum(mean + sd * special.ndtri(share.clip(1e-15, 1 - 1e-15)), SMALLEST_SIGMA**2)
        (yt, ht, tt), (y1, h1, t1, w) = ([sums[at] for sums in moments] for moments in (e.t, e.c))
        scale = e.t_scale[j, rows, place]
        most = MOST_SKEW * a[:, j] / scale
        own = ((yt - a[:, j] * ht) / tt + rng.standard_normal(draws) / np.sqrt(tt)).clip(-most, most)
        c[:, j] = (y1 - a[:, j] * h1 - own * t1) / w + rng.standard_normal(draws) / np.sqrt(w) + cells.base[j]
        t[:, j] = own * scale
        m[:, j] = grid[j, place] + (grid[j, 1] - grid[j, 0]) * (rng.random(draws) - 0.5) + shift
        sigma[:, j] = np.sqrt(e.variance[j, rows, noise])
    return Posterior(cells, m, c, a, t, sigma, shared.rise[rows], shift, shared.table, rows)


def _pick(probabilities: Array, uniform: Array) -> Array:
    """An index drawn from each row of `probabilities`, by a number in `uniform`."""
    return np.asarray((np.cumsum(probabilities, axis=1) < uniform[:, None]).sum(1).clip(0, probabilities.shape[1] - 1))


def _weigh(cells: Cells, weights: Callable[[int], list[Array]]) -> None:
    """Weigh the runs of each batch size that has enough learning rates or seeds to tell outliers.

    `weights`: index of a batch size -> for each of its cells, the weights of the runs.
    """
    seeds = [sum(map(len, row)) - len(row) for row in cells.losses]  # beyond the first
    is_robust = [len(row) >= 5 or seeds[j] >= KNOWN for j, row in enumerate(cells.losses)]
    cells.weigh([weights(j) if robust else cells.weights[j] for j, robust in enumerate(is_robust)])


def _first_weights(cells: Cells, j: int, usual_spread: float) -> list[Array]:
    """Weights to begin with: runs far from the others of their cell, or of their batch size, count less."""
    losses = cells.losses[j]
    medians = np.array([np.median(cell) for cell in losses])
    apart = [np.abs(cell - median) for cell, median in zip(losses, medians, strict=True)]
    sigma = usual_spread
    if sum(map(len, losses)) - len(losses) >= KNOWN:
        sigma = 1.8 * float(np.median(np.concatenate([distances for distances in apart if len(distances) > 1])))
    sigma = max(sigma, SMALLEST_SIGMA)
    base = np.partition(medians, 1)[1]  # the second lowest: the lowest may be an outlier
    height = max(sigma, float(np.median(medians) - medians.min()))
    return [
        np.maximum(1.0, np.maximum(np.abs(cell - base) / height, distances / sigma) / FAR) ** -6.0
        for cell, distances in zip(losses, apart, strict=True)
    ]


def _weights(posterior: Posterior, j: int) -> list[Array]:
    """The weights of the runs in each cell, given the posterior of the curves."""
    cells, batch = posterior.cells, posterior.cells.sizes[j]
    x = cells.x[j, : len(cells.losses[j])]
    curves = posterior.loss(batch, x)
    mean, curve_variance = curves.mean(0), curves.var(0)
    variance = (posterior.noise(batch, x) ** 2).mean(0)
    weights = []
    for i, losses in enumerate(cells.losses[j]):
        # `centre` is the cell's expected loss: a mean of the curve and its runs, weighted by their precisions.
        runs_precision, curve_precision = cells.count[j, i] / variance[i], 1 / curve_variance[i]
        centre = (runs_precision * cells.mean[j, i] + curve_precision * mean[i]) / (runs_precision + curve_precision)
        squares = ((losses - centre) ** 2 + 1 / (runs_precision + curve_precision)) / variance[i]
        cell = 1.0
        usual = len(losses) + USUAL * math.sqrt(2 * len(losses))
        for _ in range(3):
            runs = np.minimum(1.0, (RUN_DOF + USUAL**2) / (RUN_DOF + cell * squares))
            cell = min(1.0, (CELL_DOF + usual) / (CELL_DOF + float(runs @ squares)))
        weights.append(cell * runs)
    return weights
