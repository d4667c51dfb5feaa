"""How long a run's steps take, learnt from its first ones: a real run in processes of its own, ended early."""

import json
import math
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gptexp import run_dir
from gptexp.batch import BatchPlan, count_val_windows, interval_tokens, run_length
from gptexp.config import Config, ScheduleConfig
from gptexp.data.prepare import prepare
from gptexp.errors import UserError
from gptexp.pool import resume_command
from gptexp.signals import at_parents_death, ended_in_order

WARM_UP, COUNTED = 2, 5  # steps of a calibration
LEAVING_S = 3.0  # for a launcher to see that its ranks are gone, and to clean up


@dataclass(frozen=True)
class Observed:
    """What was seen of a run: its step events, and the seconds from its start to the end of its first step."""

    steps: list[dict[str, Any]]
    start_s: float


def observe(command: Sequence[str], directory: Path, steps: int, env: dict[str, str] | None = None) -> Observed:
    """Start `command`, which trains in `directory`, watch its metrics until `steps` steps are there, and end it.

    Raises `UserError` with the run's own last words where it fails.
    """
    started = time.time()
    log = directory.with_name(f"{directory.name}.log")
    with ended_in_order(), log.open("w") as output:
        run = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # Ctrl-C is for whoever watches, who ends the run
            preexec_fn=partial(at_parents_death, signal.SIGKILL),
        )
        try:
            while len(events := _steps(directory / run_dir.METRICS)) < steps:
                if run.poll() is not None:
                    said = log.read_text().strip()[-2000:]
                    raise UserError(f"the run ended early (exit code {run.returncode}): {said}")
                time.sleep(0.05)
        finally:
            _kill(run)
    return Observed(events, events[0]["time"] - started)


def _kill(run: "subprocess.Popen[bytes]") -> None:
    """End a run and its ranks, unasked: asked to stop they would save a checkpoint, and nobody wants these weights.

    The ranks first: one that sees its parent gone stops in good order. Their launcher then leaves by itself.
    """
    import psutil

    ranks = psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
    for process in ranks:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if ranks:
        with suppress(subprocess.TimeoutExpired):
            run.wait(LEAVING_S)
    run.kill()
    run.wait()
    psutil.wait_procs(ranks)


def _steps(metrics: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that is being written."""
    if not metrics.exists():
        return []
    lines = metrics.read_text().split("\n")[:-1]
    return [event for event in map(json.loads, lines) if event["event"] == "step"]


def medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Of every `perf/` figure that the steps have; of the reduction, which DDP rarely measures anew, each once."""
    keys = [key for key in steps[0] if key.startswith("perf/") and steps[0][key] is not None]
    found = {key: [step[key] for step in steps] for key in keys}
    found["perf/reduce_ms"] = list(dict.fromkeys(found["perf/reduce_ms"]))
    return {key: statistics.median(values) for key, values in found.items()}


@dataclass(frozen=True)
class Sample:
    """What a few steps took, in seconds: all that a run of the same shape, but of other length, is worked out from."""

    start_s: float  # from the start of the process to the first step's beginning
    first_s: float  # the first step, which may compile
    step_s: float  # of `micro_steps` micro-steps, the median
    micro_s: float  # one micro-step
    micro_steps: int


@dataclass(frozen=True)
class Pace:
    """Seconds that a run takes on this machine."""

    start_s: float  # from the start of the process to the first step's beginning
    step_s: float
    validation_s: float  # one pass over the validation set
    total_s: float  # of the whole run; checkpoints left out


def sample(cfg: Config, plan: BatchPlan, effective: dict[str, Any]) -> Sample:
    """Train a few steps of `cfg`, with at most two micro-steps each.

    `effective`, what the run itself would decide, holds: the few steps of another length would compile or not for
    reasons of their own.
    """
    micro_steps = min(plan.grad_accum_steps, 2)
    quick = replace(
        cfg,
        batch=replace(
            cfg.batch,
            total_batch_size=plan.total_batch_size // plan.grad_accum_steps * micro_steps,
            micro_batch_size=plan.micro_batch_size,
        ),
        schedule=ScheduleConfig(name="constant"),  # its own need not fit the length
        train=replace(
            cfg.train, max_steps=10**6, eval_every=0, save_every=0, log_every=1, max_minutes=None, profile=False
        ),
        log=replace(cfg.log, progress="off", mfu_peak="auto", wandb=replace(cfg.log.wandb, mode="disabled")),
    )
    prepare(cfg.data)  # tokenised once, and not while the clock runs
    with tempfile.TemporaryDirectory(prefix="gptexp-") as name:
        directory = Path(name) / "run"
        run_dir.save_config(directory, quick)
        run_dir.write_json(directory / run_dir.EFFECTIVE, effective)
        seen = observe(resume_command(directory), directory, WARM_UP + COUNTED)
    ms = medians(seen.steps[WARM_UP:])
    in_micro_steps = ms["perf/data_ms"] + ms["perf/forward_ms"] + ms["perf/backward_ms"] - ms["perf/reduce_ms"]
    first_s = seen.steps[0]["perf/step_ms"] / 1e3
    return Sample(
        start_s=seen.start_s - first_s,
        first_s=first_s,
        step_s=ms["perf/step_ms"] / 1e3,
        micro_s=in_micro_steps / micro_steps / 1e3,
        micro_steps=micro_steps,
    )


def pace(seen: Sample, cfg: Config, plan: BatchPlan) -> Pace:
    """The whole run `cfg` out of a sample of one with the same model, micro-batch and ranks.

    A step of A micro-steps takes A times what one takes, and what it does once: reduce, clip, update.
    """
    step_s = seen.step_s + (plan.grad_accum_steps - seen.micro_steps) * seen.micro_s
    windows = math.ceil(count_val_windows(cfg.data.val_tokens, plan.seq_len) / plan.world_size)
    # A forward pass has a third of the multiplications.
    validation_s = math.ceil(windows / plan.micro_batch_size) * seen.micro_s / 3
    train, total = cfg.train, plan.total_batch_size
    steps, run_tokens = run_length(train.max_tokens, train.max_steps, total)
    every = interval_tokens(train.eval_every, train.eval_every_tokens, run_tokens, total)
    validations = max(1, min(steps, steps * total // every)) if every else 1
    longer_s = max(0.0, seen.first_s - seen.step_s)
    return Pace(
        start_s=seen.start_s,
        step_s=step_s,
        validation_s=validation_s,
        total_s=seen.start_s + longer_s + steps * step_s + validations * validation_s,
    )
