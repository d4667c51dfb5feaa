"""What a run says on stdout. Nobody listening is no reason to stop.

Where programs read stdout (log.progress=json), what is said to people goes to stderr.
"""

import os
import sys
from typing import TextIO

_for_people = 1  # file descriptor


def talk_as_asked(progress: str) -> None:
    """Keep stdout for programs from now on, where log.progress says that they read it."""
    global _for_people
    if progress == "json":
        _for_people = 2


def say(*lines: object) -> None:
    """Print for people, a line each; into the void once the reader has gone (`… | head`)."""
    _print(sys.stdout if _for_people == 1 else sys.stderr, *lines)


def emit(line: str) -> None:
    """Print for programs."""
    _print(sys.stdout, line)


def _print(stream: TextIO, *lines: object) -> None:
    try:
        print(*lines, sep="\n", flush=True, file=stream)
    except OSError:
        hush()


def hush() -> None:
    """Let everything that is still to be printed on stdout go nowhere, what a buffer holds too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
