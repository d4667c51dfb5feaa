"""`batch.micro_batch_size=auto` on a GPU: the largest size whose step runs, found by running it.

What is compiled, fragmented or kept by a library's workspace no closed form knows; the estimate says where to begin.
"""

import gc
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from gptexp.batch import legal_micro_batches
from gptexp.build import build_gpt
from gptexp.config import Config
from gptexp.data.loader import MicroBatch
from gptexp.distributed import Rank, build_reduction
from gptexp.effective import ESTIMATED, Effective, apply, forward_context, step_context
from gptexp.errors import ConfigError
from gptexp.machine import is_out_of_memory
from gptexp.optim import build_optimizer
from gptexp.trainer import train_step

TRIED = "the largest that divides and ran"
USABLE = 0.95  # share of the free memory; the rest is for the collectives of several ranks


def settle_micro_batch(cfg: Config, effective: Effective, device: torch.device, world_size: int) -> Effective:
    """`effective` with the micro-batch size tried out, where it is a GPU's and only estimated so far.

    Raises `ConfigError` if not even one sequence fits.
    """
    if effective.reasons["micro_batch_size"] != ESTIMATED or device.type != "cuda":
        return effective
    apply(effective, cfg.train.deterministic)
    sizes = legal_micro_batches(cfg.batch.total_batch_size, cfg.seq_len, world_size)
    free = torch.cuda.mem_get_info(device)[0]

    def runs(size: int) -> bool:
        # Gradients that stay, those of earlier micro-steps or DDP's buckets, are there from the second micro-step on.
        micro_steps = 2 if size < sizes[0] or world_size > 1 else 1
        return taken(cfg, effective, device, size, micro_steps) <= USABLE * free

    size = largest(sizes, effective.micro_batch_size, runs)
    if size is None:
        raise ConfigError(
            "batch.micro_batch_size=auto: not even one sequence fits this GPU; use a smaller model or batch.seq_len, "
            "train.loss=chunked or train.activation_checkpointing=true"
        )
    reasons = {**effective.reasons, "micro_batch_size": TRIED}
    return replace(effective, micro_batch_size=size, reasons=reasons)


def largest(sizes: list[int], first: int, runs: Callable[[int], bool]) -> int | None:
    """The largest of `sizes`, which fall, that `runs`, looking up and down from `first`; None if none does."""
    at = sizes.index(first)
    if not runs(first):
        return next(filter(runs, sizes[at + 1 :]), None)
    while at > 0 and runs(sizes[at - 1]):
        at -= 1
    return sizes[at]


def taken(cfg: Config, effective: Effective, device: torch.device, size: int, micro_steps: int) -> float:
    """Bytes that training with micro-batch `size` takes of the GPU, infinite if it has fewer; leaves nothing behind."""
    torch.cuda.reset_peak_memory_stats(device)
    try:
        _two_steps(cfg, effective, device, size, micro_steps)
        most: float = torch.cuda.max_memory_reserved(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        most = math.inf
    gc.collect()
    torch.cuda.empty_cache()
    return most


def _two_steps(cfg: Config, effective: Effective, device: torch.device, size: int, micro_steps: int) -> None:
    """Train on padding; the second step has the optimizer's state from its beginning."""
    gpt = build_gpt(cfg, effective, device)
    optimizer = build_optimizer(gpt, cfg.optim, effective.fused)
    x = torch.zeros((size, cfg.seq_len), dtype=torch.int64, device=device)
    y = x.clone()  # one tensor twice would be compiled for just that
    context, reduction = forward_context(effective), build_reduction(cfg.train.reduction, gpt, Rank())
    with step_context(effective):
        for _ in range(2):
            batches = iter([MicroBatch(x, y, 0, 0)] * micro_steps)
            train_step(
                gpt, optimizer, reduction, batches, micro_steps, 0.0, cfg.optim.grad_clip, context, dropout=False
            )
    torch.cuda.synchronize(device)
