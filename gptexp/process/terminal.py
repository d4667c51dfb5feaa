"""Output to stdout and stderr, and the exit of a process after an error.

Text for people goes to stdout. With log.progress=json, stdout is for programs and text for people goes to stderr. A
closed pipe (`gptexp train | head`) does not stop a run.
"""

import json
import os
import re
import shlex
import shutil
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, TextIO

from gptexp.process.errors import EXIT_FAILED, ConfigError, UserError

LAYOUT = "\n\t"  # control characters that may be printed
# Control characters, bytes that are not UTF-8, line separators, and characters that change the direction of text.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028-\u202e\u2066-\u2069\ufffe\uffff]")
ERASE_LINE = "\r\x1b[2K"  # erases the cursor's line: another process on this terminal may draw a progress bar there
NOWHERE = Path(os.devnull)
ERRORS_TO = "GPTEXP_ERRORS_TO"  # environment: a file to which an error is written too, as JSON
SHOW_CURSOR = "\x1b[?25h"
SPINS = 3000  # how often a waiting OpenMP thread spins before it sleeps
_people_read_stdout = True
_result: TextIO | None = None  # the process's own stdout, once `reserve_stdout_for_result` has been called


def reserve_stdout(progress: str) -> None:
    """Send text for people to stderr from now on if log.progress is json."""
    global _people_read_stdout
    if progress == "json":
        _people_read_stdout = False


def reserve_stdout_for_result() -> None:
    """Send to stderr from now on what this process and those that it starts print, except what `emit` prints."""
    global _result
    if _result is None:
        sys.stdout.flush()
        _result = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)


def printable(text: str, keep: str = "") -> str:
    """`text` with a replacement for each character that could control a terminal or is not allowed in XML.

    Names of files and texts of models may hold any character. The characters in `keep` stay.
    """
    return _CONTROLS.sub(lambda found: found[0] if found[0] in keep else "\ufffd", text)


def as_command(arguments: Sequence[str]) -> str:
    """A command of gptexp, quoted for a shell: no argument, even from a stranger's file, can end the command."""
    return printable(shlex.join(["gptexp", *arguments]))


def say(*lines: str) -> None:
    """Print each of `lines` for people."""
    _print(for_people(), *(printable(line, LAYOUT) for line in lines))


def for_people() -> TextIO:
    """The stream to print text for people to."""
    return sys.stdout if _people_read_stdout else sys.stderr


def emit(line: str) -> None:
    """Print a line for programs."""
    _print(_result or sys.stdout, line)


