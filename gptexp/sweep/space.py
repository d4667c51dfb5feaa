"""The search space of a sweep: each swept key with its values, or with the interval that values are drawn from.

The syntax is Hydra's: `key=a,b,c`, `choice(…)`, `range(…)`, `interval(low, high)`, `tag(log, interval(…))`.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, ValueType
from omegaconf import DictConfig, ListConfig, OmegaConf

from gptexp.config.overrides import parse_override
from gptexp.config.schema import fields_by_key, kinds_of
from gptexp.config.spelling import canonical
from gptexp.process.errors import ConfigError

DIGITS = 4  # significant digits of a value drawn from an interval; few, as the value appears in a directory name


@dataclass(frozen=True)
class Interval:
    """The numbers from `low` to `high`, both included."""

    low: float
    high: float
    log: bool  # draw uniformly on a logarithmic scale
    whole: bool  # integers only

    def draw(self, generator: random.Random) -> float:
        """Draw a number uniformly, on a logarithmic scale if `log`."""
        if self.log:
            drawn: float = self.low * (self.high / self.low) ** generator.random()
            return drawn
        return generator.uniform(self.low, self.high)

    def text(self, value: float) -> str:
        """Format a value for the command line."""
        return str(round(value)) if self.whole else f"{value:.{DIGITS}g}"


@dataclass(frozen=True)
class Axis:
    """One overridden key: its values if it is swept, otherwise its one value."""

    key: str
    swept: bool
    among: list[str] | Interval  # values in the command line's syntax

    def override(self, value: str) -> str:
        return f"{self.key}={value}"


def spaces(params: Any, arguments: Sequence[str], loader: ConfigLoader) -> list[list[Axis]]:
    """Parse a named grid's `params`, a mapping or a list of mappings, and the command line's `arguments`.

    Returns a space for each mapping, merged with the `arguments` by `with_arguments`. Raises `ConfigError` for an
    invalid interval.
    """
    return [[*map(_axis, part.values())] for part in with_arguments(params, arguments, loader)]


def with_arguments(
    params: Any, arguments: Sequence[str], loader: ConfigLoader | None = None
) -> list[dict[str, Override]]:
    """Return key -> override for each mapping of a sweeper's `params`, merged with the command line's `arguments`.

    For a key that both have, the argument wins, unless it chooses options of a group, such as `optim=lars`, that the
    mappings contain. Then it selects mappings: one with this group keeps only chosen options, and is left out if it has
    none. Otherwise its other values, such as learning rates for LARS, would be used with another optimizer.
    """
    parser = OverridesParser.create(config_loader=loader)

    def parsed(texts: Sequence[str]) -> dict[str, Override]:
        return {override.key_or_group: override for override in (parse_override(parser, text) for text in texts)}

    given = parsed(arguments)
    merged = [parsed(params_as_overrides(part)) for part in parts(params)]
    for group in [key for key in given if "." not in key]:
        if any(part[group].value_type == ValueType.GLOB_CHOICE_SWEEP for part in (given, *merged) if group in part):
            continue  # only a loader knows which options a glob matches
        chosen = _values(given[group])
        options = [_values(part[group]) if group in part else [] for part in merged]
        if {*chosen} <= {*itertools.chain(*options)}:
            kept = [[option for option in chosen if option in own] if own else chosen for own in options]
            merged = [
                part | parsed([f"{group}={','.join(own)}"]) for part, own in zip(merged, kept, strict=True) if own
            ]
            del given[group]
    return [part | given for part in merged]


def parts(params: Any) -> list[Mapping[str, Any]]:
    """The mappings of a sweeper's `params`; one that is empty if there are none."""
    return list(params) if isinstance(params, list | ListConfig) else [params or {}]


def _values(override: Override) -> list[str]:
    """The values of an override that is not an interval, in the command line's syntax."""
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    return [override.get_value_element_as_str()]


def params_as_overrides(params: Mapping[str, Any]) -> list[str]:
    """Convert a sweeper's `params` to overrides. A list is swept, unless the key itself takes a list."""

    def takes_list(key: str) -> bool:
        field = fields_by_key().get(key)
        return key in ("data.path", "data.val_path") or (field is not None and list in kinds_of(field))

    return canonical(
        [
            f"{key}={','.join(map(str, value))}"
            if OmegaConf.is_list(value) and not takes_list(key)
            else f"{key}={value}"
            for key, value in params.items()
        ]
    )


def _axis(override: Override) -> Axis:
    key, value = override.get_key_element(), override.value()
    if isinstance(value, IntervalSweep):
        return Axis(key, True, _interval(key, value, override.input_line or key))
    return Axis(key, override.is_sweep_override(), _values(override))


def _interval(key: str, value: IntervalSweep, text: str) -> Interval:
    low, high = value.start, value.end
    if low is None or high is None or not low < high:
        rule = "an interval must start below its end; write interval(low, high) with low < high"
        raise ConfigError(f"{text}: {rule}", "interval-empty")
    if unknown := value.tags - {"log"}:
        raise ConfigError(f"{text}: log is the only tag; remove {', '.join(sorted(unknown))}", "no-such-tag")
    log = "log" in value.tags
    if log and low <= 0:
        rule = "a logarithmic interval must start above 0; raise its start, or remove tag(log, …)"
        raise ConfigError(f"{text}: {rule}", "interval-not-positive")
    if key not in fields_by_key():
        rule = f"unknown key '{key}'; an interval needs a key that takes a number"
        raise ConfigError(f"{text}: {rule}", "unknown-key")
    return Interval(low, high, log, int in kinds_of(fields_by_key()[key]))


def swept_keys(config: DictConfig) -> list[str]:
    """Return the keys that a multirun varies, in the given order; the command line wins over the sweeper's `params`."""
    mappings = with_arguments(config.hydra.sweeper.get("params"), config.hydra.overrides.task)

    def varies(key: str) -> bool:
        """Whether the key varies within a mapping of `params`, or between mappings."""
        overrides = [mapping.get(key) for mapping in mappings]
        swept = any(override is not None and override.is_sweep_override() for override in overrides)
        return swept or len({override and override.input_line for override in overrides}) > 1

    keys = dict.fromkeys(key for mapping in mappings for key in mapping)
    searched = config.hydra.sweeper.get("key")  # by `gptexp tune`, which chooses its values
    return [*filter(varies, keys), *([searched] if searched and not (searched in keys and varies(searched)) else [])]
