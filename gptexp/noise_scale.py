"""The gradient noise scale of a run, from the norms of a small and a large gradient of the same step: no torch.

McCandlish et al., arXiv 1812.06162, appendix A.1: with G the true gradient and S the covariance of one sequence's, a
gradient over b sequences has E|g|² = |G|² + tr S / b. Two sizes of b give both unknowns, each without bias, and the
noise scale tr S / |G|² is the batch size, in sequences, at which noise and signal are equally long. A ratio of noisy
numbers is biased, so both are averaged over many steps first and divided then.
"""

import math
from dataclasses import dataclass

from gptexp.batch import legal_micro_batches
from gptexp.config import Config

LEAST_STEPS = 4  # that a half-life is long unless it is given


@dataclass(frozen=True)
class Norms:
    """Squared norms of gradients of mean losses, all of one step."""

    small: float  # of `small_sequences` sequences; the mean over those that were measured
    big: float  # of the whole step, before clipping
    small_sequences: int
    big_sequences: int  # a multiple of `small_sequences`, and larger

    def signal(self) -> float:
        """Estimate of |G|²: the mean inner product of two small gradients. May be negative."""
        n = self.big_sequences / self.small_sequences
        return (n * self.big - self.small) / (n - 1)

    def noise(self) -> float:
        """Estimate of tr S, per sequence: the small gradients' sample variance, times their sequences."""
        n = self.big_sequences / self.small_sequences
        return self.small_sequences * n * (self.small - self.big) / (n - 1)

    def cosine(self) -> float:
        """Of two small gradients: their mean product over their mean squared norm."""
        return self.signal() / self.small


@dataclass
class NoiseScale:
    """Exponential moving averages of both estimates; what a run carries from step to step, and checkpoints hold."""

    signal_sum: float = 0.0
    noise_sum: float = 0.0
    weight: float = 0.0  # of what is in the sums; tends to 1
    tokens: int = 0  # of the run, when it was last measured

    def take(self, norms: Norms, tokens: int, half_life_tokens: float) -> None:
        """Take in a step that ends after `tokens` tokens; what was taken in a half-life before counts half."""
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
        """tr S, per sequence."""
        return self.noise_sum / self.weight

    @property
    def sequences(self) -> float:
        """The noise scale; NaN while too few steps are averaged for both estimates to be positive."""
        return self.noise_sum / self.signal_sum if min(self.signal_sum, self.noise_sum) > 0 else math.nan


def metrics(norms: Norms, cosine: float, averages: NoiseScale, seq_len: int) -> dict[str, float]:
    """What is logged of a measured step: the raw pair, from which any other average can be taken, and ours."""
    return {
        "gns/small_sq_norm": norms.small,
        "gns/big_sq_norm": norms.big,
        "gns/small_sequences": norms.small_sequences,
        "gns/grad_sq": averages.signal,
        "gns/noise_trace": averages.noise,
        "gns/sequences": averages.sequences,
        "gns/tokens": averages.sequences * seq_len,
        "gns/cos": cosine,
    }


def noise_half_life(cfg: Config, run_tokens: int) -> float:
    """Of the averages, in tokens."""
    return cfg.log.noise_half_life_tokens or max(run_tokens / 100, LEAST_STEPS * cfg.batch.total_batch_size)


def why_unmeasured(cfg: Config, micro_batch_size: int, world_size: int) -> str | None:
    """Why a run does not measure its noise scale; None if it does."""
    return "log.noise_scale=off" if cfg.log.noise_scale == "off" else unmeasurable(cfg, micro_batch_size, world_size)


def unmeasurable(cfg: Config, micro_batch_size: int, world_size: int) -> str | None:
    """Why a run of `world_size` ranks can't tell its noise scale, with the fix; None if it can."""
    total, t = cfg.batch.total_batch_size, cfg.seq_len
    if cfg.data.order == "sequential":
        return (
            "data.order=sequential puts neighbouring text into one micro-batch, and it needs independent sequences; "
            "use data.order=shuffled"
        )
    if micro_batch_size * t * world_size < total or world_size > 1:
        return None
    smaller = [size for size in legal_micro_batches(total, t, world_size) if size < micro_batch_size]
    fix = f"use batch.micro_batch_size={smaller[0]}" if smaller else "use a larger batch.total_batch_size"
    return f"one micro-batch on one rank has nothing to be compared with; {fix}"
