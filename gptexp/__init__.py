"""GPT-2 style pretraining experiments: Hydra config groups outside, plain PyTorch DDP inside."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptexp.process.versions import VERSION as __version__
    from gptexp.reporting.listings.frames import load_metrics, load_sweep
    from gptexp.run.load import load_run

__all__ = ["__version__", "load_metrics", "load_run", "load_sweep"]

_MODULES = {
    "__version__": ("gptexp.process.versions", "VERSION"),
    "load_metrics": ("gptexp.reporting.listings.frames", "load_metrics"),
    "load_run": ("gptexp.run.load", "load_run"),
    "load_sweep": ("gptexp.reporting.listings.frames", "load_sweep"),
}


def __getattr__(name: str) -> Any:
    # Importing torch takes two seconds, which `gptexp --help` must not need.
    if name in _MODULES:
        module, attribute = _MODULES[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'gptexp' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
