"""Options of all verbs: one that takes a single value is given once."""

import sys
from argparse import Action
from importlib import import_module

import pytest

from gptexp.cli import VERBS
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
            import_module(f"gptexp.{verb}").main(sys.argv[1:])
        assert 2 in (getattr(refused.value, "code", None), getattr(refused.value, "exit_code", None))
        [*_, line] = (str(refused.value) + capsys.readouterr().err).splitlines()
        assert flag in line
        assert "twice" in line


def test_the_verbs_have_such_options() -> None:
    """Otherwise the test above would pass without testing one."""
    assert sum(len(single_valued(verb)) for verb in VERBS) > 30
    assert single_valued("train")
