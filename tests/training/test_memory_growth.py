"""The memory of the training process does not grow with the number of steps."""

import ctypes
import gc
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from gptexp.config.compose import compose
from gptexp.distributed.ranks import Rank
from gptexp.process.signals import StopRequest
from gptexp.run.job import Job
from gptexp.run.rank import run
from gptexp.training.step import TrainStep


class Allocated(ctypes.Structure):
    """glibc's mallinfo2(3); `uordblks`: bytes in use."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def allocated_bytes() -> int:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Allocated
    return int(mallinfo2().uordblks)


@pytest.mark.slow
def test_memory_does_not_grow_over_two_thousand_steps(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With wandb offline. Compares the memory of Python and malloc after 500 and after 2,500 steps."""
    overrides = [o for o in tiny if "max_steps" not in o and not o.startswith("log=")]
    cfg = compose([*overrides, "train.max_steps=2501", "train.eval_every=0", "train.save_every=0", "log=offline",
                   "log.progress=off", "log.sample_tokens=0"])  # fmt: skip
    counted: list[tuple[int, int]] = []
    steps = itertools.count()
    plain_step = TrainStep.__call__

    def counting_step(*args: Any, **kwargs: Any) -> Any:
        if next(steps) in (500, 2500):
            gc.collect()
            counted.append((sys.getallocatedblocks(), allocated_bytes()))
        return plain_step(*args, **kwargs)

    monkeypatch.setattr(TrainStep, "__call__", counting_step)
    assert run(Job(cfg, tmp_path / "out", Rank(), StopRequest())) == 0
    (blocks, held), (blocks_late, held_late) = counted
    assert blocks_late - blocks < 1000  # half an object a step
    assert held_late - held < 200_000  # 100 bytes a step
