"""Pointers of git-lfs: small text files that a clone has in place of large files."""

from pathlib import Path

FIRST_LINE = b"version https://git-lfs.github.com/spec/v1"
FIX = "a git-lfs pointer in place of the file; run: git lfs pull"


def why_unreadable(path: Path) -> str:
    """`FIX` if a file that cannot be parsed is a pointer; else, or if it cannot be opened, empty."""
    try:
        with path.open("rb") as file:
            return FIX if file.read(len(FIRST_LINE)) == FIRST_LINE else ""
    except OSError:
        return ""
