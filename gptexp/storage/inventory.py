"""Finds runs and sweeps below a directory, their size on disk, and where a new one may lie. Only reads."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gptexp.config.paths import OUTPUTS, is_file
from gptexp.process.errors import ConfigError
from gptexp.process.terminal import as_command, warn
from gptexp.process.words import shown
from gptexp.storage import run_dir

LATEST = "latest"  # stands for the run or sweep that was started or continued last


def find(directory: Path) -> list[Path]:
    """The runs and sweeps below `directory`, without the cells of the sweeps.

    Links to runs and sweeps are found; other links are not followed. Raises `ConfigError` if it cannot be read.
    """
    found = []
    for path in run_dir.subdirectories(directory):
        if is_sweep(path) or (run_dir.is_run(path) and not _is_config_folder(path)):
            found.append(path)
        elif not path.is_symlink():
            with suppress(ConfigError):
                found += find(path)
    return found


def located(given: str) -> str:
    """The path of a run or a sweep that `given` names: a path; `latest`; or its name in outputs/, or how it begins.

    A cell of a sweep is SWEEP/CELL. What follows an @ stays: `latest@best`, or `@best` for short. Raises `ConfigError`
    if several have such a name. What names nothing stays as it is: it may be a path that does not exist yet.
    """
    name, at, checkpoint = given.rpartition("@") if "@" in given else (given, "", "")
    if os.path.lexists(given) or (name and os.path.lexists(name)):
        return given
    known = find(OUTPUTS) if OUTPUTS.is_dir() else []
    if name in ("", LATEST):
        if not known:
            raise ConfigError(f"{given or LATEST}: there is no run in {OUTPUTS} yet; give a directory", "no-run-yet")
        return f"{max(known, key=_changed)}{at}{checkpoint}"
    if "/" in name:
        known += [cell for path in known if is_sweep(path) for cell in cells(path)]
    names = {path: (path.name, path.relative_to(OUTPUTS).as_posix()) for path in known}
    found = [path for path, own in names.items() if name in own]
    found = found or [path for path, own in names.items() if any(text.startswith(name) for text in own)]
    if len(found) > 1:
        some = ", ".join(str(path) for path in found[:3])
        raise ConfigError(f"{given}: names {len(found)} directories: {some}{', …' * (len(found) > 3)}", "ambiguous")
    return f"{found[0]}{at}{checkpoint}" if found else given


def _changed(directory: Path) -> float:
    """When a run or a sweep was begun or continued."""
    files = (directory / run_dir.SWEEP, directory / run_dir.CONFIG)
    return max((file.stat().st_mtime for file in files if is_file(file)), default=0.0)


def is_not_there_yet(directory: Path) -> bool:
    """Whether `directory` is the default (`OUTPUTS` itself, not a given path), and no run has created it yet."""
    return directory is OUTPUTS and not os.path.lexists(directory)


def is_sweep(directory: Path) -> bool:
    return os.path.lexists(directory / run_dir.SWEEP)


def cells(sweep: Path) -> list[Path]:
    """The cells of a sweep that have a directory, sorted by name. Raises `ConfigError` if it cannot be read."""
    return [path for path in run_dir.subdirectories(sweep) if run_dir.is_run(path)]


def runs_together(directory: Path) -> list[Path]:
    """The cells of a sweep, or the runs in a folder that holds nothing else, such as a sweep without its sweep.json.

    Raises `ConfigError` if there is none, or if `directory` is a folder with sweeps, or with runs in deeper folders.
    """
    if not is_sweep(directory) and any(is_sweep(path) or path.parent != directory for path in find(directory)):
        ls = as_command(["ls", str(directory)])
        raise ConfigError(
            f"{directory}: holds runs and sweeps, and is none itself; give one of them; `{ls}` lists them"
        )
    if runs := cells(directory):
        return runs
    raise ConfigError(f"{directory}: contains no run; give the directory of a run or a sweep")


def _is_config_folder(directory: Path) -> bool:
    """Whether a directory is `conf/` or a copy of it, which has a config.yaml too."""
    return (directory / "base").is_dir() and not (directory / run_dir.LOCK).exists()


def refuse_run_in(directory: Path) -> None:
    """Raise `ConfigError` if a new run in `directory` would lie among the files of a sweep or of other runs.

    A run that lies there already, such as a cell of a sweep, may be continued.
    """
    given = f"hydra.run.dir={shown(str(directory))}"
    if not run_dir.is_run(directory):
        if OUTPUTS.resolve().is_relative_to(directory.resolve()):
            raise ConfigError(f"{given}: {OUTPUTS}/ of other runs is in it; leave it out, or give {OUTPUTS}/my-run")
        if is_sweep(directory) or _holds_runs(directory):
            raise ConfigError(
                f"{given}: holds a sweep or other runs; leave it out, or give a folder such as {directory}-run"
            )
        _refuse_inside("sweep", is_sweep, directory, given)
    _refuse_inside("run", _is_begun, directory, given)


def refuse_sweep_in(directory: Path) -> None:
    """Raise `ConfigError` if a sweep in `directory` would lie among the files of a run or of another sweep."""
    given = f"hydra.sweep.dir={shown(str(directory))}"
    if _is_begun(directory):
        raise ConfigError(f"{given}: holds a single run; give the sweep another sweep.name")
    if not is_sweep(directory):
        _refuse_inside("sweep", is_sweep, directory, given)
    _refuse_inside("run", _is_begun, directory, given)


def _refuse_inside(kind: str, is_kind: Callable[[Path], bool], directory: Path, given: str) -> None:
    if outer := next((parent for parent in directory.absolute().parents if is_kind(parent)), None):
        key = given.partition("=")[0]
        raise ConfigError(
            f"{given}: lies in the directory of a {kind}, {outer}; move that {kind} elsewhere, or set {key} to a "
            "folder outside of it"
        )


def _holds_runs(directory: Path) -> bool:
    with suppress(ConfigError):  # there is no such directory yet
        return bool(find(directory))
    return False


def _is_begun(directory: Path) -> bool:
    """Whether a run has begun in `directory`. Stricter than `is_run`: any project may have a config.yaml."""
    began = (run_dir.LOCK, run_dir.EFFECTIVE, run_dir.METRICS)
    return is_file(directory / run_dir.CONFIG) and any(is_file(directory / name) for name in began)


def link_in_outputs(directory: Path, outputs: str | None) -> None:
    """Make a link in `OUTPUTS` to a run or a sweep in the folder `outputs`, so that every command finds it.

    Does nothing for None, and for a directory elsewhere.
    """
    if outputs is None:
        return
    place, directory = (Path(os.path.abspath(path)) for path in (outputs, directory))  # noqa: PTH100  removes ..
    if not directory.is_relative_to(place):
        return
    link = OUTPUTS / directory.relative_to(place)
    try:
        if not (os.path.lexists(link) and link.resolve() == directory.resolve()):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(directory)
    except OSError as error:
        warn(f"{link}: no link to {directory} ({error.strerror}); give commands the directory itself")


def link_of(directory: Path) -> Path | None:
    """The link that `link_in_outputs` has made to a run or a sweep; None if there is none."""
    with suppress(ConfigError, ValueError, OSError, IndexError):
        run = directory if run_dir.is_run(directory) else cells(directory)[0]
        outputs = run_dir.load_config(run).paths.outputs
        link = OUTPUTS.absolute() / directory.resolve().relative_to(Path(outputs or "").resolve())
        if outputs is not None and link.is_symlink() and link.resolve() == directory.resolve():
            return link
    return None


def bytes_on_disk(directory: Path) -> int:
    """Bytes that a directory takes on the disk. Links are not followed; what cannot be read is not counted."""
    total = 0
    with suppress(OSError):
        for entry in os.scandir(directory):
            with suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    total += bytes_on_disk(Path(entry.path))
    return total
