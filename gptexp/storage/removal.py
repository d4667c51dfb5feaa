"""Removes whole runs and sweeps. A directory that holds a file not written by gptexp is refused, and stays whole.

The locks of a directory are held while it is removed, so that no run and no sweep begins in it. It is first renamed to
`.removed-<number>` in the same folder, and then emptied file by file. The rename is atomic. So a kill leaves either the
whole run under its name, or a hidden directory, which no command takes for a run. `gptexp rm --unneeded-checkpoints`
removes that. The run's name is not part of the new one, because a sweep finds its cells by the end of their names.
"""

import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gptexp.config.schema import from_dict
from gptexp.process.errors import CheckpointError, ConfigError, InUseError
from gptexp.process.terminal import as_command
from gptexp.storage import run_dir, sweep_record
from gptexp.storage.inventory import bytes_on_disk, cells, find, is_sweep, link_of
from gptexp.storage.reader import open_text, parse_json, read_json, read_yaml

REMOVED = re.compile(r"\.removed-\d+")  # name of a directory that is being removed
GROUP = re.compile(r"\d{4}-\d\d-\d\d|wandb-.+")  # name of the folder of a day's runs, or of a wandb sweep's trials
CELL = re.compile(r"(.*-)?[0-9a-f]{8}")
_TEMPORARY = r"[a-z0-9_]{8}"  # end of a temporary file's name; a killed process leaves such files
_MARKER = r"(\.(alone|shared)-[0-9a-f]{8}-\d+-\d+-[0-9a-f]{8})?"  # of a lock, where files cannot be locked
_CHECKPOINT = r"checkpoints/(\.tmp-|\.del-|rejected-\d+-)?step-\d{8,}(-\d+)?"
_WANDB_RUN = r"wandb/(offline-)?run-\d{8}_\d{6}-"
_REPORT = r"report\.html|report\.json|cells\.csv|effective\.json|wandb\.json"
_OF_BOTH = (
    rf"{_REPORT}|\.({_REPORT})\.{_TEMPORARY}",
    rf"pictures/([a-z0-9-]+\.png|\.[a-z0-9-]+\.png\.{_TEMPORARY})",
    rf"{_WANDB_RUN}.*|wandb/(latest-run|debug.*\.log)",
)
_RUN_FILES = r"config\.yaml|metrics\.jsonl|summary\.json|job\.json|tokenizer\.json"
_OF_RUN = (
    *_OF_BOTH,
    rf"{_RUN_FILES}|\.({_RUN_FILES})\.{_TEMPORARY}|output\.log|events\.out\.tfevents\.[^/]*|\.lock(-rank0|-sweep)?{_MARKER}",
    r"\.mark-[0-9a-f]{16}",
    r"\.hydra/(config|hydra|overrides)\.yaml",
    rf"{_CHECKPOINT}/((model|optimizer|ema)(-\d+-of-\d+)?\.safetensors|state\.json|manifest\.json)",
    r"profile/steps-\d+-\d+-rank\d+\.json\.gz",
)
_OF_SWEEP = (
    *_OF_BOTH,
    rf"sweep\.json|\.sweep\.json\.{_TEMPORARY}|study\.db(-journal|-wal|-shm)?|\.lock-(study|commands|choice){_MARKER}|\.submitit/.*",
    rf"tune\.jsonl|optim/(fitted\.yaml|\.fitted\.yaml\.{_TEMPORARY})",
)
_RUN, _SWEEP = (re.compile("|".join(parts), re.DOTALL) for parts in (_OF_RUN, _OF_SWEEP))
_FOLDERS = re.compile(
    rf"\.hydra|checkpoints|{_CHECKPOINT}|profile|pictures|optim|wandb|{_WANDB_RUN}.*|\.submitit(/.*)?", re.DOTALL
)


@dataclass(frozen=True)
class Removal:
    """What `gptexp rm` removes from one place."""

    place: Path  # a run, a sweep, or the folder in which a removal was killed
    status: str  # the run's status, or what the place is, in words
    size: int  # bytes
    remove: Callable[[], int]  # returns the number of freed bytes; raises `UserError`
    checkpoints: str = ""  # if the run stays: the checkpoints that are removed, in words
    stay: str = ""  # if the run stays: the checkpoints that stay, in words


