"""Compose and check the cells of a multirun without running them, for `gptexp plan -m`."""

from dataclasses import dataclass
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig

from gptexp.run.pool import Places
from gptexp.sweep.cells import Draft, draft, name_sweep
from gptexp.sweep.plugins import register
from gptexp.sweep.space import spaces


@dataclass(frozen=True)
class Grid:
    """The cells of a multirun, and how they would run."""

    drafts: list[Draft]  # the cells; under Optuna, examples that together contain every possible choice
    of: int  # number of cells that will run
    at_once: int  # number of cells that run side by side
    on_gpus: bool


def compose_cells(engine: Any, config: DictConfig) -> Grid:
    """Compose the cells of a sweep's composition. Illegal cells are drafts with problems.

    `engine` is that of `hydra_engine`. Other errors raise `ConfigError`.
    """
    register()
    name_sweep(config)
    context = HydraContext(config_loader=engine.config_loader, callbacks=Callbacks())
    sweeper: Any = Plugins.instance().instantiate_sweeper(
        hydra_context=context, task_function=lambda _: None, config=config
    )
    arguments = list(config.hydra.overrides.task)
    combinations = sweeper.combinations(spaces(sweeper.params, arguments, engine.config_loader))
    total = sweeper.count(combinations)
    drafts = draft(engine.config_loader, config, combinations, total)
    legal = [drafted.config for drafted in drafts if drafted.config is not None]
    places = sweeper.cell_launcher.places(legal) if legal else Places(1)
    return Grid(drafts, total, places.at_once, bool(places.gpus))
