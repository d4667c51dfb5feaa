"""The documents in files: text, jsonl (plain, gzip, Zstandard), parquet and Arrow.

A file of text is one document, read in pieces in bounded memory. In the other formats, each row is a document. The
kind of a file follows from its first bytes and its name.
"""

import codecs
import gzip
import json
import mmap
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from gptexp.data import hub
from gptexp.process.errors import ConfigError, DataError, first_line
from gptexp.process.words import shown

Kind = Literal["text", "jsonl", "parquet", "arrow"]
Compression = Literal["gzip", "zstd"]

BLOCK_BYTES = 1 << 20  # of a file that is read in pieces
ROWS = 1024  # rows of parquet that are converted at once
_COMPRESSED: dict[bytes, Compression] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_JSONL = (".jsonl", ".ndjson")
_PACKED = (".gz", ".zst", ".zstd")
_PARQUET = b"PAR1"  # the first and the last bytes of a file


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
class Span:
    """A part of a file: bytes [start, end) of text or jsonl, row groups of parquet. Without an end, the whole file."""

    path: Path
    kind: Kind
    compression: Compression | None = None
    start: int = 0
    end: int | None = None
    size: int = 0  # bytes on the disk; of parquet, without compression


Part = list[Span | HubFile]  # what one worker tokenises at a time


def kind_of(path: Path) -> tuple[Kind, Compression | None]:
    """The format of a file, and how it is compressed. Raises `DataError`."""
    name = path.name.lower()
    try:
        with path.open("rb") as file:
            head = file.read(8)
            if head.startswith(_PARQUET) or name.endswith(".parquet"):
                file.seek(-min(len(_PARQUET), file.seek(0, 2)), 2)
                if not head.startswith(_PARQUET) or file.read() != _PARQUET:
                    raise DataError(f"{path}: not a complete parquet file; copy it again")
                return "parquet", None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; no tokens were saved") from None
    if path.suffix == ".arrow":
        return "arrow", None
    compression = next((found for magic, found in _COMPRESSED.items() if head.startswith(magic)), None)
    packed = next((suffix for suffix in _PACKED if name.endswith(suffix)), "")
    if packed and compression is None and head:
        raise DataError(f"{path}: not compressed, although its name ends in {packed}; rename it, or copy it again")
    if head.startswith(b"\x93NUMPY") or name.endswith((".bin", ".npy")):
        raise DataError(f"{path}: tokens, not text; use data=tokens data.path={shown(str(path))}")
    return "jsonl" if name.removesuffix(packed).endswith(_JSONL) else "text", compression


