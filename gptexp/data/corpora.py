"""Where text comes from: Python's own source, tiny Shakespeare, your files.

A corpus is a list of files, read as UTF-8 in pieces. Documents are the files; pieces are cut where no token of a
GPT-2 style encoding can cross, so that a file tokenises in bounded memory to the very ids it has as a whole.
"""

import glob
import hashlib
import os
import re
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptexp.errors import DataError

PIECE_CHARS = 1 << 20
# Ends in something visible that white space follows, both by Python's notion and by that of tiktoken's patterns.
_UP_TO_THE_LAST_WORD = re.compile(r".*\S(?=[ \t\r\n])", re.DOTALL)

SHAKESPEARE_FILE = "tinyshakespeare.txt"
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394

_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Files in a fixed order, and a key that changes when one of them does."""

    name: str
    files: list[Path]

    @property
    def key(self) -> str:
        """Sixteen hex digits over the files' paths, sizes and times of change."""
        digest = hashlib.sha256()
        for file in self.files:
            stat = file.stat()
            digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def stdlib() -> Corpus:
    """The Python source of the standard library, without installed packages and tests."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _NOT_STDLIB)
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    if not files:
        raise DataError(f"{root}: holds no Python source; use data=text data.path=FILE")
    return Corpus("stdlib", files)


def text(patterns: list[str]) -> Corpus:
    """The files that match, each once, in the order of `patterns` and sorted within one."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        found = matching_files(pattern)
        if not found:
            raise DataError(f"{pattern}: no such file; give a file, a glob or a list of them")
        files.update(dict.fromkeys(found))
    return Corpus("text", list(files))


def is_path_list(value: Any) -> bool:
    """Whether `value` can be data.path: a path or glob, or a list of them."""
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)
    )


def path_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def matching_files(pattern: str) -> list[Path]:
    """The file of that very name, else those that the glob matches, sorted."""
    if is_file(Path(pattern)):
        return [Path(pattern)]
    return [Path(p) for p in sorted(glob.glob(pattern, recursive=True)) if is_file(Path(p))]


def absolute(pattern: str, cwd: str | None = None) -> str:
    """The path or glob from the root; the folders that are put before a relative one are no part of the glob."""
    if Path(pattern).expanduser().is_absolute():
        return str(Path(pattern).expanduser())
    base = Path(cwd or Path.cwd())
    return str(base / pattern) if is_file(base / pattern) else str(Path(glob.escape(str(base))) / pattern)


def is_file(path: Path) -> bool:
    """Whether there is such a file; a name that cannot be one is none."""
    try:
        return path.is_file()
    except OSError:
        return False


def shakespeare(downloads: Path) -> Corpus:
    """Tiny Shakespeare, downloaded into `downloads` unless it is there; its hash is checked either way."""
    path = downloads / SHAKESPEARE_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(path)
    body = path.read_bytes()
    if len(body) != SHAKESPEARE_BYTES or hashlib.sha256(body).hexdigest() != SHAKESPEARE_SHA256:
        raise DataError(f"{path}: {len(body):,} bytes, not tiny Shakespeare's {SHAKESPEARE_BYTES:,}; delete it")
    return Corpus("shakespeare", [path])


def _download(path: Path) -> None:
    import urllib.request
    from http.client import HTTPException

    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response:
            body = response.read(SHAKESPEARE_BYTES + 1)
    except (OSError, HTTPException) as error:
        raise DataError(
            f"{SHAKESPEARE_URL}: cannot be downloaded ({error}); put the file at {path}, "
            "or use data=stdlib, which needs no network"
        ) from None
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(body)
    Path(file.name).replace(path)


def pieces(path: Path, piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    """The text of a file in pieces of about `piece_chars` characters.

    A piece ends before white space that follows a visible character. GPT-2's pattern has no token that begins with
    something visible and ends in white space, and looks ahead from white space only, so the pieces' ids
    concatenated are the ids of the whole. Bytes that are no UTF-8 become U+FFFD.
    """
    rest = ""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        while block := file.read(piece_chars):
            rest += block
            if found := _UP_TO_THE_LAST_WORD.match(rest):
                yield found[0]
                rest = rest[found.end() :]
    if rest:
        yield rest
