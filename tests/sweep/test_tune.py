"""`gptexp tune`: which runs it makes, when it stops, and what it keeps, with runs whose loss is a formula."""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from searched import ONE, SIZES, SMALL, Ended, Search, fit_one_form, searches_in

from gptexp.config.compose import composition, hydra_engine, to_config
from gptexp.config.schema import Config
from gptexp.process.errors import ConfigError
from gptexp.reporting.listings.records import find_runs
from gptexp.reporting.listings.search import search_of
from gptexp.reporting.listings.search_progress import search_progress
from gptexp.reporting.page.report import build_report, key_of
from gptexp.reporting.statistics.law import independent_difference
from gptexp.reporting.statistics.posterior import interval
from gptexp.reporting.words.answers import Answer, table_of_answers
from gptexp.storage import run_dir
from gptexp.storage.search_log import read_events


def holds(answer: Answer, lr: float) -> bool:
    """Whether the answer has an interval with `lr` in it."""
    return answer.low is not None and answer.high is not None and answer.low <= lr <= answer.high


@pytest.fixture
def searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., Search]:
    if request.node.get_closest_marker("e2e") is None:
        fit_one_form(monkeypatch)
    return searches_in(tmp_path, monkeypatch)


@pytest.mark.e2e
def test_a_search_finds_each_best_learning_rate_within_its_interval(searches: Callable[..., Search]) -> None:
    search = searches()
    assert search.run(SIZES) == 0
    answers = search.answers
    assert [answer.total_batch_size for answer in answers] == [4096, 8192, 16384]
    for answer in answers:
        assert answer.stopped in ("narrow", "flat")
        assert abs(search.off(answer)) <= 0.25
        assert holds(answer, search.surface.best[answer.total_batch_size])
    assert len(search.chosen) <= 18
    assert any(why == "noise" for *_, why in search.chosen)  # "how do I know?" needs a second seed


@pytest.mark.e2e
@pytest.mark.parametrize("off", [-3, 3])
def test_a_wrong_prior_costs_runs_and_not_the_answer(searches: Callable[..., Search], off: int) -> None:
    search, usual = searches(), searches()
    assert search.run(ONE, f"optim.lr={0.01 * 2.0**off}") == usual.run(ONE, "optim.lr=0.01") == 0
    assert all(abs(search.off(answer)) <= 0.25 for answer in search.answers)
    assert len(search.chosen) <= len(usual.chosen) + 4


def test_a_search_that_is_killed_makes_the_same_choices(searches: Callable[..., Search]) -> None:
    whole, killed = searches(), searches()
    assert whole.run(ONE) == 0
    for ran in (1, 2, 0, 1):
        assert killed.run(ONE, killed_after=ran) is None
    assert killed.run(ONE) == 0
    assert killed.chosen == whole.chosen
    assert killed.run(ONE) == 0  # there is nothing left to do
    assert killed.chosen == whole.chosen


def test_the_time_between_two_commands_is_not_spent(searches: Callable[..., Search]) -> None:
    """Also not that before a run which the second one resumes, and not in a copy, whose files are younger."""
    search = searches(sigma=0.05)
    for _ in range(2):
        assert search.run(SIZES, "hydra.sweeper.budget=8runs", killed_after=3, lost_s=30.0) is None
        search.clock.now += 36_000
        for file in search.folder.glob("*/metrics.jsonl"):
            os.utime(file, (search.clock.now, search.clock.now))  # as a copy does
    assert search.run(SIZES, "hydra.sweeper.budget=8runs") == 0
    history = search_of(search.folder)
    assert history is not None
    assert history.seconds == pytest.approx(8 * 60 + 2 * 30, abs=1)


def test_a_run_that_was_chosen_earlier_begins_only_if_it_ends_in_time(searches: Callable[..., Search]) -> None:
    search = searches(sigma=0.05)
    assert search.run(ONE, "hydra.sweeper.budget=10m", killed_after=4) is None
    begun = search.clock.now
    assert search.run(ONE, "hydra.sweeper.budget=250s") == 0
    assert search.clock.now == begun
    assert [answer.stopped for answer in search.answers] == ["budget"]
    assert search.run(ONE, "hydra.sweeper.budget=10m") == 0
    assert search.clock.now > begun


