"""How the cells of a sweep run on this machine, side by side, and on the ranks of torchrun or srun."""

import time
from collections.abc import Sequence
from typing import Protocol

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from gptexp.config.schema import AUTO, Config
from gptexp.distributed.ranks import launcher_rank
from gptexp.process.errors import EXIT_DIVERGED, ConfigError, InUseError
from gptexp.process.words import counted
from gptexp.run.pool import Places, Process, Source, require_devices, run_all, start_here, visible_gpus
from gptexp.sweep.cells import PLUGINS, Cell

POLL_S = 1.0  # s: between two looks at cells that run elsewhere


class CellSource(Source[Cell], Protocol):
    """The interface of a sweeper that launchers use."""

    def claim(self, cell: Cell, runs: bool = False) -> None:
        """Reserve a cell, which may run as a job, until `ended`. Raises `InUseError` if another process runs it."""

    def begins(self, cell: Cell, where: str = "") -> int:
        """Announce a cell and prepare its directory; under torchrun or srun also train it. Returns the exit code."""

    def announce(self, cell: Cell, how: str) -> None:
        """Print the number and name of a cell, and how it runs."""


class CellLauncher(Launcher):
    """Runs each cell in new processes, several at once if there are GPUs; under torchrun or srun, on its ranks.

    In new processes, a cell that fails does not stop the others.
    """

    __module__ = PLUGINS
    among_ranks = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        raise NotImplementedError("gptexp's sweepers call `run`, which takes the cells one by one")

    def check(self, configs: Sequence[Config]) -> None:
        """Decide how many cells run at once. Raises `ConfigError` if they cannot run here."""
        parallel = configs[0].sweep.parallel
        self.among_ranks = launcher_rank() is not None
        if self.among_ranks:
            if parallel not in (AUTO, 1):
                raise ConfigError(f"sweep.parallel={parallel}: torchrun and srun run one cell at a time; leave it out")
            return
        require_devices(configs)
        self.room = self.places(configs)

    def places(self, configs: Sequence[Config]) -> Places:
        """Return how many cells run at once, and on which GPUs."""
        return side_by_side(configs)

    def run(self, cells: CellSource) -> int | None:
        """Run all cells. Returns the number of the signal that stopped the sweep, or None.

        Under torchrun or srun the ranks train one cell after another; a rank that fails or is stopped ends the sweep.
        """
        self.cells = cells
        if not self.among_ranks:
            return run_all(cells, self, self.room)
        while True:
            cell = cells.waiting.pop(0) if cells.waiting else cells.more()
            if cell is None:
                if not cells.elsewhere:
                    return None
                time.sleep(POLL_S)
                continue
            try:
                cells.claim(cell)
                code = cells.begins(cell)
            except InUseError:
                cells.set_aside(cell)
                continue
            if code not in (0, EXIT_DIVERGED):
                raise SystemExit(code)
            cells.ended(cell, code)
            cells.share_decisions()

    def begin(self, cell: Cell, gpus: Sequence[str]) -> None:
        """Prepare the directory of a cell; for `run_all`."""
        self.cells.claim(cell)
        self.cells.begins(cell, f" on GPU {', '.join(gpus)}" if gpus else "")

    def start(self, cell: Cell, gpus: Sequence[str], at_once: int) -> Process:
        """Start the processes of a cell; for `run_all`."""
        return start_here(cell, gpus, at_once)


def side_by_side(configs: Sequence[Config]) -> Places:
    """Return how many cells run at once on this machine, and its GPUs if it has any.

    Raises `ConfigError` if `sweep.parallel` needs more GPUs than there are.
    """
    parallel, sizes = configs[0].sweep.parallel, [config.world.size or 1 for config in configs]
    devices = {config.train.device for config in configs}
    gpus = visible_gpus() if devices <= {"auto", "cuda"} else []
    if not gpus:
        return Places(parallel if isinstance(parallel, int) else 1)
    fit = max(1, len(gpus) // max(sizes))
    if isinstance(parallel, int) and parallel > fit:
        raise ConfigError(
            f"sweep.parallel={parallel}: needs {counted(parallel * max(sizes), 'GPU')}, up to {max(sizes)} per cell; "
            f"visible GPUs: {len(gpus)}; use at most {fit}, or auto"
        )
    most = max(1, len(gpus) // min(sizes))  # an upper bound: a cell also waits until enough GPUs are free
    return Places(parallel if isinstance(parallel, int) else most, gpus)
