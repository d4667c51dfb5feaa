"""Random and hostile files of a run: each is read as data or refused with one line. No code in it is executed."""

import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fuzz import VALUES

from gptexp.config.compose import compose
from gptexp.config.schema import Config, to_dict
from gptexp.distributed.ranks import Rank
from gptexp.machine.effective import load_effective
from gptexp.machine.resolve import resolve
from gptexp.process.errors import ConfigError
from gptexp.storage import run_dir

TREES = [
    "!!python/object/apply:os.system ['touch SENTINEL']",
    "!!python/object/new:subprocess.Popen [['touch', 'SENTINEL']]",
    "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a]\ndata: {path: &c [*b, *b, *b, *b, *b, *b]}",
    "data: {path: " + "[" * 3000 + "]" * 3000 + "}",
    "model: {n_layer: !!int '1_0'}",
    "? {a: b}\n: c",
    "hydra: {callbacks: {x: {_target_: builtins.print}}}",
    "model: {_target_: os.system}",
    "- a\n- b",
    "model: 7",
    "model: [1, 2]",
    "model: null",
    "data: {path: {a: 1}}",
    "optim: {lr: .nan}",
    "optim: {lr: .inf}",
    "train: {seed: 99999999999999999999999999}",
    "log: {wandb: {tags: [1, [2]]}}",
    "\0",
    "\udcff\udcfe",
    "%YAML 9.9\n---\na: b",
    "model: {n_layer: 1, n_layer: 2}",
    "x" * 1_000_000,
]


def mutated(seed: int, count: int) -> Iterator[str]:
    """Yield the default config as YAML, with one to three lines changed at random."""
    whole = yaml.safe_dump(to_dict(Config()), sort_keys=False)
    draw = random.Random(seed)
    for _ in range(count):
        lines = whole.splitlines()
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(lines))
            key = lines[at].partition(":")[0]
            new = [f"{key}: {draw.choice(VALUES)}", lines[at][2:], f"  {lines[at]}", "", lines[at] + ": x"]
            lines[at] = draw.choice(new)
        yield "\n".join(lines)


def read(directory: Path, text: str) -> str | None:
    """Save `text` as a run's config and load it; the error's message, or None if it is a valid config."""
    (directory / run_dir.CONFIG).write_bytes(text.encode("utf-8", "surrogateescape"))
    started = time.process_time()
    try:
        assert isinstance(run_dir.load_config(directory), Config)
    except ConfigError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
        assert len(message) < 1000, message
        return message
    finally:
        assert time.process_time() - started < 5, text[:200]
        assert [path.name for path in directory.iterdir()] == [run_dir.CONFIG]  # no code has created a sentinel
    return None


@pytest.mark.parametrize("number", range(len(TREES)))
def test_a_hostile_saved_config_is_read_as_data_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.chdir(tmp_path)
    read(tmp_path, TREES[number])


@pytest.mark.parametrize(("seed", "count"), [(0, 60), pytest.param(1, 600, marks=pytest.mark.e2e)])
def test_a_randomly_changed_saved_config_is_read_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, count: int
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = sum(read(tmp_path, text) is not None for text in mutated(seed, count))
    assert 0 < refused < count


@pytest.fixture(scope="module")
def choices() -> dict[str, Any]:
    """What effective.json holds for the default config on this machine."""
    return resolve(Config(), torch.device("cpu"), Rank()).to_dict()


def test_saved_choices_are_read_as_they_were_written(tmp_path: Path, choices: dict[str, Any]) -> None:
    run_dir.write_json(tmp_path / run_dir.EFFECTIVE, choices)
    found = load_effective(tmp_path)
    assert found is not None
    assert found.to_dict() == choices


def test_saved_choices_with_a_wrong_missing_or_unknown_key_are_refused_in_one_line(
    tmp_path: Path, choices: dict[str, Any]
) -> None:
    values = [None, "x", -1, 1e400, [], {}, {"a": 1}, True]
    wrong = [{**choices, "sources": dict.fromkeys(choices["sources"], "guessed")}]
    for key in [*choices, "new"]:
        wrong += [{**choices, key: value} for value in values if type(value) is not type(choices.get(key))]
        if key not in ("new", "runs_at_once"):  # earlier commits did not save it
            wrong.append({k: v for k, v in choices.items() if k != key})
    assert len(wrong) > 90
    for saved in wrong:
        (tmp_path / run_dir.EFFECTIVE).write_text(json.dumps(saved))
        with pytest.raises(ConfigError, match=r"not the saved choices of a run|not a JSON number") as refused:
            load_effective(tmp_path)
        assert len(str(refused.value).splitlines()) == 1


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["config.yaml", "effective.json"])
@pytest.mark.parametrize("verb", ["resume", "sample", "evaluate", "report", "status"])
def test_no_verb_executes_code_named_in_a_run_directory(
    gptexp: Callable[..., subprocess.CompletedProcess[str]], tiny: list[str], tmp_path: Path, name: str, verb: str
) -> None:
    sentinel, run = tmp_path / "sentinel", tmp_path / "run"
    call = f"{{_target_: os.system, command: 'touch {sentinel}'}}"
    files = {
        "config.yaml": f"model: {call}\nhydra: {{callbacks: {{x: {call}}}}}\n",
        "effective.json": json.dumps({"device": "cpu", "_target_": "os.system"}),
    }
    run_dir.save_config(run, compose(tiny))
    (run / ".hydra").mkdir()
    (run / ".hydra" / "config.yaml").write_text(f"hydra: {{callbacks: {{x: {call}}}}}")
    (run / name).write_text(files[name])
    done = gptexp(verb, str(run))
    assert done.returncode in ((2, 4) if verb in ("resume", "sample", "evaluate") else (0, 2)), done.stderr
    assert "Traceback" not in done.stderr
    assert not sentinel.exists()
