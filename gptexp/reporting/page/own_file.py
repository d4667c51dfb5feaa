"""Files that a command writes to a path that the user gives. It replaces only files that it has written itself."""

import os
from pathlib import Path

from gptexp.process.errors import ConfigError
from gptexp.storage.reader import open_text

MARKS = {  # command -> the start of the files that it writes
    "gptexp report": "# Fitted by gptexp report",
    "gptexp compare": "<!-- written by gptexp compare -->",
}
HEADER = "# @package _global_\n"  # may precede the mark, because Hydra reads it only in the first line


def check_own(option: str, path: Path, command: str) -> None:
    """Raise `ConfigError` if `path` exists and `command` has not written it."""
    if not os.path.lexists(path):
        return
    try:
        with open_text(path, "replace") as file:
            start = file.read(len(HEADER) + len(MARKS[command]))
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be replaced ({error.strerror}); give another name") from None
    if not start.removeprefix(HEADER).startswith(MARKS[command]):
        raise ConfigError(f"{option} {path}: exists, and {command} did not write it; give another name")
