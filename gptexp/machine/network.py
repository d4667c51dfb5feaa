"""The network between the ranks of a run: as `gptexp bench comm` has measured it, else as published.

Measurements are kept in the token cache.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gptexp.config.schema import Config, DataConfig, from_dict
from gptexp.data.cache import cache_dir
from gptexp.machine.cpu import fingerprint
from gptexp.model.allreduce import NCCL, Network, ways_of
from gptexp.model.gpus import GPUS_PER_NODE, NETWORKS, UNKNOWN_GPU, Gpu, Link, gpu_of
from gptexp.process.cores import count_cores
from gptexp.storage import run_dir

FOLDER = "measured"  # in the cache directory
PREFIX = "comm-"  # begins the files' names
PARTS = ("inside", "between")
MOST_CROWDED = 4  # most ranks per core that are timed; with more, ranks would wait for cores


@dataclass(frozen=True)
class Fitted:
    """The links that fit a measured all-reduce."""

    latency_s: float  # per message
    bytes_per_s: float
    seconds: dict[str, float]  # bytes -> seconds of an all-reduce


@dataclass(frozen=True)
class AllReduce:
    """The measured all-reduce of `ranks` on `nodes`."""

    backend: str
    comm: str  # type of the numbers, as world.comm
    ranks: int
    nodes: int
    inside: Fitted | None  # between the ranks of one node; None: each node has one rank
    between: Fitted | None  # between the nodes; None: there is one node

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    def network(self) -> Network:
        """The network as it was measured, without published figures."""
        network = Network(self.ranks, self.ranks_per_node, None, None, ways_of(self.backend, None))
        return self.between_of(self.inside_of(network))

    def inside_of(self, network: Network) -> Network:
        """`network` with the measured link within a node. The measured latency includes `start_s`, which becomes 0."""
        if self.inside is None:
            return network
        link = Link(f"measured: {self.backend}, {self.ranks_per_node} ranks", self.inside.bytes_per_s)
        ways = (replace(way, inside_s=self.inside.latency_s, start_s=0.0) for way in network.ways)
        return replace(network, inside=link, ways=tuple(ways))

    def between_of(self, network: Network) -> Network:
        """`network` with the measured link between nodes, in the same way."""
        if self.between is None:
            return network
        name = f"measured: {self.backend}, {self.ranks} ranks on {self.nodes} nodes"
        ways = (replace(way, between_s=self.between.latency_s, start_s=0.0) for way in network.ways)
        between = Link(name, self.between.bytes_per_s)
        return replace(network, between=between, ranks_per_node=self.ranks_per_node, ways=tuple(ways))


def network_of(cfg: Config, ranks: int, gpu: Gpu | None, name: str | None, ranks_per_node: int | None) -> Network:
    """The network of `ranks` on a `gpu`, or on this machine. Links that are neither measured nor published are None.

    A `name` of `NETWORKS` and a number of `ranks_per_node` take precedence over measurements.
    """
    on_gpus = gpu is not None or (cfg.train.device in ("auto", "cuda") and torch.cuda.is_available())
    backend = cfg.world.backend if cfg.world.backend != "auto" else NCCL if on_gpus else "gloo"
    device_name = gpu.name if gpu is not None else torch.cuda.get_device_name() if on_gpus else ""
    published = gpu or gpu_of(device_name) or UNKNOWN_GPU
    per_node = 2 * ranks  # on a CPU: even twice as many ranks would be on this machine
    if on_gpus:
        per_node = GPUS_PER_NODE if gpu is not None else torch.cuda.device_count()
    inside, between = published.link if backend == NCCL else None, NETWORKS[published.network] if on_gpus else None
    network = Network(ranks, per_node, inside, between, ways_of(backend, published.link))

    measured = recall(cfg.data, backend, cfg.world.comm, ranks, device_name)
    if within := [one for one in measured if one.inside is not None]:
        network = within[0].inside_of(network)
    if name is not None:
        network = replace(network, between=NETWORKS[name])
    elif over := [one for one in measured if one.between is not None]:
        network = over[0].between_of(network)
    return replace(network, ranks_per_node=ranks_per_node or network.ranks_per_node)


def machine(backend: str) -> dict[str, Any]:
    """What a measurement here holds for: with NCCL the kind of GPU, else the processor."""
    if backend == NCCL:
        return {"gpu": torch.cuda.get_device_name()}
    return {"torch": torch.__version__, "cpu": fingerprint(), "cores": count_cores()}


def keep(data: DataConfig, found: AllReduce) -> Path:
    """Save a measurement in place of an earlier one of the same ranks and nodes. Raises `StorageError`."""
    here = machine(found.backend)
    which = {**here, **{key: getattr(found, key) for key in ("backend", "comm", "ranks", "nodes")}}
    digest = hashlib.sha256(json.dumps(which, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir(data) / FOLDER / f"{PREFIX}{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    run_dir.write_json(path, {"machine": here, **asdict(found)})
    return path


def recall(data: DataConfig, backend: str, comm: str, ranks: int, gpu: str) -> list[AllReduce]:
    """The measurements with this backend: those of type `comm` first, then by how near their number of ranks is.

    With NCCL they were made on a GPU with `gpu` in its name, else on this machine.
    """

    def holds(of: dict[str, Any]) -> bool:
        return gpu != "" and gpu in of["gpu"] if backend == NCCL else of == machine(backend)

    measured = []
    for path in sorted((cache_dir(data) / FOLDER).glob(f"{PREFIX}*.json")):
        with suppress(ValueError, KeyError, TypeError):  # from a file that is cut off or of another version
            values = run_dir.read_json(path)
            of = values.pop("machine")
            parts = {key: from_dict(values[key], Fitted) for key in PARTS if values[key] is not None}
            one: AllReduce = from_dict({**values, **parts}, AllReduce)
            if 0 < one.nodes <= one.ranks and one.backend == backend and holds(of):
                measured.append(one)
    return sorted(measured, key=lambda one: (one.comm != comm, abs(one.ranks - ranks)))
