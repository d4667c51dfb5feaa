"""The sharpness of a run's checkpoints.

While the run trains, it is measured in a process of its own (`python -m gptexp.run.sharpness RUN_DIR STEP`): one that
shares no memory, kernels, precision or random numbers with training.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptexp.config.metrics import Metric
from gptexp.config.scaling import effective_optim
from gptexp.config.schedule import resolve_schedule
from gptexp.config.schema import AdamWConfig
from gptexp.data.loader import build_dataset
from gptexp.distributed.ranks import Rank
from gptexp.distributed.sharding import WholeParameters
from gptexp.machine.device import pick_device
from gptexp.model.flops import count_parameters
from gptexp.model.gpt import GPT
from gptexp.model.loss import chunked_cross_entropy
from gptexp.process.errors import CheckpointError, ConfigError, DataError, UserError, first_line
from gptexp.process.signals import StopRequest
from gptexp.process.terminal import run_verb, warn
from gptexp.run.load import refuse_another_model
from gptexp.run.own_process import ask, die_with_asker
from gptexp.storage import checkpoint, run_dir
from gptexp.training.optim import build_optimizer
from gptexp.training.sharpness import (
    Differences,
    adamw_scale,
    adamw_threshold,
    hessian_sharpness,
    sam_sharpness,
)
from gptexp.training.snapshot import load_checkpoint

MICRO_BATCH_SIZE = 8  # sequences of which gradients are computed at once
SEQUENCES = 64  # of the fixed batch, if the run's text has as many


def measure(directory: Path, checkpoints: Sequence[Path], sequences: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the sharpness of each of the run's `checkpoints`, of its loss on the first `sequences` that it trains on.

    In float32 without dropout. The preconditioned one is given for AdamW, whose checkpoints contain the preconditioner.
    A value is None if it cannot be had to 1%. Raises `ConfigError`, `DataError` or `CheckpointError`.
    """
    config = run_dir.load_resolved(directory)
    refuse_another_model(directory, config)
    optim, schedule = effective_optim(config), resolve_schedule(config, config.run_length[1])
    dataset = build_dataset(config)
    sequences = sequences or min(SEQUENCES, dataset.order.n_train)
    if sequences > dataset.order.n_train:
        raise ConfigError(f"--sequences={sequences}: the run's text has {dataset.order.n_train}; use fewer")
    device = pick_device(config.train.device, Rank())
    torch.set_float32_matmul_precision("highest")  # a difference of two gradients needs all digits
    if config.world.threads_per_rank is not None:
        torch.set_num_threads(config.world.threads_per_rank)
    starts = dataset.order.train_starts(np.arange(sequences), dataset.seq_len)
    rows = torch.from_numpy(dataset.rows(dataset.train, starts).astype(np.int64)).to(device)
    gpt = GPT(config.model, chunked_cross_entropy).to(device).eval()
    for path in checkpoints:
        state = checkpoint.load_state(path)
        checkpoint.refuse_other_size(path, count_parameters(config.model))
        if (trained_on := checkpoint.data_hash(path)) not in (None, dataset.hash):
            raise DataError(
                f"{path}: trained on other tokens ({trained_on}) than data={config.data.name} contains now "
                f"({dataset.hash}); restore the old text"
            )
        scale = threshold = None
        if isinstance(optim, AdamWConfig):
            optimizer = build_optimizer(gpt, optim, False)
            load_checkpoint(path, WholeParameters(gpt), optimizer)
            scale = _scale(gpt, optimizer, optim)
            before = config.batch.step_sizes.tokens_after(state.step - 1)
            factor = schedule.lr_factor(before, state.tokens - before)
            threshold = adamw_threshold(optim.lr * factor, optim.beta1) if factor else None
        else:
            checkpoint.load_weights(path, gpt)
        yield {"step": state.step, "tokens": state.tokens, **_values(gpt, rows, scale, threshold)}


def measure_while_training(
    directory: Path, step: int, device: torch.device, stop: StopRequest
) -> tuple[dict[str, Any], str | None]:
    """The metrics of the checkpoint of `step`, and None; or none of them, and the reason for which the run is to stop.

    A failure prints a line and gives no metrics.
    """
    given = f"sharpness after step {step}"
    if not (directory / run_dir.CHECKPOINTS / checkpoint.name_of(step)).is_dir():
        return {}, None  # it could not be saved, which was said
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the other process needs memory of this GPU
    try:
        argv = ["gptexp.run.sharpness", str(directory.absolute()), f"{step}"]
        answer = ask(argv, given, "its process", lambda: stop.reason() is not None)
        if answer is None:
            return {}, stop.reason()
        return {name: value for name, value in json.loads(answer).items() if name not in ("step", "tokens")}, None
    except Exception as error:  # of the other process, or of starting it
        of_others = "" if isinstance(error, UserError) else f"{given}: {type(error).__name__}: "
        warn(f"{of_others}{first_line(error)}; training continues")
        return {}, None


def _values(gpt: GPT, rows: Tensor, scale: Tensor | None, threshold: float | None) -> dict[str, float | None]:
    def loss() -> Tensor:
        """Of all `rows`, whose gradients it adds up in micro-batches."""
        total = torch.zeros((), device=rows.device)
        for part in rows.split(MICRO_BATCH_SIZE):
            share = gpt(part[:, :-1], part[:, 1:]) * (len(part) / len(rows))
            if torch.is_grad_enabled():
                share.backward()
            total += share.detach()
        return total

    differences = Differences(loss, list(gpt.parameters()))
    plain = hessian_sharpness(differences)
    preconditioned = hessian_sharpness(differences, scale) if scale is not None else None
    return {
        Metric.SHARPNESS_HESSIAN: plain.value if plain is not None else None,
        Metric.SHARPNESS_PRECONDITIONED: preconditioned.value if preconditioned is not None else None,
        Metric.SHARPNESS_THRESHOLD: threshold,
        Metric.SHARPNESS_SAM: sam_sharpness(differences),
    }


def _scale(gpt: GPT, optimizer: torch.optim.Optimizer, optim: AdamWConfig) -> Tensor:
    """P^(-1/2) for all parameters. A group with a learning rate of its own counts as preconditioned by its factor."""
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    parts = []
    for p in gpt.parameters():
        state, group = optimizer.state[p], groups[p]
        if not (steps := int(state.get("step", 0))):
            raise CheckpointError("the optimizer has made no update; take a later checkpoint")
        scale = adamw_scale(state["exp_avg_sq"].flatten(), steps, optim.beta1, optim.beta2, group["eps"])
        parts.append(scale * (group["initial_lr"] / optim.lr) ** 0.5)
    return torch.cat(parts)


def main(argv: list[str]) -> None:
    """Print the sharpness of one checkpoint of a run that trains, as JSON."""
    die_with_asker()
    directory, step = Path(argv[0]), int(argv[1])
    [found] = measure(directory, [directory / run_dir.CHECKPOINTS / checkpoint.name_of(step)])
    print(json.dumps(run_dir.finite(found)))


if __name__ == "__main__":
    run_verb(main)
