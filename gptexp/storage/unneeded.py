"""Checkpoints that no command reads, and files that were left when a save or a removal was killed.

Commands read the newest intact checkpoint of a run, and with RUN_DIR@best the one with the lowest validation loss. A
run that is not done may also resume from older ones, if the newest are damaged or were not due, so all of its
checkpoints stay. Checkpoints also stay if the user asked for them by a changed `train.keep_…` key.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from gptexp.config.schema import Config, TrainConfig
from gptexp.process.errors import CheckpointError, ConfigError, InUseError
from gptexp.process.terminal import warn
from gptexp.process.words import counted
from gptexp.storage import run_dir
from gptexp.storage.checkpoint import Keep, complete, load_latest, selected
from gptexp.storage.inventory import bytes_on_disk, cells, find, is_sweep
from gptexp.storage.removal import REMOVED, Removal, is_in_use, known_paths, remove_files


def unneeded_checkpoints(directory: Path, newest_only: bool = False) -> list[Removal]:
    """What may be removed in and below `directory`: a run, a sweep, or a folder with them. Raises `ConfigError`.

    With `newest_only`, each run that is done keeps only its newest checkpoint. Hashes are checked later, before a
    checkpoint is removed.
    """
    removals: list[Removal] = []
    for run in _runs(directory):
        with suppress(ConfigError, CheckpointError):  # a damaged run keeps all its files
            removals += _in_run(run, newest_only)
    for path in _killed_removals(directory):
        remove = partial(_remove_rest, path)
        removals.append(Removal(path.parent, "a removal that was killed", bytes_on_disk(path), remove, "1 leftover"))
    return removals


def _runs(directory: Path) -> Iterator[Path]:
    """Yield the run `directory`, or all runs and cells below it. Links are left out."""
    for path in [directory] if run_dir.is_run(directory) or is_sweep(directory) else find(directory):
        if not path.is_symlink():
            yield from (run for run in (cells(path) if is_sweep(path) else [path]) if not run.is_symlink())


def _in_run(run: Path, newest_only: bool) -> Iterator[Removal]:
    """The unneeded checkpoints of a run that no process uses, if it has any."""
    checkpoints = run / run_dir.CHECKPOINTS
    status = run_dir.present_status(run, run_dir.read_summary(run))
    published, config = run_dir.published(checkpoints), run_dir.load_config(run)
    if checkpoints.is_symlink() or run_dir.is_locked(run, run_dir.LOCKS):
        return
    unneeded = [*checkpoints.glob(".tmp-*"), *checkpoints.glob(".del-*")]
    if status in run_dir.DONE and (states := complete(checkpoints)):
        needed = selected(states, Keep(last=1, best=False) if newest_only else _asked_for(config))
        older = published[published.index(next(iter(states))) + 1 :]
        unneeded += [*(path for path in older if path not in needed), *checkpoints.glob("rejected-*")]
    unneeded = [path for path in unneeded if _is_removable(run, path)]
    if unneeded:
        stay = [path for path in published if path not in unneeded]
        size, remove = sum(map(bytes_on_disk, unneeded)), partial(_remove_checkpoints, run, unneeded)
        yield Removal(run, status, size, remove, _in_words(unneeded), _in_words(stay))


def _asked_for(config: Config) -> Keep:
    """What keys with values other than the defaults ask to keep, and the best checkpoint."""
    train, default = config.train, TrainConfig()
    every_tokens = train.keep_every_tokens
    if train.keep_every is not None:
        every_tokens = train.keep_every * config.batch.total_batch_size
    last = train.keep_last if train.keep_last != default.keep_last else 1
    return Keep(last, every_tokens)


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


def _in_words(checkpoints: list[Path]) -> str:
    """The steps of the checkpoints, such as "2, 4, … 40 (20)", and the number of other directories."""
    steps = sorted(run_dir.step_of(path) for path in checkpoints if run_dir.STEP_NAME.fullmatch(path.name))
    texts = [f"{step:,}" for step in steps]
    parts = [", ".join(texts) if len(texts) <= 4 else f"{texts[0]}, {texts[1]}, … {texts[-1]} ({len(texts)})"]
    if leftovers := len(checkpoints) - len(steps):
        parts.append(counted(leftovers, "leftover"))
    return " + ".join(filter(None, parts))


def _remove_checkpoints(run: Path, unneeded: list[Path]) -> int:
    """Remove the directories, except for the newest intact checkpoint. Returns the number of freed bytes.

    Raises `InUseError` if the run has begun again, `CheckpointError` if no checkpoint is intact, `StorageError`, or
    `ConfigError` for a file that gptexp has not written.
    """
    freed = 0
    with run_dir.held(run, run_dir.LOCK), run_dir.held(run, run_dir.RANK_LOCK), run_dir.storage_errors(f"{run}"):
        are_leftovers = all(path.name.startswith(".") for path in unneeded)
        latest = None if are_leftovers else load_latest(run / run_dir.CHECKPOINTS)
        for path in unneeded:
            if latest and path == latest[0]:
                continue
            size = bytes_on_disk(path)
            if run_dir.STEP_NAME.fullmatch(path.name):
                # Renamed first, so that a partly removed checkpoint is not taken for a damaged one.
                path = path.rename(path.with_name(f".del-{path.name}"))
            remove_files(path, run)
            freed += size
    return freed


def _killed_removals(directory: Path) -> Iterator[Path]:
    """Yield the directories whose removal was killed, except those that a process uses."""
    with suppress(OSError):
        for path in sorted(directory.iterdir()):
            if path.is_symlink() or not path.is_dir():
                continue
            if REMOVED.fullmatch(path.name):
                if not is_in_use(path):
                    yield path
            elif not path.name.startswith(".") and not run_dir.is_run(path):
                yield from _killed_removals(path)


def _remove_rest(directory: Path) -> int:
    if is_in_use(directory):
        raise InUseError(f"{directory}: {run_dir.IN_USE}")
    size = bytes_on_disk(directory)
    with run_dir.storage_errors(f"{directory}: partly removed"):
        remove_files(directory)
    return size
