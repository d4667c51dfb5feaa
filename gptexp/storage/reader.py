"""Safe reading of text files of untrusted origin, from a run directory, a checkpoint or a token cache.

The files are read as data and never run as code. Links, large files, deeply nested values, non-finite numbers and YAML
aliases are rejected.
"""

import errno
import io
import json
import math
import os
import re
import stat
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

import orjson
import yaml
from yaml.composer import Composer

MAX_BYTES = 64 << 20  # the largest legitimate file, the manifest of 10^12 tokens, has 2 MB
TOP_LEVEL = re.compile(r"(?<=\n)(?=[a-z_]+:)")  # between two sections of a saved config
SECTION = re.compile(r"[a-z_]+:(?!.*^\.\.\.)", re.MULTILINE | re.DOTALL)  # "..." would end the document
INTEGER_LIMIT = 2**64  # exclusive limit of the absolute value: fingerprints have 64 bits


def open_bytes(path: Path) -> BinaryIO:
    """Open a regular file. Raises `OSError`."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a link, and links are not followed; copy the file") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(handle, "rb")


def open_text(path: Path, errors: str = "strict") -> TextIO:
    """Open a regular file of text in UTF-8; `errors` is as for `open`. Raises `OSError`."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8", errors=errors)


def read_text(path: Path) -> str:
    """Return the text of a small file. Raises `OSError` or `ValueError`."""
    with open_text(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
            raise ValueError(f"{size:,} bytes, more than the limit of {MAX_BYTES:,}")
        return file.read()


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises `OSError` or `ValueError`."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises `ValueError`, also for NaN, infinity and numbers beyond 64 bits."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_line(line: bytes) -> Any:
    """`parse_json` for the lines of a long file, six times as fast. A number beyond 64 bits becomes a float."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:  # also for the escape of a byte that is not UTF-8, which a path may have
        return parse_json(line.decode(errors="replace"))


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is too large")
    return value


def _bounded(text: str) -> int:
    if len(text) > 21 or abs(value := int(text)) >= INTEGER_LIMIT:  # a long text is not converted: that takes time
        raise ValueError(f"the number {text[:21]} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, parse_int=_bounded)


def read_yaml(path: Path) -> Any:
    """Return the value of a YAML file as plain data. Raises `OSError` or `ValueError`."""
    text = read_text(path)
    try:
        sections = TOP_LEVEL.split(text)
        parts = [_copied(_section(section)) for section in sections]
        if all(isinstance(part, dict) for part in parts) and all(map(SECTION.match, sections)):
            return {key: value for part in parts for key, value in part.items()}
    except (yaml.YAMLError, RecursionError):  # the whole text may have a value that goes on at the begin of a line
        pass
    try:
        return _load_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


@lru_cache(maxsize=4096)
def _section(text: str) -> Any:
    """The value of a part of a YAML file. The configs of a sweep's runs have most sections in common."""
    return _load_yaml(text)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [*map(_copied, value)] if isinstance(value, list) else value


def _load_yaml(text: str) -> Any:
    if "\\u" in text.lower():  # libyaml refuses the escape of a byte that is not UTF-8, which a path may have
        return yaml.load(text, _PlainLoader)
    return yaml.load(text, _FastLoader)


_FastSafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's parser takes a tenth of the time


class _PlainComposer(Composer):  # type: ignore[misc]  # yaml has no types
    """Rejects aliases: a few lines of nested aliases can expand to more values than fit into memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("contains a YAML alias (*name); write the value in its place")
        return super().compose_node(parent, index)


class _FastLoader(_PlainComposer, _FastSafeLoader):  # type: ignore[misc, valid-type]
    """libyaml's parser with yaml's Python composer: libyaml's composer crashes the process on deeply nested text."""

    def __init__(self, text: str) -> None:
        _PlainComposer.__init__(self)
        _FastSafeLoader.__init__(self, text)


class _PlainLoader(_PlainComposer, yaml.SafeLoader):  # type: ignore[misc]
    """The same loader, in Python only."""

    def __init__(self, text: str) -> None:
        _PlainComposer.__init__(self)
        yaml.SafeLoader.__init__(self, text)
