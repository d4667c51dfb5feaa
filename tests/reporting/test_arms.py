"""Arms of a sweep side by side: exponents, the batch size from which each falls behind, and sizes of the model."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vl_convert
from scipy import stats
from sweeps import write_run

from gptexp.config.compose import compose
from gptexp.config.schema import Config, fields_of
from gptexp.reporting.charts.batch_charts import NOISE_SCALE, arm_charts, noise_scale_lines
from gptexp.reporting.listings.records import Run, find_runs
from gptexp.reporting.page.page import sections
from gptexp.reporting.page.report import Report, build_report
from gptexp.reporting.page.write import numbers, show
from gptexp.reporting.statistics.analysis import Analysis, Arm, analyse, label_of
from gptexp.reporting.statistics.arms import clearest_gap, falls_behind
from gptexp.reporting.statistics.law import fit_law
from gptexp.reporting.statistics.noise_scale import at_the_end
from gptexp.reporting.words.answers import table_of_answers
from gptexp.reporting.words.arms_in_words import arms_in_words
from gptexp.reporting.words.verdict import verdict
from gptexp.storage import run_dir

BATCHES = (2048, 4096, 8192, 16384)
SIGMA = 0.003
NANO = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 1024}  # as `write_run` assumes


def write_arm(
    root: Path,
    name: str,
    keys: dict[str, object],
    best: Callable[[int], float],
    loss: Callable[[int], float],
    **own: object,
) -> None:
    """Runs of two seeds whose best learning rate is `best(batch)`, with a mean loss of `loss(batch)` there."""
    rng = np.random.default_rng(len(name))
    for batch in own.get("batches", BATCHES):  # type: ignore[attr-defined]
        for octave in range(-2, 3):
            lr = 0.02 * 2.0**octave
            for seed in (1, 2):
                height = 0.02 * math.log2(lr / best(batch)) ** 2
                config = Config()
                config.model = replace(config.model, **NANO)
                for key, value in keys.items():
                    section, _, field = key.partition(".")
                    setattr(getattr(config, section), field, value)
                measured = loss(batch) + height + SIGMA * rng.standard_normal()
                write_run(root / f"{name}-{batch}-{lr:g}-{seed}", batch, lr, seed, measured, config=config)


@pytest.fixture(scope="module")
def two_rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms with known laws, whose losses rise by 0.02 and by 0.06 nats an octave. Tests must not write into it."""
    root = tmp_path_factory.mktemp("sweeps") / "rules"
    reference = {"scaling.reference_tokens": 8192}
    write_arm(root, "none", reference, lambda b: 0.02 * math.sqrt(b / 8192), lambda b: 4 + 0.02 * math.log2(b / 2048))
    write_arm(
        root, "half", {**reference, "scaling.betas": "beta2_half_life"}, lambda _: 0.02,
        lambda b: 3.9 + 0.06 * math.log2(b / 2048),
    )  # fmt: skip
    run_dir.write_json(root / run_dir.SWEEP, {"name": "rules", "overrides": ["model=nano"]})
    return root


@pytest.fixture(scope="module")
def report(two_rules: Path) -> Report:
    """The report on `two_rules`. Tests must not change it."""
    return build_report(two_rules)


@pytest.fixture(scope="module")
def arms(report: Report) -> list[Arm]:
    return report.analysis.arms


def with_law(arm: Arm, **changes: Any) -> Arm:
    """The same arm with another law."""
    assert arm.law is not None
    changed = replace(arm)
    vars(changed)["law"] = replace(arm.law, **changes)
    return changed


@pytest.mark.e2e
def test_the_laws_of_two_arms_are_compared(report: Report) -> None:
    [gap] = [line for line in report.verdict.lines if line.startswith("The exponents of scaling.betas=")]
    interval = re.search(r" differ: their difference is \S+ \(95% interval (\S+) to (\S+)\)", gap)
    assert interval is not None
    low, high = sorted(abs(float(number)) for number in interval.groups())
    assert low < 0.5 < high


