"""Final loss against learning rate, for each batch size: parabolas in log2(lr) and the intervals of their minima.

Near its minimum the loss is close to a parabola in the logarithm of the learning rate. Farther away it may be skewed,
which shifts the fitted minimum, or steeper, which enlarges the residuals. So each fit takes the five learning rates
nearest to the lowest loss. All fits take fewer if a lack of fit, or a cubic term common to all batch sizes, is
significant. If the evidence is weak (p between `CERTAIN` and `LEVEL`), the noise is still estimated from the wider
fits. The interval of a minimum is Fieller's (1954, J. R. Stat. Soc. B 16:175): exact for a ratio of estimates, and
unbounded where the curvature could be zero.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gptexp.config.schema import counted
from gptexp.reporting.noise import CONFIDENCE, MIN_SIGMA, Noise, f_tail, pool, seed_noise

LEVEL = 1 - CONFIDENCE
CERTAIN = 0.01  # p-value below which a misfit is real; from here to `LEVEL` its residuals still count as noise
MOST = 5  # learning rates in a fit
WIDEST = 7  # learning rates that are tested for a cubic term, to report skewed curves

Losses = Mapping[float, Sequence[float]]  # learning rate -> the final loss of each seed, in nats per token
Array = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Parabola:
    """loss = a (x - centre)^2 + b (x - centre) + c, with x = log2(lr), by least squares."""

    centre: float
    a: float
    b: float
    c: float
    covariance: Array  # (3, 3), of a, b, c for runs of variance 1
    lrs: tuple[float, ...]
    residual: float  # sum of squared residuals of the mean losses per learning rate, weighted by the number of runs
    dof: int  # number of learning rates less three
    cubic: float  # coefficient of a cubic term added to the fit; 0 with three learning rates
    cubic_variance: float  # for runs of variance 1; infinite with three learning rates

    def at(self, x: float) -> float:
        return self.a * (x - self.centre) ** 2 + self.b * (x - self.centre) + self.c

    @property
    def minimum(self) -> float:
        """log2 of the learning rate; `a` must be positive."""
        return self.centre - self.b / (2 * self.a)

    def interval(self, noise: Noise) -> tuple[float, float] | None:
        """Fieller's 95% interval of `minimum`: each x where the slope does not differ significantly from zero.

        Returns None if the interval is unbounded.
        """
        t2 = (noise.t * noise.sigma) ** 2
        v = self.covariance
        p, q, r = 4 * (self.a**2 - t2 * v[0, 0]), 2 * (self.a * self.b - t2 * v[0, 1]), self.b**2 - t2 * v[1, 1]
        if self.a <= 0 or p <= 0:
            return None
        half = math.sqrt(max(0.0, q * q - p * r))
        return self.centre + (-q - half) / p, self.centre + (-q + half) / p

    def sd_of_minimum(self, sigma: float) -> float:
        """Standard error of `minimum` in octaves, to first order."""
        gradient = np.array([self.b / (2 * self.a**2), -1 / (2 * self.a), 0.0])
        return sigma * math.sqrt(gradient @ self.covariance @ gradient)

    def sd_at_minimum(self, sigma: float) -> float:
        """Standard error of the loss at `minimum`, to first order."""
        x = self.minimum - self.centre
        gradient = np.array([x * x, x, 1.0])
        return sigma * math.sqrt(gradient @ self.covariance @ gradient)


def fit_parabola(losses: Losses) -> Parabola:
    """Fit three learning rates or more. Every run has the same weight."""
    root = np.sqrt([len(of_seeds) for of_seeds in losses.values()])  # square roots of the weights
    x = np.log2(list(losses))
    y = root * [np.mean(of_seeds) for of_seeds in losses.values()]
    centre = float(np.average(x, weights=root**2))
    design = root[:, None] * np.vander(x - centre, 3)
    covariance = np.linalg.inv(design.T @ design)
    a, b, c = map(float, covariance @ (design.T @ y))
    rest = y - design @ [a, b, c]
    cubic = root * (x - centre) ** 3
    cubic -= design @ (covariance @ (design.T @ cubic))  # its part that is orthogonal to every parabola
    weight = float(cubic @ cubic) if len(losses) > 3 else 0.0
    coefficient, variance = (float(cubic @ rest) / weight, 1 / weight) if weight else (0.0, math.inf)
    lrs, dof = tuple(sorted(losses)), len(losses) - 3
    return Parabola(centre, a, b, c, covariance, lrs, float(rest @ rest), dof, coefficient, variance)


@dataclass(frozen=True)
class Optimum:
    """The best learning rate, with 95% intervals. Losses in nats per token."""

    lr: float
    low: float
    high: float
    sd_octaves: float  # standard error of log2(lr)
    loss: float  # of the parabola at `lr`
    loss_sd: float
    tie_low: float  # a run between this and `tie_high` does not differ significantly from a run at `lr`
    tie_high: float
    parabola: Parabola


@dataclass(frozen=True)
class Curve:
    """The fit at one batch size. It has an optimum only if worse learning rates lie on both sides."""

    status: Literal["bracketed", "not bracketed", "flat", "too few"]
    why: str = ""  # the reason for any status but "bracketed"
    optimum: Optimum | None = None  # "bracketed"
    tied: tuple[float, float] | None = None  # "flat": the range of learning rates that tie with the best
    extend: float | None = None  # "not bracketed": the learning rate to run next


@dataclass(frozen=True)
class Curves:
    """The curves of all batch sizes, and the noise and width they share."""

    of: dict[int, Curve]  # batch size in tokens -> curve
    noise: Noise | None
    width: int  # learning rates in each fit, at most
    skewed: bool  # a cubic term is significant in the `WIDEST` nearest learning rates

    @property
    def optima(self) -> dict[int, Optimum]:
        """Batch size in tokens -> optimum, for the batch sizes that have one."""
        return {batch: curve.optimum for batch, curve in self.of.items() if curve.optimum is not None}


def fit_curves(losses: Mapping[int, Losses], diverged: Mapping[int, Sequence[float]]) -> Curves:
    """Fit all batch sizes of one sweep.

    `losses`: batch size -> losses of completed runs; `diverged`: batch size -> learning rates that diverged. The noise
    is assumed to be equal at all batch sizes; it is estimated from seeds and from the residuals of the fits.
    """
    seeds = seed_noise([of_seeds for at_batch in losses.values() for of_seeds in at_batch.values()])
    inside = {b: at_batch for b, at_batch in losses.items() if len(at_batch) >= 3 and not _best_is_at_edge(at_batch)}
    fewest = 3 if seeds else 4  # a fit to three learning rates leaves no residual to estimate the noise from
    doubtful: list[Parabola] = []
    for width in range(MOST, fewest - 1, -1):
        fits = {b: fit_parabola(_nearest(at_batch, width)) for b, at_batch in inside.items()}
        p_value = min(_p_of_cubic(list(fits.values()), seeds), _p_of_misfit(inside, fits, width, seeds))
        if width == fewest or p_value > LEVEL:
            break
        doubtful = doubtful or ([*fits.values()] if p_value > CERTAIN else [])
    widest = [fit_parabola(_nearest(at_batch, WIDEST)) for at_batch in inside.values()]
    noise = pool(seeds, [(fit.residual, fit.dof) for fit in (doubtful or fits.values()) if fit.dof])
    curves = {b: _curve(at_batch, diverged.get(b, ()), fits.get(b), noise) for b, at_batch in losses.items()}
    return Curves(curves, noise, width, _p_of_cubic(widest, seeds) < LEVEL)


def _p_of_cubic(fits: Sequence[Parabola], seeds: Noise | None) -> float:
    """p-value of a cubic term common to all batch sizes: F-test against the seeds' noise, else the residuals."""
    weight = sum(1 / fit.cubic_variance for fit in fits)
    if not weight:
        return 1.0
    explained = sum(fit.cubic / fit.cubic_variance for fit in fits) ** 2 / weight
    if seeds is not None:
        return f_tail(explained / seeds.sigma**2, 1, seeds.dof)
    dof = sum(fit.dof for fit in fits) - 1
    left = sum(fit.residual for fit in fits) - explained
    return f_tail(explained / max(left / dof, MIN_SIGMA**2), 1, dof) if dof > 0 else 1.0


