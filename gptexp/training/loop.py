"""The training loop: steps, and between them evaluation, checkpoints, recovery and stopping.

No Hydra, no wandb, no command line. All ranks evaluate, save and stop after the same step. A step whose loss or
gradient norm is non-finite on any rank does not update the weights. Steps are counted from 0; text for people names
the number of completed steps, so it counts from 1.
"""

import copy
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from gptexp.config.batch import crosses
from gptexp.config.metrics import SHARPNESS, Metric
from gptexp.config.run_plan import PlannedStep, RunPlan
from gptexp.config.schema import OptimConfig, TrainConfig
from gptexp.data.hellaswag import Example
from gptexp.data.loader import Dataset, MicroBatch, micro_batches
from gptexp.distributed.group import agree
from gptexp.distributed.ranks import Rank
from gptexp.loggers.run_log import RunLog, straggler
from gptexp.model.gpt import GPT
from gptexp.process.errors import DivergedError, StorageError
from gptexp.process.signals import StopRequest
from gptexp.process.terminal import warn
from gptexp.storage import checkpoint
from gptexp.storage.checkpoint import TrainState
from gptexp.storage.noise_scale import Norms, metrics
from gptexp.training.gradient_noise import StepNoise, step_noise
from gptexp.training.hellaswag import score
from gptexp.training.optim import weights_for_use
from gptexp.training.phases import StepTimer, exposed_reduce_ms
from gptexp.training.profiling import StepProfiler
from gptexp.training.small_gradients import SmallGradients
from gptexp.training.snapshot import load_checkpoint, parts_to_save
from gptexp.training.step import Probe, TrainStep
from gptexp.training.step_report import Numbers, SlowestRank, StepReport
from gptexp.training.stopwatch import Stopwatch
from gptexp.training.validation import evaluate
from gptexp.training.weight_average import WeightAverage

MOST_IN_A_ROW = 10  # more skipped updates in a row, or returns to one checkpoint, than this: diverged
SAVES_TO_SPARE = 2.0  # time reserved for the final checkpoint, as a multiple of the previous one's duration
SLOW_DISK = 100e6  # bytes/s: assumed until a checkpoint has been timed


@dataclass
class Training:
    """Everything that one rank trains with."""

    cfg: TrainConfig
    optim: OptimConfig
    plan: RunPlan
    step: TrainStep
    average: WeightAverage | None  # None: train.ema_half_life_tokens is null
    gpt: GPT  # the model itself; `step.model` may be DDP around it
    dataset: Dataset
    rank: Rank
    device: torch.device
    timeout_s: float  # longest wait for the numbers of a step
    examples: Sequence[Example]  # of HellaSwag, if it is to be scored
    other_scores: Callable[[], Mapping[str, float]]  # those of the tasks that lm_eval scores; collective
    # The sharpness at the checkpoint of a step, as metrics; or none, and the reason to stop before it is measured.
    sharpness: Callable[[int], tuple[Mapping[str, float | None], str | None]]  # collective
    noise_half_life_tokens: float | None  # of the noise scale's average; None: not measured
    profiler: StepProfiler | None
    saving_group: dist.ProcessGroup | None  # of ranks that each write a part of a checkpoint; None: one has all of it
    about: dict[str, Any]  # description of the run that every checkpoint contains


def fit(t: Training, state: TrainState, stop: StopRequest, log: RunLog, checkpoints: Path) -> str | None:
    """Train from `state` to the last step. *Collective.* Returns the reason for stopping early, or None.

    Raises `DivergedError` on all ranks if the run diverges; `train.nonfinite` says what a non-finite step means. Raises
    `StorageError` on all ranks if the final checkpoint cannot be saved, and on rank 0 if the metrics cannot be written.
    """
    loop = _Loop(t, state, stop, log, checkpoints)
    try:
        return loop.run()
    except DivergedError:  # on all ranks; after another error, a lost rank would never end to write
        loop.finish_saving()
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


class _Saving:
    """A checkpoint that a thread writes."""

    def __init__(self, state: TrainState, future: "Future[Path]") -> None:
        self.state, self.future = state, future
        self.started = self.ended = time.perf_counter()
        future.add_done_callback(self._end)

    def _end(self, _: object) -> None:
        self.ended = time.perf_counter()


