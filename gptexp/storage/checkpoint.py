"""Checkpoints: one directory per saved step, published by one rename.

    checkpoints/step-00000050/model.safetensors   weights under GPT-2's names; lm_head is tied to wte
                              train.pt            optimizer state; loads with weights_only=True
                              ema.safetensors     the average of the weights, if train.ema_half_life_tokens is set
                              state.json          counters; config, data and versions of the run
                              manifest.json       sizes and hashes of the other files, written last

The tensors of a large model are in one file for each rank (sharded.py). The ranks write them while training goes on.

Only state that cannot be derived is saved: data order, learning rate and dropout follow from the config and the
counters. A directory that is being written or removed has another name.
"""

import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils._pytree import tree_leaves

from gptexp.config.batch import crosses
from gptexp.config.schema import from_dict
from gptexp.process.errors import CheckpointError, StorageError, first_line
from gptexp.process.terminal import warn
from gptexp.process.words import counted, shown
from gptexp.storage import sharded
from gptexp.storage.divergence import LossTrend
from gptexp.storage.noise_scale import NoiseScale
from gptexp.storage.reader import read_json
from gptexp.storage.run_dir import fsync, published, step_of

MANIFEST = "manifest.json"
WEIGHTS, AVERAGE = "model.safetensors", "ema.safetensors"
FILES = (WEIGHTS, "train.pt", "state.json")
AVERAGED_TOKENS = "averaged_tokens"  # in AVERAGE, beside the weights: tokens of the updates that it is of
COUNTED = ("params", "step", "weight_sum", "lr_max", "train_mode")  # in groups, and no hyperparameters
Shapes = Mapping[str, tuple[int, ...] | list[tuple[int, ...]]]  # of the tensors of a parameter's state, by name
SPARE = 1.1  # required free disk space, as a multiple of the size of the tensors


@dataclass
class TrainState:
    """The counters and statistics of a run."""

    step: int = 0  # number of steps done, including skipped updates
    tokens: int = 0  # training tokens consumed
    fingerprint: int = 0  # of the consumed windows of all ranks, modulo 2^64
    val_loss: float | None = None  # of the newest evaluation, in nats per token
    val_loss_ema: float | None = None  # the same with the averaged weights
    best_val_loss: float | None = None
    evaluated_tokens: int = 0  # `tokens` at the newest evaluation
    seconds: float = 0.0  # training time of all attempts
    skipped_updates: int = 0  # number of updates skipped because the loss or gradient was non-finite
    steps_passed_over: int = 0  # by rollbacks, whose data is not read again
    tokens_passed_over: int = 0  # of those steps: a step reads what follows `tokens` + this many tokens
    trend: LossTrend = field(default_factory=LossTrend)
    noise_scale: NoiseScale = field(default_factory=NoiseScale)
    earlier_noise: float = 0.0  # `noise_scale.valid_noise` before the newest step
    regular: bool = True  # False: saved before it was due, as the run stopped early or measured its sharpness

    def go_back(self, saved: "TrainState", steps: int, tokens: int) -> None:
        """Restore the counters of an earlier checkpoint, and pass over the data that `steps` steps have read since.

        `tokens` are those after these steps.
        """
        steps_passed_over = self.steps_passed_over + steps - saved.step
        tokens_passed_over = self.tokens_passed_over + tokens - saved.tokens
        for each in fields(self):
            if each.name != "seconds":  # of all attempts, also of steps that were undone
                setattr(self, each.name, getattr(saved, each.name))
        self.steps_passed_over, self.tokens_passed_over = steps_passed_over, tokens_passed_over


@dataclass(frozen=True)
class Content:
    """The tensors of a checkpoint, all whole."""

    weights: Mapping[str, torch.Tensor]
    optimizer: dict[str, Any]  # its state_dict
    average: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of the weights; empty: there is none


@dataclass(frozen=True)
class Keep:
    """The checkpoints that are kept when a new one is saved."""

    last: int = 0  # number of newest regular checkpoints; 0: all
    every_tokens: int = 0  # the first regular one at or after each multiple; 0: none
    best: bool = True  # the regular one with the lowest validation loss