def test_a_budget_that_the_last_run_spends_does_not_hide_the_answer(searches: Callable[..., Search]) -> None:
    search, exact = searches(), searches()
    assert search.run(ONE) == 0
    assert exact.run(ONE, f"hydra.sweeper.budget={len(search.chosen)}runs") == 0
    assert [answer.stopped for answer in exact.answers] == [answer.stopped for answer in search.answers]
    assert build_report(exact.folder).further == []


@pytest.mark.parametrize(("budget", "runs"), [("7runs", 7), ("750k", 7), ("10m", 9)])
def test_a_budget_is_kept_by_all_commands_together(searches: Callable[..., Search], budget: str, runs: int) -> None:
    search = searches(sigma=0.05)  # seeds vary so much that more runs would help
    assert search.run(SIZES, f"hydra.sweeper.budget={budget}", killed_after=4) is None
    assert search.run(SIZES, f"hydra.sweeper.budget={budget}") == 0
    assert len(search.chosen) == runs
    assert "budget" in {answer.stopped for answer in search.answers}
    assert search.run(SIZES, "hydra.sweeper.budget=10runs") == 0  # a larger one continues
    assert len(search.chosen) == 10


def test_runs_of_a_grid_and_by_hand_count(searches: Callable[..., Search]) -> None:
    search, alone = searches(), searches()
    assert alone.run(ONE) == 0
    with hydra_engine() as engine:
        cfg = composition(engine, [*SMALL, ONE], None, multirun=False)
    for number, lr in enumerate((0.005, 0.01, 0.02)):
        config = to_config(cfg, [])
        config.optim.lr, config.sweep.name = lr, search.folder.name
        directory = search.folder / f"by-hand-{number}"
        run_dir.save_config(directory, config)
        search.train(directory, config)
    assert search.run(ONE, "hydra.sweeper.budget=3runs") == 0
    progress = search_progress(search.folder)
    assert progress is not None
    [place] = progress.places
    assert place.lowest_lr == min((run.loss, run.lr) for run in find_runs(search.folder) if run.loss is not None)[1]
    assert search.run(ONE) == 0
    assert len(search.chosen) < len(alone.chosen)
    assert abs(search.off(search.answers[0])) <= 0.25


@pytest.mark.e2e
def test_arms_are_searched_side_by_side(searches: Callable[..., Search]) -> None:
    search = searches(arms={"adamw": 1.0, "lion": 0.125})
    assert search.run(ONE, "optim=adamw,lion", "hydra.sweeper.budget=20runs") == 0
    counts = [sum(arm == f"optim={name}" for arm, *_ in search.chosen) for name in ("adamw", "lion")]
    assert abs(counts[0] - counts[1]) <= 3
    best = {answer.arm: answer.lr for answer in search.answers}
    assert best["optim=adamw"] == pytest.approx(0.01, rel=0.2)
    assert best["optim=lion"] == pytest.approx(0.00125, rel=0.2)


@pytest.mark.e2e
def test_an_optimum_close_to_divergence_is_bracketed_by_it(searches: Callable[..., Search]) -> None:
    search = searches(diverges=0.4, best={4096: 0.01})
    assert search.run(ONE) == 0
    [answer] = search.answers
    assert answer.stopped in ("narrow", "flat", "exhausted")
    assert (answer.stopped == "exhausted") == answer.wanted.endswith("training diverges above")
    assert abs(search.off(answer)) <= 0.5


def test_a_search_that_no_run_would_help_says_that_training_diverges_above(searches: Callable[..., Search]) -> None:
    search = searches(diverges=0.4, best={4096: 0.01})
    assert search.run(ONE, "optim.lr=0.0025,0.005,0.01,0.02", "hydra.sweeper.seeds=1", "hydra.sweeper.within=0.06") == 0
    [answer] = search.answers
    assert answer.stopped == "exhausted"
    assert answer.wanted.endswith("training diverges above")


@pytest.mark.e2e
def test_a_run_that_fails_ends_the_search_at_its_batch_size_only(searches: Callable[..., Search]) -> None:
    search = searches(fails=lambda config: config.batch.total_batch_size == 8192)
    assert search.run(SIZES) == 1
    assert {answer.total_batch_size: answer.stopped for answer in search.answers}[4096] in ("narrow", "flat")
    history = search_of(search.folder)
    assert history is not None
    assert history.stopped[(), 8192] == "failed"
    assert sum(batch == 8192 for batch, *_ in search.chosen) == 1
    search.surface.fails = lambda config: False
    assert search.run(SIZES) == 0  # the next command tries it again
    assert all(abs(search.off(answer)) <= 0.25 for answer in search.answers)


