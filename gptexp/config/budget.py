"""The limits of a search: what it may cost (time, tokens or runs), and the range of the values that it tries."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from gptexp.process.errors import ConfigError
from gptexp.process.fields import parse_count
from gptexp.process.words import counted, duration, shown

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
TIME, COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])"), re.compile(r"(\S+?)\s*(tokens?|runs?|)")
FEWEST_RUNS = 3  # a lowest point needs three learning rates


@dataclass(frozen=True)
class Budget:
    """An amount of `seconds`, `tokens` or `runs`."""

    unit: Literal["seconds", "tokens", "runs"]
    amount: float

    def __str__(self) -> str:
        if self.unit == "seconds":
            return duration(self.amount)
        return f"{self.amount:,.0f} tokens" if self.unit == "tokens" else counted(round(self.amount), "run")


def parse_budget(text: object) -> Budget:
    """Read a budget such as `20m`, `8h`, `200M tokens`, `200M` or `30 runs`. Raises `ConfigError`."""
    given = str(text).strip()
    if (time := TIME.fullmatch(given)) and float(time[1]) > 0:
        return Budget("seconds", float(time[1]) * SECONDS[time[2]])
    try:
        number, noun = COUNT.fullmatch(given).groups()  # type: ignore[union-attr]
        amount = parse_count(number)
        if amount <= 0:
            raise ValueError
    except (ValueError, AttributeError):
        rule = "must be a time (20m, 8h, 2d), tokens (200M) or runs (30runs), above 0"
        raise ConfigError(f"budget={shown(text)}: {rule}", "budget-unreadable") from None
    if not noun.startswith("run"):
        return Budget("tokens", amount)
    if amount < FEWEST_RUNS:
        rule = f"must be {FEWEST_RUNS} runs or more: a lowest point needs three learning rates"
        raise ConfigError(f"budget={shown(text)}: {rule}", "budget-too-small")
    return Budget("runs", amount)


def as_typed_budget(unit: str, amount: float) -> str:
    """A budget of `amount` or a little more, as `parse_budget` reads it. `unit`: that of a `Budget`."""
    if unit == "seconds":
        return f"{math.ceil(amount)}s" if amount < 2 * SECONDS["m"] else f"{math.ceil(amount / SECONDS['m'])}m"
    return f"{math.ceil(amount)}" if unit == "tokens" else f"{math.ceil(amount)}runs"


def parse_range(text: object) -> tuple[float, float]:
    """Read a range such as `0.01..1`. Raises `ConfigError`."""
    first, _, last = str(text).partition("..")
    try:
        low, high = float(first), float(last)
    except ValueError:
        low = high = 0.0
    if not 0 < low < high < float("inf"):
        raise ConfigError(f"range={shown(text)}: must be LOW..HIGH, such as 0.01..1, both above 0", "range-empty")
    return low, high
