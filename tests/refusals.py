"""What gptexp has refused, by the codes of its errors: in this process, and from the stderr of a command."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gptexp.process.errors import ConfigError, Problem, UserError

LINE = re.compile(r"gptexp: (config error: )?(.*?)(?: \[([a-z0-9-]+)\])?$")


@contextmanager
def refused(*codes: str, names: str = "") -> Iterator[pytest.ExceptionInfo[UserError]]:
    """The body raises a `UserError` of problems with these codes, whose first line begins with `names`."""
    with pytest.raises(UserError) as error:
        yield error
    assert [problem.code for problem in error.value.problems] == [*codes], error.value
    assert error.value.problems[0].startswith(names)


def problems_in(stderr: str) -> list[Problem]:
    """The problems that a command has printed; each of its lines is one."""
    found = []
    for line in stderr.splitlines():
        match = LINE.fullmatch(line)
        assert match is not None, f"no line of gptexp: {line}\n{stderr}"
        kind = ConfigError if match[1] else UserError
        found.append(Problem(match[3] or kind.default_code, match[2]))
    return found


def codes_in(stderr: str) -> list[str]:
    return [problem.code for problem in problems_in(stderr)]
