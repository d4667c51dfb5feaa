"""Text files read as data, against yaml's and json's own readers."""

import json
import random
from pathlib import Path

import pytest
import yaml
from test_fuzz_saved_config import TREES, mutated

from gptexp.config.compose import compose
from gptexp.config.schema import to_dict
from gptexp.storage.reader import parse_json, parse_line, read_yaml

CONTINUED = [  # a section that seems to begin in the middle of a value
    'note: "one\nmodel: 2\nthree"\ntrain: {seed: 1}\n',
    "note: 'one\nmodel: 2'\n",
    "note: |\n  one\n  model: 2\nmodel: 3\n",
    "a: [1,\nb: 2]\n",
    "a: 1\nb: 2\na: 3\n",
    "# a comment\n\na: 1\n\n\nb:\nc:\n- 1\n- {d: e}\nd: 1 # x\n",
    "---\na: 1\nb: 2\n...\n",
    "a: 1\nb: 2\n---\nc: 3\n",
    "",
    "a:\nb",
    "a: 1\n...\nb: 2\n",
    "{a: 1}\nb: 2\n",
    "  a: 1\nb: 2\n",
    "{}\na: 1\n",
]


@pytest.mark.parametrize("seed", range(4))
def test_a_config_in_sections_has_the_values_of_the_whole(tmp_path: Path, seed: int) -> None:
    whole = yaml.safe_dump(to_dict(compose(["model=nano", "log.tags=[a,b]", "log.note='x: y'"])), sort_keys=False)
    for text in [whole, *CONTINUED, *TREES, *mutated(seed, 60)]:
        (tmp_path / "config.yaml").write_bytes(text.encode("utf-8", "surrogateescape"))
        try:
            expected = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError, ValueError):
            with pytest.raises(ValueError, match=r"."):
                read_yaml(tmp_path / "config.yaml")
            continue
        if "*" in text:  # aliases, which are refused
            continue
        assert repr(read_yaml(tmp_path / "config.yaml")) == repr(expected), text


def test_two_readings_of_a_file_share_no_list(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("log: {tags: [a]}\n")
    read_yaml(tmp_path / "config.yaml")["log"]["tags"].append("b")
    assert read_yaml(tmp_path / "config.yaml") == {"log": {"tags": ["a"]}}


def test_a_line_has_the_value_that_the_strict_reader_finds() -> None:
    draw = random.Random(0)
    numbers = [draw.uniform(-1, 1) * 10.0 ** draw.randint(-300, 300) for _ in range(2000)]
    values = [{"a": numbers, "b": [None, True, 2**64 - 1, -(2**63)], "c": "\udcff é \n", "d": {"e": []}}, 7, "x"]
    for value in values:
        line = json.dumps(value).encode()
        assert parse_line(line) == parse_json(line.decode()) == value
    assert parse_line(b'{"text": "\xff"}\n') == {"text": "\ufffd"}  # bytes that are not UTF-8
    for wrong in (b'{"a": NaN}', b'{"a": 1e999}', b'{"a": 1', b"", b"{} {}", b"[" * 10_000):
        with pytest.raises(ValueError, match=r"."):
            parse_line(wrong)
