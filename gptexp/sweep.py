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
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from gptexp import run_dir
from gptexp.config import Config, fields_of, memory_key, result_deciding
from gptexp.errors import EXIT_DIVERGED, EXIT_FAILED, ConfigError, UserError
from gptexp.terminal import say

# The name under which Hydra finds this module: it instantiates plugins of packages below hydra_plugins only.
PLUGINS = "hydra_plugins.gptexp"

OUTCOMES = ("completed", "diverged")  # a cell with one of these is done: again it would do the same


class GridSweeper(Sweeper):
    """All combinations of the swept values, named (`hydra.sweeper.params`) or given on the command line."""

    __module__ = PLUGINS

    def __init__(self, params: dict[str, str] | None) -> None:
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

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose and check all cells, then run them in order. Exits with 1 at the end if one failed."""
        setup_globals()
        sweep_dir = Path(self.config.hydra.sweep.dir)
        cells = self._compose(job_overrides, initial_job_idx)
        returns: list[JobReturn] = []
        failed = 0
        for number, (config, name, key) in enumerate(cells, 1):
            directory = sweep_dir / name
            say(f"--- cell {number} of {len(cells)}: {name}")
            if run_dir.status(directory) in OUTCOMES:
                say(f"{run_dir.status(directory)} before; {directory}")
                continue
            _share(_decided(sweep_dir, key), directory / run_dir.EFFECTIVE)
            result = run_job(
                hydra_context=self.context,
                task_function=self.task,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
            _share(run_dir.read_json(directory / run_dir.EFFECTIVE), sweep_dir / run_dir.EFFECTIVE)
            if result.status == JobStatus.FAILED:
                # A defect of gptexp in the parent; the cell's own failures come back as exit codes.
                result.return_value  # noqa: B018  raises it
            returns.append(result)
            failed += result.return_value not in (0, EXIT_DIVERGED)
        self._print_outcomes([name for _, name, _ in cells])
        if failed:
            print(f"gptexp: {failed} of {len(cells)} cells failed", file=sys.stderr)
            raise SystemExit(EXIT_FAILED)
        return returns

    def _print_outcomes(self, names: list[str]) -> None:
        """Status and final validation loss of every cell."""
        sweep_dir = Path(self.config.hydra.sweep.dir)
        say(f"--- {len(names)} cells in {sweep_dir}")
        for name in names:
            summary = run_dir.read_json(sweep_dir / name / run_dir.SUMMARY)
            loss = summary.get("final_val_loss")
            shown = f"val loss {loss:.4f}" if loss is not None else ""
            say(f"{summary.get('status', 'failed'):<12} {shown:<16} {name}")

    def _compose(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[tuple[DictConfig, str, str]]:
        """Of every cell its config, the name of its directory, and its `memory_key`."""
        from gptexp.compose import refuse_foreign_code, report_errors, to_config

        swept = swept_keys(self.config)
        composed: list[tuple[DictConfig, Config, dict[str, str]]] = []
        problems: dict[str, list[str]] = {}  # line -> the cells it is true of
        with report_errors():
            if not job_overrides:
                raise ConfigError("the grid has no cells; give at least one value of each swept key")
            for number, overrides in enumerate(job_overrides, first):
                cell = self.context.config_loader.load_sweep_config(self.config, list(overrides))
                values = {key: value for key, _, value in (text.partition("=") for text in overrides) if key in swept}
                try:
                    refuse_foreign_code(cell, self.config)  # which was looked at before Hydra began
                    config = to_config(cell, overrides)
                except ConfigError as error:
                    of = " ".join(f"{key}={value}" for key, value in values.items())
                    for line in error.problems:
                        problems.setdefault(line, []).append(of)
                    continue
                with open_dict(cell):
                    cell.hydra.job.id = f"{number}"
                    cell.hydra.job.num = number
                    cell.hydra.sweep.dir = self.config.hydra.sweep.dir
                    cell.sweep.name = self.config.sweep.name
                    cell.sweep.cells = len(job_overrides)
                composed.append((cell, config, values))
            if problems:
                raise ConfigError([_of_cells(line, of, len(job_overrides)) for line, of in problems.items()])
            # Only now, with every cell legal, may a corpus be tokenised to learn what its cells are called.
            cells = []
            for cell, config, values in composed:
                name = cell_name(config, values)
                run_dir.check_free(Path(self.config.hydra.sweep.dir, name), config)
                with open_dict(cell):
                    cell.hydra.sweep.subdir = name
                cells.append((cell, name, memory_key(config)))
        return cells


def _decided(sweep_dir: Path, key: str) -> dict[str, Any]:
    """What a cell begins with: the sweep's decisions, by preference with a micro-batch size found for its needs."""
    of_cells = (run_dir.read_json(path) for path in sorted(sweep_dir.glob(f"*/{run_dir.EFFECTIVE}")))
    same = (effective for effective in of_cells if effective.get("memory_key") == key)
    return next(same, run_dir.read_json(sweep_dir / run_dir.EFFECTIVE))


