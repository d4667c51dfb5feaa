"""Trains one model under each `world.sharding`, on the ranks of torchrun, and prints how far the results are apart.

    torchrun --standalone --nproc-per-node=2 tests/distributed/sharded_training.py FOLDER all [OVERRIDES …]

`few` in place of `all` is for three of the cases. Rank 0 prints one JSON object for each case. Its numbers compare with
plain DDP: of each step the largest relative difference, of the last weights and moments the largest difference over the
norm of the tensor.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from gptexp.config.compose import compose
from gptexp.config.schema import Config
from gptexp.data.loader import MicroBatch
from gptexp.distributed.group import rank_index, world_size
from gptexp.distributed.ranks import Rank, launcher_rank
from gptexp.distributed.reduction import build_reduction
from gptexp.distributed.sharding import Parameters, WholeParameters
from gptexp.machine.device import pick_device
from gptexp.machine.effective import Effective, apply, forward_context, step_context
from gptexp.machine.resolve import resolve
from gptexp.run.build import build_gpt, build_split_gpt, wrap
from gptexp.storage import checkpoint
from gptexp.storage.checkpoint import Keep, TrainState, begin_to_save
from gptexp.training.gradient_noise import StepNoise
from gptexp.training.optimizer import build_optimizer, weights_for_use
from gptexp.training.small_gradients import SmallGradients
from gptexp.training.snapshot import is_shared, load_checkpoint, tensors_to_save
from gptexp.training.step import Probe, TrainStep
from gptexp.training.weight_average import WeightAverage

STEPS, SAVED = 20, 8  # steps in all, and before the checkpoint
FEW = (0, 3, 4)  # of the cases
CASES = [  # (sharding, reduce_every, micro-steps, further overrides)
    ("optimizer", "step", 1, []),
    ("optimizer", "step", 3, ["optim=sgd"]),
    ("full", "step", 1, ["train.loss=plain"]),
    ("full", "step", 3, ["train.activation_checkpointing=true", "train.activation_checkpointing_every=2"]),
    ("full", "micro_step", 3, ["model.bias=false"]),
    ("full", "step", 2, ["optim=sgd", "optim.gradient_noise=0.3"]),
    ("full", "step", 2, ["train.dtype=bfloat16"]),
    ("full", "step", 1, ["model.n_embd=6"]),  # of four ranks the last has no row of most vectors
]
SMALL = [
    "model.n_layer=3", "model.n_head=2", "model.n_embd=20", "model.block_size=16", "model.vocab_size=321",
    "batch.total_batch_size=384", "batch.micro_batch_size=2", "optim.lr=6e-4", "train.device=cpu",
    "world.threads_per_rank=1",
    "train.dtype=float32", "train.compile=off", "train.matmul_precision=highest", "train.loss=chunked", "data=stdlib",
]  # fmt: skip


class Trainer:
    """A model under one sharding, and what its steps have given."""

    def __init__(self, cfg: Config, sharding: str, every: str, rank: Rank) -> None:
        self.cfg, self.rank, self.device = cfg, rank, pick_device(cfg.train.device, rank)
        cfg.world.sharding, cfg.world.reduce_every = sharding, every
        self.effective: Effective = resolve(cfg, self.device, rank)
        apply(self.effective)
        self.parameters: Parameters
        if sharding == "full":
            self.gpt, self.parameters = build_split_gpt(cfg, self.effective, self.device)
            model: torch.nn.Module = self.gpt
        else:
            self.gpt = build_gpt(cfg, self.effective, self.device)
            self.parameters = WholeParameters(self.gpt)
            model = wrap(self.gpt, self.effective, "mean", rank, self.device)
        named, split_state = self.parameters.named, sharding == "optimizer"
        self.optimizer = build_optimizer(self.gpt, cfg.optim, self.effective.fused.value, named, split_state)
        self.average = WeightAverage(self.parameters, 1000)
        reduction = build_reduction("mean", model, rank, every == "micro_step")
        context = forward_context(self.effective)
        self.step = TrainStep(model, self.optimizer, reduction, 1.0, context, False, self.parameters)
        self.small = SmallGradients(model, self.parameters)

    def train(self, first: int, last: int, micro_steps: int) -> list[tuple[float, float, float]]:
        """Train steps; the loss, the gradient norm and the mean squared norm of single micro-batches of each."""
        rows = []
        with step_context(self.effective):
            for number in range(first, last):
                noise = StepNoise(number, self.cfg.optim.gradient_noise, 0.0) if self.cfg.optim.gradient_noise else None
                probe = Probe(small_gradients=self.small)
                report = self.step(self.batches(number, micro_steps), micro_steps, 1.0, noise=noise, probe=probe)
                self.average.update(64, report.finite)
                numbers = report.read()
                rows.append((numbers.loss, numbers.grad_norm, numbers.small_sq_norm))
        return rows

    def batches(self, step: int, micro_steps: int) -> Iterator[MicroBatch]:
        """Other sequences for each step, micro-step and rank, of two kinds, so that there is something to learn."""
        for micro_step in range(micro_steps):
            seed = (step * 100 + micro_step) * world_size() + rank_index()
            rows = torch.randint(7, 40, (2, 17), generator=torch.Generator().manual_seed(seed)).cumsum(1) % 321
            x, y = (part.contiguous().to(self.device) for part in (rows[:, :-1], rows[:, 1:]))
            yield MicroBatch(x, y, 0, 0)

    def save(self, folder: Path) -> Path:
        """Save what each rank has, and wait until all of it is published."""
        if rank_index() == 0:
            folder.parent.mkdir(exist_ok=True)
        dist.barrier()
        group = dist.new_group(backend="gloo") if is_shared(self.parameters, self.optimizer) else None
        path = folder / checkpoint.name_of(SAVED)
        if group is not None or rank_index() == 0:
            with weights_for_use(self.optimizer):
                tensors = tensors_to_save(self.parameters, self.optimizer, self.average)
            begin_to_save(folder, tensors, TrainState(step=SAVED, tokens=1), Keep(), {}, group).result(60)
        dist.barrier()
        return path

    def load(self, path: Path) -> None:
        load_checkpoint(path, self.parameters, self.optimizer, self.average)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole: the rows of a split one from the files of all ranks, in their order."""
    found: dict[str, list[torch.Tensor]] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found.setdefault(f"{file.name.partition('.')[0].partition('-')[0]} {name}", []).append(tensor)
    return {name: torch.cat(of) if of[0].dim() else of[0] for name, of in found.items()}


