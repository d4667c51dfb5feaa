"""`train.eval_tasks`: lm_eval in a process of its own, which keeps its imports, memory and failures out of training."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from gptexp.config.schema import HELLASWAG, Config
from gptexp.distributed.ranks import without_launcher
from gptexp.process.errors import ConfigError, UserError
from gptexp.process.signals import PARENT
from gptexp.process.words import shown

POLL_S = 0.2
OWN = "gptexp: "  # begins each line of an error of gptexp


def of_lm_eval(tasks: Sequence[str]) -> list[str]:
    """Those of `tasks` that lm_eval scores, each once."""
    return [task for task in dict.fromkeys(tasks) if task != HELLASWAG]


def require_tasks(configs: Sequence[Config]) -> None:
    """Raise `ConfigError` if a config names a task that lm_eval does not have, or if lm_eval is not installed.

    Takes seconds if one names any of its tasks.
    """
    tasks = of_lm_eval([task for config in configs for task in config.train.eval_tasks])
    if tasks:
        try:
            _ask(tasks, [], lambda: False)
        except UserError as error:
            raise ConfigError(str(error)) from None


def score_exported(
    directory: Path, tasks: Sequence[str], device: str, is_stopped: Callable[[], bool]
) -> dict[str, float]:
    """The figures of `tasks` for the model that transformers loads from `directory`, as metrics.

    Raises `UserError` if lm_eval fails. Once `is_stopped()`, ends its process and raises `UserError`.
    """
    [*_, line] = _ask(tasks, [str(directory), device], is_stopped).splitlines()
    found = json.loads(line)
    return {f"{task}/{name}": value for task, figures in found.items() for name, value in figures.items()}


def _ask(tasks: Sequence[str], more: Sequence[str], is_stopped: Callable[[], bool]) -> str:
    """What `harness` prints in a process of its own. Raises `UserError` with the line of its error."""
    given = f"train.eval_tasks={shown(','.join(tasks))}"
    process = subprocess.Popen(
        [sys.executable, "-m", "gptexp.run.harness", ",".join(tasks), *more],
        env={**without_launcher(os.environ), PARENT: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C reaches only this process, which decides what it means
    )
    try:
        while process.returncode is None:
            if is_stopped():
                raise UserError(f"{given}: not scored, because the run stops")
            with suppress(subprocess.TimeoutExpired):
                output, errors = process.communicate(timeout=POLL_S)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode == 0:
        return output
    if process.returncode < 0:
        raise UserError(f"{given}: lm_eval was killed by {signal.Signals(-process.returncode).name}")
    lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
    told = [text.removeprefix(OWN) for text in lines if text.startswith(OWN)]  # a package may warn after it
    raise UserError(told[-1].removeprefix("config error: ") if told else f"{given}: lm_eval failed ({lines[-1]})")
