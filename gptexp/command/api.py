"""gptexp from Python: `gptexp.compose`, `gptexp.train`, `gptexp.sweep`, `gptexp.tune` and `gptexp.report`.

They are the commands of the shell. A command line is composed and checked here, so what is wrong with it raises the
error that the shell prints. What trains has a process of its own, as in the shell: it handles signals, sets torch's
global switches, and may be killed, none of which a notebook should share.
"""

import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hydra.types import HydraContext
from omegaconf import DictConfig

from gptexp.command.hydra_main import register_from_init
from gptexp.config import compose as composing
from gptexp.config import rules
from gptexp.config.overrides import quoted
from gptexp.config.paths import OUTPUTS
from gptexp.config.schema import Config
from gptexp.config.search_flags import PREFIX, SWEEPER
from gptexp.data.epoch import count_epoch
from gptexp.process.errors import (
    EXIT_CHECKPOINT,
    EXIT_CONFIG,
    EXIT_DATA,
    EXIT_DIVERGED,
    CheckpointError,
    ConfigError,
    DataError,
    Problem,
    UserError,
)
from gptexp.process.imports import permanent
from gptexp.process.signals import start_a_run
from gptexp.process.terminal import ERRORS_TO
from gptexp.process.words import shown
from gptexp.storage import branch, run_dir
from gptexp.storage.continuation import check_same
from gptexp.storage.init_from import with_step
from gptexp.storage.inventory import link_in_outputs, located

if TYPE_CHECKING:
    from gptexp.model.own_model import Model
    from gptexp.reporting.listings.frames import DataFrame
    from gptexp.reporting.page.report import Report

ERRORS: dict[int, type[UserError]] = {EXIT_CONFIG: ConfigError, EXIT_DATA: DataError, EXIT_CHECKPOINT: CheckpointError}
LIVE = ("step ",)  # lines that the next one replaces in a notebook


