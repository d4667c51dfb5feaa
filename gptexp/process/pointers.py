"""Pointers of git-lfs: small text files that a clone has in place of large files."""

from pathlib import Path

_FIRST_LINE = b"version https://git-lfs.github.com/spec/v1"


def why_unreadable(path: Path) -> str:
    """That `path` is a pointer of git-lfs, and how to get the file; empty if it is not one, or cannot be read."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_FIRST_LINE)) == _FIRST_LINE
    except OSError:
        return ""
    return "a git-lfs pointer in place of the file; run: git lfs pull" if is_pointer else ""