def emit_part(text: str) -> None:
    """Print a part of a text at once, without a newline; on a terminal, also without control characters.

    Unlike the other functions, it raises an error if stdout is closed or full, because the text is the only result.
    """
    try:
        print(printable(text, LAYOUT) if sys.stdout.isatty() else text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard(sys.stdout)
        raise UserError(f"stdout cannot be written to: {error.strerror}") from None


def emit_path(path: str) -> None:
    """Print a path: to a terminal without control characters, to a program with its exact bytes."""
    if sys.stdout.isatty():
        emit(printable(path))
        return
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")
    emit(path)


def warn(line: str) -> None:
    """Print an error or a warning that does not end the process."""
    _print_errors(f"gptexp: {printable(line, LAYOUT)}")


def warn_at_once(line: str) -> None:
    """`warn` for a signal handler. It avoids Python's buffers, because the signal may have interrupted a write."""
    with suppress(OSError):
        os.write(2, f"{ERASE_LINE if os.isatty(2) else ''}gptexp: {line}\n".encode())


def show_cursor() -> None:
    """Show the cursor, which a progress bar hides, before the process ends at once."""
    with suppress(OSError):
        if os.isatty(1):
            os.write(1, SHOW_CURSOR.encode())


def leave_terminal() -> None:
    """Discard from now on what is printed to a terminal that is gone, where each write would raise an error."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _print_errors(*lines: str) -> None:
    erase = ERASE_LINE if sys.stderr.isatty() else ""
    with suppress(OSError):
        print(f"{erase}{lines[0]}", *lines[1:], sep="\n", file=sys.stderr)


def terminal_width() -> int | None:
    """Characters of a line of the terminal; None if text for people goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if for_people().isatty() else None


def confirmed(question: str, yes: bool, agree: str = "--yes") -> bool:
    """Whether the user agrees; `yes` is an answer given before, by `agree`.

    Raises `ConfigError` if there is no terminal.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(f"there is no terminal to ask on; add {agree} to go on without a question")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _print(stream: TextIO, *lines: str) -> None:
    try:
        print(*lines, sep="\n", flush=True, file=stream)
    except OSError:
        _discard(stream)


def _discard(stream: TextIO) -> None:
    """Redirect `stream`, including buffered output, to the null device."""
    with Path(os.devnull).open("w") as null:
        os.dup2(null.fileno(), stream.fileno())


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Write stdout and stderr of this process to `path`, including its C++ code and the processes that it starts."""
    terminal = {number: os.dup(number) for number in (1, 2)}
    with path.open("w", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        for number in terminal:
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for number, copy in terminal.items():
                os.dup2(copy, number)
                os.close(copy)


@contextmanager
def report_errors() -> Iterator[None]:
    """Print an error of the body and exit. A `UserError` prints its lines, any other error its traceback.

    With --json a `UserError` is also printed to stdout, as JSON.
    """
    try:
        _check_encodings()
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output has closed it
        _discard(sys.stdout)
        sys.exit(EXIT_FAILED)
    except UserError as error:
        print_error(error)
        if {"--json", "hydra.sweeper.json=true"} & {*sys.argv[1:]}:
            emit(json.dumps({"error": error_as_json(error)}))
        sys.exit(error.exit_code)
    except Exception as error:
        traceback.print_exception(error)
        sys.exit(EXIT_FAILED)


def _check_encodings() -> None:
    """Raise `ConfigError` unless Python decodes file names as UTF-8: other processes could not find the files.

    If stdout or stderr has another encoding (PYTHONIOENCODING), characters that it lacks are escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8":
        raise ConfigError(f"the encoding of this locale is {encoding}: set LC_ALL=C.UTF-8, or PYTHONUTF8=1")


def _sleep_soon() -> None:
    """Let a thread that waits for the others sleep after about 50 µs, unless the environment says otherwise.

    OpenMP reads the environment when torch is imported, and processes that gptexp starts inherit it. In GNU's OpenMP,
    which torch's wheels for Linux have, a waiting thread spins for milliseconds. If another process holds the core of
    one thread, the others spin at each of the hundreds of operations of a step, and block their cores. Measured on two
    cores only: beside two busy processes, a step of model=bytes took 0.5 to 2.3 s without this setting and 0.26 s with
    it. Without other processes it took about 45 ms in both cases, and 49 ms or more with 1,000 spins.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def run_verb(verb: Callable[[list[str]], Any]) -> NoReturn:
    """Call a verb's `main` with the command line's arguments and exit with the code that it returns, else with 0."""
    _sleep_soon()
    with report_errors():
        code = verb(sys.argv[1:])
    sys.exit(code if isinstance(code, int) else 0)


def print_error(error: UserError) -> None:
    """Print a line for each problem. A code other than the error's default stands at its end, in brackets."""
    kind = "config error: " if isinstance(error, ConfigError) else ""
    for problem in error.problems:
        code = f" [{problem.code}]" if problem.code != error.default_code else ""
        _print_errors(f"gptexp: {kind}{printable(problem)}{code}")
    if path := os.environ.get(ERRORS_TO):
        with suppress(OSError):
            Path(path).write_text(json.dumps(error_as_json(error)))


def error_as_json(error: UserError) -> dict[str, Any]:
    """The error for programs: its code, the exit code, and the code and line of each problem."""
    problems = [{"code": problem.code, "message": problem} for problem in error.problems]
    return {"code": error.code, "exit_code": error.exit_code, "problems": problems}
