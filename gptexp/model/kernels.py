"""torch's kernels of causal attention, and the choice of one for all attention in a context.

Our own CPU kernel, made of products of blocks of 256 queries or keys, has been removed. On two cores of an Intel Xeon
with AMX (torch 2.13, heads of 64 numbers, forward and backward, least CPU time) it took 1.08 times flash's time in
bfloat16 at 256 tokens, 1.29 at 1,024 and 1.15 at 4,096, and 1.4 to 1.8 times in float32. On an AMD EPYC it was faster:
148 ms in place of 207 for a layer of GPT-2 124M with 4 × 1,024 tokens, 7% of a compiled step.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch.nn.attention import SDPBackend, sdpa_kernel

FLOAT32, MASKS, GROUPS, DROPOUT = "float32", "masks", "grouped queries", "dropout"  # what a run may need of a kernel


@dataclass(frozen=True)
class Kernel:
    backend: SDPBackend
    lacks: Mapping[str, tuple[str, ...]]  # device -> what the kernel does not have there, in torch 2.11 to 2.13


KERNELS = {
    "cudnn": Kernel(SDPBackend.CUDNN_ATTENTION, {"cuda": (FLOAT32,)}),
    "flash": Kernel(SDPBackend.FLASH_ATTENTION, {"cuda": (FLOAT32, MASKS), "cpu": (DROPOUT,)}),
    "efficient": Kernel(SDPBackend.EFFICIENT_ATTENTION, {"cuda": (GROUPS,)}),
    "math": Kernel(SDPBackend.MATH, {}),
}


def attention_kernel(name: str, asked: bool, device: str) -> AbstractContextManager[object]:
    """A context in which attention uses kernel `name`. Unless it was `asked` for, other kernels serve as fallback.

    The context must contain the backward pass, because a checkpointed block recomputes its attention there.
    """
    if name == "flex":  # the model calls it itself
        return nullcontext()
    first = KERNELS[name].backend
    # On a CPU torch tries flash first, whatever the order; and math needs no fallback.
    only = asked or (device, name) == ("cpu", "math")
    if not only and device != "cuda":
        return nullcontext()
    others = [] if only else [k.backend for k in KERNELS.values() if k.backend != first]
    return sdpa_kernel([first, *others], set_priority=True)
