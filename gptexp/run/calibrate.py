"""Predicts how long a run takes, from a few steps of a real run in new processes."""

import math
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from gptexp.config.batch import count_val_windows
from gptexp.config.metrics import Metric
from gptexp.config.run_plan import RunPlan
from gptexp.config.schema import Config, ScheduleConfig
from gptexp.data.loader import build_dataset
from gptexp.data.prepare import prepare
from gptexp.machine.effective import Effective, save_effective
from gptexp.model.allreduce import Alone
from gptexp.run.observe import medians, observe, observe_together, quiet
from gptexp.run.own_process import resume_command
from gptexp.storage import run_dir

WARM_UP, COUNTED = 2, 5  # steps that are run first, and steps that are measured
COUNTED_ALONE = 15  # measured steps of a rank alone


@dataclass(frozen=True)
class Sample:
    """Times of a few steps. They predict every run with the same model, micro-batch and ranks, whatever its length."""

    start_s: float  # from the start of the process to the first step's beginning
    first_s: float  # the first step, which may compile
    step_s: float  # median of steps with `micro_steps` micro-steps each
    micro_s: float  # one micro-step
    micro_steps: int


@dataclass(frozen=True)
class Duration:
    """The predicted times of a run."""

    step_s: float  # of a step after the ramp
    total_s: float  # of the whole run, without checkpoints


@dataclass(frozen=True)
class Pace(Duration):
    """A duration that was predicted from steps timed on this machine."""

    start_s: float  # from the start of the process to the first step's beginning
    validation_s: float  # one pass over the validation set


def sample(cfg: Config, plan: RunPlan, effective: Effective) -> Sample:
    """Time a few steps of `cfg`, with at most two micro-steps each.

    Uses the resolved `effective` values of the run itself: for so short a run, `auto` could decide otherwise about
    compiling.
    """
    batch = plan.batch
    micro_steps = min(batch.grad_accum_steps, 2)
    quick = _quick(cfg, batch.total_batch_size // batch.grad_accum_steps * micro_steps, batch.micro_batch_size)
    prepare(cfg.data)  # before the clock starts
    with tempfile.TemporaryDirectory(prefix="gptexp-") as name:
        directory = Path(name) / "run"
        _save(directory, quick, effective)
        seen = observe(resume_command(directory), directory, WARM_UP + COUNTED)
    ms = medians(seen.steps[WARM_UP:])
    in_micro_steps = ms[Metric.DATA_MS] + ms[Metric.FORWARD_MS] + ms[Metric.BACKWARD_MS] - ms.get(Metric.REDUCE_MS, 0.0)
    first_s = seen.steps[0][Metric.STEP_MS] / 1e3
    return Sample(
        start_s=seen.start_s - first_s,
        first_s=first_s,
        step_s=ms[Metric.STEP_MS] / 1e3,
        micro_s=in_micro_steps / micro_steps / 1e3,
        micro_steps=micro_steps,
    )


def sample_alone(cfg: Config, plan: RunPlan, effective: Effective, at_once: int) -> Alone:
    """Time one-rank runs whose steps have one micro-step; `at_once` of them run on this machine at the same time.

    Ranks on one CPU share its caches and memory, so each of several ranks is slower than a single one.
    """
    batch = plan.batch
    alone = replace(
        cfg,
        world=replace(cfg.world, size=1, comm="float32", max_restarts=0),
        log=replace(cfg.log, noise_scale="off"),  # one micro-step cannot measure it
    )
    quick = _quick(alone, batch.micro_batch_size * batch.seq_len, batch.micro_batch_size)
    prepare(cfg.data)
    with tempfile.TemporaryDirectory(prefix="gptexp-") as name:
        directories = [Path(name) / f"run{number}" for number in range(at_once)]
        for directory in directories:
            _save(directory, quick, replace(effective, local_world_size=1))
        runs = [(resume_command(directory), directory) for directory in directories]
        seen = observe_together(runs, WARM_UP + COUNTED_ALONE)
    # The runs that begin first are alone for a moment. During their last steps all of them run.
    each = [medians(one.steps[-COUNTED_ALONE:]) for one in seen]
    ms = {key: statistics.fmean(one[key] for one in each) for key in each[0]}
    micro_ms = ms[Metric.DATA_MS] + ms[Metric.FORWARD_MS] + ms[Metric.BACKWARD_MS]
    return Alone(micro_ms / 1e3, ms[Metric.BACKWARD_MS] / 1e3, (ms[Metric.STEP_MS] - micro_ms) / 1e3)


def _quick(cfg: Config, total_batch_size: int, micro_batch_size: int) -> Config:
    """The config of a run that is timed and killed, with steps of `total_batch_size` tokens."""
    cfg = quiet(cfg)
    return replace(
        cfg,
        batch=cfg.batch.of_one_size(total_batch_size, micro_batch_size),
        schedule=ScheduleConfig(name="constant"),  # the run's own schedule may not fit this length
        branch_from=None,
        train=replace(cfg.train, max_steps=10**6),
    )


def _save(directory: Path, cfg: Config, effective: Effective) -> None:
    run_dir.save_config(directory, cfg)
    save_effective(directory, effective)


def pace(seen: Sample, cfg: Config, plan: RunPlan) -> Pace:
    """Predict the time of the whole run `cfg` from a sample with the same model, micro-batch and ranks.

    A step of A micro-steps takes A times as long as one micro-step, plus one reduction, clipping and update.
    Measurements of the sharpness are not counted: their time is not known. The plan says how many there are.
    """
    batch = plan.batch
    once_s = seen.step_s - seen.micro_steps * seen.micro_s
    steps, tokens = plan.steps - plan.first_step, plan.tokens - plan.first_tokens
    micro_steps = tokens // (batch.total_batch_size // batch.grad_accum_steps)
    windows, *of_texts = _val_windows(cfg)
    passes = [windows, *of_texts] if cfg.train.ema_half_life_tokens is None else [windows, windows, *of_texts]
    forward = sum(math.ceil(math.ceil(n / batch.world_size) / batch.micro_batch_size) for n in passes)
    validation_s = forward * seen.micro_s / 3  # a forward pass has a third of a micro-step's multiplications
    validations = plan.times(plan.eval_every_tokens)
    compile_s = max(0.0, seen.first_s - seen.step_s)
    return Pace(
        start_s=seen.start_s,
        step_s=once_s + batch.grad_accum_steps * seen.micro_s,
        validation_s=validation_s,
        total_s=seen.start_s + compile_s + steps * once_s + micro_steps * seen.micro_s + validations * validation_s,
    )


def _val_windows(cfg: Config) -> list[int]:
    """The numbers of validation windows: of the run, and of each text of `data.validation`, at most.

    If they are a share of the corpus, its tokens are counted.
    """
    if cfg.data.val_ratio is None:
        return [count_val_windows(cfg.data.val_tokens, cfg.seq_len)] * (1 + len(cfg.data.validation))
    dataset = build_dataset(cfg)
    return [len(dataset.val_starts), *(len(text.val_starts) for text in dataset.texts.values())]
