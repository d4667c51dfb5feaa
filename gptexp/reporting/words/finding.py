"""What the sentences of a report are made of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gptexp.process.words import counted
from gptexp.reporting.statistics.forms import Array
from gptexp.reporting.statistics.noise import LEVEL
from gptexp.reporting.statistics.posterior import interval

OF_LOWEST = "The 95% intervals are corrected for choosing the lowest."
MOST_SEEDS = 50  # a difference that takes more of them per cell is too small to matter


@dataclass(frozen=True)
class Finding:
    """A conclusion. `badges` are labels of a word or two, shown beside it on a page."""

    text: str  # one sentence
    why: str = ""  # the statistics behind it, in sentences
    badges: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return f"{self.text} {self.why}".strip()


@dataclass(frozen=True)
class Verdict:
    """What the runs say, in the order in which it is read."""

    warnings: list[Finding]
    answers: list[Finding]  # to `question`, if sentences answer it and no table does
    findings: list[Finding]  # what else follows, the most important first
    caveats: list[Finding]  # what the runs cannot say, and how to read the numbers
    question: str = "Which learning rate"

    @property
    def lines(self) -> list[str]:
        return [f.line for f in (*self.warnings, *self.answers, *self.findings, *self.caveats)]

    @property
    def shortest(self) -> list[str]:
        """`lines` without the statistics behind each conclusion, without caveats, and with one warning at most."""
        warnings = [f.text for f in self.warnings[:1]]
        if others := len(self.warnings) - 1:
            warnings = [f"{text} ({counted(others, 'more warning')})" for text in warnings]
        return [*warnings, *(f.text for f in (*self.answers, *self.findings))]


def tokens(count: float) -> str:
    return f"{count:,.0f} tokens a step"


def sizes(batches: Sequence[int]) -> str:
    """Batch sizes as a list of numbers."""
    return ", ".join(f"{batch:,}" for batch in batches)


def interval_of(low: float, high: float, form: str = ".2f") -> str:
    return f"95% interval {low:{form}} to {high:{form}}"


def nats_higher(gaps: Array, losses: int) -> str:
    """Words for how far a loss is above the lowest of several. `gaps`: draws of this, in nats; `losses`: how many.

    As the lowest was chosen, the 95% interval is wider by Bonferroni's correction for all pairs.
    """
    low, high = interval(gaps, 1 - LEVEL / math.comb(losses, 2))
    return f"{np.median(gaps):.4f} ({low:.4f} to {high:.4f}) nats higher{', within noise' if low <= 0 else ''}"


def seeds_in_words(needed: int) -> str:
    """A number of seeds, up to the most that anybody would run."""
    return counted(needed, "seed") if needed <= MOST_SEEDS else f"more than {MOST_SEEDS} seeds"
