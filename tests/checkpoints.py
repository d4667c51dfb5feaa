"""Saves a checkpoint as training does, and waits for it."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gptexp.distributed.sharding import Parameters, WholeParameters
from gptexp.storage.checkpoint import Keep, TrainState, begin_to_save, read_tensors
from gptexp.training.snapshot import tensors_to_save
from gptexp.training.weight_average import WeightAverage


def save(
    directory: Path,
    model: nn.Module | Parameters,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    keep: Keep | None = None,
    about: dict[str, Any] | None = None,
    average: WeightAverage | None = None,
) -> Path:
    """Save the checkpoint of one rank that has everything."""
    parameters = WholeParameters(model) if isinstance(model, nn.Module) else model
    tensors = tensors_to_save(parameters, optimizer, average)
    return begin_to_save(directory, tensors, state, keep or Keep(), about or {}).result(60)


def moments(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of the optimizer's state in a checkpoint of one rank, as PARAMETER.KEY."""
    return read_tensors(path / "optimizer.safetensors")