def test_each_arm_falls_behind_where_its_known_loss_does(arms: list[Arm]) -> None:
    """By 0.05 nats after 2.5 octaves, or after 5/6 of one."""
    by_rule = {arm.choices["scaling.betas"]: arm.curves.best_losses for arm in arms}
    for rule, truth in (("none", 2048 * 2**2.5), ("beta2_half_life", 2048 * 2 ** (5 / 6))):
        limit = falls_behind(by_rule[rule], 0.05)
        assert limit is not None
        assert limit.tokens == pytest.approx(truth, rel=0.12)
        assert f"{limit.tokens:,.0f} tokens a step (95% interval " in "\n".join(
            f.text for f in arms_in_words(arms, 0.05)
        )
    assert "not up to 16,384 tokens a step" in "\n".join(finding.text for finding in arms_in_words(arms, 0.5))


def test_the_losses_of_the_arms_are_compared_at_each_batch_size(report: Report) -> None:
    said = [line for line in report.verdict.lines if "has the lowest loss: " in line]
    assert [line.split()[1] for line in said] == ["2,048", "4,096", "8,192", "16,384"]
    for line, lower, higher, gap in (
        (said[0], "beta2_half_life", "none", 0.1),
        (said[3], "none", "beta2_half_life", 0.02),
    ):
        found = re.search(rf"={lower} has the lowest loss: scaling.betas={higher} is (\S+) \(", line)
        assert found is not None
        assert float(found[1]) == pytest.approx(gap, abs=0.01)


