"""The files of a run directory: names, atomic writes and locks. No torch.

config.yaml      the complete, resolved config, sufficient to run again
effective.json   the value that was chosen for each `auto`
metrics.jsonl    one JSON object per event, flushed line by line; the source of all results
summary.json     status, losses, tokens, versions
checkpoints/     step-%08d/, each published by one rename
profile/         traces of train.profile
events.out.tfevents.*
                 what TensorBoard shows, if log.tensorboard is set
.mark-*          file by which several ranks check, at the start, that all nodes see the directory
.lock            lock (gptexp.storage.locks) of the process that starts the run
.lock-rank0      lock of the rank that writes; a run is alive while one of the two locks is held
.lock-sweep      lock of the sweep that runs this cell, also shortly before and after the run
output.log       output of a cell that does not have the terminal for itself

In the directory of a sweep:
sweep.json       its cells and their common settings
.lock-commands   lock that all commands share while they run the sweep
.lock-choice     lock of the command that chooses the next run of a search
"""

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml

from gptexp.config.paths import is_file
from gptexp.config.rules import saved_problems
from gptexp.config.schema import Config, fits_type, from_dict, result_deciding, to_dict
from gptexp.config.vocabulary import NAMES, VOCAB_SIZES, padded, with_vocab_size
from gptexp.process.errors import CheckpointError, ConfigError, InUseError, StorageError, first_line
from gptexp.process.fields import AUTO
from gptexp.process.words import shown
from gptexp.storage import locks, reader
from gptexp.storage.locks import Lock

CONFIG = "config.yaml"
EFFECTIVE = "effective.json"
TOKENIZER = "tokenizer.json"  # the run's copy of a vocabulary that is not part of gptexp
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
SWEEP = "sweep.json"
CHECKPOINTS = "checkpoints"
STEP_NAME = re.compile(r"step-\d{8,}")  # name of a published checkpoint
BEST, LAST = "best", "last"  # names of checkpoints, beside their steps
NO_CHECKPOINT = "no-such-checkpoint"  # code of the error
MOST_NAMED = 8  # most steps that an error lists
PROFILE = "profile"
HYDRA = ".hydra"  # Hydra's own record of the command line
SUMMARY_TYPES: dict[str, Any] = {  # types of the values that gptexp reads
    "status": str, "final_val_loss": float, "final_val_loss_ema": float, "steps": int, "tokens": int, "wall_s": float,
    "train_s": float, "data_hash": str, "parameters": int, "world_size": int, "device": str, "git_commit": str,
    "validation_hashes": dict,
}  # fmt: skip
STATUSES = ("completed", "diverged", "interrupted", "running", "failed")
DONE = ("completed", "diverged")  # statuses of runs that are not started again: the result would be the same
MARK = ".mark-"
OUTPUT = "output.log"
LOCK = ".lock"
RANK_LOCK = ".lock-rank0"
SWEEP_LOCK = ".lock-sweep"
IN_USE = "another process uses it; wait until it ends, or use a new directory"
LOCKS = (LOCK, RANK_LOCK, SWEEP_LOCK)
COMMANDS_LOCK = ".lock-commands"
CHOICE_LOCK = ".lock-choice"  # of a search
ROOM = 1024  # spaces at the end of summary.json, for longer values
LOCK_TIMEOUT_S = 2.0  # above 0, because `is_locked` in another process holds a lock for a moment