def _p_of_misfit(losses: Mapping[int, Losses], fits: Mapping[int, Parabola], width: int, seeds: Noise | None) -> float:
    """p-value of the residuals: F-test against the seeds' noise, else against fits to one learning rate less."""
    rest, dof = sum(fit.residual for fit in fits.values()), sum(fit.dof for fit in fits.values())
    if seeds is not None:
        squares, dof_below = seeds.dof * seeds.sigma**2, seeds.dof
    else:
        narrower = [fit_parabola(_nearest(at_batch, width - 1)) for at_batch in losses.values()]
        squares, dof_below = sum(fit.residual for fit in narrower), sum(fit.dof for fit in narrower)
        rest, dof = rest - squares, dof - dof_below
    if not dof or not dof_below:
        return 1.0
    return f_tail((rest / dof) / max(squares / dof_below, MIN_SIGMA**2), dof, dof_below)


def _curve(losses: Losses, diverged: Sequence[float], fit: Parabola | None, noise: Noise | None) -> Curve:
    best = _best(losses)
    if len(losses) >= 3 and noise is None and _best_is_at_edge(losses):
        return _not_bracketed(losses, [lr for lr in losses if lr != best], diverged)
    if len(losses) < 3 or noise is None:
        completed = counted(len(losses), "learning rate")
        return Curve("too few", f"{completed} completed; an interval needs four, or three with several seeds")
    if _is_flat(losses, noise):
        return _flat(losses, noise, "the losses of the learning rates do not differ significantly")
    # The optimum is bracketed only if a learning rate on each side of the best is significantly worse.
    worse = _worse(losses, noise)
    if not any(lr < best for lr in worse) or not any(lr > best for lr in worse):
        return _not_bracketed(losses, worse, diverged)
    assert fit is not None
    interval = fit.interval(noise)
    if fit.a <= 0 or interval is None:
        return _flat(losses, noise, "the curvature is not significantly above zero")
    x, (low, high) = fit.minimum, interval
    if low <= math.log2(min(losses)) or high >= math.log2(max(losses)):
        inner = sorted(losses)[1:-1]
        if math.log2(inner[0]) <= x <= math.log2(inner[-1]):
            return _flat(losses, noise, "the 95% interval of the minimum is not within the grid")
        side, end = ("above", inner[-1]) if x > math.log2(best) else ("below", inner[0])
        why = f"the fitted minimum is {side} {end:g}, and its 95% interval is not within the grid"
        return _not_bracketed(losses, [lr for lr in losses if (lr < best) == (side == "above")], diverged, why)
    reach = math.sqrt(noise.t * noise.sigma * math.sqrt(2) / fit.a)
    optimum = Optimum(
        lr=2**x,
        low=2**low,
        high=2**high,
        sd_octaves=fit.sd_of_minimum(noise.sigma),
        loss=fit.at(x),
        loss_sd=fit.sd_at_minimum(noise.sigma),
        tie_low=max(2 ** (x - reach), min(losses)),
        tie_high=min(2 ** (x + reach), max(losses)),
        parabola=fit,
    )
    return Curve("bracketed", optimum=optimum)


