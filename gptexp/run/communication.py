"""`gptexp bench comm`: times all-reduces of several sizes on the ranks of a config, and fits links to the times.

Ranks are new processes on this machine, or those that a launcher (torchrun, srun) has started, on any number of nodes.
Over several nodes, the ranks of each node are also measured alone.
"""

import json
import math
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls
from torch.multiprocessing.spawn import ProcessException, spawn

from gptexp.config.schema import Config
from gptexp.distributed.group import backend_of, connect, destroy_process_group, gather
from gptexp.distributed.ranks import Rank, launcher_rank
from gptexp.machine.device import check_device, pick_device
from gptexp.machine.network import MOST_CROWDED, AllReduce, Fitted, keep
from gptexp.model.allreduce import NCCL, Way
from gptexp.process.cores import count_cores
from gptexp.process.errors import ConfigError, UserError
from gptexp.process.signals import at_parents_death
from gptexp.process.words import counted

SIZES = [4 ** (i + 5) for i in range(8)]  # bytes: 1 KiB to 16 MiB
GPU_SIZES = [2**26, 2**28]  # 64 and 256 MiB
ROUNDS = 7
ROUND_S = 0.05  # rough duration of a round, which repeats the all-reduce of one size
MOST = 200  # most all-reduces in a round
START = timedelta(minutes=10)


def bench_communication(cfg: Config, as_json: bool) -> int:
    """Measure, keep and print the all-reduce of the ranks of `cfg`, or of the launcher. Returns the exit code."""
    ranks, rank = cfg.world.size or 1, launcher_rank()
    if ranks == 1:  # also if a launcher started it
        raise ConfigError("gptexp bench comm: one rank sends nothing; give world.size=2 or more")
    if rank is not None:
        _measure_as_rank(cfg, as_json, rank, connect(rank))
        return 0
    kind = check_device(cfg.train.device, Rank(ranks - 1, ranks, ranks - 1, ranks))
    backend_of(cfg.world.backend, kind)  # refuse it here, in one line, and not in each of the new processes
    if kind == "cpu" and ranks > (most := MOST_CROWDED * count_cores()):
        raise ConfigError(
            f"world.size={ranks}: {counted(count_cores(), 'core')} run at most {most} ranks, because more of them wait "
            "for cores and not for the network; use fewer, or start them on several nodes with torchrun"
        )
    with tempfile.TemporaryDirectory(prefix="gptexp-") as folder:
        try:
            # When one process ends early, the others are ended too.
            spawn(_measure_as_new_rank, (cfg, as_json, ranks, Path(folder) / "store"), ranks, daemon=True)
        except ProcessException as ended:
            raise UserError(f"a rank of bench comm failed: {str(ended).strip().splitlines()[-1]}") from None
    return 0


def _measure_as_new_rank(number: int, cfg: Config, as_json: bool, ranks: int, store: Path) -> None:
    at_parents_death(signal.SIGKILL)  # torch's own SIGINT does not end a rank that waits for another
    _measure_as_rank(cfg, as_json, Rank(number, ranks, number, ranks), dist.FileStore(str(store), ranks))


