"""What a trial has measured on this machine for the `auto` values of a model, kept in the cache for later runs.

The times of two trials differ. So the first one decides for all later runs of the same shape: the same command makes
the same choices, at every world size.
"""

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import gptexp
from gptexp.config.schema import Config
from gptexp.data.cache import cache_dir, lock
from gptexp.distributed.ranks import Rank, cores_per_rank
from gptexp.machine.cpu import fingerprint
from gptexp.process.errors import DataError, StorageError, UserError
from gptexp.storage import run_dir

T = TypeVar("T")

FOLDER = "measured"  # in the cache directory
MARGIN = 1.05  # minimum speedup of a value over that of the rule; a smaller one is within the noise of the measurement
MOST_ROUNDS_FASTER = 0.8  # share of the rounds in which it must be faster at all

SWITCH = {"on": True, "off": False}
Comparison = dict[str, Any]  # rule: its value; chosen; ms: value -> median milliseconds of a micro-batch
Times = dict[str, Comparison]  # by key, for the keys that were compared; values as in a config


def compared(of_rule: str, ms: Mapping[str, Sequence[float]]) -> Comparison:
    """The comparison of the values whose milliseconds in each round are `ms`. They took turns, so rounds are paired."""

    def beats_the_rule(value: str) -> bool:
        ratios = [rule / other for rule, other in zip(ms[of_rule], ms[value], strict=True)]
        faster = sum(ratio > 1 for ratio in ratios) >= MOST_ROUNDS_FASTER * len(ratios)
        return faster and statistics.median(ratios) > MARGIN

    medians = {value: statistics.median(times) for value, times in ms.items()}
    better = [value for value in ms if value != of_rule and beats_the_rule(value)]
    return {"rule": of_rule, "chosen": min(better, key=medians.__getitem__, default=of_rule), "ms": medians}


@dataclass(frozen=True)
class Measured:
    """The comparisons that decide."""

    times: Times

    def deciding(self, key: str, rule: Callable[[], tuple[T, str]]) -> Callable[[], tuple[T, str]]:
        """A function that returns the value of `key` and the reason: by its comparison, or by `rule` without one."""
        comparison = self.times.get(key)
        if comparison is None:
            return rule
        chosen: Any = comparison["chosen"]
        found = ", ".join(f"{value} {ms:.3g} ms" for value, ms in comparison["ms"].items())
        return lambda: (SWITCH.get(chosen, chosen), f"measured with micro-batches of the model: {found}")


NOTHING = Measured({})


def are_times(value: Any) -> bool:
    """Whether a value from a file has the form of `Times`."""
    return isinstance(value, dict) and all(
        isinstance(comparison, dict)
        and isinstance(ms := comparison.get("ms"), dict)
        and {comparison.get("rule"), comparison.get("chosen")} <= ms.keys()
        and all(isinstance(number, float | int) for number in ms.values())
        for comparison in value.values()
    )


def in_config(value: str | bool) -> str:
    """A value as a config has it, where a switch is on or off."""
    return next((name for name, meant in SWITCH.items() if meant is value), str(value))


def shape_of(
    cfg: Config, sequences: int, tried: Mapping[str, Sequence[str]], rules: Mapping[str, str]
) -> dict[str, Any]:
    """What decides the times of a trial with `sequences` a micro-batch, the values it tries, and those of the rules."""
    m, train = cfg.model, cfg.train
    asked = {key: getattr(train, key) for key in ("dtype", "matmul_precision", "attention", "compile", "loss")}
    return {
        "gptexp": gptexp.__version__,
        "torch": torch.__version__,
        "cpu": fingerprint(),
        "cores": cores_per_rank(Rank()),
        "model": {**asdict(m), "dropout": m.dropout > 0},
        "seq_len": cfg.seq_len,
        "sequences": sequences,
        "activation_checkpointing": train.activation_checkpointing,
        "asked": asked,
        "rules": dict(rules),
        "tried": {key: list(values) for key, values in tried.items()},
    }


def recall(cfg: Config, shape: Mapping[str, Any]) -> Measured | None:
    """The saved times of `shape`; None without them."""
    try:
        found = run_dir.read_json(_path(cfg, shape))
    except UserError:  # a file that was cut off
        return None
    return Measured(found["times"]) if found.get("shape") == shape and are_times(found.get("times")) else None


def measure_once(cfg: Config, shape: Mapping[str, Any], measure: Callable[[], Measured | None]) -> Measured:
    """The saved times of `shape`, or those that `measure` returns, which are saved. Other processes wait for one.

    If they cannot be saved, or `measure` was interrupted, nothing is measured: the rules then decide, as next time.
    """
    found = recall(cfg, shape)
    if found is not None:
        return found
    path = _path(cfg, shape)
    try:
        with lock(path.with_suffix(".lock")):
            found = recall(cfg, shape) or measure()
            if found is not None:
                run_dir.write_json(path, {"shape": dict(shape), "times": found.times})
    except (DataError, StorageError):
        return NOTHING
    return found or NOTHING


def _path(cfg: Config, shape: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()
    return cache_dir(cfg.data) / FOLDER / f"{digest[:16]}.json"
