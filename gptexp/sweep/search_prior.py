"""Where a search begins: by the law of an earlier sweep, by Step Law, in the middle of a range, or as the config says.

An earlier law comes from the sweep's directory, or from the file of `optim=fitted` that its report wrote.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from gptexp.config.scaling import scaled_optim
from gptexp.config.schema import Config, result_deciding
from gptexp.model.shapes import matrix_parameters
from gptexp.optim.adamw import AdamWConfig
from gptexp.process.errors import ConfigError, first_line
from gptexp.reporting.listings.records import LR, find_runs, positive_value
from gptexp.reporting.statistics.analysis import analyse
from gptexp.reporting.statistics.prior import COLD, FITTED, SLOPE, step_law
from gptexp.storage.reader import read_text

SMALLEST_OF_STEP_LAW = 20e6  # parameters without embeddings; the formula was fitted to models of 60 million and more
LAWS = "must be a sweep's directory, or a file that gptexp report --write-optim wrote"
POWER_LAW = re.compile(r"\$\{power_law:\$\{batch\.total_batch_size\},([^,]+),([^,]+),([^,}]+)\}")


@dataclass(frozen=True)
class Prior:
    """The best value of the searched key that is expected at each batch size, before any run."""

    values: dict[int, float]  # by batch size in tokens
    source: str  # where they come from, in words
    spread: float = COLD  # octaves: their standard deviation

    @property
    def in_words(self) -> str:
        """The values, their source and standard deviation."""
        expected = ", ".join(f"{value:.3g} at {batch:,}" for batch, value in sorted(self.values.items()))
        return f"{expected}: {self.source}, give or take {self.spread:.2g} octaves"


@dataclass(frozen=True)
class SearchedKey:
    """What is searched, and what was said of it."""

    key: str
    is_given: bool  # a value of the key is among the overrides
    limits: tuple[float, float] | None  # the key lies between these two
    usual_batch: int  # tokens: the batch size to which the learning rate of the files belongs


def prior_of(configs: Mapping[int, Config], searched: SearchedKey, earlier: str | None) -> Prior:
    """The prior of an arm. Raises `ConfigError` if `earlier`, a sweep or a file, has no law.

    `configs`: batch size in tokens -> config of a run there.
    """
    if earlier is not None:
        law = earlier_law(Path(earlier))
        return Prior({batch: law(batch) for batch in configs}, f"the law of {earlier}", FITTED)
    given = {batch: searched_value(config, searched.key) for batch, config in configs.items()}
    as_given = Prior(given, "as given" if searched.is_given else "the config's value")
    if searched.limits is not None:
        low, high = searched.limits
        if searched.is_given and not all(low <= value <= high for value in given.values()):
            rule = f"begins outside of its range {low:g}..{high:g}; leave one of them out"
            raise ConfigError(f"{searched.key}={next(iter(given.values())):g}: {rule}", "out-of-range")
        middle = dict.fromkeys(given, math.sqrt(low * high))
        spread = math.log2(high / low) / math.sqrt(12)  # of a uniform distribution
        return as_given if searched.is_given else Prior(middle, "the middle of the range", spread)
    if searched.key != LR or len({*given.values()}) > 1:  # a rule or a fitted law has scaled it
        return as_given
    config = next(iter(configs.values()))
    parameters = matrix_parameters(config.model)
    if not searched.is_given and config.optim.name == AdamWConfig.name and parameters >= SMALLEST_OF_STEP_LAW:
        laws = {batch: step_law(parameters, config.run_length[1], batch) for batch, config in configs.items()}
        return Prior(laws, "Step Law")
    moved = {batch: lr * (batch / searched.usual_batch) ** SLOPE for batch, lr in given.items()}
    return Prior(moved, as_given.source)


def searched_value(config: Config, key: str) -> float:
    """The value of the searched key; a learning rate as scaled with the batch size."""
    return scaled_optim(config).lr if key == LR else positive_value(result_deciding(config), key)


@cache
def earlier_law(source: Path) -> Callable[[int], float]:
    """A function from the batch size in tokens to the best learning rate. Raises `ConfigError` if there is no law.

    A sweep with one bracketed optimum has no law; its optimum and the usual slope stand in for it.
    """
    if not source.exists():
        raise ConfigError(f"from={source}: not found; it {LAWS}", "no-earlier-law")
    return _of_file(source) if source.is_file() else _of_sweep(source)


def _of_file(path: Path) -> Callable[[int], float]:
    try:
        found = POWER_LAW.fullmatch(str(yaml.safe_load(read_text(path))["optim"]["lr"]))
        if found is None:
            raise ValueError("its optim.lr is no power of the batch size")
        lr, tokens, exponent = map(float, found.groups())
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise ConfigError(f"from={path}: {LAWS} ({first_line(error)})", "no-earlier-law") from None
    return lambda batch: lr * (batch / tokens) ** exponent


def _of_sweep(directory: Path) -> Callable[[int], float]:
    arms = analyse(directory.name, find_runs(directory)).arms
    laws = [arm.law for arm in arms if arm.law is not None]
    optima = [(batch, optimum.lr) for arm in arms for batch, optimum in arm.curves.optima.items()]
    if len(laws) == 1:
        return laws[0].at
    if len(optima) != 1:
        found = f"{len(laws)} laws" if laws else "no bracketed optimum"
        rule = "must be a sweep with one law; report it, or write the law of one arm with gptexp report --write-optim"
        raise ConfigError(f"from={directory}: has {found}, and {rule}", "no-earlier-law")
    [(size, best)] = optima
    return lambda batch: best * (batch / size) ** SLOPE
