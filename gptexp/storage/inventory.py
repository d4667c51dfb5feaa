"""Which runs and sweeps lie below a directory, and how much disk they take. It only reads."""

import os
from contextlib import suppress
from pathlib import Path

from gptexp.process.errors import ConfigError
from gptexp.storage import run_dir

OUTPUTS = Path("outputs")  # where runs and sweeps are unless another directory is given


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


def is_sweep(directory: Path) -> bool:
    return os.path.lexists(directory / run_dir.SWEEP)


def cells(sweep: Path) -> list[Path]:
    """The cells of a sweep that have a directory. Raises `ConfigError` if it cannot be read."""
    return [path for path in run_dir.subdirectories(sweep) if run_dir.is_run(path)]


def _is_config_folder(directory: Path) -> bool:
    """Whether a directory is `conf/` or a copy of it, which has a config.yaml too."""
    return (directory / "base").is_dir() and not (directory / run_dir.LOCK).exists()


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


def size_shown(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size} B"
