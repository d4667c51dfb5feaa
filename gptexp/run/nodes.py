"""What the nodes of one run must have in common: the run directory, the kind of device, the data and the time."""

import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gptexp.distributed.ranks import Rank
from gptexp.process.errors import ConfigError, DataError
from gptexp.process.terminal import warn
from gptexp.process.words import counted
from gptexp.storage import run_dir

CLOCKS_S = 120.0  # largest difference of two nodes' clocks without a warning


@dataclass(frozen=True)
class Place:
    """What one rank sees on its node."""

    rank: int
    host: str
    device: str
    data_hash: str
    sees_run: bool  # the run directory in which rank 0 writes
    clock_s: float

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


def leave_mark(directory: Path) -> Path:
    """Create a file in the run directory, which every node must see. Rank 0 removes it after the check."""
    # A new name, because a client of a network file system may remember that a file is missing, or its old content.
    mark = directory / f"{run_dir.MARK}{secrets.token_hex(8)}"
    with run_dir.storage(mark):
        mark.touch()
    return mark


def place_of(rank: Rank, device: str, data_hash: str, mark: Path) -> Place:
    """The place of this rank; call it on all ranks at once. One rank of each node looks for the mark of rank 0."""
    sees_run = rank.local_rank != 0 or mark.exists()
    return Place(rank.rank, socket.gethostname(), device, data_hash, sees_run, time.time())


def check_places(places: Sequence[Place], directory: Path) -> None:
    """Raise `ConfigError` or `DataError`, on all ranks, if the ranks cannot train one run."""
    first = places[0]
    for place in places:
        if not place.sees_run:
            raise ConfigError(
                f"{directory}: {place.name} does not see what {first.name} writes there; put the run directory on a "
                "file system that all nodes share"
            )
        if place.device != first.device:
            raise ConfigError(
                f"{place.name} has {place.device}, and {first.name} has {first.device}: the run would be as slow as "
                "the slower kind, and each rounds in its own way; start all ranks on one kind of device"
            )
        if place.data_hash != first.data_hash:
            raise DataError(
                f"{place.name}: its data differs from that of rank 0 (token hash {place.data_hash}, not "
                f"{first.data_hash}); give every node the same text, or for data=stdlib the same Python"
            )


def warn_of_clocks(places: Sequence[Place]) -> None:
    """Print which node's clock differs most from that of rank 0, if any differs much.

    This is no error, because it changes no result: only rank 0 writes times. But times in the nodes' logs, and the
    ages of files that they share, are then wrong.
    """
    first = places[0]
    off = [place for place in places if abs(place.clock_s - first.clock_s) > CLOCKS_S]
    if off:
        worst = max(off, key=lambda place: abs(place.clock_s - first.clock_s))
        by = worst.clock_s - first.clock_s
        warn(
            f"warning: the clock of {worst.name} is {abs(by):,.0f} s {'ahead of' if by > 0 else 'behind'} that of "
            f"{first.name} ({counted(len(off), 'rank')} in all): times in logs and of files are wrong; synchronise the "
            "clocks"
        )
