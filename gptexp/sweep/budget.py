"""How much a search may cost: time, tokens or runs."""

import re
from dataclasses import dataclass
from typing import Literal

from gptexp.process.errors import ConfigError
from gptexp.process.words import counted, duration, shown

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
THOUSANDS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
FORM = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*([A-Za-z]?)\s*(tokens?|runs?|)")
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
    found = FORM.fullmatch(str(text).strip())
    number, suffix, noun = found.groups() if found is not None else ("0", "", "")
    amount = float(number.replace("_", ""))
    if amount > 0 and suffix in SECONDS and not noun:
        return Budget("seconds", amount * SECONDS[suffix])
    if amount > 0 and suffix in THOUSANDS and (suffix or noun):
        budget = Budget("runs" if noun.startswith("run") else "tokens", amount * THOUSANDS[suffix])
        if budget.unit == "runs" and (budget.amount < FEWEST_RUNS or budget.amount != round(budget.amount)):
            rule = f"must be a whole number of runs, {FEWEST_RUNS} or above: a lowest point needs three learning rates"
            raise ConfigError(f"budget={shown(text)}: {rule}", "budget-too-small")
        return budget
    rule = "must be a time (20m, 8h, 2d), tokens (200M) or runs (30runs), above 0"
    raise ConfigError(f"budget={shown(text)}: {rule}", "budget-unreadable")