def test_the_arms_are_listed_side_by_side(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    columns = dict(table_of_answers(report.answers))
    assert [*zip(columns["tokens a step"], columns["arm"], strict=True)] == [
        (batch, f"scaling.betas={rule}")
        for batch in ("2,048", "4,096", "8,192", "16,384")
        for rule in ("beta2_half_life", "none")
    ]
    show(report)
    printed = capsys.readouterr().out
    html = " ".join(sections(report)["verdict"].split())
    for batch, label, best, interval, *_ in zip(*columns.values(), strict=True):
        assert re.search(" +".join(map(re.escape, (batch, label, best, interval))), printed)
        assert f'<td class="">{batch}</td> <td class="text">{label}</td> <td class="">{best}</td>' in html


def test_arms_are_drawn_together_with_the_noise_scale(report: Report) -> None:
    drawn = {figure.key: figure for figure in report.figures}
    assert {"arms-lr", "arms-loss"} <= drawn.keys()
    *_, vertical = drawn["arms-loss"].spec["layer"]
    assert [line["batch"] for line in vertical["data"]["values"]] == [6 * 1024] * 2


def test_optima_on_a_curve_are_joined_instead_of_their_law(arms: list[Arm]) -> None:
    one, other = arms
    assert other.law is not None
    bent = with_law(one, bends=True)
    figure = next(arm_charts([bent, other]))
    lines = {(line["arm"], line["batch"]): line["lr"] for line in figure.spec["layer"][0]["data"]["values"]}
    joined = {(one.label, batch): optimum.lr for batch, optimum in one.curves.optima.items()}
    assert lines == joined | {(other.label, batch): other.law.at(batch) for batch in other.law.sizes}
    joins = "Lines join the optima of {}, which lie on a curve in log-log."
    assert figure.caption.endswith(f" intervals. Lines are the fitted laws. {joins.format(one.label)}")
    both = next(arm_charts([bent, with_law(other, bends=True)])).caption
    assert both.endswith(f" intervals. {joins.format(f'{one.label} and of {other.label}')}")


def test_a_noise_scale_outside_the_batch_sizes_widens_the_axis_or_is_in_the_caption(arms: list[Arm]) -> None:
    """It is 6,144 tokens. `SCALE_WITHIN` is 16."""
    for sizes in ((64, 384), (98304, 10**6)):
        layer, text = noise_scale_lines(arms, sizes)
        assert [line["batch"] for line in layer["data"]["values"]] == pytest.approx([6144] * 2)
        assert text == NOISE_SCALE
    for sizes in ((64, 383), (98305, 10**6)):
        layer, text = noise_scale_lines(arms, sizes)
        assert layer["data"]["values"] == []
        assert text.endswith(f": 6,144 tokens ({arms[0].label}), 6,144 tokens ({arms[1].label}).")


@pytest.mark.e2e
def test_the_axis_of_the_batch_size_covers_the_noise_scale(tmp_path: Path) -> None:
    for name in ("one", "other"):
        keys = {"optim.beta2": 0.9 if name == "one" else 0.95}
        write_arm(tmp_path, name, keys, lambda _: 0.02, lambda b: 4 + b / 1e5, batches=(2048, 4096))
    drawn = {figure.key: figure for figure in build_report(tmp_path).figures}
    for key in ("arms-loss", "optima-0", "optima-1"):
        vega = vl_convert.vegalite_to_vega(drawn[key].spec)
        [x] = [scale for scale in vega["scales"] if scale["name"] == "x"]
        by_name = {data["name"]: data for data in vega["data"]}
        values = []
        for field in x["domain"]["fields"]:
            data = by_name[field["data"]]
            while "source" in data:
                data = by_name[data["source"]]
            values += [row["batch"] for row in data["values"]]
        assert (min(values), max(values)) == pytest.approx((2048, 6144))


def test_the_noise_scale_is_that_of_the_best_run_that_measured_it(two_rules: Path) -> None:
    """As in the verdict."""
    runs = sorted((run for run in find_runs(two_rules) if run.name.startswith("none")), key=lambda run: run.loss or 0.0)
    best, following, *_ = runs
    best.train[:] = [replace(step, noise_scale=None, norms=None) for step in best.train]
    for number, step in enumerate(following.train):
        assert step.norms is not None
        following.train[number] = replace(step, norms=step.norms._replace(small=1.1 * step.norms.small))
    analysis = analyse("sweep", runs)
    layer, _ = noise_scale_lines(analysis.arms, BATCHES)
    scale = at_the_end(following)
    assert scale is not None
    assert scale.tokens > 7000
    assert [line["batch"] for line in layer["data"]["values"]] == [scale.tokens]
    [said] = [finding.text for finding in verdict(analysis).caveats if "noise scale" in finding.text]
    assert f" of {following.name} is {scale.tokens:,.0f} tokens" in said


def test_a_single_arm_is_compared_with_nothing(two_rules: Path, tmp_path: Path) -> None:
    for directory in two_rules.glob("none-*"):
        (tmp_path / directory.name).symlink_to(directory)
    report = build_report(tmp_path)
    assert not [f for f in report.figures if f.key.startswith("arms")]
    assert list(arms_in_words(report.analysis.arms, 0.05)) == []
    assert numbers(report)["transfers"] == []


@pytest.mark.parametrize(
    ("losses", "truth"),
    [((4.0, 4.02, 4.10), 4096 * 2 ** (0.03 / 0.08)), ((4.1, 4.0, 4.02, 4.3), 8192 * 2 ** (0.03 / 0.28)),
     ((4.0, 4.1, 3.9), 2048 * 2**0.5), ((4.0, 4.01), None), ((4.2, 4.1, 4.0), None), ((4.0,), "none")],
)  # fmt: skip
def test_the_limit_is_where_a_line_through_the_losses_crosses(
    losses: tuple[float, ...], truth: float | str | None
) -> None:
    """`truth` is worked out by hand for 2,048, 4,096, … tokens and 0.05 nats."""
    draws = {2048 * 2**i: normal_draws(loss, 0.005, i) for i, loss in enumerate(losses)}
    found = falls_behind(draws, 0.05)
    if truth == "none":
        assert found is None
        return
    assert found is not None
    assert found.tokens == (None if truth is None else pytest.approx(truth))
    if found.tokens is not None:
        assert found.low is not None
        assert found.high is not None
        assert found.low < found.tokens < found.high
    assert found.largest == max(draws)


@pytest.mark.e2e
@pytest.mark.parametrize("error", [0.005, 0.01, 0.015])
@pytest.mark.parametrize(
    ("losses", "truth", "missed_low"),
    [
        (tuple(4 + 0.03 * i for i in range(6)), 5 / 3, 0.025),
        ((4.0,) * 4 + tuple(4 + 0.03 * i for i in range(6)), 4 + 5 / 3, 0.04),
        ((4.06, 4.03, 4.0, 4.01, 4.04, 4.08, 4.14), 4 + 1 / 4, 0.025),
    ],
    ids=["rises", "flat", "valley"],
)
def test_the_interval_of_the_limit_holds_the_truth(
    losses: tuple[float, ...], truth: float, missed_low: float, error: float
) -> None:
    """`truth` is in octaves above the smallest batch size, `error` the standard error of each loss.

    Where losses are equal, the lowest is too low by chance, and must not move the limit down.
    """
    rng = np.random.default_rng(0)
    found, below, held = [], 0, 0
    for _ in range(500):
        drawn = np.array(losses) + error * rng.standard_normal(len(losses))
        limit = falls_behind({2048 * 2**i: normal_draws(loss, error, i) for i, loss in enumerate(drawn)}, 0.05)
        assert limit is not None
        assert limit.tokens is None or (limit.low is not None and limit.low <= limit.tokens)
        low, value, high = (
            math.log2((limit_at or math.inf) / 2048) for limit_at in (limit.low, limit.tokens, limit.high)
        )
        found.append(value)
        below += high < truth
        held += low <= truth <= high
    assert abs(np.median(found) - truth) < 0.12
    assert below / 500 < missed_low
    assert held / 500 > 0.92


STANDARD = stats.norm.ppf(stats.qmc.Sobol(10, rng=0).random(512))
STANDARD -= np.median(STANDARD, axis=0)


def normal_draws(mean: float, sd: float, order: int) -> np.ndarray:
    """Of a normal distribution, independent of those of any other number `order`."""
    return np.asarray(mean + sd * STANDARD[:, order])


def drawn_optima(rng: np.random.Generator, exponent: float, sd: float) -> dict[int, np.ndarray]:
    """Draws of optima with a standard error of `sd` octaves, on a power law that levels off beyond 4,096 tokens."""
    levels = {batch: exponent * math.log2(batch / 2048) + 0.5 * min(1.0, math.log2(batch / 2048)) for batch in BATCHES}
    drawn = {batch: level + sd * rng.standard_normal() for batch, level in levels.items()}
    return {batch: octaves + sd * rng.standard_normal(400) for batch, octaves in drawn.items()}


@pytest.mark.e2e
@pytest.mark.parametrize("sds", [(0.1,) * 2, (0.1,) * 4, (0.02, 0.1, 0.5, 0.1)])
def test_of_equal_arms_the_two_that_differ_most_rarely_differ_significantly(sds: tuple[float, ...]) -> None:
    rng = np.random.default_rng(len(sds))
    found = 0
    for _ in range(100):
        clearest = clearest_gap([drawn_optima(rng, 0.3, sd) for sd in sds])
        assert clearest is not None
        found += 0 not in clearest[2]
    assert found <= stats.binom.ppf(0.999, 100, 0.05)


def test_a_curve_that_two_arms_share_does_not_hide_that_their_exponents_differ() -> None:
    """The optima of each alone scatter around a line more than their intervals allow."""
    rng, held, found = np.random.default_rng(1), 0, 0
    for _ in range(100):
        clearest = clearest_gap([drawn_optima(rng, exponent, 0.1) for exponent in (0.4, 0.15)])
        assert clearest is not None
        held += 0.25 in clearest[2]
        found += 0 not in clearest[2]
    assert held >= stats.binom.ppf(0.001, 100, 0.95)
    assert found > 70


def test_two_arms_that_differ_are_found_beside_one_whose_exponent_nobody_knows() -> None:
    """The last one differs most from the others, but not significantly."""
    rng = np.random.default_rng(0)
    optima = [drawn_optima(rng, exponent, sd) for exponent, sd in ((0.5, 0.03), (0.1, 0.03), (0.9, 2.0))]
    clearest = clearest_gap(optima)
    assert clearest is not None
    assert clearest[:2] == (0, 1)
    assert 0.4 in clearest[2]
    assert 0 not in clearest[2]
    assert clearest_gap([optima[0], {32: optima[0][2048]}]) is None


def test_the_difference_of_three_arms_is_said_to_be_corrected(arms: list[Arm]) -> None:
    named = [replace(arm, choices={"optim.beta2": 0.5 + 0.1 * number}) for number, arm in enumerate([*arms, arms[0]])]
    said = [finding.text for finding in arms_in_words(named, 0.05)]
    [gap] = [text for text in said if text.startswith("The exponents of optim.beta2=")]
    assert " differ: " in gap
    assert "corrected for 3 pairs" in gap


@pytest.mark.e2e
def test_an_arm_without_an_optimum_is_named_where_the_others_are_compared(two_rules: Path) -> None:
    """At 2,048 tokens a step the first arm has only learning rates below its best one."""
    runs = [run for run in find_runs(two_rules) if not run.name.startswith("none-2048") or run.lr < 0.008]
    compared, left_out = sorted(analyse("sweep", runs).arms, key=lambda arm: 2048 not in arm.curves.optima)
    third = replace(compared, choices={"optim.beta2": 0.5})
    for arms, text in (([compared, left_out], "cannot be compared: "), ([compared, left_out, third], "lowest loss: ")):
        [line] = [finding.text for finding in arms_in_words(arms, 0.05) if finding.text.startswith("At 2,048 tokens")]
        assert text in line
        assert line.endswith(f"{left_out.label} has no bracketed optimum.")


def test_an_arm_that_rises_as_a_root_and_then_no_more_lies_on_a_curve() -> None:
    """Its optima lie on a curve; those of the other lie on a line."""
    sizes = (1024, 2048, 4096, 8192, 16384)
    for best, bends in ((lambda b: math.sqrt(min(b, 4096) / 4096), True), (lambda b: math.sqrt(b / 8192), False)):
        law = fit_law({b: normal_draws(math.log2(best(b)), 0.03, i) for i, b in enumerate(sizes)})
        assert law is not None
        assert law.bends is bends


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({"scatter": False, "bends": False}, 0),
        ({"sizes": (2048, 8192)}, 1),
        ({"scatter": True}, 1),
        ({"scatter": True, "bends": True}, 2),
    ],
)
def test_the_law_of_an_arm_is_said_with_what_limits_it(arms: list[Arm], changes: dict[str, Any], limits: int) -> None:
    arm = with_law(arms[0], exponent=0.5, low=0.4, high=0.6, **changes)
    said = verdict(Analysis("", [], [arm], [], [])).findings
    [finding] = [f for f in said if "is proportional to the batch size" in f.text]
    assert "0.50 (95% interval 0.40 to 0.60" in finding.text
    assert "agrees with the rule 'square root' (0.5) and not with" in finding.text
    assert len(list(filter(None, finding.why.split(". ")))) == limits


