"""Damaged shards: a run refuses them before its first step, with one line that names the file."""

import json
import math
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz import Damage, flip

from gptexp.config.schema import DataConfig
from gptexp.data import stream as module
from gptexp.data.loader import open_dataset
from gptexp.data.shards import HEADER, MAGIC, MANIFEST, ShardWriter
from gptexp.data.stream import VERIFIED, verify
from gptexp.process.errors import DataError

TOKENS, PER_SHARD, LARGEST = 2500, 1000, 50256
SKIP = HEADER.size


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    ids = np.random.default_rng(0).integers(0, LARGEST, TOKENS).astype(np.uint16)
    with ShardWriter(tmp_path / "tokens", 50257, {"tokenizer": "gpt2"}, PER_SHARD) as writer:
        writer.append(ids)
    return tmp_path / "tokens"


def _manifest(change: Callable[[dict[str, Any], random.Random], object]) -> Damage:
    def damage(directory: Path, draw: random.Random) -> None:
        manifest = json.loads((directory / MANIFEST).read_text())
        change(manifest, draw)
        (directory / MANIFEST).write_text(json.dumps(manifest))

    return damage


def _bytes(change: Callable[[bytes, random.Random], bytes]) -> Damage:
    return _file(lambda path, draw: path.write_bytes(change(path.read_bytes(), draw)))


def _file(change: Callable[[Path, random.Random], object]) -> Damage:
    return lambda directory, draw: change(draw.choice(sorted(directory.glob("*.bin"))), draw)


def _put_id(directory: Path, draw: random.Random, rehash: bool) -> None:
    """Write an id outside of every vocabulary. `rehash`: also write the hash of the changed shard to the manifest."""
    import hashlib

    paths = sorted(directory.glob("*.bin"))
    number = draw.randrange(len(paths))
    body = bytearray(paths[number].read_bytes())
    count = (len(body) - HEADER.size) // 2
    struct.pack_into("<H", body, HEADER.size + 2 * draw.choice([0, count - 1, draw.randrange(count)]), 65535)
    paths[number].write_bytes(body)
    if rehash:
        manifest = json.loads((directory / MANIFEST).read_text())
        manifest["shards"][number]["sha256"] = hashlib.sha256(body).hexdigest()
        (directory / MANIFEST).write_text(json.dumps(manifest))


def _swap(directory: Path, draw: random.Random) -> None:
    a, b = sorted(directory.glob("*.bin"))[:2]  # of equal length
    body = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(body)


def _replace_by(make: Callable[[Path], object]) -> Damage:
    def change(path: Path, draw: random.Random) -> None:
        path.unlink()
        make(path)

    return _file(change)


NO_COUNTS = (2**63, 2**64 - 1, -1, -(10**15), 1.5, "12", None, [1], {})  # as numbers of tokens


def _foreign(key: str, value: Any) -> Damage:
    """Refer to the shards as to files of another directory, with another `value` of a key."""

    def change(manifest: dict[str, Any], draw: random.Random) -> None:
        del manifest["version"]
        manifest["dtype"] = "<u2"
        for shard in manifest["shards"]:
            tokens = shard["tokens"]
            shard |= {"path": f"{here}/{shard.pop('file')}", "offset": SKIP, "size": SKIP + 2 * tokens}
        (manifest if key in manifest else manifest["shards"][0])[key] = value

    def damage(directory: Path, draw: random.Random) -> None:
        nonlocal here
        here = directory
        _manifest(change)(directory, draw)

    here = Path()
    return damage


