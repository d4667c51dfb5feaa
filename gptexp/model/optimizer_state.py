"""The memory of an optimizer's state and of its update."""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

import gptexp.optim.torch_optimizers  # noqa: F401  so that no optimizer imports the compiler
from gptexp.config.parts import is_part, name_of
from gptexp.config.schema import ModelConfig
from gptexp.model.shapes import parameter_shapes
from gptexp.optim.base import OptimConfig, Shape
from gptexp.process.errors import ConfigError


def state_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the state of a parameter with their keys, also those in lists: `exp_avg`, `Q.0`, `Q.1`."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield key, value
        elif isinstance(value, list):
            yield from state_tensors({f"{key}.{number}": item for number, item in enumerate(value)})


def state_bytes(optim: OptimConfig, model: ModelConfig, rows_over: int = 1) -> int:
    """Bytes of an optimizer's state while it trains, without scalars.

    `rows_over` is the number of ranks that share the rows of each parameter.
    """
    shapes = [(name, rows_of(shape, rows_over), count) for name, shape, count in parameter_shapes(model)]
    bytes_of = _state_bytes(optim, [(name, shape) for name, shape, _ in shapes])
    return sum(count * bytes_of[name] for name, _, count in shapes)


def _refuse_unsaved(name: str, optimizer: Optimizer) -> None:
    """Raise `ConfigError` for a value in the state or the groups of an optimizer that a checkpoint does not keep."""
    of_groups = ((key, value) for group in optimizer.param_groups for key, value in group.items())
    found = [("a group", key, value) for key, value in of_groups if isinstance(value, Tensor)]
    of_parameters: dict[Any, Any] = dict(optimizer.state)
    for p, state in of_parameters.items():
        if isinstance(p, Tensor):
            kept = [value is None or type(value) in (int, float, str) for value in state.values()]
            values = zip(state.items(), kept, strict=True)
            found += [
                ("its state", k, v) for (k, v), is_kept in values if not is_kept and not isinstance(v, Tensor | list)
            ]
        else:
            found.append(("its state", str(p), state))
    for place, key, value in found[:1]:
        rule = "a checkpoint keeps numbers in groups, and of each parameter tensors, lists of tensors, and numbers"
        raise ConfigError(f"optim={name}: {place} has {key}, a {type(value).__name__}; {rule}", "wrong-contract")


def most_state_bytes(optim: OptimConfig, model: ModelConfig, ranks: int) -> int:
    """The bytes of state of the rank that has most, if each parameter's state is on one of `ranks`.

    As ZeroRedundancyOptimizer shares them: of each group, those that decay first, the next largest parameter goes to
    the rank that has the fewest numbers so far.
    """
    shapes = list(parameter_shapes(model))
    bytes_of = _state_bytes(optim, [(name, shape) for name, shape, _ in shapes])
    largest_first = sorted(shapes, key=lambda kind: (len(kind[1]) == 1, -math.prod(kind[1])))
    loads = [(0, rank, 0) for rank in range(ranks)]  # (numbers of its parameters, rank, bytes of their state)
    for name, shape, count in largest_first:
        for _ in range(count):
            load, rank, state = loads[0]
            heapq.heapreplace(loads, (load + math.prod(shape), rank, state + bytes_of[name]))
    return max(state for _, _, state in loads)


def _state_bytes(optim: OptimConfig, shapes: Sequence[tuple[str, Shape]]) -> Mapping[str, int]:
    """The bytes that the optimizer keeps for each parameter of these names and shapes, without scalars."""
    known = (type(optim), repr(optim), tuple(shapes))
    if known not in _KNOWN:
        _KNOWN[known] = _bytes_after_update(optim, shapes)
    return _KNOWN[known]


_KNOWN: dict[tuple[type, str, tuple[tuple[str, Shape], ...]], Mapping[str, int]] = {}


def _bytes_after_update(optim: OptimConfig, shapes: Sequence[tuple[str, Shape]]) -> Mapping[str, int]:
    """The result of `_state_bytes`, counted after an update of tensors that have a shape and no memory."""
    named = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes}
    for p in named.values():
        p.grad = torch.empty(p.shape, device="meta")
    matrices, vectors = [p for p in named.values() if p.dim() > 1], [p for p in named.values() if p.dim() < 2]
    settings = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    optimizer = optim.build([{"params": matrices, **settings}, {"params": vectors, **settings}], named, fused=False)
    try:
        with _ShapesOnly():
            optimizer.step()
    except Exception:
        if not is_part(optim):
            raise
        return dict.fromkeys(named, 0)  # an optimizer of the user's own that reads numbers: its state is unknown
    if is_part(optim):
        _refuse_unsaved(name_of(optim), optimizer)
    return {
        name: sum(tensor.nbytes for _, tensor in state_tensors(optimizer.state[p]) if tensor.dim())
        for name, p in named.items()
    }


_IN_PLACE = (Tensor.mul_, Tensor.add_, Tensor.lerp_, Tensor.addcmul_, Tensor.addcdiv_)
_ELEMENTWISE = (torch.zeros_like, Tensor.add, Tensor.div, Tensor.sqrt)


class _ShapesOnly(TorchFunctionMode):
    """A mode in which an optimizer can update tensors without memory. The value of each is 1.

    torch computes some of their shapes in Python, and imports its compiler for that, which takes a second. What AdamW
    and SGD need is returned here.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, tensors = kwargs or {}, [arg for arg in args if isinstance(arg, Tensor) and arg.is_meta]
        if tensors and func in (Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__):
            return func(torch.ones(()))
        if tensors and func in _IN_PLACE:
            return args[0]
        if func in _ELEMENTWISE and len({tensor.shape for tensor in tensors}) == 1:
            return torch.empty(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype, device="meta")
        return func(*args, **kwargs)


def update_bytes(optim: OptimConfig, model: ModelConfig) -> int:
    """Bytes that an update needs temporarily, beside gradients and state."""
    return 4 * optim.scratch_numbers([(shape, count) for _, shape, count in parameter_shapes(model)])


def rows_of(shape: Shape, ranks: int) -> Shape:
    """The shape of the largest of the parts into which FSDP2 splits a parameter: by rows, rounded up."""
    return (-(-shape[0] // ranks), *shape[1:])
