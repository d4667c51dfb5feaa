"""What is printed cannot control the terminal; text in any language is printed as it is."""

import subprocess
import sys
from pathlib import Path

import pytest

from gptexp.process.errors import ConfigError
from gptexp.process.terminal import LAYOUT, emit_part, print_error, printable, say, warn


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


@pytest.mark.parametrize("broken", [1, 2])
def test_a_stream_that_cannot_be_written_to_costs_the_other_one_nothing(broken: int) -> None:
    """Text for people goes to stderr here, and lines for programs to stdout."""
    code = "from gptexp.process.terminal import *\nreserve_stdout('json')\n"
    code += "for _ in range(3): say('people'); emit('programs')"
    with Path("/dev/full").open("w") as full:
        streams = {1: subprocess.PIPE, 2: subprocess.PIPE, broken: full}
        done = subprocess.run([sys.executable, "-c", code], stdout=streams[1], stderr=streams[2], text=True)
    assert done.returncode == 0
    assert (done.stdout or "").count("programs") == (0 if broken == 1 else 3)
    assert (done.stderr or "").count("people") == (0 if broken == 2 else 3)


def test_a_part_of_a_text_is_safe_on_a_terminal_and_whole_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal, out in ((True, "a\ufffd[2J\nb"), (False, "a\x1b[2J\nb")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        emit_part("a\x1b[2")
        emit_part("J\nb")
        assert capsys.readouterr().out == out
