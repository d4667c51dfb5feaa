"""Register gptexp's sweepers and launchers with Hydra.

Hydra instantiates plugins by name, and only from packages below `hydra_plugins`. `register` creates such a module in
memory, so that gptexp needs no second top-level package. The plugins' options are files in conf/hydra/.
"""

import sys
from importlib import import_module
from types import ModuleType

from hydra.core.plugins import Plugins

from gptexp.sweep.cells import PLUGINS
from gptexp.sweep.jobs import SubmititLauncher
from gptexp.sweep.launchers import CellLauncher
from gptexp.sweep.ray import RayLauncher
from gptexp.sweep.sweepers import GridSweeper, OptunaSweeper, RandomSweeper


def register() -> None:
    """Register the plugins under the names that the files in conf/hydra/ use."""
    plugins = Plugins.instance()  # scans hydra_plugins, and must do so before the module below exists
    module = ModuleType(PLUGINS)
    for plugin in (CellLauncher, SubmititLauncher, RayLauncher, GridSweeper, RandomSweeper, OptunaSweeper):
        plugins.register(plugin)
        setattr(module, plugin.__name__, plugin)
    parent, _, child = PLUGINS.partition(".")
    try:
        package = import_module(parent)
    except ImportError:
        package = sys.modules[parent] = ModuleType(parent)
    sys.modules[PLUGINS] = module
    setattr(package, child, module)
