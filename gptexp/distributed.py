"""Ranks: who am I, the process group, how a step's gradients come together. The only file that knows RANK.

torch is imported inside the functions, so that the command line can ask for its rank before it pays for torch.
"""

import atexit
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from gptexp.errors import EXIT_FAILED, ConfigError, UserError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel


AT_ONCE = "GPTEXP_AT_ONCE"  # how many runs share this machine's cores and memory; a sweep's to say
CAUSE_FIRST_S = 2.0  # between the end of the rank that failed first and those of its peers
NCCL_LATER_S = 30.0  # how much later NCCL gives up than we do: it aborts the process before anyone can be named
PREPARATION = timedelta(days=2)  # how long ranks wait for one to have its data, decide or compile


@dataclass(frozen=True)
class Rank:
    """This process among all: `rank` in [0, world_size), `local_rank` in [0, local_world_size) on its node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    by_srun: bool = False  # a task of a SLURM job step, whose cores and GPUs may be its own share already

    @property
    def is_main(self) -> bool:
        """Rank 0: it logs, saves and speaks."""
        return self.rank == 0


def launcher_rank() -> Rank | None:
    """What torchrun, gptexp's own launcher or srun says of this process; None if nobody launched it.

    srun counts only where a job step of several tasks is running: an sbatch script sees SLURM_NTASKS and
    SLURM_PROCID=0 too, and is no rank.
    """
    env = os.environ
    in_step = int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in env
    if in_step and "RANK" not in env:
        env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"]
        env["LOCAL_RANK"] = env["SLURM_LOCALID"]
        env["LOCAL_WORLD_SIZE"] = env["SLURM_STEP_TASKS_PER_NODE"].split("(")[0].split(",")[0]
        env.setdefault("MASTER_ADDR", _first_host(env["SLURM_STEP_NODELIST"]))
        env.setdefault("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 20000))
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    local_rank, local_world_size = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", world_size))
    # torchrun as a task of a job step starts more ranks than there are tasks, or says so itself.
    by_srun = in_step and (env["RANK"], env["WORLD_SIZE"]) == (env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"])
    return Rank(rank, world_size, local_rank, local_world_size, by_srun and "TORCHELASTIC_RUN_ID" not in env)


def _first_host(node_list: str) -> str:
    """The first of SLURM's nodes, where rank 0 runs: `node[01-04,07],other` begins with `node01`."""
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", node_list)
    assert found is not None, node_list
    return "".join(part or "" for part in found.groups())


def cores_per_rank(rank: Rank) -> int:
    """CPU cores for each rank of this node."""
    if rank.by_srun and "SLURM_CPUS_PER_TASK" in os.environ:
        return int(os.environ["SLURM_CPUS_PER_TASK"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (rank.local_world_size * runs_at_once()))


def runs_at_once() -> int:
    """How many runs, this one among them, share the machine."""
    return int(os.environ.get(AT_ONCE) or 1)


def pick_device(wanted: str, rank: Rank) -> "torch.device":
    """The device of this rank: `auto` takes cuda, mps or cpu, the first there is; asked for and missing raises."""
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(k for k in there if there[k]) if wanted == "auto" else wanted
    if kind == "mps" and rank.world_size > 1:
        kind = "cpu" if wanted == "auto" else kind
    if not there[kind]:
        raise ConfigError(f"train.device={kind}: no {kind} device is visible to this process; use train.device=cpu")
    if kind == "cuda":
        if torch.cuda.device_count() == 1 and rank.by_srun:
            return torch.device("cuda", 0)  # srun may show each task its own GPU only
        if rank.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"world.size={rank.world_size}: local rank {rank.local_rank} has no GPU, this node has "
                f"{torch.cuda.device_count()}; start at most that many ranks per node, or use train.device=cpu"
            )
        torch.cuda.set_device(rank.local_rank)
        return torch.device("cuda", rank.local_rank)
    return torch.device(kind)


def connect() -> "dist.Store":
    """The store that the launcher's environment names. *Collective.*"""
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://"))
    # torch 2.13 hands the same store to every restart: without a prefix of its own, an attempt finds the
    # addresses of the one before (pytorch#135712).
    return dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def init_process_group(
    rank: Rank, store: "dist.Store", device: "torch.device", backend: str, timeout_s: float
) -> "dist.ProcessGroup":
    """Join the ranks; returns a second, patient group, for waiting while one rank decides or compiles. *Collective.*

    A node may take far longer than `timeout_s` to prepare its data; the ranks wait for one another first, through the
    store, which costs nothing.
    """
    import torch.distributed as dist

    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError(f"world.backend=nccl: talks between CUDA devices only, this is a {device.type}; use auto")
    if backend == "nccl":
        timeout_s += NCCL_LATER_S
    store.set(f"prepared/{rank.rank}", "")
    store.wait([f"prepared/{r}" for r in range(rank.world_size)], PREPARATION)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" and backend == "nccl" else None,
    )
    patient: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=PREPARATION)
    return patient


