"""Random command lines: each is valid, or refused with exit code 2 and lines of gptexp.

There is no traceback, no hang, and no file of a refused run.
"""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ForkServer
from fuzz import VALUES

from gptexp.config.schema import Config, fields_of

KEYS = [key for key, _, _ in fields_of(Config())]
TORCH = 97  # fork_server.py's exit code for a valid config, after which gptexp imports torch


def command_lines(seed: int, count: int) -> Iterator[list[str]]:
    draw = random.Random(seed)

    def key() -> str:
        name = draw.choice(KEYS)
        match draw.randrange(12):
            case 0:
                return name.replace(draw.choice(name), "", 1)  # remove a letter
            case 1:
                return f"{name}.{draw.choice(['x', '0', 'lr'])}"
            case 2:
                return draw.choice(["model", "optim", "nothing", "", ".", "a.b.c", "hydra"])
        return name

    for _ in range(count):
        line = []
        for _ in range(draw.randint(1, 3)):
            prefix = draw.choice([*[""] * 10, "+", "++", "~", "-"])
            value = draw.choice(VALUES)
            line.append(f"{prefix}{key()}{draw.choice([*['='] * 12, '', '==', ':'])}{value}")
        if draw.random() < 0.1:
            line.append(draw.choice(["-m", "--cfg", "--help", "--config-dir", "--nothing", "--resolve", "--run"]))
        yield line


@pytest.mark.parametrize(
    ("seed", "count"),
    [(3, 40), pytest.param(0, 200, marks=pytest.mark.slow), pytest.param(1, 2000, marks=pytest.mark.slow)],
)
def test_a_random_command_line_is_valid_or_refused_without_a_traceback(
    light_server: ForkServer, tmp_path: Path, seed: int, count: int
) -> None:
    refused = legal = 0
    for line in command_lines(seed, count):
        answer = light_server.ask(["train", *line], tmp_path, timeout=10)
        code, err = answer["code"], answer["stderr"]
        assert code in (0, 2, TORCH), (line, answer)
        assert "Traceback" not in err, (line, err)
        if code == TORCH:  # legal: the run directory is there
            shutil.rmtree(tmp_path / "outputs", ignore_errors=True)
        assert list(tmp_path.iterdir()) == [], line
        assert answer["cpu_s"] < 2, line
        if code == 2:
            refused += 1
            lines = err.splitlines()
            assert lines, line
            assert all(text.startswith("gptexp: ") for text in lines), (line, err)
            assert all(len(text) < 1500 for text in lines), (line, err)
        legal += code == TORCH
    assert refused > count / 2
    assert legal >= count // 200  # of forty lines there may be none