@contextmanager
def atomic(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Yield a file that replaces `path` at the end of the body, so that a crash leaves the old or the new file."""
    with tempfile.NamedTemporaryFile(mode, dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
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
    """Write the content of a file, or the names in a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def storage(path: Path) -> AbstractContextManager[None]:
    """Convert an `OSError` of the body to a `StorageError` which says that `path` cannot be written."""
    return storage_errors(f"{path}: cannot be written")


@contextmanager
def storage_errors(problem: str) -> Iterator[None]:
    """Convert an `OSError` of the body to a `StorageError` that begins with `problem`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{problem} ({error.strerror or error})") from None


def refuse_links(directory: Path) -> None:
    """Raise `ConfigError` if an entry of `directory` is a link, or if it cannot be read."""
    try:
        paths = sorted(directory.iterdir()) if directory.is_dir() else []
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be read ({error.strerror})") from None
    for path in paths:
        refuse_link(path)


def refuse_link(path: Path) -> None:
    """Raise `ConfigError` if `path` is a link: a stranger's run must not make gptexp write to another place."""
    if path.is_symlink():
        raise ConfigError(f"{path}: a link, and gptexp writes through none; put a copy in its place")


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files of killed processes. The caller must hold `RANK_LOCK`."""
    for pattern in (f"{MARK}*", *(f".{name}.*" for name in (CONFIG, EFFECTIVE, TOKENIZER, METRICS, SUMMARY))):
        for leftover in directory.glob(pattern):
            leftover.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    with storage(path), atomic(path) as file:
        file.write(text)


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, _as_json(value))


def write_summary(directory: Path, summary: dict[str, Any]) -> None:
    """Write summary.json. On a full disk it is written in place: each version ends with spaces, and leaves room.

    Raises `StorageError`.
    """
    path, text = directory / SUMMARY, _as_json(summary)
    try:
        write_atomically(path, text.rstrip() + " " * ROOM + "\n")
    except StorageError:
        with suppress(OSError), path.open("r+b") as file:
            room = os.fstat(file.fileno()).st_size - len(text.encode())
            if room >= 0:
                file.write(text.rstrip().encode() + b" " * room + b"\n")
                os.fsync(file.fileno())
                return
        raise


def _as_json(value: dict[str, Any]) -> str:
    return json.dumps(finite(value), indent=1) + "\n"


def finite(value: Any) -> Any:
    """Replace every NaN and infinity in `value` by None, because JSON has neither."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing. Raises `ConfigError` if it is invalid."""
    try:
        if not path.exists():
            return {}
        value = reader.read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); remove it, or start a new run") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object; remove it, or start a new run")
    return value


def read_summary(directory: Path) -> dict[str, Any]:
    """The values of summary.json in `SUMMARY_TYPES` that are not null; empty without the file. Raises `ConfigError`."""
    path = directory / SUMMARY
    values = {key: value for key, value in read_json(path).items() if key in SUMMARY_TYPES and value is not None}
    for key, value in values.items():
        is_negative = isinstance(value, int | float) and value < 0
        if is_negative or not fits_type(value, SUMMARY_TYPES[key]):
            why = "must be 0 or above" if is_negative else "wrong type"
            raise ConfigError(f"{path}: {key}={shown(value)}: {why}; remove the file, or start a new run")
    return values


def save_config(directory: Path, config: Config) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / CONFIG, yaml.safe_dump(to_dict(config), sort_keys=False))


def keep_tokenizer(directory: Path, tokens: Path) -> None:
    """Copy the vocabulary of the prepared `tokens` to the run directory, unless it is part of gptexp."""
    if (tokens / TOKENIZER).is_file() and not (directory / TOKENIZER).exists():
        write_atomically(directory / TOKENIZER, (tokens / TOKENIZER).read_text())


def load_config(directory: Path) -> Config:
    """Read the config of a run directory, without composition by Hydra. Raises `ConfigError`.

    If `data.tokenizer` names a file that is gone, the run's own copy takes its place.
    """
    path = directory / CONFIG
    try:
        if not path.exists():
            raise ConfigError(f"{directory}: not a run directory, because {CONFIG} is missing; give that of a run")
        config: Config = from_dict(reader.read_yaml(path))
    except ConfigError:
        raise
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: {first_line(error)}") from None
    if problems := saved_problems(config):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"{path}: {problems[0]}{more}")
    own = directory.absolute() / TOKENIZER
    if config.data.tokenizer not in NAMES and not is_file(Path(config.data.tokenizer)) and is_file(own):
        config.data.tokenizer = str(own)
    return config


def load_resolved(directory: Path) -> Config:
    """`load_config`, with `model.vocab_size=auto` replaced by the size that the run has chosen.

    Before the start, the size that the run will choose, or `auto` if the corpus decides it. Raises `ConfigError`.
    """
    config = load_config(directory)
    if config.model.vocab_size != AUTO:
        return config
    chosen: Any = None
    with suppress(ConfigError):  # a damaged file is reported by the commands that need its other values
        chosen = read_json(directory / EFFECTIVE).get("vocab_size")
    if not (fits_type(chosen, int) and chosen > 0):
        n_vocab = VOCAB_SIZES.get(config.data.tokenizer)
        chosen = trained_with(directory).get("model.vocab_size", AUTO if n_vocab is None else padded(n_vocab))
    return with_vocab_size(config, chosen)


def is_run(directory: Path) -> bool:
    """Whether a directory holds the files of a run, complete or not, or cannot be read."""
    try:
        return any((directory / name).exists() for name in (CONFIG, METRICS, CHECKPOINTS))
    except PermissionError:
        return True


