"""The steps of a batch ramp against a loop over single steps with exact fractions, and the plans made of them."""

import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from gptexp.config.batch import StepSizes
from gptexp.config.rules import problems
from gptexp.config.run_plan import plan_run
from gptexp.config.schema import BatchConfig, Config, ModelConfig, ScheduleConfig, TrainConfig, memory_key

GPT3_SMALL = StepSizes(total=524_288, start=32_768, ramp_tokens=4_000_000_000, quantum=32_768)
GPT3_175B = StepSizes(total=3_145_728, start=32_768, ramp_tokens=12_000_000_000, quantum=32_768)


def ends(sizes: StepSizes) -> Iterator[int]:
    """The tokens before the first step and after each step, one after the other."""
    tokens = 0
    while True:
        yield tokens
        if tokens >= sizes.ramp_tokens:
            tokens += sizes.total
            continue
        linear = sizes.start + Fraction((sizes.total - sizes.start) * tokens, sizes.ramp_tokens)
        tokens += math.floor(linear / sizes.quantum + Fraction(1, 2)) * sizes.quantum  # half up


def drawn(draw: random.Random) -> StepSizes:
    quantum, start, more = draw.randint(1, 9), draw.randint(1, 6), draw.randint(1, 12)
    return StepSizes((start + more) * quantum, start * quantum, draw.randint(1, 3000), quantum)


