"""Batch arithmetic, against brute force and published figures."""

import random
import re

import pytest

from gptexp.config.batch import crosses, interval_tokens, plan_batch
from gptexp.config.schema import BatchConfig, Config, TrainConfig


@pytest.mark.parametrize(("world_size", "expected"), [(1, 32), (2, 16), (4, 8), (8, 4)])
def test_accumulation_steps_for_half_a_million_tokens(world_size: int, expected: int) -> None:
    assert plan_batch(2**19, 16, 1024, world_size).grad_accum_steps == expected


def test_a_batch_is_accepted_exactly_if_its_sizes_divide_it() -> None:
    draw = random.Random(0)
    legal = 0
    for _ in range(2000):
        total, b, t, w = (draw.randint(1, n) for n in (4096, 8, 64, 8))
        whole = total / (b * t * w) == total // (b * t * w) and total >= b * t * w
        try:
            plan = plan_batch(total, b, t, w)
        except ValueError:
            assert not whole
        else:
            legal += 1
            assert whole
            assert plan.grad_accum_steps * b * t * w == total
            assert plan.sequences * t == total
    assert legal > 20


def test_an_error_proposes_the_nearest_legal_values() -> None:
    with pytest.raises(ValueError, match="is not divisible by") as error:
        plan_batch(500_000, 16, 1024, 8)
    assert "batch.total_batch_size=500,000 tokens" in str(error.value)
    assert "16·1024·8 = 131,072; nearest batch: 393,216 or 524,288" in str(error.value)

    draw = random.Random(1)
    checked = {"batch": 0, "world.size": 0, "micro_batch_size": 0}
    for _ in range(3000):
        total, b, t, w = draw.randint(1, 600), draw.randint(1, 6), draw.choice([1, 2, 8]), draw.randint(1, 8)
        try:
            plan_batch(total, b, t, w)
        except ValueError as e:
            for what, values in re.findall(r"nearest (batch|world\.size|micro_batch_size): ([\d, or]+)", str(e)):
                proposed = {int(v.replace(",", "")) for v in values.split(" or ")}
                given = {"batch": total, "world.size": w, "micro_batch_size": b}[what]
                legal = [
                    v
                    for v in range(1, total + 1 if what != "batch" else 2 * total + b * t * w)
                    if (v if what == "batch" else total)
                    % ((v if what == "micro_batch_size" else b) * t * (v if what == "world.size" else w))
                    == 0
                ]
                below, above = [v for v in legal if v < given], [v for v in legal if v > given]
                assert proposed == set(below[-1:] + above[:1])
                checked[what] += 1
    assert min(checked.values()) > 50


def test_run_length_rounds_steps_up_and_keeps_the_requested_tokens() -> None:
    def run_length(batch: int, max_tokens: int, max_steps: int | None = None) -> tuple[int, int]:
        return Config(batch=BatchConfig(batch), train=TrainConfig(max_tokens, max_steps)).run_length

    assert run_length(2**19, 300_000_000_000) == (572_205, 300_000_000_000)
    assert run_length(8192, 409_600) == (50, 409_600)
    assert run_length(8192, 409_600, 7) == (7, 57_344)


def test_an_interval_in_steps_takes_precedence_and_the_default_is_ten_per_run() -> None:
    assert interval_tokens(3, 999, 10_000, 100) == 300
    assert interval_tokens(None, 999, 10_000, 100) == 999
    assert interval_tokens(None, None, 10_000, 100) == 1000
    assert interval_tokens(None, 0, 10_000, 100) == 0


@pytest.mark.parametrize("total", [1, 7, 64, 100])
@pytest.mark.parametrize("every", [1, 7, 64, 150])
def test_crosses_is_true_once_for_each_multiple_reached(total: int, every: int) -> None:
    fired = [n for n in range(200) if crosses(n * total, (n + 1) * total, every)]
    brute = [n for n in range(200) if any(k % every == 0 for k in range(n * total + 1, (n + 1) * total + 1))]
    assert fired == brute
    assert not crosses(0, total, 0)
