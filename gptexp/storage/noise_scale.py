"""The gradient noise scale, from the norms of a small-batch and a large-batch gradient of the same step. No torch.

McCandlish et al., arXiv 1812.06162, appendix A.1: let G be the true gradient and S the covariance of the gradient of
one sequence. A gradient over b sequences has E|g|² = |G|² + tr S / b. Two values of b give unbiased estimates of |G|²
and tr S. The noise scale tr S / |G|² is the batch size, in sequences, at which noise and signal have equal norms. The
ratio of two noisy estimates is biased, so both are averaged over many steps before the division.
"""

import math
from dataclasses import dataclass

from gptexp.config.metrics import Metric


@dataclass(frozen=True)
class Norms:
    """Squared norms of gradients of mean losses in one step."""

    small: float  # of gradients over `small_sequences` sequences, averaged over the measured gradients
    big: float  # of the step's gradient, before clipping
    small_sequences: int
    big_sequences: int  # a multiple of `small_sequences`, and larger

    def signal(self) -> float:
        """Estimate of |G|²: the mean inner product of two small-batch gradients. May be negative."""
        n = self.big_sequences / self.small_sequences
        return (n * self.big - self.small) / (n - 1)

    def noise(self) -> float:
        """Estimate of tr S of one sequence: the sample variance of small-batch gradients times `small_sequences`."""
        n = self.big_sequences / self.small_sequences
        return self.small_sequences * n * (self.small - self.big) / (n - 1)

    def cosine(self) -> float:
        """Cosine of two small-batch gradients: their mean inner product divided by their mean squared norm."""
        return self.signal() / self.small


@dataclass
class NoiseScale:
    """Exponential moving averages of both estimates. Checkpoints hold them."""

    signal_sum: float = 0.0
    noise_sum: float = 0.0
    weight: float = 0.0  # total weight of the estimates in the sums; tends to 1
    tokens: int = 0  # training tokens at the last measurement

    def take(self, norms: Norms, tokens: int, half_life_tokens: float) -> None:
        """Add the norms of a step that ends after `tokens` tokens. The weight of older steps halves each half-life."""
        keep = 0.5 ** ((tokens - self.tokens) / half_life_tokens)
        self.signal_sum = keep * self.signal_sum + (1 - keep) * norms.signal()
        self.noise_sum = keep * self.noise_sum + (1 - keep) * norms.noise()
        self.weight = keep * self.weight + (1 - keep)
        self.tokens = tokens

    @property
    def signal(self) -> float:
        """|G|²."""
        return self.signal_sum / self.weight

    @property
    def noise(self) -> float:
        """tr S of one sequence."""
        return self.noise_sum / self.weight

    @property
    def valid_noise(self) -> float:
        """`noise`; 0 as long as it is not positive, or nothing was measured."""
        return self.noise if self.noise_sum > 0 else 0.0

    @property
    def sequences(self) -> float:
        """The noise scale in sequences; NaN unless both averages are positive, which takes enough steps."""
        return self.noise_sum / self.signal_sum if min(self.signal_sum, self.noise_sum) > 0 else math.nan


def metrics(norms: Norms, cosine: float, averages: NoiseScale, seq_len: int) -> dict[str, float]:
    """Metrics of a measured step: the raw norms, from which other averages can be computed, and the averages."""
    return {
        Metric.GNS_SMALL_SQ_NORM: norms.small,
        Metric.GNS_BIG_SQ_NORM: norms.big,
        Metric.GNS_SMALL_SEQUENCES: norms.small_sequences,
        Metric.GNS_GRAD_SQ: averages.signal,
        Metric.GNS_NOISE_TRACE: averages.noise,
        Metric.GNS_SEQUENCES: averages.sequences,
        Metric.GNS_TOKENS: averages.sequences * seq_len,
        Metric.GNS_COS: cosine,
    }
