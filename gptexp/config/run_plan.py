"""The plan of one run: its steps, schedule, and intervals in tokens."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from gptexp.config.batch import BatchPlan, crosses, interval_tokens, plan_batch
from gptexp.config.branching import first_step
from gptexp.config.schedule import Schedule, resolve_schedule
from gptexp.config.schema import Config
from gptexp.config.step_sizes import StepSizes


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step of a run."""

    number: int  # from 0
    tokens_before: int  # training tokens of all steps before it
    batch: BatchPlan

    @property
    def tokens_after(self) -> int:
        return self.tokens_before + self.batch.total_batch_size

    def later(self, steps: int, tokens: int) -> "PlannedStep":
        """A step of this size after further `steps` with `tokens`."""
        return PlannedStep(self.number + steps, self.tokens_before + tokens, self.batch)


@dataclass(frozen=True)
class RunPlan:
    """Lengths and intervals of a run. Built by `plan_run`."""

    batch: BatchPlan  # of a step of batch.total_batch_size tokens: of every step, unless there is a ramp
    step_sizes: StepSizes
    steps: int  # of the whole run
    first_step: int  # the run begins after so many steps of another run; 0 unless it is a branch
    schedule: Schedule
    eval_every_tokens: int  # 0: evaluates only at the end
    save_every_tokens: int  # 0: saves only at the end
    keep_every_tokens: int  # 0: keeps no checkpoint because of its token count

    @property
    def tokens(self) -> int:
        """Training tokens of all steps; the last step may exceed train.max_tokens."""
        return self.step_sizes.tokens_after(self.steps)

    def ramp_in_words(self) -> str:
        """How the steps of a ramp grow, and if they do not reach their last size, which they do."""
        sizes = self.step_sizes
        last = sizes.at(sizes.tokens_after(self.steps - 1))
        return sizes.ramp_in_words() + (f"; the run ends at {last:,} tokens per step" if last < sizes.total else "")

    def step(self, number: int, tokens_before: int) -> PlannedStep:
        """The step after `number` steps with `tokens_before` tokens."""
        b, size = self.batch, self.step_sizes.at(tokens_before)
        return PlannedStep(number, tokens_before, plan_batch(size, b.micro_batch_size, b.seq_len, b.world_size))

    def steps_from(self, number: int, tokens_before: int) -> Iterator[PlannedStep]:
        """Yield that step and all after it, to the end of the run."""
        while number < self.steps:
            step = self.step(number, tokens_before)
            yield step
            number, tokens_before = number + 1, step.tokens_after

    def is_due(self, every_tokens: int, steps: int) -> bool:
        """Whether the last of `steps` steps reaches a multiple of `every_tokens`; False for an interval of 0."""
        after = self.step_sizes.tokens_after
        return steps > 0 and crosses(after(steps - 1), after(steps), every_tokens)

    def times(self, every_tokens: int) -> int:
        """How often something happens at the first step at or after each multiple of `every_tokens`, and at the end.

        An interval of 0: only at the end.
        """
        if not every_tokens:
            return 1
        sizes, last = self.step_sizes, self.steps - 1
        # Steps never get smaller. A smaller one than the interval crosses at most one multiple, others at least one.
        large = bisect_left(range(last), every_tokens, self.first_step, key=lambda n: sizes.at(sizes.tokens_after(n)))
        return sizes.tokens_after(large) // every_tokens - self.first_tokens // every_tokens + last - large + 1

    @property
    def first_tokens(self) -> int:
        """Tokens that were consumed before the run began: 0 unless it is a branch."""
        return self.step_sizes.tokens_after(self.first_step)


def plan_run(cfg: Config, micro_batch_size: int) -> RunPlan:
    """Plan the run of `cfg` with micro-batches of `micro_batch_size` sequences.

    Raises `ValueError` if a step is not divisible into micro-batches.
    """
    train, total = cfg.train, cfg.batch.total_batch_size
    steps, run_tokens = cfg.run_length
    return RunPlan(
        batch=plan_batch(total, micro_batch_size, cfg.seq_len, cfg.world.size or 1),
        step_sizes=cfg.batch.step_sizes,
        steps=steps,
        first_step=first_step(cfg.branch_from),
        schedule=resolve_schedule(cfg, run_tokens),
        eval_every_tokens=interval_tokens(train.eval_every, train.eval_every_tokens, run_tokens, total),
        save_every_tokens=interval_tokens(train.save_every, train.save_every_tokens, run_tokens, total),
        keep_every_tokens=train.keep_every_tokens if train.keep_every is None else train.keep_every * total,
    )
