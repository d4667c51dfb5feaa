"""GPT-2 style pretraining experiments: Hydra config groups outside, plain PyTorch DDP inside."""

import sys
from importlib import import_module
from inspect import getdoc, signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptexp.command.api import Run, Sweep, compose, report, sweep, train, tune
    from gptexp.process.errors import CheckpointError, ConfigError, DataError, UserError
    from gptexp.process.versions import VERSION as __version__
    from gptexp.reporting.listings.frames import load_metrics, load_sweep
    from gptexp.run.load import load_run

__all__ = [
    "CheckpointError", "ConfigError", "DataError", "Run", "Sweep", "UserError", "__version__", "compose",
    "load_metrics", "load_run", "load_sweep", "report", "sweep", "train", "tune",
]  # fmt: skip

_API, _ERRORS = "gptexp.command.api", "gptexp.process.errors"
_ALSO_MODULES = ("report", "sweep", "train", "tune")
_MODULES = {
    **{name: (_API, name) for name in ("Run", "Sweep", "compose", "report", "sweep", "train", "tune")},
    **{name: (_ERRORS, name) for name in ("CheckpointError", "ConfigError", "DataError", "UserError")},
    "__version__": ("gptexp.process.versions", "VERSION"),
    "load_metrics": ("gptexp.reporting.listings.frames", "load_metrics"),
    "load_run": ("gptexp.run.load", "load_run"),
    "load_sweep": ("gptexp.reporting.listings.frames", "load_sweep"),
}


class _Function(ModuleType):
    """A module with the name of a function of the API, such as `gptexp.train`: to call it calls the function."""

    @property
    def _function(self) -> Any:
        return getattr(import_module(_API), self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> Any:  # for `inspect.signature` and notebooks
        return signature(self._function)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return getdoc(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name in _MODULES and type(value) is ModuleType:  # by the import of gptexp.train, or another such module
            value.__class__ = _Function
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    # Importing torch takes two seconds, which `gptexp --help` must not need.
    if name in _ALSO_MODULES:
        return import_module(f"gptexp.{name}")
    if name in _MODULES:
        module, attribute = _MODULES[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'gptexp' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
