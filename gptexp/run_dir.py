"""The files of a run directory: names, atomic writes, who may use it. No torch.

config.yaml      the whole config, resolved: enough to run again
effective.json   what every `auto` came to, decided once
metrics.jsonl    one object per event, flushed line by line: the source of truth
summary.json     status, losses, tokens, versions
checkpoints/     step-%08d/, each published by one rename
.lock            held by the process that started the run, .lock-rank0 by the rank that writes; a run is alive
                 while one of them is held, whatever summary.json says
"""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import yaml
from filelock import FileLock, Timeout

from gptexp.config import Config, from_dict, result_deciding, to_dict
from gptexp.errors import ConfigError

CONFIG = "config.yaml"
EFFECTIVE = "effective.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
RANK_LOCK = ".lock-rank0"
LOCK_TIMEOUT_S = 2.0  # somebody who only asks whether a lock is held holds it for an instant


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is either the old one or the new one, whatever happens in between."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(finite(value), indent=1) + "\n")


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty if there is no such file. Raises `ConfigError` for anything else."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path}: no JSON ({error}); remove it, or start a new run") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: no JSON object; remove it, or start a new run")
    return value


def save_config(directory: Path, config: Config) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / CONFIG, yaml.safe_dump(to_dict(config), sort_keys=False))


def load_config(directory: Path) -> Config:
    """The config of a run directory; read as data, never composed."""
    path = directory / CONFIG
    if not path.is_file():
        raise ConfigError(f"{directory}: no run directory, {CONFIG} is missing; give the directory of a run")
    try:
        config = from_dict(yaml.safe_load(path.read_text()))
    except (ValueError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    assert isinstance(config, Config)
    return config


def status(directory: Path) -> str | None:
    """The status in summary.json, if there is one; whether a run is alive is `is_locked`'s to say."""
    value = read_json(directory / SUMMARY).get("status")
    return value if isinstance(value, str) else None


@contextmanager
def held(directory: Path, name: str = LOCK) -> Iterator[None]:
    """Hold a lock of the run directory; raises `ConfigError` while another process holds it."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / name)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout:
        raise ConfigError(_in_use(directory)) from None
    try:
        yield
    finally:
        lock.release()


def _in_use(directory: Path) -> str:
    return f"{directory}: another process is running in it; wait for it or use a new directory"


def is_locked(directory: Path) -> bool:
    """Whether a live process holds the directory."""
    for path in (directory / LOCK, directory / RANK_LOCK):
        if path.exists():
            try:
                with FileLock(path, blocking=False):
                    pass
            except Timeout:
                return True
    return False


def check_free(directory: Path, config: Config) -> Literal["new", "unfinished", "completed"]:
    """`check_same`, and raises `ConfigError` while a process is running in `directory`."""
    if is_locked(directory):
        raise ConfigError(_in_use(directory))
    return check_same(directory, config)


def check_same(directory: Path, config: Config) -> Literal["new", "unfinished", "completed"]:
    """What `directory` is to this config; raises `ConfigError` if it belongs to another one."""
    if not (directory / CONFIG).exists():
        return "new"
    old, new = result_deciding(load_config(directory)), result_deciding(config)
    if changed := [f"{key} was {old[key]}, now {new[key]}" for key in new if old.get(key) != new[key]]:
        raise ConfigError(
            [f"{directory}: cannot continue with another config: {line}; start a new run" for line in changed]
        )
    return "completed" if status(directory) == "completed" else "unfinished"
