"""The model of a run as its effective choices say: which loss, compiled, in DDP."""

import atexit
import getpass
import hashlib
import os
import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gptexp import loss as losses
from gptexp.config import Config
from gptexp.distributed import Rank, barrier
from gptexp.effective import Effective
from gptexp.machine import compile_options
from gptexp.model import GPT
from gptexp.trainer import Training

# DDP cuts a compiled graph wherever a bucket of gradients is full. With accumulation buckets matter in one micro-step
# and cuts in all: fewer of them than DDP's 25 MiB make, which cut GPT-2 124M into 14.
BUCKETS = 5
LEAST_BUCKET_MIB = 25.0
INDUCTOR_CACHE, TRITON_CACHE = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def replace_unwritable_caches() -> list[str]:
    """Have torch keep what it compiles for this process only where its folders take nothing; a line for each.

    Call it before the first optimizer is made: that imports the compiler, which makes its folder or fails.
    """
    # Where torch itself would put it (torch._inductor.runtime.cache_dir_utils, which imports the compiler).
    os.environ.setdefault(INDUCTOR_CACHE, f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    lines = []
    for name in (INDUCTOR_CACHE, TRITON_CACHE):
        folder = os.environ.get(name)
        if folder is None:
            continue
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"something")
                file.flush()
        except OSError as error:
            os.environ[name] = tempfile.mkdtemp(prefix="gptexp-compiled-")
            atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)
            lines.append(f"{name}={folder}: cannot be written to ({error.strerror}); each process compiles for itself")
    return lines


def build_gpt(cfg: Config, effective: Effective, device: torch.device) -> GPT:
    """The seeded model on `device`, compiled if so decided; compiling itself happens in the first step."""
    torch.manual_seed(cfg.train.seed)
    loss = losses.chunked_cross_entropy if effective.loss == "chunked" else losses.plain_cross_entropy
    gpt = GPT(cfg.model, loss, cfg.train.activation_checkpointing).to(device)
    if effective.compile:
        torch.compiler.reset()  # a launcher's process trains many cells: graphs of the last ones' shapes are of no use
        # What torch's own key of the compile cache knows nothing of: which kernels attention may choose from while
        # compiling; how the gradients of the loss's operation come about; and, before torch 2.13, threads.
        asked, source = effective.reasons["attention"], hashlib.sha256(Path(losses.__file__).read_bytes()).hexdigest()
        tag = f"{effective.attention} ({asked}), loss {source[:16]}, {effective.threads_per_rank} threads"
        torch.compiler.config.cache_key_tag = tag
        # One graph with the loss inside, or an error that says why not.
        gpt.compile(fullgraph=True, dynamic=False, options=compile_options())
    return gpt


def wrap(gpt: GPT, effective: Effective, reduction: str, rank: Rank, device: torch.device) -> nn.Module:
    """DDP around the model, where it is to take the mean over several ranks. *Collective.*"""
    if rank.world_size == 1:
        return gpt
    if reduction == "tree":
        for parameter in gpt.parameters():
            dist.broadcast(parameter.data, src=0)  # as DDP does: the ranks begin with the same weights
        return gpt
    gradients_mib = sum(p.numel() * p.element_size() for p in gpt.parameters()) / 2**20
    return DistributedDataParallel(
        gpt,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        bucket_cap_mb=max(LEAST_BUCKET_MIB, gradients_mib / BUCKETS) if effective.compile else None,
    )


def compile_in_turn(t: Training, patient: "dist.ProcessGroup | None") -> None:
    """Compile on the first rank of every node, then on the others, which find its result in the cache. *Collective.*

    Runs one micro-step on padding, and a validation batch if there will be any; leaves no gradients.
    """
    if t.rank.world_size == 1:
        return
    unreduced = t.model.no_sync if isinstance(t.model, DistributedDataParallel) else nullcontext
    x = torch.zeros((t.plan.micro_batch_size, t.plan.seq_len), dtype=torch.int64, device=t.device)
    y = x.clone()  # one tensor twice would be compiled for just that
    for first in (True, False):
        if (t.rank.local_rank == 0) == first:
            with unreduced():
                with t.forward_context():
                    loss = t.model(x, y)
                loss.backward()
            t.optimizer.zero_grad()
            if len(t.dataset.val_windows):
                t.gpt.eval()
                with torch.no_grad(), t.forward_context():
                    t.gpt(x, y)
                t.gpt.train()
        barrier(patient)
