"""Options of torch's compiler."""

from typing import Any

import torch


def compile_options() -> dict[str, Any]:
    """Options of torch.compile that skip its test of vector instructions, which torch's own kernels use already.

    The test compiles and loads a program. It takes 3 s in a cold start and 0.5 s in a warm one. With AVX-512, torch
    still tests the extensions that only some CPUs have.
    """
    return {"cpp.vec_isa_ok": True} if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else {}
