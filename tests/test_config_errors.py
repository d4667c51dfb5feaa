"""Wrong command lines of `gptexp train`: one line for each problem, exit code 2, torch not imported, nothing created.

The command lines and what is said to them are in config_errors.txt. fork_server.py runs them all; a few are also run
as real processes, since a fork is not what a user starts.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ForkServer

from gptexp import run_dir
from gptexp.compose import compose

HERE = Path(__file__).resolve().parent
PREFIX = "gptexp: "
GAP = " ... "


@dataclass(frozen=True)
class Case:
    """A wrong command line; for each of its problems, the parts that one line of stderr holds in this order."""

    line: int  # in config_errors.txt
    text: str  # as typed into a shell
    problems: tuple[tuple[str, ...], ...]


def read_table(path: Path) -> list[Case]:
    cases: list[Case] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("$ "):
            cases.append(Case(number, line[2:], ()))
        elif line.startswith(" "):
            case = cases.pop()
            cases.append(Case(case.line, case.text, (*case.problems, tuple(line.strip().split(GAP)))))
        else:
            assert not line or line.startswith("#"), f"{path.name}:{number}: neither command line, message nor comment"
    return cases


TABLE = read_table(HERE / "config_errors.txt")

# What `--config-dir @CONF` finds: wrong files, as a user may write them.
FILES = {
    "experiment/unknown_key.yaml": "# @package _global_\noptim:\n  learning_rate: 1e-3\n",
    "experiment/wrong_type.yaml": "# @package _global_\nmodel:\n  n_layer: four\n",
    "experiment/out_of_range.yaml": "# @package _global_\noptim:\n  lr: -1\nmodel:\n  n_head: 3\n",
    "experiment/no_model.yaml": "# @package _global_\ndefaults:\n  - override /model: gpt5\n",
    "experiment/no_yaml.yaml": "# @package _global_\nmodel: [1\n",
    "experiment/yaml_bool.yaml": "# @package _global_\ntrain:\n  compile: off\n",  # YAML 1.1: off is false
    "sweep/bad_cell.yaml": (
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      optim.lr: 1e-3,-1\n"
    ),
}


class Place:
    """A home and a cache that do not exist, and files to name in overrides."""

    def __init__(self, root: Path) -> None:
        self.home, self.cache = root / "home", root / "cache"
        text = root / "text.txt"
        text.write_text("Some text.\n")
        for name, content in FILES.items():
            file = root / "conf" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        self.values = {"@TEXT": str(text), "@CONF": str(root / "conf"), "@10kB": "x" * 10_000}

    def fill(self, text: str) -> str:
        for name, value in self.values.items():
            text = text.replace(name, value)
        return text

    def env(self) -> dict[str, str]:
        """Only what a Python process needs: no variable of a launcher, of Hydra, wandb or gptexp."""
        wanted = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
        kept = {name: os.environ[name] for name in wanted if name in os.environ}
        return {**kept, "HOME": str(self.home), "GPTEXP_CACHE": str(self.cache)}

    def untouched(self) -> bool:
        return not self.home.exists() and not self.cache.exists()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def server(place: Place) -> Iterator[ForkServer]:
    with ForkServer(env=place.env()) as server:
        yield server


def tells(line: str, parts: tuple[str, ...]) -> bool:
    """Whether `line` holds all `parts`, in this order."""
    return re.search(".*".join(map(re.escape, parts)), line) is not None


def check_refused(code: int, stderr: str, problems: list[tuple[str, ...]]) -> None:
    """Exit code 2 and lines of gptexp's that tell all problems and nothing else."""
    assert code == 2, stderr
    assert "Traceback" not in stderr
    lines = stderr.splitlines()
    assert lines
    assert all(line.startswith(PREFIX) for line in lines), stderr
    for parts in problems:
        assert any(tells(line, parts) for line in lines), f"not told: {parts}\n{stderr}"
    for line in lines:
        assert any(tells(line, parts) for parts in problems), f"told without cause: {line}"
    # A problem shared by the cells of a grid may be told for each of two or three of them.
    assert len(lines) <= 3 * len(problems), stderr


def test_the_table_holds_what_it_promises() -> None:
    assert len({tuple(shlex.split(case.text)) for case in TABLE}) == len(TABLE) >= 200
    assert [case.text for case in TABLE if not case.problems] == []


@pytest.mark.parametrize("case", TABLE, ids=[f"{case.line}:{case.text[:60]}" for case in TABLE])
def test_wrong_command_line(case: Case, server: ForkServer, place: Place, tmp_path: Path) -> None:
    answer = server.ask(["train", *shlex.split(place.fill(case.text))], tmp_path)
    problems = [tuple(place.fill(part) for part in parts) for parts in case.problems]
    assert not answer["torch"], f"it came as far as importing torch:\n{answer['stdout']}{answer['stderr']}"
    check_refused(answer["code"], answer["stderr"], problems)
    assert answer["stdout"] == ""
    assert list(tmp_path.iterdir()) == []
    assert place.untouched()


def test_a_refusal_takes_less_than_a_second(server: ForkServer, tmp_path: Path) -> None:
    """Of CPU, imports aside, in one of five tries: the machine may be busy with other things."""
    for argv in (["lr=1e-3"], ["optim.lr=-1"], ["-m", "optim.lr=1e-3,-1"]):
        assert any(server.ask(["train", *argv], tmp_path)["cpu_s"] < 1 for _ in range(5)), argv


def test_the_server_lets_a_right_command_line_through(server: ForkServer, tmp_path: Path) -> None:
    """Else every line of the table could be refused for a reason that is the server's own."""
    answer = server.ask(["train", "train.max_steps=1"], tmp_path)
    assert answer["torch"], answer
    assert answer["stderr"] == ""
    assert list(tmp_path.rglob("config.yaml"))


REAL = (
    "lr=1e-3",
    "model=gpt2_larg",
    "batch.total_batch_size=1e3",
    "optim.lr=nan",
    "world=ddp8 batch.total_batch_size=10000",
    "model.n_head=3 batch.total_batch_size=1000 schedule.warmup_ratio=1 data=text",
    "optim.lr=1e-3,2e-3",
    "-m optim.lr=1e-3,-1",
    "hydra.run.dirr=x",
)


@pytest.mark.parametrize("text", REAL)
def test_wrong_command_line_in_a_real_process(text: str, place: Place, tmp_path: Path) -> None:
    [case] = [case for case in TABLE if case.text == text]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gptexp", "train", *shlex.split(text)],
        cwd=tmp_path,
        env=place.env(),
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    wall_s = time.perf_counter() - start
    # -X importtime lists every module on stderr, the lines of gptexp stand between them.
    lines = done.stderr.splitlines(keepends=True)
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    stderr = "".join(line for line in lines if not line.startswith("import time:"))
    print(f"took {wall_s:.2f} s")  # shown when the test fails; no limit, since the machine may be busy
    assert "hydra" in imported
    assert "torch" not in imported
    check_refused(done.returncode, stderr, list(case.problems))
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
    assert place.untouched()


def test_a_run_directory_of_another_config_is_not_overwritten(server: ForkServer, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    run_dir.save_config(directory, compose(["optim.lr=1e-3"]))
    (directory / ".hydra").mkdir()
    (directory / ".hydra" / "config.yaml").write_text("what Hydra wrote\n")
    before = contents(directory)
    assert len(before) == 2

    answer = server.ask(["train", f"hydra.run.dir={directory}", "optim.lr=2e-3"], tmp_path)
    check_refused(answer["code"], answer["stderr"], [(str(directory), "optim.lr was 0.001, now 0.002")])
    assert contents(directory) == before


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
