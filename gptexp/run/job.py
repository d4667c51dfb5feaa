"""What one rank needs for one run, and what it knows before it builds the model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gptexp.config.schema import Config
from gptexp.data.hellaswag import Example
from gptexp.data.loader import Dataset
from gptexp.distributed.ranks import Rank
from gptexp.machine.effective import Effective
from gptexp.process.signals import StopRequest
from gptexp.storage.checkpoint import TrainState
from gptexp.storage.init_from import Source


@dataclass(frozen=True)
class Job:
    """The inputs of a rank that trains a run; everything else follows from them."""

    cfg: Config  # frozen in the run directory; the same on all ranks
    directory: Path
    rank: Rank
    stop: StopRequest
    store: dist.Store | None = None  # the launcher's, if this process has connected to it already


@dataclass(frozen=True)
class Prepared:
    """The data, the device and the process group of a rank."""

    dataset: Dataset
    examples: list[Example]  # the examples of HellaSwag, if it is to be scored
    device: torch.device
    store: dist.Store | None  # None: one rank
    long_wait_group: dist.ProcessGroup | None  # for waiting while one rank decides, compiles or measures


@dataclass(frozen=True)
class Decision:
    """The choices of rank 0 for all ranks. Nodes may differ in hardware, but one run needs one set of choices."""

    effective: Effective
    checkpoint: Path | None  # the one of this run to continue from; None: the run begins
    source: Source | None  # the weights with which a run begins (`init_from`); None: random ones
    state: TrainState  # the counters to start from; training advances them
    branched_from: dict[str, Any] | None  # the checkpoint of another run with which this run began
