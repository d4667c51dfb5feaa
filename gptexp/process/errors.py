"""Errors that a user can cause, each with the exit code of the command.

The message has one line for each problem: the value, the rule that it breaks, and the fix. A short code names the rule
for scripts and tests (`batch-not-divisible`); it stays when the sentence changes. Every other exception is a defect of
gptexp and prints its traceback.
"""

from collections.abc import Sequence
from typing import Self

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_CHECKPOINT = 4
EXIT_DIVERGED = 5


def first_line(error: BaseException) -> str:
    """The first line of the error's text, with the second if the first ends in a colon; if empty, the type's name."""
    text = getattr(error, "strerror", None) or str(error)
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return f"{first} {rest[0]}" if rest and first.endswith(":") else first


class Problem(str):
    """The line about one problem, with the code of the rule that is broken."""

    code: str

    def __new__(cls, code: str, line: str) -> Self:
        problem = super().__new__(cls, line)
        problem.code = code
        return problem

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (self.code, str(self))


class UserError(ValueError):
    """Base of the errors that print as one line for each problem. `problems` holds these lines."""

    exit_code = EXIT_FAILED
    default_code = "failed"  # code of a line that is given without one

    def __init__(self, problems: str | Sequence[str], code: str | None = None) -> None:
        if isinstance(problems, str):
            problems = [problems] if isinstance(problems, Problem) else problems.split("\n")
        own = code or self.default_code
        self.problems = [line if isinstance(line, Problem) else Problem(own, line) for line in problems]
        super().__init__("\n".join(self.problems))

    @property
    def code(self) -> str:
        """The code of the first problem."""
        return self.problems[0].code


class ConfigError(UserError):
    """The configuration or the command line is invalid."""

    exit_code = EXIT_CONFIG
    default_code = "config"


class InUseError(ConfigError):
    """Another process uses the run directory."""

    default_code = "in-use"


class DataError(UserError):
    """A corpus or a token file cannot be used."""

    exit_code = EXIT_DATA
    default_code = "data"


class UnavailableError(DataError):
    """A disk, a file, the network or a process failed. The same command may succeed later."""

    default_code = "unavailable"


class CheckpointError(UserError):
    """No checkpoint can be loaded."""

    exit_code = EXIT_CHECKPOINT
    default_code = "checkpoint"


class StorageError(UserError):
    """A file of the run cannot be written, for example because the disk is full."""

    default_code = "storage"


class MicroBatchError(UserError):
    """The micro-batch that `auto` chose does not fit into memory. The run restarts with a smaller one."""

    default_code = "micro-batch-too-large"


class MemoryExhaustedError(UserError):
    """A run ran out of memory after its first steps."""

    default_code = "out-of-memory"


class LostRankError(UserError):
    """The processes of other ranks have ended."""

    default_code = "rank-lost"


class SilentRankError(UserError):
    """Other ranks are alive and have not answered within the timeout."""

    default_code = "rank-silent"


class PartError(UserError):
    """A part of the user's own has raised an error. The lines of its code follow the first one."""

    default_code = "part-failed"


class DivergedError(UserError):
    """The loss or the gradient is non-finite, or the loss stayed too high."""

    exit_code = EXIT_DIVERGED
    default_code = "diverged"