def _best(losses: Losses) -> float:
    return min(losses, key=lambda lr: np.mean(losses[lr]))


def _best_is_at_edge(losses: Losses) -> bool:
    return _best(losses) in (min(losses), max(losses))


def _nearest(losses: Losses, width: int) -> Losses:
    """The `width` learning rates nearest to the best one. Its two neighbours come first; ties go to the lower loss."""
    lrs, best = sorted(losses), _best(losses)
    i = lrs.index(best)
    neighbours = lrs[i - 1 : i + 2]
    others = sorted(set(lrs) - {*neighbours}, key=lambda lr: (round(abs(math.log2(lr / best)), 6), np.mean(losses[lr])))
    return {lr: losses[lr] for lr in [*neighbours, *others][:width]}


def _is_flat(losses: Losses, noise: Noise) -> bool:
    """One-way analysis of variance."""
    counts = [len(of_seeds) for of_seeds in losses.values()]
    means = np.array([np.mean(of_seeds) for of_seeds in losses.values()])
    overall = np.average(means, weights=counts)
    between = float(np.sum(counts * (means - overall) ** 2)) / (len(means) - 1)
    return f_tail(between / noise.sigma**2, len(means) - 1, noise.dof) > LEVEL


def _worse(losses: Losses, noise: Noise) -> list[float]:
    """The learning rates that are significantly worse than the best one."""
    best = losses[_best(losses)]
    return [
        lr
        for lr, of_seeds in losses.items()
        if not noise.ties(float(np.mean(of_seeds) - np.mean(best)), len(of_seeds), len(best))
    ]


def _flat(losses: Losses, noise: Noise, why: str) -> Curve:
    """A flat curve, with the learning rates around the best one up to the first that is significantly worse."""
    best, worse = _best(losses), _worse(losses, noise)
    low = max((lr for lr in worse if lr < best), default=0.0)
    high = min((lr for lr in worse if lr > best), default=math.inf)
    tied = [lr for lr in losses if low < lr < high]
    return Curve("flat", why, tied=(min(tied), max(tied)))


def _not_bracketed(losses: Losses, worse: Sequence[float], diverged: Sequence[float], why: str = "") -> Curve:
    """`worse`: learning rates known to be too small, or too large. `why` replaces the usual reason."""
    lrs, best = sorted(losses), _best(losses)
    side = "above" if any(lr < best for lr in worse) else "below"
    why = why or f"no learning rate {side} {best:g} has a significantly higher loss"
    if side == "below":
        extend = lrs[0] ** 2 / lrs[1]
    elif above := [lr for lr in diverged if lr > lrs[-1]]:
        why += f", and {min(above):g} diverged"
        extend = math.sqrt(lrs[-1] * min(above))
    else:
        extend = lrs[-1] ** 2 / lrs[-2]
    return Curve("not bracketed", why, extend=extend)
