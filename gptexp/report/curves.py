"""Final loss against learning rate, per batch size: parabolas in log2(lr), their minima, and how sure those are.

Near its minimum the loss is close to a parabola in the logarithm of the learning rate; farther off it is skewed, which
would pull the minimum aside, or steeper, which would pass for noise. So each fit takes the five learning rates nearest
to the lowest loss, and all fits take fewer where a cubic term, common to all batch sizes, or a lack of fit shows; where
that may be chance, what the wider fits leave over still counts as noise. The interval of a minimum is Fieller's (1954,
J. R. Stat. Soc. B 16:175): exact for a ratio of estimates, and unbounded where the curvature could be zero.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gptexp.report.noise import CONFIDENCE, LEAST, Noise, f_tail, pool, seed_noise

LEVEL = 1 - CONFIDENCE
CERTAIN = 0.01  # below this what a fit leaves over is no noise; from here to `LEVEL` it may be, and counts as noise
MOST = 5  # learning rates in a fit
WIDEST = 7  # learning rates of which is said whether they lie on a skewed curve

Losses = Mapping[float, Sequence[float]]  # learning rate -> the final loss of each seed, in nats per token
Array = npt.NDArray[np.floating]
Status = Literal["bracketed", "not bracketed", "flat", "too few"]


@dataclass(frozen=True)
class Parabola:
    """loss = a (x - centre)^2 + b (x - centre) + c, with x = log2(lr), by least squares."""

    centre: float
    a: float
    b: float
    c: float
    covariance: Array  # (3, 3), of a, b, c for runs of variance 1
    lrs: tuple[float, ...]
    residual: float  # sum of squares of the learning rates' mean losses, each as often as it has runs
    dof: int  # learning rates less three
    cubic: float  # coefficient of a cubic term added to the fit; 0 where three learning rates leave it open
    cubic_variance: float  # for runs of variance 1; infinite where there is none

    def at(self, x: float) -> float:
        return self.a * (x - self.centre) ** 2 + self.b * (x - self.centre) + self.c

    @property
    def minimum(self) -> float:
        """log2 of the learning rate; `a` must be positive."""
        return self.centre - self.b / (2 * self.a)

    def interval(self, noise: Noise) -> tuple[float, float] | None:
        """Fieller's, of `minimum`: where the slope 2 a x + b may be zero. None where that is no bounded interval."""
        t2 = (noise.t * noise.sigma) ** 2
        v = self.covariance
        p, q, r = 4 * (self.a**2 - t2 * v[0, 0]), 2 * (self.a * self.b - t2 * v[0, 1]), self.b**2 - t2 * v[1, 1]
        if self.a <= 0 or p <= 0:
            return None
        half = math.sqrt(max(0.0, q * q - p * r))
        return self.centre + (-q - half) / p, self.centre + (-q + half) / p

    def sd_of_minimum(self, sigma: float) -> float:
        """Standard error in octaves, to first order."""
        towards = np.array([self.b / (2 * self.a**2), -1 / (2 * self.a), 0.0])
        return sigma * math.sqrt(towards @ self.covariance @ towards)

    def sd_at_minimum(self, sigma: float) -> float:
        """Standard error of the loss there, to first order."""
        x = self.minimum - self.centre
        towards = np.array([x * x, x, 1.0])
        return sigma * math.sqrt(towards @ self.covariance @ towards)


def fit_parabola(losses: Losses) -> Parabola:
    """Over three learning rates or more; every run counts once."""
    root = np.sqrt([len(of_seeds) for of_seeds in losses.values()])  # of the weights
    x = np.log2(list(losses))
    y = root * [np.mean(of_seeds) for of_seeds in losses.values()]
    centre = float(np.average(x, weights=root**2))
    design = root[:, None] * np.vander(x - centre, 3)
    covariance = np.linalg.inv(design.T @ design)
    a, b, c = covariance @ (design.T @ y)
    rest = y - design @ [a, b, c]
    bend = root * (x - centre) ** 3
    bend -= design @ (covariance @ (design.T @ bend))  # what of it no parabola holds
    weight = float(bend @ bend) if len(losses) > 3 else 0.0
    return Parabola(
        centre,
        float(a),
        float(b),
        float(c),
        covariance,
        tuple(sorted(losses)),
        float(rest @ rest),
        len(losses) - 3,
        cubic=float(bend @ rest) / weight if weight else 0.0,
        cubic_variance=1 / weight if weight else math.inf,
    )