def whole_removals(directories: list[Path]) -> list[Removal]:
    """The removals of whole runs and sweeps; a cell is removed with its sweep. Raises as `check_removable` does."""
    places = list(dict.fromkeys(map(_without_links_above, directories)))
    removals = []
    for place in places:
        if not {*place.parents} & {*places}:
            check_removable(place)
            size = bytes_on_disk(place)
            removals.append(Removal(place, "sweep" if is_sweep(place) else "run", size, partial(_remove, place, size)))
    return removals


def _remove(place: Path, size: int) -> int:
    link = link_of(place)
    remove(place)
    if link is not None:
        link.unlink()
    return size


def _without_links_above(path: Path) -> Path:
    """The absolute path with all links resolved, except in its last part, unless gptexp has made the link there."""
    path = path.absolute()
    if path.is_symlink() and link_of(path) == path:
        return path.resolve()
    return path.resolve() if path.name == ".." else path.parent.resolve() / path.name


def check_removable(directory: Path) -> None:
    """Raise `ConfigError` unless `directory` is a run or a sweep, is not running, and holds nothing else."""
    if directory.is_symlink():
        raise ConfigError(f"{directory}: a link, and gptexp removes none; give the directory that it points to")
    run_dir.require_directory(directory, "a run or a sweep")
    runs = [directory, *(cells(directory) if is_sweep(directory) else [])]
    if not _shows_a_sweep(directory) and not any(map(_shows_a_run, runs)):
        raise ConfigError(f"{directory}: nothing in it shows that it is a run or a sweep of gptexp; remove it yourself")
    _check_files(directory)
    if is_in_use(directory):
        raise InUseError(f"{directory}: {run_dir.IN_USE}")


def is_in_use(directory: Path) -> bool:
    """Whether a process runs the run or the sweep in `directory`, or one of its cells."""
    return run_dir.is_locked(directory, run_dir.LOCKS) or run_dir.is_swept(directory) or _has_locked_cell(directory)


def _has_locked_cell(directory: Path) -> bool:
    """Whether a process uses a subdirectory. A cell that a sweep has just claimed has a lock and nothing else."""
    return any(run_dir.is_locked(path, run_dir.LOCKS) for path in run_dir.subdirectories(directory))


def starting_from(directory: Path) -> list[Path]:
    """The runs beside `directory` that start from its weights or branch from it, and have no checkpoint yet."""
    outputs = directory.parent
    if GROUP.fullmatch(outputs.name) or is_sweep(outputs):
        outputs = outputs.parent
    dependents = []
    for run in (run for path in find(outputs) for run in (cells(path) if is_sweep(path) else [path])):
        with suppress(ConfigError, CheckpointError):
            config = run_dir.load_config(run)
            start = run_dir.run_and_checkpoint(config.branch_from or config.init_from or "")[0]
            is_needed = start and Path(start).resolve().is_relative_to(directory.resolve())
            if is_needed and not run_dir.published(run / run_dir.CHECKPOINTS):
                dependents.append(run)
    return dependents


def remove(directory: Path) -> None:
    """Remove a run or a sweep. Raises as `check_removable` does, before anything is removed, or `StorageError`."""
    check_removable(directory)
    hidden = directory.with_name(f".removed-{time.time_ns()}")
    with _held(directory):
        with run_dir.storage_errors(f"{directory}: cannot be removed"):
            directory.rename(hidden)
        try:  # a file may have been added since the check, or a cell begun by hand
            _check_files(hidden)
            if _has_locked_cell(hidden):
                raise InUseError(f"{hidden}: {run_dir.IN_USE}")
        except ConfigError as error:
            with run_dir.storage_errors(f"{error}; nothing was removed, but {directory} is now {hidden}"):
                hidden.rename(directory)
            raise type(error)(str(error).replace(str(hidden), str(directory)), error.code) from None
        rest = as_command(["rm", "--unneeded-checkpoints", str(directory.parent)])
        with run_dir.storage_errors(f"{directory}: partly removed; `{rest}` removes the rest, {hidden}"):
            remove_files(hidden)
    if GROUP.fullmatch(directory.parent.name):
        with suppress(OSError):  # other runs are in it
            directory.parent.rmdir()


