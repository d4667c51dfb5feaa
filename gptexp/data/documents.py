"""The documents in files: text, jsonl (plain, gzip, Zstandard), parquet and Arrow.

A file of text is one document, read in pieces, or several that a line separates. In the other formats, each row is a
document. The kind of a file follows from its first bytes and its name.
"""

import gzip
import json
import mmap
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Any, Literal

from gptexp.config.parts import imported, in_one_line, own_lines
from gptexp.data import hub
from gptexp.data.decoding import MARKS, UTF_8, Seen, decoded, is_plainly_utf_8
from gptexp.process import pointers
from gptexp.process.errors import ConfigError, DataError, UnavailableError, UserError, first_line
from gptexp.process.words import shown

Kind = Literal["text", "jsonl", "parquet", "arrow"]
Compression = Literal["gzip", "zstd"]

BLOCK_BYTES = 1 << 20  # bytes of a file that are read at once
ROWS = 1024  # rows of parquet that are converted at once, and lines of text that are joined
_COMPRESSED: dict[bytes, Compression] = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd",
    **{bytes([0x50 + n, 0x2A, 0x4D, 0x18]): "zstd" for n in range(16)},  # a frame to skip, as pzstd begins with
}  # fmt: skip
_JSONL = (".jsonl", ".ndjson")
_PACKED = (".gz", ".zst", ".zstd")
_PARQUET = b"PAR1"  # the first and the last bytes of a file
_ARROW_FILE, _ARROW_STREAM = b"ARROW1", b"\xff\xff\xff\xff"  # the first bytes of Arrow's two formats
_FOREIGN = {b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK\3\4": "zip"}
_HEAD_CHARACTERS = 8000  # a file with a NUL in these is not text; git looks at as many bytes
END_LINE = "<|endoftext|>"  # the line between documents in files that were made for GPT-2
_END_LINE = re.compile(rf"^{re.escape(END_LINE)}\r?$", re.MULTILINE)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class HubFile:
    """A file of a data set on the hub."""

    repo: str
    subset: str | None
    split: str
    number: int
    size: int = 1  # unknown before it is read

    @property
    def path(self) -> str:
        return f"{self.repo}, file {self.number}"


@dataclass(frozen=True)
class OwnDocuments:
    """What a source of the user's own yields: texts, or the ids of documents."""

    target: str
    keys: str  # with which it is called, as JSON
    size: int = 1  # unknown before it is read

    @property
    def path(self) -> str:
        return self.target


@dataclass(frozen=True)
class Span:
    """A part of a file: bytes [start, end) of text or jsonl, row groups of parquet. Without an end, the whole file."""

    path: Path
    kind: Kind
    compression: Compression | None = None
    encoding: str = UTF_8  # of text and jsonl
    separator: str | None = None  # the line between two documents in text; None: all of the file is one
    start: int = 0
    end: int | None = None
    size: int = 0  # bytes on the disk; for parquet, without compression


Part = list[Span | HubFile | OwnDocuments]  # what one worker tokenises at a time


def span_of(path: Path, encoding: str = UTF_8, separator: str | None = None) -> Span:
    """A file as one span. A byte-order mark takes precedence over `encoding`.

    Raises `DataError`, also for formats that gptexp cannot read.
    """
    name = path.name.lower()
    with _reading(path), path.open("rb") as file:
        head = file.read(len(pointers.FIRST_LINE))
        refuse_pointer(path, head)
        if head.startswith(_PARQUET) or name.endswith(".parquet"):
            file.seek(-min(len(_PARQUET), file.seek(0, 2)), 2)
            if not head.startswith(_PARQUET) or file.read() != _PARQUET:
                raise DataError(f"{path}: not a complete parquet file; copy it again")
            return Span(path, "parquet")
    size = path.stat().st_size
    if name.endswith(".arrow") or head.startswith((_ARROW_FILE, _ARROW_STREAM)):
        return Span(path, "arrow", size=size)
    compression = next((found for magic, found in _COMPRESSED.items() if head.startswith(magic)), None)
    packed = next((suffix for suffix in _PACKED if name.endswith(suffix)), "")
    if packed and compression is None and head:
        raise DataError(f"{path}: not compressed, although its name ends in {packed}; rename it, or copy it again")
    if head.startswith(b"\x93NUMPY") or name.endswith((".bin", ".npy")):
        raise DataError(f"{path}: tokens, not text; use data=tokens data.path={shown(str(path))}")
    span = Span(path, "text", compression, encoding, size=size)
    first_block = next(_blocks(span), b"")
    span = replace(span, encoding=_encoding_of(span, first_block))
    kind = _kind_of_lines(span, first_block, name.removesuffix(packed))
    return replace(span, kind=kind, separator=separator if kind == "text" else None)


def refuse_pointer(path: Path, head: bytes) -> None:
    """Raise `DataError` if `path`, which begins with `head`, is a pointer of git-lfs."""
    if head.startswith(pointers.FIRST_LINE):
        raise DataError(f"{path}: {pointers.FIX}")


def _encoding_of(span: Span, head: bytes) -> str:
    """The encoding of a file, of which `head` is the first block: that of its byte-order mark, else the span's.

    Raises `DataError` if the file is in another encoding, or not text.
    """
    foreign = next((format for magic, format in _FOREIGN.items() if head.startswith(magic)), None)
    if foreign is not None:
        raise DataError(f"{span.path}: {foreign} is not read; give text, plain or compressed by gzip or Zstandard")
    marked = next((encoding for mark, encoding in MARKS.items() if head.startswith(mark)), None)
    if head and marked is None and span.encoding in ("utf-16", "utf-32"):
        needed = f"has no byte-order mark; use data.encoding={span.encoding}-le or {span.encoding}-be"
        raise DataError(f"{span.path}: {needed}")
    if marked is None and not span.encoding.startswith(UTF_8) and is_plainly_utf_8(head):
        fix = "use data.encoding=utf-8 (evaluate: --encoding utf-8)"
        raise DataError(f"{span.path}: is UTF-8, not {span.encoding}; {fix}")
    return marked or span.encoding


def _kind_of_lines(span: Span, first_block: bytes, name: str) -> Kind:
    """jsonl or text, as the file's name says; else jsonl if its first line is a JSON object."""
    head = next(decoded([first_block], span.encoding, 0, Seen()), "")[:_HEAD_CHARACTERS]
    if "\0" in head:
        what = f"not text in {span.encoding} (character {head.index(chr(0)):,} is NUL)"
        raise DataError(f"{span.path}: {what}; give text, or set data.encoding, such as utf-16-le")
    if name.endswith(_JSONL):
        return "jsonl"
    if name.endswith(".txt"):
        return "text"
    is_object = head.lstrip()[:1] == "{"
    first = next((line for line in _lines(_decoded(span, Seen())) if line.strip()), "") if is_object else ""
    try:
        return "jsonl" if isinstance(json.loads(first), dict) else "text"
    except (ValueError, RecursionError):
        if name.endswith(".json") and re.match(r"\s*\[\s*\{", head):
            raise DataError(f"{span.path}: an array of JSON objects; write one object a line (jsonl)") from None
        return "text"


def next_cut(span: Span, position: int, cut_before: str) -> int:
    """The first byte from `position` on at which a plain file of UTF-8 can be cut; its size if there is none.

    jsonl is cut between two lines, text after a line between two documents. If it has only one, it is cut after a
    visible character, in front of one of `cut_before`.
    """
    with span.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if span.kind == "jsonl" or span.separator is not None:
            end = re.compile(rb"\n" if span.separator is None else rb"\n%b\r?\n" % re.escape(span.separator.encode()))
            found = end.search(content, position - 1)
            return found.end() if found else len(content)
        for match in re.compile(rb"\S[%b]" % cut_before.encode()).finditer(content, position - 1):
            cut = match.end() - 1
            character = content[max(0, cut - 4) : cut].decode(errors="ignore")[-1:]  # at most four bytes long
            if not character.isspace():
                return cut
        return len(content)


def texts(part: Part, cut_before: str, column: str, seen: Seen) -> Iterator[tuple[str | Path, Any, bool]]:
    """Yield what `documents` yields for each span of a part, after the path of its file; add to `seen`.

    A source of the user's own may yield ids, in a list or an array, in place of a text.

    Raises `DataError` if the share of bytes that are not text exceeds `MOST_REPLACED` in the part, or in its start of
    two mebibytes or more.
    """
    for number, span in enumerate(part):
        if isinstance(span, OwnDocuments):
            for document in _own(span):
                seen.documents += 1
                yield span.path, document, True
            continue
        seen.span = seen.span if seen.replaced else number
        for piece, first in documents(span, cut_before, column, seen):
            if seen.read >= BLOCK_BYTES:
                _refuse_other_encoding(part, seen)
            seen.documents += first
            if END_LINE in piece:
                seen.end_lines += len(_END_LINE.findall(piece))  # pieces end in front of white space
            yield span.path, piece, first
    _refuse_other_encoding(part, seen)


def _own(span: OwnDocuments) -> Iterator[Any]:
    """The documents of a source of the user's own that are not empty. Raises `DataError`."""
    try:
        for document in imported("data", span.target)(**json.loads(span.keys)):
            if len(document):
                yield document
    except UserError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise DataError("\n".join([f"{span.target}: {in_one_line(error)}", *own_lines(error)])) from None


def first_replaced(part: Part, seen: Seen) -> str:
    """The place of the first byte of a part that is not text, for people."""
    span = part[seen.span]
    assert isinstance(span, Span)
    return f"{span.path}: byte {seen.byte:,} is not {span.encoding}"


def _refuse_other_encoding(part: Part, seen: Seen) -> None:
    if not seen.is_mostly_text:
        raise DataError(
            f"{first_replaced(part, seen)}, nor are {seen.replaced / seen.read:.1%} of the first {seen.read:,} bytes; "
            "set data.encoding (evaluate: --encoding) to the text's, such as gbk or latin-1, or convert it to UTF-8"
        )


def documents(span: Span | HubFile, cut_before: str, column: str, seen: Seen) -> Iterator[tuple[str, bool]]:
    """Yield the text of `span` in pieces, each with whether it begins a document. Empty documents yield nothing.

    Bytes that are not text in the file's encoding become U+FFFD, which `seen` counts, and so do halves of a surrogate
    pair in JSON. Raises `DataError` for rows without text in `column`; it names the file, and the line or the row.
    """
    goes_on = isinstance(span, Span) and span.kind == "text" and span.start > 0 and span.separator is None
    for blocks in _documents(span, column, seen):
        for number, piece in enumerate(pieces(blocks, cut_before)):
            yield piece, number == 0 and not goes_on


def _documents(span: Span | HubFile, column: str, seen: Seen) -> Iterator[Iterable[str]]:
    """The documents of a span, each in blocks."""
    if isinstance(span, Span) and span.kind == "text":
        if span.separator is None:
            yield _decoded(span, seen)
        else:
            yield from _between(_lines(_decoded(span, seen)), span.separator, seen)
        return
    for text in _rows(span, column, seen):
        yield (text[at : at + BLOCK_BYTES] for at in range(0, len(text), BLOCK_BYTES))


def _between(lines: Iterator[str], separator: str, seen: Seen) -> Iterator[Iterable[str]]:
    """Yield the documents between those of `lines` that are `separator`, in blocks, without the line ends beside it."""
    for is_separator, some in groupby(lines, lambda line: line.removesuffix("\r") == separator):
        if is_separator:
            seen.separated += 1
        else:
            yield _joined(some)


def _joined(lines: Iterator[str]) -> Iterator[str]:
    block = "\n".join(islice(lines, ROWS))
    while more := list(islice(lines, ROWS)):
        yield block
        block = "\n" + "\n".join(more)
    yield block.removesuffix("\r")


def _rows(span: Span | HubFile, column: str, seen: Seen) -> Iterator[str]:
    if isinstance(span, HubFile):
        return _hub(span, column)
    if span.kind == "jsonl":
        return _jsonl(span, column, seen)
    return {"parquet": _parquet, "arrow": _arrow}[span.kind](span, column)


def _hub(span: HubFile, column: str) -> Iterator[str]:
    for number, row in enumerate(hub.rows(span.repo, span.subset, span.split, span.number), 1):
        yield _text(row, column, lambda: f"{span.path}: row {number:,}")  # noqa: B023  called at once


def pieces(blocks: Iterable[str], cut_before: str) -> Iterator[str]:
    """The text of `blocks`, in pieces of about one block, or longer where there is no white space.

    A piece ends before one of the characters `cut_before` that follows a visible character. In GPT-2's pattern no token
    begins with a visible character and ends in white space, and only white space has a look-ahead. So the concatenated
    ids of the pieces are the ids of the whole text.
    """
    up_to_the_last_word = re.compile(rf".*\S(?=[{cut_before}])", re.DOTALL)
    piece = ""  # text up to a possible cut; yielded if another block follows
    rest: list[str] = []  # the text after `piece`, which has no place to cut
    before = ""  # the character before a block
    for block in blocks:
        if piece:
            yield piece
            piece = ""
        cut = 0
        if found := up_to_the_last_word.match(before + block):
            cut = found.end() - len(before)
            piece, rest = "".join([*rest, block[:cut]]), []
        rest.append(block[cut:])
        before = block[-1:]
    if piece := "".join([piece, *rest]):
        yield piece


def _blocks(span: Span) -> Iterator[bytes]:
    """The uncompressed bytes of a span of text or jsonl."""
    left = span.end - span.start if span.end is not None else None
    with _reading(span.path), _open(span) as file:
        if span.start:
            file.seek(span.start)
        while block := file.read(BLOCK_BYTES if left is None else min(left, BLOCK_BYTES)):
            yield block
            left = None if left is None else left - len(block)


def _decoded(span: Span, seen: Seen) -> Iterator[str]:
    return decoded(_blocks(span), span.encoding, span.start, seen)


def _open(span: Span) -> IO[bytes] | gzip.GzipFile:
    if span.compression == "gzip":
        return gzip.open(span.path)
    if span.compression == "zstd":
        stream: IO[bytes] = pyarrow(span.path).input_stream(str(span.path), compression="zstd")
        return stream
    return span.path.open("rb")


def _jsonl(span: Span, column: str, seen: Seen) -> Iterator[str]:
    for number, line in enumerate(_lines(_decoded(span, seen)), 1):
        yield _text_of_line(line, span, number, column)


def _lines(blocks: Iterator[str]) -> Iterator[str]:
    rest: list[str] = []  # the start of a line that ends in a later block
    for block in blocks:
        first, *others = block.split("\n")
        rest.append(first)
        if others:
            yield "".join(rest)
            yield from others[:-1]
            rest = others[-1:]
    yield "".join(rest)


def _text_of_line(line: str, span: Span, number: int, column: str) -> str:
    if not line.strip():
        return ""
    try:
        row = json.loads(line.removeprefix("\ufeff"))  # files with a mark, one after the other
    except (ValueError, RecursionError) as error:
        fix = f"set data.encoding: it is not {span.encoding}" if "\ufffd" in line else "correct the line"
        raise DataError(f"{_line(span, number)}: not JSON ({first_line(error)}); {fix}") from None
    if not isinstance(row, dict):
        raise DataError(f"{_line(span, number)}: {shown(row)} is not a JSON object; correct the line")
    return _text(row, column, lambda: _line(span, number))


def _line(span: Span, number: int) -> str:
    """The place of a line of a span, for people: its number in the whole file."""
    before = 0
    if span.start:
        with span.path.open("rb") as file:
            left = span.start
            while block := file.read(min(left, BLOCK_BYTES)):
                before, left = before + block.count(b"\n"), left - len(block)
    return f"{span.path}: line {before + number:,}"


def _text(row: dict[str, Any], column: str, place: Callable[[], str]) -> str:
    """The text in a row. `place` returns the name of the row."""
    if column not in row:
        raise DataError(
            f"{place()}: no column {shown(column)}, only {', '.join(map(shown, row))}; set data.text_column"
        )
    text = row[column]
    if not isinstance(text, str):
        raise DataError(_no_text(place(), column, text))
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _no_text(place: str, column: str, value: Any) -> str:
    return f"{place}: {column}={shown(value)} is not text; set data.text_column, or remove the row"


def _parquet(span: Span, column: str) -> Iterator[str]:
    with _reading(span.path):
        file = pyarrow(span.path).parquet.ParquetFile(span.path)
        groups = range(span.start, file.num_row_groups if span.end is None else span.end)
        before = sum(file.metadata.row_group(group).num_rows for group in range(span.start))
        _check_column(span.path, file.schema_arrow.names, column)
        yield from _texts(span.path, file.iter_batches(ROWS, groups, [column]), column, before)


def _arrow(span: Span, column: str) -> Iterator[str]:
    with _reading(span.path):
        arrow = pyarrow(span.path)
        with arrow.memory_map(str(span.path)) as source:
            is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
            source.seek(0)
            with (arrow.ipc.open_file if is_file else arrow.ipc.open_stream)(source) as reader:
                batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
                _check_column(span.path, reader.schema.names, column)
                yield from _texts(span.path, batches, column, 0)


def _texts(path: Path, batches: Any, column: str, before: int) -> Iterator[str]:
    """Yield the texts in a column of record batches. `before` rows of the file precede them."""
    for batch in batches:
        values = batch.column(batch.schema.get_field_index(column))
        if str(values.type) in ("binary", "large_binary"):
            values = values.cast("string", safe=False)  # the next line checks that it is UTF-8
        if not _is_valid(values):
            bad = next((i for i in range(len(values)) if not _is_valid(values.slice(i, 1))), 0)
            row = before + bad + 1
            raise DataError(
                f"{path}: row {row:,}: {column} is damaged or not UTF-8; correct the row, or copy the file again"
            )
        for number, text in enumerate(values.to_pylist(), before + 1):
            if not isinstance(text, str):
                raise DataError(_no_text(f"{path}: row {number:,}", column, text))
            yield text
        before += batch.num_rows


def _is_valid(values: Any) -> bool:
    """Whether a pyarrow array is UTF-8 and within its memory; else reading it would crash the process."""
    try:
        values.validate(full=True)
    except ValueError:
        return False
    return True


def _check_column(path: Path, columns: list[str], column: str) -> None:
    if column not in columns:
        raise DataError(f"{path}: no column {shown(column)}, only {', '.join(columns)}; set data.text_column")


def row_group_bytes(path: Path) -> list[int]:
    """The uncompressed size of each row group of a parquet file. Raises `DataError`."""
    with _reading(path):
        metadata = pyarrow(path).parquet.read_metadata(path)
        return [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert what the system, gzip and pyarrow raise to a `DataError` that names the file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # for a damaged file, gzip and pyarrow raise errors of many types
        if isinstance(error, OSError) and error.errno:
            raise UnavailableError(f"{path}: {first_line(error)}; no tokens were saved") from None
        if "too much memory" in str(error):
            rule = "compressed with a larger window than Zstandard's default allows (zstd --long)"
            raise DataError(f"{path}: {rule}; decompress it with zstd -d --long=31, and compress it without") from None
        raise DataError(f"{path}: {first_line(error)}; copy it again, no tokens were saved") from None


def pyarrow(path: Path) -> Any:
    """The package pyarrow. Raises `ConfigError` if it is missing."""
    try:
        import pyarrow as package
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"data.path={path}: needs the package pyarrow; run: pip install 'gptexp[parquet]'") from None
    return package
