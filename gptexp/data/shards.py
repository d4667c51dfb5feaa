"""Token files: a header that says what follows, then 16-bit ids; a manifest that says what the files hold.

    <cache>/<corpus>-<key>/manifest.json
                           tokens-00000.bin ...
                           verified.json         in which state the files were last read whole, and found right

Header (64 bytes, little endian): magic, version, bytes per id, count of ids, zeros.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from gptexp.errors import DataError, first_line

MANIFEST = "manifest.json"
MAGIC = b"gptexp\r\n"  # the line end is mangled by a transfer in text mode
VERSION = 1
HEADER = struct.Struct("<8sIIQ40x")
TOKENS_PER_SHARD = 100_000_000
VERIFIED = "verified.json"
BLOCK_BYTES = 1 << 24  # read at once where all of a file is checked
OPEN_FILES = 256  # of one stream at a time; 1,024 are what a process usually may have

Tokens = npt.NDArray[np.uint16]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What the file system refuses on the way to new token files, as a `DataError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; nothing was kept") from None


class ShardWriter:
    """Appends ids to the shards of `directory`; leaving the `with` block writes the manifest, last."""

    def __init__(self, directory: Path, about: dict[str, Any], tokens_per_shard: int = TOKENS_PER_SHARD) -> None:
        self.directory = directory
        self.about = about
        self.tokens_per_shard = tokens_per_shard
        self.shards: list[dict[str, Any]] = []
        self.tokens = 0  # appended so far
        self._max_id = 0
        self._pending: list[Tokens] = []
        self._n_pending = 0

    def __enter__(self) -> "ShardWriter":
        self.directory.mkdir(parents=True)
        return self

    def append(self, ids: Tokens) -> None:
        """Add ids to the stream."""
        self.tokens += len(ids)
        while self._n_pending + len(ids) >= self.tokens_per_shard:
            room = self.tokens_per_shard - self._n_pending
            self._pending.append(ids[:room])
            self._flush()
            ids = ids[room:]
        self._pending.append(ids)
        self._n_pending += len(ids)

    def _flush(self) -> None:
        ids = np.concatenate(self._pending) if self._pending else np.empty(0, np.uint16)
        self._pending, self._n_pending = [], 0
        if not len(ids):
            return
        path = self.directory / f"tokens-{len(self.shards):05d}.bin"
        body = ids.astype("<u2").tobytes()
        header = HEADER.pack(MAGIC, VERSION, 2, len(ids))
        with naming(path):
            path.write_bytes(header + body)
        digest = hashlib.sha256(header)
        digest.update(body)
        self.shards.append({"file": path.name, "tokens": len(ids), "sha256": digest.hexdigest()})
        self._max_id = max(self._max_id, int(ids.max()))

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        if kind is not None:
            return
        self._flush()
        if not self.tokens:
            raise DataError(f"{self.about.get('corpus', 'corpus')}: holds no text; give files that are not empty")
        manifest = {**self.about, "version": VERSION, "tokens": self.tokens, "max_id": self._max_id,
                    "shards": self.shards}  # fmt: skip
        (self.directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


class TokenStream:
    """All shards of a directory as one sequence of ids, read where they are asked for.

    Opening costs nothing, whatever the size; neither does reading: a memory map's pages would count as this process's
    memory until all of the data is in it. `max_tokens` cuts the stream short. Raises `DataError` where manifest, header
    and file size disagree.
    """

    def __init__(self, directory: Path, max_tokens: int | None = None) -> None:
        shards, self.max_id = read_manifest(directory)
        for shard in shards:
            _check_header(shard)
        self._paths = paths = [shard.path for shard in shards]
        self._starts = np.cumsum([0, *(shard.tokens for shard in shards)])
        self._file = lru_cache(OPEN_FILES)(lambda shard: paths[shard].open("rb", buffering=0))
        # What the ids are, wherever they lie: the identity of the data in a run.
        self.hash = hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()
        self._tokens = int(self._starts[-1])
        if max_tokens is not None:
            self._tokens = min(self._tokens, max_tokens)

    def __len__(self) -> int:
        return self._tokens

    def read(self, start: int, count: int) -> Tokens:
        """Ids [start, start + count)."""
        if not 0 <= start <= start + count <= self._tokens:
            raise IndexError(f"tokens [{start}, {start + count}) of a stream of {self._tokens}")
        parts = []
        while count:
            shard = int(np.searchsorted(self._starts, start, side="right")) - 1
            here = min(count, int(self._starts[shard + 1]) - start)
            parts.append(self._pread(shard, start - int(self._starts[shard]), here))
            start, count = start + here, count - here
        return np.frombuffer(b"".join(parts), "<u2")

    def _pread(self, shard: int, start: int, count: int) -> bytes:
        try:
            file = self._file(shard)  # held: another thread that reads may push it out of the cache, which closes it
            data = os.pread(file.fileno(), 2 * count, HEADER.size + 2 * start)
        except OSError as error:
            raise DataError(f"{self._paths[shard]}: cannot be read ({error.strerror})") from None
        if len(data) < 2 * count:
            raise DataError(f"{self._paths[shard]}: was cut short while in use; delete its directory to build it again")
        return data


@dataclass(frozen=True)
class Shard:
    """What a manifest says of one file."""

    path: Path
    tokens: int
    sha256: str


def read_manifest(directory: Path) -> tuple[list[Shard], int]:
    """The shards of a directory in order, and the largest id in them; raises `DataError`."""
    path = directory / MANIFEST
    try:
        if not path.is_file():
            raise ValueError("missing, or no regular file")
        manifest = json.loads(path.read_text())
        shards = [Shard(directory / s["file"], int(s["tokens"]), str(s["sha256"])) for s in manifest["shards"]]
        max_id = int(manifest["max_id"])
        if outside := [s.path.name for s in shards if s.path.parent != directory or s.path.name.startswith(".")]:
            raise ValueError(f"{outside[0]} is no file beside it")
        if len({shard.path for shard in shards}) < len(shards):
            raise ValueError("it names a file twice")
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path}: no manifest ({type(error).__name__}: {first_line(error)}); delete {directory} to build it again"
        ) from None
    return shards, max_id


_found_right: dict[Path, object] = {}  # by this process, where the directory itself cannot be written


def verify(directory: Path) -> None:
    """Read every byte of the shards of `directory` and raise `DataError` unless they are what the manifest says.

    Remembers by the files' sizes and times what it has read, beside them if it may write there, so that each state of
    the files is read once. The time of the last change of status, too, is none that a copy or an archive brings.
    """
    shards, max_id = read_manifest(directory)
    for shard in shards:
        _check_header(shard)
    seen = {path.name: _state(path) for path in (directory / MANIFEST, *(shard.path for shard in shards))}
    if _found_right.get(directory) == seen:
        return
    with suppress(OSError, ValueError, RecursionError):
        _found_right[directory] = json.loads((directory / VERIFIED).read_text())
    if _found_right.get(directory) == seen:
        return
    for shard in shards:
        _check_content(shard, max_id)
    _found_right[directory] = seen
    with suppress(OSError):
        temporary = directory / f".{VERIFIED}.{os.getpid()}"
        try:
            temporary.write_text(json.dumps(seen))
            temporary.replace(directory / VERIFIED)
        finally:
            temporary.unlink(missing_ok=True)


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _check_header(shard: Shard) -> None:
    """Raise `DataError` unless the file is a shard of as many ids, by its header and its size."""
    path, tokens = shard.path, shard.tokens
    again = f"delete {path.parent} to build it again"
    try:
        if not path.is_file():  # a pipe would wait for a writer for ever
            raise DataError(f"{path}: {'no regular file' if path.exists() else 'is missing'}; {again}")
        with path.open("rb") as file:
            head = file.read(HEADER.size)
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {again}") from None
    expected = HEADER.size + 2 * tokens
    if len(head) < HEADER.size or HEADER.unpack(head) != (MAGIC, VERSION, 2, tokens):
        raise DataError(f"{path}: byte 0: no header of {tokens:,} 16-bit ids; {again}")
    if size != expected:
        first = min(size, expected)
        raise DataError(f"{path}: byte {first:,}: the file ends at {size:,}, {expected:,} were written; {again}")


def _check_content(shard: Shard, max_id: int) -> None:
    """Raise `DataError` unless the ids are those that the manifest has the hash of, and none is above `max_id`."""
    digest = hashlib.sha256()
    try:
        with shard.path.open("rb") as file:
            digest.update(file.read(HEADER.size))
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                ids = np.frombuffer(block, "<u2")
                if len(ids) and ids.max() > max_id:
                    first = int(np.argmax(ids > max_id))
                    raise DataError(
                        f"{shard.path}: byte {file.tell() - len(block) + 2 * first:,}: id {ids[first]:,}, above the "
                        f"{max_id:,} of {MANIFEST}; delete {shard.path.parent} to build it again"
                    )
    except OSError as error:
        raise DataError(f"{shard.path}: cannot be read ({error.strerror})") from None
    if digest.hexdigest() != shard.sha256:
        raise DataError(
            f"{shard.path}: bytes 0 to {HEADER.size + 2 * shard.tokens:,} are not those that were written (sha256 "
            f"differs); delete {shard.path.parent} to build it again"
        )
