"""Token files ("shards"): a header and ids of 16 or 32 bits. A manifest lists a directory's files with their hashes.

    <cache>/<corpus>-<key>/manifest.json
                           tokens-00000.bin ...
                           verified.json         sizes and times of the files when their hashes were last verified

Header (64 bytes, little endian): magic, version, bytes per id, count of ids, zeros. Version 1 has 2 bytes per id, and
version 2, for vocabularies of more than 65,536 ids, has 4.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from gptexp.process.errors import DataError, first_line
from gptexp.process.words import counted, shown
from gptexp.storage.reader import read_json
from gptexp.storage.run_dir import atomic

MANIFEST = "manifest.json"
MAGIC = b"gptexp\r\n"  # a transfer in text mode changes the line end
VERSIONS = {2: 1, 4: 2}  # bytes per id -> version
HEADER = struct.Struct("<8sIIQ40x")
TOKENS_PER_SHARD = 100_000_000
VERIFIED = "verified.json"
BLOCK_BYTES = 1 << 24  # bytes per read while a whole file is checked
OPEN_FILES = 256  # maximum per stream; the usual limit of a process is 1,024

Tokens = npt.NDArray[np.unsignedinteger[Any]]  # uint16 or uint32


def id_dtype(n_vocab: int) -> type[np.unsignedinteger[Any]]:
    """The type of ids below `n_vocab`."""
    return np.uint16 if n_vocab <= 2**16 else np.uint32


def header(id_bytes: int, tokens: int) -> bytes:
    """The first bytes of a file of `tokens` ids with `id_bytes` bytes each."""
    return HEADER.pack(MAGIC, VERSIONS[id_bytes], id_bytes, tokens)


@contextmanager
def data_errors(path: Path) -> Iterator[None]:
    """Convert an `OSError` of the body to a `DataError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; no tokens were saved") from None


def no_text(corpus: str) -> DataError:
    return DataError(f"{corpus}: contains no text; give files that are not empty")


class ShardWriter:
    """Context manager that appends ids below `n_vocab` to shards in `directory`, and writes the manifest at its end."""

    def __init__(
        self, directory: Path, n_vocab: int, about: dict[str, Any], tokens_per_shard: int = TOKENS_PER_SHARD
    ) -> None:
        self.directory = directory
        self.about = {**about, "n_vocab": n_vocab}
        self._dtype = np.dtype(id_dtype(n_vocab)).newbyteorder("<")
        self.tokens_per_shard = tokens_per_shard
        self.shards: list[dict[str, Any]] = []
        self.tokens = 0  # number of appended ids
        self._max_id = 0
        self._file: BufferedRandom | None = None  # of the shard that is not complete yet

    def __enter__(self) -> "ShardWriter":
        self.directory.mkdir(parents=True, exist_ok=True)
        return self

    def append(self, ids: Tokens) -> None:
        while len(ids):
            room = self.tokens_per_shard - self.tokens % self.tokens_per_shard
            self._write(ids[:room])
            if len(ids) >= room:
                self._finish()
            ids = ids[room:]

    def _write(self, ids: Tokens) -> None:
        path = self.directory / f"tokens-{len(self.shards):05d}.bin"
        with data_errors(path):
            if self._file is None:
                self._file = path.open("w+b")
                self._file.write(bytes(HEADER.size))
            self._file.write(ids.astype(self._dtype).tobytes())
        self.tokens += len(ids)
        self._max_id = max(self._max_id, int(ids.max()))

    def _finish(self) -> None:
        """Complete the file that is open, if there is one."""
        if self._file is None:
            return
        tokens = self.tokens - sum(shard["tokens"] for shard in self.shards)
        path = Path(self._file.name)
        with data_errors(path), self._file as file:
            file.seek(0)
            file.write(header(self._dtype.itemsize, tokens))
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._file = None
        self.shards.append({"file": path.name, "tokens": tokens, "sha256": digest})

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        if kind is not None:
            if self._file is not None:
                self._file.close()
            return
        if not self.tokens:
            raise no_text(str(self.about.get("corpus", "corpus")))
        self._finish()
        manifest = {**self.about, "version": VERSIONS[self._dtype.itemsize], "tokens": self.tokens,
                    "max_id": self._max_id, "shards": self.shards}  # fmt: skip
        (self.directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


class TokenStream:
    """All shards of a directory as one sequence of ids, limited to the first `max_tokens`.

    Raises `DataError` if manifest, headers and file sizes disagree. Ids are read when they are requested. A memory map
    is not used, because its pages count as memory of the process until all of the data is in it.
    """

    def __init__(self, directory: Path, max_tokens: int | None = None) -> None:
        manifest = read_manifest(directory)
        shards, self.max_id, self._dtype = manifest.shards, manifest.max_id, manifest.dtype
        self._paths = paths = [shard.path for shard in shards]
        self._starts = np.cumsum([0, *(shard.tokens for shard in shards)])
        self._file = lru_cache(OPEN_FILES)(lambda shard: paths[shard].open("rb", buffering=0))
        # Identifies the data of a run, independent of paths.
        self.hash = hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()
        self._tokens = int(self._starts[-1])
        if max_tokens is not None:
            self._tokens = min(self._tokens, max_tokens)

    def __len__(self) -> int:
        return self._tokens

    def read(self, start: int, count: int) -> Tokens:
        """Read ids [start, start + count)."""
        if not 0 <= start <= start + count <= self._tokens:
            raise IndexError(f"tokens [{start}, {start + count}) are outside the stream of {self._tokens} tokens")
        parts = []
        while count:
            shard = int(np.searchsorted(self._starts, start, side="right")) - 1
            here = min(count, int(self._starts[shard + 1]) - start)
            parts.append(self._pread(shard, start - int(self._starts[shard]), here))
            start, count = start + here, count - here
        return np.frombuffer(b"".join(parts), self._dtype)

    def _pread(self, shard: int, start: int, count: int) -> bytes:
        width = self._dtype.itemsize
        try:
            file = self._file(shard)  # keeps a reference: another thread may evict it from the cache, which closes it
            data = os.pread(file.fileno(), width * count, HEADER.size + width * start)
        except OSError as error:
            raise DataError(f"{self._paths[shard]}: cannot be read ({error.strerror})") from None
        if len(data) < width * count:
            raise DataError(f"{self._paths[shard]}: truncated during the run; delete its directory to build it again")
        return data


@dataclass(frozen=True)
class Shard:
    """The entry of one file in a manifest."""

    path: Path
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a directory of token files contains."""

    shards: list[Shard]  # in order
    max_id: int  # the largest id
    n_vocab: int | None  # number of ids of the tokenizer; None: an older version, which knew four tokenizers, wrote it
    dtype: np.dtype[Any]  # of the ids


def read_manifest(directory: Path) -> Manifest:
    """Read a directory's manifest. Raises `DataError`, also if the header or the size of a file does not match it."""
    path = directory / MANIFEST
    try:
        content = read_json(path)
        shards = [Shard(directory / s["file"], int(s["tokens"]), str(s["sha256"])) for s in content["shards"]]
        max_id, version = int(content["max_id"]), content["version"]
        n_vocab = None if content.get("n_vocab") is None else int(content["n_vocab"])
        if version not in VERSIONS.values():
            raise ValueError(f"version {shown(version)} is none of {', '.join(map(str, VERSIONS.values()))}")
        if outside := [s.path.name for s in shards if s.path.parent != directory or s.path.name.startswith(".")]:
            raise ValueError(f"{outside[0]} is not a file in its directory")
        if len({shard.path for shard in shards}) < len(shards):
            raise ValueError("it lists a file twice")
        if n_vocab is not None and n_vocab <= max_id:
            raise ValueError(f"max_id {max_id:,} is not below n_vocab {n_vocab:,}")
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(
            f"{path}: not a valid manifest ({type(error).__name__}: {first_line(error)}); delete {directory} to "
            "build it again"
        ) from None
    id_bytes = next(width for width, known in VERSIONS.items() if known == version)
    for shard in shards:
        _check_header(shard, id_bytes)
    return Manifest(shards, max_id, n_vocab, np.dtype(f"<u{id_bytes}"))


_found_right: dict[Path, object] = {}  # states that this process has verified, for directories that are read-only


def verify(directory: Path) -> None:
    """Read all shards of `directory`. Raises `DataError` unless their content matches the manifest.

    Files that were verified before are not read again. verified.json holds their sizes and times at that moment, if the
    directory is writable. The times include that of the last status change, which copies and archives do not preserve.
    """
    manifest = read_manifest(directory)
    state = {path.name: _state(path) for path in (directory / MANIFEST, *(shard.path for shard in manifest.shards))}
    if _found_right.get(directory) != state:
        with suppress(OSError, ValueError):
            _found_right[directory] = read_json(directory / VERIFIED)
    if _found_right.get(directory) == state:
        return
    for shard in manifest.shards:
        _check_content(shard, manifest.max_id, manifest.dtype)
    _found_right[directory] = state
    with suppress(OSError), atomic(directory / VERIFIED) as file:
        json.dump(state, file)


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _check_header(shard: Shard, id_bytes: int) -> None:
    """Raise `DataError` unless the header and the size of the file match its number of ids."""
    path, tokens = shard.path, shard.tokens
    again = f"delete {path.parent} to build it again"
    try:
        if not path.is_file():
            raise DataError(f"{path}: missing; {again}")
        with path.open("rb") as file:
            head = file.read(HEADER.size)
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {again}") from None
    expected = HEADER.size + id_bytes * tokens
    if head != header(id_bytes, tokens):
        raise DataError(f"{path}: byte 0: not the header of {tokens:,} {8 * id_bytes}-bit ids; {again}")
    if size != expected:
        first = min(size, expected)
        raise DataError(
            f"{path}: byte {first:,}: the file has {counted(size, 'byte')}, but {expected:,} were written; {again}"
        )


def _check_content(shard: Shard, max_id: int, dtype: np.dtype[Any]) -> None:
    """Raise `DataError` unless the hash of the file matches the manifest and no id is above `max_id`."""
    digest, width = hashlib.sha256(), dtype.itemsize
    try:
        with shard.path.open("rb") as file:
            digest.update(file.read(HEADER.size))
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                ids = np.frombuffer(block, dtype)
                if len(ids) and ids.max() > max_id:
                    first = int(np.argmax(ids > max_id))
                    raise DataError(
                        f"{shard.path}: byte {file.tell() - len(block) + width * first:,}: id {ids[first]:,} exceeds "
                        f"the max_id of {max_id:,} in {MANIFEST}; delete {shard.path.parent} to build it again"
                    )
    except OSError as error:
        raise DataError(f"{shard.path}: cannot be read ({error.strerror})") from None
    if digest.hexdigest() != shard.sha256:
        raise DataError(
            f"{shard.path}: bytes 0 to {HEADER.size + width * shard.tokens:,} have changed since they were written "
            f"(sha256 differs); delete {shard.path.parent} to build it again"
        )
