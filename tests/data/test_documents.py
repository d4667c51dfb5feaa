"""The documents in files of each format, and the parts into which a corpus is divided."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from texts import blocks, ids_of, stream_of, text_config

from gptexp.config.schema import DataConfig
from gptexp.data import prepare as preparation
from gptexp.data.corpora import parts, text
from gptexp.data.documents import documents, pieces
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
        found = list(pieces(blocks(given, draw), WHITE))
        assert "".join(found) == given
        assert [i for piece in found for i in ids_of(piece)] == ids_of(given)
        cuts += max(0, len(found) - 1)
    assert cuts > 300


@pytest.mark.parametrize("between", WHITE)
def test_a_file_is_read_in_pieces_with_every_kind_of_separator(between: str) -> None:
    given = between.join(["some words"] * 5000).encode()
    assert max(map(len, pieces((given[i : i + 1000] for i in range(0, len(given), 1000)), WHITE))) < 1100


def test_parts_of_any_size_have_the_ids_of_the_whole_text(tmp_path: Path) -> None:
    draw, cuts = random.Random(0), 0
    for _ in range(60):
        given = drawn(draw, 400).encode() + b"\xff\xe6\xbc " + drawn(draw, 20).encode()
        (tmp_path / "text").write_bytes(given)
        found = parts(text([str(tmp_path / "text")]), WHITE, draw.randint(1, 200))
        texts = ["".join(piece for piece, _ in documents(span, WHITE, "")) for part in found for span in part]
        assert "".join(texts) == given.decode(errors="replace")
        assert [i for one in texts for i in ids_of(one)] == ids_of(given.decode(errors="replace"))
        firsts = [first for part in found for span in part for _, first in documents(span, WHITE, "")]
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


WRITERS: dict[str, Callable[[Path, list[str]], None]] = {
    ".jsonl": as_jsonl, ".jsonl.gz": as_gzip, ".jsonl.zst": as_zstd, ".parquet": as_parquet,
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
    """In the layout of `datasets.Dataset.save_to_disk`: Arrow streams, state.json, dataset_info.json."""
    pyarrow = pytest.importorskip("pyarrow")
    texts = [f"document {number}" for number in range(30)]
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    names = []
    for number, some in enumerate((texts[:11], texts[11:])):
        table = pyarrow.table({"text": some})
        names.append(f"data-{number:05d}-of-00002.arrow")
        with pyarrow.OSFile(str(folder / names[-1]), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
            out.write_table(table, max_chunksize=4)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train"]}')
    expected = [i for one in texts for i in (END_OF_TEXT, *ids_of(one))][1:]
    for path in (folder, tmp_path / "saved"):
        assert stream_of(prepare(text_config(path, cache_dir=str(tmp_path / "cache")))[0]) == expected


def test_another_column_is_another_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "title": "another"}\n' * 3)
    found = [prepare(text_config(tmp_path / "a.jsonl", text_column=column))[0] for column in ("text", "title", "text")]
    assert found[0] == found[2] != found[1]
    assert stream_of(found[1])[: len(ids_of("another"))] == ids_of("another")


def cut_parquet(path: Path) -> None:
    as_parquet(path, ["some text"] * 50)
    path.write_bytes(path.read_bytes()[:-100])


BAD: dict[str, tuple[str, Any, str]] = {
    "no JSON": ("a.jsonl", '{"text": "x"}\n\n{"text": \n', "a.jsonl: line 3: not JSON"),
    "no object": ("a.jsonl", '{"text": "x"}\n[1]\n', "a.jsonl: line 2: [1] is not a JSON object"),
    "no column": ("a.jsonl", '{"body": "x"}\n', "a.jsonl: line 1: no column text, only body; set data.text_column"),
    "no text": ("a.jsonl", '{"text": null}\n', "a.jsonl: line 1: text=null is not text"),
    "no UTF-8": ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl: line 1: not JSON"),
    "not compressed": ("a.jsonl.gz", '{"text": "x"}\n', "not compressed, although its name ends in .gz"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99)[:-9], "a.jsonl.gz: Compressed file ended before"),
    "cut parquet": ("a.parquet", cut_parquet, "a.parquet: not a complete parquet file; copy it again"),
    "text as parquet": ("a.parquet", "text", "a.parquet: not a complete parquet file; copy it again"),
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
    assert not list((tmp_path / "cache").glob("*/manifest.json"))


def test_a_bad_line_is_counted_from_the_start_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 1000 + "oops\n" + '{"text": "x"}\n' * 1000)
    monkeypatch.setattr(preparation, "PART_BYTES", 777)
    with pytest.raises(UserError, match=r"a.jsonl: line 1,001: not JSON"):
        prepare(text_config(tmp_path / "a.jsonl", workers=1, cache_dir=str(tmp_path / "cache")))


def test_two_formats_in_one_path_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(UserError, match=r"b.txt: text, but .*a.jsonl is jsonl; give files of one format"):
        prepare(text_config(tmp_path / "a.jsonl", tmp_path / "b.txt"))
