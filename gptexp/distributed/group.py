"""The process group and the collectives that gptexp uses."""

import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gptexp.distributed.ranks import Rank, rendezvous
from gptexp.process.errors import ConfigError, UnavailableError, UserError
from gptexp.process.terminal import warn
from gptexp.process.words import counted

# Seconds added to NCCL's timeout, which aborts the process: gptexp must time out first to report which rank failed.
NCCL_LATER_S = 30.0
PREPARATION = timedelta(days=2)  # timeout of waiting for a rank that prepares data, decides or compiles
# From this number of ranks on, gloo connects two ranks when they first exchange something. Otherwise each of W ranks
# reads the addresses of all others from the store: W² messages of 154 + 8 W bytes, 9 GB for 1,024 ranks.
LAZY_FROM = 64
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between two questions to the store
SAID_AFTER_S = 15.0  # seconds of waiting for the other ranks after which a line says so


def connect(rank: Rank) -> dist.Store:
    """Connect to the key-value store of the launcher that started `rank`. *Collective.*

    Raises `UnavailableError` if rank 0 cannot host the store at the port derived from SLURM's job number.
    """
    place = rendezvous(rank)
    try:
        store = _meet(place, rank)
    except dist.DistNetworkError as error:
        if not (rank.by_srun and rank.is_main):
            raise
        why = str(error).rpartition("message: ")[2]
        raise UnavailableError(
            f"{place.partition('?')[0]}: the ranks cannot meet at this address ({why}); set MASTER_PORT to a free port"
        ) from None
    # torch 2.13 reuses the store after a restart: without a prefix, an attempt reads the addresses of the previous
    # attempt (pytorch#135712).
    return dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _meet(place: str, rank: Rank) -> dist.Store:
    """Connect to the store at `place`, where rank 0 waits for all others. Signals end this process meanwhile."""
    met: Future[dist.Store] = Future()

    def meet() -> None:  # in C++, where Python handles no signal
        try:
            met.set_result(next(dist.rendezvous(place))[0])
        except BaseException as error:
            met.set_exception(error)

    threading.Thread(target=meet, daemon=True).start()
    if not wait([met], timeout=SAID_AFTER_S).done and rank.local_rank == 0:
        others = counted(rank.world_size - 1, "other rank")
        variables = "SLURM_STEP_NUM_TASKS" if rank.by_srun else "RANK and WORLD_SIZE"
        warn(f"rank {rank.rank} waits for {others}; if no launcher has started this process, unset {variables}")
    return met.result()


def backend_of(asked: str, device: str) -> str:
    """What `world.backend` becomes on this type of device. Raises `ConfigError` for NCCL without a GPU."""
    if asked == "auto":
        return "nccl" if device == "cuda" else "gloo"
    if asked == "nccl" and device != "cuda":
        raise ConfigError(f"world.backend=nccl: needs CUDA devices, not {device}; use world.backend=auto")
    return asked


def init_process_group(
    rank: Rank, store: dist.Store, device: torch.device, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Create the process group. Raises `ConfigError` for NCCL without a GPU. *Collective.*

    Returns a second group with a timeout of `PREPARATION`, for waiting while one rank decides or compiles. The ranks
    first wait for each other through the store, because data preparation may take far longer than `timeout_s`.
    """
    backend = backend_of(backend, device.type)
    if backend == "nccl":
        timeout_s += NCCL_LATER_S
    _wait_for_all(store, rank.world_size, heeds_signals=rank.is_main)
    if rank.world_size >= LAZY_FROM:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    dist.init_process_group(
        backend,
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    long_wait_group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=PREPARATION)
    return long_wait_group


def _wait_for_all(store: dist.Store, world_size: int, heeds_signals: bool = False) -> None:
    """Wait until every rank is here. Each sends the store messages of constant size. *Collective.*

    With `heeds_signals`, on rank 0, a signal ends the waiting process, and so the store and the other ranks.
    """
    if store.add("prepared", 1) == world_size:
        store.set("all prepared", "")
    if not heeds_signals:
        store.wait(["all prepared"], PREPARATION)
        return
    while not store.check(["all prepared"]):  # in `wait`, which is C++, Python handles no signal
        time.sleep(FIRST_PAUSE_S)


def wait_for(store: dist.Store, key: str, timeout_s: float = math.inf) -> bool:
    """Wait until another rank sets `key`. Returns whether it did within `timeout_s`.

    In the store's own `wait`, Python would handle no signal, and each timeout prints warnings. The pauses between
    questions grow, because thousands of ranks may wait for one.
    """
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while not store.check([key]):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
    return True


def destroy_process_group() -> None:
    """Destroy the process group. Call it only after success: closed connections would hide which rank failed."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    """Number of ranks in the process group; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank_index() -> int:
    """Number of this rank in the process group; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def all_reduce_sum(value: torch.Tensor) -> torch.Tensor:
    """Sum `value` over the ranks in place and return it; without a process group, return it unchanged. *Collective.*"""
    return begin_all_reduce(value, dist.ReduceOp.SUM)()


def begin_all_reduce(value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> Callable[[], torch.Tensor]:
    """Begin to reduce `value` over the ranks in place; `value` stays as it is without a process group. *Collective.*

    Call the result to wait for the reduction and to get `value`. On a GPU only the device waits.
    """
    work = dist.all_reduce(value, op, async_op=True) if dist.is_initialized() else None

    def reduced() -> torch.Tensor:
        if work is not None:
            work.wait()
        return value

    return reduced


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until every rank has called this. Does nothing without a process group. *Collective.*"""
    if dist.is_initialized():
        dist.barrier(group)


def agree(decide: Callable[[], Any], rank: Rank, group: dist.ProcessGroup | None = None) -> Any:
    """Call `decide` on rank 0 and return its result (any object that pickles) on every rank. *Collective.*

    A `UserError` that `decide` raises is raised on every rank.
    """
    shared: list[Any] = [None]
    if rank.is_main:
        try:
            shared = [decide()]
        except UserError as error:
            shared = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(shared, src=0, group=group)
    if isinstance(shared[0], UserError):
        raise shared[0]
    return shared[0]


def gather(value: Any) -> list[Any]:
    """Return the `value` (any object that pickles) of every rank, in rank order. *Collective.*"""
    values = [value] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values
