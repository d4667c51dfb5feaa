"""The cells of a sweep: composed as by Hydra, and with names by which the same or a wider grid finds them again."""

import itertools
import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT
from omegaconf import DictConfig, OmegaConf
from sweeps import compose_sweep

from gptexp import tune
from gptexp.config.compose import compose, composition, hydra_engine
from gptexp.config.search_flags import FLAGS, SWITCHES
from gptexp.data.characters import CharTokenizer
from gptexp.process.errors import ConfigError
from gptexp.sweep.cells import Compositions, cell_name, command, confounds, fixed_arguments, name_sweep
from gptexp.sweep.grid import compose_cells
from gptexp.sweep.space import swept_keys


def composed(*overrides: str) -> DictConfig:
    """The part of the config that is common to the cells of a multirun."""
    with hydra_engine() as engine:
        return composition(engine, overrides, None, multirun=True)


def sweep_name(*overrides: str) -> str:
    config = composed(*overrides)
    name_sweep(config)
    return str(config.sweep.name)


GRID = ("model=nano", "optim.lr=1e-3,2e-3", "train.seed=1,2")


@pytest.mark.parametrize(
    "again",
    [
        ("model=nano", "train.seed=2,1", "optim.lr=0.002,1e-3,4e-3"),  # a wider grid, in another order
        (*GRID, "log.progress=off", "world.size=2"),  # keys that decide no result
        ("model=nano", "optim.lr=choice(1e-3)", "train.seed=range(4)"),
    ],
)
def test_the_same_or_a_wider_grid_has_the_same_name(again: tuple[str, ...]) -> None:
    assert sweep_name(*again) == sweep_name(*GRID)


@pytest.mark.parametrize("other", [(*GRID, "model.n_layer=3"), GRID[:2], (*GRID, "optim.eps=1e-7,1e-8")])
def test_another_grid_has_another_name(other: tuple[str, ...]) -> None:
    assert sweep_name(*other) != sweep_name(*GRID)


def test_models_swept_in_another_order_are_the_same_sweep() -> None:
    """Each model file sets optim.lr, so optim.lr depends on which model is composed first."""
    assert sweep_name("model=nano,mini") == sweep_name("model=mini,nano")


def test_a_given_sweep_name_is_kept() -> None:
    assert sweep_name(*GRID, "sweep.name=mine") == "mine"


def test_a_value_on_the_command_line_replaces_the_swept_values_of_a_named_grid() -> None:
    assert swept_keys(composed("sweep=lr_x_batch")) == ["batch.total_batch_size", "optim.lr"]
    assert swept_keys(composed("sweep=lr_x_batch", "optim.lr=1e-3")) == ["batch.total_batch_size"]
    assert swept_keys(composed("sweep=lr", "data.path=[a,b]")) == ["optim.lr"]


def test_the_overrides_common_to_all_cells_are_kept_for_the_next_command() -> None:
    swept = ["model=nano,mini", "batch=laptop,gpt2", "train.eval_every=1,2"]
    fixed = ["model.bias=false", "batch.micro_batch_size=4", "train.eval_every_tokens=4096", "sweep.parallel=2"]
    said = fixed_arguments(composed(*swept, *fixed, "sweep.name=s", "hydra/sweeper=random", "hydra.sweeper.n_cells=3"))
    assert said == fixed
    assert fixed_arguments(composed("sweep=lr", "hydra.sweep.dir=x")) == ["sweep=lr", "hydra.sweep.dir=x"]


def test_the_command_of_a_search_is_one_of_tune_and_stands_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"budget": "20m", "within": "0.3", "from": "/a/law.yaml", "key": "optim.beta2", "range": "0.5..0.99",
              "seeds": "3"}  # fmt: skip
    flags = [text for flag in FLAGS for text in (f"--{flag}", values[flag])]
    others = ["optim=adamw,muon", "batch.total_batch_size=1024,2048", "hydra.sweep.dir=x", "hydra.sweeper.law=false"]
    stood_for: list[list[str]] = []
    monkeypatch.setattr("gptexp.tune.train", stood_for.append)
    tune.main([*flags, *(f"--{switch}" for switch in SWITCHES if switch != "law"), *others])
    said = command(composed(*stood_for[0][1:]))
    assert said[0] == "tune"
    assert {*flags, "--compare", "--yes", "--json", *others} == {*said[1:]}
    tune.main(said[1:])
    assert sorted(stood_for[0]) == sorted(stood_for[1])
    odd = ["hydra.sweeper.from='/a b.yaml'", "hydra.sweeper.budget=null", "hydra.sweeper.law=true"]
    said = command(composed("hydra/sweeper=tune", *odd))
    tune.main(said[1:])
    assert sorted(stood_for[2][1:]) == sorted(["hydra/sweeper=tune", *odd])
    assert command(composed("optim.lr=1,2"))[0] == "train"
    tune.main(["--from", "/a b,c=1.yaml"])
    assert composed(*stood_for[3][1:]).hydra.sweeper["from"] == "/a b,c=1.yaml"


