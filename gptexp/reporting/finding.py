"""The sentences of a report."""

from dataclasses import dataclass

BEHIND_NATS = 0.05  # by which an arm falls behind, unless asked otherwise; see `arms.falls_behind`


@dataclass(frozen=True)
class Finding:
    """A conclusion. `badges` belong to the answer for one batch size."""

    text: str  # one sentence
    why: str = ""  # the statistics behind it, in sentences
    badges: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return f"{self.text} {self.why}".strip()


def nats_higher(gap: float, half_width: float) -> str:
    """A loss that is `gap` nats above another one, with half of the 95% interval of that."""
    return f"{gap:.4f} ± {half_width:.4f} nats higher{' (within noise)' if gap <= half_width else ''}"


@dataclass(frozen=True)
class Verdict:
    """What the runs say, in the order in which it is read."""

    warnings: list[Finding]
    answers: list[Finding]  # the best learning rate at each batch size
    findings: list[Finding]  # what else follows
    caveats: list[Finding]  # what the runs cannot say, and how to read the numbers
    question: str = "Which learning rate"  # that the answers answer

    @property
    def lines(self) -> list[str]:
        return [f.line for f in (*self.warnings, *self.answers, *self.findings, *self.caveats)]
