"""How often the host waits for a GPU in a training step, read on fake CUDA tensors, which compute nothing.

That shows which values the host reads and which copies it waits for. It does not show what a kernel's own code waits
for, as eigh does in SOAP's first step. `tests/run/test_gpu.py` asks torch itself, on a GPU.
"""

import importlib
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gptexp.config.compose import compose
from gptexp.data.loader import MicroBatch
from gptexp.distributed.reduction import MeanReduction
from gptexp.optim import OPTIMIZERS
from gptexp.training.optimizer import build_optimizer
from gptexp.training.phases import StepTimer
from gptexp.training.small_gradients import SmallGradients
from gptexp.training.step import Probe, TrainStep
from gptexp.training.step_report import SlowestRank
from gptexp.training.weight_average import WeightAverage

pytest.importorskip("pytorch_optimizer", reason="no pytorch_optimizer; pip install 'gptexp[optim]'")

GPU = torch.device("cuda:0")
aten = torch.ops.aten


class Waits(TorchDispatchMode):
    """Counts the operations for which the host waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._pin_memory.default:  # fake tensors lack it
            return args[0]
        if func is aten._local_scalar_dense.default:  # item, tolist, bool, float
            self.count += args[0].is_cuda
            return 0.5 if args[0].is_floating_point() else 1
        if func is aten.copy_.default:
            copy, source, *non_blocking = args
        else:
            copy, source, non_blocking = func(*args, **kwargs), args[0] if args else None, kwargs.get("non_blocking")
        if func in (aten.copy_.default, aten._to_copy.default) and not non_blocking:
            self.count += copy.is_cuda != source.is_cuda
        return copy


class Indexing(TorchFunctionMode):
    """Makes `tensor[i]` an operation. torch's own way asks the GPU's driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].select(0, args[1]) if func is Tensor.__getitem__ else func(*args, **(kwargs or {}))


class Model(nn.Module):
    """Parameters of all kinds that optimizers tell apart. The loss has no graph: autograd would ask the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Parameter(torch.empty(64, 16, device=GPU))
        self.h = nn.ParameterList([torch.empty(16, 16, device=GPU), torch.empty(16, device=GPU)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.zeros((), device=GPU)


class Event:
    """A `torch.cuda.Event` that has happened."""

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch and the step take fake tensors for tensors of a GPU."""
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor])
    monkeypatch.setattr(torch.cuda, "Event", Event)


def waits_a_step(
    monkeypatch: pytest.MonkeyPatch, name: str, may_spoil: bool = False, more: Callable[[Tensor], object] = id
) -> float:
    """How often the host waits in a step of two micro-steps with all that a step may measure.

    `more` is called with the loss of each micro-step.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), Indexing(), Waits() as waits:
        model = Model()

        def backward(loss: Tensor) -> None:
            for p in model.parameters():
                gradient = torch.empty_like(p)
                for hook in (p._backward_hooks or {}).values():
                    hook(gradient)
                p.grad = gradient if p.grad is None else p.grad.add_(gradient)
            more(loss)

        monkeypatch.setattr(Tensor, "backward", backward)
        optimizer = build_optimizer(model, compose([f"optim={name}"]).optim, fused=name == "adamw")
        step = TrainStep(model, optimizer, MeanReduction(None), 1.0, nullcontext, False, may_spoil=may_spoil)
        x = torch.zeros((2, 8), dtype=torch.int64, device=GPU)
        batches = (MicroBatch(x, x, 0, 0) for _ in itertools.count())
        small_gradients, average = SmallGradients(model, step.parameters), WeightAverage(step.parameters, 1024)
        for _ in range(2):
            report = step(batches, 2, 1.0, StepTimer(GPU), probe=Probe(small_gradients, SlowestRank(7.5, GPU)))
            average.update(32, report.finite)
        report.read()  # waits for the copy that the step has queued, and for nothing else
        return waits.count / 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_host_does_not_wait_if_a_non_finite_step_may_spoil_the_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's Adafactor reads two norms of each tensor. SOAP's update must not see a gradient that is not finite."""
    expected = {"adafactor": 2 * 3, "soap": 1}.get(name, 0)
    assert waits_a_step(monkeypatch, name, may_spoil=OPTIMIZERS[name].takes_nonfinite) == expected


@pytest.mark.parametrize(("name", "expected"), [("adamw", 0), ("sgd", 1)])
def test_otherwise_it_waits_once_without_a_fused_kernel(
    name: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert waits_a_step(monkeypatch, name) == expected


@pytest.mark.parametrize(
    "wait",
    [
        Tensor.item,
        Tensor.cpu,
        lambda loss: loss > 0 or 1,
        lambda loss: torch.ones(()).copy_(loss),
        lambda loss: torch.ones(2).to(loss.device),
    ],
)
def test_a_wait_is_counted(wait: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits_a_step(monkeypatch, "adamw", more=wait) == 2