class _Loop:
    """The state that `fit` keeps between steps."""

    def __init__(self, t: Training, state: TrainState, stop: StopRequest, log: RunLog, checkpoints: Path) -> None:
        self.t, self.state, self.stop, self.log, self.checkpoints = t, state, stop, log, checkpoints
        # Read the numbers of a step one step late, so that the GPU already computes the next one.
        self.late = 1 if t.device.type == "cuda" else 0
        self.unread: deque[_Queued] = deque()
        self.reasons: list[str] = []  # to stop early, oldest first
        self.steps_since_log = self.clipped_since_log = 0
        self.nonfinite_in_a_row = 0
        self.went_back_to = -1  # step of the checkpoint that training last returned to
        parameters = sum(p.numel() for p in t.gpt.parameters())
        # Seconds of the previous checkpoint. Estimated before the first one: weights, two moments and an average.
        self.save_s = (12 if t.average is None else 16) * parameters / SLOW_DISK
        self.eval_s: float | None = None  # seconds of the previous evaluation
        measured = t.noise_half_life_tokens is not None
        self.small_gradients = SmallGradients(t.step.model, t.step.parameters) if measured else None
        self.work_ms = 0.0  # this rank's own work in the last logged step
        self.resumed_at = state.step  # where this attempt begins
        self.saving: _Saving | None = None  # that a thread writes
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
        if state.evaluated_tokens < state.tokens and self.is_due(t.plan.eval_every_tokens):
            self.validate()  # the earlier attempt was stopped before this evaluation
        if self.is_sharpness_due():
            known = agree(lambda: state.step - 1 in self.log.sharpness_steps, t.rank)
            if not known and (reason := self.measure_sharpness(for_the_last_time=True)):
                return reason
        while state.step < t.plan.steps and not self.reasons:
            self.queue_step()
            if state.step == self.resumed_at + 1:
                _freeze_garbage()  # here, so that its duration is part of the first step's
            last = state.step == t.plan.steps
            due_score = bool(t.cfg.eval_tasks) and (last or self.is_due(t.cfg.eval_tasks_every_tokens))
            due_eval = last or due_score or self.is_due(t.plan.eval_every_tokens)
            due_save = last or self.is_due(t.plan.save_every_tokens)
            due_sharpness = self.is_sharpness_due()
            if self.read(leave=0 if due_eval or due_save or due_sharpness else self.late) == "went back":
                continue
            if self.reasons and not last:
                break  # only seconds may be left: save without evaluating
            if due_eval:
                self.validate(due_score)
            if due_save or due_sharpness:
                state.regular = due_save
                self.save(is_last=last)
            if due_sharpness:
                self.finish_saving()
                if reason := self.measure_sharpness():
                    return reason
        if state.step == t.plan.steps:
            return None
        self.read(leave=0)
        state.regular = self.is_due(t.plan.save_every_tokens)
        self.save(is_last=True)
        return self.reasons[0]

    def is_due(self, every_tokens: int) -> bool:
        """Whether the last step crossed a multiple of `every_tokens`."""
        return crosses(self.t.plan.step_sizes.tokens_after(self.state.step - 1), self.state.tokens, every_tokens)

    def is_sharpness_due(self) -> bool:
        t, step = self.t, self.state.step
        every_tokens, is_own = t.cfg.sharpness_every_tokens, step > t.plan.first_step
        return every_tokens > 0 and is_own and (step == t.plan.steps or self.is_due(every_tokens))

    def is_logged(self, step: int) -> bool:
        return step % self.t.cfg.log_every == 0 or step == self.t.plan.steps - 1

    def is_measured(self, step: PlannedStep) -> bool:
        """Whether the step's noise scale is measured: also between logged steps if the weights depend on it."""
        wanted = self.is_logged(step.number) or self.t.optim.gradient_noise_like_batch is not None
        return wanted and step.batch.sequences > step.batch.micro_batch_size

    def noise(self, step: PlannedStep) -> StepNoise | None:
        """The noise on the gradient of `step`, which is the next one.

        It follows from measurements up to the last step but one. Those of the last step may not have been read yet.
        """
        t, state = self.t, self.state
        known = state.noise_scale.valid_noise if self.unread else state.earlier_noise
        return step_noise(t.optim, t.cfg.seed, step.number, step.tokens_before, step.batch, known)

    def queue_step(self) -> None:
        """Queue one step; its numbers are read later."""
        t, state = self.t, self.state
        if self.saving is not None and self.saving.future.done():
            self.finish_saving()
        step = t.plan.step(state.step, state.tokens)
        timer = StepTimer(t.device)
        probe = Probe(
            timer=timer,
            stop=self.stop,
            small_gradients=self.small_gradients if self.is_measured(step) else None,
            slowest=SlowestRank(self.work_ms, t.device)
            if t.rank.world_size > 1 and self.is_logged(step.number)
            else None,
        )
        lr_factor = t.plan.schedule.lr_factor(step.tokens_before, step.batch.total_batch_size)
        noise = self.noise(step)
        report = t.step(self.batches, step.batch.grad_accum_steps, lr_factor, probe, noise)
        if t.average is not None:
            t.average.update(step.batch.total_batch_size, report.finite)
        self.unread.append(_Queued(step, t.optim.lr * lr_factor, noise, timer, report))
        state.step, state.tokens = step.number + 1, step.tokens_after
        if t.profiler is not None:
            with self.clock.paused():  # while it writes the trace
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
            found = f"loss {numbers.loss:.6g}, gradient norm {numbers.grad_norm:.6g}"
            if self.recover(queued.step, found) == "went back":
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
                Metric.DATA_FINGERPRINT: f"{self.state.fingerprint:016x}",
            }
        )
        self.steps_since_log = self.clipped_since_log = 0

    def noise_scale(self, step: PlannedStep, numbers: Numbers) -> dict[str, float]:
        """Return the metrics of the noise scale; empty for a step that was not measured or is non-finite."""
        t, batch = self.t, step.batch
        self.state.earlier_noise = self.state.noise_scale.valid_noise
        if t.noise_half_life_tokens is None or not numbers.finite or not 0 < numbers.small_sq_norm < math.inf:
            return {}
        norms = Norms(numbers.small_sq_norm, numbers.grad_norm**2, batch.micro_batch_size, batch.sequences)
        self.state.noise_scale.take(norms, step.tokens_after, t.noise_half_life_tokens)
        # With one micro-batch per rank each is measured, so the norms give the mean cosine.
        cosine = norms.cosine() if math.isnan(numbers.cosine) else numbers.cosine
        return metrics(norms, cosine, self.state.noise_scale, batch.seq_len)

    def follow_loss(self, step: PlannedStep, loss: float) -> None:
        """Update the smoothed loss. Raises `DivergedError` if it has risen and stayed high."""
        cfg, trend = self.t.cfg, self.state.trend
        if cfg.nonfinite == "skip":
            self.nonfinite_in_a_row = 0
        if trend.diverged(loss, step.batch.total_batch_size, self.t.plan.tokens, cfg.divergence_nats):
            raise DivergedError(
                f"step {step.number + 1}: the smoothed loss has stayed {cfg.divergence_nats:g} nats above its minimum "
                f"of {trend.lowest:.4f} for {trend.steps_above} steps: the run diverged; lower optim.lr, lengthen the "
                "warm-up, or start a new run with train.divergence_nats=null"
            )

    def needed_s(self, sequence_s: float) -> float:
        """Return the seconds that a run needs from its last check of train.max_minutes to its end.

        `sequence_s` are those of a step for each of its sequences. The next step may be longer.
        """
        t, state, eval_s = self.t, self.state, self.eval_s
        step_s = sequence_s * t.plan.step(state.step, state.tokens).batch.sequences
        if eval_s is None:  # a forward pass is a third of a step
            passes = len(t.dataset.val_starts) * (1 if t.average is None else 2)
            eval_s = sequence_s * passes / 3
        save_s, saves = self.save_s, SAVES_TO_SPARE
        if self.saving is not None:  # the final one waits for it
            save_s, saves = max(save_s, time.perf_counter() - self.saving.started), saves + 1
        return (1 + 2 * self.late) * step_s + eval_s + saves * save_s

    def recover(self, step: PlannedStep, numbers: str) -> Literal["skipped", "went back"]:
        """Do what train.nonfinite says after a non-finite step, whose update was skipped. Returns what was done.

        Raises `DivergedError` if train.nonfinite is `stop`, or after `MOST_IN_A_ROW` such steps.
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
        self.finish_saving()

        def newest() -> tuple[Path, TrainState] | None:
            found = checkpoint.load_latest(self.checkpoints, regular=True)
            if found is not None:
                checkpoint.set_aside(self.checkpoints, found[1].step)
            return found

        found = agree(newest, t.rank)
        if found is None:
            raise DivergedError(
                f"step {step.number + 1}: {numbers}: the run diverged before its first checkpoint; lower optim.lr"
            )
        path, saved = found
        if saved.step != self.went_back_to:
            self.went_back_to, self.nonfinite_in_a_row = saved.step, 1
        load_checkpoint(path, t.step.parameters, t.step.optimizer, t.average)
        state.go_back(saved, step.number + 1, step.tokens_after)
        self.unread.clear()
        self.batches = self.data()
        self.log.rewind(state)
        reloaded = f"reloaded {path.name}; the data since then is skipped"
        self.log.fault(state.step - 1, state.tokens, f"step {step.number + 1}: {numbers}: {reloaded}")

    def validate(self, with_scores: bool = False) -> None:
        t, state = self.t, self.state
        if not len(t.dataset.val_starts):
            return
        started, size = time.perf_counter(), t.plan.batch.micro_batch_size
        with self.clock.paused(), weights_for_use(t.step.optimizer):
            state.val_loss = evaluate(t.gpt, t.dataset, size, t.rank, t.device, t.step.forward_context)
            state.evaluated_tokens = state.tokens
            finite = math.isfinite(state.val_loss)
            others: dict[str, float] = {}
            if t.average is not None and finite:
                with t.average.in_place_of_weights():
                    state.val_loss_ema = evaluate(t.gpt, t.dataset, size, t.rank, t.device, t.step.forward_context)
                others[Metric.VAL_LOSS_EMA] = state.val_loss_ema
            if with_scores and finite and t.examples:
                others |= score(t.gpt, t.examples, t.rank, t.device, t.step.forward_context)
            self.eval_s = time.perf_counter() - started  # without the others, which end early if the run must stop
            if with_scores and finite:
                others = {**t.other_scores(), **others}
            self.log.evaluation(state.step - 1, state.tokens, state.val_loss, others)
        if not finite:
            raise DivergedError(
                f"step {state.step}: validation loss {state.val_loss:.6g}: the run diverged; lower optim.lr, or clip "
                "gradients to a smaller norm"
            )
        best = state.val_loss if state.best_val_loss is None else state.best_val_loss
        state.best_val_loss = min(state.val_loss, best)

    def measure_sharpness(self, for_the_last_time: bool = False) -> str | None:
        """Log the sharpness at the newest checkpoint. *Collective.* Returns the reason to stop before it is measured.

        The run then ends at this checkpoint, and measures when it is resumed. If it has just been resumed, this attempt
        is the last: the limit of time may be shorter than the measurement, and training would never go on.
        """
        t, state = self.t, self.state
        with self.clock.paused():
            found, reason = t.sharpness(state.step)
        if reason and for_the_last_time:
            found = dict.fromkeys(SHARPNESS)
        if found:
            self.log.sharpness(state.step - 1, state.tokens, found)
        return reason

    def save(self, is_last: bool) -> None:
        """Begin to save a checkpoint; wait only for the final one. *Collective.*

        Raises `StorageError` if the final one fails; for an earlier one only prints the error.
        """
        with self.clock.paused(), weights_for_use(self.t.step.optimizer):
            self._save(is_last)

    def _save(self, is_last: bool) -> None:
        t, state = self.t, self.state
        self.finish_saving()
        self.log.sync()  # a checkpoint on disk must not be newer than the metrics there
        own = [p.detach() for p in t.step.parameters.named.values() if p.numel()]
        largest = nn.utils.get_total_norm(own, math.inf) if own else torch.zeros((), device=t.device)
        if not t.step.parameters.norm(largest).isfinite():
            raise DivergedError(
                f"step {state.step}: non-finite weights: the run diverged; lower optim.lr, or clip gradients to a "
                "smaller norm"
            )
        keep = checkpoint.Keep(t.cfg.keep_last, t.plan.keep_every_tokens, t.cfg.keep_best)

        def begin() -> None:
            parts, layout = parts_to_save(t.step.parameters, t.step.optimizer, t.average)
            saved = copy.deepcopy(state)
            future = checkpoint.begin_to_save(self.checkpoints, parts, layout, saved, keep, t.about, t.saving_group)
            self.saving = _Saving(saved, future)

        def publish() -> None:
            if t.saving_group is None:
                begin()
            self.published()

        with self.going_on_unless(is_last):
            if t.saving_group is not None or (t.rank.is_main and not is_last):
                begin()
            if is_last:
                agree(publish, t.rank)  # all ranks fail if it cannot be saved

    def published(self) -> None:
        """Wait for the checkpoint that a thread writes, if there is one, and log it. Raises `StorageError`."""
        if self.saving is None:
            return
        saving, self.saving = self.saving, None
        self.log.checkpoint(saving.state, saving.future.result())
        self.save_s = saving.ended - saving.started

    def finish_saving(self) -> None:
        """The same for one that is not the last: only prints the error."""
        with self.going_on_unless(is_last=False):
            self.published()

    @contextmanager
    def going_on_unless(self, is_last: bool) -> Iterator[None]:
        """Only print the error of a checkpoint that cannot be saved, unless it is the last one."""
        try:
            yield
        except StorageError as error:
            if is_last:
                raise
            if self.t.rank.is_main:
                warn(f"{error}; training continues")


def _freeze_garbage() -> None:
    """Collect garbage once, exempt the rest from later collections, and re-enable them (`run.rank.run` disables them).

    Importing and compiling create a million objects that live until the end.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
