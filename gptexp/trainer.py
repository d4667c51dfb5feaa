"""The training step and the loop around it: no Hydra, no wandb, no command line.

A step of `total_batch_size` tokens runs as `grad_accum_steps` micro-steps on every rank. Gradients add up locally
and are averaged over the ranks once, with the last micro-step; the logged loss is the mean over all micro-steps of
all ranks.
"""

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gptexp import checkpoint
from gptexp.batch import BatchPlan, crosses
from gptexp.checkpoint import TrainState
from gptexp.data.loader import Dataset, MicroBatch, micro_batches
from gptexp.distributed import Rank, all_reduce_sum
from gptexp.effective import ForwardContext
from gptexp.errors import DivergedError
from gptexp.evaluate import evaluate
from gptexp.loggers import RunLog
from gptexp.model import GPT
from gptexp.phases import StepTimer, exposed_reduce_ms
from gptexp.schedule import Schedule
from gptexp.signals import REASONS, StopRequest


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[MicroBatch],
    grad_accum_steps: int,
    lr: float,
    grad_clip: float,
    forward_context: ForwardContext,
    dropout: bool,
    mark: Callable[[str], None] = lambda phase: None,
) -> tuple[Tensor, Tensor, int]:
    """One optimizer update. *Collective.*

    Returns this rank's mean loss (nats per token), the global gradient norm before clipping, both still on the
    device, and the fingerprint of what this rank read. `mark` hears of the end of each phase. Nothing here waits for
    the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss_sum: Tensor | float = 0.0
    fingerprint = 0
    ddp = model if isinstance(model, DistributedDataParallel) else None
    for micro_step in range(grad_accum_steps):
        batch = next(batches)
        mark("data")
        if dropout:
            torch.manual_seed(batch.dropout_seed)
        if ddp is not None:
            # DDP reads the flag in the forward pass already: only the last micro-step's backward reduces.
            ddp.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        with forward_context():
            loss = model(batch.x, batch.y)
        mark("forward")
        (loss / grad_accum_steps).backward()  # the sum over micro-steps is then the mean over their tokens
        loss_sum = loss_sum + loss.detach()
        fingerprint += batch.fingerprint
        mark("backward")
    parameters = [p for p in model.parameters() if p.grad is not None]
    grad_norm = nn.utils.clip_grad_norm_(parameters, grad_clip or float("inf"))
    mark("clip")
    optimizer.step()
    # DDP's gradients are views of its buckets: gone, the next would be made beside those, and copied.
    optimizer.zero_grad(set_to_none=ddp is None)
    mark("optimizer")
    return torch.as_tensor(loss_sum / grad_accum_steps), grad_norm, fingerprint % 2**64


@dataclass
class Training:
    """Everything one rank trains with; the same on all ranks but for `rank` and `device`."""

    model: nn.Module  # `gpt` itself, compiled, or DDP around it
    gpt: GPT
    optimizer: torch.optim.Optimizer
    dataset: Dataset
    plan: BatchPlan
    schedule: Schedule
    forward_context: ForwardContext
    rank: Rank
    device: torch.device
    steps: int
    peak_lr: float
    grad_clip: float
    eval_every_tokens: int
    save_every_tokens: int
    log_every: int
    keep_last: int


def fit(t: Training, state: TrainState, stop: StopRequest, log: RunLog, checkpoints: Path) -> str | None:
    """Train from `state` to the last step. *Collective.* Returns why it stopped early, or None.

    Evaluates, saves and stops at step boundaries only, on all ranks after the same step. Raises `DivergedError`, on
    all ranks alike, as soon as a loss or gradient norm that is not finite is seen.
    """
    batches = micro_batches(t.dataset, t.plan, t.rank.rank, state.step, t.steps, t.device)
    total = t.plan.total_batch_size
    dropout = t.gpt.cfg.dropout > 0
    # A GPU is still computing the step when the host has queued it: reading one step late keeps the queue full.
    late = 1 if t.device.type == "cuda" else 0
    unread: deque[StepReport] = deque()
    my_fingerprint = state.fingerprint if t.rank.is_main else 0
    reasons: list[str] = []  # to stop early, in the order they came up
    steps_since_log = clipped_since_log = 0
    first = state.step
    t.gpt.train()
    stop.training = True
    clock = time.perf_counter()

    def read(report: StepReport) -> None:
        nonlocal clock, steps_since_log, clipped_since_log
        loss, grad_norm, asked, state.fingerprint = report.read()
        now = time.perf_counter()
        seconds, clock = now - clock, now
        state.seconds += seconds
        if asked:
            reasons.append(asked)
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        steps_since_log += 1
        clipped_since_log += 0 < t.grad_clip < grad_norm
        if report.step % t.log_every == 0 or report.step == t.steps - 1 or not finite:
            tokens = (report.step + 1) * total
            log.step(
                step=report.step,
                tokens=tokens,
                epoch=tokens / (t.dataset.order.n_train * t.plan.seq_len),
                loss=loss,
                lr=report.lr,
                grad_norm=grad_norm,
                clip_fraction=clipped_since_log / steps_since_log,
                seconds=seconds,
                phases_ms={**report.timer.read(), "reduce": exposed_reduce_ms(t.model)},
                fingerprint=state.fingerprint,
            )
            steps_since_log = clipped_since_log = 0
        if not finite:
            raise DivergedError(
                f"step {report.step}: loss {loss}, gradient norm {grad_norm}: the run diverged; lower optim.lr, "
                "lengthen the warm-up, or clip harder"
            )

    def validate() -> None:
        if not len(t.dataset.val_windows):
            return
        state.val_loss = evaluate(t.gpt, t.dataset, t.plan.micro_batch_size, t.rank, t.device, t.forward_context)
        state.evaluated_tokens = state.tokens
        log.evaluation(state.step - 1, state.tokens, state.val_loss)
        if not math.isfinite(state.val_loss):
            raise DivergedError(f"step {state.step - 1}: validation loss {state.val_loss}: the weights diverged")
        best = state.val_loss if state.best_val_loss is None else state.best_val_loss
        state.best_val_loss = min(state.val_loss, best)

    def save() -> None:
        if t.rank.is_main:
            log.checkpoint(state.step, checkpoint.save(checkpoints, t.gpt, t.optimizer, state, t.keep_last))

    if state.evaluated_tokens < state.tokens and crosses(state.tokens - total, state.tokens, t.eval_every_tokens):
        validate()  # was due when the run was asked to stop
        clock = time.perf_counter()
    while state.step < t.steps and not reasons:
        lr = t.peak_lr * t.schedule.lr_factor(state.tokens, total)
        timer = StepTimer(t.device)
        loss, grad_norm, fingerprint = train_step(
            t.model,
            t.optimizer,
            batches,
            t.plan.grad_accum_steps,
            lr,
            t.grad_clip,
            t.forward_context,
            dropout,
            timer.mark,
        )
        my_fingerprint = (my_fingerprint + fingerprint) % 2**64
        flags = stop.flags()
        unread.append(StepReport(state.step, lr, loss, grad_norm, my_fingerprint, flags, t.rank.world_size, timer))
        before = state.tokens
        state.step, state.tokens = state.step + 1, state.tokens + total
        last = state.step == t.steps
        due_eval = last or crosses(before, state.tokens, t.eval_every_tokens)
        due_save = last or crosses(before, state.tokens, t.save_every_tokens)
        if state.step == first + 1:  # before its report is read, or step 2 would be charged with it
            gc.collect()
            gc.freeze()  # compiling leaves a million objects that need not be walked through again
            gc.enable()
        while len(unread) > (0 if due_eval or due_save else late):
            read(unread.popleft())
        if reasons and not last:
            break  # whoever asks a run to stop gives it seconds: no evaluation first
        if due_eval:
            validate()
        if due_save:
            save()
        if due_eval or due_save:
            clock = time.perf_counter()  # evaluating and saving are no part of the next step's time
    while unread:
        read(unread.popleft())
    if state.step == t.steps:
        return None
    save()
    return reasons[0]


class StepReport:
    """A step's numbers on their way from the devices of all ranks to this host.

    The reduction and the copy are queued when the report is made; `read` waits for them. One small all-reduce of
    float32 carries everything: the loss, one flag per reason to stop, and the fingerprint as eight bytes, whose
    sums over the ranks stay exact integers.
    """

    def __init__(
        self,
        step: int,
        lr: float,
        loss: Tensor,
        grad_norm: Tensor,
        fingerprint: int,
        stop_flags: list[float],
        world_size: int,
        timer: StepTimer,
    ) -> None:
        self.step = step
        self.timer = timer
        self.lr = lr
        host = torch.tensor([*stop_flags, *fingerprint.to_bytes(8, "little")], dtype=torch.float32)
        if loss.is_cuda:
            host = host.pin_memory()
        mean_share = (loss / world_size).reshape(1)
        reduced = all_reduce_sum(torch.cat([mean_share, host.to(loss.device, non_blocking=True)]))
        values = torch.cat([grad_norm.reshape(1).to(reduced.dtype), reduced])  # the norm is equal on all ranks
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = values

    def read(self) -> tuple[float, float, str | None, int]:
        """(mean loss over all ranks, gradient norm, reason to stop, fingerprint over all ranks)."""
        if self._event is not None:
            self._event.synchronize()
        grad_norm, loss, *rest = self._values.tolist()
        flags, limbs = rest[: len(REASONS)], rest[len(REASONS) :]
        asked = next((name for name, flag in zip(REASONS, flags, strict=True) if flag), None)
        return loss, grad_norm, asked, sum(int(limb) << (8 * i) for i, limb in enumerate(limbs)) % 2**64