@pytest.mark.e2e
def test_the_law_answers_for_batch_sizes_without_runs(searches: Callable[..., Search]) -> None:
    best = {2**i: 0.005 * 2 ** (0.4 * (i - 11)) for i in range(11, 18)}
    search = searches(best=best)
    sizes = ",".join(map(str, best))
    assert search.run(f"batch.total_batch_size={sizes}", "hydra.sweeper.law=true") == 0
    assert {batch for batch, *_ in search.chosen} == {2**11, 2**14, 2**17}
    answers = search.answers
    assert [answer.total_batch_size for answer in answers] == sorted(best)
    for answer in answers:
        assert abs(search.off(answer)) <= 0.5
        assert holds(answer, best[answer.total_batch_size])
    assert {answer.stopped for answer in answers if answer.total_batch_size == 2**12} == {"law"}


@pytest.mark.e2e
def test_a_search_begins_at_the_law_of_an_earlier_one(searches: Callable[..., Search]) -> None:
    earlier, search = searches(), searches(best={4096: 0.1, 32768: 0.2})
    earlier.surface.best = {4096: 0.1}
    assert earlier.run(ONE) == 0
    assert (
        search.run(
            "batch.total_batch_size=4096,32768", "hydra.sweeper.budget=3runs", f"hydra.sweeper.from={earlier.folder}"
        )
        == 0
    )
    [first] = [event for event in read_events(search.folder) if event["event"] == "start"]
    assert {one["batch"]: one["lr"] for one in first["prior"]}[4096] == pytest.approx(0.1, rel=0.15)
    with pytest.raises(ConfigError) as refused:
        searches().run(SIZES, "hydra.sweeper.from=/nowhere.yaml")
    assert refused.value.code in ("no-earlier-law", "not-found", "config")


@pytest.mark.e2e
def test_only_the_given_rates_and_seeds_are_run(searches: Callable[..., Search]) -> None:
    search = searches()
    rates = [0.0025, 0.005, 0.01, 0.02, 0.0398765]
    assert search.run(ONE, f"optim.lr={','.join(map(str, rates))}", "hydra.sweeper.seeds=2") == 0
    assert {float(typed) for _, typed, *_ in search.chosen} <= {*rates}
    assert {seed for _, _, seed, _ in search.chosen} <= {1337, 1338}


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("hydra.sweeper.budget=2runs", "budget-too-small"),
        ("hydra.sweeper.budget=soon", "budget-unreadable"),
        ("hydra.sweeper.budget=-5m", "budget-unreadable"),
        ("hydra.sweeper.within=0", "out-of-range"),
        ("hydra.sweeper.seeds=0", "out-of-range"),
        ("train.seed=1,2", "seeds-in-search"),
        ("optim.weight_decay=interval(0.1,1)", "interval-in-search"),
        ("optim.lr=interval(0.001,0.1)", "interval-in-search"),
        ("hydra.sweeper.range=0.001..0.1 optim.lr=0.002,0.004,0.008", "range-and-list"),
        ("hydra.sweeper.key=optim.beta2 optim.beta2=0.5,0.9,1", "out-of-range"),
        ("log.note=a,b", "no-arm"),
        ("batch.micro_batch_size=2,4", "no-arm"),
        ("hydra.sweeper.law=true hydra.sweeper.compare=true optim=adamw,lion", "law-and-compare"),
        ("data.val_tokens=0", "validation-missing"),
        ("train.max_steps=100", "config"),
        ("hydra.sweeper.compare=true", "compare-one-arm"),
        ("hydra.sweeper.key=optim.weight_decay", "prior-missing"),
        ("hydra.sweeper.key=model.n_layer", "not-searchable"),
        ("hydra.sweeper.key=train.max_minutes hydra.sweeper.range=1..5", "not-searchable"),
        ("hydra.sweeper.range=1..0.1", "range-empty"),
        ("hydra.sweeper.range=0.1..1 optim.lr=0.01", "out-of-range"),
        ("hydra.sweeper.key=optim.beta1 hydra.sweeper.range=0.5..2", "out-of-range"),
        ("optim.lr=1e-3,2e-3", "too-few-values"),
        ("hydra.sweeper.key=optim.weight_decay optim.weight_decay=0,0.1,0.2", "too-few-values"),
        ("hydra.sweeper.law=no", "wrong-type"),
        ("hydra.sweeper.law=true batch.total_batch_size=4096", "law-of-one-size"),
        ("hydra.sweeper.from=5", "no-earlier-law"),
    ],
)  # fmt: skip
def test_a_search_that_cannot_work_is_refused(searches: Callable[..., Search], override: str, code: str) -> None:
    search = searches()
    with pytest.raises(ConfigError) as refused:
        search.run(*([] if "total_batch" in override else [SIZES]), *override.split())
    assert refused.value.code == code
    assert not search.folder.exists()


