"""Checkpoints: one directory per saved step, published by one rename.

    checkpoints/step-00000050/model.safetensors      weights; a head that is the embedding is left out
                              optimizer.safetensors  the tensors of the optimizer's state, as PARAMETER.KEY
                              ema.safetensors        the average of the weights, if train.ema_half_life_tokens is set
                              state.json             counters; config, data and versions of the run; its `Layout`
                              manifest.json          sizes and hashes of the other files, written last

Ranks that have parts of the tensors write a file each (tensor_files.py). The tensors are copied, and a thread writes
them while training goes on.

Only state that cannot be derived is saved: data order, learning rate and dropout follow from the config and the
counters. A directory that is being written or removed has another name.
"""

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

from gptexp.config.batch import crosses
from gptexp.config.noise_scale import NoiseScale
from gptexp.config.schema import from_dict
from gptexp.process import pointers
from gptexp.process.errors import CheckpointError, StorageError, first_line
from gptexp.process.terminal import warn
from gptexp.process.words import counted, shown
from gptexp.storage import tensor_files
from gptexp.storage.divergence import LossTrend
from gptexp.storage.reader import read_json
from gptexp.storage.run_dir import fsync, published, step_of
from gptexp.storage.tensor_files import AVERAGE, MODEL, OPTIMIZER, Part, file_name

MANIFEST, STATE = "manifest.json", "state.json"
AVERAGED_TOKENS = "averaged_tokens"  # saved with the averaged weights: tokens of the updates that the average covers
SPARE = 1.1  # required free disk space, as a multiple of the size of the tensors
Parts = Mapping[str, Mapping[str, Part]]  # kind of file -> name -> this rank's part of the tensor


@dataclass
class TrainState:
    """The counters and statistics of a run."""

    step: int = 0  # number of steps done, including skipped updates
    tokens: int = 0  # training tokens consumed
    fingerprint: int = 0  # sum of the hashes of all ranks' consumed windows, modulo 2^64
    val_loss: float | None = None  # of the newest evaluation, in nats per token
    val_loss_ema: float | None = None  # the same with the averaged weights
    best_val_loss: float | None = None
    best_tokens: int = 0  # `tokens` at the evaluation that gave it
    evaluated_tokens: int = 0  # `tokens` at the newest evaluation
    seconds: float = 0.0  # training time of all attempts
    skipped_updates: int = 0  # number of updates skipped because the loss or gradient was non-finite
    steps_passed_over: int = 0  # steps that rollbacks undid, whose data is not read again
    tokens_passed_over: int = 0  # tokens of those steps; the next step reads on from `tokens` + this number
    trend: LossTrend = field(default_factory=LossTrend)
    noise_scale: NoiseScale = field(default_factory=NoiseScale)
    regular: bool = True  # False: saved before it was due, because the run stopped early or measured its sharpness

    def go_back(self, saved: "TrainState", steps: int, tokens: int) -> None:
        """Restore the counters of an earlier checkpoint, and pass over the data that was read since.

        `steps` and `tokens`: how many were done until now, counted from the start of the run.
        """
        steps_passed_over = self.steps_passed_over + steps - saved.step
        tokens_passed_over = self.tokens_passed_over + tokens - saved.tokens
        for each in fields(self):
            if each.name != "seconds":  # includes the time of undone steps
                setattr(self, each.name, getattr(saved, each.name))
        self.steps_passed_over, self.tokens_passed_over = steps_passed_over, tokens_passed_over


@dataclass(frozen=True)
class Layout:
    """The files that hold the tensors of a checkpoint, and the optimizer's counters."""

    files: dict[str, int]  # kind -> number of files of this kind
    split: bool  # whether the rows of each tensor are split among the files
    counts: list[dict[str, Any]]  # counters of each of the optimizer's parameter groups

    @property
    def names(self) -> set[str]:
        """The names of the files."""
        return {file_name(kind, number, count) for kind, count in self.files.items() for number in range(count)}


