"""What gptexp gives to a part of the user's own, and what it expects of it. examples/own_parts has one of each.

A part is a class or a function in an importable package. Its other parameters are its keys: their names, types and
defaults are those of the config. Types that YAML can hold are bool, int, float, str, list, tuple and dict, or one of
them or None.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


class Model(Protocol):
    """`model`: a class derived from `torch.nn.Module`, called with `vocab_size`, `block_size` and its keys.

    Its forward pass gives the logits (B, T, V) of ids (B, T), each from this token and those before it. gptexp computes
    the loss, and gives the seed before it builds the model. All that training changes are parameters.
    """

    def __init__(self, vocab_size: int, block_size: int) -> None: ...

    def forward(self, x: "Tensor") -> "Tensor": ...


class Block(Protocol):
    """`model`, with a class that takes `n_embd` and `block_size`: one block, called with these and its keys.

    It maps (B, T, n_embd) to (B, T, n_embd), each position from this one and those before it, with norms and residual
    connections of its own. gptexp has `model.n_layer` of them between GPT-2's embeddings and its last norm and head.
    """

    def __init__(self, n_embd: int, block_size: int) -> None: ...

    def forward(self, x: "Tensor") -> "Tensor": ...


class Optimizer(Protocol):
    """`optim`: a class derived from `torch.optim.Optimizer`, called with `params` and its keys.

    `params` are groups, each with the `lr` and `weight_decay` of its parameters; that of vectors is 0. gptexp sets the
    `lr` of each group before every step, and clips the gradients. Everything that a later step needs is in
    `state_dict()`, as numbers in groups, and as tensors, lists of tensors and numbers in the state of each parameter;
    lists exist after the first step. A run that is killed and resumed must end with the same bits.

    The class may say what else gptexp may do with it, by the class variables of `OptimConfig` (gptexp/optim/base.py).
    """

    param_groups: list[dict[str, Any]]

    def __init__(self, params: "list[dict[str, Any]]", lr: float) -> None: ...

    def step(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Schedule(Protocol):
    """`schedule`: a function that gives the factor of the peak learning rate after the warm-up, 0 or above.

    `tokens` were read before the step. The warm-up, which is gptexp's, ends at `warmup_tokens`, and the decay should
    end at `decay_tokens`; all count from the start of the run.
    """

    def __call__(self, tokens: int, warmup_tokens: int, decay_tokens: int) -> float: ...


class Documents(Protocol):
    """`data`: a generator function that yields documents: texts, or lists of ids below the tokenizer's n_vocab.

    It is called once, in one process; the tokens are kept in the cache under its name, the hash of its source file and
    its keys. So it must yield the same documents in each call. If it does not end, `data.max_tokens` ends it.
    """

    def __call__(self) -> Iterator[str | list[int]]: ...


class Evaluation(Protocol):
    """`train.evaluations`: a function that returns a number, logged as eval/NAME, or several by name.

    Rank 0 calls it without gradients, with the weights that a checkpoint would have. `model(x)` gives the logits
    (B, T, V) of the ids `x` (B, T), in the run's dtype. `batches` are the validation windows: ids (B, T), and those
    that follow them.
    """

    def __call__(
        self, model: "nn.Module", tokenizer: Any, batches: "Iterator[tuple[Tensor, Tensor]]"
    ) -> float | Mapping[str, float]: ...


class StepMetric(Protocol):
    """`log.metrics`: a function that returns a number, logged as own/NAME, or several by name.

    Rank 0 calls it in each logged step, before the update: `.grad` of a parameter is the clipped gradient. Numbers may
    be tensors of one element, which are read when the step is logged, so that a GPU need not wait.
    """

    def __call__(self, model: "nn.Module") -> "float | Tensor | Mapping[str, float | Tensor]": ...
