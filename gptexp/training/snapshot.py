"""Saves and loads the tensors of a checkpoint, of which each rank has all or a part."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gptexp.distributed.group import rank_index, world_size
from gptexp.distributed.sharding import Parameters
from gptexp.model.optimizer_state import state_tensors
from gptexp.process.errors import CheckpointError
from gptexp.process.words import counted
from gptexp.storage import checkpoint
from gptexp.storage.checkpoint import Layout, Tensors
from gptexp.storage.tensor_files import AVERAGE, MODEL, OPTIMIZER, Part
from gptexp.training.optimizer import BUILT, has_split_state, numbers_in, weights_for_use
from gptexp.training.weight_average import WeightAverage


def is_shared(parameters: Parameters, optimizer: Optimizer) -> bool:
    """Whether the tensors of a checkpoint are spread over the ranks, so that no rank has all of them."""
    return parameters.split or has_split_state(optimizer)


def tensors_to_save(parameters: Parameters, optimizer: Optimizer, average: WeightAverage | None) -> Tensors:
    """The tensors that this rank saves. They share memory with those of training."""
    parts: dict[str, Mapping[str, Part]] = dict(_parts(parameters, optimizer, average))
    files = dict.fromkeys(parts, world_size() if parameters.split else 1)
    if has_split_state(optimizer):
        files[OPTIMIZER] = world_size()
        if rank_index() > 0:
            parts = {OPTIMIZER: parts[OPTIMIZER]}
    return Tensors(parts, Layout(files, parameters.split, [_counts(group) for group in optimizer.param_groups]))


def _counts(group: Mapping[str, Any]) -> dict[str, Any]:
    """The counters that some optimizers have in a group: numbers that have changed since it was built."""
    return {key: value for key, value in numbers_in(group).items() if value != group[BUILT].get(key)}


def load_checkpoint(
    path: Path, parameters: Parameters, optimizer: Optimizer, average: WeightAverage | None = None
) -> None:
    """Load checkpoint `path`, to continue training from it. Raises `CheckpointError` if it does not fit."""
    own_optimizer = _of_this_rank(optimizer)
    own_optimizer.state.clear()
    counts, groups = checkpoint.layout_of(path).counts, optimizer.param_groups
    if len(counts) != len(groups):
        why = f"its optimizer has {counted(len(counts), 'group')}, not {len(groups)}"
        raise CheckpointError(f"{path}: does not fit the model ({why})")
    if checkpoint.has_state(path):
        _begin(own_optimizer)
        _add_late_state(path, own_optimizer, parameters)
    with weights_for_use(optimizer):  # a checkpoint is saved with these
        for kind, parts in _parts(parameters, optimizer, average).items():
            checkpoint.read(path, kind, parts)
            if kind == OPTIMIZER:
                _set_numbers(own_optimizer, parameters, parts)
    for group, saved in zip(groups, counts, strict=True):
        if unknown := saved.keys() - group.keys():
            why = f"of another version of its optimizer, which counted {', '.join(sorted(unknown))}"
            raise CheckpointError(f"{path}: {why}; start a new run, with init_from for these weights")
        group.update({**group[BUILT], **saved})  # `_begin` has counted a step


def load_own_weights(path: Path, parameters: Parameters) -> None:
    """Load the weights of checkpoint `path`. Raises `CheckpointError` if they do not fit. Hashes are not checked."""
    checkpoint.read(path, MODEL, _own(parameters, parameters.named))


@torch.no_grad()
def load_weights(weights: Iterable[tuple[str, Tensor]], parameters: Parameters) -> None:
    """Copy `weights`, which are whole tensors, into `parameters`, which may be parts of them."""
    for name, whole in weights:
        parameters.named[name].copy_(whole[parameters.rows(name)])


def _parts(parameters: Parameters, optimizer: Optimizer, average: WeightAverage | None) -> dict[str, dict[str, Part]]:
    """This rank's parts of all tensors, by the kind of file."""
    names: dict[Tensor, str] = {p: name for name, p in parameters.named.items()}
    state: dict[str, Part] = {}
    for p, values in _of_this_rank(optimizer).state.items():
        tensors = {f"{names[p]}.{key}": tensor for key, tensor in state_tensors(values)}
        state |= {key: _part(parameters, names[p], tensor) for key, tensor in tensors.items()}
    for name, values, key in _numbers(_of_this_rank(optimizer), parameters):
        state[name] = Part(torch.tensor(values[key], dtype=torch.float64))
    parts = {MODEL: _own(parameters, parameters.named), OPTIMIZER: state}
    if average is not None:
        parts[AVERAGE] = _own(parameters, average.tensors())
    return parts


def _numbers(optimizer: Optimizer, parameters: Parameters) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name, the state and the key of each number in the state of a parameter that is no hyperparameter."""
    names: dict[Tensor, str] = {p: name for name, p in parameters.named.items()}
    hyperparameters = inspect.signature(type(optimizer)).parameters
    for p, values in optimizer.state.items():
        for key in numbers_in(values).keys() - hyperparameters.keys():
            yield f"{names[p]}.{key}", values, key


def _set_numbers(optimizer: Optimizer, parameters: Parameters, read: Mapping[str, Part]) -> None:
    for name, values, key in _numbers(optimizer, parameters):
        values[key] = type(values[key])(read[name].tensor.item())


def _own(parameters: Parameters, tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    return {name: _part(parameters, name, tensor) for name, tensor in tensors.items()}


def _part(parameters: Parameters, name: str, tensor: Tensor) -> Part:
    """`tensor`, which belongs to the parameter `name`, with its position in the whole tensor."""
    if not parameters.split or not tensor.dim():
        return Part(tensor)
    return Part(tensor, parameters.rows(name).start, parameters.shapes[name][0])


def _of_this_rank(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has the state of the parameters that this rank updates."""
    return optimizer.optim if has_split_state(optimizer) else optimizer  # type: ignore[attr-defined]


def _add_late_state(path: Path, optimizer: Optimizer, parameters: Parameters) -> None:
    """Create the state that an optimizer of the user's own had begun after its first step. Raises `CheckpointError`."""
    begun, mine = _parts(parameters, optimizer, None)[OPTIMIZER].keys(), {*optimizer.state}
    for name, saved in checkpoint.shapes_of(path, OPTIMIZER).items():
        owners = [owner for owner in parameters.named if name.startswith(f"{owner}.")]
        if name in begun or not owners:
            continue
        owner = max(owners, key=len)
        p, key = parameters.named[owner], name.removeprefix(f"{owner}.")
        if p not in mine:
            continue  # another rank has its state
        if "." in key or checkpoint.is_split(path) or parameters.split:
            what = "a list" if "." in key else "split over the ranks"
            rule = "an optimizer must begin it in its first step"
            raise CheckpointError(f"{path}: {name}: state that begins after the first step, and {what}; {rule}")
        is_number = saved.dtype == torch.float64 and not saved.dim()
        optimizer.state[p][key] = 0.0 if is_number else torch.zeros_like(saved, device=p.device)


def _begin(optimizer: Optimizer) -> None:
    """Create the tensors of the optimizer's state by a step with zero gradients, which may change the parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p in parameters:
        p.grad = None
