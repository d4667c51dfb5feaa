"""Several sources in one stream of tokens, by weight."""

import json
import random
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from texts import ids_of, stream_of

from gptexp.config.compose import compose
from gptexp.config.schema import DataConfig
from gptexp.data import prepare as preparation
from gptexp.data.comparison import compare
from gptexp.data.loader import build_dataset
from gptexp.data.mix import most_of, shares_of
from gptexp.data.prepare import prepare, prepared_dir
from gptexp.data.stream import TokenStream
from gptexp.process.errors import ConfigError, DataError

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


def test_the_mix_is_as_long_as_the_weights_allow() -> None:
    """One more token of the stream would need more of some source than it has.

    It is the same mix if each source has no more than `most_of` it.
    """
    draw = random.Random(0)
    for _ in range(300):
        tokens = {str(i): draw.randint(1, 10_000) for i in range(draw.randint(1, 5))}
        weights = {source: draw.choice([1, 3, 0.25, 1e-3, 7.5, 0.1]) for source in tokens}
        most = draw.choice([None, draw.randint(1, 20_000)])
        shares = shares_of(tokens, weights, most)
        whole = sum(map(Fraction, weights.values()))
        limits = [tokens[s] * whole / Fraction(weights[s]) for s in tokens]
        length = min([*limits, *([most] if most else [])])
        for source, share in shares.items():
            assert 0 <= share <= tokens[source]
            assert 0 <= length * Fraction(weights[source]) / whole - share < 1
        needed = most_of(weights, most)
        assert shares_of({s: min(tokens[s], needed[s] or tokens[s]) for s in tokens}, weights, most) == shares
        for source, count in needed.items():
            assert count is None or 0 <= count - most * Fraction(weights[source]) / whole < 1


@pytest.fixture
def mixed(tmp_path: Path) -> DataConfig:
    (tmp_path / "a.txt").write_text("the first source " * 500)
    (tmp_path / "b.txt").write_text("another one, longer " * 2000)
    weights = {str(tmp_path / "a.txt"): 3, str(tmp_path / "b.txt"): 1}
    return DataConfig(name="text", mix=weights, cache_dir=str(tmp_path / "cache"))


def test_a_mix_holds_the_first_tokens_of_each_source(mixed: DataConfig, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = mixed.mix
    a, b = (ids_of(Path(path).read_text()) for path in mixed.mix)
    assert prepared_dir(mixed) is None
    directory, _ = prepare(mixed)
    assert prepared_dir(mixed) == directory
    assert stream_of(directory) == a + b[: len(a) // 3]
    printed = capfd.readouterr().err
    assert f"mix: 75.0% {first}: {len(a):,} tokens of its {len(a):,}" in printed
    assert f"mix: 25.0% {second}: {len(a) // 3:,} tokens of its {len(b):,}" in printed
    assert prepare(mixed)[0] == directory
    assert capfd.readouterr().err == ""
    compare(mixed)


@pytest.mark.e2e
def test_a_run_says_what_each_source_gives(mixed: DataConfig, tiny: list[str], gptexp: Gptexp, tmp_path: Path) -> None:
    first, second = mixed.mix
    weights = f"data.mix={{{first}: 3, {second}: 1}}"
    done = gptexp("train", *(o for o in tiny if "data.path" not in o), weights, "hydra.run.dir=out", "log.progress=bar")
    assert done.returncode == 0, done.stderr
    assert f"mix             75.0% {first}, 25.0% {second}\n" in done.stdout
    a = len(ids_of(Path(first).read_text()))
    assert json.loads((tmp_path / "out/summary.json").read_text())["mix_tokens"] == {first: a, second: a // 3}


def test_the_weights_and_the_length_are_part_of_the_hash(mixed: DataConfig) -> None:
    [first, second] = mixed.mix
    hashes = set()
    for weights, most in (({first: 3, second: 1}, None), ({first: 3, second: 1}, 999), ({first: 1, second: 1}, None)):
        mixed.mix, mixed.max_tokens = weights, most
        hashes.add(preparation.data_hash(mixed))
        assert most is None or len(TokenStream(prepare(mixed)[0])) in (most, most - 1)
    assert len(hashes) == 3
    mixed.mix, mixed.max_tokens = {first: 30, second: 10}, None
    assert preparation.data_hash(mixed) in hashes


def test_a_source_that_changes_is_noticed(mixed: DataConfig) -> None:
    directory, _ = prepare(mixed)
    source = min(Path(str(mixed.cache_dir)).glob("text-*/tokens-00000.bin"), key=lambda path: path.stat().st_size)
    source.write_bytes(source.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"tokens-00000.bin: byte .*were written; restore the file"):
        TokenStream(directory)


@pytest.mark.e2e
def test_a_mix_on_the_command_line_is_checked(tmp_path: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"the text {name} " * 300)
    given = [text for text in tiny if not text.startswith("data.path=")]
    config = compose([*given, "data.mix={a.txt: 0.7, b.txt: 0.3}"])
    assert config.data.mix == {str(tmp_path / "a.txt"): 0.7, str(tmp_path / "b.txt"): 0.3}
    assert len(build_dataset(config).train) > 1000
    for mix, why in (
        ("{a.txt: 0}", "must map paths to weights above 0"),
        ("{a.txt: 1, c.txt: 1}", "c.txt: no such file"),
        ("{a.txt: 1} data.path=a.txt", "leave out one of them"),
        ("{a.txt: 1} data.order=sequential log.noise_scale=off", "one source after the other"),
        ("{a.txt: 1} data.tokenizer=chars", "use data.tokenizer=bytes"),
        ("{a.txt: 1} data.val_split=tail", "use data.val_split=spread"),
        ("{a.txt: 1, ./a.txt: 2}", "names a source twice; give each one weight"),
        ("{*.txt: 1, a.txt: 1}", r"a.txt is in .*\*.txt and in .*a.txt; give each file to one source"),
        ("{a.txt: 1} data=stdlib", "only data=text or data=hf reads it"),
    ):
        first, _, others = f"data.mix={mix}".partition("} ")
        overrides = [first + "}" * bool(others), *others.split()]
        with pytest.raises(ConfigError, match=why):
            compose([*given, *overrides])
