"""Large numbers of objects without the work of Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def permanent() -> Iterator[None]:
    """Collect no garbage during the body, and exempt all its objects from later collections: they live until the end.

    Importing torch creates 160,000 containers. Collections that visit them, during the import and at the interpreter's
    exit, take a quarter to a third of the CPU time of `python -c 'import torch'`. It is similar with the steps of a
    thousand runs.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
