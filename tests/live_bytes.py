"""The bytes of all tensors that are alive at the peak of a training step."""

import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptexp.config.schema import ModelConfig
from gptexp.data.loader import MicroBatch
from gptexp.distributed.ranks import Rank
from gptexp.distributed.reduction import build_reduction
from gptexp.distributed.sharding import SplitParameters, split
from gptexp.model.gpt import GPT
from gptexp.model.loss import LOSSES
from gptexp.model.memory import StepShape
from gptexp.optim import AdamWConfig, OptimConfig
from gptexp.training.optimizer import build_optimizer
from gptexp.training.step import TrainStep


class LiveBytes(TorchDispatchMode):
    """The peak of the sizes of all storages while `counts`. FSDP2 changes the size of a storage that stays alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages = weakref.WeakSet[Any]()
        self.peak = 0
        self.counts = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, out)):
            if isinstance(leaf, torch.Tensor) and type(leaf).__name__ != "DTensor" and leaf.device.type != "meta":
                self.storages.add(leaf.untyped_storage())
        if self.counts:
            unique = {storage._cdata: storage.nbytes() for storage in self.storages}
            self.peak = max(self.peak, sum(unique.values()))
        return out


def built(m: ModelConfig, step: StepShape) -> GPT:
    loss = partial(LOSSES[step.loss], z_loss=0.1 * step.z_loss)
    return GPT(m, loss, step.activation_checkpointing, document_start=0 if step.document_mask else None)


def split_gpt(m: ModelConfig, step: StepShape) -> tuple[GPT, SplitParameters]:
    with torch.device("meta"):
        gpt = built(m, step)
    dtypes = getattr(torch, step.dtype), getattr(torch, step.comm)
    return gpt, split(gpt, list(gpt.blocks), (), torch.device("cpu"), *dtypes)


def peak_bytes(m: ModelConfig, step: StepShape, optim: OptimConfig | None = None) -> int:
    """The peak of the second step: the optimizer allocates its state in the first."""
    context = nullcontext if step.dtype == "float32" else partial(torch.autocast, "cpu", torch.bfloat16)
    micro_steps, rank, parameters = step.grad_accum_steps, Rank(0, step.world_size), None
    with LiveBytes() as live:
        if step.sharding == "full":
            gpt, parameters = split_gpt(m, step)
        else:
            gpt = built(m, step)
        optimizer = build_optimizer(gpt, optim or AdamWConfig(), True, parameters.named if parameters else None)
        kind = "tree" if step.tree else "mean"
        reduction = build_reduction(kind, gpt, rank, step.reduce_every == "micro_step")
        x = torch.zeros(step.micro_batch_size, m.block_size, dtype=torch.int64)
        train = TrainStep(gpt, optimizer, reduction, 1.0, context, False, parameters)
        for live.counts in (False, True):
            train(iter([MicroBatch(x, x, 0, 0)] * micro_steps), micro_steps, lr_factor=0.0)
    return live.peak