def test_the_searches_on_the_pages_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    argvs: list[list[str]] = []
    monkeypatch.setattr("gptexp.tune.train", argvs.append)
    for page in ("README.md", "gptexp/sweep/README.md"):
        for line in re.findall(r"^gptexp tune ([^#…\n]+)(?:#.*)?$", (ROOT / page).read_text(), re.MULTILINE):
            tune.main(shlex.split(line))
    assert len(argvs) >= 3
    for argv in argvs:
        with hydra_engine() as engine:
            overrides = [text for text in argv if not text.startswith("-")]
            grid = compose_cells(engine, composition(engine, overrides, None, multirun=True))
        assert [problem for draft in grid.drafts for problem in draft.problems] == [], argv


def test_a_search_of_other_batch_sizes_has_the_same_name() -> None:
    one, two = (f"batch.total_batch_size={sizes}" for sizes in ("8192", "8192,16384"))
    assert sweep_name("hydra/sweeper=tune", one) == sweep_name("hydra/sweeper=tune", two)
    assert sweep_name(one, "optim.lr=1,2") != sweep_name(two, "optim.lr=1,2")


@pytest.fixture
def text(corpus: Path) -> list[str]:
    """A small corpus, because the name of a cell contains the hash of its tokens."""
    return ["data=text", f"data.path={corpus}"]


def test_different_spellings_of_a_value_give_one_cell_name(text: list[str]) -> None:
    names = {
        cell_name(compose([*text, f"optim.lr={lr}"]), {"optim.lr": lr}, Path("nowhere"))
        for lr in ("6e-4", "0.0006", "6.0e-4")
    }
    assert len(names) == 1
    assert names.pop().startswith("lr=0.0006-")


def test_a_cell_is_found_again_whether_a_key_was_swept_or_fixed(text: list[str], tmp_path: Path) -> None:
    """In both cases, the values that determine the result are the same."""
    config = compose([*text, "optim.lr=1e-3", "batch.total_batch_size=4096"])
    both = cell_name(config, {"batch.total_batch_size": "4096", "optim.lr": "1e-3"}, tmp_path)
    (tmp_path / both).mkdir()
    assert cell_name(config, {"optim.lr": "1e-3"}, tmp_path) == both
    assert cell_name(config, {}, tmp_path) == both
    assert cell_name(compose([*text, "optim.lr=2e-3"]), {"optim.lr": "2e-3"}, tmp_path) != both


def test_a_key_that_does_not_change_the_result_is_in_a_cell_name_only_if_swept(text: list[str], tmp_path: Path) -> None:
    alone = compose([*text, "optim.lr=1e-3", "batch.total_batch_size=4096"])
    on_two = compose([*text, "optim.lr=1e-3", "batch.total_batch_size=4096", "world.size=2"])
    name = cell_name(alone, {"optim.lr": "1e-3"}, tmp_path)
    assert cell_name(on_two, {"optim.lr": "1e-3"}, tmp_path) == name
    assert cell_name(on_two, {"optim.lr": "1e-3", "world.size": "2"}, tmp_path) != name


def test_the_place_of_a_tokenizers_file_is_not_part_of_a_cell_name(text: list[str], tmp_path: Path) -> None:
    names = set()
    for place, alphabet in (("a", "abc"), ("b", "abc"), ("c", "cab")):
        file = tmp_path / place / "mine.json"
        file.parent.mkdir()
        letters = "".join(sorted(set("abcdefghijklmnopqrstuvwxyz") - set(alphabet)))
        CharTokenizer(f"{alphabet}{letters}ABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?'\n-:;\"").save(file)
        config = compose([*text, f"data.tokenizer={file}", f"data.cache_dir={tmp_path}/cache"])
        names.add(cell_name(config, {"data.tokenizer": "mine.json"}, tmp_path))
    assert len(names) == 2
    assert all(name.startswith("tokenizer=mine.json-") for name in names)


def test_lengths_in_steps_give_a_warning_only_if_the_batch_size_is_swept() -> None:
    def warnings(*sizes: int) -> list[str]:
        configs = [
            compose([f"batch.total_batch_size={b}", "schedule.warmup_steps=5", "train.max_steps=9"]) for b in sizes
        ]
        return confounds(configs)

    assert [line.partition(" counts")[0] for line in warnings(4096, 8192)] == [
        "schedule.warmup_steps=5", "train.max_steps=9"
    ]  # fmt: skip
    assert warnings(4096, 4096) == []


