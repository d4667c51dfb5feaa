"""How many cells a CPU trains fastest at once, by trial: a few steps of real runs, before the first cell begins.

One run with all cores and several runs that share them take turns: the others are stopped meanwhile. So a load that
comes and goes meets both alike.
"""

import math
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptexp.config.metrics import Metric
from gptexp.config.schema import Config
from gptexp.config.vocabulary import with_vocab_size
from gptexp.distributed.ranks import count_cores
from gptexp.model.flops import flops_per_token
from gptexp.run.observe import steps_of
from gptexp.run.preloaded import Forked
from gptexp.storage import run_dir

POLL_S = 0.02
READY_S = 60.0  # longest wait for the imports of the process that forks the runs
WARM_UP, COUNTED = 2, 3  # steps of a run that are run first, and at least in each turn
ROUNDS, TURN_S = 4, 0.25  # turns of each, and their least length in seconds
SHARE, MOST_S = 0.1, 30.0  # most time of the trial: a share of the sweep's expected time, and seconds
LEAST_STEPS = 300  # a sweep with fewer steps ends before a trial pays
GAIN = 1.05  # runs at once must be so many times as fast as fewer
USABLE = 0.85  # maximum share of the free memory

Fork = Callable[[Path, int], Forked | None]  # fork the run of a directory, as one of so many; None: not ready yet


class Over(Exception):
    """The trial cannot go on: a signal has come, or a run has ended."""


@dataclass(frozen=True)
class Fastest:
    """The outcome of a trial."""

    at_once: int
    effective: dict[str, Any]  # what each of these runs has chosen for `auto`, as in effective.json
    tried: dict[int, float]  # numbers of runs at once, and how many times as fast as the best smaller number they were


def most_at_once(configs: Sequence[Config]) -> int:
    """The largest number of runs at once that is worth a trial, a power of two; 1: no trial."""
    first, steps = configs[0], sum(config.run_length[0] for config in configs)
    one_rank = all(config.world.size in (None, 1) and config.train.device in ("auto", "cpu") for config in configs)
    threads = 1 if first.train.reduction == "tree" else first.world.threads_per_rank or 1
    at_most = min(len(configs), count_cores() // threads)
    if not one_rank or steps < LEAST_STEPS or first.train.compile == "on" or first.branch_from is not None:
        return 1
    return 1 << (max(1, at_most).bit_length() - 1)


class Runs:
    """Runs of one config at the same time. They are stopped but for their turns."""

    def __init__(self, config: Config, at_once: int, folder: Path, fork: Fork, is_over: Callable[[], bool]) -> None:
        self.at_once, self._is_over = at_once, is_over
        self._directories = [folder / f"{at_once}-{number}" for number in range(at_once)]
        self._processes: list[Forked] = []
        for directory in self._directories:
            run_dir.save_config(directory, config)
            self._processes.append(self._forked(fork, directory))

    def _forked(self, fork: Fork, directory: Path) -> Forked:
        limit = time.monotonic() + READY_S
        while (process := fork(directory, self.at_once)) is None:
            if self._is_over() or time.monotonic() > limit:
                raise Over
            time.sleep(POLL_S)
        return process

    def events(self) -> list[list[dict[str, Any]]]:
        """The steps of each run so far."""
        return [steps_of(directory / run_dir.METRICS) for directory in self._directories]

    def effective(self) -> dict[str, Any]:
        return run_dir.read_json(self._directories[0] / run_dir.EFFECTIVE)

    def turn(self, count: int, least_s: float, most_s: float = MOST_S) -> float:
        """Let the runs go on until each has ended `count` steps and begun another. Returns their steps per second."""
        self._send(signal.SIGCONT)
        begin, limit = time.time(), time.monotonic() + most_s
        least = time.monotonic() + least_s
        while True:
            ends = [[float(event["time"]) for event in events if event["time"] > begin] for events in self.events()]
            if time.monotonic() > least and all(len(each) > count for each in ends):
                break
            if self._is_over() or time.monotonic() > limit or any(p.poll() is not None for p in self._processes):
                raise Over
            if self.effective().get("compile"):  # takes longer than a trial may
                raise Over
            time.sleep(POLL_S)
        self._send(signal.SIGSTOP)
        return sum((len(each) - 1) / (each[-1] - each[0]) for each in ends)

    def end(self) -> None:
        self._send(signal.SIGKILL)
        while any(process.poll() is None for process in self._processes):
            time.sleep(POLL_S)

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)


def fastest(configs: Sequence[Config], fork: Fork, is_over: Callable[[], bool]) -> Fastest | None:
    """Try one run of the first of `configs`, then 2, 4, … at once, while more are faster; None without an outcome."""
    import torch  # here, because a sweep's parent starts without it

    from gptexp.machine.device import free_memory
    from gptexp.run.calibrate import quiet

    config = quiet(configs[0])
    config.world.max_restarts = 0
    tried: dict[int, float] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="gptexp-") as name, ExitStack() as ending:

            def begun(at_once: int, most_s: float) -> Runs:
                runs = Runs(config, at_once, Path(name), fork, is_over)
                ending.callback(runs.end)
                runs.turn(WARM_UP, 0.0, most_s)
                return runs

            best = begun(1, MOST_S)
            [[*_, last]] = best.events()
            sized = [with_vocab_size(config, best.effective()["vocab_size"]) for config in configs]
            step_s, peak = last[Metric.STEP_MS] / 1e3, last[Metric.PEAK_MEM_GIB] * 2**30 * _largest(sized)
            limit_s = min(MOST_S, SHARE * step_s * _steps_like_first(sized))
            at_once = 2
            while at_once <= most_at_once(configs):
                room = USABLE * (free_memory(torch.device("cpu")) or math.inf)
                limit_s -= _trial_s(step_s, at_once)
                if limit_s < 0 or at_once * peak > room:
                    break
                more = begun(at_once, MOST_S)
                ratios = [more.turn(COUNTED, TURN_S) / best.turn(COUNTED, TURN_S) for _ in range(ROUNDS)]
                tried[at_once] = statistics.median(ratios)
                if tried[at_once] < GAIN:
                    break
                best.end()
                best, at_once = more, 2 * at_once
            return Fastest(best.at_once, best.effective(), tried)
    except Over:
        return None


def _trial_s(step_s: float, at_once: int) -> float:
    """Expected seconds of a trial of `at_once` runs against the best so far, if they are no faster."""
    return step_s * at_once * WARM_UP + ROUNDS * (
        max(TURN_S, at_once * step_s * COUNTED) + max(TURN_S, step_s * COUNTED)
    )


def _flops(config: Config) -> float:
    """FLOPs of a run."""
    steps, _ = config.run_length
    return float(flops_per_token(config.model, config.seq_len)[0] * config.batch.step_sizes.tokens_after(steps))


def _steps_like_first(configs: Sequence[Config]) -> float:
    """The length of all runs together, in steps of the first one."""
    steps, _ = configs[0].run_length
    return sum(map(_flops, configs)) / _flops(configs[0]) * steps


def _largest(configs: Sequence[Config]) -> float:
    """The size of the largest model, in sizes of the first one."""
    of_token = [flops_per_token(config.model, config.seq_len)[0] for config in configs]
    return max(of_token) / of_token[0]
