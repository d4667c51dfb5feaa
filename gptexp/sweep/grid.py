"""Hydra's multirun: builds the sweeper of a composition, and composes its cells for `gptexp plan -m`.

Hydra instantiates sweepers and launchers by name, and only from packages below `hydra_plugins`. `_register` creates
such a module in memory, so that gptexp needs no second top-level package. The options are files in conf/hydra/.
"""

import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.plugins import Plugins
from hydra.plugins.plugin import Plugin
from hydra.types import HydraContext
from omegaconf import DictConfig

from gptexp.process.imports import permanent
from gptexp.sweep.cells import PLUGINS, Draft, draft_cells, name_sweep
from gptexp.sweep.jobs import SubmititLauncher
from gptexp.sweep.launchers import CellLauncher, Places
from gptexp.sweep.ray import RayLauncher
from gptexp.sweep.space import spaces
from gptexp.sweep.study import OptunaSweeper
from gptexp.sweep.sweepers import CellSweeper, GridSweeper, RandomSweeper


@dataclass(frozen=True)
class Grid:
    """The cells of a multirun, and how they would run."""

    drafts: list[Draft]  # the cells; under Optuna, examples that together contain every possible choice
    of: int  # number of cells that will run
    at_once: int | None  # number of cells that run side by side; None: a trial decides when the sweep begins
    sweeper: CellSweeper


def compose_cells(engine: Any, config: DictConfig) -> Grid:
    """Compose the cells of a sweep's composition. Illegal cells are drafts with problems.

    `engine` comes from `hydra_engine`. Other errors raise `ConfigError`.
    """
    context = HydraContext(config_loader=engine.config_loader, callbacks=Callbacks())
    return grid_of(build_sweeper(config, context, lambda _: None))


def grid_of(sweeper: CellSweeper) -> Grid:
    """The cells of a sweeper."""
    arguments = list(sweeper.config.hydra.overrides.task)
    combinations = sweeper.combinations(spaces(sweeper.params, arguments, sweeper.loader))
    total = sweeper.count(combinations)
    drafts = draft_cells(sweeper.compositions, combinations, total)
    legal = [draft.config for draft in drafts if draft.config is not None]
    places = sweeper.find_places(legal) if legal else Places(1)
    return Grid(drafts, total, places.at_once, sweeper)


def build_sweeper(config: DictConfig, context: HydraContext, task: Any) -> CellSweeper:
    """Name the sweep of a composition, and build its sweeper, which calls `task` for each cell.

    Raises `ConfigError` for a sweeper or launcher that is not gptexp's.
    """
    _register(config.hydra.sweeper._target_)
    name_sweep(config)
    sweeper: Any = Plugins.instance().instantiate_sweeper(hydra_context=context, task_function=task, config=config)
    assert isinstance(sweeper, CellSweeper)
    return sweeper


def _register(sweeper: str) -> None:
    """Register the plugins under the names that the files in conf/hydra/ use. `sweeper`: the one that will be built."""
    plugins = Plugins.instance()  # scans hydra_plugins, and must do so before the module below exists
    module = ModuleType(PLUGINS)
    known: list[type[Plugin]] = [
        CellLauncher,
        SubmititLauncher,
        RayLauncher,
        GridSweeper,
        RandomSweeper,
        OptunaSweeper,
    ]
    if sweeper.endswith(".TuneSweeper"):
        with permanent():
            from gptexp.sweep.tune import TuneSweeper  # imports scipy

        known.append(TuneSweeper)
    for plugin in known:
        plugins.register(plugin)
        setattr(module, plugin.__name__, plugin)
    parent, _, child = PLUGINS.partition(".")
    try:
        package = import_module(parent)
    except ImportError:
        package = sys.modules[parent] = ModuleType(parent)
    sys.modules[PLUGINS] = module
    setattr(package, child, module)
