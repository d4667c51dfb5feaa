"""The time of a whole run, estimated from a few steps."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import summary

from gptexp.config.rules import problems
from gptexp.config.run_plan import plan_run
from gptexp.config.schema import Config
from gptexp.distributed.ranks import Rank
from gptexp.machine.effective import Choice, load_effective
from gptexp.machine.resolve import resolve
from gptexp.run import calibrate
from gptexp.run.observe import Observed
from gptexp.storage import run_dir

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

MICRO = {"data": 1.0, "forward": 20.0, "backward": 39.0}  # ms of a micro-step
ONCE = {"clip": 3.0, "optimizer": 7.0, "reduce": 5.0}  # ms of a step; the reduction is a part of backward


@pytest.mark.parametrize("grad_accum_steps", [1, 2, 16])
def test_the_estimated_time_of_a_step_scales_only_its_micro_steps(
    grad_accum_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real run is replaced by one with known times; the first of its steps compiles for 9 s."""
    cfg = Config()
    cfg.batch.micro_batch_size, cfg.batch.total_batch_size = "auto", 4 * 1024 * grad_accum_steps
    cfg.schedule.decay_steps = 50  # shorter than the run: the warm-up, a tenth of the run, must end before
    cfg.data.val_tokens, cfg.train.max_steps, cfg.train.eval_every = 10 * 1024, 100, 30
    planned = replace(
        resolve(cfg, torch.device("cpu"), Rank()), compile=Choice(True, "decided", "for the length of the whole run")
    )
    ran: list[Config] = []
    prepared: list[object] = []

    def observe(command: Sequence[str], directory: Path, steps: int) -> Observed:
        assert prepared == [cfg.data]  # the text is tokenised before the time is measured
        quick = run_dir.load_config(directory)
        ran.append(quick)
        assert load_effective(directory) == planned
        a = quick.batch.total_batch_size // (4 * 1024)
        event = {f"perf/{key}_ms": a * ms for key, ms in MICRO.items()}
        event |= {f"perf/{key}_ms": ms for key, ms in ONCE.items()}
        event["perf/backward_ms"] += ONCE["reduce"]
        event["perf/step_ms"] = a * sum(MICRO.values()) + sum(ONCE.values())
        first: dict[str, Any] = {**event, "perf/step_ms": event["perf/step_ms"] + 9_000}
        return Observed([first, *[event] * (steps - 1)], start_s=12 + event["perf/step_ms"] / 1e3)

    monkeypatch.setattr(calibrate, "prepare", prepared.append)
    monkeypatch.setattr(calibrate, "observe", observe)
    plan = plan_run(cfg, 4)
    seen = calibrate.sample(cfg, plan, planned)
    pace = calibrate.pace(seen, cfg, plan)
    assert ran[0].batch.micro_batch_size == 4
    assert ran[0].batch.total_batch_size <= 2 * 4 * 1024  # the sample has two micro-steps at most
    assert problems(ran[0], 1) == []
    assert (ran[0].log.wandb.mode, ran[0].train.save_every) == ("disabled", 0)
    assert pace.step_s == pytest.approx((60 * grad_accum_steps + 15) / 1e3)
    assert pace.validation_s == pytest.approx(3 * 20 / 1e3)  # 10 windows in batches of 4, forward pass only
    assert pace.start_s == pytest.approx(3)
    assert pace.total_s == pytest.approx(12 + 100 * pace.step_s + 4 * pace.validation_s)  # at 30, 60, 90 and 100
    averaged = replace(cfg, train=replace(cfg.train, ema_half_life_tokens=4096))
    assert calibrate.pace(seen, averaged, plan).validation_s == pytest.approx(2 * pace.validation_s)
    texts = replace(cfg, data=replace(cfg.data, validation={"a": "a.txt", "b": "b.txt"}))
    assert calibrate.pace(seen, texts, plan).validation_s == pytest.approx(3 * pace.validation_s)
    cfg.batch.total_batch_size = 4 * 1024 * 8  # another cell of a sweep, from the same sample
    assert calibrate.pace(seen, cfg, plan_run(cfg, 4)).step_s == pytest.approx(0.495)
    cfg.train.eval_every, cfg.train.eval_every_tokens = None, 0
    cfg.batch.ramp_from_tokens, cfg.batch.ramp_tokens = 4 * 1024, 10**6
    ramp = plan_run(cfg, 4)
    of_steps_ms = [60 * step.batch.grad_accum_steps + 15 for step in ramp.steps_from(0, 0)]
    assert len({*of_steps_ms}) == 8
    found = calibrate.pace(seen, cfg, ramp)
    assert (found.step_s, found.total_s) == (pytest.approx(0.495), pytest.approx(12 + sum(of_steps_ms) / 1e3 + 0.06))
    prepared.clear()
    calibrate.sample(cfg, ramp, planned)
    assert (ran[-1].batch.ramp_tokens, problems(ran[-1], 1)) == (None, [])


@pytest.mark.slow
@pytest.mark.parametrize("end", [None, signal.SIGTERM, signal.SIGKILL])
def test_an_observed_run_leaves_no_process_and_no_checkpoint(
    start: Start, tiny: list[str], tmp_path: Path, end: signal.Signals | None
) -> None:
    """Two ranks end after their steps, or with the observing process. A stop request would make them save."""
    found = tmp_path / "found"
    found.mkdir()
    observing = start("plan", *tiny, "world=ddp2", "--time", env={**os.environ, "TMPDIR": str(found)})
    observed: list[psutil.Process] = []
    while observing.poll() is None and (end is None or len(observed) < 3):
        with suppress(psutil.NoSuchProcess):
            observed = max(observed, psutil.Process(observing.pid).children(recursive=True), key=len)
        time.sleep(0.05)
    if end is not None:
        observing.send_signal(end)
    said, _ = observing.communicate(timeout=60)
    _, alive = psutil.wait_procs(observed, timeout=30)
    assert (len(observed) >= 3, alive) == (True, [])
    assert not list(found.rglob("*.safetensors"))
    if end != signal.SIGKILL:
        assert not list(found.glob("gptexp-*"))
    assert ("a step" in said) == (end is None)


@pytest.mark.slow
def test_the_estimated_time_of_a_real_run_is_within_half_of_its_time(gptexp: Gptexp, tmp_path: Path) -> None:
    overrides = ["train.max_tokens=245760", "log=disabled", "log.sample_tokens=0", "hydra.run.dir=out"]
    estimated = json.loads(gptexp("plan", *overrides, "--time", "--json").stdout)["time"]
    done = gptexp("train", *overrides)
    assert done.returncode == 0, done.stderr
    assert estimated["total_s"] == pytest.approx(summary(tmp_path / "out")["wall_s"] + estimated["start_s"], rel=0.5)