DAMAGES: dict[str, Damage] = {
    "cut short": _bytes(lambda body, draw: body[: draw.randrange(len(body))]),
    "an odd byte": _bytes(lambda body, draw: body + b"\0"),
    "longer": _bytes(lambda body, draw: body + bytes(2 * draw.randint(1, 99))),
    "empty": _file(lambda path, draw: path.write_bytes(b"")),
    "a bit": _bytes(flip),
    "a block of zeros": _bytes(lambda body, draw: body[:99] + bytes(400) + body[499:]),
    "big endian": _bytes(lambda body, draw: body[:SKIP] + np.frombuffer(body[SKIP:], "<u2").byteswap().tobytes()),
    "32 bits": _bytes(lambda body, draw: HEADER.pack(MAGIC, 1, 4, (len(body) - SKIP) // 4) + body[SKIP:]),
    "another version": _bytes(lambda body, draw: HEADER.pack(MAGIC, 2, 2, (len(body) - SKIP) // 2) + body[SKIP:]),
    "foreign": _bytes(lambda body, draw: struct.pack("<256i", 20240520, 1, 1000, *[0] * 253) + body[SKIP:]),
    "text": _bytes(lambda body, draw: bytearray(b"to be or not to be " * 200)),
    "an id too large": lambda directory, draw: _put_id(directory, draw, rehash=False),
    "an id too large, hashed": lambda directory, draw: _put_id(directory, draw, rehash=True),
    "swapped": _swap,
    "gone": _replace_by(lambda path: None),
    "a folder": _replace_by(lambda path: path.mkdir()),
    "a pipe": _replace_by(lambda path: os.mkfifo(path)),
    "a link to nowhere": _replace_by(lambda path: path.symlink_to("nowhere")),
    "a device": _replace_by(lambda path: path.symlink_to("/dev/zero")),
    "fewer tokens": _manifest(lambda m, draw: m["shards"][0].update(tokens=draw.randrange(PER_SHARD))),
    "more tokens": _manifest(lambda m, draw: m["shards"][0].update(tokens=PER_SHARD + draw.randint(1, 10**9))),
    "negative tokens": _manifest(lambda m, draw: m["shards"][0].update(tokens=-draw.randint(1, 10**30))),
    "no number": _manifest(lambda m, draw: m["shards"][0].update(tokens=draw.choice(["x", None, [], math.inf]))),
    "another hash": _manifest(lambda m, draw: m["shards"][1].update(sha256=draw.choice(["", "0" * 64, None]))),
    "a smaller largest id": _manifest(lambda m, draw: m.update(max_id=draw.randrange(-5, 40000))),
    "another folder": _manifest(lambda m, draw: m["shards"][0].update(file=draw.choice(["../x", "/etc/passwd", ".."]))),
    "twice": _manifest(lambda m, draw: m["shards"].append(m["shards"][0])),
    **{f"n_vocab {value}": _manifest(lambda m, _, value=value: m.update(n_vocab=value)) for value in NO_COUNTS},
    **{
        f"{value} tokens": _manifest(lambda m, _, value=value: m["shards"][0].update(tokens=value))
        for value in NO_COUNTS
    },
    **{
        f"elsewhere, {key} {value}": _foreign(key, value)
        for key in ("offset", "size", "n_vocab")
        for value in (*NO_COUNTS, 10**15)
    },
    **{f"dtype {value}": _foreign("dtype", value) for value in ("i1", "<f8", ">u2", "O", "S9", "(9,)u2", "V4", "x", 7)},
    "no shards": _manifest(lambda m, draw: m.pop(draw.choice(["shards", "max_id"]))),
    "no object": _manifest(lambda m, draw: m.update(shards=draw.choice([None, 7, "x", [1], [[]], [{}]]))),
    "no JSON": lambda directory, draw: (directory / MANIFEST).write_text(  # type: ignore[return-value]
        draw.choice(["", "{", "[" * 100_000, "null", "\0", '{"shards": 1e999}'])
    ),
}


def _open(directory: Path) -> None:
    """Open the data as a run does before its first step."""
    verify(directory)
    open_dataset(DataConfig(val_tokens=0), (directory, None), 16, 1337).check_ids(LARGEST + 1)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_refused_in_one_line_that_names_the_file(shards: Path, damage: str) -> None:
    """Each kind of damage that draws is applied with twenty seeds."""
    verify(shards)
    for seed in range(1 if damage[-1].isdigit() or "dtype" in damage or damage.endswith("}") else 20):
        directory = shards.with_name(f"{seed}")
        shutil.copytree(shards, directory)
        DAMAGES[damage](directory, random.Random(seed))
        with pytest.raises(DataError) as refused:
            _open(directory)
        text = str(refused.value)
        assert len(text.splitlines()) == 1
        assert f"{directory}/" in text
        if damage.startswith("an id too large, hashed"):
            assert ": byte " in text


def test_a_verified_shard_is_read_again_only_after_it_changes(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify(shards)
    read: list[Path] = []
    plain = module._check_content
    monkeypatch.setattr(module, "_check_content", lambda shard, *rest: (read.append(shard.path), plain(shard, *rest)))
    verify(shards)
    assert read == []
    os.utime(shards / "tokens-00001.bin", ns=(1, 1))
    verify(shards)
    assert len(read) == 3
    for path in (shards / "tokens-00001.bin", shards / VERIFIED):  # changed bytes, but the same size and time
        body, before = bytearray(path.read_bytes()), path.stat()
        if path.suffix == ".bin":
            body[-1] ^= 1
        path.write_bytes(body)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match="sha256 differs"):
        verify(shards)


def test_shards_in_a_read_only_cache_are_verified_once_per_process(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    plain = module._check_content

    def counted(shard: module.Shard, *rest: Any) -> None:
        read.append(shard.path)
        plain(shard, *rest)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(module, "_check_content", counted)
    monkeypatch.setattr(module, "atomic", refuse)
    verify(shards)
    verify(shards)
    assert len(read) == 3
    assert not (shards / VERIFIED).exists()
    monkeypatch.setattr(module, "_found_right", {})
    verify(shards)
    assert len(read) == 6