def require_directory(directory: Path, wanted: str, given: str = "") -> None:
    """Raise `ConfigError` unless `directory` is a directory. `wanted`: what to give; `given`: the option for it."""
    if not directory.is_dir():
        problem = "is a file" if directory.exists() else "no such directory"
        raise ConfigError(f"{given} {directory}: {problem}; give {wanted}".lstrip())


def subdirectories(directory: Path) -> list[Path]:
    """The directories in `directory` that are not hidden, sorted by name. Raises `ConfigError` if it cannot be read."""
    try:
        return sorted(path for path in directory.iterdir() if not path.name.startswith(".") and path.is_dir())
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be read ({error.strerror})") from None


def published(checkpoints: Path) -> list[Path]:
    """The published checkpoints in the directory `checkpoints`, newest first. Raises `CheckpointError`."""
    try:
        paths = list(checkpoints.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:  # not the same as no checkpoints: a run must not start again from its first step
        raise CheckpointError(f"{checkpoints}: cannot be read ({error.strerror})") from None
    return sorted((path for path in paths if STEP_NAME.fullmatch(path.name)), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step of a published checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def run_and_checkpoint(name: str) -> tuple[str, str | None]:
    """The directory and the checkpoint in `RUN_DIR@CHECKPOINT`: a step, `best` or `last`; None if none is given.

    RUN_DIR/checkpoints/step-00000014 is RUN_DIR@14. If a directory has the whole name, the name is that directory.
    """
    directory, _, checkpoint = name.rpartition("@")
    if os.path.isdir(name):  # noqa: PTH112  Path.is_dir raises `OSError` for a long name
        path = Path(name).absolute()
        if STEP_NAME.fullmatch(path.name) and path.parent.name == CHECKPOINTS:
            return os.path.normpath(Path(name, "..", "..")), str(step_of(path))
    elif directory and re.fullmatch(rf"{BEST}|{LAST}|[0-9]{{1,15}}", checkpoint):
        return directory, checkpoint
    return name, None


def choose_step(directory: Path, checkpoint: str | None, given: str) -> int | None:
    """The step of the checkpoint of a run that `checkpoint` names: a step, `best` or `last`.

    None stands for the newest intact checkpoint, as for `last`. Raises `ConfigError`, which begins with `given`, if
    there is no such checkpoint, and `CheckpointError` if they cannot be listed.
    """
    if checkpoint in (None, LAST):
        return None
    paths = published(directory / CHECKPOINTS)
    steps = [step_of(path) for path in paths]
    names = f"{', '.join(map(str, steps[:MOST_NAMED]))}{' and earlier ones' if len(steps) > MOST_NAMED else ''}"
    has = f"the run has {names}" if steps else "no checkpoint has been saved yet"
    if checkpoint != BEST:
        if not checkpoint.isdecimal():
            raise ConfigError(f"{given}: must be a step, {BEST} or {LAST}; {has}", NO_CHECKPOINT)
        if int(checkpoint) not in steps:
            raise ConfigError(
                f"{given}: no checkpoint of step {checkpoint}; {has} (train.save_every_tokens says which are saved, "
                "train.keep_last and train.keep_every_tokens which are kept)",
                NO_CHECKPOINT,
            )
        return int(checkpoint)
    train = load_config(directory).train
    if not train.keep_best and train.keep_last:
        why = "train.keep_best=false: the best checkpoint was not kept; set it to true in the next run"
        raise ConfigError(f"{given}: {why}; {has}", NO_CHECKPOINT)
    if (best := best_step(directory)) is None:
        why = "no checkpoint has a validation loss; let train.eval_every_tokens and train.save_every_tokens meet"
        raise ConfigError(f"{given}: {why}; {has}", NO_CHECKPOINT)
    return best


def best_step(directory: Path) -> int | None:
    """The step of the checkpoint with the lowest validation loss; None if none was evaluated when it was saved."""
    losses = {}
    for path in published(directory / CHECKPOINTS):
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # damaged, or without a loss
            state = read_state(path)
            if state["evaluated_tokens"] == state["tokens"]:
                losses[step_of(path)] = float(state["val_loss"])
    return min(losses, key=losses.__getitem__, default=None)


def require_checkpoint(directory: Path, averaged: bool = False) -> Config:
    """Read the config of a run whose weights (with `averaged`, their average) are to be loaded.

    Raises `ConfigError`, also for a run that averages no weights, or `CheckpointError` if it has saved no checkpoint.
    """
    config = load_config(directory)
    if averaged and config.train.ema_half_life_tokens is None:
        raise ConfigError(f"--ema: {directory} was trained without train.ema_half_life_tokens; leave out --ema")
    if not published(directory / CHECKPOINTS):
        raise CheckpointError(f"{directory / CHECKPOINTS}: no checkpoint has been saved yet")
    return config


def status(directory: Path) -> str | None:
    """The status in summary.json, or None. `is_locked` says whether the run is alive."""
    return read_summary(directory).get("status")


def mark_interrupted(directory: Path) -> bool:
    """Write the status "interrupted" for a run that was stopped before it wrote one: it would count as failed.

    No process of the run may be running, except for the caller. Returns whether the status was written.
    """
    with suppress(ConfigError, StorageError):  # a damaged file stays as it is
        if (directory / CONFIG).exists() and status(directory) not in (*DONE, "interrupted"):
            write_summary(directory, {**read_json(directory / SUMMARY), "status": "interrupted"})
            return True
    return False


def present_status(directory: Path, summary: dict[str, Any]) -> str:
    """The status of a run with this `summary`: "running" while its lock is held, else from `STATUSES`, or "damaged"."""
    if is_locked(directory):
        return "running"
    saved: str = summary.get("status", "failed")
    if saved == "running":
        return "failed"  # its process ended without writing another status
    return saved if saved in STATUSES else "damaged"


@contextmanager
def held(directory: Path, name: str = LOCK) -> Iterator[None]:
    """Hold a lock of the run directory. Raises `InUseError` if another process holds it, else `StorageError`."""
    with acquire(directory, name):
        yield


def acquire(directory: Path, name: str, alone: bool = True) -> Lock:
    """Take a lock of the directory, `alone` or shared; the caller releases it. Raises as `held` does."""
    with storage(directory / name):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            return locks.take(directory / name, alone, LOCK_TIMEOUT_S)
        except TimeoutError:
            raise InUseError(f"{directory}: {IN_USE}") from None


def check_unlocked(directory: Path, names: tuple[str, ...] = (LOCK, RANK_LOCK)) -> None:
    """Raise `InUseError` if a process holds one of these locks."""
    if is_locked(directory, names):
        raise InUseError(f"{directory}: {IN_USE}")


def is_locked(directory: Path, names: tuple[str, ...] = (LOCK, RANK_LOCK)) -> bool:
    """Whether a process holds a lock of the directory: whether its run is alive."""
    return any(locks.is_taken(directory / name) for name in names)


def states_of(directory: Path, names: Collection[str]) -> dict[str, tuple[int, int, int]]:
    """Of these files and folders in `directory`, if they exist: time of the last change (ns), bytes, inode."""
    states = {}
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name in names:
                with suppress(OSError):  # a link to nowhere
                    stat = entry.stat()
                    states[entry.name] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    return states


def is_swept(directory: Path) -> bool:
    """Whether a command runs the sweep in `directory`, or removes it."""
    return locks.is_taken(directory / COMMANDS_LOCK, alone=True)


def lock_sweep(directory: Path, alone: bool = False) -> Lock:
    """Take the lock of the sweep in `directory`, `alone` or shared with other commands. Raises as `held` does."""
    return acquire(directory, COMMANDS_LOCK, alone)


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The dotted keys with other values `now` than `before`, of those that may not change within a run.

    A tokenizer's file may have moved: its path is not compared, because the hash of the tokens is. The limit at which a
    run counts as diverged may change: it ends a run, or not, and changes no weight.
    """
    moved = all(values.get("data.tokenizer") not in NAMES for values in (before, now))
    ignored = {"train.divergence_nats", *(["data.tokenizer"] if moved else [])}
    return [key for key in now if before.get(key) != now[key] and key not in ignored]


def trained_with(directory: Path) -> dict[str, Any]:
    """Dotted keys and values that determined the newest checkpoint; empty if none can be read."""
    for path in published(directory / CHECKPOINTS):
        # A damaged checkpoint is reported when it is loaded.
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            return result_deciding(from_dict(read_state(path)["about"]["config"]))
    return {}


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The content of a checkpoint's state.json. Raises `OSError`, `ValueError`, `KeyError` or `TypeError`."""
    state = reader.read_text(checkpoint / "state.json")
    if hashlib.sha256(state.encode()).hexdigest() != reader.read_json(checkpoint / "manifest.json")["state.json"][1]:
        raise ValueError("state.json has changed since it was saved")
    found: dict[str, Any] = reader.parse_json(state)
    return found
