"""Nothing grows with the length of the run or the size of the data."""

import ctypes
import gc
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import events

from gptexp import trainer
from gptexp.compose import compose
from gptexp.data.prepare import find_corpus, tokens_dir
from gptexp.data.shards import HEADER, MAGIC, MANIFEST, VERSION, TokenStream
from gptexp.distributed import Rank
from gptexp.errors import DataError
from gptexp.run import run
from gptexp.signals import StopRequest

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

SHARDS, TOKENS_PER_SHARD = 100, 100_000_000


def write_sparse(directory: Path, shards: int, tokens_per_shard: int) -> None:
    """Shards of zeros that take no room on the disk, and their manifest."""
    directory.mkdir(parents=True)
    names = [f"tokens-{number:05d}.bin" for number in range(shards)]
    for name in names:
        with (directory / name).open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, 2, tokens_per_shard))
            file.truncate(HEADER.size + 2 * tokens_per_shard)
    manifest = {
        "tokens": shards * tokens_per_shard,
        "max_id": 0,
        "shards": [{"file": name, "tokens": tokens_per_shard, "sha256": name} for name in names],
    }
    (directory / MANIFEST).write_text(json.dumps(manifest))


def median(found: list[dict[str, Any]], key: str) -> float:
    return statistics.median(event[key] for event in found)


@pytest.mark.slow
def test_ten_billion_tokens_cost_what_ten_million_cost(gptexp: Gptexp, tmp_path: Path, corpus: Path) -> None:
    """A real run on a data set that no memory holds: reading it is no part of the step, and nothing of it stays."""
    peaks = {}
    for name, shards, tokens in (("small", 1, 10_000_000), ("large", SHARDS, TOKENS_PER_SHARD)):
        cache = tmp_path / f"cache-{name}"
        overrides = [
            *("data=text", f"data.path={corpus}", f"data.cache_dir={cache}", "data.val_tokens=0"),
            *(
                "batch.total_batch_size=2048",
                "train.max_steps=7",
                "log=disabled",
                "log.sample_tokens=0",
                f"hydra.run.dir={name}",
            ),
        ]
        data = compose(overrides[:4]).data
        write_sparse(tokens_dir(find_corpus(data), data), shards, tokens)
        done = gptexp("train", *overrides)
        assert done.returncode == 0, done.stderr
        steps = events(tmp_path / name, "step")[2:]
        assert median(steps, "perf/data_ms") < 0.01 * median(steps, "perf/step_ms")
        peaks[name] = steps[-1]["perf/peak_mem_gib"]
    assert peaks["large"] < 1.1 * peaks["small"]


def test_reading_keeps_nothing_in_memory(tmp_path: Path) -> None:
    """A thousand windows of every shard: a memory map would count each page read as this process's own."""
    import psutil

    write_sparse(tmp_path / "sparse", SHARDS, TOKENS_PER_SHARD)
    stream = TokenStream(tmp_path / "sparse")
    assert len(stream) == 10**10
    process = psutil.Process()
    before, files = process.memory_info().rss, process.num_fds()
    for shard in range(SHARDS):
        for window in range(1000):
            assert len(stream.read(shard * TOKENS_PER_SHARD + window * 99_000, 1025)) == 1025
    assert process.memory_info().rss - before < 20 * 2**20
    assert process.num_fds() - files <= SHARDS
    del stream
    assert process.num_fds() == files


def test_a_shard_cut_short_while_it_is_read_is_an_error_and_no_crash(tmp_path: Path) -> None:
    write_sparse(tmp_path / "sparse", 2, 1000)
    stream = TokenStream(tmp_path / "sparse")
    assert len(stream.read(990, 20)) == 20
    with (tmp_path / "sparse" / "tokens-00001.bin").open("r+b") as file:
        file.truncate(HEADER.size + 100)
    assert len(stream.read(990, 20)) == 20
    with pytest.raises(DataError, match=r"tokens-00001.bin: was cut short while in use"):
        stream.read(990, 100)


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
def test_a_step_leaves_nothing_in_memory(tiny: list[str], tmp_path: Path) -> None:
    """No list, log or buffer grows: what Python and malloc hold after 500 steps and after 2,500, wandb and all."""
    overrides = [o for o in tiny if "max_steps" not in o and not o.startswith("log=")]
    cfg = compose([*overrides, "train.max_steps=2501", "train.eval_every=0", "train.save_every=0", "log=offline",
                   "log.progress=off", "log.sample_tokens=0"])  # fmt: skip
    counted: list[tuple[int, int]] = []
    steps = itertools.count()
    plain_step = trainer.train_step

    def counting_step(*args: Any, **kwargs: Any) -> Any:
        if next(steps) in (500, 2500):
            gc.collect()
            counted.append((sys.getallocatedblocks(), allocated_bytes()))
        return plain_step(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", counting_step)
        assert run(cfg, tmp_path / "out", StopRequest(), Rank()) == 0
    (blocks, held), (blocks_late, held_late) = counted
    assert blocks_late - blocks < 1000  # half an object a step
    assert held_late - held < 200_000  # 100 bytes a step
