"""What a trial has measured on this machine for the `auto` values of a model, kept in the cache for later runs.

The times of two trials differ. So the first one decides for all later runs of the same shape: the same command gives
the same bits, at every world size.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import gptexp
from gptexp.config.schema import Config
from gptexp.data.cache import cache_dir, lock
from gptexp.distributed.ranks import count_cores
from gptexp.machine.cpu import cpu_name
from gptexp.process.errors import DataError, StorageError, UserError
from gptexp.storage import run_dir

T = TypeVar("T")

FOLDER = "measured"  # in the cache directory
MARGIN = 1.05  # minimum speedup of a value over that of the rule; a smaller one is within the noise of the measurement
VALUES = {"on": True, "off": False}  # of a switch
Times = dict[str, dict[str, float]]  # key -> value as in a config -> milliseconds of a micro-batch; the rule's first


@dataclass(frozen=True)
class Measured:
    """The times that decide."""

    ms: Times

    def deciding(self, key: str, rule: Callable[[], tuple[T, str]]) -> Callable[[], tuple[T, str]]:
        """A function that returns the value of `key` and the reason: by the times of `key`, or by `rule` without them.

        The fastest value must be faster than that of the rule by `MARGIN`.
        """
        times = self.ms.get(key)
        if times is None:
            return rule
        of_rule, best = next(iter(times)), min(times, key=times.__getitem__)
        chosen: Any = best if times[of_rule] > MARGIN * times[best] else of_rule
        found = ", ".join(f"{value} {ms:.3g} ms" for value, ms in times.items())
        return lambda: (VALUES.get(chosen, chosen), f"measured with micro-batches of the model: {found}")


NOTHING = Measured({})


def text(value: str | bool) -> str:
    """A value as in a config, where a switch is on or off."""
    return next((name for name, meant in VALUES.items() if meant is value), str(value))


def shape(cfg: Config, sequences: int, tried: dict[str, list[str]]) -> dict[str, Any]:
    """What decides the times of a trial with `sequences` a micro-batch, and which values it tries."""
    m, train = cfg.model, cfg.train
    asked = {key: getattr(train, key) for key in ("dtype", "matmul_precision", "attention", "compile", "loss")}
    return {
        "gptexp": gptexp.__version__,
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "cores": count_cores(),
        "model": {**asdict(m), "dropout": m.dropout > 0},
        "seq_len": cfg.seq_len,
        "sequences": sequences,
        "activation_checkpointing": train.activation_checkpointing,
        "asked": asked,
        "tried": tried,
    }


def recall(cfg: Config, shape: dict[str, Any]) -> Measured | None:
    """The saved times of `shape`; None without them."""
    try:
        found = run_dir.read_json(_path(cfg, shape))
    except UserError:  # a file that was cut off
        return None
    return Measured(found["ms"]) if found.get("shape") == shape else None


def measure_once(cfg: Config, shape: dict[str, Any], measure: Callable[[], Measured]) -> Measured:
    """The saved times of `shape`, or those that `measure` returns, which are saved. Other processes wait for one.

    Without a cache that can be written, every run measures.
    """
    path = _path(cfg, shape)
    try:
        with lock(path.with_suffix(".lock")):
            found = recall(cfg, shape)
            if found is None:
                found = measure()
                run_dir.write_json(path, {"shape": shape, "ms": found.ms})
            return found
    except (DataError, StorageError):
        return measure()


def _path(cfg: Config, shape: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()
    return cache_dir(cfg.data) / FOLDER / f"{digest[:16]}.json"
