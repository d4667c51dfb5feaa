"""The plan of one run: its steps, schedule, and intervals in tokens, as numbers and in words."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gptexp.config.batch import BatchPlan, StepSizes, crosses, interval_tokens, plan_batch
from gptexp.config.branching import first_step
from gptexp.config.scaling import scaled_optim
from gptexp.config.schedule import Schedule, resolve_schedule
from gptexp.config.schema import Config
from gptexp.process.words import counted, rounded


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
        """A step of this size, `steps` steps later, in which `tokens` tokens were consumed."""
        return PlannedStep(self.number + steps, self.tokens_before + tokens, self.batch)


@dataclass(frozen=True)
class RunPlan:
    """Lengths and intervals of a run. Built by `plan_run`."""

    batch: BatchPlan  # a step of batch.total_batch_size tokens; without a ramp, every step
    step_sizes: StepSizes
    steps: int  # number of steps at the end of the run, including those before a branch's checkpoint
    is_most: bool  # the text may be too short for so many steps: one epoch of it is the length, and it is not tokenised
    branch_from: str | None  # RUN_DIR@STEP: the run begins after this step of another run
    schedule: Schedule
    least_warmup_steps: int  # the shortest warm-up that suits the optimizer
    eval_every_tokens: int  # 0: evaluates only at the end
    save_every_tokens: int  # 0: saves only at the end
    keep_every_tokens: int  # 0: keeps no checkpoint because of its token count
    sharpness_every_tokens: int  # 0: never measures it
    ema_half_life_tokens: int  # 0: averages no weights

    @property
    def first_step(self) -> int:
        """Number of steps that were done before the run begins: 0 unless it is a branch."""
        return first_step(self.branch_from)

    @property
    def tokens(self) -> int:
        """Training tokens of all steps; the last step may exceed train.max_tokens."""
        return self.step_sizes.tokens_after(self.steps)

    def ramp_in_words(self) -> str:
        """How the steps of a ramp grow, and the last step's size if the run ends within the ramp; "" without a ramp."""
        sizes = self.step_sizes
        if not sizes.ramp_tokens:
            return ""
        last = sizes.at(sizes.tokens_after(self.steps - 1))
        return sizes.ramp_in_words() + (f"; the run ends at {last:,} tokens per step" if last < sizes.total else "")

    def step(self, number: int, tokens_before: int) -> PlannedStep:
        """The step after `number` steps with `tokens_before` tokens."""
        b, size = self.batch, self.step_sizes.at(tokens_before)
        return PlannedStep(number, tokens_before, plan_batch(size, b.micro_batch_size, b.seq_len, b.world_size))

    def steps_from(self, number: int, tokens_before: int) -> Iterator[PlannedStep]:
        """Yield the step that `step` returns for these arguments, and all later steps of the run."""
        while number < self.steps:
            step = self.step(number, tokens_before)
            yield step
            number, tokens_before = number + 1, step.tokens_after

    def is_due(self, every_tokens: int, steps: int) -> bool:
        """Whether the last of `steps` steps reaches a multiple of `every_tokens`; False for an interval of 0."""
        after = self.step_sizes.tokens_after
        return steps > 0 and crosses(after(steps - 1), after(steps), every_tokens)

    def times(self, every_tokens: int) -> int:
        """How often something happens that is due at each multiple of `every_tokens`, and at the end of the run.

        It happens after the step that reaches the multiple. An interval of 0: only at the end.
        """
        if not every_tokens:
            return 1
        sizes, last = self.step_sizes, self.steps - 1
        # Steps never get smaller. Steps below the interval cross at most one multiple each, larger steps at least one.
        large = bisect_left(range(last), every_tokens, self.first_step, key=lambda n: sizes.at(sizes.tokens_after(n)))
        return sizes.tokens_after(large) // every_tokens - self.first_tokens // every_tokens + last - large + 1

    @property
    def first_tokens(self) -> int:
        """Tokens that were consumed before the run began: 0 unless it is a branch."""
        return self.step_sizes.tokens_after(self.first_step)

    @property
    def warmup_steps(self) -> int:
        steps_to = self.step_sizes.steps_to
        return steps_to(self.schedule.warmup_ends) - steps_to(self.schedule.begin_tokens)

    @property
    def sharpness_measurements(self) -> int:
        return self.times(self.sharpness_every_tokens) if self.sharpness_every_tokens else 0

    def lines(self, epoch_tokens: int | None) -> list[tuple[str, str]]:
        """The plan in words: a title and a text for each line; "" for what the run does not have.

        `epoch_tokens`: training tokens of the corpus; None: it is not tokenised yet, 0: it is too short.
        """
        b, s, half_life, sharpness = self.batch, self.schedule, self.ema_half_life_tokens, self.sharpness_every_tokens
        asked = f"; beta2 asks for {self.least_warmup_steps:,}" if self.warmup_steps < self.least_warmup_steps else ""
        most = "one epoch, at most " if self.is_most else ""
        share = f" to {s.peak_ratio:g} of optim.lr" if s.peak_ratio < 1 else ""
        anew = f"which begins after {counted(s.begin_tokens, 'token')}, " if s.begin_tokens else ""
        branch = f"from step {self.first_step:,}, {self.first_tokens:,} tokens, of {self.branch_from}"
        lines = {
            "batch": f"{b.total_batch_size:,} tokens per step = {counted(b.micro_batch_size, 'sequence')} × "
            f"{counted(b.seq_len, 'token')} × {counted(b.world_size, 'rank')} × "
            f"{counted(b.grad_accum_steps, 'micro-step')}",
            "batch ramp": self.ramp_in_words(),
            "length": f"{most}{counted(self.steps, 'step')}, {self.tokens:,} tokens{self._epochs(epoch_tokens)}",
            "schedule": f"{s.name}, {anew}warm-up over {counted(s.warmup_tokens, 'token')} "
            f"({self._steps_to(s.warmup_ends, s.begin_tokens)}{asked}){share}, "
            f"end at {counted(s.decay_ends, 'token')} ({self._steps_to(s.decay_ends)})",
            "average": f"of the weights, half-life {self._interval(half_life)}" if half_life else "",
            "validation": self._every(self.eval_every_tokens),
            "checkpoint": self._every(self.save_every_tokens),
            "sharpness": f"{self._every(sharpness)}, and at the end" if sharpness else "",
            "branch": branch if self.branch_from else "",
        }
        return list(lines.items())

    def _epochs(self, epoch_tokens: int | None) -> str:
        if epoch_tokens is None:
            return "; the number of epochs is unknown, run gptexp prepare"
        return f", {rounded(self.tokens / epoch_tokens)} epochs" if epoch_tokens else "; the corpus is too short"

    def _steps_to(self, tokens: int, begin: int = 0) -> str:
        """A length from `begin` to `tokens`, in steps; with a ramp, the number of whole steps that reach it."""
        total, sizes = self.batch.total_batch_size, self.step_sizes
        if (tokens - begin) % total and not sizes.ramp_tokens:
            return f"{(tokens - begin) / total:,.1f} steps"
        return counted(sizes.steps_to(tokens) - sizes.steps_to(begin), "step")

    def _interval(self, tokens: int) -> str:
        """A length anywhere in the run, in tokens and in steps; with a ramp, in tokens only."""
        return counted(tokens, "token") + ("" if self.step_sizes.ramp_tokens else f" ({self._steps_to(tokens)})")

    def _every(self, tokens: int) -> str:
        return f"every {self._interval(tokens)}" if tokens else "at the end"

    def to_dict(self) -> dict[str, Any]:
        """The numbers of the plan, for JSON."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "at_most": self.is_most,
            "ramp_steps": self.step_sizes.ramp_steps,
            "ramp": self.ramp_in_words() or None,
            "first_step": self.first_step,
            "first_tokens": self.first_tokens,
            **asdict(self.batch),
            "warmup_tokens": self.schedule.warmup_tokens,
            "warmup_steps": self.warmup_steps,
            "least_warmup_steps": self.least_warmup_steps,
            "begin_tokens": self.schedule.begin_tokens,
            "decay_tokens": self.schedule.decay_tokens,
            "eval_every_tokens": self.eval_every_tokens,
            "save_every_tokens": self.save_every_tokens,
            "sharpness_measurements": self.sharpness_measurements,
        }


def plan_run(cfg: Config, micro_batch_size: int) -> RunPlan:
    """Plan the run of `cfg` with micro-batches of `micro_batch_size` sequences.

    Raises `ConfigError` if a step is not divisible into micro-batches.
    """
    train, total = cfg.train, cfg.batch.total_batch_size
    steps, run_tokens = cfg.run_length
    return RunPlan(
        batch=plan_batch(total, micro_batch_size, cfg.seq_len, cfg.world.size or 1),
        step_sizes=cfg.batch.step_sizes,
        steps=steps,
        is_most=isinstance(train.max_tokens, str),
        branch_from=cfg.branch_from,
        schedule=resolve_schedule(cfg, run_tokens),
        least_warmup_steps=scaled_optim(cfg).least_warmup_steps(),
        eval_every_tokens=interval_tokens(train.eval_every, train.eval_every_tokens, run_tokens, total),
        save_every_tokens=interval_tokens(train.save_every, train.save_every_tokens, run_tokens, total),
        keep_every_tokens=train.keep_every_tokens if train.keep_every is None else train.keep_every * total,
        sharpness_every_tokens=train.sharpness_every_tokens or 0,
        ema_half_life_tokens=train.ema_half_life_tokens or 0,
    )
