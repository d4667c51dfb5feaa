"""The documents in files of each format, and the parts into which a corpus is divided."""

import bz2
import codecs
import gzip
import json
import lzma
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from texts import blocks, decoded, ids_of, stream_of, text_config

from gptexp.config.schema import DataConfig
from gptexp.data import prepare as preparation
from gptexp.data.comparison import compare
from gptexp.data.corpora import Files, parts, text
from gptexp.data.decoding import Seen
from gptexp.data.documents import BLOCK_BYTES, Span, documents, pieces, span_of
from gptexp.data.prepare import prepare
from gptexp.process.errors import UserError

END_OF_TEXT = 50256
WHITE = " \t\r\n"
ALPHABET = [
    "a",
    "Bc",
    "1",
    "23",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "'s",
    "'ll",
    "!",
    "…",
    "é",
    "漢",
    "\u00a0",
    "\u2003",
]


def drawn(draw: random.Random, length: int) -> str:
    """Random text with each class of characters that GPT-2's pattern distinguishes."""
    return "".join(draw.choices(ALPHABET, k=length))


def test_a_text_read_in_pieces_has_the_same_token_ids() -> None:
    draw, cuts = random.Random(0), 0
    for _ in range(300):
        given = drawn(draw, draw.randint(0, 60))
        found = list(pieces(decoded(blocks(given, draw)), WHITE))
        assert "".join(found) == given
        assert [i for piece in found for i in ids_of(piece)] == ids_of(given)
        cuts += max(0, len(found) - 1)
    assert cuts > 300


@pytest.mark.parametrize("name", ["a.jsonl", pytest.param("a.txt", marks=pytest.mark.e2e)])
def test_a_long_document_is_read_in_pieces_in_linear_time(tmp_path: Path, name: str) -> None:
    """With and without white space. Joining each block to all before it would copy 3 GB for a text of 80 MB."""
    words, letters = "some words " * 600_000, "x" * 80_000_000
    for given, pieces_at_most in ((words, 1.1 * BLOCK_BYTES), (letters, len(letters))):
        content = given if name == "a.txt" else json.dumps({"text": given})
        (tmp_path / name).write_text(content)
        span, started = span_of(tmp_path / name), time.process_time()
        found = list(documents(span, WHITE, "text", Seen()))
        assert time.process_time() - started < 5
        assert [first for _, first in found] == [True] + [False] * (len(found) - 1)
        assert "".join(piece for piece, _ in found) == given
        assert max(len(piece) for piece, _ in found) <= pieces_at_most


@pytest.mark.parametrize("between", WHITE)
def test_a_file_is_read_in_pieces_with_every_kind_of_separator(between: str) -> None:
    given = between.join(["some words"] * 5000)
    assert max(map(len, pieces((given[i : i + 1000] for i in range(0, len(given), 1000)), WHITE))) < 1100


def test_parts_of_any_size_have_the_ids_of_the_whole_text(tmp_path: Path) -> None:
    draw, cuts = random.Random(0), 0
    for _ in range(60):
        given = drawn(draw, 400).encode() + b"\xff\xe6\xbc " + drawn(draw, 20).encode()
        (tmp_path / "text").write_bytes(given)
        found = parts(text([str(tmp_path / "text")]), WHITE, draw.randint(1, 200))
        texts = ["".join(piece for piece, _ in documents(span, WHITE, "", Seen())) for part in found for span in part]
        assert "".join(texts) == given.decode(errors="replace")
        assert [i for one in texts for i in ids_of(one)] == ids_of(given.decode(errors="replace"))
        firsts = [first for part in found for span in part for _, first in documents(span, WHITE, "", Seen())]
        assert firsts == [True] + [False] * (len(firsts) - 1)
        cuts += len(texts) - 1
    assert cuts > 200


def as_jsonl(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"id": i, "text": one}) + "\n" for i, one in enumerate(texts)))


def as_gzip(path: Path, texts: list[str]) -> None:
    as_jsonl(path, texts)
    path.write_bytes(gzip.compress(path.read_bytes()))


