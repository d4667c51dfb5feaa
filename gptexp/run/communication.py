"""`gptexp bench comm`: the time of an all-reduce by its size, on the ranks of a config, and the ring that fits it.

Ranks are new processes on this machine, or those that a launcher (torchrun, srun) has started, on any number of nodes.
"""

import json
import statistics
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from gptexp.config.schema import Config
from gptexp.distributed.group import connect, destroy_process_group, gather
from gptexp.distributed.ranks import Rank, launcher_rank
from gptexp.machine.device import pick_device
from gptexp.machine.network import AllReduce, keep
from gptexp.model.allreduce import fit_ring, ring_s
from gptexp.process.errors import ConfigError, UserError
from gptexp.process.words import counted

SIZES = [4 ** (i + 5) for i in range(8)]  # bytes: 1 KiB to 16 MiB
GPU_SIZES = [2**26, 2**28]  # 64 and 256 MiB
ROUNDS = 7
ROUND_S = 0.05  # about, of the all-reduces of one size in one round
MOST = 200  # all-reduces in a round
START = timedelta(minutes=10)


def bench_communication(cfg: Config, as_json: bool) -> int:
    """Measure, keep and print the all-reduce of the ranks of `cfg`, or of the launcher. Returns the exit code."""
    rank = launcher_rank()
    if rank is not None:
        found = _of_rank(cfg, rank)
    elif (cfg.world.size or 1) == 1:
        raise ConfigError("gptexp bench comm: one rank sends nothing; give world.size=2 or more")
    else:
        found = _of_new_ranks(cfg)
    if found is not None:
        path = keep(cfg.data, found)
        if as_json:
            print(json.dumps(asdict(found), indent=1))
        else:
            show(found, path)
    return 0


def _of_new_ranks(cfg: Config) -> AllReduce:
    assert cfg.world.size is not None
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="gptexp-") as name:
        folder = Path(name)
        ranks = [Rank(number, cfg.world.size, number, cfg.world.size) for number in range(cfg.world.size)]
        processes = [context.Process(target=_new_rank, args=(cfg, rank, folder), daemon=True) for rank in ranks]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if (folder / "error").exists():
            raise ConfigError((folder / "error").read_text())
        if any(process.exitcode for process in processes):
            raise UserError(f"ranks of bench comm ended with exit codes {[p.exitcode for p in processes]}")
        return AllReduce(**json.loads((folder / "found.json").read_text()))


def _new_rank(cfg: Config, rank: Rank, folder: Path) -> None:
    try:
        found = _of_rank(cfg, rank, dist.FileStore(str(folder / "store"), rank.world_size))
    except ConfigError as error:
        (folder / "error").write_text(str(error))
        return
    if found is not None:
        (folder / "found.json").write_text(json.dumps(asdict(found)))


def _of_rank(cfg: Config, rank: Rank, store: dist.Store | None = None) -> AllReduce | None:
    """Measure as one rank; the result on rank 0. *Collective.*"""
    device = pick_device(cfg.train.device, rank)
    backend = cfg.world.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    torch.set_num_threads(cfg.world.threads_per_rank or 1)
    dist.init_process_group(
        backend,
        store=store or connect(rank),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=START,
        device_id=device if backend == "nccl" else None,
    )
    dtype = getattr(torch, cfg.world.comm)
    sizes = [*SIZES, *(GPU_SIZES if device.type == "cuda" else [])]
    seconds = {size: _measure(size, dtype, device) for size in sizes}
    destroy_process_group()
    if not rank.is_main:
        return None
    ranks, nodes = rank.world_size, -(-rank.world_size // rank.local_world_size)
    by_size = {str(size): s for size, s in seconds.items()}
    return AllReduce(backend, cfg.world.comm, ranks, nodes, *fit_ring(ranks, seconds), by_size)


def _measure(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Median seconds of an all-reduce of `size` bytes, of the slowest rank in each round. *Collective.*"""
    tensor = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)

    def round_s(count: int) -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slowest: float = max(gather((time.perf_counter() - started) / count))
        return slowest

    round_s(2)
    count = max(1, min(MOST, int(ROUND_S / round_s(2))))
    return statistics.median(round_s(count) for _ in range(ROUNDS))


def show(found: AllReduce, path: Path) -> None:
    """Print the times, those of the fitted ring, and its latency and bandwidth."""
    table = Table("bytes", "ms", "fitted", "GB/s", title_justify="left", box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    seconds = {int(size): s for size, s in found.seconds.items()}
    for size, s in seconds.items():
        fitted = ring_s(found.ranks, size, found.latency_s, found.bytes_per_s)
        sent = 2 * (found.ranks - 1) / found.ranks * size  # by each rank, as nccl-tests' "bus bandwidth"
        table.add_row(f"{size:,}", f"{1e3 * s:.3f}", f"{1e3 * fitted:.3f}", f"{sent / s / 1e9:.2f}")
    nodes = "" if found.nodes == 1 else f" on {found.nodes} nodes"
    console = Console(highlight=False)
    console.print(f"all-reduce of {found.comm}, {found.backend}, {counted(found.ranks, 'rank')}{nodes}\n")
    console.print(table)
    console.print(
        f"\nlatency {1e6 * found.latency_s:.1f} µs a message, bandwidth {found.bytes_per_s / 1e9:.2f} GB/s of a rank "
        f"(a ring: 2 ({found.ranks} - 1) messages); gptexp plan uses them\n{path}"
    )