@dataclass(frozen=True)
class Tensors:
    """The tensors that this rank saves, and the layout of those of all ranks."""

    parts: Parts
    layout: Layout


@dataclass(frozen=True)
class Keep:
    """The checkpoints that are kept when a new one is saved."""

    last: int = 0  # number of newest regular checkpoints; 0: all
    every_tokens: int = 0  # also the first regular one at or after each multiple of this number; 0: none
    best: bool = True  # also the regular one with the lowest validation loss


def name_of(step: int) -> str:
    """The name of the directory of a step's checkpoint."""
    return f"step-{step:08d}"


def begin_to_save(
    directory: Path,
    tensors: Tensors,
    state: TrainState,
    keep: Keep,
    about: dict[str, Any],
    group: dist.ProcessGroup | None = None,
) -> "Future[Path]":
    """Begin to save the checkpoint of `state.step`. After it is saved, remove those that `keep` does not select.

    Returns once this rank's `tensors` are copied. state.json contains `about` beside the counters. If several ranks
    have parts, exactly these ranks must call this, at the same time, with a `group` that nothing else uses.

    The future's result is the checkpoint's path: on rank 0 when the checkpoint is published, on others when their files
    are written. Its exception is a `StorageError`, which the call may also raise; earlier checkpoints stay unchanged.
    """
    target = directory / name_of(state.step)
    done: Future[Path] = Future()
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    size = ranks * sum(part.tensor.nbytes for by_name in tensors.parts.values() for part in by_name.values())
    if (unfinished := _shared(lambda: _make_room(target, size), group)) is None:
        done.set_result(target)
        return done
    copies = {
        file_name(kind, rank, tensors.layout.files[kind]): {name: _copy(part.tensor) for name, part in by_name.items()}
        for kind, by_name in tensors.parts.items()
    }
    text = _state_text(state, about, tensors.layout)  # training changes the state

    def save() -> None:
        try:
            rank_results = _gathered(_write(unfinished, copies), group)
            if rank == 0:
                _publish_all(unfinished, target, text, rank_results)
                prune(directory, keep)
            done.set_result(target)
        except Exception as error:  # also if a rank is lost
            if rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            done.set_exception(_not_saved(target, first_line(error)))

    # A daemon: a lost rank must not keep this process alive.
    threading.Thread(target=save, name="checkpoint", daemon=True).start()
    return done


def _write(unfinished: Path, copies: dict[str, dict[str, torch.Tensor]]) -> dict[str, list[Any]] | str:
    """Write this rank's files, and free the copies of each as it is written. Returns sizes and hashes, or the error.

    It raises nothing, so that every rank reaches the collective that follows.
    """
    try:
        return {name: list(tensor_files.write(unfinished / name, copies.pop(name))) for name in list(copies)}
    except BaseException as error:
        return first_line(error)


