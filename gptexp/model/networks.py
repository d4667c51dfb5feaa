"""Published figures of links between GPUs, for plans of runs on nodes that are not here. No torch.

Bandwidths and latencies are those by which NCCL 2.30.7 chooses how to send: `src/graph/topo.h` (GB/s of an NVLink, of
PCIe 3.0 x16 and of a network adapter of 100 Gbit/s) and `src/graph/tuning.cc` (`baseLatencies`, `hwLatencies` and the
shares of bandwidth of rings and trees with the protocols LL128 and Simple). They are below those of data sheets, which
no collective reaches. The numbers of links and of adapters are from the data sheets of the GPUs and of NVIDIA's DGX
A100, H100 and B200.

Left out are the protocol LL, so that messages of a few KB are faster than predicted; sums in the switches (NVLS,
CollNet), which are faster too; and NCCL's corrections for medium sizes, numbers of channels, processors and single
ranks a node, by up to a factor of two in the latency or the bandwidth.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A connection from a rank, or from a node, to the next one."""

    name: str
    bytes_per_s: float  # sent, while as many are received


@dataclass(frozen=True)
class Way:
    """One way of sending to all ranks: on a ring, or on trees."""

    is_tree: bool
    inside_s: float  # of a message from rank to rank in a node
    between_s: float  # of a message from node to node
    start_s: float = 0.0  # before the first message
    share: float = 1.0  # of the links' bandwidth


# LL128 before Simple. NVLink has both, PCIe Simple alone.
NVLINK_WAYS = (
    Way(False, 1.9e-6, 4.0e-6, 14.0e-6, 0.92),
    Way(False, 3.4e-6, 14.0e-6, 8.4e-6),
    Way(True, 1.25e-6, 8.5e-6, 14.0e-6, 0.92 * 120 / 128),
    Way(True, 4.0e-6, 14.0e-6, 8.4e-6, 0.92),
)
PCIE_WAYS = (Way(False, 5.7e-6, 14.0e-6, 8.4e-6), Way(True, 4.0e-6, 14.0e-6, 8.4e-6, 0.92))

PCIE_4 = Link("PCIe 4.0 x16", 24e9)
_ADAPTER = 12e9  # bytes/s of 100 Gbit/s


def _nvlink(links: int, bytes_per_s: float) -> Link:
    return Link(f"{links} NVLinks", links * bytes_per_s)


# Within a node, for each of `gpus.GPUS`.
WITHIN_NODE = {
    "a100": _nvlink(12, 20.0e9),
    "h100": _nvlink(18, 20.6e9),
    "h200": _nvlink(18, 20.6e9),
    "h800": _nvlink(8, 20.6e9),
    "b200": _nvlink(18, 40.1e9),
    "l40s": PCIE_4,
    "rtx4090": PCIE_4,
}

# Between nodes: all adapters of a node together. Ethernet as InfiniBand with remote memory access (RoCE); over TCP the
# latency is higher.
NETWORKS = {
    "ndr": Link("8 × InfiniBand NDR (400 Gbit/s) a node", 8 * 4 * _ADAPTER),
    "hdr": Link("8 × InfiniBand HDR (200 Gbit/s) a node", 8 * 2 * _ADAPTER),
    "ethernet_400": Link("400 Gbit/s Ethernet a node", 4 * _ADAPTER),
    "ethernet_100": Link("100 Gbit/s Ethernet a node", _ADAPTER),
    "ethernet_25": Link("25 Gbit/s Ethernet a node", _ADAPTER / 4),
    "ethernet_10": Link("10 Gbit/s Ethernet a node", _ADAPTER / 10),
}

# The network of NVIDIA's own nodes with this GPU; the others have none of NVIDIA's.
USUAL_NETWORK = {"a100": "hdr", "h100": "ndr", "h200": "ndr", "h800": "ndr", "b200": "ndr"}
OTHER_NETWORK = "ethernet_100"
GPUS_PER_NODE = 8
