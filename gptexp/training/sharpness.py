"""Sharpness of the loss at a model's weights: the largest eigenvalue of its Hessian, and of the preconditioned one.

A product with the Hessian is a central difference of two gradients, H v = (g(w + r v) - g(w - r v)) / 2r, which any
attention kernel can compute. Lanczos' method needs nothing else (PyHessian, arXiv 1912.07145, uses power iteration).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

STEPS = (1e-3, 1e-2, 1e-4, 1e-1)  # norms of r v that are tried; too small drowns in rounding, too large in curvature
TOLERANCE = 0.01  # largest residual, and relative difference of the results with a step and with its half
RESIDUAL = 1e-3  # Lanczos stops where |A v - l v| is below this share of the largest eigenvalue l
MOST_ITERATIONS = 300
MOST_VECTORS = 16  # that Lanczos' method holds, each as large as the weights
RHO = 0.05  # radius of SAM's sharpness (arXiv 2010.01412)

Loss = Callable[[], Tensor]  # the loss at the present weights, whose `backward` was called if gradients are on
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Eigenvalue:
    """The largest eigenvalue of a symmetric operator."""

    value: float
    residual: float  # |A v - l v| / |l|
    iterations: int
    vector: Tensor  # of norm 1


def largest_eigenvalue(product: Product, size: int, device: torch.device, seed: int = 0) -> Eigenvalue:
    """The largest eigenvalue of the symmetric operator `product` on vectors of `size` numbers, by Lanczos' method.

    Starts again from the best vector so far whenever it holds `MOST_VECTORS` vectors. Stops on the residual, not where
    the value no longer changes, which it may do for a while before it has found the largest.
    """
    generator = torch.Generator(device).manual_seed(seed)
    vector, iterations = torch.randn(size, generator=generator, device=device), 0
    while True:
        found = _lanczos(product, vector / vector.norm(), min(MOST_VECTORS, size))
        vector, iterations = found.vector, iterations + found.iterations
        if found.residual < RESIDUAL or iterations >= MOST_ITERATIONS:
            return replace(found, iterations=iterations)


def _lanczos(product: Product, start: Tensor, most: int) -> Eigenvalue:
    """Lanczos' method with at most `most` vectors, each of which is made orthogonal to all earlier ones."""
    basis, diagonal, beside = [start], list[float](), list[float]()
    while True:
        w = product(basis[-1])
        diagonal.append(float(w @ basis[-1]))
        for _ in range(2):  # once leaves an error of rounding
            for b in basis:
                w -= (w @ b) * b
        length = float(w.norm())
        tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        for i, value in enumerate(beside):
            tridiagonal[i, i + 1] = tridiagonal[i + 1, i] = value
        values, vectors = torch.linalg.eigh(tridiagonal)
        largest, of_largest = float(values[-1]), vectors[:, -1].tolist()
        residual = abs(length * of_largest[-1]) / max(abs(largest), 1e-30)
        if residual < RESIDUAL or len(basis) == most:
            vector = torch.zeros_like(start)
            for share, b in zip(of_largest, basis, strict=True):
                vector += share * b
            return Eigenvalue(largest, residual, len(basis), vector / vector.norm())
        beside.append(length)
        basis.append(w / length)


class Differences:
    """Products with the Hessian of `loss` at the weights `parameters`, which keep their bits."""

    def __init__(self, loss: Loss, parameters: Sequence[Tensor]) -> None:
        self.loss, self.parameters = loss, list(parameters)
        self.at = [p.detach().clone() for p in self.parameters]
        self.sizes = [p.numel() for p in self.parameters]

    @torch.no_grad()
    def move(self, direction: Tensor | None) -> None:
        """Set the weights to those of the start plus `direction`; None: to those of the start."""
        for p, start in zip(self.parameters, self.at, strict=True):
            p.copy_(start)
        if direction is not None:
            for p, part in zip(self.parameters, direction.split(self.sizes), strict=True):
                p.add_(part.view_as(p))

    def gradient(self, direction: Tensor | None = None) -> Tensor:
        """The gradient at the start plus `direction`, as one vector."""
        self.move(direction)
        for p in self.parameters:
            p.grad = None
        self.loss()
        found = torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros_like(p).flatten()
                           for p in self.parameters])  # fmt: skip
        self.move(None)
        for p in self.parameters:
            p.grad = None
        return found

    def hessian_times(self, v: Tensor, step: float) -> Tensor:
        """H v, by gradients at a distance of `step` from the weights."""
        r = step / float(v.norm())
        return (self.gradient(r * v) - self.gradient(-r * v)) / (2 * r)

    @torch.no_grad()
    def loss_at(self, direction: Tensor | None = None) -> float:
        self.move(direction)
        found = float(self.loss())
        self.move(None)
        return found


def hessian_sharpness(differences: Differences, scale: Tensor | None = None) -> Eigenvalue | None:
    """The largest eigenvalue of D H D, where D is the diagonal matrix of `scale`; None: of H.

    Uses the first of `STEPS` with which a step of half the size gives the same value to 1%, and the residual is as
    small. None if there is none.
    """
    size, device = sum(differences.sizes), differences.at[0].device

    def product_with(step: float) -> Product:
        def product(v: Tensor) -> Tensor:
            if scale is None:
                return differences.hessian_times(v, step)
            return scale * differences.hessian_times(scale * v, step)

        return product

    for step in STEPS:
        found = largest_eigenvalue(product_with(step), size, device)
        whole, half = (float(product_with(s)(found.vector) @ found.vector) for s in (step, step / 2))
        if found.residual <= TOLERANCE and math.isfinite(whole) and abs(whole - half) <= TOLERANCE * abs(whole):
            return found
    return None


def sam_sharpness(differences: Differences, rho: float = RHO) -> float:
    """SAM's sharpness: how much the loss rises over a distance of `rho` along the gradient."""
    gradient = differences.gradient()
    return differences.loss_at(rho * gradient / gradient.norm()) - differences.loss_at()


def adamw_scale(second_moment: Tensor, steps: int, beta1: float, beta2: float, eps: float) -> Tensor:
    """P^(-1/2) of AdamW's preconditioner P = (1 - beta1^t) (sqrt(v / (1 - beta2^t)) + eps), arXiv 2207.14484."""
    return ((1 - beta1**steps) * ((second_moment / (1 - beta2**steps)).sqrt() + eps)).rsqrt()


def adamw_threshold(lr: float, beta1: float) -> float:
    """The preconditioned sharpness above which AdamW is unstable with a constant `lr` (arXiv 2207.14484, section 3)."""
    return (2 + 2 * beta1) / ((1 - beta1) * lr)
