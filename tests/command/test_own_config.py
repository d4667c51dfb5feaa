"""The user's own YAML files, from --config-dir or GPTEXP_CONF: all features of Hydra work, in each verb that composes.

These files are trusted, because the user gives their folder.
"""

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, ForkServer, runs, summary
from omegaconf import OmegaConf
from sweeps import compose_sweep

from gptexp.config.compose import compose, composition, hydra_engine
from gptexp.config.schema import Config
from gptexp.process.errors import ConfigError
from gptexp.storage import run_dir
from gptexp.sweep.cells import cell_name, command, fixed_arguments
from gptexp.sweep.space import params_as_overrides

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

KEYS = "optim: {lr: 1e-3}\ntrain: {max_tokens: 8192}\n"
PRIMARY = f"defaults:\n  - config\n  - _self_\n  - override model: small\n  - override optim: mine\n{KEYS}"
FILES = {
    "model/small.yaml": (
        "# @package _global_\nmodel: {n_layer: 3, n_head: 3, n_embd: 48, block_size: 64}\noptim: {lr: 0.003}\n"
    ),
    "optim/mine.yaml": "defaults: [adamw]\nlr: 2e-3\nbeta2: 0.99\n",
    "mine.yaml": PRIMARY,
    "experiment/same.yaml": f"# @package _global_\ndefaults: [override /model: small, override /optim: mine]\n{KEYS}",
    "experiment/places.yaml": "# @package _global_\nhydra:\n  run: {dir: mine}\n",
    "experiment/slurm.yaml": (
        "# @package _global_\ndefaults:\n  - override /hydra/launcher: submitit_slurm\n"
        "hydra:\n  launcher: {partition: gpu_long, timeout_min: 30}\n"
    ),
    "experiment/local.yaml": "# @package _global_\ndefaults:\n  - override /hydra/launcher: submitit_local\n",
    "experiment/optuna.yaml": (
        "# @package _global_\ndefaults:\n  - override /hydra/sweeper: optuna\n"
        "hydra:\n  mode: MULTIRUN\n  sweeper: {n_trials: 3}\n"
    ),
    "experiment/callback.yaml": (
        "# @package _global_\nhydra:\n  callbacks:\n"
        "    mine: {_target_: callback_of_mine.Trace, path: '${oc.env:TRACE}'}\n"
    ),
    "sweep/lists.yaml": (
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n"
        "      optim.lr: [1e-3, 2e-3]\n      train.seed: 1,2\n"
    ),
}
CALLBACK = """
from hydra.experimental.callback import Callback

class Trace(Callback):
    def __init__(self, path):
        self.path = path

    def _note(self, what):
        with open(self.path, "a") as file:
            print(what, file=file)

    def on_run_start(self, config, **kwargs):
        self._note("run start")

    def on_run_end(self, config, **kwargs):
        self._note("run end")

    def on_multirun_start(self, config, **kwargs):
        self._note("multirun start")

    def on_multirun_end(self, config, **kwargs):
        self._note("multirun end")
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The working directory, with `FILES` in conf/."""
    for name, text in FILES.items():
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def without(tiny: list[str], *keys: str) -> list[str]:
    return [option for option in tiny if not option.startswith(keys)]


def test_an_unknown_key_in_a_users_file_is_refused_in_one_line(gptexp: Gptexp, own: Path) -> None:
    (own / "conf" / "model" / "small.yaml").write_text("# @package _global_\nmodel: {n_layers: 3}\n")
    done = gptexp("plan", "--config-dir", "conf", "model=small")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "n_layers" in done.stderr


@pytest.mark.e2e
def test_a_validation_text_in_a_users_file_that_is_no_path_is_refused(own: Path) -> None:
    (own / "conf/experiment/texts.yaml").write_text("# @package _global_\ndata: {validation: {a: 3}}\n")
    with pytest.raises(ConfigError) as error:
        compose(["model=nano", "experiment=texts"], str(own / "conf"))
    assert error.value.code == "not-texts"