def test_adafactor_is_compared_over_batch_sizes_with_a_warning() -> None:
    """torch limits its learning rate to 1 / √step."""
    [line] = confounds([compose(["optim=adafactor", f"batch.total_batch_size={b}"]) for b in (4096, 8192)])
    assert "1 / √step" in line
    assert confounds([compose(["optim=adafactor"])] * 2) == []


RAMP = ["model=nano", "batch.ramp_from_tokens=2048", "batch.ramp_tokens=1e5"]


def test_a_ramp_may_be_swept_at_one_batch_size_and_not_over_batch_sizes() -> None:
    grid = compose_sweep([*RAMP, "optim.lr=1e-3,2e-3", "batch.micro_batch_size=4,8", "batch.ramp_tokens=1e5,2e5"])
    assert [drafted.problems for drafted in grid.drafts] == [[]] * 8
    with pytest.raises(ConfigError, match="a sweep over batch sizes") as refused:
        compose_sweep([*RAMP, "optim.lr=1e-3,2e-3", "batch.total_batch_size=8192,16384"])
    assert len(refused.value.problems) == 1


def test_runs_with_a_ramp_that_are_compared_over_batch_sizes_are_named() -> None:
    """A report may have them, of several commands."""
    [line] = confounds([compose([*RAMP, f"batch.total_batch_size={size}"]) for size in (8192, 16384)])
    assert line == "batch.ramp_tokens=100000: the steps grow, so a run has not one batch size; leave out the ramp"


# --- composition ---
CELLS = [
    ["model=bytes", "optim.lr=1e-3"],
    ["model=bytes", "optim.lr=2e-3"],
    ["model=nano", "optim.lr=2e-3", "train.seed=7"],
    ["optim=lion", "optim.beta2=0.9", "model=nano"],
    ["optim=lion", "optim.weight_decay=0", "data.mix={a.txt:1,b.txt:2}", "model=nano"],
    ["optim=lion", "optim.weight_decay=0", "data.mix={c.txt:1}", "model=nano"],
    ["branch_from=null", "optim.lr=1e-3", "log.wandb.tags=[a,b]"],
    ["experiment=tutorial", "optim.lr=${model.n_embd}", "schedule.warmup_steps=3"],
    ["hydra.job.name=other", "optim.lr=1e-3"],
    ["train.max_steps=5", "optim.lr=1e-3", "train.max_steps=6"],
]


@pytest.mark.e2e
def test_a_cell_is_composed_as_by_hydra() -> None:
    with hydra_engine() as engine:
        sweep = composition(engine, ["optim.lr=1e-3,2e-3", "hydra.sweep.dir=here"], None, multirun=True)
        compositions = Compositions(engine.config_loader, sweep)
        for overrides in CELLS:
            theirs = engine.config_loader.load_sweep_config(sweep, overrides)
            ours = compositions.cell(overrides)
            plain = [OmegaConf.to_container(cfg, resolve=False) for cfg in (ours, theirs)]
            passing = [compositions.cell(others, is_passing=True) for others in (overrides, CELLS[0], overrides)][-1]
            assert plain[0] == plain[1] == OmegaConf.to_container(passing, resolve=False)
            assert [OmegaConf.is_struct(cfg) for cfg in (ours, ours.hydra)] == [True, True]
        assert len(compositions.shared) == 7


@pytest.mark.parametrize("wrong", ["optim.lrr=1", "model=none", "train.seed=x", "optim.lr={"])
def test_a_wrong_value_has_hydras_error(wrong: str) -> None:
    with hydra_engine() as engine:
        sweep = composition(engine, ["optim.lr=1e-3,2e-3"], None, multirun=True)
        with pytest.raises(Exception) as theirs:  # noqa: PT011  whatever it is
            engine.config_loader.load_sweep_config(sweep, [wrong])
        with pytest.raises(type(theirs.value)) as ours:
            Compositions(engine.config_loader, sweep).cell([wrong])
        assert str(ours.value) == str(theirs.value)


def test_the_names_of_cells_have_their_keys_in_one_order(tmp_path: Path) -> None:
    swept = {"train.seed": "2", "optim.lr": "1e-3", "optim": "lion", "batch.total_batch_size": "8192"}
    config = compose(["model=nano", *(f"{key}={value}" for key, value in swept.items())])
    names = {cell_name(config, dict(order), tmp_path) for order in itertools.permutations(swept.items())}
    [name] = names
    assert name.startswith("optim=lion,lr=0.001,total_batch_size=8192,seed=2-")
