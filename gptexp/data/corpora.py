"""Corpora: Python's own source, tiny Shakespeare, the user's files.

A corpus is a list of files in a fixed order. A part of it, small enough for one worker, is a list of spans.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from gptexp.config.paths import matching_files, no_files, saved_dataset_files
from gptexp.config.schema import DataConfig
from gptexp.data import hub
from gptexp.data.decoding import UTF_8
from gptexp.data.documents import HubFile, OwnDocuments, Part, Span, next_cut, row_group_bytes, span_of
from gptexp.data.downloads import Download, downloaded
from gptexp.process.errors import DataError
from gptexp.process.words import counted

SHAKESPEARE = Download(
    "tiny Shakespeare",
    "tinyshakespeare.txt",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    "use data=stdlib, which needs no network",
)

_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Corpus(Protocol):
    """What can be tokenised."""

    @property
    def name(self) -> str:
        """The kind of corpus."""

    @property
    def place(self) -> str:
        """Where it is, in a message."""

    @property
    def key(self) -> str:
        """16 hex digits that change when the corpus changes."""

    @property
    def max_tokens(self) -> int | None:
        """How many tokens are needed, from its start. None: all."""

    def spans(self, cut_before: str, part_bytes: int) -> Iterator[Span | HubFile | OwnDocuments]:
        """Yield the spans of a corpus, of about `part_bytes` or less if its files can be divided. Text is cut before
        one of the characters `cut_before`; see `documents.pieces`. Raises `DataError`."""


@dataclass(frozen=True)
class HubCorpus:
    """A data set of the hub. Its key is made of its name: its content is assumed never to change."""

    repo: str
    subset: str | None
    split: str
    max_tokens: int | None  # because it can be larger than a disk
    column: str  # data.text_column
    name: str = "hf"

    @property
    def place(self) -> str:
        return self.repo

    @property
    def key(self) -> str:
        wanted = "" if self.max_tokens is None else f"\0{self.max_tokens}"
        key = hashlib.sha256(f"{self.repo}\0{self.subset}\0{self.split}{wanted}".encode()).hexdigest()[:16]
        return _with_column(key, self.column)

    def spans(self, cut_before: str, part_bytes: int) -> Iterator[HubFile]:
        if Path(self.repo.partition("@")[0]).exists():
            raise DataError(
                f"data.path={self.repo}: is a path here as well, which would be read in its place; start in another "
                "folder, or use data=text data.path=FILES to read it"
            )
        for number in range(hub.count_shards(self.repo, self.subset, self.split)):
            yield HubFile(self.repo, self.subset, self.split, number)


@dataclass(frozen=True)
class OwnCorpus:
    """A source of the user's own. Its key is made of its name, its source file and its keys."""

    name: str
    target: str
    source: str
    keys: str  # as JSON
    max_tokens: int | None  # because it need not end

    @property
    def place(self) -> str:
        return self.target

    @property
    def key(self) -> str:
        about = f"{self.target}\0{self.source}\0{self.keys}\0{self.max_tokens}"
        return hashlib.sha256(about.encode()).hexdigest()[:16]

    def spans(self, cut_before: str, part_bytes: int) -> Iterator[OwnDocuments]:
        yield OwnDocuments(self.target, self.keys)


