"""A cell's composition is the one that Hydra makes."""

import pytest
from omegaconf import OmegaConf

from gptexp.config.compose import composition, hydra_engine
from gptexp.sweep.compositions import Compositions

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


def test_a_cell_is_composed_as_by_hydra() -> None:
    with hydra_engine() as engine:
        sweep = composition(engine, ["optim.lr=1e-3,2e-3", "hydra.sweep.dir=here"], None, multirun=True)
        compositions = Compositions(engine.config_loader, sweep)
        for overrides in CELLS:
            theirs = engine.config_loader.load_sweep_config(sweep, overrides)
            ours = compositions.cell(overrides)
            plain = [OmegaConf.to_container(cfg, resolve=False) for cfg in (ours, theirs)]
            assert plain[0] == plain[1]
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
