"""Shards: writing them with a manifest, reading across files, and errors that name a damaged file."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gptexp.data import shards
from gptexp.data import stream as reading
from gptexp.data.shards import ShardWriter
from gptexp.data.stream import TokenStream
from gptexp.process.errors import DataError


@pytest.fixture
def three_shards(tmp_path: Path) -> tuple[Path, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, 50257, 2500).astype(np.uint16)
    with ShardWriter(tmp_path / "s", 50257, {"tokenizer": "gpt2"}, tokens_per_shard=1000) as writer:
        for part in np.array_split(ids, 7):
            writer.append(part)
    return tmp_path / "s", ids


def test_stream_reads_across_shards(three_shards: tuple[Path, np.ndarray]) -> None:
    directory, ids = three_shards
    assert len(list(directory.glob("*.bin"))) == 3
    stream = TokenStream(directory)
    assert len(stream) == 2500
    for start, count in ((0, 2500), (990, 20), (1000, 1000), (999, 1), (1000, 1), (2499, 1), (5, 2010), (7, 0)):
        assert np.array_equal(stream.read(start, count), ids[start : start + count])
    with pytest.raises(IndexError):
        stream.read(2490, 11)
    assert len(TokenStream(directory, max_tokens=1200)) == 1200


def test_threads_that_share_a_limited_number_of_open_files_read_the_right_tokens(
    three_shards: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader reads ahead while an evaluation reads the same stream. Only one of three files may be open."""
    monkeypatch.setattr(reading, "OPEN_FILES", 1)
    directory, ids = three_shards
    stream = TokenStream(directory)

    def read(first: int) -> bool:
        starts = range(first, len(ids) - 7, 97)
        return all(np.array_equal(stream.read(start, 7), ids[start : start + 7]) for _ in range(20) for start in starts)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(8)))


def test_a_damaged_manifest_is_named(three_shards: tuple[Path, np.ndarray]) -> None:
    for text in ("", "{", "[]", '{"shards": []}'):
        (three_shards[0] / "manifest.json").write_text(text)
        with pytest.raises(DataError, match=r"manifest.json: not a valid manifest .*delete"):
            TokenStream(three_shards[0])


def test_the_manifest_has_the_size_and_the_hash_of_each_file(three_shards: tuple[Path, np.ndarray]) -> None:
    directory, ids = three_shards
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["tokens"] == len(ids)
    assert manifest["max_id"] == ids.max()
    for shard in manifest["shards"]:
        body = (directory / shard["file"]).read_bytes()
        assert hashlib.sha256(body).hexdigest() == shard["sha256"]
        magic, version, width, count = shards.HEADER.unpack(body[: shards.HEADER.size])
        assert (magic, version, width, count) == (shards.MAGIC, 1, 2, shard["tokens"])


@pytest.mark.parametrize("damage", ["truncate", "append", "magic", "count", "remove"])
def test_a_damaged_shard_is_named(three_shards: tuple[Path, np.ndarray], damage: str) -> None:
    path = three_shards[0] / "tokens-00001.bin"
    body = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        head = {"magic": b"X" + body[1:], "count": body[:16] + b"\1" + body[17:]}
        path.write_bytes({"truncate": body[:-2], "append": body + b"\0\0", **head}[damage])
    with pytest.raises(DataError, match=r"tokens-00001.bin: .*delete .* to build it again"):
        TokenStream(three_shards[0])
