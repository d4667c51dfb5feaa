"""torch's optimizers without the import of its compiler, and several optimizers as one."""

import inspect
from typing import Any, TypeVar

import torch
from torch import optim
from torch.optim import Optimizer

Kind = TypeVar("Kind", bound=Optimizer)

# torch's optimizers import its compiler, which takes more than a second, only to tell it not to compile their methods.
# This is the mark that torch sets after that import. It also serves optimizers of other packages.
for _method in (Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict, Optimizer.load_state_dict):
    _plain = inspect.unwrap(_method)
    setattr(_plain, "__dynamo_disable", _plain)


def _without_compiler(kind: type[Kind]) -> type[Kind]:
    """A subclass of `kind` whose step does not import the compiler. As with torch's decorator, gradients are off."""
    return type(kind.__name__, (kind,), {"step": torch.no_grad()(inspect.unwrap(kind.step))})


AdamW, NAdam = _without_compiler(optim.AdamW), _without_compiler(optim.NAdam)
Adafactor, Muon, SGD = _without_compiler(optim.Adafactor), _without_compiler(optim.Muon), _without_compiler(optim.SGD)


class Joined(Optimizer):
    """Several optimizers for different parameters, as one optimizer, which has all their groups and states."""

    def __init__(self, *parts: Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError("it would replace the groups and states that the parts share")

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
