"""Functions compiled by torch, and the options of its compiler."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

RECOMPILE_LIMIT = 64


def compile_options() -> dict[str, Any]:
    """Options of torch.compile that skip its test of vector instructions, which torch's own kernels use already.

    The test compiles and loads a program. It takes 3 s in a cold start and 0.5 s in a warm one. With AVX-512, torch
    still tests the extensions that only some CPUs have.
    """
    return {"cpp.vec_isa_ok": True} if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else {}


@cache
def compiled(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    """`function`, compiled at its first call. If `dynamic`, one graph serves all sizes of its arguments except 1."""
    import torch._dynamo.config  # takes a second

    # torch refuses to compile any function more than 8 times. Sizes of 1 and other types have graphs of their own, and
    # one process may train all cells of a sweep.
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    found: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=dynamic, options=compile_options())
    return found