def size(trainer: Trainer) -> int:
    """Number of the parameters that this rank updates."""
    return sum(p.numel() for p in trainer.parameters.named.values())


def apart(found: Path, expected: Path) -> float:
    a, b = tensors(found), tensors(expected)
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max(float((a[k].double() - b[k]).abs().max() / (b[k].double().norm() + 1e-30)) for k in b)


def compare(folder: Path, sharding: str, every: str, micro_steps: int, more: list[str], rank: Rank) -> dict[str, Any]:
    def trainer(kind: str) -> Trainer:
        return Trainer(compose([*SMALL, *more]), kind, every, rank)

    plain, split = trainer("none"), trainer(sharding)
    before, start = plain.save(folder / "before"), split.save(folder / "start")
    rows, other = plain.train(0, SAVED, micro_steps), split.train(0, SAVED, micro_steps)
    of_plain, of_split = plain.save(folder / "plain"), split.save(folder / sharding)
    # Each continues from the other's checkpoint, and from its own.
    crossed, uncrossed, again = trainer("none"), trainer(sharding), trainer(sharding)
    crossed.load(of_split)
    uncrossed.load(of_plain)
    again.load(of_split)
    loaded = [each.save(folder / f"loaded-{i}") for i, each in enumerate((crossed, split, uncrossed, plain))]
    rest = [each.train(SAVED, STEPS, micro_steps) for each in (plain, split, crossed, uncrossed, again)]
    last = [each.save(folder / f"last-{i}") for i, each in enumerate((plain, split, crossed, uncrossed, again))]
    if rank.rank:
        return {}
    pairs = list(zip(rows + rest[0], other + rest[1], strict=True))
    crossings = [pair for some in rest[2:4] for pair in zip(rest[0], some, strict=True)]
    far = lambda which, found: max(abs(b[which] - a[which]) / abs(a[which]) for a, b in found)  # noqa: E731
    return {
        "case": [sharding, every, micro_steps, more],
        "initial weights": apart(start, before),
        "loss": far(0, pairs), "norm": far(1, pairs), "small norm": far(2, pairs),
        "loaded": max(apart(loaded[0], loaded[1]), apart(loaded[2], loaded[3])),
        "loss after crossing": far(0, crossings),
        "resumed": apart(last[4], last[1]),
        "end": max(apart(each, last[0]) for each in last[1:4]),
        "share": size(split) / size(plain),
    }  # fmt: skip


def main() -> None:
    folder, which, overrides = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    rank = launcher_rank()
    assert rank is not None
    on_gpus = "train.device=cuda" in overrides
    if on_gpus:
        torch.cuda.set_device(rank.local_rank)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    for number, (sharding, every, micro_steps, more) in enumerate(CASES):
        if which == "few" and number not in FEW:
            continue
        found = compare(folder / f"case-{number}", sharding, every, micro_steps, [*more, *overrides], rank)
        if found:
            print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # a thread of gloo may still hold a future that an interpreter which tears down aborts on


main()
