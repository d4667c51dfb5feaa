"""The plan of one run: its steps, schedule, and intervals in tokens."""

from dataclasses import dataclass

from gptexp.config.batch import BatchPlan, interval_tokens, plan_batch
from gptexp.config.schedule import Schedule, resolve_schedule
from gptexp.config.schema import Config


@dataclass(frozen=True)
class RunPlan:
    """Lengths and intervals of a run. Built by `plan_run`."""

    batch: BatchPlan
    steps: int
    schedule: Schedule
    eval_every_tokens: int  # 0: evaluates only at the end
    save_every_tokens: int  # 0: saves only at the end
    keep_every_tokens: int  # 0: keeps no checkpoint because of its token count

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.batch.total_batch_size

    @property
    def tokens(self) -> int:
        """Training tokens of all steps; the last step may exceed train.max_tokens."""
        return self.steps * self.step_tokens


def plan_run(cfg: Config, micro_batch_size: int) -> RunPlan:
    """Plan the run of `cfg` with micro-batches of `micro_batch_size` sequences.

    Raises `ValueError` if a step is not divisible into micro-batches.
    """
    train, step_tokens = cfg.train, cfg.batch.total_batch_size
    steps, run_tokens = cfg.run_length
    return RunPlan(
        batch=plan_batch(step_tokens, micro_batch_size, cfg.seq_len, cfg.world.size or 1),
        steps=steps,
        schedule=resolve_schedule(cfg, run_tokens),
        eval_every_tokens=interval_tokens(train.eval_every, train.eval_every_tokens, run_tokens, step_tokens),
        save_every_tokens=interval_tokens(train.save_every, train.save_every_tokens, run_tokens, step_tokens),
        keep_every_tokens=train.keep_every_tokens if train.keep_every is None else train.keep_every * step_tokens,
    )
