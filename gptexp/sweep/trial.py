"""How many cells a CPU trains fastest at once, by trial: a few steps of real runs, before the first cell begins.

One run with all cores and several runs that share them take turns: the others are stopped meanwhile. So a load that
comes and goes meets both alike.
"""

import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from operator import mul
from pathlib import Path
from typing import Any

from gptexp.config.metrics import Metric
from gptexp.config.schema import Config
from gptexp.config.vocabulary import with_vocab_size
from gptexp.model.flops import flops_per_token
from gptexp.process.cores import count_cores
from gptexp.process.imports import permanent
from gptexp.run.observe import quiet, steps_of
from gptexp.run.preloaded import Forked
from gptexp.storage import run_dir

POLL_S = 0.02
LONGEST_S = 60.0  # longest trial, with the imports of the process that forks the runs
WARM_UP, COUNTED = 2, 3  # steps of a run that are run first, and at least in each turn
ROUNDS, TURN_S = 4, 0.25  # turns of each, and their least length in seconds
SHARE, MOST_S = 0.1, 30.0  # most time of two numbers' turns: a share of the sweep's expected time, and seconds
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

    def __init__(self, at_once: int, folder: Path, is_over: Callable[[], bool]) -> None:
        self.at_once, self._is_over = at_once, is_over
        self._directories = [folder / f"{at_once}-{number}" for number in range(at_once)]
        self._processes: list[Forked] = []

    def start(self, config: Config, fork: Fork) -> None:
        for directory in self._directories:
            run_dir.save_config(directory, config)
            while (process := fork(directory, self.at_once)) is None:
                if self._is_over():
                    raise Over
                time.sleep(POLL_S)
            self._processes.append(process)

    def events(self) -> list[list[dict[str, Any]]]:
        """The steps of each run so far."""
        return [steps_of(directory / run_dir.METRICS) for directory in self._directories]

    def effective(self) -> dict[str, Any]:
        return run_dir.read_json(self._directories[0] / run_dir.EFFECTIVE)

    def turn(self, count: int, least_s: float) -> float:
        """Let the runs go on until each has ended `count` steps and begun another. Returns their steps per second."""
        self._send(signal.SIGCONT)
        begin, least = time.time(), time.monotonic() + least_s
        while True:
            ends = [[float(event["time"]) for event in events if event["time"] > begin] for events in self.events()]
            if time.monotonic() > least and all(len(each) > count for each in ends):
                break
            has_ended = any(process.poll() is not None for process in self._processes)
            if self._is_over() or has_ended or self.effective().get("compile"):  # which takes longer than a trial
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


def fastest(configs: Sequence[Config], fork: Fork, is_stopped: Callable[[], bool]) -> Fastest | None:
    """Try one run of the first of `configs`, then 2, 4, … at once, while more are faster.

    Returns None if `is_stopped`, or if not even one run has trained.
    """
    import torch  # noqa: F401  needed below, and imported while the process that forks the runs does the same

    end = time.monotonic() + LONGEST_S
    config = quiet(configs[0])
    config = replace(config, world=replace(config.world, max_restarts=0))  # a launcher's ranks would not stop
    best: Runs | None = None
    tried: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="gptexp-") as name, ExitStack() as ending:
        with suppress(Over):
            for at_once in (2**n for n in range(most_at_once(configs).bit_length())):
                if best is not None and not _pays(configs, best, at_once):
                    break
                more = Runs(at_once, Path(name), lambda: is_stopped() or time.monotonic() > end)
                ending.callback(more.end)
                more.start(config, fork)
                more.turn(WARM_UP, 0.0)
                if best is not None:
                    ratios = [more.turn(COUNTED, TURN_S) / best.turn(COUNTED, TURN_S) for _ in range(ROUNDS)]
                    tried[at_once] = statistics.median(ratios)
                    if tried[at_once] < GAIN:
                        break
                    best.end()
                best = more
        return None if best is None or is_stopped() else Fastest(best.at_once, best.effective(), tried)


def _pays(configs: Sequence[Config], best: Runs, at_once: int) -> bool:
    """Whether `at_once` runs fit into the memory, and a trial against the `best` takes a small share of the sweep."""
    with permanent():
        import torch

        from gptexp.machine.device import free_memory

    steps = best.events()[0]
    step_s = min(step[Metric.STEP_MS] for step in steps) / 1e3
    peak = max(step[Metric.PEAK_MEM_GIB] for step in steps) * 2**30
    sized = [with_vocab_size(config, best.effective()["vocab_size"]) for config in configs]
    flops = [flops_per_token(config.model, config.seq_len)[0] for config in sized]
    tokens = [config.batch.step_sizes.tokens_after(config.run_length[0]) for config in sized]
    sweep_s = step_s / best.at_once * sum(map(mul, flops, tokens)) / (flops[0] * tokens[0]) * configs[0].run_length[0]
    trial_s = at_once * step_s * WARM_UP + ROUNDS * (
        max(TURN_S, at_once * step_s * COUNTED) + max(TURN_S, step_s * COUNTED)
    )
    free = free_memory(torch.device("cpu"))
    fits = free is None or at_once * peak * max(flops) / flops[0] <= USABLE * free
    return bool(fits and trial_s <= min(MOST_S, SHARE * sweep_s))
