"""The evaluations of a run: those that the training loop measures, and scores of any model on tasks afterwards.

HellaSwag is computed here, every other task by lm_eval on an exported directory. While a run trains, lm_eval has a
process of its own.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gptexp.config.metrics import Metric, of_text
from gptexp.config.rules import NEEDS_END
from gptexp.config.run_plan import RunPlan
from gptexp.config.schema import HELLASWAG, DataConfig
from gptexp.data.cache import downloads_dir
from gptexp.data.downloads import downloaded
from gptexp.data.hellaswag import VALIDATION, read_examples
from gptexp.data.loader import Dataset
from gptexp.data.tokenizer import Tokenizer, load_tokenizer
from gptexp.distributed.group import agree
from gptexp.distributed.ranks import Rank
from gptexp.machine.device import pick_device
from gptexp.model.own_model import Model, device_of
from gptexp.process.errors import ConfigError, UserError, first_line
from gptexp.process.signals import StopRequest
from gptexp.process.terminal import warn
from gptexp.run.harness import evaluate_by_lm_eval, score_exported, task_manager, tasks_of_lm_eval
from gptexp.run.job import Job, Prepared
from gptexp.run.load import load_pretrained
from gptexp.run.own_evaluation import OwnEvaluation
from gptexp.run.sharpness import measure_while_training
from gptexp.storage.checkpoint import TrainState
from gptexp.storage.init_from import Source
from gptexp.training.evaluation import Evaluation, Evaluations, validation_loss
from gptexp.training.hellaswag import score
from gptexp.training.step import TrainStep
from gptexp.training.weight_average import WeightAverage


def build_evaluations(
    job: Job, prepared: Prepared, plan: RunPlan, gpt: Model, step: TrainStep, average: WeightAverage | None
) -> Evaluations:
    """Return the evaluations of the run, in the order in which they are measured.

    To add a metric of the weights, add an `Evaluation` that returns it, and its name to config/metrics.py.
    """
    cfg, rank, device, context = job.cfg.train, job.rank, prepared.device, step.forward_context
    tasks_every = cfg.eval_tasks_every_tokens

    def loss(dataset: Dataset = prepared.dataset) -> float:
        return validation_loss(gpt, dataset, plan.batch.micro_batch_size, rank, device, context)

    def losses_of_texts(_: TrainState) -> dict[str, float]:
        return {of_text(Metric.VAL_LOSS, name): loss(text) for name, text in prepared.dataset.texts.items()}

    def averaged_loss(average: WeightAverage, _: TrainState) -> dict[str, float]:
        with average.in_place_of_weights():
            return {Metric.VAL_LOSS_EMA: loss()}

    def hellaswag(_: TrainState) -> dict[str, float]:
        return score(gpt, prepared.examples, rank, device, context)

    def scores_of_lm_eval(_: TrainState) -> Mapping[str, float]:
        tokenizer = partial(load_tokenizer, job.cfg.data.tokenizer, prepared.dataset.directory)
        found: Mapping[str, float] = agree(
            lambda: score_while_training(gpt, tokenizer, tasks_of_lm_eval(cfg.eval_tasks), device, job.stop),
            rank,
            prepared.long_wait_group,
        )
        return found

    def sharpness(state: TrainState) -> Mapping[str, float | None] | None:
        found: Mapping[str, float | None] | None = agree(
            lambda: measure_while_training(job.directory, state.step, device, job.stop), rank, prepared.long_wait_group
        )
        return found

    evaluations = []
    if len(prepared.dataset.val_starts):
        evaluations.append(Evaluation("validation", plan.eval_every_tokens, lambda _: {Metric.VAL_LOSS: loss()}))
        if prepared.dataset.texts:
            evaluations.append(Evaluation("texts", plan.eval_every_tokens, losses_of_texts))
        if average is not None:
            evaluations.append(Evaluation("average", plan.eval_every_tokens, partial(averaged_loss, average)))
        if HELLASWAG in cfg.eval_tasks:
            evaluations.append(Evaluation("hellaswag", tasks_every, hellaswag))
        if tasks_of_lm_eval(cfg.eval_tasks):
            evaluations.append(Evaluation("lm_eval", tasks_every, scores_of_lm_eval, ends_early=True))
    for entry in cfg.evaluations:
        measure = OwnEvaluation(entry, job, prepared, gpt, plan.batch.micro_batch_size, context).measure
        evaluations.append(Evaluation(f"own {entry['name']}", entry["every_tokens"], measure))
    if cfg.sharpness_every_tokens:
        evaluations.append(Evaluation("sharpness", cfg.sharpness_every_tokens, sharpness, of_checkpoint=True))
    windows = (1 if average is None else 2) * len(prepared.dataset.val_starts)
    windows += sum(len(text.val_starts) for text in prepared.dataset.texts.values())
    return Evaluations(plan, evaluations, windows)


def score_while_training(
    model: Model, tokenizer: Callable[[], Tokenizer], tasks: Sequence[str], device: torch.device, stop: StopRequest
) -> dict[str, float]:
    """The figures of lm_eval's `tasks` for `model`, as metrics. A failure prints a line and gives no metrics.

    If the run must stop, it ends without metrics too: a checkpoint does not wait for scores.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # lm_eval's process needs memory of this GPU
    from gptexp.run.export import save_pretrained  # imports the report, which no start of a run needs

    try:
        with tempfile.TemporaryDirectory(prefix="gptexp-") as folder:
            save_pretrained(model, tokenizer(), Path(folder))
            return score_exported(Path(folder), tasks, str(device), lambda: stop.reason() is not None)
    except Exception as error:  # from lm_eval, a full disk, or a download
        of_others = "" if isinstance(error, UserError) else f"train.eval_tasks: {type(error).__name__}: "
        warn(f"{of_others}{first_line(error)}; training continues")
        return {}


