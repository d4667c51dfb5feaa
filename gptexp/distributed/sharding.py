"""How the ranks keep the parameters of a model: whole on each of them, or split among them by torch's FSDP2.

FSDP2 (Zhao et al. 2023, arXiv 2304.11277; stage 3 of Rajbhandari et al. 2020, arXiv 1910.02054) splits each parameter
by its rows. The parameters of a module are whole only while it computes. Each rank updates its own rows as plain
tensors. An optimizer that updates each number by itself need not know of the split.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # imports the compiler, which takes a second

Hook = Callable[[int, Tensor], None]  # (number of a parameter, its gradient)


class Parameters(Protocol):
    """The parameters of a model as this rank keeps and updates them."""

    @property
    def named(self) -> Mapping[str, nn.Parameter]:
        """What the optimizer updates: this rank's rows, or the whole parameters."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """The shapes of the whole parameters."""

    @property
    def split(self) -> bool:
        """Whether each rank has rows of its own."""

    def gradients(self) -> list[Tensor]:
        """Return the gradients of a step after its last backward pass. Each is then the `grad` of one of `named`."""

    def norm(self, own: Tensor) -> Tensor:
        """Return the L2 norm over all ranks, given the norm `own` of this rank's part; both 0-dim. *Collective.*"""

    def rows(self, name: str) -> slice:
        """Return which rows of the whole parameter `name` this rank has."""

    def watch(self, hook: Hook) -> None:
        """From now on each backward pass calls `hook` with each gradient of this rank's own loss.

        `hook` gets the gradient before it is accumulated or reduced, and stays for the life of the parameters. Call
        this after the first forward pass.
        """


class WholeParameters:
    """Parameters that each rank keeps whole."""

    split = False

    def __init__(self, model: nn.Module) -> None:
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in self.named.items()}

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.named.values() if p.grad is not None]

    def norm(self, own: Tensor) -> Tensor:
        return own

    def rows(self, name: str) -> slice:
        return slice(0, self.shapes[name][0])

    def watch(self, hook: Hook) -> None:
        _watch(self.named.values(), hook)


class SplitParameters:
    """This rank's rows of the parameters of a model that FSDP2 has split."""

    split = True

    def __init__(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._parameters: dict[str, DTensor] = dict(model.named_parameters())  # type: ignore[arg-type]
        self.shapes = {name: p.shape for name, p in self._parameters.items()}
        self.named = {name: nn.Parameter(_local(p)) for name, p in self._parameters.items()}
        # The whole tensors with which modules compute. FSDP2 frees and refills their memory, but the objects stay.
        self._computing: dict[str, nn.Parameter] = {}
        for prefix, module in model.named_modules():
            if issubclass(type(module), FSDPModule):
                module.register_forward_pre_hook(partial(self._remember, prefix))

    def _remember(self, prefix: str, module: nn.Module, _inputs: object) -> None:
        if len(self._computing) < len(self.named):  # in the first forward pass
            for name, p in module.named_parameters(prefix):
                if not hasattr(p, "device_mesh"):  # a parameter of a block within the model is still split
                    self._computing.setdefault(name, p)

    def gradients(self) -> list[Tensor]:
        for name, p in self._parameters.items():
            self.named[name].grad = None if p.grad is None else _local(p.grad)
            p.grad = None
        return [p.grad for p in self.named.values() if p.grad is not None]

    def norm(self, own: Tensor) -> Tensor:
        square = own.double().square()
        dist.all_reduce(square)
        return square.sqrt().to(own.dtype)

    def rows(self, name: str) -> slice:
        count = self.shapes[name][0]
        each = -(-count // dist.get_world_size())
        first = min(dist.get_rank() * each, count)
        return slice(first, min(first + each, count))

    def watch(self, hook: Hook) -> None:
        _watch((self._computing[name] for name in self.named), hook)


def split(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    methods: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    sent_as: torch.dtype = torch.float32,
) -> SplitParameters:
    """Split the parameters of `model`, on the meta device, over all ranks. Their values are then undefined.

    While `forward` or one of `methods` runs, parameters are whole: those of one of `blocks` together, and those outside
    the blocks together. Modules compute in `dtype`; gradients are sent and summed as `sent_as`. *Collective.*
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Inputs keep their type: the residual stream stays in float32, as without the split.
    precision = MixedPrecisionPolicy(dtype, sent_as, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.register_forward_hook(_forget_whole_parameters)
    for method in methods:
        register_fsdp_forward_method(model, method)
    buffers = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    model.to_empty(device=device)
    for name, buffer in buffers.items():  # they are computed, not loaded
        model.get_buffer(name).copy_(buffer)
    return SplitParameters(model)


def _forget_whole_parameters(model: Any, _inputs: object, _output: object) -> None:
    """Free the whole parameters outside of the blocks after a forward pass without gradients.

    FSDP2 keeps them for a backward pass. If none follows, the next forward pass would use them again, although the rows
    may have changed: in an evaluation, averaged weights take the place of the trained ones.
    """
    if not torch.is_grad_enabled():
        model.reshard()


@torch.no_grad()
def _local(tensor: "DTensor | Tensor") -> Tensor:
    """This rank's part of a DTensor, in the same memory."""
    local: Tensor = tensor.to_local()  # type: ignore[union-attr]
    return local


def _watch(tensors: Iterable[Tensor], hook: Hook) -> None:
    for number, tensor in enumerate(tensors):
        tensor.register_hook(partial(hook, number))
