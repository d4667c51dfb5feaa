"""Scores on tasks: HellaSwag is computed here, every other task by lm_eval on an exported directory.

`gptexp evaluate … --tasks` computes all of them in one process. While a run trains, lm_eval has one of its own.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from gptexp.config.schema import HELLASWAG, DataConfig
from gptexp.data.cache import downloads_dir
from gptexp.data.downloads import downloaded
from gptexp.data.hellaswag import VALIDATION, read_examples
from gptexp.data.tokenizer import Tokenizer
from gptexp.distributed.ranks import Rank
from gptexp.machine.device import pick_device
from gptexp.model.gpt import GPT
from gptexp.process.errors import UserError, first_line
from gptexp.process.signals import StopRequest
from gptexp.process.terminal import warn
from gptexp.run.export import save_pretrained
from gptexp.run.harness import evaluate_by_lm_eval, score_exported, task_manager, tasks_of_lm_eval
from gptexp.run.load import load_pretrained
from gptexp.storage.init_from import Source
from gptexp.training.hellaswag import score


def evaluate_tasks(
    source: Source,
    tasks: Sequence[str],
    hellaswag: Path | None,
    include: Path | None,
    limit: int | None,
    averaged: bool = False,
) -> dict[str, dict[str, Any]]:
    """The scores of each task, and of each task in a group.

    `hellaswag` is a file in place of the published one, `include` a folder with more tasks for lm_eval, `limit` the
    number of examples that are taken from the start of each task. `averaged` takes the average of a run's weights.

    Raises `ConfigError`, `CheckpointError` or `DataError`.
    """
    # lm_eval, which takes ten seconds to import, would take any directory, also one without a tokenizer.
    model, tokenizer = load_pretrained(source, averaged)
    others, option = tasks_of_lm_eval(tasks), "--tasks "
    manager = task_manager(others, include, option) if others else None
    found: dict[str, dict[str, Any]] = {}
    if HELLASWAG in tasks:
        file = hellaswag or downloaded(VALIDATION, downloads_dir(DataConfig()))
        examples = read_examples(file, tokenizer)[:limit]
        scores = score(model, examples, Rank(), model.wte.weight.device, nullcontext)
        found[HELLASWAG] = {name.partition("/")[2]: value for name, value in scores.items()}
        found[HELLASWAG]["examples"] = len(examples)
    if others:
        with tempfile.TemporaryDirectory() as folder:
            if source.kind == "run":
                save_pretrained(model, tokenizer, Path(folder))
            directory = Path(folder) if source.kind == "run" else source.path
            found |= evaluate_by_lm_eval(directory, others, manager, str(pick_device("auto", Rank())), limit, option)
    asked = [task for task in tasks if task in found]
    return {task: found[task] for task in dict.fromkeys([*asked, *found])}


def score_while_training(
    model: GPT, tokenizer: Callable[[], Tokenizer], tasks: Sequence[str], device: torch.device, stop: StopRequest
) -> dict[str, float]:
    """The figures of lm_eval's `tasks` for `model`, as metrics. A failure prints a line and gives no metrics.

    Ends without them too when the run is to stop: a checkpoint does not wait for scores.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # lm_eval's process needs memory of this GPU
    try:
        with tempfile.TemporaryDirectory(prefix="gptexp-") as folder:
            save_pretrained(model, tokenizer(), Path(folder))
            return score_exported(Path(folder), tasks, str(device), lambda: stop.reason() is not None)
    except Exception as error:  # of lm_eval, of a full disk, of a download
        of_others = "" if isinstance(error, UserError) else f"train.eval_tasks: {type(error).__name__}: "
        warn(f"{of_others}{first_line(error)}; training continues")
        return {}
