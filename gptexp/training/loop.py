"""The training loop: steps, and between them evaluation, checkpoints, recovery and stopping.

No Hydra, no wandb, no command line. All ranks evaluate, save and stop after the same step. A step whose loss or
gradient norm is non-finite on any rank does not update the weights, unless nothing uses them afterwards (`may_spoil` in
`step.py`). The code counts steps from 0; texts for people name the number of completed steps, so they count from 1.
"""

import gc
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gptexp.config.metrics import Metric
from gptexp.config.noise_scale import Norms
from gptexp.config.run_plan import PlannedStep, RunPlan
from gptexp.config.schema import TrainConfig
from gptexp.data.loader import Dataset, MicroBatch, micro_batches
from gptexp.distributed.group import agree
from gptexp.distributed.ranks import Rank
from gptexp.loggers.run_log import RunLog, straggler
from gptexp.model.own_model import Model
from gptexp.optim.base import OptimConfig
from gptexp.process.errors import DivergedError
from gptexp.process.signals import StopRequest
from gptexp.storage.checkpoint import TrainState
from gptexp.training.evaluation import Evaluation, Evaluations
from gptexp.training.gradient_noise import StepNoise, step_noise
from gptexp.training.optimizer import weights_for_use
from gptexp.training.phases import StepTimer, Stopwatch, exposed_reduce_ms
from gptexp.training.profiling import StepProfiler
from gptexp.training.saving import Checkpoints
from gptexp.training.small_gradients import SmallGradients
from gptexp.training.step import Probe, TrainStep
from gptexp.training.step_report import Numbers, SlowestRank, StepReport
from gptexp.training.weight_average import WeightAverage

MOST_IN_A_ROW = 10  # limit of skipped updates in a row, or of returns to one checkpoint; beyond it a run has diverged


@dataclass
class Training:
    """Everything that one rank trains with."""

    cfg: TrainConfig
    optim: OptimConfig
    plan: RunPlan
    step: TrainStep
    average: WeightAverage | None  # None: train.ema_half_life_tokens is null
    gpt: Model  # the model itself; `step.model` may be DDP around it
    dataset: Dataset
    rank: Rank
    device: torch.device
    timeout_s: float  # longest wait for the numbers of a step
    evaluations: Evaluations
    noise_half_life_tokens: float | None  # half-life of the average noise scale; None: not measured
    profiler: StepProfiler | None
    checkpoints: Checkpoints
    own_metrics: Callable[[], Mapping[str, float | Tensor]] = dict  # of logged steps


def fit(t: Training, state: TrainState, stop: StopRequest, log: RunLog) -> str | None:
    """Train from `state` to the last step. *Collective.* Returns the reason for stopping early, or None.

    Raises `DivergedError` on all ranks if the run diverges; for a non-finite step see `train.nonfinite`. Raises
    `StorageError` on all ranks if the final checkpoint cannot be saved, and on rank 0 if the metrics cannot be written.
    """
    loop = _Loop(t, state, stop, log)
    try:
        return loop.run()
    except DivergedError:  # raised on all ranks; after others, the wait for a lost rank would never end
        t.checkpoints.finish(log)
        raise
    finally:
        if t.profiler is not None:
            log.alert(state.step - 1, state.tokens, "profile", t.profiler.give_up())


@dataclass(frozen=True)
class _Queued:
    """A step that the host has queued and whose numbers it has not read yet."""

    step: PlannedStep
    lr: float
    noise: StepNoise | None
    timer: StepTimer
    report: StepReport


