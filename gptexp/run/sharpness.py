"""Sharpness at a run's checkpoints: the largest eigenvalue of the loss's Hessian, and of the preconditioned Hessian.

A product with the Hessian is a central difference of two gradients, H v = (g(w + r v) - g(w - r v)) / 2r, which any
attention kernel can compute. Lanczos' method needs only such products (PyHessian, arXiv 1912.07145, uses power
iteration). While the run trains, a process of its own measures the sharpness (`python -m gptexp.run.sharpness RUN_DIR
STEP`): it shares no memory, kernels, precision or random numbers with training.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptexp.config.metrics import SHARPNESS, Metric
from gptexp.config.scaling import scaled_optim
from gptexp.config.schedule import resolve_schedule
from gptexp.data.loader import build_dataset
from gptexp.data.tokenizer import masked_start
from gptexp.distributed.ranks import Rank
from gptexp.distributed.sharding import WholeParameters
from gptexp.machine.device import pick_device
from gptexp.model.gpt import GPT
from gptexp.model.loss import chunked_cross_entropy
from gptexp.model.shapes import count_parameters
from gptexp.optim.adamw import AdamWConfig
from gptexp.process.errors import CheckpointError, ConfigError, DataError, UserError, first_line
from gptexp.process.signals import StopRequest
from gptexp.process.terminal import run_verb, warn
from gptexp.run.load import refuse_another_model
from gptexp.run.own_process import ask, die_with_asker
from gptexp.storage import checkpoint, run_dir
from gptexp.training.optimizer import build_optimizer
from gptexp.training.snapshot import load_checkpoint

MICRO_BATCH_SIZE = 8  # sequences whose gradients are computed at once
SEQUENCES = 64  # size of the fixed batch, if the run's text has as many
STEPS = (1e-3, 1e-2, 1e-4, 1e-1)  # norms of r v to try: small ones drown in rounding, large ones in changes of H
TOLERANCE = 0.01  # largest residual, and largest relative difference between a step's result and that of half the step
RESIDUAL = 1e-3  # Lanczos stops where |A v - l v| is below this share of the largest eigenvalue l
MOST_ITERATIONS = 300
MOST_VECTORS = 16  # vectors that Lanczos' method holds, each as large as the weights
RHO = 0.05  # radius of SAM's sharpness (arXiv 2010.01412)

Loss = Callable[[], Tensor]  # the loss at the present weights; has called its `backward` if gradients are on
Product = Callable[[Tensor], Tensor]


def measure(directory: Path, checkpoints: Sequence[Path], sequences: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the sharpness at each of the run's `checkpoints`, for the loss on its first `sequences` training sequences.

    In float32 without dropout. Preconditioned sharpness exists only for AdamW, whose checkpoints have a preconditioner.
    A value is None if it cannot be computed to 1%. Raises `ConfigError`, `DataError` or `CheckpointError`.
    """
    config = run_dir.load_resolved(directory)
    refuse_another_model(directory, config)
    optim, schedule = scaled_optim(config), resolve_schedule(config, config.run_length[1])
    dataset = build_dataset(config)
    sequences = sequences or min(SEQUENCES, dataset.order.n_train)
    if sequences > dataset.order.n_train:
        raise ConfigError(f"--sequences={sequences}: the run's text has {dataset.order.n_train}; use fewer")
    device = pick_device(config.train.device, Rank())
    torch.set_float32_matmul_precision("highest")  # a difference of two gradients needs all digits
    if config.world.threads_per_rank is not None:
        torch.set_num_threads(config.world.threads_per_rank)
    starts = dataset.order.train_starts(np.arange(sequences), dataset.seq_len)
    rows = torch.from_numpy(dataset.rows(dataset.train, starts).astype(np.int64)).to(device)
    start = masked_start(config.data, directory)
    loss = partial(chunked_cross_entropy, z_loss=config.train.z_loss)
    gpt = GPT(config.model, loss, document_start=start).to(device).eval()
    for path in checkpoints:
        state = checkpoint.load_state(path)
        checkpoint.refuse_other_size(path, count_parameters(config.model))
        if (trained_on := checkpoint.data_hash(path)) not in (None, dataset.hash):
            raise DataError(
                f"{path}: trained on other tokens ({trained_on}) than data={config.data.name} contains now "
                f"({dataset.hash}); restore the old text"
            )
        scale = threshold = None
        if isinstance(optim, AdamWConfig):
            optimizer = build_optimizer(gpt, optim, False)
            load_checkpoint(path, WholeParameters(gpt), optimizer)
            scale = _scale(gpt, optimizer, optim)
            before = config.batch.step_sizes.tokens_after(state.step - 1)
            factor = schedule.lr_factor(before, state.tokens - before)
            threshold = adamw_threshold(optim.lr * factor, optim.beta1) if factor else None
        else:
            checkpoint.load_weights(path, gpt)
        yield {"step": state.step, "tokens": state.tokens, **_values(gpt, rows, scale, threshold)}


