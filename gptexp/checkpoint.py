"""Checkpoints: a directory per saved step, complete or not there.

    checkpoints/step-00000050/model.safetensors   weights under GPT-2's names; lm_head is wte
                              train.pt            optimizer state; loads with weights_only=True
                              state.json          counters, and what the run is: config, data, versions
                              manifest.json       sizes and hashes of the others, written last

Only numbers that cannot be derived are saved: data order, learning rate and dropout follow from the config and the
counters. A checkpoint counts once its directory has its name; what is being written or removed has another.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from gptexp.batch import crosses
from gptexp.config import from_dict
from gptexp.divergence import LossTrend
from gptexp.errors import CheckpointError, StorageError, first_line
from gptexp.noise_scale import NoiseScale
from gptexp.run_dir import fsync

NAME = re.compile(r"step-(\d{8,})")
MANIFEST = "manifest.json"
FILES = ("model.safetensors", "train.pt", "state.json")
SPARE = 1.1  # times the size of what is to be saved must be free


@dataclass
class TrainState:
    """The counters of a run."""

    step: int = 0  # optimizer updates done
    tokens: int = 0  # training tokens consumed
    fingerprint: int = 0  # of the windows consumed, over all ranks, modulo 2^64
    val_loss: float | None = None  # newest, in nats per token
    best_val_loss: float | None = None
    evaluated_tokens: int = 0  # `tokens` at the newest evaluation
    seconds: float = 0.0  # of training, over all attempts
    skipped_updates: int = 0  # left out since loss or gradient was not finite
    steps_passed_over: int = 0  # of data that a rollback left behind: step k reads what k + this many come to
    trend: LossTrend = field(default_factory=LossTrend)
    noise_scale: NoiseScale = field(default_factory=NoiseScale)
    regular: bool = True  # whether this checkpoint was due; False: saved to leave with, early


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay when a new one is saved."""

    last: int = 0  # the newest so many of those that were due; 0: all
    every_tokens: int = 0  # and the first at or after each multiple; 0: none
    best: bool = True  # and that of the lowest validation loss


