"""What `gptexp gc` removes: checkpoints that no command reads, and the rests of killed saves and removals.

Commands read the newest intact checkpoint of a run. A run that is not done resumes from older ones, too, if the newest
are damaged or were not due, so all of its checkpoints stay.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gptexp.process.errors import CheckpointError, ConfigError, InUseError
from gptexp.process.terminal import warn
from gptexp.storage import run_dir
from gptexp.storage.checkpoint import load_latest
from gptexp.storage.inventory import bytes_on_disk, cells, find, is_sweep
from gptexp.storage.removal import REMOVED, is_in_use, known_paths, remove_files


@dataclass(frozen=True)
class Garbage:
    """Directories in one place that may be removed."""

    place: Path  # a run; or the folder in which a removal was killed
    why: str
    directories: list[Path]

    @property
    def size(self) -> int:
        return sum(map(bytes_on_disk, self.directories))


def find_garbage(directory: Path) -> list[Garbage]:
    """What may be removed below `directory`, a run, a sweep or a folder with them. Raises `ConfigError`."""
    runs = list(_runs(directory))
    needed = set()  # runs from whose weights other runs start
    for run in runs:
        with suppress(ConfigError):
            if start := run_dir.load_config(run).init_from:
                needed.add(Path(start).resolve())
    found = [_of_run(run, needed) for run in runs]
    found += [Garbage(path.parent, "a removal that was killed", [path]) for path in _removed(directory)]
    return [garbage for garbage in found if garbage.directories]


def remove_garbage(garbage: Garbage) -> None:
    """Remove the directories. Raises `InUseError` if the run has begun again, `OSError`, or `ConfigError`."""
    if REMOVED.fullmatch(garbage.directories[0].name):
        if is_in_use(garbage.directories[0]):
            raise InUseError(f"{garbage.directories[0]}: {run_dir.IN_USE}")
        remove_files(garbage.directories[0])
        return
    with run_dir.held(garbage.place, run_dir.LOCK), run_dir.held(garbage.place, run_dir.RANK_LOCK):
        for path in garbage.directories:
            if run_dir.STEP_NAME.fullmatch(path.name):
                # Renamed first, so that a partly removed checkpoint is not taken for a damaged one.
                path = path.rename(path.with_name(f".del-{path.name}"))
            remove_files(path, garbage.place)


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


def _of_run(run: Path, needed: set[Path]) -> Garbage:
    checkpoints = run / run_dir.CHECKPOINTS
    nothing = Garbage(run, "", [])
    try:
        status = run_dir.present_status(run, run_dir.read_summary(run))
        published = run_dir.published(checkpoints)
    except (ConfigError, CheckpointError):
        return nothing
    if checkpoints.is_symlink() or run_dir.is_locked(run, run_dir.LOCKS):
        return nothing
    unneeded = [*checkpoints.glob(".tmp-*"), *checkpoints.glob(".del-*")]
    if status in run_dir.DONE and run.resolve() not in needed:
        rejected = [*checkpoints.glob("rejected-*")]
        with suppress(CheckpointError):
            # This checks its hashes and skips damaged ones, so that the one that stays can be loaded.
            if len(published) + len(rejected) > 1 and (newest := load_latest(checkpoints)) is not None:
                unneeded += [*published[published.index(newest[0]) + 1 :], *rejected]
    return Garbage(run, status, [path for path in unneeded if _is_removable(run, path)])


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