@pytest.mark.e2e
@pytest.mark.parametrize("seed", range(3))
def test_sizes_and_lengths_are_those_of_a_loop_over_the_steps(seed: int) -> None:
    draw, skipping, complete = random.Random(seed), 0, 0
    for _ in range(500):
        sizes = drawn(draw)
        steps = list(pairwise(tokens for tokens, _ in zip(ends(sizes), range(60), strict=False)))
        for number, (before, after) in enumerate(steps):
            assert sizes.at(before) == after - before
            assert sizes.tokens_after(number) == before
            for tokens in {before + 1, draw.randint(before + 1, after), after}:
                assert sizes.steps_to(tokens) == number + 1
        assert sizes.steps_to(0) == 0
        if steps[-1][1] >= sizes.ramp_tokens:
            complete += 1
            assert sizes.ramp_steps == sum(before < sizes.ramp_tokens for before, _ in steps)
        grown = [(after - before) // sizes.quantum for before, after in steps]
        assert grown == sorted(grown)
        assert sizes.start // sizes.quantum == grown[0] <= grown[-1] <= sizes.total // sizes.quantum
        skipping += any(b - a > 1 for a, b in pairwise(grown))
    assert complete > 20
    assert skipping > 20  # ramps so short that a step passes over a level


def test_half_a_quantum_is_rounded_up() -> None:
    sizes = StepSizes(total=4, start=2, ramp_tokens=8, quantum=2)  # 2 + t / 4
    assert [sizes.at(tokens) for tokens in (0, 3, 4, 7, 8)] == [2, 2, 4, 4, 4]


def test_without_a_ramp_every_step_has_the_same_size() -> None:
    sizes = StepSizes.constant(7)
    assert (sizes.at(0), sizes.at(10**30), sizes.tokens_after(3), sizes.ramp_steps) == (7, 7, 21, 0)
    assert [sizes.steps_to(tokens) for tokens in (0, 1, 7, 8, 14)] == [0, 1, 1, 2, 2]


def test_the_ramp_of_gpt3s_small_models_takes_23191_steps() -> None:
    """GPT-3's batch is 2^19 tokens after 4e9 tokens; without the ramp these would be 7,630 steps."""
    counted = sum(1 for tokens in iter_below(GPT3_SMALL))
    assert GPT3_SMALL.ramp_steps == counted
    assert abs(counted - 23_191) <= 2
    assert GPT3_SMALL.tokens_after(counted) == next(t for t in ends(GPT3_SMALL) if t >= 4_000_000_000)


def iter_below(sizes: StepSizes) -> Iterator[int]:
    for tokens in ends(sizes):
        if tokens >= sizes.ramp_tokens:
            return
        yield tokens


def config(steps: int | None = None, ramp: bool = True, **keys: int) -> Config:
    """A run of 4,000 tokens whose steps grow from 32 to 128 tokens over the first 1,000."""
    batch = BatchConfig(128, 2, 16, *((32, 1000) if ramp else ()))
    return Config(
        model=ModelConfig(block_size=16),
        batch=batch,
        train=TrainConfig(max_tokens=4000, max_steps=steps),
        schedule=ScheduleConfig(**keys),  # type: ignore[arg-type]
    )


def test_a_length_in_steps_is_that_of_the_first_steps_of_the_ramp() -> None:
    after = [tokens for tokens, _ in zip(ends(config().batch.step_sizes), range(50), strict=False)]
    assert after[:4] == [0, 32, 64, 96]
    for steps in (5, 30):
        cfg = config(steps, warmup_steps=3, decay_steps=4)
        assert cfg.run_length == (steps, after[steps])
        plan = plan_run(cfg, 2)
        assert (plan.steps, plan.tokens) == (steps, after[steps])
        assert (plan.schedule.warmup_tokens, plan.schedule.decay_tokens) == (after[3], after[4])
    steps, tokens = config().run_length
    assert tokens == 4000
    assert after[steps - 1] < 4000 <= after[steps]


def test_a_plan_names_each_step_with_its_tokens_and_micro_batches() -> None:
    plan = plan_run(config(), 2)
    after = [tokens for tokens, _ in zip(ends(plan.step_sizes), range(plan.steps + 1), strict=False)]
    planned = list(plan.steps_from(0, 0))
    assert [step.number for step in planned] == [*range(plan.steps)]
    assert [(step.tokens_before, step.tokens_after) for step in planned] == [*pairwise(after)]
    assert {step.batch.grad_accum_steps for step in planned} == {1, 2, 3, 4}
    assert all(step.batch.grad_accum_steps * 32 == step.tokens_after - step.tokens_before for step in planned)
    assert list(plan.steps_from(7, after[7])) == planned[7:]


def test_a_run_that_ends_in_the_ramp_says_so() -> None:
    reached = plan_run(config(), 2).ramp_in_words()
    assert reached == "from 32 tokens per step, linear over the first 1,000 tokens (16 steps), in multiples of 32"
    assert plan_run(config(5), 2).ramp_in_words() == f"{reached}; the run ends at 32 tokens per step"


def test_the_ramp_of_gpt3_175b_is_counted_in_milliseconds() -> None:
    started = time.perf_counter()
    sizes = StepSizes(GPT3_175B.total, GPT3_175B.start, GPT3_175B.ramp_tokens + 1, GPT3_175B.quantum)  # not in a cache
    assert sizes.tokens_after(sizes.steps_to(300 * 10**9)) >= 300 * 10**9
    assert time.perf_counter() - started < 0.1
    assert GPT3_175B.ramp_steps == sum(1 for _ in iter_below(GPT3_175B))


def test_a_ramp_with_the_most_levels_is_counted_quickly() -> None:
    cfg = config()
    cfg.batch = BatchConfig(64 * 10_000, 4, 16, 64, 10**13)
    started = time.perf_counter()
    assert problems(cfg, 1) == []
    assert time.perf_counter() - started < 2
    cfg.batch.total_batch_size += 64
    [problem] = problems(cfg, 1)
    assert "less than 1/10,000 of batch.total_batch_size=640,064; give a larger batch.ramp_quantum_tokens" in problem


def test_a_legal_ramp_divides_at_every_proposed_value() -> None:
    """Each refusal of a quantum proposes values that are accepted."""
    draw, seen = random.Random(0), {"nearest": 0, "nearest micro_batch_size": 0}
    for number in range(400):
        cfg, world = config(), draw.choice([1, 2, 3, 4])
        quantum, start, total = 16 * draw.randint(1, 24), draw.randint(1, 3), draw.choice([2, 4, 6, 12])
        if number % 4 == 0:
            start = 1
        cfg.batch = BatchConfig(total * quantum, draw.randint(1, 4), 16, start * quantum, 5000)
        if number % 4:
            cfg.batch.ramp_quantum_tokens = {1: quantum + 1, 2: 2 * quantum, 3: quantum}[number % 4]
        sizes = cfg.batch.step_sizes
        micro_step = cfg.batch.asked_micro_batch_size * 16 * world  # type: ignore[operator]
        legal = sizes.start < sizes.total and not any(
            tokens % by for tokens, by in ((sizes.total, sizes.quantum), (sizes.start, sizes.quantum),
                                           (sizes.quantum, micro_step), (sizes.total, micro_step))
        )  # fmt: skip
        lines = problems(cfg, world)
        assert (lines == []) == legal
        for line in lines:
            for name, values in proposals(line).items():
                seen[name] += 1
                for value in values:
                    assert_accepted(cfg, world, name, value, line)
    assert min(seen.values()) > 30


def proposals(line: str) -> dict[str, list[int]]:
    """The values that the refusal of a quantum proposes."""
    if not line.startswith("batch.ramp_") or "must divide" in line:
        return {}
    parts = [part.partition(": ") for part in line.split("; ")[1:]]
    return {name: [int(v.replace(",", "")) for v in text.split(" or ")] for name, _, text in parts if text}


def assert_accepted(cfg: Config, world: int, name: str, value: int, line: str) -> None:
    batch = BatchConfig(*(getattr(cfg.batch, f) for f in cfg.batch.__dataclass_fields__))
    if name == "nearest micro_batch_size":
        batch.micro_batch_size = value
    elif batch.ramp_quantum_tokens is not None:
        batch.ramp_quantum_tokens = value
    else:
        batch.ramp_from_tokens = value
    assert problems(Config(model=cfg.model, batch=batch, train=cfg.train), world) == [], (line, name, value)


def test_a_micro_batch_is_shared_only_by_runs_of_one_quantum() -> None:
    keys = [memory_key(cfg) for cfg in (config(), config(ramp=False), config(7))]
    assert keys[0] == keys[2] != keys[1]
    cfg = config()
    cfg.batch = cfg.batch.of_one_size(128, 2)
    assert memory_key(cfg) == keys[1]


@pytest.mark.parametrize("seed", range(3))
def test_what_happens_every_so_many_tokens_and_at_the_end_is_counted_as_by_a_loop(seed: int) -> None:
    draw = random.Random(seed)
    for number in range(300):
        sizes = drawn(draw) if number % 3 else StepSizes.constant(draw.randint(1, 40))
        steps = draw.randint(1, 60)
        first, every = draw.randint(0, steps - 1), draw.randint(1, 300)
        after = [tokens for tokens, _ in zip(ends(sizes), range(steps + 1), strict=False)]
        happens = [n for n in range(first + 1, steps + 1) if n == steps or after[n] // every > after[n - 1] // every]
        plan = replace(plan_run(config(), 2), step_sizes=sizes, steps=steps, branch_from=f"run@{first}")
        assert plan.times(every) == len(happens), (sizes, steps, first, every)
        assert plan.times(0) == 1
