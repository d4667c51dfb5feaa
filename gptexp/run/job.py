"""What one rank needs for one run."""

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from gptexp.config.schema import Config
from gptexp.distributed.ranks import Rank
from gptexp.process.signals import StopRequest


@dataclass(frozen=True)
class Job:
    """The inputs of a rank that trains a run; everything else follows from them."""

    cfg: Config  # frozen in the run directory; the same on all ranks
    directory: Path
    rank: Rank
    stop: StopRequest
    store: dist.Store | None = None  # the launcher's, if this process has connected to it already
