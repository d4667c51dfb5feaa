"""The files of a run directory: names, atomic writes, who may use it. No torch.

config.yaml      the whole config, resolved: enough to run again
effective.json   what every `auto` came to, decided once
metrics.jsonl    one object per event, flushed line by line: the source of truth
summary.json     status, losses, tokens, versions
checkpoints/     step-%08d/, each published by one rename
profile/         traces of train.profile
.lock            held by the process that started the run, .lock-rank0 by the rank that writes; a run is alive
                 while one of them is held, whatever summary.json says
"""

import fcntl
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import yaml
from filelock import FileLock, Timeout

from gptexp.config import Config, fields_of, from_dict, result_deciding, shown, to_dict
from gptexp.errors import ConfigError, StorageError, first_line

CONFIG = "config.yaml"
EFFECTIVE = "effective.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
SWEEP = "sweep.json"  # of a sweep: its cells, and what all of them were started with
CHECKPOINTS = "checkpoints"
PROFILE = "profile"
DONE = ("completed", "diverged")  # statuses of a run that would do the same again
LOCK = ".lock"
RANK_LOCK = ".lock-rank0"
LOCK_TIMEOUT_S = 2.0  # somebody who only asks whether a lock is held holds it for an instant


@contextmanager
def atomic(path: Path) -> Iterator[IO[str]]:
    """Write a file that is either the old one or the new one, whatever happens in between."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
            fsync(path.parent)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def fsync(path: Path) -> None:
    """Have on the disk what a file holds, or the names in a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def storage(path: Path) -> Iterator[None]:
    """What the file system refuses, as a `StorageError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror or error})") from None


def sweep(directory: Path) -> None:
    """Remove what processes that were killed left half-written; for who holds `RANK_LOCK`."""
    for name in (CONFIG, EFFECTIVE, METRICS, SUMMARY):
        for leftover in directory.glob(f".{name}.*"):
            leftover.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    with storage(path), atomic(path) as file:
        file.write(text)


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(finite(value), indent=1) + "\n")


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null, however deep inside."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty if there is no such file. Raises `ConfigError` for anything else."""
    if not path.exists():
        return {}
    try:
        if not path.is_file():  # a pipe would wait for a writer for ever
            raise ValueError("no regular file")
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
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
        config = from_dict(yaml.load(path.read_text(), _PlainLoader))
    except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {first_line(error)}") from None
    assert isinstance(config, Config)
    return config


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Without aliases: a few lines of them can stand for more values than any memory holds."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("holds a YAML alias (*name); write the value out")
        return super().compose_node(parent, index)


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
    """Whether a live process holds the directory. Asks by a shared lock: askers do not take one another for a run."""
    for path in (directory / LOCK, directory / RANK_LOCK):
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:  # there is none, or it is not ours to read
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            continue
        finally:
            os.close(handle)
    return False


def check_free(directory: Path, config: Config) -> Literal["new", "unfinished", "completed"]:
    """`check_same`, and raises `ConfigError` while a process is running in `directory`."""
    if is_locked(directory):
        raise ConfigError(_in_use(directory))
    return check_same(directory, config)


def check_same(directory: Path, config: Config) -> Literal["new", "unfinished", "completed"]:
    """What `directory` is to this config; raises `ConfigError` if it belongs to another one.

    Also for a new run that is to start from weights that are not there, or of another model.
    """
    if not (directory / CONFIG).exists():
        if config.init_from is not None:
            _check_weights(config, config.init_from)
        return "new"
    old, new = result_deciding(load_config(directory)), result_deciding(config)
    completed = status(directory) == "completed"
    changed = [key for key in new if old.get(key) != new[key]]
    if completed and set(changed) & {"train.max_tokens", "train.max_steps"}:
        raise ConfigError(
            f"{directory}: is completed, and its learning rate has decayed; to train for longer, start a new run, from "
            f"its weights with init_from={directory}"
        )
    if changed:
        lines = [f"{key} was {shown(old[key])}, now {shown(new[key])}; start a new run" for key in changed]
        raise ConfigError([f"{directory}: cannot continue with another config: {line}" for line in lines])
    return "completed" if completed else "unfinished"


def _check_weights(config: Config, init_from: str) -> None:
    """Raise `ConfigError` unless the run `init_from` has a model like that of `config`, but for dropout."""
    given = f"init_from={init_from}"
    try:
        old = load_config(Path(init_from)).model
    except ConfigError as error:
        raise ConfigError(f"{given}: {error}") from None
    pairs = [(key, getattr(config.model, key), was) for key, _, was in fields_of(old) if key != "dropout"]
    if lines := [f"model.{key}={shown(now)}: {given} has {key}={shown(was)}" for key, now, was in pairs if now != was]:
        raise ConfigError(lines)
