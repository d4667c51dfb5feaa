"""Hydra's multirun: a grid sweeper that composes and checks every cell first, and a launcher that runs them.

Registered in code (`compose.register`), as plugins of Hydra must otherwise live in a package of their own.
"""

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from gptexp import run_dir
from gptexp.config import Config, result_deciding
from gptexp.errors import EXIT_DIVERGED, EXIT_FAILED, ConfigError

# The name under which Hydra finds this module: it instantiates plugins of packages below hydra_plugins only.
PLUGINS = "hydra_plugins.gptexp"


class GridSweeper(Sweeper):
    """All combinations of the swept values, named (`hydra.sweeper.params`) or given on the command line."""

    __module__ = PLUGINS

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None) -> None:
        self.max_batch_size = max_batch_size
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from hydra.core.plugins import Plugins

        self.config = config
        self.loader = hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the grid; what the command line gives wins over `params` of the same key."""
        texts = [f"{key}={value}" for key, value in self.params.items()]
        overrides = OverridesParser.create(config_loader=self.loader).parse_overrides([*texts, *arguments])
        [cells] = BasicSweeper.split_arguments(overrides, max_batch_size=None)
        assert self.launcher is not None
        return [self.launcher.launch(cells, initial_job_idx=0)]


class CellLauncher(Launcher):
    """One cell after the other, each in fresh processes; a cell that fails costs itself only."""

    __module__ = PLUGINS

    def __init__(self) -> None:
        self.outcomes: list[tuple[str, int]] = []

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose and check all cells, then run them in order. Exits with 1 at the end if one failed."""
        setup_globals()
        swept = swept_keys(job_overrides)
        cells = self._compose(job_overrides, initial_job_idx, swept)
        returns: list[JobReturn] = []
        failed = []
        for number, (config, name) in enumerate(cells, 1):
            directory = Path(self.config.hydra.sweep.dir, name)
            print(f"--- cell {number} of {len(cells)}: {name}", flush=True)
            if run_dir.status(directory) == "completed":
                print(f"completed before; {directory}", flush=True)
                continue
            result = run_job(
                hydra_context=self.context,
                task_function=self.task,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
            if result.status == JobStatus.FAILED:
                # A defect of gptexp in the parent; the cell's own failures come back as exit codes.
                result.return_value  # noqa: B018  raises it
            returns.append(result)
            if result.return_value not in (0, EXIT_DIVERGED):
                failed.append(f"{name} (exit code {result.return_value})")
        if failed:
            print(f"gptexp: {len(failed)} of {len(cells)} cells failed: {', '.join(failed)}", file=sys.stderr)
            raise SystemExit(EXIT_FAILED)
        print(f"all {len(cells)} cells are done; {self.config.hydra.sweep.dir}")
        return returns

    def _compose(
        self, job_overrides: Sequence[Sequence[str]], first: int, swept: list[str]
    ) -> list[tuple[DictConfig, str]]:
        from gptexp.compose import report_errors, to_config

        cells: list[tuple[DictConfig, str]] = []
        problems: dict[str, list[str]] = {}  # line -> the cells it is true of
        with report_errors():
            if not job_overrides:
                raise ConfigError("the grid has no cells; give at least one value of each swept key")
            for number, overrides in enumerate(job_overrides, first):
                composed = self.context.config_loader.load_sweep_config(self.config, list(overrides))
                try:
                    config = to_config(composed)
                    name = cell_name(config, {o.split("=", 1)[0]: o.split("=", 1)[1] for o in overrides}, swept)
                    run_dir.check_reusable(Path(self.config.hydra.sweep.dir, name), config)
                except ConfigError as error:
                    values = " ".join(filter_overrides([o for o in overrides if o.split("=")[0] in swept]))
                    for line in error.problems:
                        problems.setdefault(line, []).append(values)
                    continue
                with open_dict(composed):
                    composed.hydra.job.id = f"{number}"
                    composed.hydra.job.num = number
                    composed.hydra.sweep.dir = self.config.hydra.sweep.dir
                    composed.hydra.sweep.subdir = name
                cells.append((composed, name))
            if problems:
                raise ConfigError([_of_cells(line, of, len(job_overrides)) for line, of in problems.items()])
        return cells


def _of_cells(line: str, cells: list[str], total: int) -> str:
    """A problem's line with the cells that have it."""
    if len(cells) == total:
        return f"{line} (all {total} cells)" if total > 1 else line
    more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
    return f"{line} (cell {cells[0]}{more})"


def swept_keys(job_overrides: Sequence[Sequence[str]]) -> list[str]:
    """The keys that take more than one value over the cells, in the order given."""
    values: dict[str, set[str]] = {}
    for overrides in job_overrides:
        for text in overrides:
            key, _, value = text.partition("=")
            values.setdefault(key, set()).add(value)
    return [key for key, seen in values.items() if len(seen) > 1]


def cell_name(config: Config, overrides: dict[str, str], swept: list[str]) -> str:
    """Directory of a cell: its swept values readably, and a hash of all that decides the result and of them."""
    identity = {**result_deciding(config), "swept": {key: overrides[key] for key in swept}}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    readable = ",".join(f"{key.rpartition('.')[2]}={overrides[key]}" for key in swept)
    return re.sub(r"[^A-Za-z0-9._=,-]", "_", f"{readable[:80]}-{digest}" if readable else digest)


def name_sweep(config: DictConfig) -> None:
    """Give an unnamed sweep the name that the same or a widened grid will have again."""
    if config.sweep.name is not None:
        return
    from gptexp.compose import job_of

    # Hydra leaves swept values out of this base composition, so widening a grid does not change it.
    identity = json.dumps(result_deciding(job_of(config)), sort_keys=True)
    with open_dict(config):
        config.sweep.name = f"sweep-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
