"""Starts a run in a new process, reads its metrics, and kills it after a given number of steps."""

import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from gptexp.config.metrics import Metric
from gptexp.config.schema import Config
from gptexp.process.errors import UserError
from gptexp.process.signals import at_parents_death, ended_in_order
from gptexp.storage import run_dir

LEAVING_S = 3.0  # longest wait for a launcher to clean up after its ranks have ended


@dataclass(frozen=True)
class Observed:
    """The step events of a run, and the time until its first step."""

    steps: list[dict[str, Any]]
    start_s: float  # from the start of the process to the end of the first step


def observe(command: Sequence[str], directory: Path, steps: int, env: dict[str, str] | None = None) -> Observed:
    """Start `command`, which trains in `directory`, and kill it once it has logged `steps` steps.

    Raises `UserError` with the end of the run's output if the run fails.
    """
    return observe_together([(command, directory)], steps, env)[0]


def observe_together(
    runs: Sequence[tuple[Sequence[str], Path]], steps: int, env: dict[str, str] | None = None
) -> list[Observed]:
    """`observe` for several runs at the same time. None is killed before each has logged `steps` steps."""
    started = time.time()
    with ended_in_order(), ExitStack() as ending:
        processes = []
        for command, directory in runs:
            output = ending.enter_context(_log(directory).open("w"))
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # Ctrl-C reaches only this process, which then kills the run
                preexec_fn=partial(at_parents_death, signal.SIGKILL),
            )
            ending.callback(_kill, process)
            processes.append(process)
        while min(len(steps_of(directory / run_dir.METRICS)) for _, directory in runs) < steps:
            for process, (_, directory) in zip(processes, runs, strict=True):
                if process.poll() is not None:
                    said = _log(directory).read_text().strip()[-2000:]
                    raise UserError(f"the run ended early (exit code {process.returncode}): {said}")
            time.sleep(0.05)
        events = [steps_of(directory / run_dir.METRICS) for _, directory in runs]
    return [Observed(of_run, of_run[0]["time"] - started) for of_run in events]


def _log(directory: Path) -> Path:
    """The file of what a run prints."""
    return directory.with_name(f"{directory.name}.log")


def _kill(run: "subprocess.Popen[bytes]") -> None:
    """Kill a run and its ranks: after a signal to stop they would save a checkpoint that nobody needs.

    Kills the ranks first, because a rank whose parent has ended saves a checkpoint. Their launcher then ends by itself.
    """
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


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """Return the step events of a metrics file; the text after its last newline is still being written."""
    if not metrics.exists():
        return []
    lines = metrics.read_text().split("\n")[:-1]
    return [event for event in map(json.loads, lines) if event["event"] == "step"]


def quiet(cfg: Config) -> Config:
    """`cfg` with steps alone: no evaluation, checkpoint or log but metrics.jsonl."""
    return replace(
        cfg,
        train=replace(
            cfg.train,
            eval_every=0,
            save_every=0,
            sharpness_every_tokens=0,
            log_every=1,
            max_minutes=None,
            profile=False,
        ),
        log=replace(
            cfg.log,
            progress="off",
            mfu_peak="auto",
            wandb=replace(cfg.log.wandb, mode="disabled"),
            tensorboard=False,
        ),
    )


def medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of every `perf/` metric. DDP measures rarely: repeats of `perf/reduce_ms` count once."""
    keys = [key for key in steps[0] if key.startswith("perf/") and steps[0][key] is not None]
    columns = {key: [step[key] for step in steps] for key in keys}
    if Metric.REDUCE_MS in columns:
        columns[Metric.REDUCE_MS] = list(dict.fromkeys(columns[Metric.REDUCE_MS]))
    return {key: statistics.median(values) for key, values in columns.items()}