def _measure_as_rank(cfg: Config, as_json: bool, rank: Rank, store: dist.Store) -> None:
    """Measure as one rank. Rank 0 keeps and prints the result. *Collective.*"""
    device = pick_device(cfg.train.device, rank)
    backend = backend_of(cfg.world.backend, device.type)
    torch.set_num_threads(cfg.world.threads_per_rank or 1)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=START,
        device_id=device if backend == NCCL else None,
    )
    ranks, per_node = rank.world_size, rank.local_world_size
    if gather((rank.rank - rank.local_rank, per_node)) != [
        (number - number % per_node, per_node) for number in range(ranks)
    ]:
        raise ConfigError(
            "gptexp bench comm: needs as many ranks on each node, numbered node by node, as torchrun does; with srun "
            "use --distribution=block and --ntasks-per-node"
        )
    dtype = getattr(torch, cfg.world.comm)
    sizes = [*SIZES, *(GPU_SIZES if device.type == "cuda" else [])]
    inside = between = None
    if per_node > 1:
        own, _ = dist.new_subgroups(per_node)
        inside = fit(per_node, per_node, {size: _measure(size, dtype, device, own) for size in sizes})
    if ranks > per_node:
        seconds = {size: _measure(size, dtype, device, None) for size in sizes}
        inside_s = inside.latency_s if inside is not None else 0.0
        between = fit(ranks, ranks // per_node, seconds, inside_s, has_trees=backend == NCCL)
    destroy_process_group()
    if rank.is_main:
        measured = AllReduce(backend, cfg.world.comm, ranks, ranks // per_node, inside, between)
        path = keep(cfg.data, measured)
        print(json.dumps(asdict(measured), indent=1)) if as_json else show(measured, path)


def fit(ranks: int, nodes: int, seconds: Mapping[int, float], inside_s: float = 0.0, has_trees: bool = False) -> Fitted:
    """Fit the links between nodes to `seconds`, the time of an all-reduce by its bytes.

    With as many nodes as ranks, these are the links of a ring of ranks. A message inside of a node takes `inside_s`.
    Small messages are assumed to go over trees if `has_trees`, large ones over a ring. Minimises squares of relative
    errors, as sizes and times span orders of magnitude; latency and seconds per byte are never negative.
    """
    lines = [[1 / s, size / s] for size, s in seconds.items()]
    (start_s, byte_s), _ = nnls(lines, [1.0] * len(lines))
    inside, between = Way(has_trees, 0.0, 0.0).messages(ranks, nodes)
    latency_s = max(0.0, start_s / 2 - inside * inside_s) / between
    bytes_per_s = 2 * (ranks - 1) / ranks / byte_s if byte_s else math.inf
    return Fitted(latency_s, bytes_per_s, {str(size): s for size, s in seconds.items()})


def _measure(size: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Median seconds of an all-reduce of `size` bytes in every `group`, on the slowest of all ranks. *Collective.*"""
    tensor = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)

    def round_s(count: int) -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slowest: float = max(gather((time.perf_counter() - started) / count))
        return slowest

    round_s(2)
    count = max(1, min(MOST, int(ROUND_S / round_s(2))))
    return statistics.median(round_s(count) for _ in range(ROUNDS))


def show(measured: AllReduce, path: Path) -> None:
    """Print the measured times, the times of the fitted links, and the links' latency and bandwidth."""
    console = Console(highlight=False)
    nodes = "" if measured.nodes == 1 else f" on {measured.nodes} nodes"
    console.print(f"all-reduce of {measured.comm}, {measured.backend}, {counted(measured.ranks, 'rank')}{nodes}")
    within = (measured.inside, measured.ranks_per_node, "in a node")
    for fitted, ranks, where in (within, (measured.between, measured.ranks, "between nodes")):
        if fitted is None:
            continue
        network = replace(measured.network(), ranks=ranks)
        table = Table(box=None, pad_edge=False)
        for title in ("bytes", "ms", "fitted", "GB/s"):
            table.add_column(title, justify="right")
        for size, s in ((int(size), s) for size, s in fitted.seconds.items()):
            sent = 2 * (ranks - 1) / ranks * size  # by each rank, as nccl-tests' "bus bandwidth"
            ms, fitted_ms = 1e3 * s, 1e3 * network.all_reduce_s(size)
            table.add_row(f"{size:,}", f"{ms:.3f}", f"{fitted_ms:.3f}", f"{sent / s / 1e9:.2f}")
        console.print(f"\n{counted(ranks, 'rank')}:\n")
        console.print(table)
        latency, bandwidth = f"{1e6 * fitted.latency_s:.1f} µs a message", f"{fitted.bytes_per_s / 1e9:.2f} GB/s"
        console.print(f"\n{where}: latency {latency}, bandwidth {bandwidth} of a rank")
    console.print(f"gptexp plan uses them\n{path}")
