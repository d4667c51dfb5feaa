"""What a sweep varies: each swept key with its values, or with the interval that values are drawn from.

Hydra's own grammar says it: `key=a,b,c`, `choice(…)`, `range(…)`, `interval(low, high)`, `tag(log, interval(…))`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig

from gptexp.config import Config, fields_of
from gptexp.errors import ConfigError

DIGITS = 4  # of a value out of an interval: as many as anybody wants to read in a name


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`, both among them."""

    low: float
    high: float
    log: bool
    whole: bool  # no fractions

    def draw(self, generator: random.Random) -> float:
        """One of them, evenly on the scale."""
        if self.log:
            drawn: float = self.low * (self.high / self.low) ** generator.random()
        else:
            drawn = generator.uniform(self.low, self.high)
        return round(drawn) if self.whole else drawn

    def text(self, value: float) -> str:
        """A value as the command line takes it."""
        return str(round(value)) if self.whole else f"{value:.{DIGITS}g}"


@dataclass(frozen=True)
class Axis:
    """A key and what is swept of it; a key with one value is not swept."""

    key: str
    swept: bool
    among: list[str] | Interval  # the values as the command line takes them

    def override(self, value: str) -> str:
        return f"{self.key}={value}"


def axes(params: dict[str, Any], arguments: Sequence[str], loader: ConfigLoader) -> list[Axis]:
    """What a named grid's `params` and the command line say, which wins over `params` of the same key.

    Raises `ConfigError` for an interval that is none.
    """
    texts = [*(f"{key}={value}" for key, value in params.items()), *arguments]
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(texts)
    return [_axis(override) for override in {o.get_key_element(): o for o in parsed}.values()]


def _axis(override: Override) -> Axis:
    key, value = override.get_key_element(), override.value()
    if isinstance(value, IntervalSweep):
        return Axis(key, True, _interval(key, value, override.input_line or key))
    if override.is_sweep_override():
        return Axis(key, True, list(override.sweep_string_iterator()))
    return Axis(key, False, [override.get_value_element_as_str()])


def _interval(key: str, value: IntervalSweep, text: str) -> Interval:
    low, high = value.start, value.end
    if low is None or high is None or not low < high:
        raise ConfigError(f"{text}: an interval goes from a smaller number to a larger one; swap them")
    if unknown := value.tags - {"log"}:
        raise ConfigError(f"{text}: the only tag is log; drop {', '.join(sorted(unknown))}")
    log = "log" in value.tags
    if log and low <= 0:
        raise ConfigError(f"{text}: a logarithm needs numbers above 0; begin at one, or drop tag(log, …)")
    kinds = {name: f.type for name, f, _ in fields_of(Config())}
    if key not in kinds:
        raise ConfigError(f"{text}: unknown key '{key}'; an interval needs a key that takes a number")
    return Interval(low, high, log, int in (kinds[key], *getattr(kinds[key], "__args__", ())))


def swept_keys(config: DictConfig) -> list[str]:
    """The keys that a multirun varies, in the order given: the command line wins over the sweeper's `params`."""
    params = config.hydra.sweeper.get("params") or {}
    texts = [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
    parser = OverridesParser.create()
    overrides = {override.key_or_group: override for override in map(parser.parse_override, texts)}
    return [key for key, override in overrides.items() if override.is_sweep_override()]
