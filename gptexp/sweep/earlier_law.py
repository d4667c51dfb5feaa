"""The law of an earlier sweep, from its directory or from the file of `optim=fitted` that its report wrote."""

import re
from collections.abc import Callable
from pathlib import Path

import yaml

from gptexp.process.errors import ConfigError, first_line
from gptexp.reporting.listings.records import find_runs
from gptexp.reporting.statistics.analysis import analyse
from gptexp.reporting.statistics.prior import SLOPE
from gptexp.storage.reader import read_text

POWER_LAW = re.compile(r"\$\{power_law:\$\{batch\.total_batch_size\},([^,]+),([^,]+),([^,}]+)\}")


def earlier_law(source: Path) -> Callable[[int], float]:
    """A function from the batch size in tokens to the best learning rate. Raises `ConfigError` if there is no law.

    A sweep with one bracketed optimum has no law; its optimum and the usual slope stand in for it.
    """
    return _of_file(source) if source.is_file() else _of_sweep(source)


def _of_file(path: Path) -> Callable[[int], float]:
    try:
        found = POWER_LAW.fullmatch(yaml.safe_load(read_text(path))["optim"]["lr"])
        assert found is not None
        lr, tokens, exponent = map(float, found.groups())
    except (OSError, ValueError, TypeError, KeyError, AssertionError, yaml.YAMLError) as error:
        why = first_line(error) or "its optim.lr is no power of the batch size"
        rule = "must be a sweep's directory, or a file that gptexp report --write-optim wrote"
        raise ConfigError(f"prior={path}: {rule} ({why})", "no-earlier-law") from None
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
        raise ConfigError(f"prior={directory}: has {found}, and {rule}", "no-earlier-law")
    [(size, best)] = optima
    return lambda batch: best * (batch / size) ** SLOPE