@pytest.mark.parametrize("override", ["override model", "override /model"])
def test_a_primary_config_of_ones_own_composes_as_an_experiment_does(own: Path, override: str) -> None:
    primary = PRIMARY.replace("override model", override)
    (own / "conf" / "mine.yaml").write_text(primary)
    mine = compose(["train.seed=2"], str(own / "conf"), "mine")
    assert (mine.model.n_layer, mine.optim.lr, mine.optim.beta2, mine.train.max_tokens) == (3, 1e-3, 0.99, 8192)
    assert mine == compose(["train.seed=2", "experiment=same"], str(own / "conf"))
    assert compose(["optim.lr=4e-3", "model=nano"], str(own / "conf"), "mine.yaml").optim.lr == 4e-3


@pytest.mark.e2e
def test_each_verb_takes_a_primary_config(gptexp: Gptexp, light_server: ForkServer, own: Path, corpus: Path) -> None:
    flags = ["-cd", "conf", "--config-name", "mine", "data=text", f"data.path={corpus}", "data.val_tokens=256"]
    for argv in (["plan", "--json"], ["train", "--dry-run", "--json"], ["prepare"]):
        done = gptexp(*argv, *flags)
        assert done.returncode == 0, done.stderr
        assert argv == ["prepare"] or json.loads(done.stdout)["lr"] == 1e-3
    for argv in (["train", "--cfg", "job"], ["train", "--help"]):
        assert "n_layer: 3\n" in light_server.ask([*argv, *flags], own)["stdout"]
    assert "conf/mine.yaml (1e-3)\n" in light_server.ask(["prepare", "--help", "optim.lr", *flags], own)["stdout"]
    for verb in (["prepare"], ["plan", "--models"]):
        refused = gptexp(*verb, "-cd", "conf", "-cn", "nope")
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "--config-name nope: conf/nope.yaml does not exist" in refused.stderr


def test_a_sweep_with_a_primary_config_has_the_cells_and_the_name_of_the_same_experiment(
    own: Path, corpus: Path
) -> None:
    folder, given = str(own / "conf"), ["optim.lr=1e-3,2e-3", "data=text", f"data.path={corpus}"]
    mine, same = compose_sweep(given, folder, "mine"), compose_sweep([*given, "experiment=same"], folder)
    names = [
        [cell_name(drafted.config, drafted.values, own) for drafted in grid.drafts if drafted.config is not None]
        for grid in (mine, same)
    ]
    assert names[0] == names[1]
    assert len(names[0]) == 2
    assert mine.drafts[0].compose().sweep.name == same.drafts[0].compose().sweep.name


def test_the_commands_of_a_sweep_name_the_users_files(own: Path) -> None:
    """Each command that gptexp prints must be accepted by gptexp."""
    folder = str(own / "conf")
    with hydra_engine(folder) as engine:
        given = ["optim.lr=1e-3,2e-3", "train.seed=3"]
        mine = composition(engine, given, folder, multirun=True, config_name="mine")
        plain = composition(engine, given, folder, multirun=True)
    flags = ["--config-dir", folder]
    assert command(plain) == ["train", "-m", *flags, *given]
    assert command(mine) == ["train", "-m", *flags, "--config-name", "mine", *given]
    assert fixed_arguments(mine) == [*flags, "--config-name", "mine", "train.seed=3"]


