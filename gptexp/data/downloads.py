"""Files that are downloaded once and are checked by their hash."""

import hashlib
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from gptexp.process.errors import DataError
from gptexp.process.words import counted
from gptexp.storage import locks
from gptexp.storage.run_dir import atomic

LARGEST_BYTES = 100_000_000  # a longer answer is not read to its end


@dataclass(frozen=True)
class Download:
    """A published file."""

    what: str
    name: str  # of the local file
    url: str
    sha256: str
    otherwise: str  # what to do without a network, for the error


def downloaded(file: Download, folder: Path) -> Path:
    """The path of `file` in `folder`; downloads it if it is missing. Raises `DataError`, also for a wrong hash."""
    path = folder / file.name
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with locks.take(folder / f".{file.name}.lock"):  # one rank downloads
                if not path.exists():
                    _download(file, path)
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; put {file.what} there, or {file.otherwise}") from None
    if not _is(file, content):
        raise DataError(f"{path}: not {file.what} (sha256 differs); delete it to download it again")
    return path


def _is(file: Download, content: bytes) -> bool:
    return hashlib.sha256(content).hexdigest() == file.sha256


def _download(file: Download, path: Path) -> None:
    try:
        with urllib.request.urlopen(file.url, timeout=30) as response:
            body = response.read(LARGEST_BYTES)
    except (OSError, HTTPException) as error:
        raise DataError(
            f"{file.url}: cannot be downloaded ({error}); put the file at {path}, or {file.otherwise}"
        ) from None
    if not _is(file, body):
        raise DataError(
            f"{file.url}: {counted(len(body), 'byte')} came, which are not {file.what} (sha256 differs); try again, or "
            f"put the file at {path}"
        )
    with atomic(path, "wb") as whole:
        whole.write(body)
