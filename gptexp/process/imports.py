"""Imports of large packages without the work of Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def permanent() -> Iterator[None]:
    """Collect no garbage during the body, which imports, and exempt all objects from later collections.

    Importing torch creates 160,000 containers that live until the end. Collections that visit them, during the import
    and at the interpreter's exit, take a quarter to a third of the CPU time of `python -c 'import torch'`.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
