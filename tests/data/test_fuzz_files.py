"""Five hundred files of text and tokens, drawn at random: the right ids, or one line that says what is wrong.

The ids are compared with those of a reader of their own, made of Python's and numpy's functions.
"""

import codecs
import gzip
import json
import random
import re
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import codes_in
from texts import ids_of, stream_of, write_megatron

from gptexp.config.schema import DataConfig
from gptexp.data import prepare as preparation
from gptexp.data.prepare import prepare
from gptexp.process.errors import UserError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

TEXTS, TOKENS = 330, 170
LINE = "<|endoftext|>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
END_OF_TEXT = 50256
MARKS = {
    codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32-le", codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be",
}  # fmt: skip
# An encoding of Python -> characters that it has; its files begin with a mark if Python's codec writes one.
ENCODINGS = {
    "utf-8": "é漢🙂ключ", "utf-8-sig": "é漢🙂ключ", "utf-16": "é漢🙂ключ", "utf-16-le": "é漢🙂ключ", "utf-16-be": "é漢",
    "utf-32": "漢🙂", "gbk": "汉字测试", "gb18030": "汉字🙂", "big5": "漢字", "shift_jis": "かな漢字", "euc-kr": "한글",
    "latin-1": "éßñ", "cp1252": "é€“", "koi8-r": "ключ", "cp437": "é░",
}  # fmt: skip
WORDS = [
    "some",
    " ",
    " ",
    "words",
    "of",
    "a",
    "text",
    "\n",
    "\n\n",
    "!",
    "{",
    "[1]",
    "\t",
    '"',
    "\\",
    LINE,
    f"\n{LINE}\n",
]


class Wrong(Exception):
    """The reference refuses the file."""


def separated(text: str, separator: str | None) -> list[str]:
    """The documents between lines that are `separator`."""
    if separator is None:
        return [text]
    documents, lines = [""], re.split(r"(?<=\n)", text)
    for line in lines:
        if line.removesuffix("\n").removesuffix("\r") == separator:
            documents[-1] = re.sub(r"\r?\n\Z", "", documents[-1])
            documents.append("")
        else:
            documents[-1] += line
    return [*documents[:-1], re.sub(r"\r\Z", "", documents[-1]) if "\n" not in text[-1:] else documents[-1]]


def is_skipped(content: bytes) -> bool:
    """Whether `content` begins with a frame of zstd that readers skip."""
    return content[1:4] == b"\x2a\x4d\x18" and content[0] >> 4 == 5


def unpacked(content: bytes) -> bytes:
    """`content` without compression."""
    if content.startswith(b"\x1f\x8b"):
        try:
            return gzip.decompress(content)
        except Exception as error:
            raise Wrong("gzip") from error
    found = list[bytes]()
    while is_skipped(content) or content.startswith(b"\x28\xb5\x2f\xfd"):
        if is_skipped(content):
            end = 8 + int.from_bytes(content[4:8], "little")
            if len(content) < end:
                raise Wrong("zstd ends early")
            content = content[end:]
            found.append(b"")
            continue
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            found.append(frame.decompress(content))
        except zstandard.ZstdError as error:
            raise Wrong("zstd") from error
        if not frame.eof:
            raise Wrong("zstd ends early")
        content = frame.unused_data
    if found and content:
        raise Wrong("after zstd")
    return b"".join(found) if found else content


def decoded(content: bytes, encoding: str) -> str:
    """The text of `content`, if at most one byte in a thousand is not text."""
    mark = next((mark for mark in MARKS if content.startswith(mark)), b"")
    encoding = MARKS.get(mark, encoding)
    try:
        if not mark and encoding != "utf-8" and len(content) - len(content.decode()) >= 100:
            raise Wrong("UTF-8")
    except UnicodeDecodeError:
        pass
    rest, bad = content, 0
    while True:
        try:
            rest.decode(encoding)
            break
        except UnicodeDecodeError as error:
            bad += error.end - error.start
            rest = rest[error.end :]
    text = content.decode(encoding, "replace").removeprefix("\ufeff")
    if bad > len(content) / 1000 or "\0" in text[:8000]:
        raise Wrong("encoding")
    return text


