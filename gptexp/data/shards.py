"""Writing of token files ("shards"): a header and ids of 16 or 32 bits. A manifest lists them with their hashes.

    <cache>/<corpus>-<key>/manifest.json
                           tokens-00000.bin ...
                           verified.json         sizes and times of the files when their hashes were last verified

Header (64 bytes, little endian): magic, version, bytes per id, count of ids, zeros. Version 1 has 2 bytes per id, and
version 2, for vocabularies of more than 65,536 ids, has 4.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from gptexp.process.errors import UnavailableError

MANIFEST = "manifest.json"
MAGIC = b"gptexp\r\n"  # a transfer in text mode would change the line end
VERSIONS = {2: 1, 4: 2}  # bytes per id -> version
HEADER = struct.Struct("<8sIIQ40x")
TOKENS_PER_SHARD = 100_000_000

Tokens = npt.NDArray[np.unsignedinteger[Any]]  # uint16 or uint32


def id_dtype(n_vocab: int) -> type[np.unsignedinteger[Any]]:
    """The type of ids below `n_vocab`."""
    return np.uint16 if n_vocab <= 2**16 else np.uint32


def header(id_bytes: int, tokens: int) -> bytes:
    """The first bytes of a file of `tokens` ids with `id_bytes` bytes each."""
    return HEADER.pack(MAGIC, VERSIONS[id_bytes], id_bytes, tokens)


@contextmanager
def data_errors(path: Path) -> Iterator[None]:
    """Convert an `OSError` of the body to an `UnavailableError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(f"{path}: {error.strerror or error}; no tokens were saved") from None


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
        self._file: BufferedRandom | None = None  # the shard that is not complete yet

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
            self._file.write(np.ascontiguousarray(ids, self._dtype).data)
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
        self._finish()
        manifest = {**self.about, "version": VERSIONS[self._dtype.itemsize], "tokens": self.tokens,
                    "max_id": self._max_id, "shards": self.shards}  # fmt: skip
        (self.directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