def next_cut(path: Path, kind: Kind, position: int, cut_before: str) -> int:
    """The first byte from `position` on at which a plain file can be cut; its size if there is none.

    jsonl is cut between two lines. Text is cut after a visible character, in front of one of `cut_before`.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if kind == "jsonl":
            line_end = content.find(b"\n", position - 1)
            return line_end + 1 if line_end >= 0 else len(content)
        for match in re.compile(rb"\S[%b]" % cut_before.encode()).finditer(content, position - 1):
            cut = match.end() - 1
            character = content[max(0, cut - 4) : cut].decode(errors="ignore")[-1:]  # of at most four bytes
            if not character.isspace():
                return cut
        return len(content)


def documents(span: Span | HubFile, cut_before: str, column: str) -> Iterator[tuple[str, bool]]:
    """Yield the text of `span` in pieces, each with whether a document begins with it. Empty documents yield nothing.

    Raises `DataError` with the file, and with the line or the row, for rows that have no text in `column`.
    """
    if isinstance(span, Span) and span.kind == "text":
        first = span.start == 0
        for piece in pieces(_blocks(span), cut_before):
            yield piece, first
            first = False
        return
    for text in _rows(span, column):
        if text:
            yield text, True


def _rows(span: Span | HubFile, column: str) -> Iterator[str]:
    if isinstance(span, HubFile):
        return _hub(span, column)
    return {"jsonl": _jsonl, "parquet": _parquet, "arrow": _arrow}[span.kind](span, column)


def _hub(span: HubFile, column: str) -> Iterator[str]:
    for number, row in enumerate(hub.rows(span.repo, span.subset, span.split, span.number), 1):
        yield _text(row, column, lambda: f"{span.path}: row {number:,}")  # noqa: B023  called at once


def pieces(blocks: Iterator[bytes], cut_before: str) -> Iterator[str]:
    """The text of UTF-8 `blocks`, in pieces of about one block.

    A piece ends before one of the characters `cut_before` that follows a visible character. In GPT-2's pattern no token
    begins with a visible character and ends in white space, and only white space has a look-ahead. So the concatenated
    ids of the pieces are the ids of the whole text. Bytes that are not UTF-8 become U+FFFD.
    """
    up_to_the_last_word = re.compile(rf".*\S(?=[{cut_before}])", re.DOTALL)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    for block in blocks:
        rest += decoder.decode(block)
        if found := up_to_the_last_word.match(rest):
            yield found[0]
            rest = rest[found.end() :]
    if rest := rest + decoder.decode(b"", final=True):
        yield rest


def _blocks(span: Span) -> Iterator[bytes]:
    """The uncompressed bytes of a span of text or jsonl."""
    left = span.end - span.start if span.end is not None else None
    try:
        with _open(span) as file:
            if span.start:
                file.seek(span.start)
            while block := file.read(BLOCK_BYTES if left is None else min(left, BLOCK_BYTES)):
                yield block
                left = None if left is None else left - len(block)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{span.path}: {reason}; no tokens were saved") from None


def _open(span: Span) -> IO[bytes] | gzip.GzipFile:
    if span.compression == "gzip":
        return gzip.open(span.path)
    if span.compression == "zstd":
        stream: IO[bytes] = pyarrow(span.path).input_stream(str(span.path), compression="zstd")
        return stream
    return span.path.open("rb")


def _jsonl(span: Span, column: str) -> Iterator[str]:
    rest, number = b"", 0
    for block in _blocks(span):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            number += 1
            yield _text_of_line(line, span, number, column)
    yield _text_of_line(rest, span, number + 1, column)


def _text_of_line(line: bytes, span: Span, number: int, column: str) -> str:
    if not line.strip():
        return ""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{_line(span, number)}: not JSON ({first_line(error)}); correct the line") from None
    if not isinstance(row, dict):
        raise DataError(f"{_line(span, number)}: {shown(row)} is not a JSON object; correct the line")
    return _text(row, column, lambda: _line(span, number))


def _line(span: Span, number: int) -> str:
    """The place of a line of a span for people, who count the lines of the whole file."""
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
        raise DataError(f"{place()}: {column}={shown(text)} is not text; set data.text_column, or remove the row")
    return text


def _parquet(span: Span, column: str) -> Iterator[str]:
    with _arrow_errors(span.path):
        file = pyarrow(span.path).parquet.ParquetFile(span.path)
        groups = range(span.start, file.num_row_groups if span.end is None else span.end)
        before = sum(file.metadata.row_group(group).num_rows for group in range(span.start))
        _check_column(span.path, file.schema_arrow.names, column)
        yield from _texts(span.path, file.iter_batches(ROWS, groups, [column]), column, before)


def _arrow(span: Span, column: str) -> Iterator[str]:
    with _arrow_errors(span.path):
        arrow = pyarrow(span.path)
        with arrow.memory_map(str(span.path)) as source, arrow.ipc.open_stream(source) as stream:
            _check_column(span.path, stream.schema.names, column)
            yield from _texts(span.path, stream, column, 0)


def _texts(path: Path, batches: Any, column: str, before: int) -> Iterator[str]:
    """The column of record batches of a file, of whose rows `before` precede them."""
    for batch in batches:
        for number, text in enumerate(batch.column(batch.schema.get_field_index(column)).to_pylist(), before + 1):
            if not isinstance(text, str):
                raise DataError(
                    f"{path}: row {number:,}: {column}={shown(text)} is not text; set data.text_column, or remove it"
                )
            yield text
        before += batch.num_rows


def _check_column(path: Path, columns: list[str], column: str) -> None:
    if column not in columns:
        raise DataError(f"{path}: no column {shown(column)}, only {', '.join(columns)}; set data.text_column")


def row_group_bytes(path: Path) -> list[int]:
    """The uncompressed size of each row group of a parquet file. Raises `DataError`."""
    with _arrow_errors(path):
        metadata = pyarrow(path).parquet.read_metadata(path)
        return [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """Convert the errors of pyarrow, which are `ValueError` and `OSError`, to a `DataError` that names the file."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
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
