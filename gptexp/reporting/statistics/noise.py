"""How much a run's final loss varies over seeds, as a prior of a sweep's noise; how many seeds show a difference.

Only seeds measure noise. The residuals of a fit to a few learning rates are misfit as much as noise.
"""

import math

from scipy import special  # scipy.stats has the same functions under clearer names, but takes a second to import

CONFIDENCE = 0.95
LEVEL = 1 - CONFIDENCE  # significance level of tests
POWER = 0.8

# Standard deviations over seeds, in nats: (parameters, training tokens, standard deviation).
USUAL_SPREADS = (
    # model=nano on `stdlib`: median over 50 cells of 3 seeds. Over 26 cells of 4 seeds at high learning rates: 0.069.
    # Between 16,000 and 820,000 tokens it is 0.04 to 0.09, without a trend.
    (1.6e6, 1.6e4, 0.051),
    (7e4, 1e6, 0.03),  # 75 thousand parameters on `stdlib`: median of 10 cells near the best learning rates of 3 sizes
    (7.2e6, 2.05e5, 0.026),  # 4 layers of width 128 on this package's `stdlib` corpus
    (1.24e8, 7e8, 0.005),  # modded-nanogpt, logs of 2024-11-19 at a loss of 3.28
    (1.24e8, 1.5e9, 0.002),  # modded-nanogpt, logs of 2025-01-16 to 2025-10
    (3.5e8, 3e9, 0.0007),  # modded-nanogpt, medium track, 19 runs
)
LARGEST_SPREAD = 0.12  # for shorter or smaller runs: root mean square over the 50 cells above
# Seeds move a loss by at most this share of what the run has learned, which is how far its loss is below that of a
# uniform guess: in the first steps all models learn the same, and seeds move a loss by hundredths.
LARGEST_SHARE = 0.1


def usual_spread(parameters: float, tokens: float, learned: float = math.inf) -> float:
    """Return the standard deviation over seeds that runs of this size and length have had, in nats.

    Larger and longer runs usually vary less. So the smallest value of runs no larger and no longer is taken.
    `learned`: how far the losses are below that of a uniform guess, in nats.
    """
    bounds = [sd for size, length, sd in USUAL_SPREADS if size <= parameters and length <= tokens]
    return min(*bounds, LARGEST_SPREAD, max(LARGEST_SHARE * learned, 0.01))


def t_quantile(dof: float) -> float:
    """Student's two-sided quantile at `CONFIDENCE`."""
    return float(special.stdtrit(dof, (1 + CONFIDENCE) / 2))


def f_tail(ratio: float, dof: int, dof_below: int) -> float:
    """P(F > `ratio`) for Fisher's F distribution with `dof` (numerator) and `dof_below` (denominator)."""
    return float(special.fdtrc(dof, dof_below, ratio))


def seeds_needed(difference: float, variance: float, pairs: int = 1) -> int:
    """Seeds per cell that show a `difference` between two cells' mean losses with power 0.8 at the 5% level.

    `variance`: one run's variance in one cell plus that in the other; `pairs`: number of pairs of cells compared, for
    Bonferroni's correction. Normal approximation: (z_0.975 + z_0.8)^2 variance / difference^2, rounded up.
    """
    z = float(special.ndtri(1 - LEVEL / 2 / pairs) + special.ndtri(POWER))
    return max(1, math.ceil(z**2 * variance / difference**2))
