"""The message of a library's error, shortened to one line."""

import pytest

from gptexp.process.errors import first_line


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("one\ntwo", "one"),
        ("\n  late", "late"),
        (
            "Error(s) in loading state_dict for GPT:\n\tMissing key(s)",
            "Error(s) in loading state_dict for GPT: Missing key(s)",
        ),
        ("", "RuntimeError"),
    ],
)
def test_the_message_of_an_error_is_shortened_to_one_line(said: str, line: str) -> None:
    assert first_line(RuntimeError(said)) == line
