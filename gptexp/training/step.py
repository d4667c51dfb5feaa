"""One training step: micro-steps, reduction, clipping, update."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptexp.config.metrics import Metric
from gptexp.data.loader import MicroBatch
from gptexp.distributed.reduction import Reduction
from gptexp.distributed.sharding import Parameters, WholeParameters
from gptexp.machine.effective import ForwardContext
from gptexp.process.signals import StopRequest
from gptexp.training.gradient_noise import StepNoise
from gptexp.training.norms import total_norm
from gptexp.training.optimizer import set_lr, step_if
from gptexp.training.phases import StepTimer
from gptexp.training.small_gradients import SmallGradients
from gptexp.training.step_report import SlowestRank, StepReport


@dataclass(frozen=True)
class Probe:
    """Measurements that only some steps make. They do not change the update."""

    small_gradients: SmallGradients | None = None  # the norms of the first micro-batches' gradients
    slowest: SlowestRank | None = None  # the slowest rank of the last logged step
    own: Callable[[], Mapping[str, float | Tensor]] = dict  # the user's, of weights and gradients before the update

    def backward(self, micro_step: int, divisor: int) -> AbstractContextManager[None]:
        """Return the context for a micro-step's backward pass."""
        return nullcontext() if self.small_gradients is None else self.small_gradients(micro_step, divisor)


@dataclass
class TrainStep:
    """One optimizer update on the next micro-batches."""

    model: nn.Module  # returns the mean loss of a micro-batch; may be compiled, wrapped in DDP, or split by FSDP2
    optimizer: torch.optim.Optimizer
    reduction: Reduction
    grad_clip: float  # largest global gradient norm; 0 means no clipping
    forward_context: ForwardContext  # autocast, or a null context
    dropout: bool
    parameters: Parameters = None  # type: ignore[assignment]  # what is updated; default: those of `model`, whole
    may_spoil: bool = False  # whether a non-finite step may update too, because nothing uses the weights after it
    stop: StopRequest | None = None  # read after the last micro-step: whether this rank should stop

    def __post_init__(self) -> None:
        self.parameters = self.parameters or WholeParameters(self.model)

    def __call__(
        self,
        batches: Iterator[MicroBatch],
        grad_accum_steps: int,
        lr_factor: float,
        timer: StepTimer | None = None,
        noise: StepNoise | None = None,
        probe: Probe = Probe(),
    ) -> StepReport:
        """Train on the next `grad_accum_steps` micro-batches at `lr_factor` times the peak rate. *Collective.*

        Skips the update if the loss or the gradient norm is non-finite on any rank, unless it `may_spoil` the weights.
        With a fused optimizer, or if it may, the host does not wait for a GPU. `timer` times the phases; `noise` is
        added to the gradient.
        """
        timer = timer or StepTimer(torch.device("cpu"))
        set_lr(self.optimizer, lr_factor)
        loss_sum: Tensor | float = 0.0
        fingerprint = 0
        for micro_step in range(grad_accum_steps):
            batch = next(batches)  # a thread has prefetched it
            timer.mark(Metric.DATA_MS)
            if self.dropout:
                torch.manual_seed(batch.dropout_seed)  # dropout must not depend on rank or micro-batch size
            with self.reduction(micro_step, grad_accum_steps) as divisor:
                with self.forward_context():
                    loss = self.model(batch.x, batch.y)
                timer.mark(Metric.FORWARD_MS)
                with probe.backward(micro_step, divisor):
                    (loss / divisor).backward()  # the sum over all micro-steps is then the mean over their tokens
            loss_sum = loss_sum + loss.detach()
            fingerprint += batch.fingerprint
            timer.mark(Metric.BACKWARD_MS)
        report = StepReport(
            loss=torch.as_tensor(loss_sum / grad_accum_steps),
            fingerprint=fingerprint % 2**64,
            stop_flags=None if self.stop is None else self.stop.flags(),
            small_gradients=None if probe.small_gradients is None else probe.small_gradients.measured(),
            slowest=probe.slowest,
        )
        grad_norm = self.parameters.norm(total_norm(self.parameters.gradients()))
        if noise is not None:  # clipping then goes by the norm without noise, and scales gradient and noise alike
            noise.add_to(self.parameters, grad_norm)
        if self.grad_clip:
            nn.utils.clip_grads_with_norm_(self.parameters.named.values(), self.grad_clip, grad_norm)
        report.complete(grad_norm)
        timer.mark(Metric.CLIP_MS)
        report.own = probe.own()
        step_if(report.finite, self.optimizer, self.may_spoil)
        if self.reduction.keeps_gradients:
            torch._foreach_zero_(self.parameters.gradients())  # most optimizers would begin a kernel for each tensor
        else:
            self.optimizer.zero_grad()
        timer.mark(Metric.OPTIMIZER_MS)
        return report