def name_of(step: int) -> str:
    """The name of the directory of a step's checkpoint."""
    return f"step-{step:08d}"


def save(directory: Path, content: Content, state: TrainState, keep: Keep, about: dict[str, Any] | None = None) -> Path:
    """Save the checkpoint of `state.step` in `directory`; then remove the checkpoints that `keep` does not select.

    state.json contains `about` beside the counters, and an average has a file of its own. After a `StorageError`
    earlier checkpoints are unchanged.
    """
    target = directory / name_of(state.step)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in content.weights.items()}
    averaged = {name: tensor.cpu() for name, tensor in content.average.items()}
    try:
        if target.exists():
            return target
        _make(directory)
        tensors = [*weights.values(), *averaged.values(), *tree_leaves(content.optimizer["state"])]
        _refuse_a_full_disk(directory, sum(t.numel() * t.element_size() for t in tensors if torch.is_tensor(t)))
        with _unfinished(target) as folder:
            save_file(weights, folder / WEIGHTS)
            if averaged:
                save_file(averaged, folder / AVERAGE)
            _save({"optimizer": content.optimizer}, folder / "train.pt")
            _publish(folder, target, _state_text(state, about or {}))
    except (OSError, SafetensorError) as error:
        raise _not_saved(target, first_line(error)) from error
    prune(directory, keep)
    return target


def begin_to_save_parts(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    counts: Sequence[Mapping[str, Any]],
    state: TrainState,
    keep: Keep,
    about: dict[str, Any],
    group: dist.ProcessGroup,
    attempt: int,
) -> "Future[Path]":
    """As `save`, for `tensors` of which each rank has parts: returns once these are copied. *Collective.*

    `counts` are the `COUNTED` values of the optimizer's groups. Nothing else may use `group`. `attempt` is a number
    that the ranks have in common, and no other save: a rank that a lost attempt has left behind may still write. The
    future's result is the path on every rank, or its exception a `StorageError`.
    """
    target = directory / name_of(state.step)
    unfinished = target.with_name(f".tmp-{target.name}-{attempt}")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    text = _state_text(state, about, counts)  # training changes the state
    written = sharded.write(unfinished, tensors, rank, ranks, group)
    done: Future[Path] = Future()

    def of_this_rank() -> dict[str, list[Any]] | str:
        """The size and hash of each file of this rank; or why it has none. It must reach the next collective."""
        try:
            written.result()
            return {name: _size_and_hash(unfinished / name) for name in sharded.files_of(rank)}
        except BaseException as error:  # DCP's own is not an `Exception`
            return sharded.cause_of(error)

    def published(of_ranks: Sequence[dict[str, list[Any]] | str]) -> str | None:
        """Publish what the ranks have written. Returns why that failed, or None."""
        failed = [found for found in of_ranks if isinstance(found, str)]
        try:
            if not failed:
                files = {name: of for found in of_ranks if not isinstance(found, str) for name, of in found.items()}
                _publish(unfinished, target, text, files)
                prune(directory, keep)
                return None
        except OSError as error:
            failed = [first_line(error)]
        shutil.rmtree(unfinished, ignore_errors=True)  # no rank writes any more
        return failed[0]

    def finish() -> None:
        try:
            of_ranks: list[Any] | None = [None] * ranks if rank == 0 else None
            dist.gather_object(of_this_rank(), of_ranks, group=group)
            why = [None if of_ranks is None else published(of_ranks)]
            dist.broadcast_object_list(why, group=group)
        except Exception as error:  # a rank is lost
            why = [first_line(error)]
        if why[0] is None:
            done.set_result(target)
        else:
            done.set_exception(_not_saved(target, why[0]))

    threading.Thread(target=finish, daemon=True).start()  # a lost rank must not keep this process alive
    return done


def refuse_a_full_disk(directory: Path, size: int) -> None:
    """Raise `StorageError` if a checkpoint of `size` bytes of tensors does not fit on the disk. Creates `directory`."""
    try:
        _make(directory)
        _refuse_a_full_disk(directory, size)
    except OSError as error:
        raise _not_saved(directory, first_line(error)) from error


