"""Options of all verbs: one that takes a single value is given once, and one that takes a whole number reads counts."""

import sys
from argparse import Action

import pytest

from gptexp.cli import VERBS
from gptexp.command.arguments import Parser, module_of
from gptexp.command.completion import _arguments
from gptexp.process.errors import UserError


def single_valued(verb: str) -> list[Action]:
    is_single = lambda action: action.option_strings and action.nargs != 0  # noqa: E731
    return [action for action in _arguments(verb) if is_single(action) and type(action).__name__ != "_AppendAction"]


@pytest.mark.parametrize("verb", VERBS)
def test_an_option_with_one_value_is_given_once(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in single_valued(verb):
        flag, value = action.option_strings[-1], str(next(iter(action.choices or ()), 1))
        monkeypatch.setattr(sys, "argv", [f"gptexp {verb}", flag, value, flag, value])
        with pytest.raises((SystemExit, UserError)) as refused:
            module_of(verb).main(sys.argv[1:])
        assert 2 in (getattr(refused.value, "code", None), getattr(refused.value, "exit_code", None))
        [*_, line] = (str(refused.value) + capsys.readouterr().err).splitlines()
        assert flag in line
        assert "twice" in line


def test_the_verbs_have_such_options() -> None:
    """Otherwise the test above would pass without testing one."""
    assert sum(len(single_valued(verb)) for verb in VERBS) > 30
    assert single_valued("train")


def test_an_option_with_a_whole_number_reads_counts() -> None:
    for text, number in (("200M", 200_000_000), ("1e3", 1000), ("1_000", 1000), ("7", 7)):
        parser = Parser("verb", None)
        parser.add_argument("--budget", type=int)
        assert parser.parse_args(["--budget", text]).budget == number


def test_a_wrong_count_is_refused_with_the_option_the_value_and_the_rule_by_every_verb(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [(verb, action.option_strings[-1]) for verb in VERBS for action in _arguments(verb) if action.type is int]
    assert len(options) > 10
    for verb, flag in options:
        for wrong in ("1m", "0.3", "x" * 9999):
            with pytest.raises(SystemExit) as refused:
                module_of(verb).main([flag, wrong])
            assert refused.value.code == 2
            line = capsys.readouterr().err.splitlines()[-1]
            assert flag in line
            assert f"{wrong[:99]}" in line
            assert "whole number" in line
            assert len(line) < 500
