"""Reading metrics.jsonl, which may have a million lines."""

import os
import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gptexp.storage.reader import open_bytes

POINTS = 512  # steps that are kept: at least this many, at most twice as many
BLOCK = 1 << 16  # bytes that are read at once, from the end
MOST_BLOCKS = 256
STEP_EVENT = b'"event": "step"'
STEP_NUMBER = re.compile(rb'"step": (\d{1,15}),')
KEPT_EVENT = re.compile(rb'"event": "(eval|sharpness|alert|fault|sample)"')


@dataclass(frozen=True)
class Scan:
    """What one pass over the lines has found."""

    logged: "array[int]"  # the number of each step that has a line, in the order of the lines
    lines: list[tuple[int, bytes]]  # number and text of the lines that are kept: thinned steps, and other events
    is_whole: bool  # whether the pass began with the first line


def scan(path: Path, last_bytes: int | None = None) -> Scan:
    """Read a file, or its last bytes. Raises `OSError`.

    If there are many steps, it keeps every 2nd, 4th, 8th, … So runs of different batch sizes keep equal tokens.
    """
    logged, kept, steps, stride = array("q"), list[tuple[int, int, bytes]](), 0, 1
    with open_bytes(path) as lines:
        start = max(0, os.fstat(lines.fileno()).st_size - last_bytes) if last_bytes is not None else 0
        if start:
            lines.seek(start - 1)
            lines.readline()  # the rest of a line
        for number, line in enumerate(lines, 1):
            if STEP_EVENT in line:
                steps += 1
                if found := STEP_NUMBER.search(line):
                    logged.append(int(found[1]))
                if steps % stride == 0:
                    kept.append((number, steps, line))
                if steps == 2 * POINTS * stride:
                    stride *= 2
                    kept = [one for one in kept if one[1] % stride == 0]
            elif KEPT_EVENT.search(line):
                kept.append((number, 0, line))
    return Scan(logged, [(number, line) for number, _, line in kept], not start)


def newest(path: Path, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
    """The match of `pattern` in the last line that has one; its `string` is the line. None also without a file.

    It looks in the last 16 MB, and only in whole lines.
    """
    whole = (line for line in _from_the_end(path) if line.endswith(b"\n"))
    return next(filter(None, map(pattern.search, whole)), None)


def _from_the_end(path: Path) -> Iterator[bytes]:
    with suppress(OSError), open_bytes(path) as file:
        rest, end = b"", file.seek(0, os.SEEK_END)
        for _ in range(MOST_BLOCKS):
            start = max(0, end - BLOCK)
            file.seek(start)
            first, *lines = (file.read(end - start) + rest).splitlines(keepends=True) or [b""]
            yield from reversed(lines)
            if not start:
                yield first
                break
            rest, end = first, start  # the block may begin in the middle of this line
