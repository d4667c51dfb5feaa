"""A metric of each logged step: how large the gradient of each matrix is, relative to its weights."""

from torch import Tensor, nn


def norms(model: nn.Module, least_rows: int = 1) -> dict[str, Tensor]:
    """The norm of the gradient over that of the weights; as tensors, so that a GPU need not wait for the host."""
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2 and len(p) >= least_rows}
    return {name: p.grad.norm() / p.norm() for name, p in matrices.items() if p.grad is not None}
