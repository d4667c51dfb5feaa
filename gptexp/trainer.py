"""The training step and the loop around it: no Hydra, no wandb, no command line.

A step of `total_batch_size` tokens runs as `grad_accum_steps` micro-steps on every rank. Gradients come together as
`train.reduction` says; the logged loss is the mean over all micro-steps of all ranks. A loss or gradient that is not
finite, on whichever rank, reaches no weight.
"""

import gc
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gptexp import checkpoint
from gptexp.batch import BatchPlan, crosses
from gptexp.checkpoint import TrainState
from gptexp.data.loader import Dataset, MicroBatch, micro_batches
from gptexp.distributed import Rank, Reduction, agree
from gptexp.effective import ForwardContext
from gptexp.errors import DivergedError, StorageError
from gptexp.evaluate import evaluate
from gptexp.loggers import RunLog
from gptexp.model import GPT
from gptexp.noise_scale import Norms, metrics
from gptexp.optim import step_if
from gptexp.phases import StepTimer, exposed_reduce_ms
from gptexp.profiling import StepProfiler
from gptexp.schedule import Schedule
from gptexp.signals import REASONS, StopRequest
from gptexp.small_gradients import SmallGradients
from gptexp.step_report import Numbers, StepReport

# How often in a row an update may be left out, or the same checkpoint be gone back to, before a run has diverged.
MOST_IN_A_ROW = 10
SAVES_TO_SPARE = 2.0  # before train.max_minutes are over: times what the last checkpoint took
SLOW_DISK = 100e6  # bytes per second, until a checkpoint has been timed


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reduction: Reduction,
    batches: Iterator[MicroBatch],
    grad_accum_steps: int,
    lr: float,
    grad_clip: float,
    forward_context: ForwardContext,
    dropout: bool,
    mark: Callable[[str], None] = lambda phase: None,
    flags: Callable[[], list[float]] = lambda: [0.0] * len(REASONS),
    small_gradients: SmallGradients | None = None,
    work_ms: float = 0.0,
) -> StepReport:
    """One optimizer update, left out where loss or gradient norm is not finite. *Collective.*

    `mark` hears of the end of each phase; `flags` gives this rank's reasons to stop, asked for once all micro-steps
    are done; `small_gradients`, where given, measures those of the first micro-batches; the other ranks are told of
    `work_ms`. With a fused optimizer nothing here waits for the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss_sum: Tensor | float = 0.0
    fingerprint = 0
    for micro_step in range(grad_accum_steps):
        batch = next(batches)
        mark("data")
        if dropout:
            torch.manual_seed(batch.dropout_seed)
        with reduction(micro_step, grad_accum_steps) as divisor:
            with forward_context():
                loss = model(batch.x, batch.y)
            mark("forward")
            with small_gradients(micro_step, divisor) if small_gradients else nullcontext():
                (loss / divisor).backward()  # the sum over all micro-steps is then the mean over their tokens
        loss_sum = loss_sum + loss.detach()
        fingerprint += batch.fingerprint
        mark("backward")
    parameters = [p for p in model.parameters() if p.grad is not None]
    grad_norm = nn.utils.clip_grad_norm_(parameters, grad_clip or float("inf"))
    report = StepReport(
        torch.as_tensor(loss_sum / grad_accum_steps),
        grad_norm,
        fingerprint % 2**64,
        flags(),
        small_gradients.measured() if small_gradients else None,
        work_ms,
    )
    mark("clip")
    step_if(report.finite, optimizer)
    optimizer.zero_grad(set_to_none=not reduction.keeps_gradients)
    mark("optimizer")
    return report


@dataclass
class Training:
    """Everything one rank trains with; the same on all ranks but for `rank` and `device`."""

    model: nn.Module  # `gpt` itself, compiled, or DDP around it
    gpt: GPT
    optimizer: torch.optim.Optimizer
    reduction: Reduction
    dataset: Dataset
    plan: BatchPlan
    schedule: Schedule
    forward_context: ForwardContext
    rank: Rank
    device: torch.device
    steps: int
    peak_lr: float
    grad_clip: float
    nonfinite: str  # stop, skip or rollback
    divergence_nats: float | None  # how far above its lowest the smoothed loss may stay
    timeout_s: float  # s: how long to wait for a step's numbers
    eval_every_tokens: int
    save_every_tokens: int
    log_every: int
    noise_half_life_tokens: float | None  # None: the noise scale is not measured
    profiler: StepProfiler | None
    keep: checkpoint.Keep
    about: dict[str, Any]  # what every checkpoint says of its run


def fit(t: Training, state: TrainState, stop: StopRequest, log: RunLog, checkpoints: Path) -> str | None:
    """Train from `state` to the last step. *Collective.* Returns why it stopped early, or None.

    Evaluates, saves and stops at step boundaries only, on all ranks after the same step. Raises on all ranks alike:
    `DivergedError` as soon as a number is seen that is not finite (a step's: as `t.nonfinite` says), `StorageError`
    where the checkpoint to leave with cannot be saved; on rank 0 alone: `StorageError` where metrics cannot be.
    """
    try:
        return _Loop(t, state, stop, log, checkpoints).run()
    finally:
        if t.profiler:
            log.alert(state.step - 1, state.tokens, "profile", t.profiler.give_up())


class _Loop:
    """What `fit` keeps from step to step."""

    def __init__(self, t: Training, state: TrainState, stop: StopRequest, log: RunLog, checkpoints: Path) -> None:
        self.t, self.state, self.stop, self.log, self.checkpoints = t, state, stop, log, checkpoints
        self.total = t.plan.total_batch_size
        # A GPU is still computing the step when the host has queued it: reading one step late keeps the queue full.
        self.late = 1 if t.device.type == "cuda" else 0
        self.unread: deque[tuple[int, float, StepTimer, StepReport]] = deque()
        self.reasons: list[str] = []  # to stop early, in the order they came up
        self.steps_since_log = self.clipped_since_log = 0
        self.not_finite_in_a_row = 0
        self.went_back_to = -1  # step of the checkpoint that was last gone back to
        parameters = sum(p.numel() for p in t.gpt.parameters())
        self.save_s = 12 * parameters / SLOW_DISK  # what the last checkpoint took: weights and two moments
        self.eval_s: float | None = None  # what the last evaluation took
        self.small_gradients = SmallGradients(t.model, t.plan.grad_accum_steps) if t.noise_half_life_tokens else None
        self.work_ms = 0.0  # of this rank in the newest logged step: all that it did without the others
        self.batches = self.data()
        self.clock = time.perf_counter()

    def data(self) -> Iterator[MicroBatch]:
        """The micro-batches from where `state` stands."""
        t, state = self.t, self.state
        first, end = (step + state.steps_passed_over for step in (state.step, t.steps))
        return micro_batches(t.dataset, t.plan, t.rank.rank, first, end, t.device)

    def run(self) -> str | None:
        t, state, total = self.t, self.state, self.total
        first = state.step
        t.gpt.train()
        self.stop.training = True
        if state.evaluated_tokens < state.tokens and crosses(state.tokens - total, state.tokens, t.eval_every_tokens):
            self.validate()  # was due when the run was asked to stop
        while state.step < t.steps and not self.reasons:
            self.step()
            last = state.step == t.steps
            due_eval = last or crosses(state.tokens - total, state.tokens, t.eval_every_tokens)
            due_save = last or crosses(state.tokens - total, state.tokens, t.save_every_tokens)
            if state.step == first + 1:  # before its report is read, or step 2 would be charged with it
                gc.collect()
                gc.freeze()  # compiling leaves a million objects that need not be walked through again
                gc.enable()
            went_back = self.read(leave=0 if due_eval or due_save else self.late)
            if went_back:
                continue
            if self.reasons and not last:
                break  # whoever asks a run to stop gives it seconds: no evaluation first
            if due_eval:
                self.validate()
            if due_save:
                state.regular = True
                self.save(to_leave_with=last)
        if state.step == t.steps:
            return None
        self.read(leave=0)
        state.regular = crosses(state.tokens - total, state.tokens, t.save_every_tokens)
        self.save(to_leave_with=True)
        return self.reasons[0]

    def is_logged(self, step: int) -> bool:
        return step % self.t.log_every == 0 or step == self.t.steps - 1

    def step(self) -> None:
        """Queue one step; its report is read later."""
        t, state = self.t, self.state
        lr = t.peak_lr * t.schedule.lr_factor(state.tokens, self.total)
        timer = StepTimer(t.device)
        report = train_step(
            t.model,
            t.optimizer,
            t.reduction,
            self.batches,
            t.plan.grad_accum_steps,
            lr,
            t.grad_clip,
            t.forward_context,
            dropout=t.gpt.cfg.dropout > 0,
            mark=timer.mark,
            flags=self.stop.flags,
            small_gradients=self.small_gradients if self.is_logged(state.step) else None,
            work_ms=self.work_ms,
        )
        self.unread.append((state.step, lr, timer, report))
        state.step, state.tokens = state.step + 1, state.tokens + self.total
        if t.profiler:
            over = time.perf_counter()
            if found := t.profiler.step(timer):
                t.profiler = None
                self.log.profile(state.step - 1, state.tokens, found)
            self.clock += time.perf_counter() - over  # writing the trace is no part of the step

    def read(self, leave: int) -> bool:
        """Read and log all reports but the newest `leave`; whether training went back to a checkpoint over one."""
        t, state = self.t, self.state
        while len(self.unread) > leave:
            step, lr, timer, report = self.unread.popleft()
            numbers = report.read(t.timeout_s)
            now = time.perf_counter()
            seconds, self.clock = now - self.clock, now
            state.seconds += seconds
            state.fingerprint = (state.fingerprint + numbers.fingerprint) % 2**64
            self.stop.spare_s = self.needed_s(seconds)
            if numbers.asked:
                self.reasons.append(numbers.asked)
            self.steps_since_log += 1
            self.clipped_since_log += 0 < t.grad_clip < numbers.grad_norm
            if self.is_logged(step) or not numbers.finite:
                tokens = (step + 1) * self.total
                phases_ms = timer.read()
                self.work_ms = phases_ms["data"] + phases_ms["forward"]
                self.log.step(
                    step=step,
                    tokens=tokens,
                    epoch=tokens / (t.dataset.order.n_train * t.plan.seq_len),
                    loss=numbers.loss,
                    lr=lr,
                    grad_norm=numbers.grad_norm,
                    clip_fraction=self.clipped_since_log / self.steps_since_log,
                    seconds=seconds,
                    phases_ms={**phases_ms, "reduce": exposed_reduce_ms(t.model)},
                    work_ms=numbers.work_ms,
                    noise_scale=self.noise_scale(tokens, numbers),
                    fingerprint=state.fingerprint,
                )
                self.steps_since_log = self.clipped_since_log = 0
            if not numbers.finite and self.recover(step, f"loss {numbers.loss}, gradient norm {numbers.grad_norm}"):
                return True
            if numbers.finite:
                self.follow(step, numbers.loss)
        return False

    def noise_scale(self, tokens: int, numbers: Numbers) -> dict[str, float]:
        """What the norms of a step's gradients tell; nothing of a step that was not measured, or not finite."""
        t = self.t
        if t.noise_half_life_tokens is None or not numbers.finite or not 0 < numbers.small_sq_norm < math.inf:
            return {}
        norms = Norms(numbers.small_sq_norm, numbers.grad_norm**2, t.plan.micro_batch_size, t.plan.sequences)
        self.state.noise_scale.take(norms, tokens, t.noise_half_life_tokens)
        # With one micro-batch a rank every one of them was measured, and the norms tell how far they agree.
        cosine = norms.cosine() if math.isnan(numbers.cosine) else numbers.cosine
        return metrics(norms, cosine, self.state.noise_scale, t.plan.seq_len)

    def follow(self, step: int, loss: float) -> None:
        """Take in the loss of a step whose numbers are finite. Raises `DivergedError` if it has left for good."""
        t, trend = self.t, self.state.trend
        if t.nonfinite == "skip":
            self.not_finite_in_a_row = 0
        if trend.diverged(loss, t.steps, t.divergence_nats):
            raise DivergedError(
                f"step {step}: the smoothed loss has stayed {t.divergence_nats:g} nats above its lowest, "
                f"{trend.lowest:.4f}, for {trend.steps_above} steps: the run diverged; lower optim.lr, lengthen the "
                "warm-up, or start a new run with train.divergence_nats=null"
            )

    def needed_s(self, step_s: float) -> float:
        """Seconds from the last look at the clock to the end of a run that stops for it."""
        eval_s = self.eval_s
        if eval_s is None:  # a forward pass is a third of a step
            eval_s = step_s * len(self.t.dataset.val_windows) / self.t.plan.sequences / 3
        return (1 + 2 * self.late) * step_s + eval_s + SAVES_TO_SPARE * self.save_s

    def recover(self, step: int, numbers: str) -> bool:
        """Do as `t.nonfinite` says about a step whose update was left out; whether that was to go back."""
        t, state = self.t, self.state
        self.not_finite_in_a_row += 1
        if t.nonfinite == "stop" or self.not_finite_in_a_row > MOST_IN_A_ROW:
            again = f" {self.not_finite_in_a_row} times" if t.nonfinite != "stop" else ""
            raise DivergedError(
                f"step {step}: {numbers}: the run diverged{again}; lower optim.lr, lengthen the warm-up, or clip harder"
            )
        if t.nonfinite == "skip":
            state.skipped_updates += 1
            self.log.fault(step, (step + 1) * self.total, f"{numbers}: this update is left out")
            return False
        self.go_back(step, numbers)
        return True

    def go_back(self, step: int, numbers: str) -> None:
        """Return to the newest checkpoint that was due, and from there on to the data behind that of `step`."""
        t, state = self.t, self.state

        def newest() -> tuple[Path, TrainState] | None:
            found = checkpoint.load_latest(self.checkpoints, regular=True)
            if found is not None:
                checkpoint.set_aside(self.checkpoints, found[1].step)
            return found

        found = agree(newest, t.rank, None)
        if found is None:
            raise DivergedError(f"step {step}: {numbers}: the run diverged before its first checkpoint; lower optim.lr")
        path, saved = found
        if saved.step != self.went_back_to:
            self.went_back_to, self.not_finite_in_a_row = saved.step, 1
        checkpoint.load_weights(path, t.gpt)
        checkpoint.load_optimizer(path, t.optimizer)
        behind = step + 1 + state.steps_passed_over
        vars(state).update(vars(saved), seconds=state.seconds, steps_passed_over=behind - saved.step)
        self.unread.clear()
        self.batches = self.data()
        self.log.rewind(state)
        self.log.fault(
            state.step - 1, state.tokens, f"step {step}: {numbers}: back to after step {state.step - 1}, on other data"
        )
        self.clock = time.perf_counter()

    def validate(self) -> None:
        t, state = self.t, self.state
        if not len(t.dataset.val_windows):
            return
        started = time.perf_counter()
        state.val_loss = evaluate(t.gpt, t.dataset, t.plan.micro_batch_size, t.rank, t.device, t.forward_context)
        state.evaluated_tokens = state.tokens
        self.log.evaluation(state.step - 1, state.tokens, state.val_loss)
        if not math.isfinite(state.val_loss):
            raise DivergedError(f"step {state.step - 1}: validation loss {state.val_loss}: the weights diverged")
        best = state.val_loss if state.best_val_loss is None else state.best_val_loss
        state.best_val_loss = min(state.val_loss, best)
        self.clock = time.perf_counter()  # this is no part of the next step's time
        self.eval_s = self.clock - started

    def save(self, to_leave_with: bool) -> None:
        """Save a checkpoint. One that cannot be saved is a line, unless the run is about to end with it."""
        t, state = self.t, self.state
        started = time.perf_counter()
        self.log.sync()  # no metrics are lost that lie before a checkpoint
        if not nn.utils.get_total_norm([p.detach() for p in t.gpt.parameters()], math.inf).isfinite():
            raise DivergedError(f"step {state.step - 1}: the weights diverged; lower optim.lr or clip harder")

        def publish() -> None:
            try:
                path = checkpoint.save(self.checkpoints, t.gpt, t.optimizer, state, t.keep, t.about)
            except StorageError as error:
                if to_leave_with:
                    raise
                print(f"gptexp: {error}; training goes on", file=sys.stderr)
            else:
                self.log.checkpoint(state.step, path)

        if to_leave_with:
            agree(publish, t.rank, None)
        elif t.rank.is_main:
            publish()
        self.clock = time.perf_counter()
        self.save_s = self.clock - started
