"""The tensors of training as a checkpoint holds them: whole, although each rank may have only a part of them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gptexp.config.schema import OptimConfig
from gptexp.distributed.group import rank_index
from gptexp.distributed.sharding import Parameters
from gptexp.model.optimizer_state import state_shapes
from gptexp.storage import checkpoint
from gptexp.storage.checkpoint import Content
from gptexp.training.optim import back_to_training, has_split_state


def needs_all_ranks(parameters: Parameters, optimizer: Optimizer) -> bool:
    """Whether `take` is collective, because no rank has everything."""
    return parameters.split or has_split_state(optimizer)


def take(parameters: Parameters, optimizer: Optimizer, average: Mapping[str, Tensor] | None = None) -> Content | None:
    """Return what a checkpoint holds; `average` is that of `WeightAverage.tensors`. *Collective* if `needs_all_ranks`.

    If it is collective, rank 0 gets everything in the memory of its host, one tensor after the other, and the other
    ranks get None.
    """
    is_main, average = rank_index() == 0, average or {}
    if has_split_state(optimizer):
        optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]
        return Content(parameters.named, optimizer.state_dict(), average) if is_main else None
    state = optimizer.state_dict()
    if not parameters.split:
        return Content(parameters.named, state, average)

    def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, own in tensors.items():
            whole = parameters.whole(name, own.detach()) if name in parameters.shapes else own
            if is_main:
                found[name] = whole.cpu()
        return found

    moments = {}  # not in place: the optimizer's own dictionaries are in `state`
    for number, name in enumerate(_names_in_order(parameters, optimizer)):
        if number in state["state"]:
            moments[number] = {
                key: gathered({name: value}).get(name) if isinstance(value, Tensor) and value.dim() else value
                for key, value in state["state"][number].items()
            }
    content = Content(gathered(parameters.named), {**state, "state": moments}, gathered(average))
    return content if is_main else None


def load_checkpoint(path: Path, parameters: Parameters, optimizer: Optimizer, cfg: OptimConfig) -> None:
    """Load weights and optimizer state, and continue to train. Raises `CheckpointError` if they do not fit."""
    load_weights(checkpoint.read_weights(path, parameters.shapes), parameters)
    names = _names_in_order(parameters, optimizer)
    shapes = [state_shapes(cfg, name, tuple(parameters.shapes[name])) for name in names]

    def own(number: int, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return parameters.own(names[number], value).clone()  # not a view of the file, which may be removed

    checkpoint.load_optimizer(path, optimizer, shapes, own if parameters.split else None)
    if has_split_state(optimizer):
        optimizer.state.clear()  # a copy of what the optimizer within has, and None for the other ranks' parameters
    back_to_training(optimizer)


@torch.no_grad()
def load_weights(weights: Iterable[tuple[str, Tensor]], parameters: Parameters) -> None:
    """Give `parameters` the values of `weights`, which are whole."""
    for name, whole in weights:
        parameters.named[name].copy_(parameters.own(name, whole))


def _names_in_order(parameters: Parameters, optimizer: Optimizer) -> list[str]:
    """The names of the parameters in the order in which the optimizer's state numbers them."""
    names = {p: name for name, p in parameters.named.items()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]
