"""The memory of an optimizer's state and of its update."""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gptexp.config.schema import ModelConfig
from gptexp.optim import OPTIMIZERS
from gptexp.optim.keys import OptimConfig, Shape


def state_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the state of a parameter with their keys, also those in lists: `exp_avg`, `Q.0`, `Q.1`."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield key, value
        elif isinstance(value, list):
            yield from state_tensors({f"{key}.{number}": item for number, item in enumerate(value)})


def state_bytes(optim: OptimConfig, model: ModelConfig, rows_over: int = 1) -> int:
    """Bytes of an optimizer's state during training, in float32, without scalars.

    `rows_over` is the number of ranks that share the rows of each parameter.
    """
    shapes = [(name, rows_of(shape, rows_over), count) for name, shape, count in parameter_shapes(model)]
    numbers = _state_numbers(optim, [(name, shape) for name, shape, _ in shapes])
    return 4 * sum(count * numbers[name] for name, _, count in shapes)


def most_state_bytes(optim: OptimConfig, model: ModelConfig, ranks: int) -> int:
    """The state's bytes on the rank that has most, if each parameter's state is on one of `ranks`.

    ZeroRedundancyOptimizer distributes them so: in each group, first the one that decays, the next largest parameter
    goes to the rank with the fewest numbers so far.
    """
    shapes = list(parameter_shapes(model))
    numbers_of = _state_numbers(optim, [(name, shape) for name, shape, _ in shapes])
    largest_first = sorted(shapes, key=lambda kind: (len(kind[1]) == 1, -math.prod(kind[1])))
    loads = [(0, rank, 0) for rank in range(ranks)]  # (numbers of its parameters, rank, numbers of their state)
    for name, shape, count in largest_first:
        for _ in range(count):
            load, rank, state = loads[0]
            heapq.heapreplace(loads, (load + math.prod(shape), rank, state + numbers_of[name]))
    return 4 * max(state for _, _, state in loads)


def _state_numbers(optim: OptimConfig, shapes: Sequence[tuple[str, Shape]]) -> Mapping[str, int]:
    """How many numbers the optimizer keeps for each parameter of these names and shapes, without scalars."""
    return _numbers_after_update(optim.name, astuple(optim), tuple(shapes))


class _ShapesOnly(TorchFunctionMode):
    """A mode in which an optimizer can update tensors without memory: each of their numbers counts as 1.

    torch computes some shapes in Python, and imports its compiler for that. Those that Adam needs are returned here.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if func in (Tensor.item, Tensor.__float__, Tensor.__bool__):
                return 1.0
            if func in (torch.zeros_like, Tensor.sqrt, Tensor.div) and not any(
                isinstance(other, Tensor) for other in args[1:]
            ):
                return torch.empty(args[0].shape, device="meta")
            if func.__name__.endswith("_") and not func.__name__.endswith("__"):  # in place
                return args[0]
        return func(*args, **(kwargs or {}))


@cache
def _numbers_after_update(name: str, keys: tuple[Any, ...], shapes: tuple[tuple[str, Shape], ...]) -> Mapping[str, int]:
    """`_state_numbers`, counted after an update of tensors that have a shape and no memory."""
    named = {parameter: nn.Parameter(torch.empty(shape, device="meta")) for parameter, shape in shapes}
    for p in named.values():
        p.grad = torch.empty(p.shape, device="meta")
    decays = {True: [p for p in named.values() if p.dim() > 1], False: [p for p in named.values() if p.dim() < 2]}
    groups = [{"params": parameters} for parameters in decays.values()]
    optimizer = OPTIMIZERS[name](*keys).build(groups, named, fused=False)
    with _ShapesOnly():
        optimizer.step()
    return {
        parameter: sum(tensor.numel() for _, tensor in state_tensors(optimizer.state[p]) if tensor.dim())
        for parameter, p in named.items()
    }


def update_bytes(optim: OptimConfig, model: ModelConfig) -> int:
    """Bytes that an update needs temporarily, beside gradients and state."""
    return 4 * optim.update_numbers([(shape, count) for _, shape, count in parameter_shapes(model)])


def rows_of(shape: Shape, ranks: int) -> Shape:
    """The shape of the largest of the parts into which FSDP2 splits a parameter: by rows, rounded up."""
    return (-(-shape[0] // ranks), *shape[1:])


def parameter_shapes(m: ModelConfig) -> Iterator[tuple[str, Shape, int]]:
    """Yield (name, shape, number of such parameters) for all parameters; those of all blocks are named as in h.0."""
    c = m.n_embd
    yield "wte.weight", (m.resolved_vocab_size, c), 1
    yield "wpe.weight", (m.block_size, c), 1
    layers: list[tuple[str, Shape, int]] = [
        ("h.0.ln_1", (c,), m.n_layer),
        ("h.0.attn.c_attn", (3 * c, c), m.n_layer),
        ("h.0.attn.c_proj", (c, c), m.n_layer),
        ("h.0.ln_2", (c,), m.n_layer),
        ("h.0.mlp.c_fc", (4 * c, c), m.n_layer),
        ("h.0.mlp.c_proj", (c, 4 * c), m.n_layer),
        ("ln_f", (c,), 1),
    ]
    for name, shape, count in layers:
        yield f"{name}.weight", shape, count
        if m.bias:
            yield f"{name}.bias", shape[:1], count