@dataclass(frozen=True)
class Run:
    """A run on the disk, finished or not. Its properties read the directory anew."""

    directory: Path

    @property
    def config(self) -> Config:
        return run_dir.load_config(self.directory)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; empty if the run has not ended once."""
        return run_dir.read_json(self.directory / run_dir.SUMMARY)

    @property
    def status(self) -> str:
        """completed, diverged, interrupted, failed, or `running` while it has no summary."""
        return str(self.summary.get("status", "running"))

    @property
    def metrics(self) -> "DataFrame":
        """A row for each logged step, see `load_metrics`."""
        from gptexp.reporting.listings.frames import load_metrics

        return load_metrics(self.directory)

    def model(self, checkpoint: int | str | None = None, ema: bool = False) -> "Model":
        """The model in eval mode, see `load_run`."""
        with permanent():
            from gptexp.run.load import load_run

        return load_run(self.directory, ema, checkpoint)[0]

    def resume(self, world_size: int | None = None, quiet: bool = False) -> "Run":
        """Go on from the newest checkpoint, also on another number of ranks."""
        ranks = [] if world_size is None else ["--world-size", str(world_size)]
        _run(["resume", str(self.directory), *ranks], quiet)
        return self

    def report(self) -> "Report":
        return report(self.directory)


@dataclass(frozen=True)
class Sweep:
    """A sweep on the disk, finished or not."""

    directory: Path

    @property
    def runs(self) -> list[Run]:
        """The cells that have begun, in the order of their names."""
        return [Run(path.parent) for path in sorted(self.directory.glob(f"*/{run_dir.CONFIG}"))]

    def to_pandas(self) -> "DataFrame":
        """A row for each run, see `load_sweep`."""
        from gptexp.reporting.listings.frames import load_sweep

        return load_sweep(self.directory)

    def report(self) -> "Report":
        return report(self.directory)


def compose(
    overrides: Sequence[str] = (), config_dir: str | Path | None = None, config_name: str | None = None
) -> Config:
    """The checked config of a run, as `gptexp train OVERRIDES` would have it. Raises `ConfigError`."""
    cfg = _composed(overrides, config_dir, config_name)
    return with_step(composing.to_config(cfg, cfg.hydra.overrides.task, None, branch.find(cfg), count_epoch))


def train(
    config: Config | Sequence[str] = (),
    world_size: int | None = None,
    directory: str | Path | None = None,
    config_dir: str | Path | None = None,
    config_name: str | None = None,
    quiet: bool = False,
) -> Run:
    """Train a run to its end: `gptexp train`, with the same overrides, or with a config of `compose`.

    The run is in `directory`, by default a new one in outputs/. If it has been begun there, it goes on. Its lines are
    printed unless `quiet`. Ctrl-C saves a checkpoint and then raises `KeyboardInterrupt`. A diverged run is returned;
    all other failures raise the `UserError` that the command line would print.
    """
    if isinstance(config, Config):
        if config_dir is not None or config_name is not None:
            raise ConfigError("config_dir, config_name: are for overrides; a config depends on no other file")
        place = Path(
            directory or f"{config.paths.outputs or OUTPUTS}/{datetime.now():%Y-%m-%d/%H-%M-%S-%f}-python"
        ).absolute()
        config = copy.deepcopy(config)
        config.world.size = config.world.size if world_size is None else world_size
        rules.check(config, config.world.size or 1)
        check_same(place, config)
        with run_dir.held(place):
            run_dir.save_config(place, config)
            link_in_outputs(place, config.paths.outputs)
        _run(["resume", str(place)], quiet)
        return Run(place)
    overrides = [*config, *([] if world_size is None else [f"world.size={world_size}"])]
    if directory is not None:
        overrides.append(f"hydra.run.dir={quoted(str(directory))}")
    cfg = _composed(overrides, config_dir, config_name)
    place = Path(cfg.hydra.run.dir).absolute()
    files = _files(config_dir, config_name)
    given = [text for text in overrides if not text.startswith("hydra.run.dir=")]
    _run(["train", *files, *given, f"hydra.run.dir={quoted(str(place))}"], quiet)
    return Run(place)


def sweep(
    overrides: Sequence[str],
    config_dir: str | Path | None = None,
    config_name: str | None = None,
    quiet: bool = False,
) -> Sweep:
    """Run the cells of a sweep that have not been run: `gptexp train -m`, such as ["optim.lr=1e-3,2e-3"]."""
    directory, arguments = _multirun(overrides, config_dir, config_name)
    _run(["train", *arguments], quiet)
    return Sweep(directory)


def tune(
    overrides: Sequence[str] = (),
    budget: str | None = None,
    within: float | None = None,
    key: str | None = None,
    range: str | None = None,
    seeds: int | None = None,
    begin_at: str | Path | None = None,
    compare: bool = False,
    law: bool = False,
    config_dir: str | Path | None = None,
    config_name: str | None = None,
    quiet: bool = False,
) -> "Report":
    """Find the best learning rate of each batch size: `gptexp tune`, whose flags have these names.

    `begin_at` is `--from`. Returns the report, whose `answers` have the learning rates and their intervals.
    """
    given = {"budget": budget, "within": within, "from": begin_at, "key": key, "range": range, "seeds": seeds}
    flags = {flag: str(value) for flag, value in given.items() if value is not None}
    of_search = [SWEEPER, *(f"{PREFIX}{flag}={quoted(value)}" for flag, value in flags.items())]
    directory, _ = _multirun([*overrides, *of_search], config_dir, config_name)
    switches = [f"--{flag}" for flag, is_on in {"compare": compare, "law": law, "yes": True}.items() if is_on]
    values = [text for flag, value in flags.items() for text in (f"--{flag}", value)]
    _run(["tune", *_files(config_dir, config_name), *overrides, *values, *switches], quiet)
    return report(directory)


def report(
    directory: str | Path, behind: float | None = None, within: float | None = None, objective: str | None = None
) -> "Report":
    """Write and return the report of a sweep or a run: `gptexp report`."""
    with permanent():
        from gptexp.reporting.page.write import write_report
        from gptexp.reporting.words.thresholds import BEHIND_NATS

    path = Path(located(str(directory)))
    run_dir.require_directory(path, "a run or a sweep")
    return write_report(path, BEHIND_NATS if behind is None else behind, within, objective)[0]


def _composed(
    overrides: Sequence[str], config_dir: str | Path | None, config_name: str | None, multirun: bool = False
) -> DictConfig:
    if isinstance(overrides, str):
        raise ConfigError(
            f"{shown(overrides)}: give a list of overrides, such as [{shown(overrides)}]", "not-an-override"
        )
    if flags := [text for text in overrides if text.startswith("-")]:
        rule = "a flag of the shell; give it by name, such as config_dir=…, or call gptexp.sweep for -m"
        raise ConfigError(f"{flags[0]}: {rule}", "not-an-override")
    register_from_init()
    folder = None if config_dir is None else str(config_dir)
    with composing.hydra_engine(folder) as engine:
        cfg = composing.composition(engine, overrides, folder, multirun, config_name)
        if multirun:
            with permanent():
                from gptexp.sweep.grid import build_sweeper

            from hydra._internal.callbacks import Callbacks

            build_sweeper(cfg, HydraContext(config_loader=engine.config_loader, callbacks=Callbacks()), None)
        elif composing.is_sweep(cfg):
            raise ConfigError("this describes a sweep; use gptexp.sweep", "is-a-sweep")
        else:
            str(cfg.hydra.run.dir)  # here an interpolation that does not resolve is a ConfigError
        return cfg


def _multirun(
    overrides: Sequence[str], config_dir: str | Path | None, config_name: str | None
) -> tuple[Path, list[str]]:
    """The directory of a sweep, and the arguments of its command."""
    cfg = _composed(overrides, config_dir, config_name, multirun=True)
    return Path(cfg.hydra.sweep.dir).absolute(), ["-m", *_files(config_dir, config_name), *overrides]


def _files(config_dir: str | Path | None, config_name: str | None) -> list[str]:
    named: Mapping[str, Any] = {"--config-dir": config_dir, "--config-name": config_name}
    return [text for flag, value in named.items() if value is not None for text in (flag, str(value))]


def _run(arguments: Sequence[str], quiet: bool) -> None:
    """Run a command of gptexp to its end. Raises the error that it has printed, or `KeyboardInterrupt`."""
    with tempfile.TemporaryDirectory(prefix="gptexp-") as folder:
        errors = Path(folder) / "error.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "gptexp", *arguments], env={**os.environ, ERRORS_TO: str(errors)}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
            preexec_fn=start_a_run,
        )  # fmt: skip
        assert process.stdout is not None
        reader = threading.Thread(target=_pass_on, args=(process.stdout, quiet))
        reader.start()
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)  # it may have come from the terminal already: both are one request
            code = process.wait()
        reader.join()
        if code in (0, EXIT_DIVERGED):
            return
        if code > 128:
            raise KeyboardInterrupt
        found = json.loads(errors.read_text())["problems"] if errors.exists() else []
    lines = [Problem(problem["code"], problem["message"]) for problem in found]
    raise ERRORS.get(code, UserError)(lines or f"gptexp {arguments[0]} has ended with code {code}")


def _pass_on(source: IO[str], quiet: bool) -> None:
    """Print the lines of a process as they come. In a notebook a line of a step replaces the one before."""
    live = "ipykernel" in sys.modules
    for line in source:
        if not quiet:
            replaced = live and line.startswith(LIVE)
            print(f"\r{line.rstrip()}" if replaced else line, end="", flush=True)
