"""Where the best learning rate of a batch size probably is, before it has runs: from a formula, and from other sizes.

log2 of the best learning rate is the prior's value plus an error. The errors of different batch sizes are normal, and
have a common part, a slope and a bend in log2 of the batch size, and a part of their own. Their standard deviations are
wide enough for published laws (arXiv 2503.04715, 2510.03871): a prior decides where runs begin, not what they find.
"""

from collections.abc import Mapping

import numpy as np

from gptexp.reporting.statistics.forms import Array

COLD = 0.85  # octaves: standard deviation of the common part, without a law that was fitted to such runs
FITTED = 0.4  # the same with a law that was fitted to similar runs
SLOPE, SLOPE_SD, BEND_SD = 0.3, 0.4, 0.2  # octaves of learning rate per octave of the batch size, and per its square
Z = 1.96  # standard deviations on each side of a 95% interval
SCATTER = 0.3  # octaves: standard deviation of the part that each batch size has for itself


def step_law(parameters: float, tokens: float, batch: int) -> float:
    """The best peak learning rate of AdamW: Step Law's formula, moved from its best batch size to `batch` tokens.

    `parameters`: without embeddings; `tokens`: of the run.
    """
    lr, best_batch = 1.79 * parameters**-0.713 * tokens**0.307, 0.58 * tokens**0.571
    return float(lr * (batch / best_batch) ** SLOPE)


def expected_optima(
    prior: Mapping[int, float], known: Mapping[int, tuple[float, float]], spread: float = COLD
) -> tuple[Array, Array]:
    """Means and covariance of log2 of the best learning rates at the batch sizes of `prior`, by rising batch size.

    `prior`: batch size in tokens -> learning rate; `known`: batch size -> mean and variance of log2 of the best
    learning rate, where runs have found it; `spread`: standard deviation of the prior, in octaves.
    """
    sizes = sorted(prior)
    z = np.log2(sizes) - np.mean(np.log2(sizes))
    design = np.vander(z, 3)  # bend, slope, common part
    kernel = design @ np.diag([BEND_SD**2, SLOPE_SD**2, spread**2]) @ design.T + SCATTER**2 * np.eye(len(z))
    mean = np.log2([prior[size] for size in sizes])
    at = [sizes.index(size) for size in known]
    if not at:
        return mean, kernel
    found, variance = np.array([known[sizes[i]] for i in at]).T
    gain = np.linalg.solve(kernel[np.ix_(at, at)] + np.diag(variance), kernel[at]).T
    return mean + gain @ (found - mean[at]), kernel - gain @ kernel[at]


def law_intervals(
    prior: Mapping[int, float], known: Mapping[int, tuple[float, float]], spread: float = COLD
) -> dict[int, tuple[float, float, float]]:
    """Batch size -> the expected best learning rate, and its 95% interval; see `expected_optima`."""
    means, covariance = expected_optima(prior, known, spread)
    half = Z * np.sqrt(covariance.diagonal())
    columns = (2**ends for ends in (means, means - half, means + half))
    return dict(zip(sorted(prior), zip(*(column.tolist() for column in columns), strict=True), strict=True))


def starts(prior: Mapping[int, float], known: Mapping[int, tuple[float, float]], spread: float) -> dict[int, float]:
    """Batch size -> the learning rate at which its search begins; see `expected_optima`."""
    means, _ = expected_optima(prior, known, spread)
    return dict(zip(sorted(prior), (2**means).tolist(), strict=True))
