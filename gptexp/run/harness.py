"""The tasks of lm_eval (EleutherAI's lm-evaluation-harness). No other file imports it.

A run scores `train.eval_tasks` in a process of its own: `python -m gptexp.run.harness TASK,TASK [DIRECTORY DEVICE]`
refuses an unknown task and, given a directory, prints the figures as JSON. The functions that ask this process do not
import lm_eval, which takes ten seconds.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gptexp.config.schema import HELLASWAG
from gptexp.process.errors import ConfigError, DataError, UserError, first_line
from gptexp.process.terminal import run_verb, warn
from gptexp.process.words import shown
from gptexp.run.own_process import ask, die_with_asker

BATCH_SIZE = 8
LOGGERS = ("lm_eval", "transformers", "datasets", "huggingface_hub")  # the last logs every attempt to reach the network


def tasks_of_lm_eval(tasks: Sequence[str]) -> list[str]:
    """The tasks among `tasks` that lm_eval scores, each once."""
    return [task for task in dict.fromkeys(tasks) if task != HELLASWAG]


def score_exported(
    directory: Path, tasks: Sequence[str], device: str, is_stopped: Callable[[], bool]
) -> dict[str, float]:
    """The figures of `tasks` for the model that transformers loads from `directory`, as metrics.

    Prints a line for a task that fails. Raises `UserError` if all do, or if `is_stopped()` becomes true: then it ends
    lm_eval's process.
    """
    [*_, line] = ask_lm_eval(tasks, [str(directory), device], is_stopped).splitlines()
    found, problems = json.loads(line)
    for problem in problems:
        warn(f"{problem}; training continues")
    return {f"{task}/{name}": value for task, figures in found.items() for name, value in figures.items()}


def ask_lm_eval(tasks: Sequence[str], more: Sequence[str], is_stopped: Callable[[], bool]) -> str:
    """Run this file as a program, and return what it prints. Raises `UserError`."""
    given = f"train.eval_tasks={shown(','.join(tasks))}"
    answer = ask(["gptexp.run.harness", ",".join(tasks), *more], given, "lm_eval", is_stopped)
    if answer is None:
        raise UserError(f"{given}: not scored, because the run stops")
    return answer


def task_manager(tasks: Sequence[str], include: Path | None, option: str) -> Any:
    """lm_eval's `TaskManager`, which knows its own tasks and those in the folder `include`.

    Raises `ConfigError` unless it knows all `tasks`. Errors begin with `option`, the option that named the tasks.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ConfigError(
            f"{option}{','.join(tasks)}: needs the package lm_eval; run: pip install 'gptexp[eval]'"
        ) from None
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    manager = TaskManager(include_path=None if include is None else str(include))
    for task in tasks:
        if task not in manager.all_tasks:
            raise ConfigError(f"{option}{shown(task)}: lm_eval has no such task; lm-eval ls tasks lists them")
    return manager


def evaluate_by_lm_eval(
    directory: Path, tasks: Sequence[str], manager: Any, device: str, limit: int | None, option: str
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The figures of each task for the model that transformers loads from `directory`, in float32; and what failed.

    For a group or a tag of lm_eval, these are the figures of its tasks. HellaSwag in it becomes `lm_eval/hellaswag`,
    because its figures do not compare with those of gptexp. A task that fails, for example because its data cannot be
    downloaded, costs the others nothing: the second result has a line for it. Raises `DataError` if all of them fail.
    """
    import lm_eval
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    class Model(HFLM):  # type: ignore[misc]  # the package has no types
        def _loglikelihood_tokens(self, requests: Any, *more: Any, **named: Any) -> Any:
            longest = max((len(ids) for _, _, ids in requests), default=0)
            if longest > self.max_length:
                raise DataError(f"an answer has {longest} tokens, and model.block_size is {self.max_length}")
            return super()._loglikelihood_tokens(requests, *more, **named)

    evaluator.get_git_commit_hash = lambda: None  # it prints git's error outside of a repository
    figures, problems = dict[str, dict[str, Any]](), list[str]()
    model = None
    for task in tasks:
        try:
            with _quiet():
                model = model or Model(pretrained=str(directory), dtype="float32", batch_size=BATCH_SIZE, device=device)
                answer = lm_eval.simple_evaluate(model, tasks=[task], task_manager=manager, limit=limit)
            figures |= {name: _figures(result) for name, result in answer["results"].items()}
        except Exception as error:  # from the network, a data set, or a task
            why = "" if isinstance(error, UserError) else f"lm_eval failed ({type(error).__name__}): "
            # In all packages that lm_eval uses, errors of the network are `OSError`s.
            offline = "; without a network it needs the data sets in the cache of the package datasets"
            problems.append(f"{option}{task}: {why}{first_line(error)}{offline if isinstance(error, OSError) else ''}")
    if len(problems) == len(tasks):
        raise DataError(problems)
    scored = {f"lm_eval/{name}" if name == HELLASWAG else name: found for name, found in figures.items() if found}
    return scored, problems


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard what the body prints to stderr (progress bars, warnings), unless stderr is a terminal."""
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


def main(argv: list[str]) -> None:
    """Check the tasks that a config names, and score the model in a directory, if one is given."""
    die_with_asker()
    tasks, option = argv[0].split(","), "train.eval_tasks="
    manager = task_manager(tasks, None, option)
    if argv[1:]:
        directory, device = argv[1:]
        print(json.dumps(evaluate_by_lm_eval(Path(directory), tasks, manager, device, None, option)))  # the last line


if __name__ == "__main__":
    run_verb(main)