@dataclass(frozen=True)
class Optimum:
    """Where the loss is lowest, with 95% intervals. Losses in nats per token."""

    lr: float
    low: float
    high: float
    sd_octaves: float  # standard error of log2(lr)
    loss: float  # of the parabola at `lr`
    loss_sd: float
    tie_low: float  # from here to `tie_high`, within the grid, one run cannot be told from one at `lr`
    tie_high: float
    parabola: Parabola


@dataclass(frozen=True)
class Curve:
    """What the runs at one batch size say of the learning rate; an optimum only where it lies between runs."""

    status: Status
    why: str = ""  # in words, for every status but "bracketed"
    optimum: Optimum | None = None  # "bracketed"
    tied: tuple[float, float] | None = None  # "flat": the learning rates between which none can be told from the best
    extend: float | None = None  # "not bracketed": the learning rate to run next


@dataclass(frozen=True)
class Curves:
    """Those of all batch sizes, and what they were fitted with."""

    of: dict[int, Curve]  # batch size in tokens -> curve
    noise: Noise | None
    width: int  # learning rates in each fit, at most
    skewed: bool  # whether a cubic term shows in up to `WIDEST` learning rates

    @property
    def optima(self) -> dict[int, Optimum]:
        """Batch size in tokens -> optimum, where there is one."""
        return {batch: curve.optimum for batch, curve in self.of.items() if curve.optimum is not None}


def fit_curves(losses: Mapping[int, Losses], diverged: Mapping[int, Sequence[float]]) -> Curves:
    """Fit all batch sizes of one sweep: `losses` of the runs that were completed, learning rates that `diverged`.

    Noise is taken to be the same at all batch sizes: from seeds, and from single runs around their parabolas.
    """
    seeds = seed_noise([of_seeds for at_batch in losses.values() for of_seeds in at_batch.values()])
    inside = {b: at_batch for b, at_batch in losses.items() if len(at_batch) >= 3 and _edge(at_batch) is None}
    fewest = 3 if seeds else 4  # three runs leave nothing over to learn the noise from
    in_doubt: list[Parabola] = []
    for width in range(MOST, fewest - 1, -1):
        fits = {b: fit_parabola(_nearest(at_batch, width)) for b, at_batch in inside.items()}
        chance = min(_straight(list(fits.values()), seeds), _fitting(inside, fits, width, seeds))
        if width == fewest or chance > LEVEL:
            break
        in_doubt = in_doubt or ([*fits.values()] if chance > CERTAIN else [])
    widest = [fit_parabola(_nearest(at_batch, WIDEST)) for at_batch in inside.values()]
    left_over = [(fit.residual, fit.dof) for fit in (in_doubt or fits.values()) if len(fit.lrs) > 3]
    noise = pool(seeds, left_over)
    curves = {b: _curve(at_batch, diverged.get(b, ()), fits.get(b), noise) for b, at_batch in losses.items()}
    return Curves(curves, noise, width, _straight(widest, seeds) < LEVEL)


def _straight(fits: Sequence[Parabola], seeds: Noise | None) -> float:
    """Probability of such a cubic term, common to all batch sizes, by noise: F-test against seeds, or what is left."""
    weight = sum(1 / fit.cubic_variance for fit in fits)
    if not weight:
        return 1.0
    explained = sum(fit.cubic / fit.cubic_variance for fit in fits) ** 2 / weight
    if seeds is not None:
        return f_tail(explained / seeds.sigma**2, 1, seeds.dof)
    dof = sum(fit.dof for fit in fits) - 1
    left = sum(fit.residual for fit in fits) - explained
    return f_tail(explained / max(left / dof, LEAST**2), 1, dof) if dof > 0 else 1.0


def _fitting(losses: Mapping[int, Losses], fits: Mapping[int, Parabola], width: int, seeds: Noise | None) -> float:
    """Probability that the runs lie so far from `fits` by noise: that of seeds, or of fits to one less."""
    rest, dof = sum(fit.residual for fit in fits.values()), sum(fit.dof for fit in fits.values())
    if seeds is not None:
        squares, of = seeds.dof * seeds.sigma**2, seeds.dof
    else:
        narrower = [fit_parabola(_nearest(at_batch, width - 1)) for at_batch in losses.values()]
        squares, of = sum(fit.residual for fit in narrower), sum(fit.dof for fit in narrower)
        rest, dof = rest - squares, dof - of
    if not dof or not of:
        return 1.0
    return f_tail((rest / dof) / max(squares / of, LEAST**2), dof, of)


