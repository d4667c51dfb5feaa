"""What the commands answer without training, from a checkout, an editable install and a wheel."""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from gptexp.cli import VERBS
from gptexp.compose import compose, conf_dir
from gptexp.config import Config, fields_of

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


def test_help_says_what_a_user_can_do(gptexp: Gptexp, tmp_path: Path) -> None:
    top = gptexp("--help")
    assert top.returncode == 0
    assert all(verb in top.stdout for verb in VERBS)
    for verb in VERBS:
        done = gptexp(verb, "--help")
        assert done.returncode == 0, verb
        assert "gptexp" in done.stdout
    train = gptexp("train", "--help").stdout
    for what in ("gptexp train model=gpt2", "-m optim.lr=", "model      gpt2, gpt2_large", "n_layer: 2", "gptexp plan"):
        assert what in train
    assert not list(tmp_path.iterdir())
    wrong = gptexp("trian")
    assert (wrong.returncode, "no such verb" in wrong.stderr) == (2, True)
    assert gptexp("--version").stdout.startswith("gptexp 0.")


def test_hydras_questions_are_answered_and_create_nothing(gptexp: Gptexp, tmp_path: Path) -> None:
    cfg = gptexp("train", "--cfg", "job", "model=gpt2")
    assert "n_embd: 768" in cfg.stdout
    assert "lr: 0.0006" in cfg.stdout
    assert gptexp("train", "--cfg", "job", "-p", "optim").stdout.startswith("# @package optim")
    assert "model/nano" in gptexp("train", "--info", "defaults").stdout
    assert gptexp("train", "--info", "searchpath").returncode == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "lr"),
    [
        (["model=gpt2"], 6e-4),
        (["model=gpt2_medium"], 3e-4),
        (["model=gpt3_175b", "batch=gpt3_3m"], 0.6e-4),
        (["experiment=gpt2_124m", "data=stdlib"], 6e-4),
        (["model=gpt2", "optim.lr=1e-3"], 1e-3),
        (["optim.lr=1e-3", "model=gpt2"], 1e-3),
    ],
)
def test_model_brings_its_learning_rate_and_the_command_line_wins(overrides: list[str], lr: float) -> None:
    assert compose(overrides).optim.lr == lr


def test_model_alone_changes_the_model_and_its_learning_rate_only() -> None:
    before, after = ({k: v for k, _, v in fields_of(compose(o))} for o in ([], ["model=gpt2"]))
    changed = {key for key in before if before[key] != after[key]}
    assert changed <= {"model.n_layer", "model.n_head", "model.n_embd", "model.block_size", "optim.lr"}


def test_every_named_choice_composes(corpus: Path) -> None:
    """Each file under conf/, alone; those that need text, time or ranks get them."""
    count = 0
    for path in sorted(conf_dir().glob("*/*.yaml")):
        group = path.parent.name
        extra = [f"data.path={corpus}"] if path.stem == "text" or group == "experiment" else []
        if group == "world" and path.stem.startswith("ddp"):
            extra += ["batch.micro_batch_size=1"]
        if group == "batch":
            extra += ["train.max_tokens=1_000_000_000"]
        if path.stem in ("gpt3", "gpt3_125m"):
            extra += ["train.max_tokens=300_000_000_000"]
        if group == "model" and path.stem.startswith("gpt"):
            extra += ["batch=gpt3_3m", "train.max_tokens=1_000_000_000"]
        if path.stem in ("shakespeare_50_steps", "tutorial"):
            extra = []
        if path.stem == "gpt2_124m":
            extra += ["world=ddp8"]
        if group != "sweep":
            config = compose([f"{group}={path.stem}", *extra])
            assert isinstance(config, Config)
            count += 1
    assert count > 35


def test_gpt2_on_eight_ranks_is_the_same_program() -> None:
    config = compose(["model=gpt2", "optim.lr=6e-4", "world=ddp8", "batch=gpt2", "train.max_tokens=10_000_000_000"])
    assert (config.world.size, config.optim.lr, config.batch.total_batch_size) == (8, 6e-4, 524_288)


