"""Output to stdout and stderr, and the exit of a process after an error.

Text for people goes to stdout. With log.progress=json, stdout is for programs and text for people goes to stderr. A
closed pipe (`gptexp train | head`) does not stop a run.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

from gptexp.process.errors import EXIT_FAILED, ConfigError, UserError

_people_read_stdout = True


def reserve_stdout(progress: str) -> None:
    """Send text for people to stderr from now on if log.progress is json."""
    global _people_read_stdout
    if progress == "json":
        _people_read_stdout = False


def say(*lines: object) -> None:
    """Print each of `lines` for people."""
    _print(sys.stdout if _people_read_stdout else sys.stderr, *lines)


def emit(line: str) -> None:
    """Print a line for programs."""
    _print(sys.stdout, line)


def warn(line: str) -> None:
    """Print an error or a warning that does not end the process."""
    print(f"gptexp: {line}", file=sys.stderr)


def _print(stream: TextIO, *lines: object) -> None:
    try:
        print(*lines, sep="\n", flush=True, file=stream)
    except OSError:
        _discard_stdout()


def _discard_stdout() -> None:
    """Redirect stdout, including buffered output, to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def report_errors() -> Iterator[None]:
    """Print an error of the body and exit. A `UserError` prints its lines, any other error its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output has closed it
        _discard_stdout()
        sys.exit(EXIT_FAILED)
    except UserError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except Exception as error:
        traceback.print_exception(error)
        sys.exit(EXIT_FAILED)


def run_verb(verb: Callable[[list[str]], Any]) -> NoReturn:
    """Call a verb's `main` with the command line's arguments and exit with the code that it returns, else with 0."""
    with report_errors():
        code = verb(sys.argv[1:])
    sys.exit(code if isinstance(code, int) else 0)


def print_error(error: UserError) -> None:
    kind = "config error: " if isinstance(error, ConfigError) else ""
    print(*(f"gptexp: {kind}{line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