@pytest.mark.parametrize(
    "damage",
    [
        '{"event": "cho',  # a power cut
        '{"event": "choose"}\n',
        '{"event": "start", "time": null, "key": "optim.lr"}\n',
        '{"event": "choose", "time": 1, "cell": 3, "arm": 5, "batch": "a", "tokens": "q", "typed": 4, "seed": "z"}\n',
    ],
)
def test_the_log_says_what_was_known_and_damaged_lines_are_skipped(
    searches: Callable[..., Search], damage: str
) -> None:
    search = searches()
    assert search.run(ONE, killed_after=3) is None
    file = search.folder / "tune.jsonl"
    file.write_text(file.read_text() + damage)
    assert search.run(ONE) == 0
    events = [json.loads(line) for line in file.read_text().splitlines() if line != damage.rstrip()]
    assert sum(event["event"] == "start" for event in events) == 2
    known = [event["known_runs"] for event in events if event["event"] == "choose"]
    assert known == sorted(known)
    assert known[0] == 0


@pytest.mark.e2e
@pytest.mark.parametrize(("sigma", "runs"), [(0.002, 16), (0.02, 20)])
def test_arms_are_compared_until_their_difference_is_known(
    searches: Callable[..., Search], sigma: float, runs: int
) -> None:
    """Lion's losses are 0.1 nats higher: few runs show that, however wide the intervals of the learning rates are."""
    search = searches(arms={"adamw": 1.0, "lion": 0.125}, gaps={"lion": 0.1}, sigma=sigma)
    assert search.run(ONE, "optim=adamw,lion", "hydra.sweeper.compare=true", "hydra.sweeper.within=0.06") == 0
    assert {answer.stopped for answer in search.answers} == {"decided"}
    assert len(search.chosen) <= runs
    fits = {0.0075 in arm.losses[4096]: arm.curves.fits[4096] for arm in build_report(search.folder).analysis.arms}
    low, high = interval(independent_difference(fits[False].best_losses, fits[True].best_losses))  # lion's and adamw's
    assert 0 < low < 0.1 < high


@pytest.mark.e2e
def test_another_key_is_searched_within_its_range(searches: Callable[..., Search]) -> None:
    search = searches(key="optim.weight_decay", best={4096: 0.2})
    options = ["hydra.sweeper.key=optim.weight_decay", "hydra.sweeper.range=0.02..0.5", "optim.lr=0.003,0.01"]
    assert search.run(ONE, *options, "hydra.sweeper.budget=20runs") == 0
    tried = [float(typed) for _, _, typed, *_ in search.chosen]
    assert min(tried) >= 0.02
    assert max(tried) <= 0.5
    answers = search.answers
    assert [answer.arm for answer in answers] == ["peak lr=0.003", "peak lr=0.01"]
    assert all(abs(search.off(answer)) <= 0.4 for answer in answers)
    report = build_report(search.folder)
    assert "best weight_decay" in dict(table_of_answers(report.answers, key_of(report.search)))
    lines = report.verdict.lines
    assert any("optim.weight_decay" in line for line in lines)
    assert not any("learning rate" in line for line in lines)


@pytest.mark.e2e
def test_a_value_that_the_rules_refuse_ends_the_range(searches: Callable[..., Search]) -> None:
    search = searches(key="optim.beta2", best={4096: 0.95}, diverges=9.0)
    assert search.run(ONE, "hydra.sweeper.key=optim.beta2", "optim.beta2=0.9996", "hydra.sweeper.budget=6runs") == 0
    tried = [float(typed) for _, typed, *_ in search.chosen]
    assert tried[0] == 0.9996  # a value that was given is not rounded
    assert all(value < 1 for value in tried)
    options = ["hydra.sweeper.key=optim.beta2", "optim.beta2=0.6", "hydra.sweeper.budget=6runs"]
    whole, killed = (searches(key="optim.beta2", best={4096: 0.95}, diverges=9.0) for _ in range(2))
    assert whole.run(ONE, *options) == 0
    assert 0.95 < max(float(typed) for _, typed, *_ in whole.chosen) < 1  # close to the end, in one run
    for _ in range(6):
        killed.run(ONE, *options, killed_after=1)
    assert killed.chosen == whole.chosen


