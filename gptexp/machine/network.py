"""What `gptexp bench comm` has measured of an all-reduce on this machine, kept in the cache for plans."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gptexp.config.schema import DataConfig
from gptexp.data.cache import cache_dir
from gptexp.distributed.ranks import count_cores
from gptexp.machine.cpu import fingerprint
from gptexp.machine.measured import FOLDER
from gptexp.model.networks import Link
from gptexp.process.errors import UserError
from gptexp.storage import run_dir

PREFIX = "comm-"  # of the files' names


@dataclass(frozen=True)
class AllReduce:
    """The measured all-reduce of `ranks` on `nodes`, and the ring that fits it."""

    backend: str
    comm: str  # type of the numbers, as world.comm
    ranks: int
    nodes: int
    latency_s: float
    bytes_per_s: float
    seconds: dict[str, float]  # by bytes

    @property
    def link(self) -> Link:
        where = f"{self.ranks} ranks" if self.nodes == 1 else f"{self.ranks} ranks on {self.nodes} nodes"
        return Link(f"measured: {self.backend}, {where}", self.latency_s, self.bytes_per_s)


def machine() -> dict[str, Any]:
    """What a measurement holds for."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"torch": torch.__version__, "cpu": fingerprint(), "cores": count_cores(), "gpu": gpu}


def keep(data: DataConfig, found: AllReduce) -> Path:
    """Save a measurement in place of an earlier one of as many ranks. Raises `StorageError`."""
    which = {**machine(), **{key: getattr(found, key) for key in ("backend", "comm", "ranks", "nodes")}}
    digest = hashlib.sha256(json.dumps(which, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir(data) / FOLDER / f"{PREFIX}{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    run_dir.write_json(path, {"machine": machine(), **asdict(found)})
    return path


def recall(data: DataConfig, backend: str, comm: str, ranks: int) -> AllReduce | None:
    """The measurement on this machine whose ranks are nearest to `ranks`; one of the same type, if there is any."""
    kept = []
    for path in sorted((cache_dir(data) / FOLDER).glob(f"{PREFIX}*.json")):
        try:
            values = run_dir.read_json(path)
            if values.pop("machine") == machine() and values["backend"] == backend:
                kept.append(AllReduce(**values))
        except (UserError, KeyError, TypeError):  # a file that was cut off, or is another version's
            continue
    return min(kept, key=lambda one: (one.comm != comm, abs(one.ranks - ranks)), default=None)