@contextmanager
def _held(directory: Path) -> Iterator[None]:
    """Hold the locks of a run, or a sweep's lock, without which no command begins a cell. Raises `InUseError`."""
    with ExitStack() as locks:
        if is_sweep(directory):
            locks.enter_context(run_dir.lock_sweep(directory, alone=True))
        else:
            for name in run_dir.LOCKS:
                locks.enter_context(run_dir.held(directory, name))
        yield


def _check_files(directory: Path) -> None:
    """Raise `ConfigError` if a file in `directory` is not gptexp's."""
    for _ in known_paths(directory):
        pass


def remove_files(directory: Path, root: Path | None = None) -> None:
    """Remove a directory with the files that gptexp has written in it; `root` is the run that it belongs to.

    Raises `OSError`, or `ConfigError` for any other file. Such a file stays: only an empty directory is removed.
    """
    for path in known_paths(directory, root):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
    directory.rmdir()


def known_paths(directory: Path, root: Path | None = None) -> Iterator[Path]:
    """Yield the files and folders in a run, in a sweep, or in a folder of the run `root`; a folder after its content.

    Raises `ConfigError` for a file or folder that gptexp does not write.
    """
    root = root or directory
    return _known_paths(root, directory, _SWEEP if is_sweep(root) else _RUN)


def _known_paths(root: Path, folder: Path, files: re.Pattern[str]) -> Iterator[Path]:
    for path in _sorted(folder):
        below, mode = path.relative_to(root).as_posix(), path.lstat().st_mode
        if stat.S_ISDIR(mode) and _FOLDERS.fullmatch(below):
            yield from _known_paths(root, path, files)
        elif stat.S_ISDIR(mode) and files is _SWEEP and folder == root and _is_cell(path):
            yield from _known_paths(path, path, _RUN)
        elif stat.S_ISLNK(mode) and not below.startswith(("wandb/", ".submitit/")):  # wandb and submitit make links
            raise ConfigError(f"{path}: a link, which gptexp does not make; remove it yourself first")
        elif stat.S_ISDIR(mode) or not files.fullmatch(below):
            raise ConfigError(f"{path}: no part of a run or a sweep; move it elsewhere first")
        yield path


def _sorted(folder: Path) -> list[Path]:
    """The content of a folder, sorted; sweep.json is last, because it says what the others are."""
    try:
        return sorted(folder.iterdir(), key=lambda path: (path.name == run_dir.SWEEP, path.name))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror})") from None


def _is_cell(path: Path) -> bool:
    return CELL.fullmatch(path.name) is not None or _shows_a_run(path)


def _shows_a_run(directory: Path) -> bool:
    """Whether a file in `directory` can only be gptexp's: others write a config.yaml or a metrics.jsonl, too."""
    with suppress(OSError, ValueError, AttributeError):
        values = read_yaml(directory / run_dir.CONFIG)
        from_dict(values)
        if {"model", "optim", "batch", "train"} <= values.keys():
            return True
    with suppress(OSError, ValueError, AttributeError):
        if read_json(directory / run_dir.SUMMARY).get("status") in run_dir.STATUSES:
            return True
    with suppress(OSError, ValueError, AttributeError), open_text(directory / run_dir.METRICS) as lines:
        if {"event", "time", "step", "tokens"} <= parse_json(lines.readline()).keys():
            return True
    checkpoints = (directory / run_dir.CHECKPOINTS).glob("step-*")
    return any((path / "manifest.json").is_file() and any(path.glob("optimizer*.safetensors")) for path in checkpoints)


def _shows_a_sweep(directory: Path) -> bool:
    with suppress(ConfigError):
        return sweep_record.load(directory) is not None
    return False