@pytest.mark.e2e
def test_the_best_learning_rate_over_widths_moves_in_one_arm_and_stays_in_the_other(tmp_path: Path) -> None:
    """It falls as 1 / width without weight decay, and stays with it."""
    for width in (32, 64, 128):
        for name, decay, power in (("moves", 0.0, -1), ("stays", 0.1, 0)):
            keys = {"model.n_embd": width, "model.n_head": width // 16, "optim.weight_decay": decay}
            best = 0.02 * (width / 64) ** power
            write_arm(tmp_path, f"{name}{width}", keys, lambda _, best=best: best, lambda _: 4.0, batches=(4096,))  # type: ignore[misc]
    report = build_report(tmp_path)
    said = [line for line in report.verdict.lines if "model.n_embd=32 to 128" in line]
    assert [line.startswith("optim.weight_decay=0.1: ") for line in said if "does not move" in line] == [True]
    by_label = {t["label"]: t["factor"] for t in numbers(report)["transfers"]}
    for label, truth in (("optim.weight_decay=0.0", 0.25), ("optim.weight_decay=0.1", 1.0)):
        factor = by_label[label]
        assert factor["low"] < truth < factor["high"]
        assert factor["low"] < factor["value"] < factor["high"]
    assert "arms-n_embd-4096" in {figure.key for figure in report.figures}


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        ("model=bytes", "model=bytes"),
        ("model=bytes model.mlp=swiglu model.bias=false", "model=bytes, model.bias=false, model.mlp=swiglu"),
        ("model=llama_bytes", "model=llama_bytes"),
        ("model=llama_bytes model.mlp=gelu", "model=llama_bytes, model.mlp=gelu"),
        ("model=modern_bytes model.window=16", "model=modern_bytes, model.window=16"),
        ("model=bytes model.n_layer=3 model.n_head=1", "model=bytes, model.n_layer=3, model.n_head=1"),
    ],
)
def test_an_arm_is_called_by_the_nearest_model_and_what_differs(overrides: str, label: str) -> None:
    def flat(given: str) -> dict[str, Any]:
        return {key: value for key, _, value in fields_of(compose(given.split()))}

    others = [flat(given) for given in ("model=bytes", "model=llama_bytes", "model=modern_bytes model.window=32")]
    own = flat(overrides)
    choices = {k: v for k, v in own.items() if k.startswith("model.") and any(v != other[k] for other in others)}
    assert label_of(choices, set(), Run("run", Path(), "completed", own)) == label
