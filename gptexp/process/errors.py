"""Errors that a user can cause, each with the exit code of the command.

The message is one line: the value, the rule that it breaks, and the fix. Every other exception is a defect of gptexp
and prints its traceback.
"""

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_CHECKPOINT = 4
EXIT_DIVERGED = 5


def first_line(error: BaseException) -> str:
    """The first line of the error's message, with the second where the first ends in a colon; else the type's name."""
    text = getattr(error, "strerror", None) or str(error)
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return f"{first} {rest[0]}" if rest and first.endswith(":") else first


class UserError(ValueError):
    """Base of the errors that print as one line."""

    exit_code = EXIT_FAILED


class ConfigError(UserError):
    """The configuration is invalid; `problems` holds one line per problem."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("\n".join(self.problems))


class InUseError(ConfigError):
    """Another process uses the run directory."""


class DataError(UserError):
    """A corpus or a token file cannot be used."""

    exit_code = EXIT_DATA


class UnavailableError(DataError):
    """A disk, a file, the network or a process failed. The same command may succeed later."""


class CheckpointError(UserError):
    """No checkpoint can be loaded."""

    exit_code = EXIT_CHECKPOINT


class StorageError(UserError):
    """A file of the run cannot be written, for example because the disk is full."""


class MicroBatchError(UserError):
    """The micro-batch that `auto` chose does not fit into memory. The run restarts with a smaller one."""


class MemoryExhaustedError(UserError):
    """A run ran out of memory after its first steps."""


class LostRankError(UserError):
    """The processes of other ranks have ended."""


class SilentRankError(UserError):
    """Other ranks are alive and have not answered within the timeout."""


class DivergedError(UserError):
    """The loss or the gradient is non-finite, or the loss stayed too high."""

    exit_code = EXIT_DIVERGED