def evaluate_tasks(
    source: Source,
    tasks: Sequence[str],
    hellaswag: Path | None,
    include: Path | None,
    limit: int | None,
    averaged: bool = False,
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The scores of each task, and of each task in a group; and a line for each task that failed.

    `hellaswag` is a file in place of the published one, `include` a folder with more tasks for lm_eval, `limit` the
    number of examples that are taken from the start of each task. `averaged` takes the average of a run's weights.

    Raises `ConfigError`, `CheckpointError` or `DataError`.
    """
    # Loaded before lm_eval, which takes ten seconds to import and would accept a directory without a tokenizer.
    model, tokenizer = load_pretrained(source, averaged)
    others, option = tasks_of_lm_eval(tasks), "--tasks "
    manager = task_manager(others, include, option) if others else None
    if others and tokenizer.eot_token is None:
        raise ConfigError(f"{option}{','.join(others)}: {NEEDS_END}")
    found, problems = dict[str, dict[str, Any]](), list[str]()
    if HELLASWAG in tasks:
        file = hellaswag or downloaded(VALIDATION, downloads_dir(DataConfig()))
        examples = read_examples(file, tokenizer)[:limit]
        scores = score(model, examples, Rank(), device_of(model), nullcontext)
        found[HELLASWAG] = {name.partition("/")[2]: value for name, value in scores.items()}
        found[HELLASWAG]["examples"] = len(examples)
    if others:
        with tempfile.TemporaryDirectory() as folder:
            if source.kind == "run":
                from gptexp.run.export import save_pretrained

                save_pretrained(model, tokenizer, Path(folder))
            directory = Path(folder) if source.kind == "run" else source.path
            device = str(pick_device("auto", Rank()))
            of_others, problems = evaluate_by_lm_eval(directory, others, manager, device, limit, option)
            found |= of_others
    asked = [task for task in tasks if task in found]
    return {task: found[task] for task in dict.fromkeys([*asked, *found])}, problems
