"""What `gptexp gc` removes: checkpoints that no command reads, and the leftovers of killed saves and removals.

Commands read the newest intact checkpoint of a run. A run that is not done resumes from older ones, too, if the newest
are damaged or were not due, so all of its checkpoints stay. What a run keeps because its user changed a `train.keep_…`
key stays, and of a diverged run the checkpoint with the lowest validation loss.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gptexp.config.schema import Config, TrainConfig
from gptexp.process.errors import CheckpointError, ConfigError, InUseError
from gptexp.process.terminal import warn
from gptexp.storage import run_dir
from gptexp.storage.checkpoint import Keep, complete, load_latest, selected
from gptexp.storage.inventory import bytes_on_disk, cells, find, is_sweep
from gptexp.storage.removal import REMOVED, is_in_use, known_paths, remove_files


@dataclass(frozen=True)
class Garbage:
    """Directories in one place that may be removed."""

    place: Path  # a run; or the folder in which a removal was killed
    why: str
    directories: list[Path]
    stay: list[Path] = field(default_factory=list)  # checkpoints of the run, newest first

    @property
    def size(self) -> int:
        return sum(map(bytes_on_disk, self.directories))


def find_garbage(directory: Path, also_kept: bool = False) -> list[Garbage]:
    """What may be removed below `directory`, a run, a sweep or a folder with them. Raises `ConfigError`.

    With `also_kept`, of each run that is done only the newest checkpoint stays. Hashes are not checked.
    """
    found = [_of_run(run, also_kept) for run in _runs(directory)]
    found += [Garbage(path.parent, "a removal that was killed", [path]) for path in _removed(directory)]
    return [garbage for garbage in found if garbage.directories]


def remove_garbage(garbage: Garbage) -> int:
    """Remove the directories, except for the newest intact checkpoint. Returns the bytes that are free now.

    Raises `InUseError` if the run has begun again, `CheckpointError` if no checkpoint is intact, `OSError`, or
    `ConfigError`.
    """
    size = garbage.size
    if REMOVED.fullmatch(garbage.directories[0].name):
        if is_in_use(garbage.directories[0]):
            raise InUseError(f"{garbage.directories[0]}: {run_dir.IN_USE}")
        remove_files(garbage.directories[0])
        return size
    with run_dir.held(garbage.place, run_dir.LOCK), run_dir.held(garbage.place, run_dir.RANK_LOCK):
        whole = any(not path.name.startswith(".") for path in garbage.directories)  # not only leftovers
        newest = load_latest(garbage.place / run_dir.CHECKPOINTS) if whole else None
        for path in garbage.directories:
            if newest is not None and path == newest[0]:
                size -= bytes_on_disk(path)
                continue
            if run_dir.STEP_NAME.fullmatch(path.name):
                # Renamed first, so that a partly removed checkpoint is not taken for a damaged one.
                path = path.rename(path.with_name(f".del-{path.name}"))
            remove_files(path, garbage.place)
    return size


def _runs(directory: Path) -> Iterator[Path]:
    """The run `directory`, or all below it, also cells, without links."""
    if run_dir.is_run(directory):
        found = [directory]
    elif is_sweep(directory):
        found = cells(directory)
    else:
        found = []
        for path in find(directory):
            if not path.is_symlink():
                found += cells(path) if is_sweep(path) else [path]
    return (path for path in found if not path.is_symlink())


def _of_run(run: Path, also_kept: bool) -> Garbage:
    checkpoints = run / run_dir.CHECKPOINTS
    nothing = Garbage(run, "", [])
    try:
        status = run_dir.present_status(run, run_dir.read_summary(run))
        published = run_dir.published(checkpoints)
        config = run_dir.load_config(run)
    except (ConfigError, CheckpointError):
        return nothing
    if checkpoints.is_symlink() or run_dir.is_locked(run, run_dir.LOCKS):
        return nothing
    unneeded = [*checkpoints.glob(".tmp-*"), *checkpoints.glob(".del-*")]
    if status in run_dir.DONE and (states := complete(checkpoints)):
        needed = selected(states, Keep(last=1, best=False) if also_kept else _asked_for(config, status))
        older = published[published.index(next(iter(states))) + 1 :]
        unneeded += [*(path for path in older if path not in needed), *checkpoints.glob("rejected-*")]
    removable = [path for path in unneeded if _is_removable(run, path)]
    return Garbage(run, status, removable, [path for path in published if path not in removable])


def _asked_for(config: Config, status: str) -> Keep:
    """What the keys with other values than the defaults keep, and the best checkpoint of a diverged run."""
    train, default = config.train, TrainConfig()
    every_tokens = train.keep_every_tokens
    if train.keep_every is not None:
        every_tokens = train.keep_every * config.batch.total_batch_size
    last = train.keep_last if train.keep_last != default.keep_last else 1
    return Keep(last, every_tokens, best=status == "diverged")


def _is_removable(run: Path, path: Path) -> bool:
    """Whether a directory holds files of a checkpoint only; prints a line if not."""
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        list(known_paths(path, run))
    except ConfigError as error:
        warn(f"{path} stays: {error}")
        return False
    return True


def _removed(directory: Path) -> Iterator[Path]:
    """The directories whose removal was killed. A directory that a process uses is none of them."""
    with suppress(OSError):
        for path in sorted(directory.iterdir()):
            if path.is_symlink() or not path.is_dir():
                continue
            if REMOVED.fullmatch(path.name):
                if not is_in_use(path):
                    yield path
            elif not path.name.startswith(".") and not run_dir.is_run(path):
                yield from _removed(path)
