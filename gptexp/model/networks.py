"""Published figures of links between GPUs, for plans of runs on nodes that are not here. No torch.

Bandwidths and latencies are those with which NCCL predicts its own collectives: `src/graph/topo.h` (GB/s of an NVLink,
of PCIe 3.0 x16 and of a network adapter of 100 Gbit/s) and `src/graph/tuning.cc` (`hwLat`, microseconds of a step of a
ring with the protocol Simple). They are below those of data sheets, which no collective reaches. The numbers of links
and of adapters are from the data sheets of the GPUs and of NVIDIA's DGX A100, H100 and B200.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A connection from a rank, or from a node, to the next one."""

    name: str
    latency_s: float  # of a message
    bytes_per_s: float  # sent, while as many are received


def _nvlink(links: int, bytes_per_s: float) -> Link:
    return Link(f"{links} NVLinks", 3.4e-6, links * bytes_per_s)


_PCIE_4 = Link("PCIe 4.0 x16", 5.7e-6, 24e9)
_ADAPTER = 12e9  # bytes/s of 100 Gbit/s
_NETWORK_S = 9.6e-6

# Within a node, for each of `gpus.GPUS`. NCCL counts 235 GB/s of an A100's twelve links.
WITHIN_NODE = {
    "a100": Link("12 NVLinks", 3.4e-6, 235e9),
    "h100": _nvlink(18, 20.6e9),
    "h200": _nvlink(18, 20.6e9),
    "h800": _nvlink(8, 20.6e9),
    "b200": _nvlink(18, 40.1e9),
    "l40s": _PCIE_4,
    "rtx4090": _PCIE_4,
}

# Between nodes: all adapters of a node together. Ethernet as InfiniBand with remote memory access (RoCE); over TCP the
# latency is higher.
NETWORKS = {
    "ndr": Link("8 × InfiniBand NDR (400 Gbit/s) a node", _NETWORK_S, 8 * 4 * _ADAPTER),
    "hdr": Link("8 × InfiniBand HDR (200 Gbit/s) a node", _NETWORK_S, 8 * 2 * _ADAPTER),
    "ethernet_400": Link("400 Gbit/s Ethernet a node", _NETWORK_S, 4 * _ADAPTER),
    "ethernet_100": Link("100 Gbit/s Ethernet a node", _NETWORK_S, _ADAPTER),
    "ethernet_25": Link("25 Gbit/s Ethernet a node", _NETWORK_S, _ADAPTER / 4),
    "ethernet_10": Link("10 Gbit/s Ethernet a node", _NETWORK_S, _ADAPTER / 10),
}

# The network of NVIDIA's own nodes with this GPU; the others have none of NVIDIA's.
USUAL_NETWORK = {"a100": "hdr", "h100": "ndr", "h200": "ndr", "h800": "ndr", "b200": "ndr"}
OTHER_NETWORK = "ethernet_100"
GPUS_PER_NODE = 8
