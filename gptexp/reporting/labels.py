"""Tags and notes that people have given to runs: `log.tags`, `log.note`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gptexp.process.errors import ConfigError
from gptexp.process.terminal import LAYOUT, printable
from gptexp.reporting.records import Run
from gptexp.storage import run_dir


@dataclass(frozen=True)
class Labels:
    """All texts are printable."""

    tags: tuple[str, ...] = ()
    note: str | None = None


def labels_of(run: Run) -> Labels:
    """The labels of a run; none if its config cannot be read."""
    path = run.directory / run_dir.CONFIG
    try:
        return _read(run.directory, path.stat().st_mtime_ns) if run.config else Labels()
    except (OSError, ConfigError):
        return Labels()


def shared_labels(runs: Sequence[Run]) -> Labels:
    """The tags that all runs have, in the order of the first run, and their note if it is the same."""
    first, *others = map(labels_of, runs)
    tags = tuple(tag for tag in first.tags if all(tag in labels.tags for labels in others))
    return Labels(tags, first.note if all(labels.note == first.note for labels in others) else None)


@cache
def _read(directory: Path, changed_ns: int) -> Labels:
    """A live page asks each time that a run has logged something. `changed_ns`: of the file; a new one is read."""
    log = run_dir.load_config(directory).log
    return Labels(tuple(map(printable, log.tags)), printable(log.note, LAYOUT) if log.note else None)
