"""`train.eval_tasks`: lm_eval in a process of its own."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from gptexp.config.schema import HELLASWAG
from gptexp.process.errors import UserError
from gptexp.process.words import shown
from gptexp.run.own_process import ask


def of_lm_eval(tasks: Sequence[str]) -> list[str]:
    """Those of `tasks` that lm_eval scores, each once."""
    return [task for task in dict.fromkeys(tasks) if task != HELLASWAG]


def score_exported(
    directory: Path, tasks: Sequence[str], device: str, is_stopped: Callable[[], bool]
) -> dict[str, float]:
    """The figures of `tasks` for the model that transformers loads from `directory`, as metrics.

    Raises `UserError` if lm_eval fails. Once `is_stopped()`, ends its process and raises `UserError`.
    """
    [*_, line] = ask_lm_eval(tasks, [str(directory), device], is_stopped).splitlines()
    found = json.loads(line)
    return {f"{task}/{name}": value for task, figures in found.items() for name, value in figures.items()}


def ask_lm_eval(tasks: Sequence[str], more: Sequence[str], is_stopped: Callable[[], bool]) -> str:
    """What `harness` prints. Raises `UserError`."""
    given = f"train.eval_tasks={shown(','.join(tasks))}"
    answer = ask(["gptexp.run.harness", ",".join(tasks), *more], given, "lm_eval", is_stopped)
    if answer is None:
        raise UserError(f"{given}: not scored, because the run stops")
    return answer
