"""`gptexp bench comm`: the time of an all-reduce by its size, on the ranks of a config, and the links that fit it.

Ranks are new processes on this machine, or those that a launcher (torchrun, srun) has started, on any number of nodes.
Over several nodes, the ranks of each node are also measured alone.
"""

import json
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import ProcessException, spawn

from gptexp.config.schema import Config
from gptexp.distributed.group import backend_of, connect, destroy_process_group, gather
from gptexp.distributed.ranks import Rank, count_cores, launcher_rank
from gptexp.machine.device import check_device, pick_device
from gptexp.machine.network import NCCL, AllReduce, Fitted, from_dict, keep
from gptexp.model.allreduce import fit_between, fit_ring
from gptexp.process.errors import ConfigError, UserError
from gptexp.process.signals import at_parents_death
from gptexp.process.words import counted

SIZES = [4 ** (i + 5) for i in range(8)]  # bytes: 1 KiB to 16 MiB
GPU_SIZES = [2**26, 2**28]  # 64 and 256 MiB
ROUNDS = 7
ROUND_S = 0.05  # about, of the all-reduces of one size in one round
MOST = 200  # all-reduces in a round
MOST_CROWDED = 4  # ranks on a core; more are not started
START = timedelta(minutes=10)


def bench_communication(cfg: Config, as_json: bool) -> int:
    """Measure, keep and print the all-reduce of the ranks of `cfg`, or of the launcher. Returns the exit code."""
    rank = launcher_rank()
    if (cfg.world.size or 1) == 1:  # of the launcher's, too
        raise ConfigError("gptexp bench comm: one rank sends nothing; give world.size=2 or more")
    found = _of_rank(cfg, rank) if rank is not None else _of_new_ranks(cfg)
    if found is not None:
        path = keep(cfg.data, found)
        if as_json:
            print(json.dumps(asdict(found), indent=1))
        else:
            show(found, path)
    return 0


def _of_new_ranks(cfg: Config) -> AllReduce:
    assert cfg.world.size is not None
    ranks = cfg.world.size
    kind = check_device(cfg.train.device, Rank(ranks - 1, ranks, ranks - 1, ranks))
    backend_of(cfg.world.backend, kind)  # refuses it here, in one line, and not in each of the new processes
    if kind == "cpu" and ranks > (most := MOST_CROWDED * count_cores()):
        raise ConfigError(
            f"world.size={ranks}: {counted(count_cores(), 'core')} run at most {most} ranks, because more of them wait "
            "for cores and not for the network; use fewer, or start them on several nodes with torchrun"
        )
    with tempfile.TemporaryDirectory(prefix="gptexp-") as name:
        folder = Path(name)
        try:
            spawn(_new_rank, (cfg, folder), ranks, daemon=True)  # when one ends early, it ends the others
        except ProcessException as ended:
            if (folder / "error").exists():
                raise ConfigError((folder / "error").read_text()) from None
            raise UserError(f"a rank of bench comm failed: {str(ended).strip().splitlines()[-1]}") from None
        return from_dict(json.loads((folder / "found.json").read_text()))


def _new_rank(number: int, cfg: Config, folder: Path) -> None:
    ranks = cfg.world.size
    assert ranks is not None
    at_parents_death(signal.SIGKILL)  # torch's own SIGINT does not end a rank that waits for another
    try:
        found = _of_rank(cfg, Rank(number, ranks, number, ranks), dist.FileStore(str(folder / "store"), ranks))
    except ConfigError as error:
        (folder / "error").write_text(str(error))
        sys.exit(1)
    if found is not None:
        (folder / "found.json").write_text(json.dumps(asdict(found)))


def _of_rank(cfg: Config, rank: Rank, store: dist.Store | None = None) -> AllReduce | None:
    """Measure as one rank; the result on rank 0. *Collective.*"""
    device = pick_device(cfg.train.device, rank)
    backend = backend_of(cfg.world.backend, device.type)
    torch.set_num_threads(cfg.world.threads_per_rank or 1)
    dist.init_process_group(
        backend,
        store=store or connect(rank),
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
        seconds = {size: _measure(size, dtype, device, own) for size in sizes}
        inside = Fitted(*fit_ring(per_node, seconds), _by_text(seconds))
    if ranks > per_node:
        seconds = {size: _measure(size, dtype, device, None) for size in sizes}
        inside_s = inside.latency_s if inside is not None else 0.0
        fitted = fit_between(ranks, ranks // per_node, seconds, inside_s, has_trees=backend == NCCL)
        between = Fitted(*fitted, _by_text(seconds))
    destroy_process_group()
    return AllReduce(backend, cfg.world.comm, ranks, ranks // per_node, inside, between) if rank.is_main else None


def _by_text(seconds: dict[int, float]) -> dict[str, float]:
    """As JSON has it."""
    return {str(size): s for size, s in seconds.items()}


def _measure(size: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Median seconds of an all-reduce of `size` bytes in each `group`, of the slowest rank of all. *Collective.*"""
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


def show(found: AllReduce, path: Path) -> None:
    """Print the times, those of the fitted links, and their latency and bandwidth."""
    console = Console(highlight=False)
    network, nodes = found.network(), "" if found.nodes == 1 else f" on {found.nodes} nodes"
    console.print(f"all-reduce of {found.comm}, {found.backend}, {counted(found.ranks, 'rank')}{nodes}")
    for fitted, ranks, where in (
        (found.inside, found.ranks_per_node, "in a node"),
        (found.between, found.ranks, "between nodes"),
    ):
        if fitted is None:
            continue
        table = Table("bytes", "ms", "fitted", "GB/s", title_justify="left", box=None, pad_edge=False)
        for column in table.columns:
            column.justify = "right"
        for size, s in ((int(size), s) for size, s in fitted.seconds.items()):
            sent = 2 * (ranks - 1) / ranks * size  # by each rank, as nccl-tests' "bus bandwidth"
            fitted_ms = 1e3 * network.all_reduce_s(ranks, size)
            table.add_row(f"{size:,}", f"{1e3 * s:.3f}", f"{fitted_ms:.3f}", f"{sent / s / 1e9:.2f}")
        console.print(f"\n{counted(ranks, 'rank')}:\n")
        console.print(table)
        console.print(
            f"\n{where}: latency {1e6 * fitted.latency_s:.1f} µs a message, "
            f"bandwidth {fitted.bytes_per_s / 1e9:.2f} GB/s of a rank"
        )
    console.print(f"gptexp plan uses them\n{path}")
