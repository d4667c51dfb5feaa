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
from gptexp.storage import checkpoint, sharded
from gptexp.storage.checkpoint import COUNTED, Content
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
        whole: Any = optimizer  # a ZeroRedundancyOptimizer
        whole.consolidate_state_dict(to=0)
        content = Content(parameters.named, whole.state_dict(), average) if is_main else None
        whole._all_state_dicts.clear()  # it would keep the copy in the host's memory
        return content
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


def parts(
    parameters: Parameters, optimizer: Optimizer, average: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return what a checkpoint holds as tensors of which each rank has its part, by name; and the groups' counts."""
    found = _own_weights(parameters)
    for name, own in (average or {}).items():
        found[f"{sharded.AVERAGE}{name}"] = parameters.distributed(name, own) if name in parameters.shapes else own
    for name, of in zip(_names_in_order(parameters, optimizer), _states(optimizer), strict=True):
        for key, value in of.items():
            found[f"{sharded.OPTIMIZER}{name}.{key}"] = parameters.distributed(name, value) if value.dim() else value
    counts = [{key: group[key] for key in COUNTED if key in group} for group in optimizer.param_groups]
    return found, [{key: value for key, value in group.items() if key != "params"} for group in counts]


def _own_weights(parameters: Parameters) -> dict[str, Tensor]:
    """The weights as a checkpoint with one file for each rank names them; they share the memory of `parameters`."""
    return {f"{sharded.MODEL}{name}": parameters.distributed(name, p.detach()) for name, p in parameters.named.items()}


def _states(optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """The tensors in the optimizer's state of each parameter, in the order of its groups."""
    found = []
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        found.append({k: v for k, v in optimizer.state.get(p, {}).items() if isinstance(v, Tensor)})
    return found


def _load_parts(path: Path, parameters: Parameters, optimizer: Optimizer, cfg: OptimConfig) -> None:
    """`load_checkpoint` for a checkpoint with one file for each rank."""
    own = _own_weights(parameters)
    state: dict[int, dict[str, Tensor]] = {}
    saved = sharded.shapes(path)
    for number, name in enumerate(_names_in_order(parameters, optimizer)):
        p = parameters.named[name]
        for key, shape in state_shapes(cfg, name, tuple(parameters.shapes[name])).items():
            full = f"{sharded.OPTIMIZER}{name}.{key}"
            if full not in saved and checkpoint.has_never_updated(path):
                continue
            # Of whole parameters on the host: with ZeRO, a rank then takes the state of some of them to its device.
            device = p.device if parameters.split else "cpu"
            value = torch.zeros_like(p, device=device) if shape else torch.zeros(())
            state.setdefault(number, {})[key] = value
            own[full] = parameters.distributed(name, value) if shape else value
    sharded.read(path, own)
    checkpoint.set_state(path, optimizer, state)


def load_checkpoint(path: Path, parameters: Parameters, optimizer: Optimizer, cfg: OptimConfig) -> None:
    """Load weights and optimizer state, and continue to train. Raises `CheckpointError` if they do not fit."""
    if sharded.is_sharded(path):
        _load_parts(path, parameters, optimizer, cfg)
    else:
        _load_whole(path, parameters, optimizer, cfg)
    if has_split_state(optimizer):
        optimizer.state.clear()  # a copy of what the optimizer within has, and None for the other ranks' parameters
    back_to_training(optimizer)


def load_own_weights(path: Path, parameters: Parameters) -> None:
    """Load the weights of checkpoint `path`. Raises `CheckpointError` if they do not fit. Hashes are not checked."""
    if sharded.is_sharded(path):
        sharded.read(path, _own_weights(parameters))
    else:
        load_weights(checkpoint.read_weights(path, parameters.shapes), parameters)


def _load_whole(path: Path, parameters: Parameters, optimizer: Optimizer, cfg: OptimConfig) -> None:
    load_own_weights(path, parameters)
    names = _names_in_order(parameters, optimizer)
    shapes = [state_shapes(cfg, name, tuple(parameters.shapes[name])) for name in names]

    def own(number: int, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return parameters.own(names[number], value).clone()  # not a view of the file, which may be removed

    checkpoint.load_optimizer(path, optimizer, shapes, own if parameters.split else None)


@torch.no_grad()
def load_weights(weights: Iterable[tuple[str, Tensor]], parameters: Parameters) -> None:
    """Give `parameters` the values of `weights`, which are whole."""
    for name, whole in weights:
        parameters.named[name].copy_(parameters.own(name, whole))


def _names_in_order(parameters: Parameters, optimizer: Optimizer) -> list[str]:
    """The names of the parameters in the order in which the optimizer's state numbers them."""
    names = {p: name for name, p in parameters.named.items()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]