def test_plan_prints_the_arithmetic_as_a_table_and_as_json(gptexp: Gptexp, tmp_path: Path, corpus: Path) -> None:
    args = ("experiment=gpt2_124m", f"data.path={corpus}", "world=ddp8")
    done = gptexp("plan", *args, "--json")
    assert done.returncode == 0, done.stderr
    p = json.loads(done.stdout)
    assert (p["parameters"], p["steps"], p["grad_accum_steps"]) == (124_475_904, 19_074, 4)
    assert p["tokens"] == 19_074 * 524_288
    assert p["flops_palm"] == pytest.approx(855.4e6 * p["tokens"], rel=1e-3)
    memory = p["memory_bytes"]
    assert memory["weights"] + memory["optimizer"] + memory["gradients"] == 16 * 124_475_904
    assert memory.pop("peak") == sum(memory.values())
    assert p["effective"]["reasons"]["micro_batch_size"] == "asked for"
    table = gptexp("plan", *args).stdout
    assert "124,475,904" in table
    assert "16 sequences × 1024 tokens × 8 ranks × 4 micro-steps" in table
    assert not list(tmp_path.iterdir())


def test_plan_knows_the_epochs_of_a_prepared_corpus(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    env = {"GPTEXP_CACHE": str(tmp_path / "cache")}
    assert json.loads(gptexp("plan", *tiny, "--json", env=env).stdout)["epochs"] is None
    prepared = gptexp("prepare", *tiny, env=env)
    assert prepared.returncode == 0, prepared.stderr
    directory = Path(prepared.stdout.splitlines()[-1])
    tokens = json.loads((directory / "manifest.json").read_text())["tokens"]
    p = json.loads(gptexp("plan", *tiny, "--json", env=env).stdout)
    assert p["corpus_tokens"] == ((tokens - 1) // 16 - 7) * 16
    assert p["epochs"] == 4 * 128 / p["corpus_tokens"]


def test_own_config_dir(gptexp: Gptexp, tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "small.yaml").write_text(
        "# @package _global_\nmodel: {n_layer: 3, n_head: 3, n_embd: 48, block_size: 64}\noptim: {lr: 0.003}\n"
    )
    for verb in (("train", "--cfg", "job"), ("plan",)):
        done = gptexp(*verb, "--config-dir", "mine", "model=small")
        assert done.returncode == 0, done.stderr
    assert "0.003" in done.stdout
    (tmp_path / "mine" / "model" / "small.yaml").write_text("# @package _global_\nmodel: {n_layers: 3}\n")
    done = gptexp("plan", "--config-dir", "mine", "model=small")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "n_layers" in done.stderr


def test_tab_completion_of_hydra_verbs(tmp_path: Path) -> None:
    """What Hydra's bash function asks the console script, with the verb in the line."""
    env = {**os.environ, "COMP_LINE": "gptexp train model=gpt2_", "COMP_POINT": "24"}
    command = [sys.executable, "-m", "gptexp", "train", "-sc", "query=bash"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert set(done.stdout.split()) == {"model=gpt2_large", "model=gpt2_medium", "model=gpt2_xl"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "gptexp"
    ignore = shutil.ignore_patterns(".git", "outputs", "__pycache__", ".venv*", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=180)
    [path] = out.glob("*.whl")
    return path


def test_wheel_holds_conf_and_ranks(wheel: Path) -> None:
    import zipfile

    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {str(p.relative_to(ROOT)) for p in (ROOT / "conf").rglob("*.yaml")}
    assert {f"gptexp/{name}" for name in shipped} <= names
    assert "gptexp/data/gpt2.tiktoken" in names
    assert not [n for n in names if n.startswith(("tests/", "conf/", "launch/"))]


@pytest.mark.parametrize("editable", [False, True])
def test_installed_elsewhere_it_trains(wheel: Path, tmp_path: Path, editable: bool, tiny: list[str]) -> None:
    """In a virtual environment of its own (the test's packages shared), far from the checkout."""
    venv.create(tmp_path / "env", with_pip=False)
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    installer = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site)]
    if editable:
        (site / "gptexp.pth").write_text(f"{ROOT}\n")
    else:
        subprocess.run([*installer, str(wheel)], check=True, timeout=120)
    shared = next(p for p in map(Path, sys.path) if (p / "hydra").is_dir())
    (site / "shared.pth").write_text(f"{shared}\n")
    (tmp_path / "work").mkdir()
    python = str(tmp_path / "env" / "bin" / "python")
    where = subprocess.run(
        [python, "-c", "import gptexp, gptexp.compose as c; print(gptexp.__file__, c.conf_dir(), sep='\\n')"],
        cwd=tmp_path / "work", capture_output=True, text=True, check=True, timeout=60,
    ).stdout.splitlines()  # fmt: skip
    root = str(ROOT) if editable else str(site)
    assert all(path.startswith(root) for path in where)
    command = [python, "-m", "gptexp", "train", *tiny, "train.max_steps=1", "world.size=2"]
    done = subprocess.run(command, cwd=tmp_path / "work", capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "completed after 1 steps" in done.stdout