def _curve(losses: Losses, diverged: Sequence[float], fit: Parabola | None, noise: Noise | None) -> Curve:
    edge = _edge(losses)
    if len(losses) >= 3 and noise is None and edge is not None:
        return _not_bracketed(losses, [lr for lr in losses if lr != edge], diverged)
    if len(losses) < 3 or noise is None:
        return Curve(
            "too few",
            f"{len(losses)} learning rates were trained to the end; four, or three and more seeds, "
            "show an optimum and how sure it is",
        )
    if _is_flat(losses, noise):
        return _flat(losses, noise, "no difference between the learning rates exceeds the noise")
    best = _best(losses)
    # A run at the end that is worse by mere noise would not show that the optimum lies before it.
    worse = [lr for lr in losses if not _tie(losses, lr, best, noise)]
    if not any(lr < best for lr in worse) or not any(lr > best for lr in worse):
        return _not_bracketed(losses, worse, diverged)
    assert fit is not None
    interval = fit.interval(noise)
    if fit.a <= 0 or interval is None:
        return _flat(losses, noise, "the curvature cannot be told from zero")
    x, (low, high) = fit.minimum, interval
    if low <= math.log2(min(losses)) or high >= math.log2(max(losses)):
        inner = sorted(losses)[1:-1]
        if math.log2(inner[0]) <= x <= math.log2(inner[-1]):
            return _flat(losses, noise, "the interval of the minimum is wider than the grid")
        return _not_bracketed(losses, [lr for lr in losses if (lr < best) == (x > math.log2(best))], diverged)
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


def _edge(losses: Losses) -> float | None:
    """The learning rate of the lowest loss where it is the smallest or largest there is."""
    best = _best(losses)
    return best if best in (min(losses), max(losses)) else None


def _nearest(losses: Losses, width: int) -> Losses:
    """The learning rates nearest to that of the lowest loss, its neighbours among them; of two, that of lower loss."""
    lrs, best = sorted(losses), _best(losses)
    i = lrs.index(best)
    neighbours = lrs[i - 1 : i + 2]
    others = sorted(
        set(lrs) - set(neighbours), key=lambda lr: (round(abs(math.log2(lr / best)), 6), np.mean(losses[lr]))
    )
    return {lr: losses[lr] for lr in [*neighbours, *others][:width]}


def _is_flat(losses: Losses, noise: Noise) -> bool:
    """One-way analysis of variance."""
    counts = [len(of_seeds) for of_seeds in losses.values()]
    means = np.array([np.mean(of_seeds) for of_seeds in losses.values()])
    overall = np.average(means, weights=counts)
    between = float(np.sum(counts * (means - overall) ** 2)) / (len(means) - 1)
    return f_tail(between / noise.sigma**2, len(means) - 1, noise.dof) > LEVEL


def _tie(losses: Losses, lr: float, best: float, noise: Noise) -> bool:
    return noise.ties(float(np.mean(losses[lr]) - np.mean(losses[best])), len(losses[lr]), len(losses[best]))


def _flat(losses: Losses, noise: Noise, why: str) -> Curve:
    """From the best outwards, the learning rates that cannot be told from it."""
    best = _best(losses)
    others = [lr for lr in losses if not _tie(losses, lr, best, noise)]
    low = max((lr for lr in others if lr < best), default=0.0)
    high = min((lr for lr in others if lr > best), default=math.inf)
    tied = [lr for lr in losses if low < lr < high]
    return Curve("flat", why, tied=(min(tied), max(tied)))


def _not_bracketed(losses: Losses, worse: Sequence[float], diverged: Sequence[float]) -> Curve:
    """`worse`: the learning rates that are shown to be too small, or too large."""
    lrs, best = sorted(losses), _best(losses)
    if not any(lr < best for lr in worse):
        why, extend = f"nothing that was run below {best:g} is worse by more than noise", lrs[0] ** 2 / lrs[1]
    elif above := [lr for lr in diverged if lr > lrs[-1]]:
        why = f"nothing that was run above {best:g} is worse by more than noise, and {min(above):g} diverged"
        extend = math.sqrt(lrs[-1] * min(above))
    else:
        why, extend = f"nothing that was run above {best:g} is worse by more than noise", lrs[-1] ** 2 / lrs[-2]
    return Curve("not bracketed", why, extend=extend)
