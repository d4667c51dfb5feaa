"""The cells of a grid and of a random sample, and the example cells by which an Optuna sweep is checked."""

import math
from pathlib import Path

import pytest
from scipy import stats
from sweeps import compose_sweep

from gptexp.config.compose import compose
from gptexp.config.schema import memory_key
from gptexp.process.errors import ConfigError
from gptexp.storage import run_dir
from gptexp.sweep.cells import Cell
from gptexp.sweep.space import Axis, Interval
from gptexp.sweep.study import OptunaSweeper
from gptexp.sweep.sweepers import GridSweeper, RandomSweeper

LR = Axis("optim.lr", True, Interval(1e-4, 1e-1, log=True, whole=False))
EPS = Axis("optim.eps", True, Interval(1e-4, 1e-1, log=True, whole=False))
LAYERS = Axis("model.n_layer", True, Interval(1, 6, log=False, whole=True))
BATCH = Axis("batch.total_batch_size", True, ["4096", "8192"])
SEED = Axis("train.seed", False, ["7"])


def drawn(n_cells: int, *space: Axis, seed: int = 0) -> list[dict[str, str]]:
    """The values of each cell of a random sample, by key."""
    cells = RandomSweeper(None, n_cells, seed).combinations([space])
    return [dict(text.split("=") for text in cell) for cell in cells]


def test_a_larger_sample_or_another_key_keeps_the_values_drawn_before() -> None:
    few, many = drawn(5, LR, BATCH), drawn(50, LAYERS, BATCH, SEED, LR)
    assert [{key: cell[key] for key in few[0]} for cell in many[:5]] == few
    assert drawn(5, LR, BATCH, seed=1) != few
    assert {cell["train.seed"] for cell in many} == {"7"}


def test_random_values_are_uniform_on_their_scale_and_independent() -> None:
    cells = drawn(2000, LR, LAYERS, BATCH)
    lrs = [math.log(float(cell["optim.lr"])) for cell in cells]
    low, width = math.log(1e-4), math.log(1e3)
    assert stats.kstest(lrs, stats.uniform(low, width).cdf).pvalue > 0.01
    others = [math.log(float(cell["optim.eps"])) for cell in drawn(2000, EPS)]
    assert stats.pearsonr(lrs, others).pvalue > 0.01  # two keys are uncorrelated
    layers = [int(cell["model.n_layer"]) for cell in cells]
    assert {*layers} == {1, 2, 3, 4, 5, 6}
    assert sum(cell["batch.total_batch_size"] == "4096" for cell in cells) == pytest.approx(1000, abs=100)


def test_a_grid_is_the_product_of_its_values_and_refuses_an_interval() -> None:
    lr = Axis("optim.lr", True, ["1e-3", "2e-3", "4e-3"])
    cells = GridSweeper(None).combinations([[BATCH, lr, SEED]])
    assert len({tuple(cell) for cell in cells}) == 6
    assert all(cell[2] == "train.seed=7" for cell in cells)
    with pytest.raises(ConfigError, match=r"optim\.lr: a grid needs a list"):
        GridSweeper(None).combinations([[LR]])


@pytest.mark.e2e
def test_a_grid_of_several_mappings_has_the_cells_of_each(tmp_path: Path) -> None:
    """A key that one of them fixes, or lacks, is swept. The command line wins in all of them, or selects optimizers."""
    file = tmp_path / "experiment" / "own.yaml"
    file.parent.mkdir()
    file.write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n"
        "      - {optim: 'adamw,muon', optim.lr: '1e-3,2e-3'}\n"
        "      - {optim: sgd, optim.lr: 0.1, train.seed: 3}\n"
    )
    overrides = ["model=nano", "experiment=own"]
    drafts = compose_sweep(overrides, str(tmp_path)).drafts
    assert [(d.config.optim.name, d.config.optim.lr, d.config.train.seed) for d in drafts if d.config] == [
        ("adamw", 1e-3, 1337), ("adamw", 2e-3, 1337), ("muon", 1e-3, 1337), ("muon", 2e-3, 1337), ("sgd", 0.1, 3),
    ]  # fmt: skip
    assert [[*d.values] for d in drafts] == [["optim", "optim.lr"]] * 4 + [["optim", "optim.lr", "train.seed"]]
    fixed = compose_sweep([*overrides, "optim.lr=5e-3"], str(tmp_path)).drafts
    assert {(d.config.optim.name, d.config.optim.lr) for d in fixed if d.config} == {
        ("adamw", 5e-3), ("muon", 5e-3), ("sgd", 5e-3),
    }  # fmt: skip
    selected = {
        ("adamw",): {("adamw", 1e-3), ("adamw", 2e-3)},
        ("sgd", "muon"): {("sgd", 0.1), ("muon", 1e-3), ("muon", 2e-3)},
        ("adamw", "lion"): {(optim, lr) for optim in ("adamw", "lion") for lr in (1e-3, 2e-3, 0.1)},  # lion is in none
    }
    for options, cells in selected.items():
        drafts = compose_sweep([*overrides, f"optim={','.join(options)}"], str(tmp_path)).drafts
        assert {(d.config.optim.name, d.config.optim.lr) for d in drafts if d.config} == cells
        assert all("optim" in d.values for d in drafts) == (len(options) > 1)
    for sweeper in (RandomSweeper(None, 2, 0), OptunaSweeper(None, 2, 0)):
        with pytest.raises(ConfigError, match="a list of mappings needs hydra/sweeper=grid"):
            sweeper.combinations([[LR], [BATCH]])


def test_example_cells_of_an_optuna_sweep_contain_every_value_and_both_ends() -> None:
    assert OptunaSweeper(None, 20, 0).combinations([[LR, BATCH, SEED]]) == [
        ["optim.lr=0.0001", "batch.total_batch_size=4096", "train.seed=7"],
        ["optim.lr=0.1", "batch.total_batch_size=8192", "train.seed=7"],
    ]


def test_a_cell_reuses_the_micro_batch_found_for_a_cell_of_the_same_memory_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without such a cell, it reuses the first decision of the sweep."""

    def new_cell(name: str, batch: int, lr: str, model: str = "nano") -> Cell:
        options = [f"batch.total_batch_size={batch}", "batch.micro_batch_size=auto", f"optim.lr={lr}"]
        return Cell(None, compose([f"model={model}", *options]), tmp_path / name, {})  # type: ignore[arg-type]

    sweep = GridSweeper(None)
    sweep.directory = tmp_path
    small, large = new_cell("a", 4096, "1e-3"), new_cell("b", 8192, "1e-3")
    sweep.take_decisions(small)
    assert not small.directory.exists()
    assert not sweep.share_decisions()
    made = {}
    for cell in (small, large):
        made[cell.name] = {"memory_key": memory_key(cell.config), "micro_batch_size": 3}
        cell.directory.mkdir()
        run_dir.write_json(cell.directory / run_dir.EFFECTIVE, made[cell.name])
        assert sweep.share_decisions()
    assert made["a"] != made["b"]
    for cell, like in ((new_cell("c", 8192, "2e-3"), "b"), (new_cell("d", 4096, "1e-3", "mini"), "a"), (large, "b")):
        sweep.take_decisions(cell)
        assert run_dir.read_json(cell.directory / run_dir.EFFECTIVE) == made[like]
    monkeypatch.setattr("gptexp.sweep.sweepers.decisions", lambda directory: pytest.fail("all cells are read again"))
    sweep.take_decisions(new_cell("e", 8192, "3e-3"))
    assert run_dir.read_json(tmp_path / "e" / run_dir.EFFECTIVE) == made["b"]