def _gathered(own: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """On rank 0 of `group`, the values of all its ranks."""
    if group is None:
        return [own]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.gather_object(own, values if dist.get_rank(group) == 0 else None, group=group)
    return values


def _publish_all(unfinished: Path, target: Path, text: str, results: Sequence[dict[str, list[Any]] | str]) -> None:
    """Publish what the ranks have written. Raises `OSError`, also if a rank has failed."""
    files: dict[str, list[Any]] = {}
    for written in results:
        if isinstance(written, str):
            raise OSError(written)
        files |= written
    _publish(unfinished, target, text, files)


def _shared(decide: Callable[[], Path | None], group: dist.ProcessGroup | None) -> Path | None:
    """What rank 0 of `group` decides. Raises its `StorageError` on all ranks."""
    decisions: list[Any] = [None]
    if group is None or dist.get_rank(group) == 0:
        try:
            decisions = [decide()]
        except StorageError as error:
            decisions = [error]
    if group is not None:
        dist.broadcast_object_list(decisions, group=group)
    [decided] = decisions
    if isinstance(decided, StorageError):
        raise decided
    return None if decided is None else Path(decided)


def _make_room(target: Path, size: int) -> Path | None:
    """Make a new directory beside `target`, for tensors of `size` bytes; None if the checkpoint is there already."""
    try:
        if target.exists():
            return None
        if not target.parent.exists():
            target.parent.mkdir()
            fsync(target.parent.parent)
        needed, free = int(SPARE * size), shutil.disk_usage(target.parent).free
        if free < needed:
            raise OSError(f"{needed:,} bytes are needed, {free:,} are free; delete files, or use another run directory")
        return _begin(target)
    except OSError as error:
        raise _not_saved(target, first_line(error)) from error


def _begin(target: Path) -> Path:
    """Make a new directory beside `target`: a rank of a lost attempt may still write to an older one."""
    unfinished = target.with_name(f".tmp-{target.name}-{time.time_ns()}")
    unfinished.mkdir()
    return unfinished


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", requires_grad=False).copy_(tensor.detach())


def _not_saved(path: Path, why: str) -> StorageError:
    return StorageError(f"{path}: cannot be saved ({why}); earlier ones are unchanged")


def adopt(source: Path, directory: Path, about: dict[str, Any]) -> tuple[Path, TrainState]:
    """Copy checkpoint `source` of another run to `directory`, as the first one there, with `about` in place of its own.

    The training time starts at 0, because it was spent by the other run. Raises `CheckpointError` if `source` is
    damaged, and `StorageError` if the copy cannot be saved.
    """
    state = load_state(source)
    state.seconds = 0.0
    target = directory / source.name
    try:
        directory.mkdir(exist_ok=True)
        unfinished, files = _begin(target), read_json(source / MANIFEST)
        for name in files.keys() - {STATE}:
            shutil.copyfile(source / name, unfinished / name)
            fsync(unfinished / name)
        _publish(unfinished, target, _state_text(state, about, layout_of(source)), files)
    except OSError as error:
        remove_leftovers(directory)
        raise StorageError(f"{target}: cannot be saved ({first_line(error)})") from error
    return target, state


def _publish(unfinished: Path, target: Path, text: str, files: Mapping[str, list[Any]]) -> None:
    """Complete the checkpoint in `unfinished` with `text` as state.json, and rename it to `target`.

    `files`: the sizes and hashes of the files of tensors, which are on the disk already.
    """
    data = text.encode()
    (unfinished / STATE).write_bytes(data)
    manifest = {**files, STATE: [len(data), hashlib.sha256(data).hexdigest()]}
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for path in (unfinished / STATE, unfinished / MANIFEST, unfinished):
        fsync(path)
    unfinished.rename(target)
    fsync(target.parent)


def _state_text(state: TrainState, about: dict[str, Any], layout: Layout) -> str:
    return json.dumps({**asdict(state), "about": about, "tensors": asdict(layout)}, indent=1) + "\n"


def load_latest(directory: Path, regular: bool = False) -> tuple[Path, TrainState] | None:
    """Find the newest intact checkpoint. Returns its path and state, or None if there is none to consider.

    With `regular`, only checkpoints that were due are considered, so that interruptions do not change the result.
    Warns of each newer, damaged checkpoint. Raises `CheckpointError` if there is a damaged one and none is usable.
    """
    rejected = []
    for path in published(directory):
        try:
            state = _checked(path)
        except CheckpointError as error:
            rejected.append(f"{path}: {error}")
            warn(f"damaged checkpoint skipped: {rejected[-1]}")
            continue
        if state.regular or not regular:
            return path, state
    if rejected:
        raise CheckpointError(f"{directory}: no intact checkpoint can be used; " + "; ".join(rejected))
    return None


def load_state(path: Path) -> TrainState:
    """The state of checkpoint `path`. Raises `CheckpointError` unless all of its files are intact."""
    try:
        return _checked(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def newest(directory: Path, step: int | None = None) -> tuple[Path, TrainState]:
    """`load_latest` for a run that must have a checkpoint; with `step`, that checkpoint. Raises `CheckpointError`."""
    if step is not None:
        path = directory / name_of(step)
        return path, load_state(path)
    latest = load_latest(directory)
    if latest is None:
        raise CheckpointError(f"{directory}: no checkpoint has been saved yet")
    return latest


def set_aside(directory: Path, newer_than: int) -> None:
    """Rename all checkpoints of steps after `newer_than`: they are damaged, or left behind by a rollback.

    Under their old names they would count among the newest when old checkpoints are removed. Nothing is deleted.
    """
    for path in published(directory):
        if step_of(path) > newer_than:
            path.rename(path.with_name(f"rejected-{time.time_ns()}-{path.name}"))


def remove_leftovers(directory: Path) -> None:
    """Remove directories that killed processes have partly written or removed. The caller must hold the run's lock."""
    for leftover in [*directory.glob(".tmp-*"), *directory.glob(".del-*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def refuse_other_size(path: Path, parameters: int) -> None:
    """Raise `CheckpointError` unless checkpoint `path` has as many parameters, before a model of that size is built.

    Of a split checkpoint only the first file is read: no other file has more parameters.
    """
    count = layout_of(path).files[MODEL]
    file = path / file_name(MODEL, 0, count)
    first = tensor_files.size(file)
    if first != parameters if count == 1 else not first <= parameters <= first * count:
        number, place = counted(first, "parameter"), f" in 1 of {count} files" if count > 1 else ""
        raise CheckpointError(f"{file}: does not fit the model (it has {number}{place}, not {parameters:,})")


def layout_of(path: Path) -> Layout:
    """The layout of checkpoint `path`. Raises `CheckpointError`."""
    try:
        layout: Layout = from_dict(read_json(path / STATE)["tensors"], Layout)
        if (
            not {MODEL, OPTIMIZER} <= layout.files.keys() <= {MODEL, OPTIMIZER, AVERAGE}
            or min(layout.files.values()) < 1
        ):
            raise ValueError(f"it has the files {shown(layout.files)}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path / STATE}: {first_line(error)}") from None
    return layout


def load_weights(path: Path, model: nn.Module, averaged: bool = False) -> None:
    """Load the weights of checkpoint `path`, or their average, into `model`.

    Raises `CheckpointError` if they are missing or do not fit.
    """
    parts = {name: Part(p) for name, p in model.named_parameters()}
    if averaged:
        parts[AVERAGED_TOKENS] = Part(torch.zeros((), dtype=torch.float64))
    read(path, AVERAGE if averaged else MODEL, parts)


def read(path: Path, kind: str, wanted: Mapping[str, Part]) -> None:
    """Fill the tensors of `wanted` from checkpoint `path`. Raises `CheckpointError` if they do not fit."""
    layout = layout_of(path)
    tensor_files.read(path, kind, layout.files.get(kind, 1), layout.split, wanted)


def shapes_of(path: Path, kind: str) -> dict[str, torch.Tensor]:
    """The tensors of a kind in checkpoint `path`, without memory. If it `is_split`, those of the first rank's rows."""
    count = layout_of(path).files[kind]
    files = [tensor_files.shapes(path / file_name(kind, number, count)) for number in range(count)]
    return {name: tensor for file in reversed(files) for name, tensor in file.items()}


def is_split(path: Path) -> bool:
    """Whether each rank has saved some rows of each tensor of checkpoint `path`."""
    return layout_of(path).split


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors in a file of safetensors. Raises `CheckpointError`."""
    try:
        with tensor_files.opened(file) as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        why = pointers.why_unreadable(file) or f"cannot be read ({first_line(error)}); copy or download it again"
        raise CheckpointError(f"{file}: {why}") from None


def has_state(path: Path) -> bool:
    """Whether checkpoint `path` has optimizer state. Most optimizers have none until an update that is not skipped."""
    values, layout = read_json(path / STATE), layout_of(path)
    if values["skipped_updates"] < values["step"]:
        return True
    return bool(read_tensors(path / file_name(OPTIMIZER, 0, layout.files[OPTIMIZER])))


def _checked(path: Path, hashes: bool = True) -> TrainState:
    """Check a checkpoint and return its state. Raises `CheckpointError` if it is damaged.

    Without `hashes`, only names and sizes of the files are checked.
    """
    name = MANIFEST
    try:
        if missing := [file for file in (MANIFEST, STATE) if not (path / file).is_file()]:
            raise CheckpointError(f"{missing[0]} is missing")
        files, layout = read_json(path / MANIFEST), layout_of(path)
        if len(files) != 1 + sum(layout.files.values()) or files.keys() != {*layout.names, STATE}:
            raise CheckpointError(f"{MANIFEST} does not list the files that {STATE} describes")
        for name in files:
            size, digest = files[name]
            actual_size = (path / name).stat().st_size
            if actual_size != size:
                raise CheckpointError(f"{name} has {counted(actual_size, 'byte')}, and {MANIFEST} says {shown(size)}")
            if hashes and _sha256(path / name) != digest:
                raise CheckpointError(f"{name} has changed since it was saved (sha256 differs)")
        name = STATE
        values = read_json(path / name)
        state: TrainState = from_dict({k: v for k, v in values.items() if k not in ("about", "tensors")}, TrainState)
        if path.name != name_of(state.step):
            raise CheckpointError("state.json belongs to another step")
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{name}: {first_line(error)}") from None
    return state


def data_hash(path: Path) -> str | None:
    """Hash of the tokens of the run of checkpoint `path`; None if the checkpoint does not contain it."""
    found = about_run(path).get("data_hash")
    return found if isinstance(found, str) else None


def about_run(path: Path) -> dict[str, Any]:
    """What checkpoint `path` says of its run; empty if it says nothing."""
    found = read_json(path / STATE).get("about")
    return found if isinstance(found, dict) else {}


def prune(directory: Path, keep: Keep) -> None:
    """Remove the checkpoints that `keep` does not select. Damaged ones are left alone; hashes are not checked."""
    try:
        states = complete(directory)
        for path in states.keys() - selected(states, keep):
            # Renamed first, so that a partly removed checkpoint is not taken for a damaged one.
            hidden = path.with_name(f".del-{path.name}")
            path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)
    except OSError as error:
        warn(f"{directory}: old checkpoints cannot be removed ({error.strerror or error})")


def complete(directory: Path) -> dict[Path, TrainState]:
    """The checkpoints whose files have the sizes that they were saved with, newest first."""
    states: dict[Path, TrainState] = {}
    for path in published(directory):
        with suppress(CheckpointError):
            states[path] = _checked(path, hashes=False)
    return states


def selected(states: dict[Path, TrainState], keep: Keep) -> set[Path]:
    """Of `states` (newest first), the newest checkpoint and the regular ones that `keep` selects.

    So interruptions and measurements of the sharpness do not affect which regular checkpoints are kept.
    """
    if not keep.last:
        return set(states)
    due = {path: state for path, state in states.items() if state.regular}
    kept = {*list(due)[: keep.last], *list(states)[:1]}  # the newest is kept even if it was not due
    losses = {p: s.val_loss for p, s in due.items() if s.val_loss is not None and s.evaluated_tokens == s.tokens}
    if keep.best and losses:
        kept.add(min(losses, key=lambda path: losses[path]))
    before = 0
    for path, state in reversed(due.items()):
        if crosses(before, state.tokens, keep.every_tokens):
            kept.add(path)
        before = state.tokens
    return kept


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
