"""L2 norms of gradients, with a relative error below 1e-6 at any number of elements, and dot products.

torch's CPU kernel adds all squares of a tensor to a few float32 sums. A sum of 10^7 squares is so large that each
further square is rounded by about 10^-3 of its value, and the norm comes out too low. Here only short blocks are added
in float32, and their sums in float64. The kernel of a GPU's norm adds in short blocks itself. cuBLAS's dot product does
not: on an H100 it was off by 1.1e-6 of the norms for a tensor of GPT-2's size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

BLOCK = 1024  # elements of one float32 sum of squares
CPU_CHUNK = 1 << 17  # elements whose products are in memory at once: they fit in a core's cache
GPU_CHUNK = 1 << 22  # likewise, so that few kernels are started


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all elements of float32 tensors, 0-dim, float32. Its bits do not depend on threads.

    Tensors may be empty: a rank may have no row of a parameter.
    """
    if not any(tensor.numel() for tensor in tensors):
        return tensors[0].new_zeros(())
    if not tensors[0].is_cpu:
        return nn.utils.get_total_norm(tensors)
    return norm_of_norms(torch.cat([block_norms(tensor) for tensor in tensors]))


def block_norms(tensor: Tensor) -> Tensor:
    """Return the norms of the blocks of a tensor, 1-dim, in its type: float32, or float64 for norms of many blocks.

    The last block may be shorter. On a GPU the tensor is one block.
    """
    block = BLOCK if tensor.is_cpu else max(1, tensor.numel())
    rest = tensor.numel() % block
    if 0 < rest < tensor.numel():
        flat = tensor.flatten()
        return torch.cat([block_norms(flat[:-rest]), block_norms(flat[-rest:])])
    norms: Tensor = torch.linalg.vector_norm(tensor.reshape(-1, rest or block), dim=1)
    return norms


def norm_of_norms(norms: Tensor) -> Tensor:
    """Return the norm of a tensor whose parts have the norms `norms`, 1-dim, float32. The result is 0-dim, float32."""
    if len(norms) == 1:
        return norms.squeeze()
    if not norms.is_cpu:
        total: Tensor = torch.linalg.vector_norm(norms)
        return total
    if len(norms) > BLOCK:
        norms = block_norms(norms.double())
    total = torch.linalg.vector_norm(norms, dtype=torch.float64)
    return total.float()


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot product of two float32 tensors of one shape, 0-dim, float32.

    The error is below 1e-6 times the product of the two norms, so the error of a cosine is below 1e-6.
    """
    size = CPU_CHUNK if a.is_cpu else GPU_CHUNK
    if a.numel() <= size:  # most tensors of a small model, for which each operation counts
        return (a * b).sum()
    chunks = zip(a.flatten().split(size), b.flatten().split(size), strict=True)
    return torch.stack([(x * y).sum() for x, y in chunks]).double().sum().float()
