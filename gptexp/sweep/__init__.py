"""Hydra's multirun: sweepers that say which cells there are, launchers that run them.

`space` reads what is swept, `cells` composes, checks and names; `sweepers` choose the cells, a grid, at random or by
Optuna; `launchers` run them, here or as jobs of SLURM. Plugins of Hydra must lie in a package below hydra_plugins; a
second top-level package just for that would be one more thing to install, so `register` gives them a name there.
"""

import sys
from importlib import import_module
from types import ModuleType

PLUGINS = "hydra_plugins.gptexp"


def register() -> None:
    """Tell Hydra of the sweepers and launchers, and of the options that choose them."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    from gptexp.sweep import launchers, sweepers

    plugins = Plugins.instance()  # scans hydra_plugins, so it comes before the alias below
    alias = ModuleType(PLUGINS)
    for group, options in (("hydra/launcher", launchers.OPTIONS), ("hydra/sweeper", sweepers.OPTIONS)):
        for name, (plugin, defaults) in options.items():
            plugins.register(plugin)
            setattr(alias, plugin.__name__, plugin)
            node = {"_target_": f"{PLUGINS}.{plugin.__name__}", **defaults}
            ConfigStore.instance().store(group=group, name=name, node=node)
    parent, _, child = PLUGINS.partition(".")
    try:
        package = import_module(parent)
    except ImportError:
        package = sys.modules[parent] = ModuleType(parent)
    sys.modules[PLUGINS] = alias
    setattr(package, child, alias)