def test_choices_of_earlier_commands_hold_for_their_own_runs_only(searches: Callable[..., Search]) -> None:
    search = searches()
    assert search.run(ONE, "hydra.sweeper.budget=4runs") == 0
    earlier = {*search.folder.glob("*/config.yaml")}
    assert search.run(ONE, "train.max_tokens=200000", "hydra.sweeper.budget=7runs") == 0
    assert len(search.chosen) == 7
    assert len({*search.folder.glob("*/config.yaml")} - earlier) == 3
    with pytest.raises(ConfigError) as refused:
        search.run(ONE, "hydra.sweeper.key=optim.weight_decay", "hydra.sweeper.range=0.01..1")
    assert refused.value.code == "another-key"


def test_the_time_of_a_run_is_that_of_its_arm(searches: Callable[..., Search]) -> None:
    search = searches(arms={"adamw": 1.0, "lion": 0.125}, slower={"lion": 10.0}, sigma=0.05)
    begin = search.clock.now
    assert search.run(ONE, "optim=adamw,lion", "hydra.sweeper.budget=2600s") == 0
    assert 2040 <= search.clock.now - begin <= 2600


def test_each_arm_begins_where_the_time_of_a_run_is_not_known(
    searches: Callable[..., Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two places and three arms: a run of another arm says nothing of its time, and does not keep it waiting."""
    looks = Counter[Ended]()

    def poll(ended: Ended) -> int | None:
        """The code of a process at the second look at it: until then the search goes on with others."""
        looks[ended] += 1
        return ended.code if looks[ended] > 1 else None

    monkeypatch.setattr(Ended, "poll", poll)
    search = searches(arms={"adamw": 1.0, "lion": 0.125, "nadamw": 1.0}, sigma=0.05)
    assert search.run(ONE, "optim=adamw,lion,nadamw", "sweep.parallel=2", "hydra.sweeper.budget=20m") == 0
    assert len({arm for arm, *_ in search.chosen[:3]}) == 3


def test_a_search_with_one_seed_does_not_know_the_noise(searches: Callable[..., Search]) -> None:
    search = searches()
    assert search.run(ONE, "hydra.sweeper.seeds=1") == 0
    assert ["noise unknown" in answer.badges for answer in search.answers] == [True]


def test_a_search_for_another_key_goes_on_by_its_own_command(searches: Callable[..., Search]) -> None:
    search = searches(key="optim.weight_decay", best={4096: 0.2})
    options = ["hydra.sweeper.key=optim.weight_decay", "hydra.sweeper.range=0.02..0.5"]
    assert search.run(ONE, *options, "hydra.sweeper.budget=3runs") == 0
    [proposal] = build_report(search.folder).further
    assert {"tune", "--budget", "optim.weight_decay", "0.02..0.5"} <= {*proposal.command.split()}
    assert "learning rate" not in proposal.why


def test_a_batch_size_without_runs_has_an_answer_that_says_why(searches: Callable[..., Search]) -> None:
    search = searches()
    assert search.run(SIZES, "hydra.sweeper.budget=4runs") == 0
    answers = {answer.total_batch_size: answer for answer in search.answers}
    assert {size: answer.stopped for size, answer in answers.items()} == dict.fromkeys((4096, 8192, 16384), "budget")
    assert len({batch for batch, *_ in search.chosen}) == 2
    assert all(answer.wanted for answer in answers.values())


def test_choices_of_another_command_that_runs_now_count(
    searches: Callable[..., Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    search, train = searches(), Search.train

    def beside_another(self: Search, directory: Path, config: Config) -> int:
        code, file = train(self, directory, config), self.folder / "tune.jsonl"
        if len(self.chosen) == 2:
            [*_, chosen] = (event for event in read_events(self.folder) if event["event"] == "choose")
            others = [{**chosen, "cell": f"of-another-command-{number}"} for number in range(3)]
            file.write_text(file.read_text() + "".join(f"{json.dumps(event)}\n" for event in others))
        return code

    monkeypatch.setattr(Search, "train", beside_another)
    assert search.run(ONE, "hydra.sweeper.budget=6runs") == 0
    assert len(search.chosen) == 6
    assert len([*search.folder.glob("*/config.yaml")]) == 3