def as_zstd(path: Path, texts: list[str]) -> None:
    zstandard = pytest.importorskip("zstandard")
    as_jsonl(path, texts)
    path.write_bytes(zstandard.compress(path.read_bytes()))


def as_parquet(path: Path, texts: list[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    parquet.write_table(table, path, row_group_size=7, compression="zstd")


def as_pzstd(path: Path, texts: list[str]) -> None:
    """With a frame to skip, in which pzstd writes the size of the next one."""
    as_zstd(path, texts)
    path.write_bytes(b"\x50\x2a\x4d\x18\x04\0\0\0" + b"\x01\0\0\0" + path.read_bytes())


def as_json_with_a_mark(path: Path, texts: list[str]) -> None:
    as_jsonl(path, texts)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())


def as_parquet_of_bytes(path: Path, texts: list[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    column = pyarrow.array([text.encode() for text in texts], pyarrow.binary())
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": column}), path)


def as_arrow_file(path: Path, texts: list[str]) -> None:
    """Arrow's file format, which pandas and polars call feather."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": texts})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table, max_chunksize=7)


WRITERS: dict[str, Callable[[Path, list[str]], None]] = {
    ".jsonl": as_jsonl, ".jsonl.gz": as_gzip, ".jsonl.zst": as_zstd, ".parquet": as_parquet,
    ".ndjson.zst": as_pzstd, ".json": as_json_with_a_mark, ".bytes.parquet": as_parquet_of_bytes,
    ".arrow": as_arrow_file,
}  # fmt: skip


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("part_bytes", [100, 1 << 20])
def test_each_row_is_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, part_bytes: int) -> None:
    """In all formats, in two files, with parts of any size. An empty row is no document."""
    draw = random.Random(1)
    texts = ["", *(drawn(draw, draw.randint(1, 30)) for _ in range(40)), "", "the last one"]
    for name, some in (("a", texts[:20]), ("b", texts[20:])):
        WRITERS[suffix](tmp_path / f"{name}{suffix}", some)
    monkeypatch.setattr(preparation, "PART_BYTES", part_bytes)
    data = DataConfig(name="text", path=f"{tmp_path}/*{suffix}", workers=1, cache_dir=str(tmp_path / "cache"))
    expected = [i for one in texts if one for i in (END_OF_TEXT, *ids_of(one))][1:]
    directory, _ = prepare(data)
    assert stream_of(directory) == expected
    assert json.loads((directory / "manifest.json").read_text())["documents"] == sum(map(bool, texts))


def test_the_rows_of_a_saved_data_set_are_documents(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="no datasets; pip install 'gptexp[hf]'")
    texts = [f"document {number}" for number in range(30)]
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": texts})})
    saved.save_to_disk(tmp_path / "saved", num_shards={"train": 2})
    assert len(list((tmp_path / "saved/train").glob("*.arrow"))) == 2
    expected = [i for one in texts for i in (END_OF_TEXT, *ids_of(one))][1:]
    for path in (tmp_path / "saved/train", tmp_path / "saved"):
        assert stream_of(prepare(text_config(path, cache_dir=str(tmp_path / "cache")))[0]) == expected


def test_another_column_is_another_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "title": "another"}\n' * 3)
    found = [prepare(text_config(tmp_path / "a.jsonl", text_column=column))[0] for column in ("text", "title", "text")]
    assert found[0] == found[2] != found[1]
    assert stream_of(found[1])[: len(ids_of("another"))] == ids_of("another")


def cut_parquet(path: Path) -> None:
    as_parquet(path, ["some text"] * 50)
    path.write_bytes(path.read_bytes()[:-100])


def bad_utf8(path: Path) -> None:
    as_parquet(path, ["good", "bad!", "good"])
    pyarrow = pytest.importorskip("pyarrow")
    offsets = pyarrow.array([0, 4, 8, 12], pyarrow.int32()).buffers()[1]
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, [None, offsets, pyarrow.py_buffer(b"goodb\xffd!good")])
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path)


def with_a_long_window(path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    settings = zstandard.ZstdCompressionParameters(window_log=31)
    compressor = zstandard.ZstdCompressor(compression_params=settings).compressobj()  # of unknown length
    path.write_bytes(compressor.compress(b"some text\n" * 99) + compressor.flush())


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
BAD: dict[str, tuple[str, Any, str]] = {
    "no JSON": ("a.jsonl", '{"text": "x"}\n\n{"text": \n', "a.jsonl: line 3: not JSON"),
    "no object": ("a.jsonl", '{"text": "x"}\n[1]\n', "a.jsonl: line 2: [1] is not a JSON object"),
    "no column": ("a.jsonl", '{"body": "x"}\n', "a.jsonl: line 1: no column text, only body; set data.text_column"),
    "no text": ("a.jsonl", '{"text": null}\n', "a.jsonl: line 1: text=null is not text"),
    "no UTF-8": ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl: byte 10 is not utf-8"),
    "no UTF-8 in a key": ("a.jsonl", b'{"text": "a"}\n{\xff"text": "b"}\n', "a.jsonl: line 2: not JSON"),
    "not compressed": ("a.jsonl.gz", '{"text": "x"}\n', "not compressed, although its name ends in .gz"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99)[:-9], "a.jsonl.gz: Compressed file ended before"),
    "damaged gzip": (
        "a.jsonl.gz",
        b"\x1f\x8b\x08" + b"\0" * 7 + b"\xff" * 99,
        "a.jsonl.gz: Error -3 while decompressing",
    ),
    "bad parquet": (
        "a.parquet",
        bad_utf8,
        "row 2: text is damaged or not UTF-8; correct the row, or copy the file again",
    ),
    "null in parquet": (
        "a.parquet",
        lambda path: as_parquet(path, ["a", None]),
        "text=null is not text; set data.text_column, or remove the row",
    ),
    "xz": ("a.jsonl.xz", lzma.compress(b'{"text": "x"}\n'), "a.jsonl.xz: xz is not read; give text"),
    "bzip2": ("a.txt.bz2", bz2.compress(b"text"), "a.txt.bz2: bzip2 is not read; give text"),
    "zip": ("a.zip", b"PK\3\4\x14\0", "a.zip: zip is not read; give text"),
    "UTF-16 in gzip": ("a.jsonl.gz", gzip.compress('{"text": "x"}'.encode("utf-16-le")), "not text in utf-8"),
    "an array": (
        "a.json",
        '[\n {"text": "x"},\n {"text": "y"}]',
        "a.json: an array of JSON objects; write one object a line",
    ),
    "cut parquet": ("a.parquet", cut_parquet, "a.parquet: not a complete parquet file; copy it again"),
    "text as parquet": ("a.parquet", "text", "a.parquet: not a complete parquet file; copy it again"),
    "a pointer": ("a.txt", POINTER, "a.txt: a git-lfs pointer in place of the file; run: git lfs pull"),
    "a pointer as parquet": ("a.parquet", POINTER, "a.parquet: a git-lfs pointer in place of the file"),
    "a long window": ("a.txt.zst", with_a_long_window, "a larger window than Zstandard's default allows (zstd --long)"),
    "tokens": ("train.bin", b"\0\1\2\3", "train.bin: tokens, not text; use data=tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    name, content, error = BAD[case]
    if callable(content):
        content(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as refused:
        prepare(text_config(tmp_path / name, cache_dir=str(tmp_path / "cache")))
    assert error in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_bad_line_is_counted_from_the_start_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 1000 + "oops\n" + '{"text": "x"}\n' * 1000)
    monkeypatch.setattr(preparation, "PART_BYTES", 777)
    with pytest.raises(UserError, match=r"a.jsonl: line 1,001: not JSON"):
        prepare(text_config(tmp_path / "a.jsonl", workers=1, cache_dir=str(tmp_path / "cache")))


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.json", '{"text": "x"}\n', "jsonl"),
        ("a.json", '\n\r\n {"text": "x"}\r\n{', "jsonl"),
        ("part-00000", '{"text": "x"}\n', "jsonl"),
        ("a.jsonl", "no JSON\n", "jsonl"),
        ("a.ndjson", "", "jsonl"),
        ("a.txt", '{"text": "x"}\n', "text"),
        ("package.json", '{\n "text": "x"}\n', "text"),
        ("numbers.json", "[[1, 2]]", "text"),
        ("a.c", "{ return; }\n", "text"),
        ("empty", "", "text"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_is_jsonl_if_its_name_or_its_first_line_says_so(
    tmp_path: Path, name: str, content: str, kind: str, packed: bool
) -> None:
    """The first line may be longer than a block."""
    for given in (content, content.replace("x", "x" * 3 * BLOCK_BYTES)):
        path = tmp_path / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(given.encode(), 1) if packed else given.encode())
        span = span_of(path)
        assert (span.kind, span.compression) == (kind, "gzip" if packed else None)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + "été".encode())
    assert list(documents(Span(tmp_path / "a.txt", "text"), WHITE, "text", Seen())) == [("été", True)]
    data = text_config(tmp_path / "a.txt", tokenizer="chars", cache_dir=str(tmp_path / "cache"), val_tokens=0)
    assert json.loads((prepare(data)[0] / "tokenizer.json").read_text())["characters"] == "té"


def test_halves_of_a_character_in_jsonl_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(r'{"text": "a \ud83d\ude42 b \ud800 c \udfff\ud800"}')
    span = Span(tmp_path / "a.jsonl", "jsonl")
    assert list(documents(span, WHITE, "text", Seen())) == [("a 🙂 b \ufffd c \ufffd\ufffd", True)]


def as_plain_parquet(path: Path, texts: list[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": texts}), path, 50, compression="none")


def as_arrow(path: Path, texts: list[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": texts})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table, max_chunksize=50)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "write"),
    [(f"a{suffix}", write) for suffix, write in WRITERS.items()]
    + [("plain.parquet", as_plain_parquet), ("a.arrow", as_arrow)],
)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, name: str, write: Callable[[Path, list[str]], None]) -> None:
    """Flipped bits, other bytes and cut ends. pyarrow reads outside of its memory where it does not check offsets."""
    path, draw, refused = tmp_path / name, random.Random(name), list[str]()
    write(path, [f"document {i} says {i * i} words " * 20 for i in range(300)])
    good = path.read_bytes()
    for number in range(400):
        content = bytearray(good)
        if number % 4 == 0:
            del content[draw.randrange(len(good)) :]
        elif number % 4 == 1:
            at = draw.randrange(len(good))
            content[at : at + 8] = draw.randbytes(8)
        else:  # the second half at the end, where parquet keeps its table of contents
            for _ in range(3):
                at = draw.randrange(len(good)) if number % 4 == 2 else -draw.randint(1, min(900, len(good)))
                content[at] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        try:
            for part in parts(Files("text", [path]), WHITE, 10_000):
                for span in part:
                    assert all(isinstance(piece, str) for piece, _ in documents(span, WHITE, "text", Seen()))
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all(error.startswith(f"{path}: ") and "\n" not in error for error in refused)


def test_two_formats_in_one_path_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(UserError, match=r"b.txt: text, but .*a.jsonl is jsonl; give files of one format"):
        prepare(text_config(tmp_path / "a.jsonl", tmp_path / "b.txt"))


# --- encodings and lines between documents ---------------------------------------------------------------------------

FEW_WORDS = "漢字 and ключ, naïve words.\n"
ENCODINGS = {
    "gbk": "汉字 words\n",
    "latin-1": "été naïf\n",
    "utf-16-le": FEW_WORDS,
    "utf-16-be": FEW_WORDS,
    "koi8-r": "ключ\n",
}
PACKED: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_file_is_read_in_the_encoding_of_the_config(tmp_path: Path, encoding: str, name: str, packed: str) -> None:
    text = ENCODINGS[encoding] * 300
    content = text if name == "a.txt" else "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for _ in "ab")
    (tmp_path / f"{name}{packed}").write_bytes(PACKED[packed](content.encode(encoding)))
    data = text_config(tmp_path / f"{name}{packed}", cache_dir=str(tmp_path / "cache"))
    ids = ids_of(text) if name == "a.txt" else [*ids_of(text), END_OF_TEXT, *ids_of(text)]
    with pytest.raises(UserError, match=r"is not utf-8|not text in utf-8") as refused:
        prepare(data)
    assert "set data.encoding" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert stream_of(prepare(replace(data, encoding=encoding))[0]) == ids


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "part-0"])
@pytest.mark.parametrize("given", ["utf-8", "gbk"])
def test_a_byte_order_mark_says_the_encoding(tmp_path: Path, encoding: str, name: str, given: str) -> None:
    content = FEW_WORDS if name == "a.txt" else json.dumps({"text": FEW_WORDS}, ensure_ascii=False)
    (tmp_path / name).write_bytes(content.encode(encoding))
    data = text_config(tmp_path / name, cache_dir=str(tmp_path / "cache"), encoding=given)
    assert stream_of(prepare(data)[0]) == ids_of(FEW_WORDS)


def test_the_encoding_is_part_of_the_key_only_if_it_is_another_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    others: list[dict[str, Any]] = [
        {},
        {"encoding": "utf8"},
        {"encoding": "UTF_8"},
        {"encoding": "gbk"},
        {"separator": "-"},
    ]
    keys = [text([str(tmp_path / "a.txt")], *DataConfig(**other).reading).key for other in others]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys)) == 3


def test_a_few_bytes_that_are_not_text_are_counted_with_the_place_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the second of two files, in several parts, and again when they are read to be compared."""
    good = b"some words of a text\n" * 100
    (tmp_path / "a.txt").write_bytes(good)
    (tmp_path / "b.txt").write_bytes(good * 5 + b"\xff\xe6\xbc " + good * 5 + b"\xe9 ")
    monkeypatch.setattr(preparation, "PART_BYTES", 6000)
    data = DataConfig(name="text", path=f"{tmp_path}/*.txt", workers=1, cache_dir=str(tmp_path / "cache"))
    directory, _ = prepare(data)
    expected = [*ids_of(good.decode()), END_OF_TEXT, *ids_of((tmp_path / "b.txt").read_text(errors="replace"))]
    assert stream_of(directory) == expected
    line = f"{tmp_path / 'b.txt'}: byte {5 * len(good):,} is not utf-8; 4 such bytes became U+FFFD"
    assert capfd.readouterr().err.count(line) == 1
    compare(data)
    assert capfd.readouterr().err.count(line) == 1


@pytest.mark.parametrize("tokenizer", ["gpt2", "chars"])
@pytest.mark.parametrize(
    ("wrong", "size", "is_refused"), [(9, 10_000, False), (11, 10_000, True), (3000, 3 << 20, True)]
)
def test_many_bytes_that_are_not_text_are_refused(
    tmp_path: Path, tokenizer: str, wrong: int, size: int, is_refused: bool
) -> None:
    """By their share in all files of a part, so that a small file may have one; or in its first two MiB, at once."""
    (tmp_path / "a.txt").write_bytes(b"\xe9 " * wrong)
    (tmp_path / "b.txt").write_bytes((b"some words of a text\n" * (size // 20))[: size - 2 * wrong])
    cache = str(tmp_path / "cache")
    data = DataConfig(name="text", path=f"{tmp_path}/*.txt", workers=1, cache_dir=cache, tokenizer=tokenizer)
    if is_refused:
        with pytest.raises(UserError, match=r"a.txt: byte 0 is not utf-8") as refused:
            prepare(data)
        assert "set data.encoding" in str(refused.value)
        assert not list((tmp_path / "cache").glob("*/"))
    else:
        assert prepare(data)


@pytest.mark.parametrize("encoding", ["gbk", "latin-1", "cp1252"])
def test_utf_8_is_not_read_in_another_encoding(tmp_path: Path, encoding: str) -> None:
    """For example by `gptexp evaluate RUN --data FILE`, whose run was trained on text in that encoding."""
    (tmp_path / "a.txt").write_text("汉字测试 " * 50)
    with pytest.raises(UserError, match=f"is UTF-8, not {codecs.lookup(encoding).name}"):
        prepare(text_config(tmp_path / "a.txt", encoding=encoding, cache_dir=str(tmp_path / "cache")))
    (tmp_path / "b.txt").write_bytes(("汉字测试 " * 50).encode("gbk"))
    assert prepare(text_config(tmp_path / "b.txt", encoding="gbk", cache_dir=str(tmp_path / "cache")))


def test_utf_16_without_a_mark_must_say_its_byte_order(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("words".encode("utf-16-be"))
    with pytest.raises(UserError, match=r"no byte-order mark; use data.encoding=utf-16-le or utf-16-be"):
        prepare(text_config(tmp_path / "a.txt", encoding="utf_16", cache_dir=str(tmp_path / "cache")))


LINE = "<|endoftext|>"


def split_by_hand(text: str) -> list[str]:
    """The documents between the lines `LINE`, an independent way."""
    found = re.split(rf"(?:\A|(?<=\n)){re.escape(LINE)}(?:\r?\n|\Z)", text)
    return [re.sub(r"\r?\n\Z", "", one) for one in found[:-1]] + found[-1:]


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("part_bytes", [50, 1 << 24])
def test_a_line_separates_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: str, end: str, part_bytes: int
) -> None:
    """In parts of any size, with empty documents, and lines that only contain the separator."""
    monkeypatch.setattr(preparation, "PART_BYTES", part_bytes)
    monkeypatch.setattr("gptexp.data.documents.ROWS", 3)
    draw, documents = random.Random(2), 0
    for number in range(15):
        lines = draw.choices([LINE, "some words", "", f" {LINE}", f"{LINE}.", "x " * 30], k=draw.randint(1, 60))
        content = end.join(lines)
        path = tmp_path / f"{number}.txt{packed}"
        path.write_bytes(PACKED[packed](content.encode()))
        wanted = [one for one in split_by_hand(content) if one]
        if not wanted:
            continue
        data = text_config(path, separator=LINE, workers=1, cache_dir=str(tmp_path / "cache"))
        directory, _ = prepare(data)
        assert stream_of(directory) == [i for one in wanted for i in (END_OF_TEXT, *ids_of(one))][1:]
        assert json.loads((directory / "manifest.json").read_text())["documents"] == len(wanted)
        documents += len(wanted)
    assert documents > 60


@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes", "chars", "tokenizer.json"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_lines_with_the_end_of_a_text_that_do_not_end_it_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tokenizer: str, name: str
) -> None:
    monkeypatch.setattr(preparation, "PART_BYTES", 100)
    story = f"words of a story.\n{LINE}\n"
    (tmp_path / name).write_text(story * 130 if name == "a.txt" else json.dumps({"text": story}))
    number = "130 lines" if name == "a.txt" else "1 line"
    if tokenizer == "tokenizer.json":  # whose end of a text has another name
        library = pytest.importorskip("tokenizers")
        tokenizer = str(tmp_path / tokenizer)
        library.Tokenizer(library.models.WordLevel({"?": 0, "</s>": 1}, unk_token="?")).save(tokenizer)
    data = text_config(tmp_path / name, workers=1, tokenizer=tokenizer, cache_dir=str(tmp_path / "cache"))
    prepare(data)
    err = capfd.readouterr().err
    assert f"{tmp_path / name}: {number} with {LINE} alone" in err
    assert (f"data.separator='{LINE}'" in err) == (name == "a.txt")
    if name == "a.txt":
        prepare(replace(data, separator=LINE))
        assert "alone" not in capfd.readouterr().err


@pytest.mark.parametrize(("line", "is_there"), [(LINE, True), (f"{LINE} ", False), ("---", False)])
def test_a_separator_that_no_line_has_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], line: str, is_there: bool
) -> None:
    (tmp_path / "a.txt").write_text(f"one\n{line}\ntwo\n")
    prepare(text_config(tmp_path / "a.txt", separator=LINE, workers=1, cache_dir=str(tmp_path / "cache")))
    assert ("data.separator" in capfd.readouterr().err) != is_there


def test_a_text_without_the_separator_is_read_in_pieces(tmp_path: Path) -> None:
    """So that a wrong separator does not put a whole compressed file into memory."""
    given = "some words\n" * 600_000
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(given.encode(), 1))
    found = [piece for piece, _ in documents(span_of(tmp_path / "a.txt.gz", separator=LINE), WHITE, "text", Seen())]
    assert "".join(found) == given
    assert max(map(len, found)) < BLOCK_BYTES
