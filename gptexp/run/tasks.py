"""`gptexp evaluate … --tasks`: HellaSwag here, every other task by lm_eval on an exported directory."""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gptexp.config.schema import HELLASWAG, DataConfig
from gptexp.data.downloads import downloaded
from gptexp.data.hellaswag import VALIDATION, read_examples
from gptexp.data.prepare import downloads_dir
from gptexp.distributed.ranks import Rank
from gptexp.machine.device import pick_device
from gptexp.run import harness
from gptexp.run.export import save_pretrained
from gptexp.run.load import load_pretrained
from gptexp.storage.init_from import Source
from gptexp.training.hellaswag import score


def evaluate_tasks(
    source: Source, tasks: Sequence[str], hellaswag: Path | None, include: Path | None, limit: int | None
) -> dict[str, dict[str, Any]]:
    """The scores of each task, and of each task in a group.

    `hellaswag` is a file in place of the published one, `include` a folder with more tasks for lm_eval, `limit` the
    number of examples that are taken from the start of each task.

    Raises `ConfigError`, `CheckpointError` or `DataError`.
    """
    others = [task for task in tasks if task != HELLASWAG]
    manager = harness.task_manager(others, include) if others else None
    found: dict[str, dict[str, Any]] = {}
    model, tokenizer = load_pretrained(source)  # lm_eval alone would take any directory, also one without a tokenizer
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
            found |= harness.evaluate(directory, others, manager, str(pick_device("auto", Rank())), limit)
    asked = [task for task in tasks if task in found]
    return {task: found[task] for task in dict.fromkeys([*asked, *found])}
