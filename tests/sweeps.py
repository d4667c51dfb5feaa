"""Helpers of tests of sweeps: run directories written from a formula with known optima; waiting for real ones."""

import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from conftest import wait_for

from gptexp.config.compose import composition, hydra_engine
from gptexp.config.schema import Config
from gptexp.reporting.page.report import build_report
from gptexp.reporting.page.write import numbers
from gptexp.storage import run_dir
from gptexp.sweep.grid import Grid, compose_cells

TOKENS = 2**18
NOISE_SCALE = 6  # sequences


def write_run(
    directory: Path, batch: int, lr: float, seed: int, loss: float | None, schedule: str = "cosine",
    config: Config | None = None, **summary: Any,
) -> None:  # fmt: skip
    """Write a run whose loss falls exponentially to `loss`. None: the run diverged half-way. `config`: of the rest."""
    config = Config() if config is None else config
    config.batch.total_batch_size, config.optim.lr, config.train.seed, config.world.size = batch, lr, seed, 1
    config.train.max_tokens, config.schedule.name = TOKENS, schedule
    run_dir.save_config(directory, config)
    steps = TOKENS // batch // (1 if loss is not None else 2)
    course = [(loss or 4) + 6 * math.exp(-6 * (step + 1) / steps) for step in range(steps)]
    if loss is None:
        course[-1] = math.nan
    events: list[dict[str, Any]] = []
    for step, value in enumerate(course):
        at = {"time": 1e9 + step, "step": step, "tokens": (step + 1) * batch}
        events.append({"event": "step", **at, "train/loss": value, "optim/lr": lr, "optim/grad_norm": 1.0,
                       "optim/clip_fraction": 0.5, "perf/step_ms": batch / 8, "perf/tokens_per_s": 8e3,
                       **noise_scale(batch // config.seq_len, config.seq_len),
                       "data/fingerprint": f"{at['tokens'] * seed:016x}"})  # fmt: skip
        if (step + 1) % (steps // 8 or 1) == 0:
            events.append({"event": "eval", **at, "val/loss": value})
    if loss is not None:
        events[-1]["val/loss"] = loss
    lines = "".join(json.dumps(run_dir.finite(event)) + "\n" for event in events)
    (directory / run_dir.METRICS).write_text(lines)
    status = "completed" if loss is not None else "diverged"
    of_run = {"status": status, "final_val_loss": loss, "tokens": steps * batch, "steps": steps, "train_s": 60.0}
    run_dir.write_json(directory / run_dir.SUMMARY, {**of_run, "data_hash": "0123", "parameters": 1, **summary})


def noise_scale(sequences: int, seq_len: int) -> dict[str, float]:
    """The measurements of a step with |G|² = 2 and a noise scale of `NOISE_SCALE` sequences; none for one sequence."""
    if sequences < 2:
        return {}
    small, big = 2 * (1 + NOISE_SCALE), 2 * (1 + NOISE_SCALE / sequences)
    scale = {"gns/sequences": NOISE_SCALE, "gns/tokens": NOISE_SCALE * seq_len, "gns/cos": 1 / (1 + NOISE_SCALE)}
    return {"gns/small_sq_norm": small, "gns/big_sq_norm": big, "gns/small_sequences": 1, **scale}


def write_sweep(
    root: Path,
    batches: Sequence[int] = (4096, 8192, 16384),
    alpha: float = 0.5,
    centre: float = 0.02,
    seeds: int = 2,
    sigma: float = 0.002,
    schedule: str = "cosine",
) -> Path:
    """Write five learning rates an octave apart, the best in proportion to B^alpha, and a higher one that diverged."""
    rng = np.random.default_rng(1)
    for number, batch in enumerate(batches):
        optimum = math.log2(centre) + alpha * (number - (len(batches) - 1) / 2)
        for octave in range(-2, 4):
            lr = 0.02 * 2**octave
            for seed in range(1337, 1337 + (seeds if octave < 3 else 1)):
                loss = 4 + 0.01 * number + 0.02 * (math.log2(lr) - optimum) ** 2 + sigma * rng.standard_normal()
                name = f"lr={lr:g},total_batch_size={batch},seed={seed}"
                write_run(root / name, batch, lr, seed, None if octave == 3 else loss, schedule)
    run_dir.write_json(root / run_dir.SWEEP, {"name": root.name, "overrides": ["model=nano"]})
    return root


def report_of(directory: Path) -> dict[str, Any]:
    """What report.json of `directory` would hold, without drawing its pictures."""
    report = numbers(build_report(directory))
    plain: dict[str, Any] = json.loads(json.dumps(run_dir.finite(report)))
    return plain


def wait_until_free(directories: Sequence[Path]) -> None:
    """Wait until no process runs in `directories`. Ranks whose parent was killed exit a moment later."""
    idle = subprocess.Popen(["sleep", "60"], text=True)
    try:
        wait_for(lambda: not any(run_dir.is_locked(directory) for directory in directories), idle, 60)
    finally:
        idle.kill()
        idle.wait()


def compose_sweep(overrides: Sequence[str], config_dir: str | None = None, config_name: str | None = None) -> Grid:
    """The cells of a multirun, as `gptexp plan -m` composes them."""
    with hydra_engine(config_dir) as engine:
        return compose_cells(engine, composition(engine, overrides, config_dir, multirun=True, config_name=config_name))
