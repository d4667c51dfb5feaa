"""What `gptexp bench comm` has measured of an all-reduce, kept in the cache for plans."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gptexp.config.schema import DataConfig
from gptexp.data.cache import cache_dir
from gptexp.distributed.ranks import count_cores
from gptexp.machine.cpu import fingerprint
from gptexp.model.allreduce import Network
from gptexp.model.networks import NVLINK_WAYS, PCIE_4, PCIE_WAYS, WITHIN_NODE, Link, Way
from gptexp.process.errors import UserError
from gptexp.storage import run_dir

FOLDER = "measured"  # in the cache directory
PREFIX = "comm-"  # of the files' names
NCCL = "nccl"


@dataclass(frozen=True)
class Fitted:
    """The links that fit a measured all-reduce."""

    latency_s: float  # of a message
    bytes_per_s: float
    seconds: dict[str, float]  # of an all-reduce, by its bytes


@dataclass(frozen=True)
class AllReduce:
    """The measured all-reduce of `ranks` on `nodes`."""

    backend: str
    comm: str  # type of the numbers, as world.comm
    ranks: int
    nodes: int
    inside: Fitted | None  # of the ranks of one node; None: there is one on each
    between: Fitted | None  # of all ranks; None: there is one node

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    def network(self) -> Network:
        """As measured, and nothing else."""
        ways = ways_with(ways_of(self.backend, None), self.inside, self.between)
        inside, between = self.link_inside or self.link_between, self.link_between
        assert inside is not None
        return Network(inside, self.ranks_per_node, between, ways)

    @property
    def link_inside(self) -> Link | None:
        name = f"measured: {self.backend}, {self.ranks_per_node} ranks"
        return None if self.inside is None else Link(name, self.inside.bytes_per_s)

    @property
    def link_between(self) -> Link | None:
        name = f"measured: {self.backend}, {self.ranks} ranks on {self.nodes} nodes"
        return None if self.between is None else Link(name, self.between.bytes_per_s)


def ways_of(backend: str, gpu: str | None) -> tuple[Way, ...]:
    """How a backend sends, between GPUs of a kind in `WITHIN_NODE` if it is known: gloo on rings alone."""
    if backend == NCCL:
        return PCIE_WAYS if gpu is None or WITHIN_NODE[gpu] is PCIE_4 else NVLINK_WAYS
    return tuple(way for way in PCIE_WAYS if not way.is_tree)


def ways_with(ways: Sequence[Way], inside: Fitted | None, between: Fitted | None) -> tuple[Way, ...]:
    """`ways` with what is measured in place of their latencies. It contains what they need to start."""
    if inside is not None:
        ways = [replace(way, inside_s=inside.latency_s, start_s=0.0) for way in ways]
    if between is not None:
        ways = [replace(way, between_s=between.latency_s, start_s=0.0) for way in ways]
    return tuple(ways)


def from_dict(values: dict[str, Any]) -> AllReduce:
    """From the form of `dataclasses.asdict`. Raises `KeyError` or `TypeError` for another."""
    parts = {part: values[part] and Fitted(**values[part]) for part in ("inside", "between")}
    return AllReduce(**{**values, **parts})


def machine(backend: str) -> dict[str, Any]:
    """What a measurement here holds for: with NCCL the kind of GPU, else the processor."""
    if backend == NCCL:
        return {"gpu": torch.cuda.get_device_name()}
    return {"torch": torch.__version__, "cpu": fingerprint(), "cores": count_cores()}


def keep(data: DataConfig, found: AllReduce) -> Path:
    """Save a measurement in place of an earlier one of as many ranks. Raises `StorageError`."""
    here = machine(found.backend)
    which = {**here, **{key: getattr(found, key) for key in ("backend", "comm", "ranks", "nodes")}}
    digest = hashlib.sha256(json.dumps(which, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir(data) / FOLDER / f"{PREFIX}{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    run_dir.write_json(path, {"machine": here, **asdict(found)})
    return path


def recall(data: DataConfig, backend: str, comm: str, ranks: int, gpu: str) -> list[AllReduce]:
    """The measurements with this backend, first those of the same type and with a number of ranks near `ranks`.

    With NCCL they are of a GPU with `gpu` in its name, else of this machine.
    """

    def holds(of: dict[str, Any]) -> bool:
        return gpu != "" and gpu in of["gpu"] if backend == NCCL else of == machine(backend)

    found = [one for of, one in _kept(data) if one.backend == backend and holds(of)]
    return sorted(found, key=lambda one: (one.comm != comm, abs(one.ranks - ranks)))


def _kept(data: DataConfig) -> Iterator[tuple[dict[str, Any], AllReduce]]:
    for path in sorted((cache_dir(data) / FOLDER).glob(f"{PREFIX}*.json")):
        try:
            values = run_dir.read_json(path)
            yield values.pop("machine"), from_dict(values)
        except (UserError, KeyError, TypeError):  # a file that was cut off, or is another version's
            continue
