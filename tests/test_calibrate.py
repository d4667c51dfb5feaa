"""A whole run's time out of a few steps."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import summary

from gptexp import calibrate, run_dir
from gptexp.batch import plan_batch
from gptexp.calibrate import COUNTED, WARM_UP, Observed
from gptexp.check import problems
from gptexp.config import Config

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

MICRO = {"data": 1.0, "forward": 20.0, "backward": 39.0}  # ms
ONCE = {"clip": 3.0, "optimizer": 7.0, "reduce": 5.0}  # the reduction counts within backward


@pytest.mark.parametrize("grad_accum_steps", [1, 2, 16])
def test_a_step_is_its_micro_steps_and_what_it_does_once(
    grad_accum_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = Config()
    cfg.batch.micro_batch_size, cfg.batch.total_batch_size = "auto", 4 * 1024 * grad_accum_steps
    cfg.schedule.decay_steps = 50  # the end of the decay would lie in a warm-up of a tenth of very many steps
    cfg.data.val_tokens, cfg.train.max_steps, cfg.train.eval_every = 10 * 1024, 100, 30
    ran: list[Config] = []

    def observe(command: Sequence[str], directory: Path, steps: int) -> Observed:
        quick = run_dir.load_config(directory)
        ran.append(quick)
        assert run_dir.read_json(directory / run_dir.EFFECTIVE) == {"compile": True}  # as planned, not by its length
        a = quick.batch.total_batch_size // (4 * 1024)
        event = {f"perf/{key}_ms": a * ms for key, ms in MICRO.items()}
        event |= {f"perf/{key}_ms": ms for key, ms in ONCE.items()}
        event["perf/backward_ms"] += ONCE["reduce"]
        event["perf/step_ms"] = a * sum(MICRO.values()) + sum(ONCE.values())
        first: dict[str, Any] = {**event, "perf/step_ms": event["perf/step_ms"] + 9_000}  # it compiles
        assert steps == WARM_UP + COUNTED
        return Observed([first, *[event] * (steps - 1)], start_s=12 + event["perf/step_ms"] / 1e3)

    prepared: list[object] = []
    monkeypatch.setattr(calibrate, "prepare", prepared.append)
    monkeypatch.setattr(calibrate, "observe", observe)
    plan = plan_batch(cfg.batch.total_batch_size, 4, 1024, 1)
    seen = calibrate.sample(cfg, plan, {"compile": True})
    pace = calibrate.pace(seen, cfg, plan)
    assert ran[0].batch.micro_batch_size == 4
    assert ran[0].batch.total_batch_size == 4 * 1024 * min(grad_accum_steps, 2)
    assert prepared == [cfg.data]
    assert problems(ran[0], 1) == []
    assert (ran[0].log.wandb.mode, ran[0].train.save_every) == ("disabled", 0)
    assert pace.step_s == pytest.approx((60 * grad_accum_steps + 15) / 1e3)
    assert pace.validation_s == pytest.approx(3 * 20 / 1e3)  # 10 windows in batches of 4, forward only
    assert pace.start_s == pytest.approx(3)
    assert pace.total_s == pytest.approx(12 + 100 * pace.step_s + 3 * pace.validation_s)
    cfg.batch.total_batch_size = 4 * 1024 * 8  # another cell of a sweep, out of the same sample
    assert calibrate.pace(seen, cfg, plan_batch(4 * 1024 * 8, 4, 1024, 1)).step_s == pytest.approx(0.495)


@pytest.mark.slow
def test_what_is_watched_leaves_no_process_and_no_checkpoint(start: Start, tiny: list[str], tmp_path: Path) -> None:
    """Two ranks, which would save if they were asked to stop; ended after its steps, or with whoever watches."""
    for end in (None, signal.SIGTERM, signal.SIGKILL):
        found = tmp_path / f"found-{end}"
        found.mkdir()
        watching = start("plan", *tiny, "world=ddp2", "--time", env={**os.environ, "TMPDIR": str(found)})
        watched: list[psutil.Process] = []
        while watching.poll() is None and (end is None or len(watched) < 3):
            with suppress(psutil.NoSuchProcess):
                watched = max(watched, psutil.Process(watching.pid).children(recursive=True), key=len)
            time.sleep(0.05)
        if end is not None:
            watching.send_signal(end)
        said, _ = watching.communicate(timeout=60)
        _, alive = psutil.wait_procs(watched, timeout=30)
        assert (len(watched) >= 3, alive) == (True, [])
        assert not list(found.rglob("*.safetensors"))
        if end != signal.SIGKILL:
            assert not list(found.glob("gptexp-*"))
        assert ("a step" in said) == (end is None)


@pytest.mark.slow
def test_the_time_of_a_real_run_is_foretold(gptexp: Gptexp, tmp_path: Path) -> None:
    overrides = ["train.max_tokens=245760", "log=disabled", "log.sample_tokens=0", "hydra.run.dir=out"]
    foretold = json.loads(gptexp("plan", *overrides, "--time", "--json").stdout)["time"]
    done = gptexp("train", *overrides)
    assert done.returncode == 0, done.stderr
    assert foretold["total_s"] == pytest.approx(summary(tmp_path / "out")["wall_s"] + foretold["start_s"], rel=0.5)
