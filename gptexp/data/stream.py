"""Reading of token files: the ids of a manifest's files as one stream, and the checks of their content.

The files are those that `ShardWriter` has written into the manifest's directory, or parts of files elsewhere.
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from gptexp.data.shards import HEADER, MANIFEST, VERSIONS, Tokens, header
from gptexp.process.errors import DataError, first_line
from gptexp.process.fields import LIMIT
from gptexp.process.words import counted, shown
from gptexp.storage.reader import read_json
from gptexp.storage.run_dir import atomic

VERIFIED = "verified.json"
BLOCK_BYTES = 1 << 24  # bytes per read while a whole file is checked
OPEN_FILES = 256  # maximum per stream; the usual limit of a process is 1,024


class TokenStream:
    """All shards of a directory as one sequence of ids, limited to the first `max_tokens`.

    Raises `DataError` if manifest, headers and file sizes disagree; without `check_files`, headers and sizes are not
    looked at. Ids are read when they are requested. A memory map is not used: its pages count as memory of the process,
    which in the end would hold all of the data.
    """

    def __init__(self, directory: Path, max_tokens: int | None = None, check_files: bool = True) -> None:
        manifest = read_manifest(directory, check_files)
        self.directory = directory
        self._shards, self.max_id, self._dtype = manifest.shards, manifest.max_id, manifest.dtype
        self.shares, self.n_vocab = manifest.shares, manifest.n_vocab
        shards, paths = self._shards, [shard.path for shard in self._shards]
        self._starts = [*accumulate((shard.tokens for shard in shards), initial=0)]
        self._file = lru_cache(OPEN_FILES)(lambda shard: paths[shard].open("rb", buffering=0))
        # Identifies the data of a run, independent of paths.
        self.hash = hashlib.sha256("".join(shard.identity for shard in shards).encode()).hexdigest()
        self._tokens = self._starts[-1]
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
            shard = bisect_right(self._starts, start) - 1
            here = min(count, self._starts[shard + 1] - start)
            parts.append(self._pread(shard, start - self._starts[shard], here))
            start, count = start + here, count - here
        return np.frombuffer(b"".join(parts), self._dtype)

    def _pread(self, number: int, start: int, count: int) -> bytes:
        shard, width = self._shards[number], self._dtype.itemsize
        try:
            file = self._file(number)  # keeps a reference: another thread may evict it from the cache, which closes it
            data = os.pread(file.fileno(), width * count, shard.offset + width * start)
        except OSError as error:
            raise DataError(f"{shard.path}: cannot be read ({error.strerror})") from None
        if len(data) < width * count:
            raise DataError(f"{shard.path}: truncated during the run; {_mend(shard)}")
        return data


@dataclass(frozen=True)
class Shard:
    """The entry of one file in a manifest."""

    path: Path
    tokens: int
    sha256: str  # of the whole file
    offset: int  # bytes before the first id
    size: int  # bytes of the file
    is_own: bool  # written by `ShardWriter` into the manifest's directory; else a file of another directory

    @property
    def identity(self) -> str:
        """A text that is equal for equal ids."""
        return self.sha256 if self.is_own else f"{self.sha256}:{self.offset}:{self.tokens}"


@dataclass(frozen=True)
class Manifest:
    """What a directory of token files contains."""

    shards: list[Shard]  # in order
    max_id: int  # the largest id
    n_vocab: int  # number of ids of the tokenizer
    dtype: np.dtype[Any]  # of the ids
    shares: dict[str, int]  # for a mix: source -> its tokens


def read_manifest(directory: Path, check_files: bool = True) -> Manifest:
    """Read a directory's manifest. Raises `DataError`, also if the header or the size of a file does not match it.

    Checking opens every file.
    """
    path = directory / MANIFEST
    try:
        content = read_json(path)
        max_id, n_vocab = _count(content["max_id"]), _count(content["n_vocab"])
        shares = {str(source): _count(tokens) for source, tokens in content.get("shares", {}).items()}
        if "dtype" in content:
            if content["dtype"] not in ("<u2", "<u4"):
                raise ValueError(f"dtype {shown(content['dtype'])} is neither <u2 nor <u4")
            dtype = np.dtype(content["dtype"])
            shards = [_foreign(entry, dtype.itemsize) for entry in content["shards"]]
        else:
            dtype = np.dtype(f"<u{_id_bytes(content['version'])}")
            shards = [_own(entry, directory, dtype.itemsize) for entry in content["shards"]]
            if len({shard.path for shard in shards}) < len(shards):
                raise ValueError("it lists a file twice")
        if n_vocab <= max_id:
            raise ValueError(f"max_id {max_id:,} is not below n_vocab {n_vocab:,}")
        if n_vocab > 256**dtype.itemsize:
            raise ValueError(f"n_vocab {n_vocab:,} is too large for ids of {8 * dtype.itemsize} bits")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f"{path}: not a valid manifest ({type(error).__name__}: {first_line(error)}); delete {directory} to "
            "build it again"
        ) from None
    for shard in shards if check_files else []:
        _check_size(shard, dtype.itemsize)
    return Manifest(shards, max_id, n_vocab, dtype, shares)


def _id_bytes(version: Any) -> int:
    found = [id_bytes for id_bytes, known in VERSIONS.items() if known == version]
    if not found:
        raise ValueError(f"version {shown(version)} is none of {', '.join(map(str, VERSIONS.values()))}")
    return found[0]


def _count(value: Any) -> int:
    """`value`, if it is a number of things. Raises `ValueError`."""
    if not isinstance(value, int) or not 0 <= value < LIMIT:
        raise ValueError(f"{shown(value)} is not a whole number from 0 to 2^63 - 1")
    return value


def _own(entry: dict[str, Any], directory: Path, id_bytes: int) -> Shard:
    path, tokens = directory / entry["file"], _count(entry["tokens"])
    if path.parent != directory or path.name.startswith("."):
        raise ValueError(f"{path.name} is not a file in its directory")
    return Shard(path, tokens, str(entry["sha256"]), HEADER.size, HEADER.size + id_bytes * tokens, is_own=True)


def _foreign(entry: dict[str, Any], id_bytes: int) -> Shard:
    offset, size, tokens = (_count(entry[key]) for key in ("offset", "size", "tokens"))
    if offset + id_bytes * tokens > size:
        raise ValueError(f"{entry['path']}: {tokens:,} ids from byte {offset:,} exceed its {counted(size, 'byte')}")
    return Shard(Path(entry["path"]), tokens, str(entry["sha256"]), offset, size, is_own=False)


def write_references(
    directory: Path,
    shards: Sequence[Shard],
    dtype: np.dtype[Any],
    max_id: int,
    n_vocab: int,
    about: dict[str, Any],
) -> None:
    """Write the manifest of a directory whose `shards` are in other directories, where nothing is written."""
    entries = [
        {"path": str(s.path), "offset": s.offset, "tokens": s.tokens, "size": s.size, "sha256": s.sha256}
        for s in shards
    ]  # fmt: skip
    tokens = sum(shard.tokens for shard in shards)
    content = {**about, "dtype": dtype.str, "tokens": tokens, "max_id": max_id, "n_vocab": n_vocab, "shards": entries}
    with atomic(directory / MANIFEST) as file:
        json.dump(content, file, indent=1)


_found_right: dict[Path, object] = {}  # directory -> verified state, kept here too because a directory may be read-only


def verify(directory: Path, again: bool = False) -> None:
    """Read all shards of `directory`. Raises `DataError` unless their content matches the manifest.

    Files that were verified before are not read again, except with `again`. If the directory is writable, verified.json
    holds their sizes and times at the last verification. The times include that of the last status change, which copies
    and archives do not preserve.
    """
    manifest = read_manifest(directory)
    state = _state_of(directory, manifest)
    if _found_right.get(directory) != state:
        with suppress(OSError, ValueError):
            _found_right[directory] = read_json(directory / VERIFIED)
    if _found_right.get(directory) == state and not again:
        return
    for shard in manifest.shards:
        _check_content(shard, manifest.max_id, manifest.dtype)
    mark_verified(directory)


def mark_verified(directory: Path) -> None:
    """Record that the content of the files has been read and is that of the manifest."""
    _found_right[directory] = state = _state_of(directory, read_manifest(directory))
    with suppress(OSError), atomic(directory / VERIFIED) as file:
        json.dump(state, file)


def _state_of(directory: Path, manifest: Manifest) -> dict[str, list[int]]:
    files = [directory / MANIFEST, *(shard.path for shard in manifest.shards)]
    return {path.name if path.parent == directory else str(path): _state(path) for path in files}


def manifest_state(directory: Path) -> list[int] | None:
    """Size and times of a directory's manifest, which differ for a copy on another disk; None: there is none."""
    with suppress(OSError):
        return _state(directory / MANIFEST)
    return None


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _mend(shard: Shard) -> str:
    """What to do about a damaged file."""
    return f"delete {shard.path.parent} to build it again" if shard.is_own else "restore the file"