def documents(content: bytes, name: str, data: DataConfig) -> list[str]:
    """The documents in a file with lines of text or JSON."""
    if content.startswith(POINTER[:42]):
        raise Wrong("pointer")
    is_packed = content.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")) or is_skipped(content)
    if content and name.endswith((".gz", ".zst")) and not is_packed:
        raise Wrong("not compressed")
    text = decoded(unpacked(content), data.encoding)
    name = re.sub(r"\.(gz|zst)\Z", "", name.lower())
    first = next((line for line in text.split("\n") if line.strip()), "")
    try:
        is_json = isinstance(json.loads(first), dict)
    except ValueError:
        is_json = False
    if name.endswith(".json") and re.match(r"\s*\[\s*\{", text):
        raise Wrong("array")
    if name.endswith(".txt") or not (is_json or name.endswith((".jsonl", ".ndjson"))):
        return separated(text, data.separator)
    found = []
    for line in text.split("\n"):
        if line.strip():
            try:
                row = json.loads(line)["text"]
            except (ValueError, TypeError, KeyError) as error:
                raise Wrong("line") from error
            if not isinstance(row, str):
                raise Wrong("value")
            found.append(re.sub("[\ud800-\udfff]", "\ufffd", row))
    return found


def ids(texts: list[str], tokenizer: str) -> list[int]:
    """The ids of the documents that are not empty, in the order of the corpus."""
    texts = [text for text in texts if text]
    if not texts:
        raise Wrong("no text")
    if tokenizer == "chars":
        characters = sorted(set("".join(texts)))
        return [characters.index(character) for text in texts for character in text]
    if tokenizer == "bytes":
        return [id for text in texts for id in (256, *text.encode())][1:]
    return [id for text in texts for id in (END_OF_TEXT, *ids_of(text))][1:]


def gzipped(content: bytes, draw: random.Random) -> bytes:
    cut = draw.randint(0, len(content))  # two members, as `cat a.gz b.gz` makes
    return (
        gzip.compress(content[:cut], 1) + gzip.compress(content[cut:], 1)
        if draw.random() < 0.3
        else gzip.compress(content, 1)
    )


def zstd(content: bytes, draw: random.Random) -> bytes:
    cut = draw.randint(0, len(content)) if draw.random() < 0.3 else 0
    frames = [zstandard.compress(part) for part in (content[:cut], content[cut:]) if part or not content]
    frames = [content for frame in frames for content in (struct.pack("<3I", 0x184D2A50, 4, len(frame)), frame)][
        draw.random() < 0.5 :
    ]
    return b"".join(frames) if draw.random() < 0.5 else zstandard.compress(content)


def drawn_text(draw: random.Random, special: str) -> str:
    return "".join(draw.choices([*WORDS, *special], k=draw.choice([0, 1, 5, 60, 400])))


