"""Schedules against closed forms and the published 50-step table."""

import itertools
import math

import pytest

from gptexp.config.compose import compose, composition, hydra_engine, job_of
from gptexp.config.schedule import Schedule, resolve_schedule
from gptexp.config.schema import Config, ScheduleConfig


def make(name: str, warmup: int = 100, decay: int = 1100, **kwargs: object) -> Schedule:
    name, _, cooldown = name.partition(" ")
    defaults = {"min_lr_ratio": 0.1, "cooldown_ratio": 0.2, "cooldown": cooldown or "linear"}
    return Schedule(name, warmup, decay, **{**defaults, **kwargs})  # type: ignore[arg-type]


def test_the_learning_rates_of_the_reference_run_are_reproduced() -> None:
    """Compares all printed digits."""
    cfg = Config()
    cfg.schedule.warmup_steps = 10
    cfg.batch.total_batch_size = 8192
    schedule = resolve_schedule(cfg, 50 * 8192)
    printed = {s: f"{6e-4 * schedule.lr_factor(s * 8192, 8192):.4e}" for s in (0, 9, 10, 11, 30, 49)}
    assert printed == {
        0: "6.0000e-05",
        9: "6.0000e-04",
        10: "6.0000e-04",
        11: "5.9917e-04",
        30: "3.3000e-04",
        49: "6.0832e-05",
    }