@pytest.mark.e2e
def test_a_run_and_a_sweep_from_a_primary_config(gptexp: Gptexp, tiny: list[str], own: Path) -> None:
    options = [*without(tiny, "optim.lr", "log.progress", "model"), "--config-dir", "conf", "-cn", "mine"]
    done = gptexp("train", *options, "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    assert "learning rate   0.001, from mine.yaml" in done.stderr + done.stdout
    assert run_dir.load_config(own / "out").model.n_layer == 3
    assert gptexp("report", "out").returncode == 0
    flags = f"--config-dir {own / 'conf'} --config-name mine"
    assert f"gptexp train {flags} hydra.run.dir=out" in (own / "out" / "report.html").read_text()
    done = gptexp("train", "-m", *options, "optim.lr=1e-3,2e-3", "sweep.name=s")
    assert done.returncode == 0, done.stderr
    sweep = json.loads((own / "outputs" / "s" / "sweep.json").read_text())
    assert shlex.join(sweep["commands"][0]).startswith(f"train -m {flags} ")
    again = gptexp(*sweep["commands"][0])
    assert "already completed" in again.stderr + again.stdout


def test_a_users_file_may_set_keys_of_its_own_group_only(own: Path) -> None:
    """Such a file needs no line with its package."""
    (own / "conf" / "sweep" / "named.yaml").write_text("name: mine\nparallel: 2\n")
    (own / "conf" / "model" / "small.yaml").write_text("n_layer: 3\n")
    config = compose(["sweep=named", "model=small"], str(own / "conf"))
    assert (config.sweep.name, config.sweep.parallel, config.model.n_layer) == ("mine", 2, 3)


@pytest.mark.e2e
def test_a_users_files_work_in_train_and_plan_and_extend_the_packaged_ones(gptexp: Gptexp, own: Path) -> None:
    shown = gptexp("train", "--cfg", "job", "--config-dir", "conf", "model=small", "optim=mine")
    planned = gptexp("plan", "--config-dir", "conf", "model=small", "optim=mine", "--json")
    assert yaml.safe_load(shown.stdout)["model"]["n_layer"] == 3, shown.stderr
    assert json.loads(planned.stdout)["lr"] == 2e-3, planned.stderr
    packaged, mine = compose(["data=stdlib"]).optim, compose(["optim=mine"], str(own / "conf")).optim
    assert (mine.lr, mine.beta2) == (2e-3, 0.99)
    assert (mine.name, mine.weight_decay) == (packaged.name, packaged.weight_decay)
    grid = compose_sweep(["hydra.mode=MULTIRUN", "optim=mine", "train.seed=1,2"], str(own / "conf"))
    assert [drafted.config.optim.beta2 for drafted in grid.drafts if drafted.config] == [0.99, 0.99]


def test_a_users_file_sets_the_run_directory(gptexp: Gptexp, tiny: list[str], own: Path) -> None:
    options = ["experiment=places", "optim=mine", "--config-dir", "conf"]
    done = gptexp("train", *without(tiny, "optim.lr"), *options)
    assert done.returncode == 0, done.stderr
    assert run_dir.load_config(own / "mine").optim.beta2 == 0.99
    assert summary(own / "mine")["status"] == "completed"


def test_a_users_sweep_file_may_list_its_values(own: Path) -> None:
    grid = compose_sweep(["sweep=lists"], str(own / "conf"))
    found = {(d.config.optim.lr, d.config.train.seed) for d in grid.drafts if isinstance(d.config, Config)}
    assert found == {(1e-3, 1), (1e-3, 2), (2e-3, 1), (2e-3, 2)}
    assert grid.of == 4
    lists = OmegaConf.create({"train.eval_tasks": ["hellaswag", "piqa"], "log.tags": ["a", "b"], "train.seed": [1, 2]})
    keys = ["train.eval_tasks=['hellaswag', 'piqa']", "log.tags=['a', 'b']", "train.seed=1,2"]
    assert params_as_overrides(lists) == keys  # a key with a list has it


def test_a_users_file_selects_slurm_and_its_partition(gptexp: Gptexp, own: Path) -> None:
    """Checks the composed config. sweep/test_jobs.py submits such jobs."""
    shown = gptexp("train", "--cfg", "hydra", "experiment=slurm", "--config-dir", "conf")
    assert shown.returncode == 0, shown.stderr
    launcher = yaml.safe_load(shown.stdout)["hydra"]["launcher"]
    assert (launcher["cluster"], launcher["partition"], launcher["timeout_min"]) == ("slurm", "gpu_long", 30)
    assert launcher["signal_delay_s"] == 120  # from the packaged file; the user's file does not set it


@pytest.mark.e2e
def test_a_slurm_sweep_on_a_machine_without_slurm_is_refused(gptexp: Gptexp, tiny: list[str], own: Path) -> None:
    options = ["-m", "experiment=slurm", "optim.lr=1e-3,2e-3", "--config-dir", "conf"]
    assert gptexp("prepare", *tiny).returncode == 0  # otherwise a line says that the text was tokenised
    refused = gptexp("train", *without(tiny, "optim.lr"), *options, env={"PATH": "/nowhere"})
    assert refused.returncode == 2, refused.stderr
    assert all(line.startswith("gptexp: ") for line in refused.stderr.splitlines())
    assert not (own / "outputs").exists()


@pytest.mark.parametrize(
    ("experiment", "given", "cells"),
    [
        pytest.param("optuna", ["optim.lr=interval(1e-3,1e-2)"], 3, marks=pytest.mark.e2e),
        pytest.param("local", ["optim.lr=1e-3,2e-3"], 2, marks=pytest.mark.slow),
        pytest.param("same", ["sweep=lists", "train.max_tokens=128"], 4, marks=pytest.mark.slow),
    ],
)
def test_a_sweep_from_a_users_file_trains_its_cells(
    gptexp: Gptexp, tiny: list[str], own: Path, experiment: str, given: list[str], cells: int
) -> None:
    if needed := {"optuna": "optuna", "local": "submitit"}.get(experiment):
        pytest.importorskip(needed, reason=f"no {needed}")
    options = ["-m", f"experiment={experiment}", *given, "sweep.name=mine", "--config-dir", "conf"]
    done = gptexp("train", *without(tiny, "optim.lr"), *options)
    assert done.returncode == 0, done.stderr
    trained = runs(own / "outputs" / "mine")
    assert [summary(cell)["status"] for cell in trained] == ["completed"] * cells
    assert (own / "outputs" / "mine" / ".submitit").exists() == (experiment == "local")


@pytest.fixture
def trace(own: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the user's callback writes. The environment lets Hydra find the callback."""
    (own / "callback_of_mine.py").write_text(CALLBACK)
    monkeypatch.setenv("TRACE", str(own / "trace"))
    monkeypatch.setenv("PYTHONPATH", f"{own}:{ROOT}")
    return own / "trace"


@pytest.mark.parametrize(
    ("verb", "swept", "lines"),
    [
        pytest.param("train", [], ["run start", "run end"], marks=pytest.mark.e2e),
        pytest.param("train", ["-m", "train.seed=1,2"], ["multirun start", "multirun end"], marks=pytest.mark.slow),
        pytest.param("plan", [], [], marks=pytest.mark.e2e),  # nothing runs
    ],
)
def test_a_users_callback_is_called_for_what_runs(
    start: Callable[..., "subprocess.Popen[str]"], tiny: list[str], trace: Path, verb: str, swept: list[str],
    lines: list[str],
) -> None:  # fmt: skip
    process = start(verb, *swept, *tiny, "experiment=callback", "--config-dir", "conf")
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    noted = trace.read_text().splitlines() if trace.exists() else []
    assert [*noted[:1], *noted[1:][-1:]] == lines


def test_gptexp_conf_replaces_the_packaged_conf_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(ROOT / "conf", conf)
    (conf / "optim" / "adamw.yaml").write_text("beta2: 0.9\n")
    monkeypatch.setenv("GPTEXP_CONF", str(conf))
    assert compose([]).optim.beta2 == 0.9


@pytest.mark.e2e
def test_a_run_resumes_without_the_files_that_it_was_composed_from(gptexp: Gptexp, tiny: list[str], own: Path) -> None:
    """A run directory is sufficient by itself."""
    options = ["experiment=places", "optim=mine", "--config-dir", "conf", "train.max_minutes=1e-6"]
    first = gptexp("train", *without(tiny, "optim.lr"), *options)
    assert first.returncode == 0, first.stderr
    assert summary(own / "mine")["status"] == "interrupted"
    shutil.rmtree(own / "conf")
    config = yaml.safe_load((own / "mine" / "config.yaml").read_text())
    config["train"]["max_minutes"] = None
    (own / "mine" / "config.yaml").write_text(yaml.safe_dump(config))
    done = gptexp("resume", "mine")
    assert done.returncode == 0, done.stderr
    assert summary(own / "mine")["status"] == "completed"
