"""Searches of `gptexp tune` with runs whose loss is a formula, for tests.

Only the processes of the cells are replaced: composing, naming, locks, log, report and statistics are the real ones.
"""

import json
import math
import os
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.callbacks import Callbacks
from hydra.types import HydraContext

from gptexp.config.compose import composition, hydra_engine
from gptexp.config.scaling import scaled_optim
from gptexp.config.schema import Config
from gptexp.reporting.page.report import build_report
from gptexp.reporting.statistics.forms import FORMS
from gptexp.reporting.words.answers import Answer
from gptexp.storage import run_dir
from gptexp.storage.search_log import read_events
from gptexp.sweep.cells import Cell
from gptexp.sweep.grid import build_sweeper
from gptexp.sweep.sweepers import CellSweeper

SIZES = "batch.total_batch_size=4096,8192,16384"
ONE = "batch.total_batch_size=4096"
SMALL = ["model=nano", "model.n_layer=1", "model.n_embd=32", "model.n_head=2", "data.tokenizer=bytes",
         "train.max_tokens=100000", "log.wandb.mode=disabled", "log.progress=off"]  # fmt: skip


@dataclass
class Surface:
    """Losses as a function of batch size, learning rate and seed. Octaves and nats."""

    best: dict[int, float] = field(default_factory=lambda: {4096: 0.01, 8192: 0.014, 16384: 0.02})
    height: float = 0.02
    skew: float = 0.4
    sigma: float = 0.002
    diverges: float = 3.0  # octaves above the best learning rate
    arms: dict[str, float] = field(default_factory=dict)  # optimizer -> factor of its best learning rate
    gaps: dict[str, float] = field(default_factory=dict)  # optimizer -> how much higher its losses are
    key: str = "optim.lr"
    seconds: float = 60.0  # of a run
    slower: dict[str, float] = field(default_factory=dict)  # optimizer -> how many times as long its runs take
    fails: Callable[[Config], bool] = lambda config: False

    def loss(self, config: Config) -> float | None:
        batch, lr = config.batch.total_batch_size, scaled_optim(config).lr
        if self.key != "optim.lr":
            lr = getattr(config.optim, self.key.removeprefix("optim."))
        u = math.log2(lr / (self.best[batch] * self.arms.get(config.optim.name, 1.0)))
        if u > self.diverges:
            return None
        noise = random.Random(zlib.crc32(f"{batch}/{lr:.4g}/{config.train.seed}/{config.optim.name}".encode()))
        height = self.height * 2 * (math.exp(self.skew * u) - 1 - self.skew * u) / self.skew**2
        height += self.gaps.get(config.optim.name, 0.0)
        return 3 + 0.05 * math.log2(batch / 4096) + height + noise.gauss(0, self.sigma)


class Clock:
    """The time that the search sees; runs move it."""

    now = 1e6


class Ended:
    """The process of a cell that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code

    def send_signal(self, number: int) -> None: ...


@dataclass
class Search:
    """A search in `folder`, and what its commands chose."""

    folder: Path
    surface: Surface
    clock: Clock

    def run(self, *overrides: str, killed_after: int | None = None, lost_s: float | None = None) -> int | None:
        """Run the command; None if it was killed after so many runs of its own, `lost_s` into the next one."""
        ran = 0

        def start(cell: Cell, gpus: Sequence[str], at_once: int) -> Ended:
            nonlocal ran
            if ran == killed_after:
                if lost_s is not None:
                    self.clock.now += lost_s
                    (cell.directory / run_dir.METRICS).write_text(json.dumps({"time": self.clock.now}) + '\n{"eve')
                raise SystemExit(9)  # nothing catches it before the locks are released
            ran += 1
            return Ended(self.train(cell.directory, cell.config))

        def begin(config: Config, cfg: Any) -> int:
            run_dir.save_config(Path(cfg.hydra.runtime.output_dir), config)
            return 0

        given = [*SMALL, "hydra/sweeper=tune", f"hydra.sweep.dir={self.folder}", *overrides]
        with hydra_engine() as engine:
            cfg = composition(engine, given, None, multirun=True)
            context = HydraContext(config_loader=engine.config_loader, callbacks=Callbacks(cfg))
            sweeper: CellSweeper = build_sweeper(cfg, context, begin)
            sweeper.launcher.start = start  # type: ignore[assignment]
            try:
                return sweeper.sweep(list(cfg.hydra.overrides.task))
            except SystemExit:
                log = self.folder / "tune.jsonl"
                lines = log.read_text().splitlines(keepends=True)
                log.write_text("".join(lines[:-1] if '"stop"' in lines[-1] else lines))  # SIGKILL leaves none
                return None

    def train(self, directory: Path, config: Config) -> int:
        """What a run leaves behind."""
        seconds = self.surface.seconds * self.surface.slower.get(config.optim.name, 1.0)
        self.clock.now += seconds
        run_dir.write_json(directory / run_dir.EFFECTIVE, {"dtype": {"value": "float32", "reason": ""}})
        if self.surface.fails(config):
            run_dir.write_json(directory / run_dir.SUMMARY, {"status": "failed"})
            return 1
        loss, (_, tokens) = self.surface.loss(config), config.run_length
        status = "diverged" if loss is None else "completed"
        facts = {"tokens": tokens, "wall_s": seconds, "parameters": 10**5, "data_hash": "0"}
        run_dir.write_json(directory / run_dir.SUMMARY, {"status": status, "final_val_loss": loss, **facts})
        lines = [
            {
                "event": "step",
                "time": self.clock.now,
                "step": 0,
                "tokens": tokens // 2,
                "train/loss": 5.0,
                "perf/tokens_per_s": 2e3,
                "perf/step_ms": 1e3,
                "data/fingerprint": "0",
                "optim/lr": 0.0,
            },
            {"event": "eval", "time": self.clock.now, "step": 1, "tokens": tokens, "val/loss": loss},
        ]
        (directory / run_dir.METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        os.utime(directory / run_dir.METRICS, (self.clock.now, self.clock.now))
        return 0 if loss is not None else 5

    @property
    def answers(self) -> list[Answer]:
        return build_report(self.folder).answers

    @property
    def chosen(self) -> list[tuple[Any, ...]]:
        events = [event for event in read_events(self.folder) if event["event"] == "choose"]
        return [(*event["arm"], event["batch"], event["typed"], event["seed"], event["why"]) for event in events]

    def off(self, answer: Answer) -> float:
        """Octaves from the true best learning rate."""
        assert answer.lr is not None
        return math.log2(answer.lr / self.surface.best[answer.total_batch_size])


def fit_one_form(patch: pytest.MonkeyPatch) -> None:
    """Fit the form that the losses have, and no other: faster, for tests of all but the statistics."""
    patch.setattr("gptexp.reporting.statistics.posterior.FORMS", {"linex": FORMS["linex"]})


def searches_in(folder: Path, patch: pytest.MonkeyPatch) -> Callable[..., Search]:
    """A function that returns a new search in `folder`; its arguments are those of `Surface`."""
    clock, numbers = Clock(), iter(range(100))
    patch.setattr("gptexp.sweep.tune.time.monotonic", lambda: clock.now)
    patch.setattr("gptexp.storage.search_log.time.time", lambda: clock.now)
    patch.setattr("gptexp.sweep.sweepers._report", lambda directory, log: None)
    return lambda **surface: Search(folder / f"sweep{next(numbers)}", Surface(**surface), clock)
