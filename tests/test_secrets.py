"""What may not get into a run: secrets of the environment, and code that a file of somebody else's names."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from gptexp import run_dir
from gptexp.compose import compose
from gptexp.config import fields_of

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
CANARY = "canary-0123456789abcdef"


def holds_canary(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


@pytest.mark.parametrize("variable", ["WANDB_API_KEY", "HF_TOKEN", "my_password", "CLIENT_SECRET"])
@pytest.mark.parametrize("override", ["log.wandb.name={}", "log.wandb.tags=[a,{}]"])
def test_a_secret_in_a_value_is_refused_and_lands_in_no_file(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, variable: str, override: str
) -> None:
    """Whether it is pasted or taken from the environment by an interpolation."""
    for text in (CANARY, f"${{oc.env:{variable}}}"):
        refused = gptexp("train", *tiny, override.format(text), "hydra.run.dir=out", env={variable: CANARY})
        assert refused.returncode == 2, refused.stderr
        key = override.partition("=")[0]
        assert f"{key}: equals ${variable}, and would be saved with the run" in refused.stderr
        assert CANARY not in refused.stdout + refused.stderr
        assert holds_canary(tmp_path) == []


def test_a_run_keeps_the_environment_out_of_its_files(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    secrets = {"WANDB_API_KEY": CANARY, "HF_TOKEN": CANARY, "WANDB_MODE": "offline"}
    options = [*(o for o in tiny if not o.startswith("log=")), "log=offline", "log.progress=off"]
    done = gptexp("train", *options, "hydra.run.dir=out", env=secrets)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out" / "wandb").iterdir())
    assert holds_canary(tmp_path / "out") == []


def test_no_key_asks_for_a_secret() -> None:
    from gptexp.compose import SECRET
    from gptexp.config import Config

    names = [key.rpartition(".")[2] for key, _, _ in fields_of(Config())]
    assert [name for name in names if SECRET.fullmatch(name)] == []


def test_a_value_that_merely_holds_a_variable_is_no_secret(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TOKENIZERS_CACHE is no secret, and a path below it still less."""
    monkeypatch.setenv("TOKENIZERS_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "tok")
    (tmp_path / "tok.txt").write_text("text")
    assert compose([*tiny, f"data.path={tmp_path}/tok.txt", "log.wandb.name=my-tok"]).log.wandb.name == "my-tok"


REFUSED = re.compile(r"set by a file of --config-dir|a file names the values|below the working directory only")
HOSTILE = {
    "own override": (
        "# @package _global_\nhydra:\n  callbacks:\n    x: {_target_: builtins.open, file: SENTINEL, mode: w}\n"
        "  overrides:\n    hydra: ['+hydra.callbacks.x={_target_: builtins.open, file: SENTINEL, mode: w}']\n"
    ),
    "nested launcher": (
        "# @package _global_\nhydra:\n  launcher:\n    x: {_target_: builtins.open, file: SENTINEL, mode: w}\n"
    ),
    "nested sweeper": (
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n"
        "      optim.lr: {_target_: builtins.open, file: SENTINEL, mode: w}\n"
    ),
    "later": (
        "# @package _global_\nhydra:\n  callbacks:\n    gptexp:\n"
        "      _target_: '${hydra.sweeper.params.${hydra.job.name}}'\n      file: SENTINEL\n      mode: w\n"
        "  sweeper:\n    params: {app: gptexp.compose.CheckBeforeStart, train: builtins.open}\n"
    ),
    "output": "# @package _global_\nhydra:\n  output_subdir: ../other\n",
    "place": "# @package _global_\nhydra:\n  run: {dir: /tmp/elsewhere}\n  sweep: {dir: /tmp/elsewhere}\n",
    "callback": (
        "# @package _global_\nhydra:\n  callbacks:\n    x: {_target_: builtins.open, file: SENTINEL, mode: w}\n"
    ),
    "logging": (
        "# @package _global_\nhydra:\n  job_logging:\n    version: 1\n    filters:\n"
        "      x: {(): builtins.open, file: SENTINEL, mode: w}\n"
    ),
    "launcher": "# @package _global_\nhydra:\n  launcher: {_target_: os.system}\n",
    "sweeper": "# @package _global_\nhydra:\n  sweeper: {_target_: os.system}\n",
    "sampler": (
        "# @package _global_\nhydra:\n  sweeper:\n    seed: {_target_: pathlib.Path.mkdir, _args_: "
        "[{_target_: pathlib.Path, _args_: [SENTINEL]}]}\n"
    ),
    "env": "# @package _global_\nhydra:\n  job:\n    env_set: {LD_PRELOAD: SENTINEL}\n",
    "package": "# @package hydra.callbacks.x\n_target_: builtins.open\nfile: SENTINEL\nmode: w\n",
    "default": "# @package _global_\ndefaults:\n  - /experiment@hydra.callbacks.x: package\n",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("multirun", [False, True])
def test_a_folder_of_configs_brings_no_code(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, name: str, multirun: bool
) -> None:
    """Hydra would call what these name before any code of ours sees the config."""
    sentinel, folder = tmp_path / "sentinel", tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    for file, text in HOSTILE.items():
        (folder / f"{file}.yaml").write_text(text.replace("SENTINEL", str(sentinel)))
    grid = ["-m", "optim.lr=1e-3,2e-3"] if multirun else ["hydra.run.dir=out"]
    refused = gptexp("train", *tiny, f"experiment={name}", *grid, "--config-dir", "conf")
    assert refused.returncode == 2, refused.stderr
    assert REFUSED.search(refused.stderr)
    assert not sentinel.exists()
    if multirun:
        refused = gptexp("train", *tiny, "-m", f"experiment={name},gpt2_124m", "--config-dir", "conf")
        assert refused.returncode == 2, refused.stderr
        assert not sentinel.exists()
        refused = gptexp("plan", *tiny, f"experiment={name}", *grid, "--config-dir", "conf")
        assert refused.returncode == 2, refused.stderr
        assert not sentinel.exists()
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "outputs").exists()


def test_a_whole_conf_of_somebody_elses_brings_no_code(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    sentinel, conf = tmp_path / "sentinel", tmp_path / "conf"
    shutil.copytree(ROOT / "conf", conf)
    text = (conf / "config.yaml").read_text()
    call = f"  callbacks:\n    x: {{_target_: builtins.open, file: {sentinel}, mode: w}}\n"
    (conf / "config.yaml").write_text(text.replace("  callbacks:\n", call))
    refused = gptexp("train", *tiny, "hydra.run.dir=out", env={"GPTEXP_CONF": str(conf)})
    assert (refused.returncode, "hydra.callbacks: set by a file of" in refused.stderr) == (2, True), refused.stderr
    assert not sentinel.exists()


@pytest.mark.parametrize(
    "override", ["+hydra.job.env_set.API_KEY=abc", "hydra.job.env_copy=[HOME]", "hydra.job.name={}"]
)
def test_hydras_own_files_hold_no_secret_either(gptexp: Gptexp, tiny: list[str], tmp_path: Path, override: str) -> None:
    refused = gptexp("train", *tiny, override.format(CANARY), "hydra.run.dir=out", env={"HF_TOKEN": CANARY})
    assert refused.returncode == 2, refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_of_ones_own_may_choose_values_and_places(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\noptim: {lr: 1e-3}\nhydra:\n  run: {dir: mine}\n")
    done = gptexp("train", *(o for o in tiny if "optim.lr" not in o), "experiment=mine", "--config-dir", "conf")
    assert done.returncode == 0, done.stderr
    assert run_dir.load_config(tmp_path / "mine").optim.lr == 1e-3


@pytest.mark.parametrize("flag", ["--config-path", "--config-name"])
def test_the_primary_config_is_gptexps(gptexp: Gptexp, flag: str) -> None:
    refused = gptexp("train", flag, "x")
    assert (refused.returncode, "not supported; give a folder of groups with --config-dir" in refused.stderr) == (
        2,
        True,
    )


def test_names_do_not_lead_out_of_the_output_root(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    for name in ("..", "../x", "/tmp/x", "a/b", ".", "", "x" * 81, "a\\nb"):
        refused = gptexp("train", "-m", *tiny, f"sweep.name='{name}'", "optim.lr=1e-3,2e-3")
        assert refused.returncode == 2, (name, refused.stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_saved_run_is_not_code(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    """A stranger's run directory, given to every verb that reads one; each of its files by itself."""
    sentinel = tmp_path / "sentinel"
    call = f"{{_target_: os.system, command: 'touch {sentinel}'}}"
    files = {
        "config.yaml": f"model: {call}\nhydra: {{callbacks: {{x: {call}}}}}\n",
        "effective.json": json.dumps({"device": "cpu", "_target_": "os.system"}),
    }
    for name, text in files.items():
        run = tmp_path / name
        run_dir.save_config(run, compose(tiny))
        (run / ".hydra").mkdir()
        (run / ".hydra" / "config.yaml").write_text(f"hydra: {{callbacks: {{x: {call}}}}}")
        (run / name).write_text(text)
        for verb in ("resume", "sample", "evaluate"):
            refused = gptexp(verb, str(run))
            assert refused.returncode in (2, 4), refused.stderr
            assert "Traceback" not in refused.stderr
            assert not sentinel.exists()
