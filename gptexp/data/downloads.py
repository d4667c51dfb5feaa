"""Files that are downloaded once and are checked by their hash."""

import hashlib
import tempfile
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock

from gptexp.process.errors import DataError

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
    """The path of `file` in `folder`, where it is put if it is missing. Raises `DataError`, also for a wrong hash."""
    path = folder / file.name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{file.name}.lock"):  # one rank downloads
            if not path.exists():
                _download(file, path)
    if hashlib.sha256(path.read_bytes()).hexdigest() != file.sha256:
        raise DataError(f"{path}: not {file.what} (sha256 differs); delete it to download it again")
    return path


def _download(file: Download, path: Path) -> None:
    try:
        with urllib.request.urlopen(file.url, timeout=30) as response:
            body = response.read(LARGEST_BYTES)
    except (OSError, HTTPException) as error:
        raise DataError(
            f"{file.url}: cannot be downloaded ({error}); put the file at {path}, or {file.otherwise}"
        ) from None
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as unfinished:
        unfinished.write(body)
    Path(unfinished.name).replace(path)
