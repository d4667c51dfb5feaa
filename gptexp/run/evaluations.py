"""The evaluations of a run: the list that the training loop measures."""

from collections.abc import Mapping
from functools import partial

from gptexp.config.metrics import Metric
from gptexp.config.run_plan import RunPlan
from gptexp.config.schema import HELLASWAG
from gptexp.data.tokenizer import load_tokenizer
from gptexp.distributed.group import agree
from gptexp.model.gpt import GPT
from gptexp.run.harness import tasks_of_lm_eval
from gptexp.run.job import Job, Prepared
from gptexp.run.sharpness import measure_while_training
from gptexp.storage.checkpoint import TrainState
from gptexp.training.evaluation import Evaluation, Evaluations, validation_loss
from gptexp.training.hellaswag import score
from gptexp.training.step import TrainStep
from gptexp.training.weight_average import WeightAverage


def build_evaluations(
    job: Job, prepared: Prepared, plan: RunPlan, gpt: GPT, step: TrainStep, average: WeightAverage | None
) -> Evaluations:
    """Return the evaluations of the run, in the order in which they are measured.

    To add a metric of the weights, add an `Evaluation` that returns it, and its name to config/metrics.py.
    """
    cfg, rank, device, context = job.cfg.train, job.rank, prepared.device, step.forward_context
    tasks_every = cfg.eval_tasks_every_tokens

    def loss() -> float:
        return validation_loss(gpt, prepared.dataset, plan.batch.micro_batch_size, rank, device, context)

    def averaged_loss(average: WeightAverage, _: TrainState) -> dict[str, float]:
        with average.in_place_of_weights():
            return {Metric.VAL_LOSS_EMA: loss()}

    def hellaswag(_: TrainState) -> dict[str, float]:
        return score(gpt, prepared.examples, rank, device, context)

    def scores_of_lm_eval(_: TrainState) -> Mapping[str, float]:
        from gptexp.run.tasks import score_while_training  # imports scipy, which nothing else here needs

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
        if average is not None:
            evaluations.append(Evaluation("average", plan.eval_every_tokens, partial(averaged_loss, average)))
        if HELLASWAG in cfg.eval_tasks:
            evaluations.append(Evaluation("hellaswag", tasks_every, hellaswag))
        if tasks_of_lm_eval(cfg.eval_tasks):
            evaluations.append(Evaluation("lm_eval", tasks_every, scores_of_lm_eval, ends_early=True))
    if cfg.sharpness_every_tokens:
        evaluations.append(Evaluation("sharpness", cfg.sharpness_every_tokens, sharpness, of_checkpoint=True))
    passes = 1 if average is None else 2
    return Evaluations(plan, evaluations, passes * len(prepared.dataset.val_starts))
