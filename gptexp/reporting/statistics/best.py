"""Runs that stand for a sweep where a command needs single runs: the runs of the cell that the report calls best."""

from collections.abc import Sequence
from pathlib import Path

from gptexp.process.errors import CheckpointError, ConfigError
from gptexp.process.terminal import warn
from gptexp.process.words import counted, shown
from gptexp.reporting.listings.records import Run, find_runs
from gptexp.storage import run_dir


def one_run(directory: Path) -> Path:
    """Return `directory` if it holds a run. If it holds a sweep, return the directory of its best run, named on stderr.

    Raises `ConfigError` if there is no run, and `CheckpointError` if no run of the sweep has a loss that counts.
    """
    if run_dir.is_run(directory):
        return directory
    best = _best_cell_of(directory)[0]
    warn(f"{directory}: its best run is {best.name}, with a validation loss of {best.loss:.4f}")
    return best.directory


def one_checkpoint(given: str, checkpoint: str | None = None, averaged: bool = False) -> tuple[Path, int | None]:
    """The run that `given` names, and the step of its checkpoint whose weights (`averaged`: their average) to load.

    `given` is RUN_DIR or RUN_DIR@CHECKPOINT, or a sweep's directory in place of its best run's. The checkpoint, here or
    in `checkpoint`, is a step, `best` or `last`. The step is None for the newest intact checkpoint. Raises the errors
    of `one_run`, `require_checkpoint` and `choose_step`.
    """
    name, chosen = run_dir.run_and_checkpoint(given)
    if checkpoint is not None and chosen not in (None, checkpoint):
        raise ConfigError(f"--checkpoint={checkpoint}: {given} names another checkpoint; leave out one of them")
    directory = one_run(Path(name))
    run_dir.require_checkpoint(directory, averaged)
    argument = given if checkpoint is None else f"--checkpoint={shown(checkpoint)}"
    return directory, run_dir.choose_step(directory, chosen if checkpoint is None else checkpoint, argument)


def runs_to_compare(directories: Sequence[Path]) -> list[Path]:
    """The runs in `directories`. A sweep stands for all runs of its best cell, which are named on stderr.

    Raises `ConfigError` if fewer than two different directories are given, and the errors of `one_run`.
    """
    if len(directories) < 2:
        run_dir.require_directory(directories[0], "a run or a sweep")
        raise ConfigError(f"{directories[0]}: a single run; give two or more to compare")
    runs: dict[Path, Path] = {}  # resolved path -> path
    for argument in directories:
        cell = [argument]
        if not run_dir.is_run(argument):
            best = _best_cell_of(argument)
            names = ", ".join(run.name for run in best)
            warn(f"{argument}: its best cell is compared, with {counted(len(best), 'run')}: {names}")
            cell = [run.directory for run in best]
        for directory in cell:
            if directory.resolve() in runs:
                raise ConfigError(f"{argument}: stands for {directory}, which is given twice; leave it out")
            runs[directory.resolve()] = directory
    return list(runs.values())


def _best_cell_of(sweep: Path) -> list[Run]:
    runs = find_runs(sweep)
    if best := best_cell(runs):
        return best
    raise CheckpointError(
        f"{sweep}: of its {counted(len(runs), 'run')}, none has completed with a validation loss that counts; give the "
        "directory of a run"
    )


def best_cell(runs: Sequence[Run]) -> list[Run]:
    """The runs of the cell with the lowest mean loss, one for each seed, the lowest loss first; empty if there is none.

    A report has the same best cell, and counts the same runs in it.
    """
    if all(run.loss is None for run in runs):
        return []
    from gptexp.reporting.statistics.analysis import analyse  # scipy takes half a second to import

    by_seed = {run.seed: run for run in analyse("", runs).best_runs}
    return sorted(by_seed.values(), key=lambda run: run.loss or 0.0)