def _make(directory: Path) -> None:
    if not directory.exists():
        directory.mkdir()
        fsync(directory.parent)


def _not_saved(path: Path, why: str) -> StorageError:
    return StorageError(f"{path}: cannot be saved ({why}); earlier ones are unchanged")


def adopt(source: Path, directory: Path, about: dict[str, Any]) -> tuple[Path, TrainState]:
    """Make checkpoint `source` of another run the first one in `directory`, with `about` in place of its own.

    The time spent is not taken over: it is that of the other run. Raises `CheckpointError` if it is damaged, and
    `StorageError` if it cannot be saved.
    """
    state = load_state(source)
    state.seconds = 0.0
    target = directory / source.name
    try:
        directory.mkdir(exist_ok=True)
        with _unfinished(target) as folder:
            for name in read_json(source / MANIFEST):
                shutil.copyfile(source / name, folder / name)
            _publish(folder, target, _state_text(state, about))
    except OSError as error:
        raise StorageError(f"{target}: cannot be saved ({first_line(error)})") from error
    return target, state


@contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """Yield a new directory beside `target`, under another name. It is removed unless `_publish` has renamed it."""
    unfinished = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    unfinished.mkdir()
    try:
        yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _publish(unfinished: Path, target: Path, text: str, of_others: Mapping[str, list[Any]] | None = None) -> None:
    """Complete the checkpoint in `unfinished`, which has its tensors, with `text` as state.json, and rename it.

    `of_others`: the sizes and hashes of files that other ranks have written, which are on the disk already.
    """
    (unfinished / "state.json").write_text(text)
    of_others = of_others or {}
    here = [path for path in sorted(unfinished.iterdir()) if path.name not in of_others]
    files = {**of_others, **{path.name: _size_and_hash(path) for path in here}}
    (unfinished / MANIFEST).write_text(json.dumps(files, indent=1) + "\n")
    for path in [*here, unfinished / MANIFEST, unfinished]:
        fsync(path)
    unfinished.rename(target)
    fsync(target.parent)


def _state_text(state: TrainState, about: dict[str, Any], counts: Sequence[Mapping[str, Any]] = ()) -> str:
    more = {"counts": list(counts)} if counts else {}
    return json.dumps({**asdict(state), "about": about, **more}, indent=1) + "\n"


def _size_and_hash(path: Path) -> list[Any]:
    """What the manifest has of a file."""
    return [path.stat().st_size, _sha256(path)]


def _refuse_a_full_disk(directory: Path, size: int) -> None:
    """Raise `OSError` if tensors of `size` bytes do not fit on the disk."""
    needed = int(SPARE * size)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(f"{needed:,} bytes are needed, {free:,} are free; delete files, or use another run directory")


def _save(value: object, path: Path) -> None:
    """Save `value` with torch. Raises `OSError` if the file system fails."""
    try:
        with path.open("wb") as file:
            torch.save(value, file)
    except RuntimeError as error:
        # On a full disk torch's RuntimeError lacks the reason; its context is the file's OSError.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def load_latest(directory: Path, regular: bool = False) -> tuple[Path, TrainState] | None:
    """Find the newest intact checkpoint. Returns its path and state, or None if there is none to consider.

    With `regular`, only checkpoints that were due are considered, so that interruptions do not change the result.
    Prints a line for each newer checkpoint that is damaged. Raises `CheckpointError` if damaged ones are all there is.
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


def newest(directory: Path) -> tuple[Path, TrainState]:
    """`load_latest` for a run that must have a checkpoint. Raises `CheckpointError` if there is none."""
    found = load_latest(directory)
    if found is None:
        raise CheckpointError(f"{directory}: no checkpoint has been saved yet")
    return found


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
    """Raise `CheckpointError` unless checkpoint `path` has as many parameters, before a model of that size is built."""
    if sharded.is_sharded(path):
        file, shapes = path / sharded.PARTS, sharded.shapes(path)
        found = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(sharded.MODEL))
    else:
        file = path / WEIGHTS
        try:
            with _opened(file) as weights:
                found = sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: does not fit the model ({first_line(error)})") from None
    if found != parameters:
        raise CheckpointError(
            f"{file}: does not fit the model (it has {counted(found, 'parameter')}, not {parameters:,})"
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of safetensors, which refuses a name that is not UTF-8: that file is opened by its descriptor."""
    with path.open("rb") as file:
        name = str(path) if str(path).isprintable() else f"/dev/fd/{file.fileno()}"
        with safe_open(name, "pt") as tensors:
            yield tensors


