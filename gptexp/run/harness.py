"""The tasks of lm_eval (EleutherAI's lm-evaluation-harness). No other file imports it."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptexp.process.errors import ConfigError, DataError, first_line
from gptexp.process.words import shown

BATCH_SIZE = 8


def task_manager(tasks: Sequence[str], include: Path | None) -> Any:
    """What knows lm_eval's tasks, and those in the folder `include`. Raises `ConfigError` unless it knows `tasks`."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ConfigError(
            f"--tasks {','.join(tasks)}: needs the package lm_eval; run: pip install 'gptexp[eval]'"
        ) from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=None if include is None else str(include))
    for task in tasks:
        if task not in manager.all_tasks:
            raise ConfigError(f"--tasks {shown(task)}: lm_eval has no such task; lm-eval ls tasks lists them")
    return manager


def evaluate(
    directory: Path, tasks: Sequence[str], manager: Any, device: str, limit: int | None
) -> dict[str, dict[str, Any]]:
    """The figures of each task for the model that transformers loads from `directory`, in float32.

    Raises `DataError` if a task fails, for example because its data cannot be downloaded.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    try:
        model = HFLM(pretrained=str(directory), dtype="float32", batch_size=BATCH_SIZE, device=device)
        answer = lm_eval.simple_evaluate(model, tasks=list(tasks), task_manager=manager, limit=limit)
    except Exception as error:  # of the network, of a data set, of a task
        raise DataError(
            f"--tasks {','.join(tasks)}: lm_eval failed ({type(error).__name__}: {first_line(error)}); without a "
            "network it needs the data sets in the cache of the package datasets"
        ) from None
    return {task: _figures(answer["results"][task]) for task in tasks}


def _figures(result: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a task under their usual names: lm_eval writes `acc,none` for `acc` without a filter."""
    return {name.removesuffix(",none"): value for name, value in result.items() if isinstance(value, int | float)}