# Tokens before the step -> factor, worked out by hand for a warm-up of 100, an end at 1100 and steps of 10 tokens.
CLOSED_FORMS = {
    "constant": {0: 0.1, 50: 0.6, 90: 1.0, 600: 1.0, 5000: 1.0},
    "linear": {0: 0.1, 90: 1.0, 100: 1.0, 600: 0.55, 1100: 0.1, 5000: 0.1},
    "cosine": {0: 0.1, 90: 1.0, 350: 0.1 + 0.45 * (1 + math.sqrt(0.5)), 600: 0.55, 1100: 0.1, 5000: 0.1},
    "wsd": {0: 0.1, 100: 1.0, 880: 1.0, 990: 0.55, 1100: 0.1},
    "wsd 1-sqrt": {0: 0.1, 500: 1.0, 880: 1.0, 935: 0.55, 1100: 0.1},
    "inverse_sqrt": {0: 0.1, 90: 1.0, 100: 1.0, 400: 0.5, 900: 1 / 3, 10_000: 0.1},
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_each_schedule_equals_its_closed_form(name: str) -> None:
    schedule = make(name)
    for tokens, factor in CLOSED_FORMS[name].items():
        assert schedule.lr_factor(tokens, 10) == pytest.approx(factor, abs=1e-12), tokens


def test_the_1_sqrt_cooldown_of_wsd_falls_fastest_at_its_start() -> None:
    """Over its quarters by 1/2, √2-1 of that, and so on, to zero."""
    schedule = make("wsd 1-sqrt", min_lr_ratio=0.0)
    expected = [1 - math.sqrt(quarter / 4) for quarter in range(5)]
    assert [schedule.lr_factor(880 + 55 * quarter, 10) for quarter in range(5)] == pytest.approx(expected)


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_schedules_are_continuous_and_positive_at_the_first_step(name: str) -> None:
    schedule = make(name, warmup=100_000, decay=1_100_000)
    factors = [schedule.lr_factor(t, 100) for t in range(0, 1_300_000, 100)]
    assert factors[0] > 0
    largest = 0.0011 if "sqrt" not in name or name == "inverse_sqrt" else 0.03  # a root is steep at its start
    assert max(abs(a - b) for a, b in itertools.pairwise(factors)) <= largest
    assert max(factors) == 1.0


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_after_the_warm_up_the_rate_does_not_depend_on_the_batch_size(name: str) -> None:
    schedule = make(name, warmup=2**21, decay=2**26)
    for tokens in range(2**21, 2**26, 2**20):
        assert len({schedule.lr_factor(tokens, b) for b in (2**17, 2**18, 2**19, 2**20)}) == 1


@pytest.mark.parametrize("name", CLOSED_FORMS)
@pytest.mark.parametrize("end", [40, 100, 1100])
def test_before_its_peak_ends_a_schedule_is_its_warm_up_and_then_1(name: str, end: int) -> None:
    schedule = make(name, decay=end)
    for before in range(0, min(schedule.peak_ends, 3000), 7):
        if before + 10 <= 100 or before >= 100:
            assert schedule.lr_factor(before, 10) == min(1.0, (before + 10) / 100)
    assert name == "constant" or schedule.lr_factor(schedule.peak_ends + 500, 10) < 1


def test_a_warm_up_that_is_not_a_multiple_of_the_batch_ends_at_the_peak() -> None:
    schedule = make("cosine", warmup=105)
    assert schedule.lr_factor(90, 10) == pytest.approx(100 / 105)
    assert schedule.lr_factor(100, 10) == 1.0


def test_the_schedule_of_gpt3_equals_the_paper() -> None:
    """Warm-up over 375M tokens, cosine over 260B of 300B, then a tenth (arXiv 2005.14165, appendix B)."""
    cfg = Config()
    cfg.batch.total_batch_size = 2**19
    cfg.schedule.warmup_tokens = 375_000_000
    cfg.schedule.decay_tokens = 260_000_000_000
    schedule = resolve_schedule(cfg, 300_000_000_000)
    assert schedule.lr_factor(375_000_000, 2**19) == 1.0
    assert schedule.lr_factor(260_000_000_000, 2**19) == pytest.approx(0.1)
    assert schedule.lr_factor(299_000_000_000, 2**19) == pytest.approx(0.1)


def of_file(name: str, run_tokens: int) -> Schedule:
    return resolve_schedule(compose(["model=gpt2", "train.max_tokens=300e9", f"schedule={name}"]), run_tokens)


def test_cosine_hold_is_the_schedule_of_gpt3_at_any_length() -> None:
    gpt3, held = of_file("gpt3", 300 * 10**9), of_file("cosine_hold", 300 * 10**9)
    short = of_file("cosine_hold", 10**9)
    for share in (0.0005, 0.00125, 0.2, 0.5, 0.8667, 1.0):
        tokens = round(share * 300 * 10**9)
        factor = gpt3.lr_factor(tokens, 2**19)
        assert held.lr_factor(tokens, 2**19) == pytest.approx(factor, abs=1e-5)
        assert short.lr_factor(tokens // 300, 2**19 // 300) == pytest.approx(factor, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "factors"),
    {
        "linear": (1.0, 0.5, 0.5 / 0.9, 0.1 / 0.9, 0.0),
        "wsd": (1.0, 0.5, 1.0, 0.5, 0.0),
        "wsd_sqrt": (1.0, 0.5, 1.0, 1 - math.sqrt(0.5), 0.0),
    }.items(),
)
def test_the_files_of_schedules_that_decay_to_zero(name: str, factors: tuple[float, ...]) -> None:
    """At the end of the warm-up, in it, in the middle, at nine tenths and at the end."""
    schedule = of_file(name, 10_000)
    found = [schedule.lr_factor(tokens, 10) for tokens in (1000, 490, 5000, 9000, 10_000)]
    assert found == pytest.approx(factors)


@pytest.mark.e2e
def test_named_grids_decay_linearly_unless_another_schedule_is_asked_for() -> None:
    """Not so the recipes, which bring their own."""

    def schedule(*overrides: str) -> ScheduleConfig:
        with hydra_engine() as engine:
            return job_of(composition(engine, ["data=text", *overrides], None, multirun=True)).schedule

    for grid in ("lr", "lr_x_batch", "batch_size", "seeds"):
        assert (schedule(f"sweep={grid}").name, schedule(f"sweep={grid}").min_lr_ratio) == ("linear", 0.0)
    assert schedule("sweep=lr", "schedule=wsd").name == "wsd"
    assert schedule("sweep=lr", "experiment=gpt2_124m") == schedule("experiment=gpt2_124m")
    assert schedule("experiment=gpt2_124m").name == "cosine"


def test_steps_take_precedence_over_tokens_and_tokens_over_the_ratio() -> None:
    cfg = Config()
    cfg.batch.total_batch_size = 1000
    assert resolve_schedule(cfg, 50_000).warmup_tokens == 5000
    cfg.schedule.warmup_tokens = 7000
    assert resolve_schedule(cfg, 50_000).warmup_tokens == 7000
    cfg.schedule.warmup_steps = 3
    assert resolve_schedule(cfg, 50_000).warmup_tokens == 3000
    assert resolve_schedule(cfg, 50_000).decay_tokens == 50_000
    cfg.schedule.decay_ratio = 0.9
    assert resolve_schedule(cfg, 50_000).decay_tokens == 45_000
    cfg.schedule.decay_tokens = 40_000
    assert resolve_schedule(cfg, 50_000).decay_tokens == 40_000
    cfg.schedule.decay_steps = 30
    assert resolve_schedule(cfg, 50_000).decay_tokens == 30_000
