"""`gptexp sample`: where prompts come from, what is streamed where, and a session at a terminal."""

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import ROOT, ForkServer, clean, wait_for
from real_runs import finished_run
from screens import Screen

from gptexp import sample
from gptexp.data.tokenizer import Tokenizer
from gptexp.model import generate
from gptexp.model.generate import Sampling
from gptexp.process.errors import ConfigError, DataError, UserError
from gptexp.run.load import load_run


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path, torch_server: ForkServer) -> str:
    return str(finished_run(tmp_path_factory, corpus, torch_server).directory)


@pytest.fixture
def printed(run: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `gptexp sample RUN …` writes to stdout, in this process."""

    def of(*flags: str) -> str:
        sample.main([run, "--max-new-tokens", "12", *flags])
        return capsys.readouterr().out

    return of


def type_in(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))


def test_a_prompt_from_stdin_is_taken_as_it_is(printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "Ünï\r\n日本語\n".encode() + b"\xff")
    text = printed("--prompt", "-", "--num-samples", "1")
    assert text.startswith("Ünï\r\n日本語\n\ufffd")
    assert text == printed("--prompt", "Ünï\r\n日本語\n\ufffd", "--num-samples", "1")


def test_bytes_of_an_argument_that_are_no_character_are_replaced(printed: Callable[..., str]) -> None:
    assert printed("--prompt", os.fsdecode(b"a\xff"), "--num-samples", "1").startswith("a\ufffd")


def test_no_sample_depends_on_how_many_there_are(printed: Callable[..., str]) -> None:
    one, three = (printed("--prompt", "The", "--num-samples", n, "--seed", "3") for n in ("1", "3"))
    assert three.startswith(one.removesuffix("\n") + "\n---\nThe")
    assert three.count("\n---\n") == 2


def test_top_p_near_zero_is_greedy(printed: Callable[..., str]) -> None:
    greedy = printed("--temperature", "0", "--num-samples", "2")
    assert greedy == printed("--top-p", "1e-9", "--num-samples", "2", "--seed", "5")
    assert greedy == printed("--top-k", "1", "--num-samples", "2", "--seed", "6")
    assert greedy != printed("--num-samples", "2")


def test_each_line_of_an_interactive_session_has_a_seed_of_its_own(
    printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sample each, which a later command can repeat."""
    type_in(monkeypatch, b"The cat\n\nThe cat")
    texts = [printed("--prompt", p, "--num-samples", "1", "--seed", s) for p, s in (("The cat", "5"), ("", "6"))]
    texts.append(printed("--prompt", "The cat", "--num-samples", "1", "--seed", "7"))
    assert texts[0] != texts[2]
    assert printed("--interactive", "--seed", "5") == "".join(texts)


def test_text_that_the_tokenizer_does_not_know_ends_no_session(
    printed: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def strict(model: object, tokenizer: Tokenizer, prompt: str, n: int, how: Sampling) -> Iterator[tuple[int, str]]:
        if "é" in prompt:
            raise DataError("é: not in the vocabulary")
        yield 0, " fish"

    monkeypatch.setattr(generate, "stream", strict)
    type_in(monkeypatch, "é\nThe cat\n".encode())
    said: list[str] = []
    monkeypatch.setattr(sample, "print_error", lambda error: said.append(str(error)))
    assert printed("--interactive").endswith("The cat fish\n")
    assert said == ["é: not in the vocabulary"]


def test_text_is_written_as_it_comes(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's text is flushed before the next token is generated."""
    flushed: list[str] = []

    class Stdout(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    pieces: list[str] = []
    _, tokenizer, _ = load_run(run)
    decode = type(tokenizer).decode_tokens_bytes

    def decoded(self: Tokenizer, tokens: list[int]) -> list[bytes]:
        pieces.append(flushed[-1])
        return decode(self, tokens)

    monkeypatch.setattr(type(tokenizer), "decode_tokens_bytes", decoded)
    monkeypatch.setattr(sys, "stdout", Stdout())
    sample.main([run, "--prompt", "The cat", "--num-samples", "1", "--max-new-tokens", "9"])
    assert pieces[0] == "The cat"
    assert len({*pieces}) == 9
    assert all(later.startswith(earlier) for earlier, later in pairwise(pieces))


def test_a_full_disk_is_one_line(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(UserError, match="stdout cannot be written to: No space left on device"):
            sample.main([run, "--max-new-tokens", "2"])


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--top-p", "0"], "--top-p=0.0: must be above 0 and at most 1"),
        (["--top-p", "1.5"], "--top-p=1.5: must be above 0 and at most 1"),
        (["--top-p", "nan"], "--top-p=nan: must be above 0 and at most 1"),
        (["--interactive", "--prompt", "-"], "--interactive asks for the prompts: leave out --prompt"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        sample.main([".", *flags])
    assert str(refused.value) == why


@pytest.mark.e2e
def test_a_session_at_a_terminal(run: str, tmp_path: Path, cache: Path) -> None:
    """Ctrl-C ends a continuation that streams, and then a line that is typed; Ctrl-D ends the program."""
    env = {**clean(os.environ, cache), "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    flags = ["--interactive", "--max-new-tokens", "1000000", "--temperature", "0"]
    command = [sys.executable, "-m", "gptexp", "sample", run, *flags]
    screen = Screen(100, rows=200)  # so many that nothing scrolls away
    process = subprocess.Popen(command, cwd=tmp_path, env=env, preexec_fn=lambda: os.login_tty(screen.fd))

    def prompts() -> list[int]:
        return [number for number, line in enumerate(screen.text.splitlines()) if line.startswith(">")]

    wait_for(lambda: len(prompts()) == 1, process)
    assert screen.text.splitlines()[0] == "Type a text to continue; Ctrl-C ends a continuation, Ctrl-D the program."
    screen.type("The cät\n")
    wait_for(lambda: len(screen.text) > 400, process)
    assert len(prompts()) == 1
    screen.type("\x03")
    wait_for(lambda: len(prompts()) == 2, process)
    asked, continued = screen.text.splitlines()[1:3]
    assert asked == "> The cät"
    assert continued.startswith("The cät")
    screen.type("half a li")
    wait_for(lambda: screen.text.endswith("half a li"), process)
    screen.type("\x03")
    wait_for(lambda: len(prompts()) == 3, process)
    screen.type("\x04")
    assert process.wait(60) == 0
    assert "Traceback" not in screen.text
    assert len(screen.text.splitlines()) == prompts()[2] + 1