def load_weights(path: Path, model: nn.Module, averaged: bool = False) -> None:
    """Load the weights of checkpoint `path`, or their average, into `model`.

    Raises `CheckpointError` if they are missing or do not fit.
    """
    parameters = dict(model.named_parameters())
    shapes = {name: p.shape for name, p in parameters.items()}
    if averaged:
        shapes[AVERAGED_TOKENS] = torch.Size()
    with torch.no_grad():
        for name, tensor in (read_average if averaged else read_weights)(path, shapes):
            if name in parameters:
                parameters[name].copy_(tensor)


def read_weights(path: Path, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of checkpoint `path`, of whole files one at a time.

    Raises `CheckpointError` unless they have these shapes.
    """
    if sharded.is_sharded(path):
        return _read_parts(path, sharded.MODEL, shapes)
    return _fitting(path / WEIGHTS, shapes)


def read_average(path: Path, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the average of the weights in checkpoint `path`, as `read_weights`, and `AVERAGED_TOKENS`."""
    if sharded.is_sharded(path):
        return _read_parts(path, sharded.AVERAGE, shapes)
    return _fitting(path / AVERAGE, shapes)


def _read_parts(path: Path, prefix: str, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    whole = {
        name: torch.empty(shape, dtype=torch.float64 if name == AVERAGED_TOKENS else torch.float32)
        for name, shape in shapes.items()
    }
    sharded.read(path, {f"{prefix}{name}": tensor for name, tensor in whole.items()})
    yield from whole.items()


def _fitting(file: Path, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with _opened(file) as tensors:
            found = {name: torch.Size(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
            for name in sorted(found.keys() ^ shapes.keys()):
                raise CheckpointError(f"{file}: does not fit the model ({name} is in only one of them)")
            for name, shape in shapes.items():
                if found[name] != shape:
                    shapes_differ = f"{name} has the shape {tuple(found[name])}, not {tuple(shape)}"
                    raise CheckpointError(f"{file}: does not fit the model ({shapes_differ})")
            for name in shapes:
                yield name, tensors.get_tensor(name)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{file}: does not fit the model ({first_line(error)})") from None


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors in a file of safetensors. Raises `CheckpointError`."""
    try:
        return _read(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read ({first_line(error)}); copy or download it again") from None


def _read(file: Path) -> dict[str, torch.Tensor]:
    with _opened(file) as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118


def load_optimizer(
    path: Path, optimizer: torch.optim.Optimizer, shapes: Sequence[Shapes], own: Callable[[int, Any], Any] | None = None
) -> None:
    """Load the state of checkpoint `path` into `optimizer`. Raises `CheckpointError` if it does not fit.

    `shapes` are those of the state's tensors for each parameter: the kernels do not check them. `own` returns this
    rank's part of a tensor in the state of the parameter of a number; None: the rank has all. Code in the file is never
    run.
    """
    configured = [{k: v for k, v in group.items() if k not in COUNTED} for group in optimizer.param_groups]
    try:
        saved: dict[str, Any] = torch.load(
            path / "train.pt", map_location="cpu", weights_only=True, mmap=own is not None
        )
        of_all = saved["optimizer"]["state"]
        if any(of_all.values()) or not has_never_updated(path):
            _check_state(of_all, shapes)
        if own is not None:
            for number, of in of_all.items():
                of_all[number] = {key: own(number, value) for key, value in of.items()}
        optimizer.load_state_dict(saved["optimizer"])
    except (OSError, UnpicklingError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise CheckpointError(f"{path / 'train.pt'}: does not fit the optimizer ({first_line(error)})") from None
    # The hyperparameters of the config and the kernel of this device replace the saved ones.
    for group, hyperparameters in zip(optimizer.param_groups, configured, strict=True):
        group.update(hyperparameters)


def set_state(path: Path, optimizer: torch.optim.Optimizer, state: dict[int, dict[str, torch.Tensor]]) -> None:
    """Give `optimizer` a state that was read from the parts of checkpoint `path`, with the counts saved there."""
    groups = optimizer.state_dict()["param_groups"]
    counts = read_json(path / "state.json").get("counts") or [{}] * len(groups)
    try:
        saved = [{**group, **of} for group, of in zip(groups, counts, strict=True)]
        optimizer.load_state_dict({"state": state, "param_groups": saved})
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: does not fit the optimizer ({first_line(error)})") from None


def has_never_updated(path: Path) -> bool:
    """Whether all updates before checkpoint `path` were skipped, so that most optimizers had no state yet."""
    values = read_json(path / "state.json")
    return bool(values["skipped_updates"] == values["step"])


def _check_state(state: dict[int, dict[str, Any]], shapes: Sequence[Shapes]) -> None:
    """Raise `ValueError` unless the state of every parameter has tensors of these shapes."""
    expected = {number: dict(of) for number, of in enumerate(shapes) if of}
    if state.keys() != expected.keys():
        raise ValueError(f"it contains {counted(len(state), 'parameter')}, not {len(expected)}")
    for number, of in state.items():
        found = {name: _shape(value) for name, value in of.items() if isinstance(value, torch.Tensor | list)}
        if found != expected[number]:
            raise ValueError(f"parameter {number} has a state of shapes {found}, not {expected[number]}")


def _shape(value: Any) -> tuple[int, ...] | list[tuple[int, ...]]:
    """The shape of a tensor, or those of the tensors in a list; an empty list is none."""
    if isinstance(value, list) and value:
        return [_shape(item) for item in value]  # type: ignore[misc]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else (0,)


def _checked(path: Path, hashes: bool = True) -> TrainState:
    """Check a checkpoint and return its state. Raises `CheckpointError` if it is damaged.

    Without `hashes`, only names and sizes of the files are checked.
    """
    name = MANIFEST
    try:
        needed = ("state.json", sharded.PARTS) if sharded.is_sharded(path) else FILES
        if missing := [file for file in (MANIFEST, *needed) if not (path / file).is_file()]:
            raise CheckpointError(f"{missing[0]} is missing")
        files = read_json(path / MANIFEST)
        more = sharded.files(path) if sharded.is_sharded(path) else {AVERAGE} & files.keys()
        if files.keys() != {*needed, *more}:
            raise CheckpointError(f"{MANIFEST} does not list the files of a checkpoint")
        for name in files:
            size, digest = files[name]
            found = (path / name).stat().st_size
            if found != size:
                raise CheckpointError(f"{name} has {counted(found, 'byte')}, and {MANIFEST} says {shown(size)}")
            if hashes and _sha256(path / name) != digest:
                raise CheckpointError(f"{name} has changed since it was saved (sha256 differs)")
        name = "state.json"
        values = read_json(path / name)
        values.pop("about", None)
        values.pop("counts", None)
        if values.get("steps_passed_over"):  # an older version, whose steps had one size, counted only these
            values.setdefault("tokens_passed_over", values["steps_passed_over"] * values["tokens"] // values["step"])
        state: TrainState = from_dict(values, TrainState)
        if path.name != name_of(state.step):
            raise CheckpointError("state.json belongs to another step")
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
        raise CheckpointError(f"{name}: {first_line(error)}") from None
    return state


def data_hash(path: Path) -> str | None:
    """Hash of the tokens of the run of checkpoint `path`; None if the checkpoint does not contain it."""
    found = about_run(path).get("data_hash")
    return found if isinstance(found, str) else None


def about_run(path: Path) -> dict[str, Any]:
    """What checkpoint `path` says of its run; empty if it says nothing."""
    found = read_json(path / "state.json").get("about")
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
    """Those of the checkpoints `states`, newest first, that `keep` selects among the regular ones, and the newest.

    So which regular checkpoints are kept does not depend on interruptions and measurements of the sharpness.
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