def lines_case(draw: random.Random, folder: Path) -> tuple[DataConfig, list[int] | None]:
    """A file of text or jsonl, and its ids; None if it must be refused."""
    encoding = draw.choice([*ENCODINGS, "utf-8", "utf-8"])
    texts = [drawn_text(draw, ENCODINGS[encoding]) for _ in range(draw.randint(1, 4))]
    if draw.random() < 0.5:
        name, content = draw.choice(["a.txt", "A.TXT", "a", "a.md", "a.html"]), "".join(texts)
    else:
        name = draw.choice(["a.jsonl", "a.ndjson", "A.JSONL", "a.json", "part-00000", "a.txt"])
        rows: list[dict[str, Any]] = [{"text": text, "id": 1} for text in texts]
        if draw.random() < 0.1:
            draw.choice(rows)["text"] = draw.choice([None, 3, ["x"], "\ud800 half"])
        content = "\n".join(json.dumps(row, ensure_ascii=draw.random() < 0.3 or "half" in str(row)) for row in rows)
        if draw.random() < 0.05:
            content = json.dumps(rows)
    content += draw.choice(["", "\n"])
    if draw.random() < 0.3:
        content = content.replace("\n", "\r\n")
    written = content.encode(encoding, "surrogatepass" if encoding.startswith("utf") else "strict")
    if draw.random() < 0.1:  # a few bytes of another encoding
        at = draw.randint(0, len(written))
        written = written[:at] + draw.choice([b"\xff", b"\xe9", b"\x80\x81", "é".encode()]) + written[at:]
        written += draw.choice([b"", b" words" * 800])
    packed, pack = draw.choice([("", None), ("", None), (".gz", gzipped), (".zst", zstd)])
    if pack is not None:
        written = pack(written, draw)
    name += packed if draw.random() < 0.85 else draw.choice(["", ".gz", ".zst"])
    written = damaged(written, draw)
    (folder / name).write_bytes(written)
    data = DataConfig(name="text", path=str(folder / name), tokenizer=draw.choice(["gpt2", "bytes", "bytes", "chars"]))
    is_marked = written.startswith(tuple(MARKS)) or encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32")
    if (not is_marked and draw.random() < 0.9) or draw.random() < 0.05:  # else a wrong one is meant
        data = replace(data, encoding=encoding.removesuffix("-sig"))
    elif draw.random() < 0.1:
        data = replace(data, encoding=draw.choice(["gbk", "latin-1", "shift_jis", "utf-16-le", "cp1252"]))
    data = replace(data, separator=LINE if draw.random() < 0.3 else None)
    try:
        return data, ids(documents(written, name, data), data.tokenizer)
    except Wrong:
        return data, None


def damaged(content: bytes, draw: random.Random) -> bytes:
    """`content`, cut, replaced by a pointer, or followed by something, in one of six cases."""
    kind = draw.choice(["cut", "pointer", "more", *[""] * 15])
    if kind == "cut":
        return content[: draw.randint(0, len(content))]
    return {"pointer": POINTER, "more": content + draw.choice([b"\0", b"x", b"\n{", b"\0" * 600])}.get(kind, content)


def columns_case(draw: random.Random, folder: Path) -> tuple[DataConfig, list[int] | None]:
    """A file of parquet or Arrow, and its ids; None if it must be refused."""
    texts = [drawn_text(draw, "é漢🙂") for _ in range(draw.randint(0, 30))]
    kind = draw.choice(["string", "large_string", "binary", "large_binary", "dictionary", "null", "int64", "not UTF-8"])
    values: list[Any] = [text.encode() for text in texts] if "binary" in kind else list(texts)
    right = kind not in ("null", "int64", "not UTF-8") or not texts
    if kind == "dictionary":
        column = pyarrow.array(values, "string").dictionary_encode()
    elif kind == "not UTF-8":
        column = pyarrow.array([*(text.encode() for text in texts), b"\xff\xfe"], "binary")
        right = False
    else:
        values = [None, *values] if kind == "null" else list(range(len(texts))) if kind == "int64" else values
        right = right and kind != "null"
        column = pyarrow.array(values, "string" if kind == "null" else kind)
    table = pyarrow.table({"id": list(range(len(column))), "text": column})
    form = draw.choice(["parquet", "stream", "file"])
    name = draw.choice([f"a.{'parquet' if form == 'parquet' else 'arrow'}", "A.PARQUET", "a.feather", "part-0"])
    name = name if form == "parquet" or name != "A.PARQUET" else "A.ARROW"
    if form == "parquet":
        compression = draw.choice(["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
        parquet.write_table(table, folder / name, row_group_size=draw.randint(1, 40), compression=compression)
    else:
        make = pyarrow.ipc.new_stream if form == "stream" else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(folder / name), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=draw.randint(1, 40))
    content = (folder / name).read_bytes()
    harm = draw.choice(["cut", "pointer", *[""] * 8])
    if harm:
        (folder / name).write_bytes(content[: draw.randrange(len(content) - 8)] if harm == "cut" else POINTER)
    data = DataConfig(name="text", path=str(folder / name), tokenizer=draw.choice(["gpt2", "bytes", "chars"]))
    try:
        return data, ids(texts, data.tokenizer) if right and not harm else None
    except Wrong:
        return data, None


@cache
def text_ids() -> list[int]:
    """Ids of a text, with ends of texts."""
    return [i for n in range(40) for i in (*ids_of(f"Document {n} says: naïve 東京 def main() " * 30), END_OF_TEXT)]


def llmc(path: Path, tokens: list[int], _draw: random.Random, magic: int = 20240520, version: int = 1) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + np.array(tokens, "<u2" if version == 1 else "<u4").tobytes())


