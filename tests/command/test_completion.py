"""Tab completion: verbs, flags, directories of runs and sweeps, and Hydra's keys and options."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT, ForkServer

from gptexp.cli import VERBS
from gptexp.command.arguments import module_of
from gptexp.command.completion import NOT_FOR_USERS, candidates
from gptexp.command.hydra_main import train_parser
from gptexp.config.schema import Config
from gptexp.model.gpus import GPUS
from gptexp.storage import run_dir


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with runs, a sweep of one cell, and folders that are neither."""
    monkeypatch.chdir(tmp_path)
    for name in ("outputs/day/run", "outputs/grid/lr=1e-3,seed=2", "mine/run", "mine/a name", "mine/.hidden"):
        run_dir.save_config(tmp_path / name, Config())
    (tmp_path / "outputs" / "grid" / "sweep.json").write_text("{}")
    (tmp_path / "outputs" / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("gptexp re", ["report", "resume"]),
        ("gptexp report ", ["outputs/day/run", "outputs/grid", "outputs/grid/lr=1e-3,seed=2", "mine/run"]),
        ("gptexp resume ", ["outputs/day/run", "outputs/grid/lr=1e-3,seed=2", "mine/run"]),
        ("gptexp sample --top-k 3 out", ["outputs/day/run", "outputs/grid", "outputs/grid/lr=1e-3,seed=2"]),
        ("gptexp status outputs/g", ["outputs/grid", "outputs/grid/lr=1e-3,seed=2"]),
        ("gptexp watch ./mine/", ["./mine/run"]),
        ("gptexp report --wr", ["--write-optim"]),
        ("gptexp watch --", ["--help", "--port"]),
        ("gptexp compare mine/run outputs/g", ["outputs/grid", "outputs/grid/lr=1e-3,seed=2"]),
        ("gptexp compare --", ["--help", "--json", "--objective", "--output"]),
        ("gptexp ls --status ru", ["running"]),
        ("gptexp ls --sort l", ["loss", "lr"]),
        ("gptexp verify --device ", ["auto", "cpu", "cuda"]),
        ("gptexp ls --json mi", ["mine/run"]),
        ("gptexp sample --top-k ", []),
        ("gptexp train --dr", ["--dry-run"]),
        ("gptexp train model=nano --ta", ["--tag"]),
        ("gptexp train --config-n", ["--config-name"]),
        ("gptexp train --cfg ", None),
        ("gptexp plan --t", ["--tag", "--time"]),
        ("gptexp plan --multi", ["--multirun"]),
        ("gptexp plan device=a", ["device=a100"]),
        ("gptexp plan dev", [f"device={name}" for name in GPUS]),
        ("gptexp dashboard ", ["push"]),
        ("gptexp prepare --v", ["--verify"]),
        ("gptexp train --nosuch", []),
        ("gptexp bench ", []),
        ("gptexp coordcheck --w", ["--widths"]),
        ("gptexp nosuch ", []),
    ],
)
def test_verbs_flags_and_directories_are_offered(folder: Path, line: str, found: list[str] | None) -> None:
    assert candidates(line, VERBS) == (None if found is None else sorted(found))


@pytest.mark.parametrize("verb", VERBS)
def test_every_flag_of_a_verb_is_offered(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that its help names, and of train also Hydra's, which are not in its help."""
    offered = candidates(f"gptexp {verb} --", VERBS)
    with suppress(SystemExit):
        module_of(verb).main(["--help"])
    named = {*re.findall(r"(?<![\w-])--[a-z][\w-]+", capsys.readouterr().out)} - {"--nproc-per-node", "--multi"}
    assert offered is not None
    assert named <= {*offered}
    if verb == "train":
        hydras = {flag for flag in train_parser()._option_string_actions if flag.startswith("--")}
        assert {*offered} == named | hydras - {*NOT_FOR_USERS}


@pytest.mark.e2e
def test_every_verb_is_offered_and_completes_without_importing_torch(light_server: ForkServer, tmp_path: Path) -> None:
    offered = candidates("gptexp ", VERBS)
    assert offered is not None
    assert {*VERBS} < {*offered}
    for verb in VERBS:
        env = {**light_server.env, "COMP_LINE": f"gptexp {verb} "}
        done = light_server.ask(["-sc", "query=bash"], tmp_path, env)
        assert (done["code"], done["stderr"], done["torch"]) == (0, "", False), verb
        assert (" model= " in done["stdout"]) == (verb in ("train", "tune", "plan", "prepare", "coordcheck")), verb


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("gptexp train model=gpt2_", ["model=gpt2_large", "model=gpt2_medium", "model=gpt2_xl"]),
        ("gptexp plan -m optim=adamw optim.l", ["optim.lr="]),
        (
            "gptexp train --dry-run --tag a --note=b -m model=gpt2_",
            ["model=gpt2_large", "model=gpt2_medium", "model=gpt2_xl"],
        ),
        ("gptexp plan --json --time optim=adamw optim.l", ["optim.lr="]),
        ("gptexp prepare data=s", ["data=shakespeare", "data=shakespeare_char", "data=stdlib"]),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_hydra_completes_overrides(
    light_server: ForkServer, tmp_path: Path, line: str, found: list[str], shell: str
) -> None:
    done = light_server.ask(["-sc", f"query={shell}"], tmp_path, {**light_server.env, "COMP_LINE": line})
    assert done["stdout"].split() == found, done["stderr"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("gptexp train --config-dir my model=small", ["model=small"]),
        ("gptexp plan model=small -cd my --config-name=mine optim.lr", ["optim.lr="]),
        ("gptexp train -cd=my -cn mine optim.lr=", ["optim.lr=0.25"]),
    ],
)
def test_files_of_ones_own_are_completed(light_server: ForkServer, tmp_path: Path, line: str, found: list[str]) -> None:
    (tmp_path / "my" / "model").mkdir(parents=True)
    (tmp_path / "my" / "model" / "small.yaml").write_text("n_layer: 3\n")
    (tmp_path / "my" / "mine.yaml").write_text("defaults: [config, _self_]\noptim: {lr: 0.25}\n")
    done = light_server.ask(["-sc", "query=bash"], tmp_path, {**light_server.env, "COMP_LINE": line})
    assert (done["stdout"].split(), done["stderr"]) == (found, "")


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_tab_key_completes_in_bash(folder: Path) -> None:
    script = folder / "bin" / "gptexp"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom gptexp.cli import main\nmain()\n")
    script.chmod(0o755)
    env = {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    terminal, shell = pty.openpty()
    bash = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], stdin=shell, stdout=shell, stderr=shell, env=env, close_fds=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        typed(
            terminal, "PS1='$ '; unset HISTFILE; eval \"$(gptexp -sc install=bash)\"; echo instal''led\n", "installed"
        )
        typed(terminal, "gptexp rep\t", "report")
        typed(terminal, " mi\t", "mine/run")
        typed(terminal, "\x01echo \n", "\ngptexp report mine/run")
        typed(terminal, "gptexp train model=gpt2_x\t", "model=gpt2_xl")
    finally:
        bash.kill()
        bash.wait()
        os.close(terminal)
        os.close(shell)


def typed(terminal: int, keys: str, expected: str) -> None:
    """Type `keys`, and wait until the terminal has shown `expected`."""
    os.write(terminal, keys.encode())
    shown, deadline = "", time.monotonic() + 60
    while expected not in shown.replace("\r", ""):
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
