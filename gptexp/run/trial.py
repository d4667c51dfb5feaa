"""`batch.micro_batch_size=auto` on a GPU: finds the largest size that fits by running training steps.

No formula gives the memory of compiled kernels, fragmentation and library workspaces. The estimate is the first size
that is tried.
"""

import gc
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from gptexp.config.batch import legal_micro_batches
from gptexp.config.schema import Config
from gptexp.data.loader import MicroBatch
from gptexp.distributed.ranks import Rank
from gptexp.distributed.reduction import build_reduction
from gptexp.distributed.sharding import WholeParameters
from gptexp.machine.device import is_out_of_memory
from gptexp.machine.effective import Choice, Effective, apply, forward_context, step_context
from gptexp.process.errors import ConfigError
from gptexp.run.build import build_gpt
from gptexp.training.optimizer import build_optimizer
from gptexp.training.step import TrainStep
from gptexp.training.weight_average import WeightAverage

USABLE = 0.95  # share of the free memory; the rest is for collectives


def settle_micro_batch(cfg: Config, effective: Effective, device: torch.device, world_size: int) -> Effective:
    """Replace a micro-batch size that was only estimated for a GPU by the largest one that fits.

    Raises `ConfigError` if not even one sequence fits.
    """
    is_split = cfg.world.sharding == "full" and world_size > 1  # the model may not fit this GPU alone
    if effective.micro_batch_size.source != "decided" or device.type != "cuda" or is_split:
        return effective
    apply(effective, cfg.train.deterministic)
    sizes = legal_micro_batches(cfg.batch.step_sizes.quantum, cfg.seq_len, world_size)
    free = torch.cuda.mem_get_info(device)[0]

    def runs(size: int) -> bool:
        # Gradients of earlier micro-steps, or DDP's buckets, are in memory from the second micro-step on.
        micro_steps = 2 if size * cfg.seq_len < cfg.batch.total_batch_size or world_size > 1 else 1
        return taken(cfg, effective, device, size, micro_steps) <= USABLE * free

    size = largest(sizes, effective.micro_batch_size.value, runs)
    if size is None:
        raise ConfigError(
            "batch.micro_batch_size=auto: not even one sequence fits this GPU; use a smaller model or batch.seq_len, "
            "train.loss=chunked, train.activation_checkpointing=true, or several ranks with world.sharding=full"
        )
    return replace(
        effective,
        micro_batch_size=Choice(size, "decided", "the largest that divides the step and fits into memory, by trial"),
    )


def largest(sizes: list[int], first: int, runs: Callable[[int], bool]) -> int | None:
    """Return the largest of the falling `sizes` that `runs`, searching up or down from `first`; None: no size runs."""
    at = sizes.index(first)
    if not runs(first):
        return next(filter(runs, sizes[at + 1 :]), None)
    while at > 0 and runs(sizes[at - 1]):
        at -= 1
    return sizes[at]


def taken(cfg: Config, effective: Effective, device: torch.device, size: int, micro_steps: int) -> float:
    """Return the GPU memory in bytes that training with micro-batch `size` takes; infinite if it does not fit."""
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
    """Train two steps on padding as a run does: the optimizer allocates its state in the first."""
    gpt = build_gpt(cfg, effective, device)
    x = torch.zeros((size, cfg.seq_len), dtype=torch.int64, device=device)
    y = x.clone()  # torch.compile would specialise on one tensor passed twice
    half_life_tokens = cfg.train.ema_half_life_tokens
    average = WeightAverage(WholeParameters(gpt), half_life_tokens) if half_life_tokens is not None else None
    step = TrainStep(
        model=gpt,
        optimizer=build_optimizer(gpt, cfg.optim, effective.fused.value),
        reduction=build_reduction(cfg.train.reduction, gpt, Rank()),
        grad_clip=cfg.optim.grad_clip,
        forward_context=forward_context(effective),
        dropout=False,
    )
    with step_context(effective):
        for _ in range(2):
            report = step(iter([MicroBatch(x, y, 0, 0)] * micro_steps), micro_steps, lr_factor=0.0)
            if average is not None:
                average.update(size * cfg.seq_len * micro_steps, report.finite)
    torch.cuda.synchronize(device)
