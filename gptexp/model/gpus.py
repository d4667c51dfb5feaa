"""Published figures of GPUs, for MFU and for plans of runs on a GPU that this machine does not have. No torch."""

from dataclasses import dataclass
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
