"""What a multirun and its cells are called: the same grid, and a wider one, must find them again."""

from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

from gptexp import run_dir
from gptexp.compose import compose, conf_dir, register
from gptexp.config import memory_key
from gptexp.sweep.cells import cell_name, confounds, fixed_arguments, name_sweep
from gptexp.sweep.space import swept_keys
from gptexp.sweep.sweepers import _decided


def composed(*overrides: str) -> DictConfig:
    """What Hydra hands to a multirun's callback."""
    register()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        loader = GlobalHydra.instance().hydra
        assert loader is not None
        return loader.compose_config("config", list(overrides), RunMode.MULTIRUN)


def sweep_name(*overrides: str) -> str:
    config = composed(*overrides)
    name_sweep(config)
    return str(config.sweep.name)


GRID = ("optim.lr=1e-3,2e-3", "train.seed=1,2")


@pytest.mark.parametrize(
    "again",
    [
        ("train.seed=2,1", "optim.lr=0.002,1e-3,4e-3"),  # wider, in another order
        (*GRID, "log.progress=off", "world.size=2"),  # what decides no result
        ("optim.lr=choice(1e-3)", "train.seed=range(4)"),
    ],
)
def test_the_same_or_a_wider_grid_has_the_same_name(again: tuple[str, ...]) -> None:
    assert sweep_name(*again) == sweep_name(*GRID)


@pytest.mark.parametrize("other", [(*GRID, "model.n_layer=3"), GRID[:1], (*GRID, "optim.eps=1e-7,1e-8")])
def test_another_grid_has_another_name(other: tuple[str, ...]) -> None:
    assert sweep_name(*other) != sweep_name(*GRID)


def test_models_swept_in_another_order_are_the_same_sweep() -> None:
    """Each brings its learning rate, so which one is composed first shows in optim.lr."""
    assert sweep_name("model=nano,mini") == sweep_name("model=mini,nano")


def test_a_name_that_is_given_stays() -> None:
    assert sweep_name(*GRID, "sweep.name=mine") == "mine"


def test_the_command_line_decides_what_of_a_named_grid_is_swept() -> None:
    assert swept_keys(composed("sweep=lr_x_batch")) == ["batch.total_batch_size", "optim.lr"]
    assert swept_keys(composed("sweep=lr_x_batch", "optim.lr=1e-3")) == ["batch.total_batch_size"]
    assert swept_keys(composed("sweep=lr", "data.path=[a,b]")) == ["optim.lr"]


def test_what_holds_for_all_cells_is_kept_for_the_next_command() -> None:
    swept = ["model=nano,mini", "batch=laptop,gpt2", "train.eval_every=1,2"]
    fixed = ["model.bias=false", "batch.micro_batch_size=4", "train.eval_every_tokens=4096", "sweep.parallel=2"]
    said = fixed_arguments(composed(*swept, *fixed, "sweep.name=s", "hydra/sweeper=random", "hydra.sweeper.n_cells=3"))
    assert said == fixed
    assert fixed_arguments(composed("sweep=lr", "hydra.sweep.dir=x")) == ["sweep=lr", "hydra.sweep.dir=x"]


def test_a_cell_is_named_by_values_and_not_by_how_they_were_typed() -> None:
    names = {
        cell_name(compose([f"optim.lr={text}"]), {"optim.lr": text}, Path("nowhere"))
        for text in ("6e-4", "0.0006", "6.0e-4")
    }
    assert len(names) == 1
    assert names.pop().startswith("lr=0.0006-")


def test_a_cell_is_found_again_however_its_values_were_given(tmp_path: Path) -> None:
    """Swept before and fixed now, or the other way round: what decides the result is the same."""
    config = compose(["optim.lr=1e-3", "batch.total_batch_size=4096"])
    both = cell_name(config, {"batch.total_batch_size": "4096", "optim.lr": "1e-3"}, tmp_path)
    (tmp_path / both).mkdir()
    assert cell_name(config, {"optim.lr": "1e-3"}, tmp_path) == both
    assert cell_name(config, {}, tmp_path) == both
    assert cell_name(compose(["optim.lr=2e-3"]), {"optim.lr": "2e-3"}, tmp_path) != both
    on_two = compose(["optim.lr=1e-3", "batch.total_batch_size=4096", "world.size=2"])
    assert cell_name(on_two, {"optim.lr": "1e-3"}, tmp_path) == both  # decides no result, and was not swept
    assert cell_name(on_two, {"optim.lr": "1e-3", "world.size": "2"}, tmp_path) != both


def test_a_cell_takes_the_micro_batch_that_was_found_for_its_like(tmp_path: Path) -> None:
    """All else it takes from the sweep's first decision; the run itself finds a size where nobody has."""

    def decided(name: str, batch: int, lr: str) -> tuple[str, dict[str, object]]:
        key = memory_key(compose([f"batch.total_batch_size={batch}", "batch.micro_batch_size=auto", f"optim.lr={lr}"]))
        effective = {"memory_key": key, "micro_batch_size": batch // 256}
        (tmp_path / name).mkdir()
        run_dir.write_json(tmp_path / name / run_dir.EFFECTIVE, effective)
        return key, effective

    small, first = decided("a", 4096, "1e-3")
    large, other = decided("b", 8192, "1e-3")
    run_dir.write_json(tmp_path / run_dir.EFFECTIVE, first)
    assert decided("c", 8192, "2e-3")[0] == large != small
    assert _decided(tmp_path, large) == other
    assert _decided(tmp_path, small) == _decided(tmp_path, "of another model") == first
    assert _decided(tmp_path / "nowhere", small) == {}


def test_lengths_in_steps_confound_a_sweep_over_batch_sizes_only() -> None:
    def warnings(*sizes: int) -> list[str]:
        configs = [
            compose([f"batch.total_batch_size={b}", "schedule.warmup_steps=5", "train.max_steps=9"]) for b in sizes
        ]
        return confounds(configs)

    assert [line.partition(" counts")[0] for line in warnings(4096, 8192)] == [
        "schedule.warmup_steps=5", "train.max_steps=9"
    ]  # fmt: skip
    assert warnings(4096, 4096) == []
