"""The search space of a sweep: each swept key with its values, or with the interval that values are drawn from.

The syntax is Hydra's: `key=a,b,c`, `choice(…)`, `range(…)`, `interval(low, high)`, `tag(log, interval(…))`.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, OmegaConf

from gptexp.config.overrides import canonical
from gptexp.config.schema import every_key
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

    Returns a space for each mapping. `arguments` win for a key that both have. Raises `ConfigError` for an invalid
    interval.
    """
    return [_axes(part, arguments, loader) for part in parts(params)]


def parts(params: Any) -> list[Mapping[str, Any]]:
    """The mappings of a sweeper's `params`; one that is empty if there are none."""
    return list(params) if OmegaConf.is_list(params) or isinstance(params, list) else [params or {}]


def _axes(params: Mapping[str, Any], arguments: Sequence[str], loader: ConfigLoader) -> list[Axis]:
    texts = [*params_as_overrides(params), *arguments]
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(texts)
    return [_axis(override) for override in {o.get_key_element(): o for o in parsed}.values()]


def params_as_overrides(params: Mapping[str, Any]) -> list[str]:
    """Convert a sweeper's `params` to overrides. A list is swept, unless the key itself takes a list."""
    takes_list = {"data.path", "data.val_path", "log.tags", "log.wandb.tags"}
    return canonical(
        [
            f"{key}={','.join(map(str, value))}"
            if OmegaConf.is_list(value) and key not in takes_list
            else f"{key}={value}"
            for key, value in params.items()
        ]
    )


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
        raise ConfigError(f"{text}: an interval must start below its end; write interval(low, high) with low < high")
    if unknown := value.tags - {"log"}:
        raise ConfigError(f"{text}: log is the only tag; remove {', '.join(sorted(unknown))}")
    log = "log" in value.tags
    if log and low <= 0:
        raise ConfigError(f"{text}: a logarithmic interval must start above 0; raise its start, or remove tag(log, …)")
    kinds = {name: f.type for name, f, _, _ in every_key()}
    if key not in kinds:
        raise ConfigError(f"{text}: unknown key '{key}'; an interval needs a key that takes a number")
    return Interval(low, high, log, int in (kinds[key], *getattr(kinds[key], "__args__", ())))


def swept_keys(config: DictConfig) -> list[str]:
    """Return the keys that a multirun varies, in the given order; the command line wins over the sweeper's `params`."""
    parser = OverridesParser.create()

    def parsed(texts: Sequence[str]) -> dict[str, Override]:
        return {override.key_or_group: override for override in map(parser.parse_override, texts)}

    arguments = parsed(config.hydra.overrides.task)
    of_parts = [parsed(params_as_overrides(p)) | arguments for p in parts(config.hydra.sweeper.get("params"))]

    def varies(key: str) -> bool:
        """Within a mapping of `params`, or from one to another."""
        found = [part.get(key) for part in of_parts]
        swept = any(override is not None and override.is_sweep_override() for override in found)
        return swept or len({override and override.input_line for override in found}) > 1

    return [key for key in dict.fromkeys(key for part in of_parts for key in part) if varies(key)]
