"""Published figures of GPUs, for MFU and for plans of runs on a GPU that this machine does not have. No torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar


@dataclass(frozen=True)
class Gpu:
    """A GPU that may be missing here. None: unknown."""

    type: ClassVar[str] = "cuda"  # as of a torch.device

    name: str  # a part of its name in CUDA
    capability: int  # major compute capability: 8 Ampere and Ada, 9 Hopper, 10 Blackwell
    memory_bytes: int | None
    peak_flops: float | None  # FLOP/s of dense bfloat16 products, without sparsity


# From NVIDIA's data sheets; SXM parts, where there are several. A100: that with 80 GB.
GPUS = {
    "a100": Gpu("A100", 8, 80 * 10**9, 312e12),
    "h100": Gpu("H100", 9, 80 * 10**9, 989.4e12),
    "h200": Gpu("H200", 9, 141 * 10**9, 989.4e12),
    "h800": Gpu("H800", 9, 80 * 10**9, 989.4e12),
    "b200": Gpu("B200", 10, 180 * 10**9, 2250e12),
    "l40s": Gpu("L40S", 8, 48 * 10**9, 362e12),
    "rtx4090": Gpu("RTX 4090", 8, 24 * 10**9, 165.2e12),
}
UNKNOWN_GPU = Gpu("unknown GPU", 8, None, None)  # from 2020 or later


def gpu_of(kind: str) -> Gpu | None:
    """The GPU that a cluster calls `kind`, such as h100, A100-40G or nvidia_a100-sxm4-40gb; None: not in `GPUS`.

    A size in the name is that of its memory, also of a part of a GPU: nvidia_h100_1g.10gb. NVL parts have another.
    """
    words = re.split(r"[^a-z0-9]+", re.sub(r"rtx[_ -]", "rtx", kind.lower()))
    named = [gpu for name, gpu in GPUS.items() if name in words]
    if not named:
        return None
    sizes = [int(size[1]) * 10**9 for word in words if (size := re.fullmatch(r"(\d+)gb?", word))]
    if sizes:
        return replace(named[0], memory_bytes=sizes[-1])
    return replace(named[0], memory_bytes=None) if "nvl" in words else named[0]


def largest_of(kinds: Iterable[str]) -> Gpu | None:
    """The GPU with the most memory of `kinds`; None if there is none, or one whose memory is unknown."""
    gpus = {kind: gpu_of(kind) for kind in kinds}
    known = [gpu for gpu in gpus.values() if gpu is not None and gpu.memory_bytes is not None]
    return max(known, key=lambda gpu: gpu.memory_bytes or 0) if known and len(known) == len(gpus) else None
