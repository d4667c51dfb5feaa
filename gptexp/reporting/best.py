"""Runs for commands that need single ones: the best run of a sweep stands for the sweep."""

from collections.abc import Sequence
from pathlib import Path

from gptexp.config.schema import counted
from gptexp.process.errors import CheckpointError, ConfigError
from gptexp.process.terminal import warn
from gptexp.reporting.records import Run, find_runs
from gptexp.storage import run_dir


def one_run(directory: Path) -> Path:
    """Return `directory` if it is a run's. If it is a sweep's, return that of its best run, and name it on stderr.

    Raises `ConfigError` if there is no run, and `CheckpointError` if no run of the sweep has a loss that counts.
    """
    if run_dir.is_run(directory):
        return directory
    runs = find_runs(directory)
    best = best_run(runs)
    if best is None:
        raise CheckpointError(
            f"{directory}: of its {counted(len(runs), 'run')}, none has completed with a validation loss that counts; "
            "give the directory of a run"
        )
    warn(f"{directory}: its best run is {best.name}, with a validation loss of {best.loss:.4f}")
    return best.directory


def distinct_runs(directories: Sequence[Path]) -> list[Path]:
    """`one_run` of each of `directories`. Raises `ConfigError` if these are fewer than two different runs."""
    if len(directories) < 2:
        raise ConfigError(f"{directories[0]}: a single run; give two or more to compare")
    found: dict[Path, Path] = {}
    for given in directories:
        directory = one_run(given)
        if directory.resolve() in found:
            raise ConfigError(f"{given}: stands for {directory}, which is given twice; leave it out")
        found[directory.resolve()] = directory
    return list(found.values())


def best_run(runs: Sequence[Run]) -> Run | None:
    """The run with the lowest final validation loss in the best cell of a report: that with the lowest mean loss."""
    if all(run.loss is None for run in runs):
        return None
    from gptexp.reporting.analysis import analyse  # scipy takes half a second to import

    of_loss = {run.loss: run for run in analyse("", runs).best_runs if run.loss is not None}
    return of_loss[min(of_loss)] if of_loss else None
