"""What the commands answer without training: help, Hydra's questions, tab completion, refusals of wrong names."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ForkServer

from gptexp.cli import VERBS

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server whose children end where they import torch."""
    home = tmp_path_factory.mktemp("home")
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    with ForkServer(env={**kept, "HOME": str(home), "GPTEXP_CACHE": str(home / "cache")}) as server:
        yield server


def test_help_lists_the_verbs(server: ForkServer, tmp_path: Path) -> None:
    top = server.ask(["--help"], tmp_path)
    assert top["code"] == 0
    assert all(verb in top["stdout"] for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_answers_help_without_torch(server: ForkServer, tmp_path: Path, verb: str) -> None:
    done = server.ask([verb, "--help"], tmp_path)
    assert done["code"] == 0, done
    assert "gptexp" in done["stdout"]
    assert not list(tmp_path.iterdir())


def test_the_help_of_train_shows_commands_groups_and_keys(server: ForkServer, tmp_path: Path) -> None:
    train = server.ask(["train", "--help"], tmp_path)["stdout"]
    for what in ("gptexp train model=gpt2", "-m optim.lr=", "model           gpt2, gpt2_large", "n_layer: 2",
                 "gptexp plan", "hydra/launcher  cells, submitit_local"):  # fmt: skip
        assert what in train


def test_an_unknown_verb_is_refused_with_the_list_of_verbs(server: ForkServer, tmp_path: Path) -> None:
    wrong = server.ask(["trian"], tmp_path)
    assert wrong["code"] == 2
    assert "no such verb" in wrong["stderr"]
    assert all(verb in wrong["stderr"] for verb in VERBS)


def test_the_version_is_printed(server: ForkServer, tmp_path: Path) -> None:
    assert server.ask(["--version"], tmp_path)["stdout"].startswith("gptexp 0.")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--cfg job model=gpt2", ["n_embd: 768", "lr: 0.0006"]),
        ("--cfg job model=gpt2 --resolve", ["n_embd: 768"]),
        ("--cfg hydra", ["_target_: hydra_plugins.gptexp.GridSweeper"]),
        ("--cfg job -p optim", ["# @package optim"]),
        ("--info defaults", ["model/nano"]),
        ("--info searchpath", ["conf"]),
        ("--hydra-help", ["Hydra"]),
    ],
)
def test_hydra_answers_its_questions_and_creates_nothing(
    server: ForkServer, tmp_path: Path, argv: str, said: list[str]
) -> None:
    done = server.ask(["train", *argv.split()], tmp_path)
    assert done["code"] == 0, done
    assert all(text in done["stdout"] for text in said), done["stdout"]
    assert not list(tmp_path.iterdir())


def test_a_question_about_a_wrong_override_is_refused(server: ForkServer, tmp_path: Path) -> None:
    done = server.ask(["train", "--cfg", "job", "lr=1"], tmp_path)
    assert done["code"] == 2
    assert done["stderr"].startswith("gptexp: config error: lr=1: unknown key 'lr'")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("sample NOSUCHDIR", "NOSUCHDIR"),
        ("evaluate NOSUCHDIR", "NOSUCHDIR"),
        ("resume NOSUCHDIR", "NOSUCHDIR"),
        ("report NOSUCHDIR", "NOSUCHDIR"),
        ("status NOSUCHDIR", "NOSUCHDIR"),
        ("watch NOSUCHDIR", "NOSUCHDIR"),
        ("sample . --num-samples 0", "--num-samples=0"),
        ("sample . --temperature nan", "--temperature=nan"),
        ("resume . --world-size 0", "."),
        ("bench nosuch", "nosuch: no such workload"),
        ("bench --out .", ": not empty; give a new directory"),
        ("verify --world-size 3", "--world-size=3"),
        ("dashboard push --entity a/b", "--entity=a/b"),
        ("plan lr=1", "lr=1: unknown key 'lr'"),
        ("plan model.n_head=3", "not divisible by model.n_head=3"),
        ("plan -m lr=1,2", "lr=1,2: unknown key 'lr'"),
        ("prepare data=text", "data.path=null"),
    ],
)
def test_a_wrong_argument_is_refused_in_a_line_without_torch(
    server: ForkServer, tmp_path: Path, argv: str, said: str
) -> None:
    (tmp_path / "a file").touch()
    done = server.ask(argv.split(), tmp_path)
    assert not done["torch"], done
    assert done["code"] == 2, done
    [line] = done["stderr"].splitlines()
    assert line.startswith("gptexp: config error: ")
    assert said in line
    assert done["stdout"] == ""
    assert [path.name for path in tmp_path.iterdir()] == ["a file"]


@pytest.mark.parametrize("argv", ["sample", "evaluate --val-tokens x DIR", "verify --nothing", "status a b"])
def test_wrong_usage_is_exit_code_2_without_torch(server: ForkServer, tmp_path: Path, argv: str) -> None:
    done = server.ask(argv.split(), tmp_path)
    assert (done["code"], done["torch"]) == (2, False), done
    assert "usage: gptexp" in done["stderr"]


@pytest.mark.parametrize("grid", [[], ["-m", "optim.lr=1e-3,2e-3"]], ids=["train", "train -m"])
def test_a_gpu_that_is_missing_leaves_no_run_directory(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, grid: list[str]
) -> None:
    options = [option for option in tiny if not option.startswith(("train.device", "optim.lr"))]
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    done = gptexp("train", *options, "train.device=cuda", *grid, env=no_gpu)
    assert done.returncode == 2, done.stderr
    assert "train.device=cuda" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_tab_completion_completes_what_follows_the_verb(tmp_path: Path) -> None:
    """As Hydra's bash function calls the console script, with the verb in the line."""
    env = {**os.environ, "COMP_LINE": "gptexp train model=gpt2_", "COMP_POINT": "24"}
    command = [sys.executable, "-m", "gptexp", "train", "-sc", "query=bash"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert set(done.stdout.split()) == {"model=gpt2_large", "model=gpt2_medium", "model=gpt2_xl"}