def npy(path: Path, tokens: list[int], draw: random.Random, dtype: str = "<u2") -> None:
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.array(tokens).astype(dtype), version=draw.choice([(1, 0), (2, 0), (3, 0)]))


def megatron(path: Path, tokens: list[int], draw: random.Random, code: int = 8, ends: int = 1) -> None:
    """`ends=0`: without the ends of texts in the lengths."""
    cuts = [0, *(at + 1 for at, id in enumerate(tokens) if id == END_OF_TEXT)]
    cuts += [len(tokens)] * (cuts[-1] != len(tokens))
    lengths = [end - start - 1 + ends for start, end in pairwise(cuts)]
    write_megatron(path, tokens, lengths, code)


def raw(path: Path, tokens: list[int], _draw: random.Random, dtype: str = "<u2") -> None:
    np.array(tokens).astype(dtype).tofile(path)


Writer = Callable[..., None]
# The format, its writer with its arguments, and what data.format may be so that the ids are right.
FORMATS: list[tuple[str, Writer, dict[str, Any], tuple[str | None, ...]]] = [
    ("train.bin", raw, {}, (None, "raw16")),
    ("a.npy", raw, {}, (None, "raw16")),
    ("train.bin", raw, {"dtype": "<u4"}, ("raw32",)),
    ("train.bin", raw, {"dtype": "<i8"}, ()),
    ("train.bin", raw, {"dtype": ">u2"}, ()),
    ("train.bin", raw, {"dtype": "<f4"}, ()),
    ("train.bin", llmc, {}, (None, "llmc")),
    ("train.bin", llmc, {"magic": 20240801, "version": 7}, (None, "llmc")),
    ("train.bin", llmc, {"magic": 20240801, "version": 6}, ()),
    ("train.bin", llmc, {"magic": 20240522}, ()),
    ("train.npy", npy, {}, (None, "npy")),
    ("train.npy", npy, {"dtype": "<u4"}, (None, "npy")),
    ("train.npy", npy, {"dtype": "<i4"}, (None, "npy")),
    ("train.npy", npy, {"dtype": ">u2"}, ()),
    ("train.npy", npy, {"dtype": "<i8"}, ()),
    ("train.npy", npy, {"dtype": "<f8"}, ()),
    ("text.bin", megatron, {}, (None, "megatron", "raw16")),
    ("text.bin", megatron, {"code": 4}, (None, "megatron", "raw32")),
    ("text.bin", megatron, {"ends": 0}, (None, "megatron", "raw16")),
]  # fmt: skip


