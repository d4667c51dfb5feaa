"""The gradient noise scale: its estimate, the average over steps, the metrics, and why a run cannot measure it.

McCandlish et al., arXiv 1812.06162, appendix A.1: let G be the true gradient and S the covariance of the gradient of
one sequence. A gradient over b sequences has E|g|² = |G|² + tr S / b. Two values of b give unbiased estimates of |G|²
and tr S. The noise scale tr S / |G|² is the batch size, in sequences, at which noise and signal have equal norms. The
ratio of two noisy estimates is biased, so both are averaged over many steps before the division. The file
training/small_gradients.py measures the norms. No torch.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from gptexp.config.batch import legal_micro_batches
from gptexp.config.metrics import Metric
from gptexp.config.schema import Config

LIKE_BATCH = "optim.gradient_noise_like_batch"
LEAST_STEPS = 4  # minimum of the averages' default half-life, in steps of batch.total_batch_size


class Norms(NamedTuple):
    """Squared norms of gradients of mean losses in one step."""

    small: float  # mean over the measured gradients, each of `small_sequences` sequences
    big: float  # squared norm of the step's gradient, before clipping
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
    earlier_noise: float = 0.0  # `valid_noise` before the newest step

    def take(self, norms: Norms, tokens: int, half_life_tokens: float) -> None:
        """Add the norms of a step that ends after `tokens` tokens. The weight of older steps halves each half-life."""
        keep = 0.5 ** (max(0, tokens - self.tokens) / half_life_tokens)
        self.signal_sum = keep * self.signal_sum + (1 - keep) * norms.signal()
        self.noise_sum = keep * self.noise_sum + (1 - keep) * norms.noise()
        self.weight = keep * self.weight + (1 - keep)
        self.tokens = tokens

    @property
    def signal(self) -> float:
        """|G|²; NaN while the estimates have no weight, as with a half-life that is far longer than the run."""
        return self.signal_sum / self.weight if self.weight > 0 else math.nan

    @property
    def noise(self) -> float:
        """tr S of one sequence; NaN as `signal` is."""
        return self.noise_sum / self.weight if self.weight > 0 else math.nan

    @property
    def valid_noise(self) -> float:
        """`noise`; 0 as long as it is not positive, or nothing was measured."""
        return self.noise if self.noise > 0 else 0.0

    @property
    def sequences(self) -> float:
        """The noise scale in sequences; NaN unless both averages are positive, which takes enough steps."""
        return self.noise_sum / self.signal_sum if min(self.signal_sum, self.noise_sum) > 0 else math.nan

    def metrics(self, norms: Norms, cosine: float, seq_len: int) -> dict[str, float]:
        """Metrics of the newest step: the raw norms, from which other averages can be computed, and the averages.

        `cosine` is that of two micro-batches' gradients; NaN if it was not measured.
        """
        return {
            Metric.GNS_SMALL_SQ_NORM: norms.small,
            Metric.GNS_BIG_SQ_NORM: norms.big,
            Metric.GNS_SMALL_SEQUENCES: norms.small_sequences,
            Metric.GNS_GRAD_SQ: self.signal,
            Metric.GNS_NOISE_TRACE: self.noise,
            Metric.GNS_SEQUENCES: self.sequences,
            Metric.GNS_TOKENS: self.sequences * seq_len,
            Metric.GNS_COS: cosine,
        }


def noise_half_life(cfg: Config, run_tokens: int) -> float:
    """Half-life of the noise scale's averages, in tokens."""
    return cfg.log.noise_half_life_tokens or max(run_tokens / 100, LEAST_STEPS * cfg.batch.total_batch_size)


def needing_noise_scale(cfg: Config) -> str | None:
    """The setting that requires the noise scale to be measured; None if there is none."""
    if (like := cfg.optim.gradient_noise_like_batch) is not None:
        return f"{LIKE_BATCH}={like}"
    return "log.noise_scale=on" if cfg.log.noise_scale == "on" else None


def why_unmeasured(cfg: Config, micro_batch_size: int, world_size: int) -> str | None:
    """The reason why a run does not measure its noise scale; None if it does.

    If a setting requires it, every step must be measurable, even the first and smallest one of a ramp.
    """
    if cfg.log.noise_scale == "off":
        return "log.noise_scale=off"
    sizes = cfg.batch.step_sizes
    return unmeasurable(cfg, micro_batch_size, world_size, sizes.start if needing_noise_scale(cfg) else sizes.total)


def unmeasurable(cfg: Config, micro_batch_size: int, world_size: int, step_tokens: int) -> str | None:
    """The reason why a step of `step_tokens` tokens cannot measure the noise scale, with the fix; None if it can."""
    t = cfg.seq_len
    if cfg.data.order == "sequential":
        return (
            "data.order=sequential puts consecutive text into one micro-batch, but the estimate needs independent "
            "sequences; use data.order=shuffled"
        )
    if micro_batch_size * t * world_size < step_tokens or world_size > 1:
        return None
    sizes = legal_micro_batches(cfg.batch.step_sizes.quantum, t, world_size)
    smaller = [size for size in sizes if size < micro_batch_size]
    larger = "batch.total_batch_size" if cfg.batch.ramp_tokens is None else "batch.ramp_from_tokens"
    fix = f"use batch.micro_batch_size={smaller[0]}" if smaller else f"use a larger {larger}"
    return f"the estimate compares micro-batches, and a step on one rank has only one; {fix}"