def destroy_process_group() -> None:
    """Leave; only after success, since closing connections first hides which rank failed."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def leaving(report: bool = True) -> Iterator[None]:
    """Run the whole of a rank's process, and end it without taking the interpreter apart.

    `report`: print what nobody caught; a launcher that has it from a file prints it once for all ranks.

    A thread of gloo's that lets go of a tensor meanwhile would abort the process and hide its exit code. A rank that
    fails for a reason of its own code waits before it goes: whoever's peer has gone fails too, within milliseconds,
    and the launcher must see the cause first.
    """
    code = 0
    try:
        yield
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BaseException:
        if report:
            traceback.print_exc()
        time.sleep(CAUSE_FIRST_S)
        code = EXIT_FAILED
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Reduction(Protocol):
    """How the gradients of a step's micro-steps come together, over all ranks. Built by `build_reduction`."""

    keeps_gradients: bool  # whether their memory must be there in the next step as well

    def __call__(self, micro_step: int, grad_accum_steps: int) -> AbstractContextManager[int]:
        """What a micro-step's forward and backward pass run in. *Collective.* Yields what to divide its loss by.

        After the last of `grad_accum_steps`, `grad` of every parameter is that of the mean loss of the whole step.
        """
        ...


def build_reduction(kind: str, model: "nn.Module", rank: Rank) -> Reduction:
    """`train.reduction` for `model`, which is in DDP where the mean is to be taken over several ranks."""
    from torch.nn.parallel import DistributedDataParallel

    if kind == "tree":
        return TreeReduction(model, rank)
    return MeanReduction(model if isinstance(model, DistributedDataParallel) else None)


class MeanReduction:
    """Gradients add up on each rank; DDP averages them over the ranks with the last micro-step."""

    def __init__(self, ddp: "DistributedDataParallel | None") -> None:
        self._ddp = ddp
        # DDP's gradients are views of its buckets: gone, the next would be made beside those, and copied.
        self.keeps_gradients = ddp is not None

    @contextmanager
    def __call__(self, micro_step: int, grad_accum_steps: int) -> Iterator[int]:
        if self._ddp is not None:
            # DDP reads the flag in the forward pass already: only the last micro-step's backward reduces.
            self._ddp.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        yield grad_accum_steps


class TreeReduction:
    """The same bits at any world size: a step's M micro-gradients add up along one binary tree.

    A float sum depends on its order. Here the order is fixed by the micro-batches alone: neighbours add up, then
    neighbouring pairs, and so on. A rank's contiguous run of M / W micro-batches is one subtree, and the ranks' sums
    meet by recursive doubling (Thakur, Rabenseifner and Gropp 2005, section 4), which goes on with the same tree. M
    and W are powers of two. Holds up to log2(M / W) + 1 copies of the gradients, and two more while ranks exchange.
    """

    keeps_gradients = False

    def __init__(self, model: "nn.Module", rank: Rank) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._rank = rank
        self._sums: list[list[torch.Tensor]] = []  # of the subtrees that wait for their neighbour, the largest first

    @contextmanager
    def __call__(self, micro_step: int, grad_accum_steps: int) -> Iterator[int]:
        if micro_step == 0:
            self._sums = []
        yield grad_accum_steps * self._rank.world_size
        total = []
        for p in self._parameters:
            assert p.grad is not None
            total.append(p.grad)
            p.grad = None
        done = micro_step + 1
        for _ in range((done & -done).bit_length() - 1):  # as often as 2 divides it, a subtree is complete
            total = _add(self._sums.pop(), total)
        self._sums.append(total)
        if done == grad_accum_steps:
            [total] = self._sums
            self._sums = []
            if self._rank.world_size > 1:
                _add_over_ranks(total, self._rank)
            for p, gradient in zip(self._parameters, total, strict=True):
                p.grad = gradient


def _add(a: "list[torch.Tensor]", b: "list[torch.Tensor]") -> "list[torch.Tensor]":
    for x, y in zip(a, b, strict=True):
        x += y
    return a


def _add_over_ranks(gradients: "list[torch.Tensor]", rank: Rank) -> None:
    """Replace this rank's sum by that of all ranks: in round k those of two ranks 2^k apart are exchanged."""
    import torch
    import torch.distributed as dist

    mine = torch.cat([g.reshape(-1) for g in gradients])
    theirs = torch.empty_like(mine)
    distance = 1
    while distance < rank.world_size:
        peer = rank.rank ^ distance
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]):
            work.wait()
        mine += theirs  # a + b is b + a to the last bit
        distance *= 2
    # Back into tensors of their own: where a view begins, vectorised kernels may add up in another order.
    for gradient, part in zip(gradients, mine.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def world_size() -> int:
    """Ranks of the process group; 1 without one."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def rank_index() -> int:
    """This rank's place in the process group; 0 without one."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def all_reduce_sum(value: "torch.Tensor") -> "torch.Tensor":
    """Sum `value` over the ranks in place and return it; the identity without a process group. *Collective.*"""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def barrier(group: "dist.ProcessGroup | None" = None) -> None:
    """Wait until every rank is here. *Collective.*"""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier(group)


def agree(decide: Callable[[], Any], rank: Rank, group: "dist.ProcessGroup | None") -> Any:
    """What `decide` gives on rank 0 (any object that pickles), or the `UserError` it raises, on all. *Collective.*"""
    import torch.distributed as dist

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
    """Every rank's `value` on every rank, in the order of the ranks; any object that pickles. *Collective.*"""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
