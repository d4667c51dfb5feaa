"""GPT-2 style pretraining experiments: Hydra config groups outside, plain PyTorch DDP inside."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "load_run"]


def __getattr__(name: str) -> Any:
    # Importing torch takes two seconds, which `gptexp --help` must not need.
    if name == "load_run":
        from gptexp.run.load import load_run

        return load_run
    raise AttributeError(f"module 'gptexp' has no attribute '{name}'")
