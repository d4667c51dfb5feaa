"""Published figures of GPUs and of the networks between them, for MFU and for plans of runs elsewhere. No torch.

Memory and peaks are from NVIDIA's data sheets, for SXM parts if there are several. The bandwidths of links are those by
which NCCL 2.30.7 chooses how to send (`src/graph/topo.h`: GB/s of an NVLink, of PCIe 3.0 x16 and of a network adapter
of 100 Gbit/s). They are below those of data sheets, which no collective reaches. The numbers of links and of adapters
are from the data sheets of the GPUs and of NVIDIA's DGX A100, H100 and B200.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar


@dataclass(frozen=True)
class Link:
    """A connection from a rank, or from a node, to the next one."""

    name: str
    bytes_per_s: float  # sent, while as many are received


PCIE_4 = Link("PCIe 4.0 x16", 24e9)
_ADAPTER = 12e9  # bytes/s of 100 Gbit/s

# Between nodes: all adapters of a node together. Ethernet counts as InfiniBand, which supposes remote memory access
# (RoCE); over TCP its latency is higher.
NETWORKS = {
    "ndr": Link("8 × InfiniBand NDR (400 Gbit/s) a node", 8 * 4 * _ADAPTER),
    "hdr": Link("8 × InfiniBand HDR (200 Gbit/s) a node", 8 * 2 * _ADAPTER),
    "ethernet_400": Link("400 Gbit/s Ethernet a node", 4 * _ADAPTER),
    "ethernet_100": Link("100 Gbit/s Ethernet a node", _ADAPTER),
    "ethernet_25": Link("25 Gbit/s Ethernet a node", _ADAPTER / 4),
    "ethernet_10": Link("10 Gbit/s Ethernet a node", _ADAPTER / 10),
}
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """A GPU, which this machine need not have. None: unknown."""

    type: ClassVar[str] = "cuda"  # as in a torch.device

    name: str  # a part of its name in CUDA
    capability: int  # major compute capability: 8 Ampere and Ada, 9 Hopper, 10 Blackwell
    memory_bytes: int | None
    peak_flops: float | None  # FLOP/s of dense bfloat16 products, without sparsity
    link: Link | None  # to the other GPUs of its node
    network: str  # in `NETWORKS`: that of NVIDIA's nodes with this GPU, or if there are none, of many others


def _nvlinks(number: int, bytes_per_s: float) -> Link:
    return Link(f"{number} NVLinks", number * bytes_per_s)


# A100: that with 80 GB.
GPUS = {
    "a100": Gpu("A100", 8, 80 * 10**9, 312e12, _nvlinks(12, 20.0e9), "hdr"),
    "h100": Gpu("H100", 9, 80 * 10**9, 989.4e12, _nvlinks(18, 20.6e9), "ndr"),
    "h200": Gpu("H200", 9, 141 * 10**9, 989.4e12, _nvlinks(18, 20.6e9), "ndr"),
    "h800": Gpu("H800", 9, 80 * 10**9, 989.4e12, _nvlinks(8, 20.6e9), "ndr"),
    "b200": Gpu("B200", 10, 180 * 10**9, 2250e12, _nvlinks(18, 40.1e9), "ndr"),
    "l40s": Gpu("L40S", 8, 48 * 10**9, 362e12, PCIE_4, "ethernet_100"),
    "rtx4090": Gpu("RTX 4090", 8, 24 * 10**9, 165.2e12, PCIE_4, "ethernet_100"),
}
UNKNOWN_GPU = Gpu("unknown GPU", 8, None, None, None, "ethernet_100")  # assumed to be from 2020 or later
SLOWER_PARTS = {"pcie", "nvl", "laptop", "d"}  # words in names of GPUs that are slower than those in `GPUS`


def gpu_of(name: str) -> Gpu | None:
    """The GPU of this name in CUDA or on a cluster, such as A100-40G or nvidia_a100-sxm4-40gb; None: not in `GPUS`.

    A size in the name is that of its memory, even for a part of a GPU: nvidia_h100_1g.10gb. NVL parts have another one.
    """
    words = re.split(r"[^a-z0-9]+", re.sub(r"rtx[_ -]", "rtx", name.lower()))
    gpu = next((gpu for key, gpu in GPUS.items() if key in words), None)
    if gpu is None:
        return None
    if SLOWER_PARTS & {*words}:
        gpu = replace(gpu, peak_flops=None, link=None, memory_bytes=None if "nvl" in words else gpu.memory_bytes)
    sizes = [int(size[1]) * 10**9 for word in words if (size := re.fullmatch(r"(\d+)gb?", word))]
    return replace(gpu, memory_bytes=sizes[-1]) if sizes else gpu


def largest_of(kinds: Iterable[str]) -> Gpu | None:
    """The GPU of `kinds` with the most memory; None if there are none, or if the memory of one is unknown."""
    gpus = [gpu_of(kind) for kind in kinds]
    known = [gpu for gpu in gpus if gpu is not None and gpu.memory_bytes is not None]
    return max(known, key=lambda gpu: gpu.memory_bytes or 0) if known and len(known) == len(gpus) else None