@dataclass(frozen=True)
class Files:
    """Files in a fixed order, with a key that changes when a file changes."""

    name: str
    files: list[Path]
    patterns: tuple[str, ...] = ()  # that have matched them; empty: the cache does not remember their key
    column: str = DataConfig.text_column
    encoding: str = UTF_8  # of text without a byte-order mark, as Python's codecs name it
    separator: str | None = None  # the line between two documents in text; None: all of a file is one

    @property
    def max_tokens(self) -> None:
        """None: the files are on this machine, so all of them are tokenised, once for all limits."""

    @property
    def place(self) -> str:
        others = len(self.files) - 1
        return f"{self.files[0]} and {counted(others, 'other file')}" if others else str(self.files[0])

    @property
    def key(self) -> str:
        """Hash of the files' paths, sizes and times, and how they are read; 16 hex digits.

        The times include that of the last status change, because a program can reset that of the last modification.
        """
        digest = hashlib.sha256()
        for file in self.files:
            stat = file.stat()
            digest.update(os.fsencode(file) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}\n".encode())
        if (self.encoding, self.separator) != (UTF_8, None):  # keys of files that are read by default are older
            digest.update(f"{self.encoding}\0{self.separator}".encode())
        return _with_column(digest.hexdigest()[:16], self.column)

    def spans(self, cut_before: str, part_bytes: int) -> Iterator[Span]:
        first: Span | None = None
        for path in self.files:
            span = span_of(path, self.encoding, self.separator)
            first = first or span
            if span.kind != first.kind:
                raise DataError(f"{path}: {span.kind}, but {first.path} is {first.kind}; give files of one format")
            yield from _divided(span, cut_before, part_bytes)


@dataclass(frozen=True)
class GoneFiles:
    """Files that were removed after they were tokenised."""

    name: str
    patterns: tuple[str, ...]
    key: str
    max_tokens: None = None

    @property
    def place(self) -> str:
        return ", ".join(self.patterns)

    def spans(self, cut_before: str, part_bytes: int) -> Iterator[Span]:
        raise DataError(f"{self.patterns[0]}: {no_files(self.patterns[0])}")


def _with_column(key: str, column: str) -> str:
    return key if column == DataConfig.text_column else hashlib.sha256(f"{key} {column}".encode()).hexdigest()[:16]


def stdlib() -> Files:
    """The Python source of the standard library, without installed packages and tests. Raises `DataError`."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _NOT_STDLIB)
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    if not files:
        raise DataError(f"{root}: contains no Python source; use data=text data.path=FILE")
    return Files("stdlib", files)


def text(
    patterns: Sequence[str], column: str = DataConfig.text_column, encoding: str = UTF_8, separator: str | None = None
) -> Files:
    """The matching files, each once, in the order of `patterns`. Raises `DataError` if a pattern matches no file."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        matching = saved_dataset_files(Path(pattern)) or matching_files(pattern)
        if not matching:
            raise DataError(f"{pattern}: {no_files(pattern)}")
        files.update(dict.fromkeys(matching))
    return Files("text", list(files), tuple(patterns), column, encoding, separator)


def parts(corpus: Corpus, cut_before: str, part_bytes: int) -> list[Part]:
    """Divide a corpus into parts of about `part_bytes`, which depend only on its files. Raises `DataError`."""
    found: list[Part] = []
    room = 0
    for span in corpus.spans(cut_before, part_bytes):
        if not found or span.size > room or isinstance(span, HubFile):  # a file of the hub is large, and is one part
            found.append([])
            room = part_bytes
        found[-1].append(span)
        room -= span.size
    return found


def _divided(span: Span, cut_before: str, part_bytes: int) -> Iterator[Span]:
    """Divide the span of a whole file. Only row groups, and plain text or jsonl in UTF-8, can be divided."""
    if span.kind == "parquet":
        start, total = 0, 0
        for group, group_bytes in enumerate(sizes := row_group_bytes(span.path), 1):
            total += group_bytes
            if total >= part_bytes or group == len(sizes):
                yield replace(span, start=start, end=group, size=total)
                start, total = group, 0
    elif span.compression is not None or span.kind == "arrow" or span.encoding != UTF_8 or span.size <= part_bytes:
        yield span
    else:
        cuts = [0]
        for position in range(part_bytes, span.size, part_bytes):
            if position > cuts[-1]:  # else the cut from here would be the last one again
                cuts.append(next_cut(span, position, cut_before))
        for start, end in pairwise(sorted({*cuts, span.size})):
            yield replace(span, start=start, end=end, size=end - start)


def shakespeare(downloads: Path) -> Files:
    """Tiny Shakespeare, downloaded into `downloads` if it is missing there. Raises `DataError`."""
    file = downloaded(SHAKESPEARE, downloads)
    return Files("shakespeare", [file], (str(file),))