def measure_while_training(
    directory: Path, step: int, device: torch.device, stop: StopRequest
) -> dict[str, Any] | None:
    """The metrics of the checkpoint of `step`; None if the run must stop first.

    A failure prints a line and gives no metrics.
    """
    given = f"sharpness after step {step}"
    if not (directory / run_dir.CHECKPOINTS / checkpoint.name_of(step)).is_dir():
        return {}  # it could not be saved; that was printed
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the other process needs memory of this GPU
    try:
        argv = ["gptexp.run.sharpness", str(directory.absolute()), f"{step}"]
        answer = ask(argv, given, "its process", lambda: stop.reason() is not None)
        return None if answer is None else {name: json.loads(answer)[name] for name in SHARPNESS}
    except Exception as error:  # from the other process, or from starting it
        of_others = "" if isinstance(error, UserError) else f"{given}: {type(error).__name__}: "
        warn(f"{of_others}{first_line(error)}; training continues")
        return {}


def _values(gpt: GPT, rows: Tensor, scale: Tensor | None, threshold: float | None) -> dict[str, float | None]:
    def loss() -> Tensor:
        """The loss on all `rows`. Gradients are accumulated over micro-batches."""
        total = torch.zeros((), device=rows.device)
        for part in rows.split(MICRO_BATCH_SIZE):
            share = gpt(part[:, :-1], part[:, 1:]) * (len(part) / len(rows))
            if torch.is_grad_enabled():
                share.backward()
            total += share.detach()
        return total

    differences = Differences(loss, list(gpt.parameters()))
    plain = hessian_sharpness(differences)
    preconditioned = hessian_sharpness(differences, scale) if scale is not None else None
    return {
        Metric.SHARPNESS_HESSIAN: plain.value if plain is not None else None,
        Metric.SHARPNESS_PRECONDITIONED: preconditioned.value if preconditioned is not None else None,
        Metric.SHARPNESS_THRESHOLD: threshold,
        Metric.SHARPNESS_SAM: sam_sharpness(differences),
    }


def _scale(gpt: GPT, optimizer: torch.optim.Optimizer, optim: AdamWConfig) -> Tensor:
    """P^(-1/2) for all parameters. P is divided by a group's own factor of the learning rate, if it has one."""
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    parts = []
    for p in gpt.parameters():
        state, group = optimizer.state[p], groups[p]
        if not (steps := int(state.get("step", 0))):
            raise CheckpointError("the optimizer has made no update; take a later checkpoint")
        scale = adamw_scale(state["exp_avg_sq"].flatten(), steps, optim.beta1, optim.beta2, group["eps"])
        parts.append(scale * (group["initial_lr"] / optim.lr) ** 0.5)
    return torch.cat(parts)


@dataclass(frozen=True)
class Eigenvalue:
    """The largest eigenvalue of a symmetric operator."""

    value: float
    residual: float  # |A v - l v| / |l|
    iterations: int
    vector: Tensor  # of norm 1


def largest_eigenvalue(product: Product, size: int, device: torch.device, seed: int = 0) -> Eigenvalue:
    """The largest eigenvalue of the symmetric operator `product` on vectors of `size` numbers, by Lanczos' method.

    Restarts from the best vector so far whenever it holds `MOST_VECTORS` vectors. Stops when the residual is small, not
    when the value stops changing: the value may stand still for a while before the largest is found.
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
        for _ in range(2):  # a single pass leaves an error of rounding
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
    """Products with the Hessian of `loss` at the weights `parameters`, which it restores bit for bit."""

    def __init__(self, loss: Loss, parameters: Sequence[Tensor]) -> None:
        self.loss, self.parameters = loss, list(parameters)
        self.at = [p.detach().clone() for p in self.parameters]
        self.sizes = [p.numel() for p in self.parameters]

    @torch.no_grad()
    def move(self, direction: Tensor | None) -> None:
        """Set the weights to the starting weights plus `direction`; None: to the starting weights."""
        for p, start in zip(self.parameters, self.at, strict=True):
            p.copy_(start)
        if direction is not None:
            for p, part in zip(self.parameters, direction.split(self.sizes), strict=True):
                p.add_(part.view_as(p))

    def gradient(self, direction: Tensor | None = None) -> Tensor:
        """The gradient at the starting weights plus `direction`, as one vector."""
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

    Uses the first of `STEPS` for which half the step gives the same value to 1%, and the residual is at most 1%.
    Returns None if there is no such step.
    """
    size, device = sum(differences.sizes), differences.at[0].device

    def product_with(step: float) -> Product:
        def product(v: Tensor) -> Tensor:
            if scale is None:
                return differences.hessian_times(v, step)
            return scale * differences.hessian_times(scale * v, step)

        return product

    for step in STEPS:
        eigenvalue = largest_eigenvalue(product_with(step), size, device)
        whole, half = (float(product_with(s)(eigenvalue.vector) @ eigenvalue.vector) for s in (step, step / 2))
        if eigenvalue.residual <= TOLERANCE and math.isfinite(whole) and abs(whole - half) <= TOLERANCE * abs(whole):
            return eigenvalue
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


def main(argv: list[str]) -> None:
    """Print the sharpness of one checkpoint of a run that trains, as JSON."""
    die_with_asker()
    directory, step = Path(argv[0]), int(argv[1])
    [found] = measure(directory, [directory / run_dir.CHECKPOINTS / checkpoint.name_of(step)])
    print(json.dumps(run_dir.finite(found)))


if __name__ == "__main__":
    run_verb(main)
