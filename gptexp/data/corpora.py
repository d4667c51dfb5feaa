"""Corpora: Python's own source, tiny Shakespeare, the user's files.

A corpus is a list of files. Each file is one document, read as UTF-8 in pieces. No token crosses the end of a piece, so
a file is tokenised in bounded memory to the same ids as in one piece.
"""

import hashlib
import os
import re
import sysconfig
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from gptexp.config.paths import matching_files
from gptexp.process.errors import DataError

PIECE_CHARS = 1 << 20
SHAKESPEARE_FILE = "tinyshakespeare.txt"
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394

_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Files in a fixed order, with a key that changes when a file changes."""

    name: str
    files: list[Path]

    @property
    def key(self) -> str:
        """Hash of the files' paths, sizes and times; 16 hex digits.

        The time of the last status change is one of them, because a program can reset that of the last modification.
        """
        digest = hashlib.sha256()
        for file in self.files:
            stat = file.stat()
            digest.update(os.fsencode(file) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}\n".encode())
        return digest.hexdigest()[:16]

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def stdlib() -> Corpus:
    """The Python source of the standard library, without installed packages and tests. Raises `DataError`."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _NOT_STDLIB)
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    if not files:
        raise DataError(f"{root}: contains no Python source; use data=text data.path=FILE")
    return Corpus("stdlib", files)


def text(patterns: list[str]) -> Corpus:
    """The matching files, each once, in the order of `patterns`. Raises `DataError` if a pattern matches no file."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        matching = matching_files(pattern)
        if not matching:
            raise DataError(f"{pattern}: no such file; give a file, a glob or a list of them")
        files.update(dict.fromkeys(matching))
    return Corpus("text", list(files))


def shakespeare(downloads: Path) -> Corpus:
    """Tiny Shakespeare. Downloads it into `downloads` if it is missing there. Raises `DataError` for a wrong hash."""
    path = downloads / SHAKESPEARE_FILE
    if not path.exists():
        downloads.mkdir(parents=True, exist_ok=True)
        _download(path)
    body = path.read_bytes()
    if len(body) != SHAKESPEARE_BYTES or hashlib.sha256(body).hexdigest() != SHAKESPEARE_SHA256:
        raise DataError(f"{path}: not tiny Shakespeare (sha256 differs); delete it to download it again")
    return Corpus("shakespeare", [path])


def _download(path: Path) -> None:
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


def pieces(path: Path, cut_before: str, piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    """The text of a file in pieces of about `piece_chars` characters.

    A piece ends before one of the characters `cut_before` that follows a visible character. In GPT-2's pattern no token
    begins with a visible character and ends in white space, and only white space has a look-ahead. So the concatenated
    ids of the pieces are the ids of the whole text. Bytes that are not UTF-8 become U+FFFD.
    """
    up_to_the_last_word = re.compile(rf".*\S(?=[{cut_before}])", re.DOTALL)
    rest = ""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        while block := file.read(piece_chars):
            rest += block
            if found := up_to_the_last_word.match(rest):
                yield found[0]
                rest = rest[found.end() :]
    if rest:
        yield rest
