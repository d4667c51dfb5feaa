"""Wrong command lines of `gptexp train`: one line for each problem, exit code 2, nothing created.

The command lines, and the codes of their problems, are in config_errors.txt. All are checked in this process, by the
function that `gptexp train` calls. About twenty are also run as real processes, which must not import torch.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NoReturn

import pytest
from conftest import ROOT, ForkServer
from refusals import problems_in

from gptexp.command.hydra_main import hydra_main
from gptexp.config.compose import compose
from gptexp.config.overrides import override_problems
from gptexp.config.paths import packaged_conf
from gptexp.config.rules import problems
from gptexp.config.schema import Config, every_key, field_problem, fields_of, fits_type
from gptexp.process.errors import Problem
from gptexp.process.terminal import report_errors
from gptexp.storage import run_dir

TABLE_FILE = Path(__file__).with_name("config_errors.txt")


@dataclass(frozen=True)
class Case:
    """A wrong command line. `problems`: the code of each, with what its line begins with and names."""

    line: int  # in config_errors.txt
    text: str  # as typed into a shell
    e2e: bool
    problems: tuple[tuple[str, ...], ...]


def is_sweep(text: str) -> bool:
    return text.startswith(("-m ", "--multirun ", "sweep=", "hydra.mode=")) or " sweep=" in text


def read_table() -> list[Case]:
    cases: list[Case] = []
    tier, text = "default", ""
    for number, line in enumerate(TABLE_FILE.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("#tier "):
            tier = line.removeprefix("#tier ")
            assert tier in ("default", "e2e"), f"line {number}: no such tier"
        if not line or line.startswith("#"):
            continue
        before, arrow, problems = line.partition("  =>  ")
        text = (before.strip() and before) or text
        if arrow:
            # A sweep composes each of its cells, which takes up to a second. `REAL` has sweeps in the default tier.
            e2e = tier == "e2e" or is_sweep(text)
            cases.append(Case(number, text, e2e, tuple(tuple(part.split()) for part in problems.split(" | "))))
    return cases


TABLE = read_table()

# Wrong files of a user, for `--config-dir @CONF`.
FILES = {
    "experiment/unknown_key.yaml": "# @package _global_\noptim:\n  learning_rate: 1e-3\n",
    "experiment/wrong_type.yaml": "# @package _global_\nmodel:\n  n_layer: four\n",
    "experiment/out_of_range.yaml": "# @package _global_\noptim:\n  lr: -1\nmodel:\n  n_head: 3\n",
    "experiment/no_model.yaml": "# @package _global_\ndefaults:\n  - override /model: gpt5\n",
    "experiment/no_yaml.yaml": "# @package _global_\nmodel: [1\n",
    "experiment/no_package.yaml": "# My recipe.\n\noptim:\n  lr: 1e-3\n# @package _global_\n",
    "model/no_package.yaml": "model:\n  n_layer: 3\n",
    "sweep/no_package.yaml": "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      optim.lr: 1e-3,2e-3\n",
    "experiment/yaml_bool.yaml": "# @package _global_\ntrain:\n  compile: off\n",  # YAML 1.1: off is false
    "experiment/options_of_optuna.yaml": "# @package _global_\nhydra:\n  sweeper: {n_trials: 3}\n",
    "experiment/options_of_slurm.yaml": "# @package _global_\nhydra:\n  launcher: {partition: gpu}\n",
    "experiment/lost_callback.yaml": (
        "# @package _global_\nhydra:\n  callbacks:\n    mine: {_target_: nosuch.Callback}\n"
    ),
    "alone.yaml": "defaults: [_self_, {model: gpt2}]\noptim: {lr: 1e-3}\n",
    "early.yaml": "defaults: [_self_, config]\n",
    "no_yaml.yaml": "defaults: [config\n",
    "no_key.yaml": "defaults: [config, _self_]\noptim: {learning_rate: 1}\n",
    "config.yaml": "defaults: [config, _self_]\n",
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

    def check_refused(self, case: Case, code: int, stderr: str) -> None:
        check_refused(code, stderr, [tuple(map(self.fill, words)) for words in case.problems])

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


def is_of(problem: Problem, words: tuple[str, ...]) -> bool:
    """Whether a problem has the code that is the first of `words`, and its line has each of the others as a word."""
    code, *names = words
    return problem.code == code and all(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", problem) for name in names)


def check_refused(code: int, stderr: str, expected: list[tuple[str, ...]]) -> None:
    """Check for exit code 2, and for exactly one line on stderr for each expected problem."""
    assert code == 2, stderr
    printed = problems_in(stderr)
    assert printed
    for words in expected:
        assert any(is_of(problem, words) for problem in printed), f"no line is of {words}\n{stderr}"
    for problem in printed:
        assert any(is_of(problem, words) for words in expected), f"not in the table: {problem} [{problem.code}]"
    # A problem that cells of a grid share may be printed for two or three of them.
    assert len(printed) <= 3 * len(expected), stderr


def test_the_table_has_no_duplicates_and_each_code_of_the_rules() -> None:
    assert len({tuple(shlex.split(case.text)) for case in TABLE}) == len(TABLE)
    assert sum(not case.e2e for case in TABLE) >= 200
    tested = {words[0] for case in TABLE for words in case.problems}
    for module in ("rules", "overrides"):
        source = (ROOT / f"gptexp/config/{module}.py").read_text()
        codes = set(re.findall(r'(?:Problem|refuse|_refusal)\((?:cfg, [^"]*)?(?:"[\w.]+", )?"([a-z-]+)"', source))
        assert len(codes) > 10
        elsewhere = {"secret", "needs-own-blocks", "package-missing"}  # test_secrets.py, test_parts.py; by luck
        assert codes - tested <= elsewhere


KEYS = {key: f for key, f, _, _ in every_key()}
# A value of each kind that breaks a rule of some key.
BAD_VALUES = (0, -1, 2, 1.5, float("nan"), 2**63, "..", "a b", " ", [""], {"project": "a"}, {"a b": 1})


@pytest.mark.parametrize("key", KEYS)
def test_each_key_refuses_a_value_of_another_type_and_one_that_breaks_its_rule(key: str) -> None:
    field, rules = KEYS[key], {"rule", "choices"} & KEYS[key].metadata.keys()
    if not re.search("Any|dict", str(field.type)):
        [problem] = override_problems([f"{key}={{a:{{b:1}}}}"], False, [packaged_conf()])
        assert problem.code in ("wrong-type", "not-a-choice")
        assert problem.startswith(f"{key}=")
    assert not rules or any(field_problem(key, field, value) for value in BAD_VALUES if fits_type(value, field.type))


def test_a_rule_that_reads_an_invalid_key_says_nothing_more() -> None:
    for key, field, default in fields_of(Config()):
        for value in BAD_VALUES:
            if fits_type(value, field.type) and (problem := field_problem(key, field, value)):
                cfg = Config()
                *section, name = key.split(".")
                setattr(attrgetter(".".join(section))(cfg), name, value)
                assert problems(cfg, 1) == [problem], f"default {default}"


def trained(*_: object) -> NoReturn:
    raise AssertionError("the command line was not refused")


CASES = [
    pytest.param(case, id=f"{case.line}:{case.text[:60]}", marks=pytest.mark.e2e if case.e2e else ()) for case in TABLE
]


@pytest.mark.e2e
@pytest.mark.parametrize("case", CASES)
def test_a_wrong_command_line_is_refused_with_a_line_for_each_problem(
    case: Case, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")  # the test restores the variable, which gptexp sets
    for name in ("HOME", "GPTEXP_CACHE"):
        monkeypatch.setenv(name, place.env()[name])
    monkeypatch.setattr(sys, "argv", ["gptexp train", *shlex.split(place.fill(case.text))])
    with pytest.raises(SystemExit) as end, report_errors():
        sys.exit(hydra_main(train=trained, begin_cell=trained, launcher_world_size=None))
    said = capsys.readouterr()
    assert isinstance(end.value.code, int)
    place.check_refused(case, end.value.code, said.err)
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []
    assert place.untouched()


def test_a_refusal_takes_less_than_a_second_of_cpu(server: ForkServer, tmp_path: Path) -> None:
    """Imports are not counted. One of five attempts is enough, because the machine may be busy."""
    for argv in (["lr=1e-3"], ["optim.lr=-1"], ["-m", "optim.lr=1e-3,-1"]):
        assert any(server.ask(["train", *argv], tmp_path)["cpu_s"] < 1 for _ in range(5)), argv


def test_a_valid_command_line_is_accepted(server: ForkServer, tmp_path: Path) -> None:
    """Without this, the table would pass if every command line were refused."""
    answer = server.ask(["train", "train.max_steps=1"], tmp_path)
    assert answer["torch"], answer
    assert answer["stderr"] == ""
    assert list(tmp_path.rglob("config.yaml"))


# One command line of each kind: a group, a key, a type, a range, a rule between keys, a path, a sweep, a file of the
# user, Hydra's own keys and flags.
REAL = (
    "lr=1e-3",
    "model=gpt2_larg",
    "~optim.lr",
    "model=nano batch.total_batch_size=1e3",
    "optim.lr=nan",
    "optim.name=AdamW",
    "model=nano model.n_head=3",
    "model=nano world=ddp8 batch.total_batch_size=10000",
    "model=nano model.n_head=3 batch.total_batch_size=1000 schedule.warmup_ratio=1 data=text",
    "data=text data.path=nope.txt",
    "sweep.name=..",
    "optim.lr=1e-3,2e-3",
    "-m optim.lr=1e-3,-1",
    "sweep=batch_size batch.micro_batch_size=32",
    "sweep=batch_size model=nano batch.ramp_from_tokens=2048 batch.ramp_tokens=1e5",
    "-m hydra/sweeper=random 'optim.lr=interval(3,1)'",
    "-m hydra/sweeper=optuna data.val_tokens=0 optim.lr=1e-3,2e-3",
    "--config-dir @CONF experiment=unknown_key",
    "--config-dir @CONF experiment=no_package",
    "--config-dir @CONF experiment=no_yaml",
    "hydra.run.dirr=x",
    "hydra.run.dir=@TEXT/x",
    "--config-name nope",
    "--info foo",
)


@pytest.mark.e2e
@pytest.mark.parametrize("text", REAL)
def test_a_wrong_command_line_imports_no_torch_and_creates_no_file(
    text: str, server: ForkServer, place: Place, tmp_path: Path
) -> None:
    [case] = [case for case in TABLE if case.text == text]
    answer = server.ask(["train", *shlex.split(place.fill(text))], tmp_path)
    assert not answer["torch"], f"it imported torch:\n{answer['stdout']}{answer['stderr']}"
    place.check_refused(case, answer["code"], answer["stderr"])
    assert answer["stdout"] == ""
    assert list(tmp_path.iterdir()) == []
    assert place.untouched()


@pytest.mark.e2e
@pytest.mark.parametrize("text", REAL[:: len(REAL) // 3], ids=lambda text: text[:40])
def test_a_new_interpreter_prints_the_same_refusal_as_the_fork_server(text: str, place: Place, tmp_path: Path) -> None:
    [case] = [case for case in TABLE if case.text == text]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gptexp", "train", *shlex.split(place.fill(text))],
        cwd=tmp_path,
        env=place.env(),
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    # -X importtime prints a line for each module to stderr, between the lines of gptexp.
    lines = done.stderr.splitlines(keepends=True)
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    stderr = "".join(line for line in lines if not line.startswith("import time:"))
    assert "hydra" in imported
    assert "torch" not in imported
    place.check_refused(case, done.returncode, stderr)
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
    check_refused(answer["code"], answer["stderr"], [("config", str(directory), "optim.lr", "0.001", "0.002")])
    assert contents(directory) == before


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("argv", "made", "key"),
    [
        (["hydra.run.dir=there"], "there/cell", "hydra.run.dir=there"),
        (["hydra.run.dir=there/x"], "there", "hydra.run.dir=there/x"),
        (["hydra.run.dir=sweep/a/x"], "sweep/cell", "hydra.run.dir=sweep/a/x"),
        (["-m", "optim.lr=1e-3,2e-3", "hydra.sweep.dir=there"], "there", "hydra.sweep.dir=there"),
        (["sweep=seeds", "sweep.name=x"], "outputs/x", "hydra.sweep.dir=outputs/x"),
    ],
)
def test_runs_and_sweeps_are_not_mixed_in_a_folder(
    server: ForkServer, tmp_path: Path, argv: list[str], made: str, key: str
) -> None:
    run_dir.save_config(tmp_path / made, compose([]))
    (tmp_path / made / ".lock").touch()
    if made == "sweep/cell":
        run_dir.write_json(tmp_path / "sweep" / run_dir.SWEEP, {"name": "sweep", "overrides": []})
    before = contents(tmp_path)
    answer = server.ask(["train", *argv], tmp_path)
    assert not answer["torch"]
    check_refused(answer["code"], answer["stderr"], [("config", key)])
    assert contents(tmp_path) == before


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
