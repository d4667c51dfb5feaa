"""What is printed cannot control the terminal; text in any language is printed as it is."""

import pytest

from gptexp.process.errors import ConfigError
from gptexp.process.terminal import LAYOUT, print_error, printable, say, warn


def test_control_characters_and_broken_names_are_replaced() -> None:
    assert printable("\x1b[31mred\x07 \udcff\u202e\n") == "\ufffd[31mred\ufffd \ufffd\ufffd\ufffd"
    assert printable("a\tb\nc\r", LAYOUT) == "a\tb\nc\ufffd"
    for text in ("", "plain", "ünï – 8 × 16 日本語\u3000\u00a0", "می\u200cخواهم", "👩\u200d🔬", "soft\u00adhyphen"):
        assert printable(text) == text


def test_every_way_to_print_replaces_them(capsys: pytest.CaptureFixture[str]) -> None:
    say("two\nlines\x1b", "and\tone")
    warn("\x1b[2Jgone")
    print_error(ConfigError(["first\x9b", "second"]))
    out, err = capsys.readouterr()
    assert out == "two\nlines\ufffd\nand\tone\n"
    assert err == ("gptexp: \ufffd[2Jgone\ngptexp: config error: first\ufffd\ngptexp: config error: second\n")
