"""The tasks of lm_eval (EleutherAI's lm-evaluation-harness). No other file imports it."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gptexp.process.errors import ConfigError, DataError, first_line
from gptexp.process.words import shown

BATCH_SIZE = 8
LOGGERS = ("lm_eval", "transformers", "datasets", "huggingface_hub")  # the last logs every attempt to reach the network


def task_manager(tasks: Sequence[str], include: Path | None) -> Any:
    """What knows lm_eval's tasks, and those in the folder `include`. Raises `ConfigError` unless it knows `tasks`."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ConfigError(
            f"--tasks {','.join(tasks)}: needs the package lm_eval; run: pip install 'gptexp[eval]'"
        ) from None
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    manager = TaskManager(include_path=None if include is None else str(include))
    for task in tasks:
        if task not in manager.all_tasks:
            raise ConfigError(f"--tasks {shown(task)}: lm_eval has no such task; lm-eval ls tasks lists them")
    return manager


def evaluate(
    directory: Path, tasks: Sequence[str], manager: Any, device: str, limit: int | None
) -> dict[str, dict[str, Any]]:
    """The figures of each task for the model that transformers loads from `directory`, in float32.

    A group or a tag of lm_eval gives those of its tasks. Raises `DataError` if a task fails, for example because its
    data cannot be downloaded.
    """
    import lm_eval
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    evaluator.get_git_commit_hash = lambda: None  # it prints git's error outside of a repository
    try:
        with _quiet():
            model = HFLM(pretrained=str(directory), dtype="float32", batch_size=BATCH_SIZE, device=device)
            answer = lm_eval.simple_evaluate(model, tasks=list(tasks), task_manager=manager, limit=limit)
    except Exception as error:  # of the network, of a data set, of a task
        # Errors of the network are `OSError`s in all of its packages.
        offline = "; without a network it needs the data sets in the cache of the package datasets"
        raise DataError(
            f"--tasks {','.join(tasks)}: lm_eval failed ({type(error).__name__}: {first_line(error)})"
            f"{offline if isinstance(error, OSError) else ''}"
        ) from None
    figures = {name: _figures(result) for name, result in answer["results"].items()}
    return {name: found for name, found in figures.items() if found}


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard what the body prints to stderr, progress bars and warnings, unless people read it on a terminal."""
    if sys.stderr.isatty():
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _figures(result: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a task under their usual names: lm_eval writes `acc,none` for `acc` without a filter."""
    return {name.removesuffix(",none"): value for name, value in result.items() if isinstance(value, int | float)}