def _share(effective: dict[str, Any], target: Path) -> None:
    """Let `target` begin with these decisions, unless it has its own: a sweep decides once for its cells."""
    if effective and not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        run_dir.write_json(target, effective)


def _of_cells(line: str, cells: list[str], total: int) -> str:
    """A problem's line with the cells that have it."""
    if len(cells) == total:
        return f"{line} (all {total} cells)" if total > 1 else line
    more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
    return f"{line} (cell {cells[0]}{more})"


def swept_keys(config: DictConfig) -> list[str]:
    """The keys that a multirun varies, in the order given: the command line wins over the sweeper's `params`."""
    params = config.hydra.sweeper.get("params") or {}
    texts = [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
    parser = OverridesParser.create()
    overrides = {override.key_or_group: override for override in map(parser.parse_override, texts)}
    return [key for key, override in overrides.items() if override.is_sweep_override()]


def cell_name(config: Config, swept: dict[str, str]) -> str:
    """Directory of a cell: its swept values readably, and a hash of all that decides the result and of them.

    Values count as composed, so 6e-4 and 0.0006 are one cell; the text counts as its tokens, wherever it lies.
    """
    composed = {key: value for key, _, value in fields_of(config)}
    # Groups and paths as they were typed: an option's name, and not the folders that lead to a file.
    as_typed = ("data.path", "data.val_path")
    values = {key: text if key in as_typed else composed.get(key, text) for key, text in swept.items()}
    identity = {**result_deciding(config), "data": _data_identity(config), "swept": values}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:8]
    readable = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
    return re.sub(r"[^A-Za-z0-9._=,-]", "_", f"{readable[:80]}-{digest}" if readable else digest)


def _data_identity(config: Config) -> str:
    """The hash of the tokens; of text that cannot be read, its path: that cell will say what is wrong."""
    from gptexp.data.prepare import data_hash

    try:
        return data_hash(config.data)
    except UserError:
        return f"{config.data.path} {config.data.val_path}"


def name_sweep(config: DictConfig) -> None:
    """Give an unnamed sweep the name that the same or a widened grid will have again; refuse another launcher.

    It depends on which keys are swept, not on their values, and on the value of every other key that decides results.
    """
    from gptexp.compose import job_of

    for part in ("launcher", "sweeper"):
        if not config.hydra[part]._target_.startswith(f"{PLUGINS}."):
            raise ConfigError(
                f"hydra/{part}={config.hydra.runtime.choices[f'hydra/{part}']}: not supported; leave it out"
            )
    if config.sweep.name is not None:
        return
    swept = sorted(swept_keys(config))
    fixed = {
        k: v for k, v in result_deciding(job_of(config)).items() if k not in swept and k.split(".")[0] not in swept
    }
    if "model" in swept:
        fixed.pop("optim.lr", None)  # comes with the model
    identity = json.dumps({**fixed, "swept": swept, "data": [config.data.path, config.data.val_path]}, default=str)
    with open_dict(config):
        config.sweep.name = f"sweep-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
