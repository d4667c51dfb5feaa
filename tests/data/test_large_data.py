"""Ten billion tokens: neither the time of a step nor the memory grows with the size of the data."""

import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import events

from gptexp.config.compose import compose
from gptexp.data.prepare import find_corpus, tokens_dir
from gptexp.data.shards import HEADER, MANIFEST, header
from gptexp.data.stream import TokenStream, mark_verified
from gptexp.process.errors import DataError

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

SHARDS, TOKENS_PER_SHARD = 100, 100_000_000


def write_sparse(directory: Path, shards: int, tokens_per_shard: int) -> None:
    """Shards of zeros as sparse files, and their manifest."""
    directory.mkdir(parents=True)
    names = [f"tokens-{number:05d}.bin" for number in range(shards)]
    for name in names:
        with (directory / name).open("wb") as file:
            file.write(header(2, tokens_per_shard))
            file.truncate(HEADER.size + 2 * tokens_per_shard)
    manifest = {
        "version": 1,
        "tokens": shards * tokens_per_shard,
        "max_id": 0,
        "n_vocab": 257,
        "shards": [{"file": name, "tokens": tokens_per_shard, "sha256": name} for name in names],
    }
    (directory / MANIFEST).write_text(json.dumps(manifest))


def median(found: list[dict[str, Any]], key: str) -> float:
    return statistics.median(event[key] for event in found)


@pytest.mark.slow
def test_memory_and_reading_time_do_not_grow_with_the_data(gptexp: Gptexp, tmp_path: Path, corpus: Path) -> None:
    """A real run on a data set that is larger than the memory. Reading takes less than 1% of a step."""
    peaks = {}
    for name, shards, tokens in (("small", 1, 10_000_000), ("large", SHARDS, TOKENS_PER_SHARD)):
        cache = tmp_path / f"cache-{name}"
        overrides = [
            *("model=nano", "data=text", f"data.path={corpus}", f"data.cache_dir={cache}", "data.val_tokens=0"),
            *(
                "batch.total_batch_size=2048",
                "train.max_steps=7",
                "log=disabled",
                "log.sample_tokens=0",
                f"hydra.run.dir={name}",
            ),
        ]
        data = compose(overrides[:5]).data
        tokens_of_zeros = tokens_dir(find_corpus(data), data)
        write_sparse(tokens_of_zeros, shards, tokens)
        mark_verified(tokens_of_zeros)  # as after a first start, which would read 20 GB
        done = gptexp("train", *overrides)
        assert done.returncode == 0, done.stderr
        steps = events(tmp_path / name, "step")[2:]
        assert median(steps, "perf/data_ms") < 0.01 * median(steps, "perf/step_ms")
        peaks[name] = steps[-1]["perf/peak_mem_gib"]
    assert peaks["large"] < 1.1 * peaks["small"]


def test_reading_windows_does_not_increase_memory(tmp_path: Path) -> None:
    """Reads a thousand windows of each shard. With a memory map, the pages would count as memory of this process."""
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


def test_a_shard_truncated_while_it_is_open_raises_an_error(tmp_path: Path) -> None:
    write_sparse(tmp_path / "sparse", 2, 1000)
    stream = TokenStream(tmp_path / "sparse")
    assert len(stream.read(990, 20)) == 20
    with (tmp_path / "sparse" / "tokens-00001.bin").open("r+b") as file:
        file.truncate(HEADER.size + 100)
    assert len(stream.read(990, 20)) == 20
    with pytest.raises(DataError, match=r"tokens-00001.bin: truncated during the run"):
        stream.read(990, 100)