def save(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    keep: Keep,
    about: dict[str, Any] | None = None,
) -> Path:
    """Publish the checkpoint of `state.step` in `directory` by one rename; then remove those that `keep` does not name.

    `about` goes into state.json beside the counters. Raises `StorageError`, with everything saved before untouched.
    """
    target = directory / f"step-{state.step:08d}"
    if target.exists():
        return target
    unfinished = directory / f".tmp-{target.name}-{os.getpid()}"
    weights = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    moments = optimizer.state_dict()
    try:
        with _storage(target):
            if not directory.exists():
                directory.mkdir()
                fsync(directory.parent)
            _refuse_a_full_disk(directory, weights, moments)
            unfinished.mkdir()
            save_file(weights, unfinished / "model.safetensors")
            with (unfinished / "train.pt").open("wb") as file:
                _save({"optimizer": moments}, file)
            text = json.dumps({**asdict(state), "about": about or {}}, indent=1)
            (unfinished / "state.json").write_text(text + "\n")
            files = {name: [(unfinished / name).stat().st_size, _sha256(unfinished / name)] for name in FILES}
            (unfinished / MANIFEST).write_text(json.dumps(files, indent=1) + "\n")
            for path in [*unfinished.iterdir(), unfinished]:
                fsync(path)
            unfinished.rename(target)
            fsync(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    try:
        _prune(directory, keep)
    except OSError as error:
        print(f"gptexp: {directory}: old checkpoints stay ({error.strerror or error})", file=sys.stderr)
    return target


@contextmanager
def _storage(target: Path) -> Iterator[None]:
    """What keeps a checkpoint from being written, as one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = re.search(r"os error (\d+)", str(error))  # what safetensors says of the file system's refusal
        reason = os.strerror(int(number[1])) if number else getattr(error, "strerror", None) or str(error)
        raise StorageError(f"{target}: cannot be saved ({reason}); what was saved before is untouched") from error


def _refuse_a_full_disk(directory: Path, weights: dict[str, torch.Tensor], moments: dict[str, Any]) -> None:
    """Raise `OSError` where not all of it would fit."""
    tensors = [*weights.values(), *(v for s in moments["state"].values() for v in s.values() if torch.is_tensor(v))]
    needed = int(SPARE * sum(t.numel() * t.element_size() for t in tensors))
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(f"{needed:,} bytes are needed, {free:,} are free; free some, or save elsewhere")


def _save(value: object, file: BinaryIO) -> None:
    """torch.save, which answers a full disk with a RuntimeError of its own, raising what the file system said."""
    refused: list[OSError] = []

    class Watched:
        def write(self, data: bytes) -> int:
            try:
                return file.write(data)
            except OSError as error:
                refused.append(error)
                raise

        def flush(self) -> None:
            file.flush()

    try:
        torch.save(value, Watched())  # type: ignore[arg-type]
    except RuntimeError:
        if refused:
            raise refused[0] from None
        raise


def load_latest(directory: Path, regular: bool = False) -> tuple[Path, TrainState] | None:
    """The newest checkpoint that is whole, and its state; None if none was ever saved.

    `regular`: the newest of those that were due, whatever interruptions there were. Prints a line for each newer one
    that is not whole; raises `CheckpointError` if none of several is.
    """
    rejected = []
    for path in sorted(_published(directory), key=_step, reverse=True):
        try:
            state = _checked(path)
        except CheckpointError as error:
            rejected.append(f"{path}: {error}")
            print(f"gptexp: checkpoint passed over: {rejected[-1]}", file=sys.stderr)
            continue
        if state.regular or not regular:
            return path, state
    if rejected:
        raise CheckpointError(f"{directory}: no checkpoint is whole; " + "; ".join(rejected))
    return None


def newest(directory: Path) -> tuple[Path, TrainState]:
    """`load_latest`, where there must be one."""
    found = load_latest(directory)
    if found is None:
        raise CheckpointError(f"{directory.parent}: no checkpoint has been saved yet")
    return found


def set_aside(directory: Path, newer_than: int) -> None:
    """Rename the checkpoints of steps after `newer_than`: they were passed over, and training goes on before them.

    Left in place they would count among the newest when old ones are removed. Nothing is deleted.
    """
    for path in _published(directory):
        if _step(path) > newer_than:
            path.rename(path.with_name(f"rejected-{time.time_ns()}-{path.name}"))


def sweep(directory: Path) -> None:
    """Remove what processes that were killed left half-written or half-removed; for who holds the run's lock."""
    for leftover in [*directory.glob(".tmp-*"), *directory.glob(".del-*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def load_weights(path: Path, model: nn.Module) -> None:
    """Put the weights of checkpoint `path` into `model`; raises `CheckpointError` where they are not its weights."""
    try:
        weights = load_file(path / "model.safetensors")
        model.load_state_dict({**weights, "lm_head.weight": weights["wte.weight"]})
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path / 'model.safetensors'}: not this model's weights ({first_line(error)})") from None


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """Put the optimizer state of checkpoint `path` into `optimizer`; raises `CheckpointError` where it is another's.

    A file that holds code is refused, not run.
    """
    own = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        saved: dict[str, Any] = torch.load(path / "train.pt", map_location="cpu", weights_only=True)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        _check_moments(saved["optimizer"]["state"], parameters)
        optimizer.load_state_dict(saved["optimizer"])
    except (OSError, UnpicklingError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise CheckpointError(f"{path / 'train.pt'}: not this optimizer's state ({first_line(error)})") from None
    for group, hyperparameters in zip(optimizer.param_groups, own, strict=True):
        group.update(hyperparameters)  # the config's, and this device's kernel


def _check_moments(state: dict[int, dict[str, torch.Tensor]], parameters: list[nn.Parameter]) -> None:
    """Raise `ValueError` unless every parameter has AdamW's moments in its own shape: the kernels do not look."""
    if state.keys() != set(range(len(parameters))):
        raise ValueError(f"it holds {len(state)} parameters, not {len(parameters)}")
    for number, parameter in enumerate(parameters):
        shapes = {name: tuple(value.shape) for name, value in state[number].items()}
        if shapes != {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}:
            raise ValueError(f"parameter {number} of shape {tuple(parameter.shape)} has {shapes}")


def _published(directory: Path) -> list[Path]:
    return [p for p in directory.glob("step-*") if NAME.fullmatch(p.name)] if directory.is_dir() else []


def _step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _checked(path: Path, hashes: bool = True) -> TrainState:
    """The state of a checkpoint; raises `CheckpointError` that says what is wrong with it.

    Without `hashes`: only what the sizes of its files show.
    """
    try:
        if irregular := [name for name in (MANIFEST, *FILES) if not (path / name).is_file()]:
            raise CheckpointError(f"{irregular[0]} is missing or no regular file")
        files = json.loads((path / MANIFEST).read_text())
        if not isinstance(files, dict) or files.keys() != set(FILES):
            raise CheckpointError(f"{MANIFEST} does not name these files")
        for name, (size, digest) in files.items():
            file = path / name
            if file.stat().st_size != size:
                raise CheckpointError(f"{name} has {file.stat().st_size:,} bytes, not {size:,}")
            if hashes and _sha256(file) != digest:
                raise CheckpointError(f"{name} is not what was saved (sha256 differs)")
        values = json.loads((path / "state.json").read_text())
        values.pop("about", None)
        state = from_dict(values, TrainState)
        assert isinstance(state, TrainState)
        if path.name != f"step-{state.step:08d}":
            raise CheckpointError("state.json is of another step")
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{type(error).__name__}: {first_line(error)}") from None
    return state


def data_hash(path: Path) -> str | None:
    """Hash of the tokens that the run of checkpoint `path` reads, if it says so."""
    about = json.loads((path / "state.json").read_text()).get("about")
    found = about.get("data_hash") if isinstance(about, dict) else None
    return found if isinstance(found, str) else None


def _prune(directory: Path, keep: Keep) -> None:
    """Remove what `keep` does not name. What is not whole neither counts nor goes."""
    if not keep.last:
        return
    states: dict[Path, TrainState] = {}  # the newest first
    for path in sorted(_published(directory), key=_step, reverse=True):
        with suppress(CheckpointError):
            states[path] = _checked(path, hashes=False)
    due = [path for path, state in states.items() if state.regular]
    kept = {*due[: keep.last], next(iter(states), directory)}  # the newest, be it one to leave with
    losses = {
        path: s.val_loss for path, s in states.items() if s.val_loss is not None and s.evaluated_tokens == s.tokens
    }
    if keep.best and losses:
        kept.add(min(losses, key=lambda path: losses[path]))
    before = 0
    for path, state in reversed(states.items()):
        if crosses(before, state.tokens, keep.every_tokens):
            kept.add(path)
        before = state.tokens
    for path in states.keys() - kept:
        # Renamed first, so that a half-deleted checkpoint never looks like a damaged one.
        hidden = path.with_name(f".del-{path.name}")
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
