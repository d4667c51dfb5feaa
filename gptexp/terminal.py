"""What a run says on stdout. Nobody listening is no reason to stop."""

import os
import sys


def say(*lines: object) -> None:
    """Print, a line each; into the void once the reader has gone (`… | head`)."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        hush()


def hush() -> None:
    """Let everything that is still to be printed on stdout go nowhere, what a buffer holds too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