def _check_size(shard: Shard, id_bytes: int) -> None:
    """Raise `DataError` unless the size of the file, and the header of an own file, match its number of ids."""
    path, tokens, again = shard.path, shard.tokens, _mend(shard)
    try:
        if not path.is_file():
            raise DataError(f"{path}: missing; {again}")
        with path.open("rb") as file:
            head = file.read(HEADER.size)
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {again}") from None
    if shard.is_own and head != header(id_bytes, tokens):
        raise DataError(f"{path}: byte 0: not the header of {tokens:,} {8 * id_bytes}-bit ids; {again}")
    if size != shard.size:
        first = min(size, shard.size)
        raise DataError(
            f"{path}: byte {first:,}: the file has {counted(size, 'byte')}, but {shard.size:,} were written; {again}"
        )


def _check_content(shard: Shard, max_id: int, dtype: np.dtype[Any]) -> None:
    """Raise `DataError` unless the hash of the file matches the manifest and no id is above `max_id`."""
    digest, width, at = hashlib.sha256(), dtype.itemsize, 0
    end = shard.offset + width * shard.tokens
    try:
        with shard.path.open("rb") as file:
            while block := file.read(BLOCK_BYTES if at else shard.offset or BLOCK_BYTES):
                digest.update(block)
                ids = np.frombuffer(block[: max(0, end - at)], dtype) if at >= shard.offset else np.array([], dtype)
                if len(ids) and ids.max() > max_id:
                    first = int(np.argmax(ids > max_id))
                    raise DataError(
                        f"{shard.path}: byte {at + width * first:,}: id {ids[first]:,} exceeds the max_id of "
                        f"{max_id:,} in {MANIFEST}; {_mend(shard)}"
                    )
                at += len(block)
    except OSError as error:
        raise DataError(f"{shard.path}: cannot be read ({error.strerror})") from None
    if digest.hexdigest() != shard.sha256:
        raise DataError(
            f"{shard.path}: bytes 0 to {shard.size:,} have changed since they were written (sha256 differs); "
            f"{_mend(shard)}"
        )
