"""Errors that a user can cause, each with the exit code that the command line answers with.

The message is one line: the value, the rule it breaks, and the fix. Anything else that is raised is a defect of
gptexp and keeps its traceback.
"""

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_CHECKPOINT = 4
EXIT_DIVERGED = 5


def first_line(error: Exception) -> str:
    """What a library says, as far as it fits into a line of ours; its type where it says nothing."""
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{first} {rest[0]}" if rest and first.endswith(":") else first


class UserError(ValueError):
    """Base of the errors that print as one line."""

    exit_code = EXIT_FAILED


class ConfigError(UserError):
    """A configuration that cannot run; `problems` holds one line for each thing wrong with it."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("\n".join(self.problems))


class DataError(UserError):
    """A corpus or a shard that cannot be used."""

    exit_code = EXIT_DATA


class CheckpointError(UserError):
    """No checkpoint that can be loaded."""

    exit_code = EXIT_CHECKPOINT


class StorageError(UserError):
    """A file of the run that cannot be written: a full disk, a file system that is gone."""


class MicroBatchError(UserError):
    """A micro-batch that `auto` chose and memory did not hold; a smaller one is chosen, and the run can start again."""


class MemoryExhaustedError(UserError):
    """Memory that ran out in the middle of a run."""


class LostRankError(UserError):
    """Ranks that have ended, as their peers see it."""


class SilentRankError(UserError):
    """Ranks that are there and have not answered for as long as the others wait."""


class DivergedError(UserError):
    """The loss or the gradient stopped being a number."""

    exit_code = EXIT_DIVERGED
