"""A pseudo-terminal whose screen pyte draws, for tests of what a person sees."""

import fcntl
import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pyte

ROWS = 40


class Screen:
    """A terminal of `columns` columns. Processes write to its file descriptor `fd`, or read from it."""

    def __init__(self, columns: int, rows: int = ROWS) -> None:
        self._main, self.fd = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._stream.feed(os.read(self._main, 65536))
            except OSError:  # no process has the other end open
                return

    def type(self, text: str) -> None:
        """Type on the keyboard of this terminal; Ctrl-C is \x03, and Ctrl-D \x04."""
        os.write(self._main, text.encode())

    @property
    def text(self) -> str:
        """What the screen shows now."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def lines(self) -> list[str]:
        """The lines on the screen, without empty ones. No process may write any more."""
        os.close(self.fd)
        self._reader.join(10)
        return [line.rstrip() for line in self._screen.display if line.strip()]

    @property
    def shows_cursor(self) -> bool:
        return not self._screen.cursor.hidden


@contextmanager
def written_to(screen: Screen) -> Iterator[None]:
    """Send stdout and stderr of this process to `screen`."""
    streams, saved = (sys.stdout, sys.stderr), (os.dup(1), os.dup(2))
    for number in (1, 2):
        os.dup2(screen.fd, number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
    try:
        yield
    finally:
        sys.stdout.close()
        sys.stderr.close()
        sys.stdout, sys.stderr = streams
        for number, fd in zip((1, 2), saved, strict=True):
            os.dup2(fd, number)
            os.close(fd)
