"""Commands that do not train: help, Hydra's information flags, tab completion, and wrong arguments."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ForkServer

import gptexp
from gptexp.cli import VERBS
from gptexp.config.compose import compose
from gptexp.storage import run_dir

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


def test_help_lists_the_verbs(light_server: ForkServer, tmp_path: Path) -> None:
    top = light_server.ask(["--help"], tmp_path)
    assert top["code"] == 0
    assert all(verb in top["stdout"] for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_prints_help_without_importing_torch(light_server: ForkServer, tmp_path: Path, verb: str) -> None:
    done = light_server.ask([verb, "--help"], tmp_path)
    assert done["code"] == 0, done
    assert "gptexp" in done["stdout"]
    assert not list(tmp_path.iterdir())


def test_the_help_of_train_lists_commands_groups_and_keys(light_server: ForkServer, tmp_path: Path) -> None:
    train = light_server.ask(["train", "--help"], tmp_path)["stdout"]
    for what in ("gptexp train model=gpt2", "-m optim.lr=", "model           bytes, from_init, gpt2", "n_embd: ",
                 "gptexp plan", "hydra/launcher  cells, ray, submitit_local"):  # fmt: skip
        assert what in train


@pytest.mark.parametrize("argv", [["--help"], ["train", "hydra.run.dir=n\u00eb"], ["status", "n\u00eb"]])
def test_a_locale_that_is_not_utf8_is_refused_with_one_line(tmp_path: Path, argv: list[str]) -> None:
    """Names of files would be other names there than for a process with UTF-8."""
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    refused = subprocess.run([sys.executable, "-m", "gptexp", *argv], cwd=tmp_path, env=env, capture_output=True)
    assert refused.returncode == 2
    assert refused.stderr.decode() == (
        "gptexp: config error: the encoding of this locale is ascii: set LC_ALL=C.UTF-8, or PYTHONUTF8=1\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_output_in_another_encoding_has_escapes(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "gptexp", "--help"], cwd=tmp_path, env=env, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"usage: gptexp VERB \\u2026" in done.stdout


def test_an_unknown_verb_is_refused_with_the_list_of_verbs(light_server: ForkServer, tmp_path: Path) -> None:
    wrong = light_server.ask(["trian"], tmp_path)
    assert wrong["code"] == 2
    assert "no such verb" in wrong["stderr"]
    assert all(verb in wrong["stderr"] for verb in VERBS)


def test_the_version_is_printed(light_server: ForkServer, tmp_path: Path) -> None:
    assert light_server.ask(["--version"], tmp_path)["stdout"] == f"gptexp {gptexp.__version__}\n"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--cfg job model=gpt2", ["n_embd: 768", "lr: 0.0006"]),
        ("--cfg job model=gpt2 --resolve", ["n_embd: 768"]),
        ("--cfg hydra", ["_target_: hydra_plugins.gptexp.GridSweeper"]),
        ("--cfg job -p optim", ["# @package optim"]),
        ("--info defaults", ["model/bytes"]),
        ("--info searchpath", ["conf"]),
        ("--hydra-help", ["Hydra"]),
    ],
)
def test_hydras_information_flags_print_and_create_no_file(
    light_server: ForkServer, tmp_path: Path, argv: str, said: list[str]
) -> None:
    done = light_server.ask(["train", *argv.split()], tmp_path)
    assert done["code"] == 0, done
    assert all(text in done["stdout"] for text in said), done["stdout"]
    assert not list(tmp_path.iterdir())


def test_cfg_with_a_wrong_override_is_refused(light_server: ForkServer, tmp_path: Path) -> None:
    done = light_server.ask(["train", "--cfg", "job", "lr=1"], tmp_path)
    assert done["code"] == 2
    assert done["stderr"].startswith("gptexp: config error: lr=1: unknown key 'lr'")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("sample NOSUCHDIR", "NOSUCHDIR"),
        ("evaluate NOSUCHDIR", "NOSUCHDIR"),
        ("resume NOSUCHDIR", "NOSUCHDIR"),
        ("report NOSUCHDIR", "NOSUCHDIR"),
        ("status NOSUCHDIR", "NOSUCHDIR"),
        ("ls NOSUCHDIR", "NOSUCHDIR"),
        ("ls . --where lr=1", "--where lr=1: unknown key 'lr'; did you mean 'optim.lr'?"),
        ("rm NOSUCHDIR --yes", "NOSUCHDIR"),
        ("rm . --yes", "nothing in it shows that it is a run or a sweep"),
        ("rm --unneeded-checkpoints NOSUCHDIR --yes", "NOSUCHDIR"),
        ("gc", "rm --unneeded-checkpoints"),
        ("compare NOSUCHDIR .", "NOSUCHDIR"),
        ("compare .", ".: a single run; give two or more to compare"),
        ("sample . --num-samples 0", "--num-samples=0"),
        ("sample . --temperature nan", "--temperature=nan"),
        ("resume . --world-size 0", "."),
        ("bench nosuch", "nosuch: no such workload"),
        ("bench --out .", "exists and is not an empty directory; give a new one"),
        ("bench --out 'a file'", "exists and is not an empty directory; give a new one"),
        ("report . --write-optim bad.txt", "--write-optim bad.txt: an option of the group optim must be a file"),
        ("plan -m 'sweep.name=${nosuch}' optim.lr=1e-3,2e-3", "sweep.name: Interpolation key 'nosuch' not found"),
        ("verify --world-size 3", "--world-size=3"),
        ("dashboard push --entity a/b", "--entity=a/b"),
        ("sample", "no run in outputs yet"),
        ("plan lr=1", "lr=1: unknown key 'lr'"),
        ("plan model.n_head=7", "not divisible by model.n_head=7"),
        ("plan -m lr=1,2", "lr=1,2: unknown key 'lr'"),
        ("prepare data=text", "data.path=null"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line_without_importing_torch(
    light_server: ForkServer, tmp_path: Path, argv: str, said: str
) -> None:
    (tmp_path / "a file").touch()
    done = light_server.ask(shlex.split(argv), tmp_path)
    assert not done["torch"], done
    assert done["code"] == 2, done
    [line] = done["stderr"].splitlines()
    assert line.startswith("gptexp: config error: ")
    assert said in line
    assert done["stdout"] == ""
    assert [path.name for path in tmp_path.iterdir()] == ["a file"]


@pytest.mark.parametrize("argv", ["sample a b", "evaluate --val-tokens x DIR", "verify --nothing", "status a b"])
def test_wrong_usage_exits_with_2_without_importing_torch(light_server: ForkServer, tmp_path: Path, argv: str) -> None:
    done = light_server.ask(argv.split(), tmp_path)
    assert (done["code"], done["torch"]) == (2, False), done
    assert "usage: gptexp" in done["stderr"]


@pytest.mark.e2e
@pytest.mark.parametrize("grid", [[], ["-m", "optim.lr=1e-3,2e-3"]], ids=["train", "train -m"])
def test_a_missing_gpu_is_refused_before_a_run_directory_is_created(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, grid: list[str]
) -> None:
    options = [option for option in tiny if not option.startswith(("train.device", "optim.lr"))]
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    done = gptexp("train", *options, "train.device=cuda", *grid, env=no_gpu)
    assert done.returncode == 2, done.stderr
    assert "train.device=cuda" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_resume_without_its_gpu_changes_nothing(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    config = compose([option for option in tiny if not option.startswith("train.device")])
    config.train.device, config.world.size = "cuda", 1
    run_dir.save_config(tmp_path / "run", config)
    before = (tmp_path / "run" / "config.yaml").stat().st_mtime_ns
    done = gptexp("resume", "run", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2, done.stderr
    assert "train.device=cuda" in done.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]
    assert (tmp_path / "run" / "config.yaml").stat().st_mtime_ns == before