class _Loop:
    """The state that `fit` keeps between steps."""

    def __init__(self, t: Training, state: TrainState, stop: StopRequest, log: RunLog) -> None:
        self.t, self.state, self.stop, self.log = t, state, stop, log
        # Read the numbers of a step one step late, so that the GPU already computes the next one.
        self.late = 1 if t.device.type == "cuda" else 0
        self.unread: deque[_Queued] = deque()
        self.reasons: list[str] = []  # why to stop early, oldest first
        self.steps_since_log = self.clipped_since_log = 0
        self.nonfinite_in_a_row = 0
        self.went_back_to = -1  # step of the checkpoint that training last returned to
        measured = t.noise_half_life_tokens is not None
        self.small_gradients = SmallGradients(t.step.model, t.step.parameters) if measured else None
        self.work_ms = 0.0  # this rank's own work in the last logged step
        self.resumed_at = state.step  # where this attempt begins
        self.batches = self.data()
        self.clock = Stopwatch()

    def data(self) -> Iterator[MicroBatch]:
        """Return the micro-batches that follow `state`."""
        t, state = self.t, self.state
        steps = t.plan.steps_from(state.step, state.tokens)
        passed_over = state.steps_passed_over, state.tokens_passed_over
        return micro_batches(t.dataset, (step.later(*passed_over) for step in steps), t.rank.rank, t.device)

    def run(self) -> str | None:
        t, state = self.t, self.state
        t.gpt.train()
        self.stop.begin()
        was_last = self.is_complete()
        weight_evals, checkpoint_evals = t.evaluations.due(state, was_last)
        if state.evaluated_tokens < state.tokens:  # an earlier attempt stopped before these evaluations
            self.evaluate(weight_evals)
            if not was_last and self.is_complete():
                checkpoint_evals = self.end_early(weight_evals)
        if state.step > t.plan.first_step and (reason := self.evaluate_checkpoint(checkpoint_evals, resumed=True)):
            return reason
        while not self.is_complete() and not self.reasons:
            self.queue_step()
            if state.step == self.resumed_at + 1:
                _freeze_garbage()  # here, so that its duration is part of the first step's
            last = state.step == t.plan.steps
            weight_evals, checkpoint_evals = t.evaluations.due(state, last)
            due_save = last or t.plan.is_due(t.plan.save_every_tokens, state.step)
            waits = weight_evals or checkpoint_evals or due_save
            if self.read(leave=0 if waits else self.late) == "went back":
                continue
            if self.reasons and not last:
                break  # only seconds may be left: save without evaluating
            self.evaluate(weight_evals)
            if not last and self.is_complete():
                checkpoint_evals = self.end_early(weight_evals)
                last = due_save = True
            if due_save or checkpoint_evals:
                state.regular = due_save
                self.save(is_last=last)
            if reason := self.evaluate_checkpoint(checkpoint_evals):
                return reason
        if self.is_complete():
            return None
        self.read(leave=0)
        state.regular = t.plan.is_due(t.plan.save_every_tokens, state.step)
        self.save(is_last=True)
        return self.reasons[0]

    def is_complete(self) -> bool:
        return self.state.step == self.t.plan.steps or self.why_complete() != ""

    def why_complete(self) -> str:
        """Why the run ends at its newest evaluation, before its last step; empty if it does not."""
        state, cfg = self.state, self.t.cfg
        if state.val_loss is None or state.evaluated_tokens < state.tokens:
            return ""
        if cfg.stop_at_loss is not None and state.val_loss <= cfg.stop_at_loss:
            return f"the validation loss has reached train.stop_at_loss={cfg.stop_at_loss:g}"
        if cfg.patience_tokens is not None and state.tokens - state.best_tokens >= cfg.patience_tokens:
            return f"no new lowest validation loss in train.patience_tokens={cfg.patience_tokens:,}"
        return ""

    def end_early(self, evaluated: Sequence[Evaluation]) -> list[Evaluation]:
        """Say why the run ends, and measure what is due at the end. Returns what then remains for the checkpoint."""
        self.log.alert(self.state.step - 1, self.state.tokens, "early stop", self.why_complete())
        of_weights, of_checkpoint = self.t.evaluations.due(self.state, last=True)
        self.evaluate([each for each in of_weights if each not in evaluated])
        return of_checkpoint

    def save(self, is_last: bool) -> None:
        with self.clock.paused(), weights_for_use(self.t.step.optimizer):
            self.t.checkpoints.save(self.state, self.log, is_last)

    def is_logged(self, step: int) -> bool:
        return step % self.t.cfg.log_every == 0 or step == self.t.plan.steps - 1

    def is_measured(self, step: PlannedStep) -> bool:
        """Whether the step measures the noise scale: at logged steps, or at all steps if the updates depend on it."""
        is_needed = self.is_logged(step.number) or self.t.optim.gradient_noise_like_batch is not None
        return is_needed and step.batch.sequences > step.batch.micro_batch_size

    def noise(self, step: PlannedStep) -> StepNoise | None:
        """The noise on the gradient of `step`, which is the next one.

        It uses measurements up to the step before the previous one, because those of the previous one may be unread.
        """
        t, state = self.t, self.state
        known = state.noise_scale.valid_noise if self.unread else state.noise_scale.earlier_noise
        return step_noise(t.optim, t.cfg.seed, step.number, step.tokens_before, step.batch, known)

    def queue_step(self) -> None:
        """Queue one step; its numbers are read later."""
        t, state = self.t, self.state
        t.checkpoints.finish(self.log, wait=False)
        step = t.plan.step(state.step, state.tokens)
        timer = StepTimer(t.device)
        probe = Probe(
            small_gradients=self.small_gradients if self.is_measured(step) else None,
            slowest=SlowestRank(self.work_ms, t.device)
            if t.rank.world_size > 1 and self.is_logged(step.number)
            else None,
            own=self.t.own_metrics if self.is_logged(step.number) else dict,
        )
        lr_factor = t.plan.schedule.lr_factor(step.tokens_before, step.batch.total_batch_size)
        noise = self.noise(step)
        report = t.step(self.batches, step.batch.grad_accum_steps, lr_factor, timer, noise, probe)
        if t.average is not None:
            t.average.update(step.batch.total_batch_size, report.finite)
        self.unread.append(_Queued(step, t.optim.lr * lr_factor, noise, timer, report))
        state.step, state.tokens = step.number + 1, step.tokens_after
        if t.profiler is not None:
            with self.clock.paused():  # it may write the trace now
                if profile := t.profiler.step(timer):
                    t.profiler = None
                    self.log.profile(state.step - 1, state.tokens, profile)

    def read(self, leave: int) -> Literal["went on", "went back"]:
        """Read and log the numbers of all queued steps except the newest `leave`.

        Returns early if training goes back to a checkpoint.
        """
        while len(self.unread) > leave:
            queued = self.unread.popleft()
            numbers = queued.report.read(self.t.timeout_s)
            seconds = self.clock.lap()
            self.count(queued.step, numbers, seconds)
            measured = self.noise_scale(queued.step, numbers)
            if self.is_logged(queued.step.number) or not numbers.finite:
                self.log_step(queued, numbers, seconds, measured)
            if numbers.finite:
                self.follow_loss(queued.step, numbers.loss)
                continue
            values_text = f"loss {numbers.loss:.6g}, gradient norm {numbers.grad_norm:.6g}"
            if self.recover(queued.step, values_text) == "went back":
                return "went back"
        return "went on"

    def count(self, step: PlannedStep, numbers: Numbers, seconds: float) -> None:
        state = self.state
        state.seconds += seconds
        state.fingerprint = (state.fingerprint + numbers.fingerprint) % 2**64
        self.stop.spare_s = self.needed_s(seconds / step.batch.sequences)
        if numbers.asked:
            self.reasons.append(numbers.asked)
        self.steps_since_log += 1
        self.clipped_since_log += 0 < self.t.step.grad_clip < numbers.grad_norm

    def log_step(self, queued: _Queued, numbers: Numbers, seconds: float, measured: dict[str, float]) -> None:
        """Log a step; `measured`: the metrics of its noise scale."""
        t, step, noise = self.t, queued.step, queued.noise
        tokens = step.tokens_after
        phases_ms = queued.timer.read()
        self.work_ms = phases_ms[Metric.DATA_MS] + phases_ms[Metric.FORWARD_MS]
        self.log.step(
            {
                "step": step.number,
                "tokens": tokens,
                Metric.BATCH_TOKENS: step.batch.total_batch_size,
                "epoch": tokens / (t.dataset.order.n_train * t.plan.batch.seq_len),
                Metric.TRAIN_LOSS: numbers.loss,
                Metric.LR: queued.lr,
                Metric.GRAD_NORM: numbers.grad_norm,
                Metric.CLIP_FRACTION: self.clipped_since_log / self.steps_since_log,
                **({Metric.GRADIENT_NOISE: noise.over(numbers.grad_norm)} if noise is not None else {}),
                Metric.STEP_MS: 1e3 * seconds,
                **phases_ms,
                Metric.REDUCE_MS: None if t.step.parameters.split else exposed_reduce_ms(t.step.model),
                **(straggler(*numbers.work, t.rank.world_size) if numbers.work is not None else {}),
                **measured,
                **{name: float(value) for name, value in queued.report.own.items()},
                Metric.DATA_FINGERPRINT: f"{self.state.fingerprint:016x}",
            }
        )
        self.steps_since_log = self.clipped_since_log = 0

    def noise_scale(self, step: PlannedStep, numbers: Numbers) -> dict[str, float]:
        """Return the metrics of the noise scale; empty for a step that was not measured or is non-finite."""
        batch, scale, half_life_tokens = step.batch, self.state.noise_scale, self.t.noise_half_life_tokens
        scale.earlier_noise = scale.valid_noise
        if half_life_tokens is None or not numbers.finite or not 0 < numbers.small_sq_norm < math.inf:
            return {}
        norms = Norms(numbers.small_sq_norm, numbers.grad_norm**2, batch.micro_batch_size, batch.sequences)
        scale.take(norms, step.tokens_after, half_life_tokens)
        # If each rank has one micro-batch, the norms are those of all of them, and give their mean cosine.
        cosine = norms.cosine() if batch.grad_accum_steps == 1 else numbers.cosine
        return scale.metrics(norms, cosine, batch.seq_len)

    def follow_loss(self, step: PlannedStep, loss: float) -> None:
        """Update the smoothed loss. Raises `DivergedError` if it has risen and stayed high."""
        cfg, trend = self.t.cfg, self.state.trend
        if cfg.nonfinite == "skip":
            self.nonfinite_in_a_row = 0
        if trend.diverged(loss, step.batch.total_batch_size, self.t.plan.tokens, cfg.divergence_nats):
            fix = (
                "lower optim.lr, or lengthen the warm-up; with train.divergence_nats=null the same command continues a "
                "run, and a sweep begins its cells anew"
            )
            if not self.t.dataset.order.shuffled:
                fix = f"or another kind of text has begun, since data.order=sequential does not mix the text; {fix}"
            raise DivergedError(
                f"step {step.number + 1}: the smoothed loss has stayed {cfg.divergence_nats:g} nats above its minimum "
                f"of {trend.lowest:.4f} for {trend.steps_above} steps: the run diverged; {fix}"
            )

    def needed_s(self, sequence_s: float) -> float:
        """Return the seconds that a run needs from its last check of train.max_minutes to its end.

        `sequence_s` is the time of the newest step per sequence. The next step may have more sequences.
        """
        t, state = self.t, self.state
        step_s = sequence_s * t.plan.step(state.step, state.tokens).batch.sequences
        return (1 + 2 * self.late) * step_s + t.evaluations.reserve_s(sequence_s) + t.checkpoints.reserve_s()

    def recover(self, step: PlannedStep, numbers: str) -> Literal["skipped", "went back"]:
        """Do what train.nonfinite says after a non-finite step. Returns what was done.

        Raises `DivergedError` if train.nonfinite is `stop`, or after more such steps than `MOST_IN_A_ROW` allows.
        """
        t, state = self.t, self.state
        self.nonfinite_in_a_row += 1
        if t.cfg.nonfinite == "stop" or self.nonfinite_in_a_row > MOST_IN_A_ROW:
            again = f" after {self.nonfinite_in_a_row} non-finite steps" if t.cfg.nonfinite != "stop" else ""
            raise DivergedError(
                f"step {step.number + 1}: {numbers}: the run diverged{again}; lower optim.lr, lengthen the warm-up, or "
                "clip gradients to a smaller norm"
            )
        if t.cfg.nonfinite == "skip":
            state.skipped_updates += 1
            self.log.fault(step.number, step.tokens_after, f"{numbers}: the update is skipped")
            return "skipped"
        with self.clock.paused():
            self.go_back(step, numbers)
        return "went back"

    def go_back(self, step: PlannedStep, numbers: str) -> None:
        """Load the newest regular checkpoint, and continue with the data that follows `step`."""
        t, state = self.t, self.state
        checkpoint = t.checkpoints.go_back(self.log)
        if checkpoint is None:
            raise DivergedError(
                f"step {step.number + 1}: {numbers}: the run diverged before its first checkpoint; lower optim.lr"
            )
        path, saved = checkpoint
        if saved.step != self.went_back_to:
            self.went_back_to, self.nonfinite_in_a_row = saved.step, 1
        state.go_back(saved, step.number + 1, step.tokens_after)
        self.unread.clear()
        self.batches = self.data()
        self.log.rewind(state)
        reloaded = f"reloaded {path.name}; the data since then is skipped"
        self.log.fault(state.step - 1, state.tokens, f"step {step.number + 1}: {numbers}: {reloaded}")

    def evaluate(self, due: Sequence[Evaluation]) -> None:
        """Measure the weights, and log the metrics. Raises `DivergedError` if the validation loss is non-finite."""
        if not due:
            return
        state = self.state
        with self.clock.paused(), weights_for_use(self.t.step.optimizer):
            metrics = self.t.evaluations.measure(due, state)
            metrics.setdefault(Metric.VAL_LOSS, state.val_loss)  # after an early stop it has been measured
            self.log.evaluation(state.step - 1, state.tokens, metrics)
        loss = state.val_loss = metrics[Metric.VAL_LOSS]
        assert loss is not None, "the first evaluation is the validation"
        state.val_loss_ema = metrics.get(Metric.VAL_LOSS_EMA, state.val_loss_ema)
        state.evaluated_tokens = state.tokens
        if not math.isfinite(loss):
            raise DivergedError(
                f"step {state.step}: validation loss {loss:.6g}: the run diverged; lower optim.lr, or clip gradients "
                "to a smaller norm"
            )
        if state.best_val_loss is None or loss < state.best_val_loss:
            state.best_val_loss, state.best_tokens = loss, state.tokens

    def evaluate_checkpoint(self, due: Sequence[Evaluation], resumed: bool = False) -> str | None:
        """Measure the newest checkpoint, and log the metrics. If a stop cuts this short, return the reason to stop.

        The run then ends at this checkpoint, and measures once more, for the last time, when it is `resumed`: if
        train.max_minutes is shorter than the measurement, training would otherwise never go on. *Collective.*
        """
        t, state, step = self.t, self.state, self.state.step - 1
        if resumed and due:
            names = agree(lambda: [name for name, steps in self.log.earlier_steps.items() if step in steps], t.rank)
            due = [each for each in due if each.name not in names]
        for each in due:
            t.checkpoints.finish(self.log)
            with self.clock.paused():
                metrics = each.measure(state)
            if metrics or (metrics is None and resumed):
                self.log.evaluation_of_checkpoint(each.name, step, state.tokens, metrics or {})
            if metrics is None:
                return str(agree(self.stop.reason, t.rank))
        return None


def _freeze_garbage() -> None:
    """Collect garbage once, exempt the remaining objects from later collections, and re-enable collections.

    `run.rank.run` disabled them. Importing and compiling create a million objects that live until the end.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
