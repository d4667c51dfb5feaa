"""torch's optimizers as gptexp uses them, and several optimizers as one."""

import inspect
from itertools import islice
from typing import TypeVar

import torch
from torch import optim
from torch.optim import Optimizer

Kind = TypeVar("Kind", bound=Optimizer)

# torch's optimizers import torch's compiler, only to tell it not to compile their methods. The import takes more than a
# second. So the mark that torch sets after this import is set here.
for _method in (Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict, Optimizer.load_state_dict):
    _plain = inspect.unwrap(_method)
    setattr(_plain, "__dynamo_disable", _plain)


def _without_compiler(kind: type[Kind]) -> type[Kind]:
    """A subclass of `kind` whose step does not import the compiler. As with torch's decorator, gradients are off."""
    return type(kind.__name__, (kind,), {"step": torch.no_grad()(inspect.unwrap(kind.step))})


AdamW, SGD = _without_compiler(optim.AdamW), _without_compiler(optim.SGD)
Adafactor, Muon = _without_compiler(optim.Adafactor), _without_compiler(optim.Muon)
NAdam = _without_compiler(optim.NAdam)


class Joined(Optimizer):
    """Several optimizers for different parameters, as one optimizer, which has all their groups and states."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        groups = iter(self.param_groups)
        for part in parts:
            part.param_groups = list(islice(groups, len(part.param_groups)))
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
