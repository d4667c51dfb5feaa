"""GPT-2 style pretraining experiments: Hydra config groups outside, plain PyTorch DDP inside."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptexp.reporting.listings.frames import load_metrics, load_sweep
    from gptexp.run.load import load_run

__version__ = "0.1.0"
__all__ = ["__version__", "load_metrics", "load_run", "load_sweep"]

_MODULES = {
    "load_metrics": "gptexp.reporting.listings.frames",
    "load_run": "gptexp.run.load",
    "load_sweep": "gptexp.reporting.listings.frames",
}


def __getattr__(name: str) -> Any:
    # Importing torch takes two seconds, which `gptexp --help` must not need.
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'gptexp' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