def tokens_case(draw: random.Random, folder: Path) -> tuple[DataConfig, list[int] | None]:
    """A file of tokens, and its ids; None if it must be refused."""
    name, write, how, right = draw.choice(FORMATS)
    tokens = text_ids()[: draw.choice([200, 1000, 3001, 12_001])]
    tokens = [*tokens, END_OF_TEXT] if how.get("ends") == 0 else tokens
    path = folder / name
    write(path, tokens, draw, **how)
    asked = draw.choice([None, None, None, "raw16", "raw32", "llmc", "npy", "megatron", *right, *right, *right, *right])
    data = DataConfig(name="tokens", path=str(draw.choice([folder, path])), format=asked)
    expected = tokens if asked in right else None
    harm = draw.choice(["cut", "pointer", "more", "gzip", *[""] * 12])
    if harm == "cut" and (expected or write is not raw):  # a few ids of another width cannot be recognised
        cut = draw.randrange(path.stat().st_size)
        path.write_bytes(path.read_bytes()[:cut])
        width = 4 if asked == "raw32" else 2
        has_no_count = write is raw or (asked or "").startswith("raw")
        expected = tokens[: cut // width] if expected and has_no_count and cut >= width and cut % width == 0 else None
    elif harm == "pointer":
        path.write_bytes(POINTER)
        expected = None
    elif harm == "more" and write is not raw and not (asked or "").startswith("raw"):
        path.write_bytes(path.read_bytes() + bytes(draw.randint(1, 99)))
        expected = None
    elif harm == "gzip":
        path.write_bytes(gzip.compress(path.read_bytes(), 1))
        expected = None
    return data, expected


Case = Callable[[random.Random, Path], tuple[DataConfig, list[int] | None]]


def drawn_case(number: int, folder: Path) -> tuple[DataConfig, list[int] | None]:
    draw = random.Random(number)
    case: Case = tokens_case if number >= TEXTS else columns_case if number % 4 == 0 else lines_case
    folder.mkdir(parents=True)
    data, expected = case(draw, folder)
    return replace(data, workers=1, cache_dir=str(folder.parent / "cache"), val_tokens=0), expected


def is_clean(path: Path) -> bool:
    """Whether no byte of a file is replaced, however it is divided."""
    try:
        return path.read_bytes().decode().startswith("\ufeff") is False
    except (ValueError, OSError):
        return False


def prepared(data: DataConfig, part_bytes: int) -> list[int] | UserError:
    """The ids of a corpus that is divided into parts of `part_bytes`, or its refusal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "PART_BYTES", part_bytes)
        try:
            return stream_of(prepare(data)[0])
        except UserError as error:
            return error


def check(number: int, folder: Path) -> bool:
    """Prepare a case; return whether it was refused."""
    data, expected = drawn_case(number, folder)
    found = prepared(data, 64 if number % 3 == 0 and is_clean(Path(str(data.path))) else preparation.PART_BYTES)
    what = f"case {number}: {data.path} {data.format} {data.tokenizer} {data.encoding} {data.separator}: {found}"
    if expected is not None:
        assert found == expected, what
        return False
    assert isinstance(found, UserError), what
    assert "\n" not in str(found), what
    assert str(folder) in str(found), what
    return True


@pytest.mark.e2e
@pytest.mark.parametrize("first", range(0, TEXTS + TOKENS, 50))
def test_a_random_file_has_the_right_ids_or_is_refused_in_one_line(tmp_path: Path, first: int) -> None:
    refused = sum(check(number, tmp_path / f"{number}") for number in range(first, first + 50))
    assert 5 < refused < 45


@pytest.mark.e2e
@pytest.mark.parametrize("number", range(7, TEXTS + TOKENS, 50))
def test_a_command_prepares_a_random_file_or_prints_one_line(
    gptexp: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, number: int
) -> None:
    data, expected = drawn_case(number, tmp_path / "theirs")
    keys = ("path", "format", "encoding", "separator", "cache_dir", "workers", "val_tokens")
    given = [f"data.{key}={getattr(data, key)}" for key in keys if getattr(data, key) != getattr(DataConfig(), key)]
    given.append(f"data.tokenizer={data.tokenizer}")
    done = gptexp("prepare", f"data={data.name}", *given)
    if expected is None:
        assert done.returncode in (2, 3), done.stderr
        assert len(codes_in(done.stderr)) == 1
    else:
        assert done.returncode == 0, done.stderr
        assert stream_of(Path(done.stdout.strip())) == expected
