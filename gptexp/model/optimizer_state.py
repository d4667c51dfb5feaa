"""The tensors that each optimizer keeps for a parameter: to check a checkpoint, and to estimate memory. No torch."""

import heapq
import math
from collections.abc import Iterator, Mapping

from gptexp.config.schema import (
    AdafactorConfig,
    AdamWConfig,
    LambConfig,
    LarsConfig,
    LionConfig,
    ModelConfig,
    MuonConfig,
    OptimConfig,
    ScheduleFreeConfig,
    SGDConfig,
    SoapConfig,
)

Shape = tuple[int, ...]
TRAINED = "trained"  # in a schedule-free optimizer's saved state: the weights that it trains at
MOST_ROTATED = 10_000  # SOAP: rows or columns of a matrix above which it keeps no eigenbasis for them


def is_by_muon(name: str, dimensions: int) -> bool:
    """Whether optim=muon gives the parameter of this name to Muon: the matrices of the blocks, not embeddings."""
    return dimensions == 2 and name.startswith("h.")


def state_shapes(optim: OptimConfig, name: str, shape: Shape) -> Mapping[str, Shape | list[Shape]]:
    """The shapes of the tensors, or lists of tensors, that the optimizer keeps for the parameter `name` of `shape`."""
    match optim:
        case SGDConfig() | LarsConfig():
            return {"momentum_buffer": shape} if optim.momentum else {}
        case LionConfig():
            return {"exp_avg": shape}
        case LambConfig() if len(shape) > 1:
            norms: dict[str, Shape] = dict.fromkeys(("weight_norm", "adam_norm", "trust_ratio"), ())
            return {"exp_avg": shape, "exp_avg_sq": shape, **norms}
        case MuonConfig() if is_by_muon(name, len(shape)):
            return {"momentum_buffer": shape}
        case SoapConfig():
            rotated: list[Shape] = [(n, n) if n <= MOST_ROTATED and len(shape) > 1 else (0,) for n in shape]
            return {"exp_avg": shape, "exp_avg_sq": shape, "GG": rotated, "Q": rotated}
        case ScheduleFreeConfig():
            return {"z": shape, "exp_avg_sq": shape, TRAINED: shape}
        case AdafactorConfig() if len(shape) > 1:
            return {"step": (), "row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
        case AdafactorConfig():
            return {"step": (), "variance": shape}
    return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}


def state_bytes(optim: OptimConfig, model: ModelConfig, rows_over: int = 1) -> int:
    """Bytes of an optimizer's state, in float32, while it trains, without single numbers.

    `rows_over` is the number of ranks that share the rows of each parameter.
    """
    shapes = [(name, rows_of(shape, rows_over), count) for name, shape, count in parameter_shapes(model)]
    return 4 * sum(count * _state_numbers(optim, name, shape) for name, shape, count in shapes)


def most_state_bytes(optim: OptimConfig, model: ModelConfig, ranks: int) -> int:
    """The same for the rank that has most, if each parameter's state is on one of `ranks`.

    As ZeroRedundancyOptimizer shares them: of each group, those that decay first, the next largest parameter goes to
    the rank that has the fewest numbers so far.
    """
    found = [(shape, count, _state_numbers(optim, name, shape)) for name, shape, count in parameter_shapes(model)]
    largest_first = sorted(found, key=lambda of: (len(of[0]) == 1, -math.prod(of[0])))
    loads = [(0, rank, 0) for rank in range(ranks)]  # (numbers of its parameters, rank, numbers of their state)
    for shape, count, numbers in largest_first:
        for _ in range(count):
            load, rank, state = loads[0]
            heapq.heapreplace(loads, (load + math.prod(shape), rank, state + numbers))
    return 4 * max(state for _, _, state in loads)


def _state_numbers(optim: OptimConfig, name: str, shape: Shape) -> int:
    """Of the tensors that an optimizer keeps for a parameter while it trains."""
    numbers = 0
    for key, kept in state_shapes(optim, name, shape).items():
        if key != TRAINED:  # only while it saves or evaluates
            shapes = kept if isinstance(kept, list) else [kept]
            numbers += sum(math.prod(of_tensor) for of_tensor in shapes if of_tensor)
    return numbers


def update_bytes(optim: OptimConfig, model: ModelConfig) -> int:
    """Bytes that an update needs beside gradients and state: most compute it for all parameters at once."""
    if isinstance(optim, AdamWConfig):
        return 0  # by the fused kernel, in place
    sizes = [(math.prod(shape), shape, count) for _, shape, count in parameter_shapes(model)]
    if isinstance(optim, SoapConfig):  # one parameter after the other
        rotated = [n * n for _, shape, _ in sizes for n in shape if n <= MOST_ROTATED and len(shape) > 1]
        return 4 * max(6 * max(size for size, _, _ in sizes), *rotated)
    copies = 2 if isinstance(optim, ScheduleFreeConfig) else 1
    return 4 * copies * sum(size * count for size, _, count in sizes)


def rows_of(shape: Shape, ranks: int) -> Shape:
    """The shape of the largest of the parts into which FSDP2 splits a parameter: by rows, rounded up."""
    return (-(-shape[0] // ranks), *shape[1:])


def parameter_shapes(m: ModelConfig) -> Iterator[tuple[str, Shape, int]]:
    """Yield (name, shape, number of such parameters) for all parameters, those of the blocks under the first one's."""
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
