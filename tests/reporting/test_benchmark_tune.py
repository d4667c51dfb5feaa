"""The benchmark of methods that look for the best learning rate: references, scores and methods.

tests/benchmark_tune.py is a program; this is a short form of it.
"""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import benchmark_tune
import numpy as np
import pytest
from benchmark_tune import Tune, Tuner, play, score
from calibration import KINDS
from searches import Answer, Outcome, Trials, grid
from surfaces import (
    Cells,
    Run,
    Surface,
    Table,
    crossing,
    every_other_rate,
    fit_minimum,
    flat,
    library,
    of_noise,
    step_law,
    synthetic,
)  # fmt: skip

RATES = [2.0 ** (j / 2 - 12) for j in range(12)]
STEPLAW = os.environ.get("STEPLAW")


def linex(x: float, optimum: float, skew: float = 0.5, height: float = 0.01) -> float:
    u = skew * (x - optimum)
    return 3 + 2 * height / skew**2 * (math.expm1(u) - u)


def table(rng: np.random.Generator, noise: float = 0.0, sizes: int = 4) -> tuple[Table, dict[int, float]]:
    """A table like Step Law's, with a noise that is a share of the height, and its optima."""
    optima = {2**j: rng.uniform(-10, -8.5) for j in range(sizes)}
    cells: dict[int, Cells] = {
        batch: {lr: [linex(math.log2(lr), optimum) + 0.01 * noise * rng.standard_normal()] for lr in RATES}
        for batch, optimum in optima.items()
    }
    priors = {batch: 2 ** (optimum + rng.uniform(-1, 1)) for batch, optimum in optima.items()}
    return Table("known", cells, priors, 0.01 * noise, noise=noise), optima


def rows(method: str, arms: Sequence[Surface]) -> list[benchmark_tune.Score]:
    return [row for arm in arms for row in play((arm, 0), [method], 8)[method].scores]


def within(rows: Sequence[benchmark_tune.Score], octaves: float) -> float:
    known = [row.distance for row in rows if row.distance is not None]
    return sum(distance <= octaves for distance in known) / len(known)


def test_the_fit_finds_the_minimum_of_its_own_curve_and_its_error() -> None:
    x = np.arange(-2, 2.5, 0.5)
    losses = {float(value): linex(value, 0.13) for value in x}
    fit = fit_minimum(losses)
    assert fit is not None
    assert (fit.optimum, fit.height) == pytest.approx((0.13, 0.01))
    rng = np.random.default_rng(0)
    noisy = [{at: loss + 0.0005 * rng.standard_normal() for at, loss in losses.items()} for _ in range(400)]
    found = [fit.optimum for one in noisy if (fit := fit_minimum(one))]
    assert np.std(found) == pytest.approx(fit.unit_sd * 0.05, rel=0.1)
    quadratic = fit_minimum({float(value): (value - 0.13) ** 2 for value in x}, skew=0)
    assert quadratic is not None
    assert (quadratic.optimum, quadratic.height) == pytest.approx((0.13, 1))


def test_there_is_no_reference_where_the_rest_does_not_show_the_minimum() -> None:
    arm, optima = table(np.random.default_rng(1))
    batch, optimum = next(iter(optima.items()))
    above = [Run(batch, lr, 0, None) for lr in RATES if math.log2(lr) > optimum]
    near = [Run(batch, lr, 0, None) for lr in RATES if abs(math.log2(lr) - optimum) < 1.3]
    assert arm.reference(batch, above) is None
    assert arm.reference(batch, near) is None
    reference = arm.reference(batch, [Run(batch, lr, 0, None) for lr in RATES[::2]])
    assert reference is not None
    assert reference.low == reference.high == pytest.approx(optimum)


def test_a_reference_does_not_depend_on_the_runs_that_were_taken() -> None:
    arm, _ = table(np.random.default_rng(2), 0.1)
    taken = [Run(batch, lr, 0, None) for batch in arm.sizes for lr in RATES[1::2]]
    spoiled = replace(
        arm, cells={batch: cells | {lr: [9.0] for lr in RATES[1::2]} for batch, cells in arm.cells.items()}
    )
    for batch in arm.sizes:
        assert arm.reference(batch, taken) == spoiled.reference(batch, taken) is not None


def test_no_run_of_a_table_is_taken_twice() -> None:
    arm, _ = table(np.random.default_rng(3))
    trials = Trials(arm)
    found = [trials.run(1, RATES[5] * 1.1) for _ in range(3)]
    assert [run and run.lr for run in found] == [RATES[5], RATES[6], None]
    assert trials.run(1, 2 * RATES[-1]) is None
    any_rate = Trials(synthetic("any", KINDS["linex"], 0))
    runs = [any_rate.run(any_rate.surface.sizes[0], 0.001) for _ in range(3)]
    assert [run and (run.lr, run.seed) for run in runs] == [(0.001, 0), (0.001, 1), (0.001, 2)]
    assert len({run.loss for run in any_rate.runs}) == 3


@pytest.mark.e2e
def test_coverage_is_that_of_the_truth_although_the_reference_has_errors() -> None:
    """Intervals of a fit of the true form to half of the table, with the true noise. The others are the reference."""
    rng = np.random.default_rng(4)
    found = []
    for arm, _ in (table(rng, 0.2) for _ in range(100)):
        taken = [Run(batch, lr, 0, None) for batch in arm.sizes for lr in RATES[::2]]
        rest = [Run(batch, lr, 0, None) for batch in arm.sizes for lr in RATES[1::2]]
        fits = {batch: fit for batch in arm.sizes if (fit := fit_minimum(arm.means(batch, rest)))}
        halves = {batch: 1.96 * fit.unit_sd * 0.2 for batch, fit in fits.items()}
        answers = {
            batch: Answer(2**fit.optimum, 2 ** (fit.optimum - half), 2 ** (fit.optimum + half))
            for (batch, fit), half in zip(fits.items(), halves.values(), strict=True)
        }
        found += score(arm, Outcome(answers, taken))
    covered = [row.covered for row in found if row.covered is not None]
    raw = [row.raw for row in found if row.raw is not None]
    assert len(covered) > 300
    assert 0.92 <= np.mean(covered) <= 0.98
    assert np.mean(raw) < 0.9  # two equal errors: 1.96 / sqrt(2) standard deviations hold 83%


def test_an_answer_that_is_off_is_scored_so() -> None:
    arm = synthetic("off", KINDS["quadratic"], 0)
    one, two, three, four = arm.sizes

    def at(batch: int, off: float) -> float:
        return float(2 ** (arm.optima[batch] + off))

    answers = {
        one: Answer(at(one, 0.2), at(one, -0.1), at(one, 0.5), True),
        two: Answer(at(two, 1), at(two, 0.5), at(two, 1.5), True),
        three: Answer(None),
        four: Answer(at(four, 0)),
    }
    runs = [Run(two, at(two, off), 0, 3.0) for off in (0.5, 1, 1.5)] + [
        Run(one, at(one, -1), 0, 3.0),
        Run(one, at(one, 1), 0, 3),
    ]
    found = score(arm, Outcome(answers, runs))
    assert [row.distance for row in found] == pytest.approx([0.2, 1, math.inf, 0], abs=1e-9)
    assert [row.covered for row in found] == [True, False, None, None]
    assert [row.outside for row in found] == [False, True, None, None]
    assert [row.regret for row in found] == pytest.approx([0.02 * 0.04, 0.02, None, 0], abs=1e-9)
    assert [row.runs for row in found] == [2, 3, 0, 0]


def test_on_arms_with_little_noise_the_methods_do_what_they_are_known_for() -> None:
    arms = [arm for arm in of_noise(0, 0.02) if arm.kind.form in ("quadratic", "linex") and not arm.kind.heavy_tails]
    assert within(rows("full grid, parabola", arms), 0.5) == 1
    assert within(rows("bracket, parabola", arms), 0.5) >= 0.95
    assert within(rows("golden section", arms), 0.5) >= 0.9
    assert within(rows("4 random, lowest", arms), 0.25) <= 0.6
    assert within(rows("formula alone", arms), 0.25) <= 0.6


def test_a_bracket_finds_an_optimum_three_octaves_off_and_a_grid_does_not() -> None:
    arms = of_noise(0, 0.05, (-3, 3))
    assert within(rows("bracket, parabola", arms), 0.5) >= 0.95
    assert within(rows("full grid, lowest", arms), 0.5) == 0
    assert all(row.outside for row in rows("full grid, lowest", arms))


def test_a_method_that_claims_an_optimum_of_a_flat_arm_is_wrong() -> None:
    found = rows("bracket, parabola", flat(0))
    assert any(row.bracketed for row in found)
    assert all(row.outside and row.distance is None for row in found)


def test_successive_halving_discards_the_best_rate_where_learning_curves_cross() -> None:
    arms = crossing(0)
    assert within(rows("successive halving", arms), 0.5) <= 0.25
    assert within(rows("bracket, parabola", arms), 0.5) >= 0.9


@pytest.mark.e2e
def test_the_adapter_runs_what_a_tuner_wants() -> None:
    """A run that does not exist ends it; the budget is kept."""
    arm, _ = table(np.random.default_rng(5), 0.1)
    rng = np.random.default_rng(0)
    mine = Tune(Tuner(), 8)(arm, rng)
    assert mine.budget == 32
    assert 3 * len(arm.sizes) <= len(mine.runs) <= 32
    assert len({(run.batch, run.lr, run.seed) for run in mine.runs}) == len(mine.runs)
    assert play((arm, 0), ["tune"], 2)["tune"].over == 0

    class Elsewhere(Tuner):
        def wanted(self, trials: Trials, budget: int) -> Sequence[tuple[int, float]]:
            return [(1, 100.0)]

    assert Tune(Elsewhere(), 8)(arm, rng).runs == []


@pytest.mark.e2e
def test_optuna_has_as_many_runs_as_tune() -> None:
    pytest.importorskip("optuna")
    arm, _ = table(np.random.default_rng(6), 0.1)
    found = play((arm, 0), ["Optuna TPE", "tune"], 8)
    assert [row.runs for row in found["Optuna TPE"].scores] == [row.runs for row in found["tune"].scores]


def test_each_arm_of_the_library_can_be_played() -> None:
    for arm in library():
        found = play((arm, 0), ["octave grid, parabola", "formula alone"], 8)
        assert all(row.distance is not None for row in found["formula alone"].scores)
        for batch in arm.sizes:
            assert len(set(grid(arm, batch))) == len(arm.cells[batch])


def test_the_command_names_the_table_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("STEPLAW", raising=False)
    monkeypatch.setattr(sys, "argv", ["benchmark_tune.py", "--tables", "crossing", "--methods", "bracket, ", "halving"])
    benchmark_tune.main()
    out, err = capsys.readouterr()
    assert "steplaw" in err
    lines = [line.strip("|").split("|") for line in out.splitlines()]
    assert [line[1].strip() for line in lines[2:]] == ["bracket, parabola", "successive halving"]
    assert {len(line) for line in lines} == {len(benchmark_tune.COLUMNS)}
    monkeypatch.setattr(sys, "argv", ["benchmark_tune.py", "--steplaw", str(tmp_path / "none.csv")])
    with pytest.raises(SystemExit, match="2"):
        benchmark_tune.main()
    monkeypatch.setattr(sys, "argv", ["benchmark_tune.py", "--methods", "nothing"])
    with pytest.raises(SystemExit, match="nothing: no such name"):
        benchmark_tune.main()


@pytest.mark.slow
def test_on_synthetic_arms_more_noise_means_fewer_hits() -> None:
    share = [
        within(rows("bracket, parabola", [arm for seed in range(5) for arm in of_noise(seed, ratio)]), 0.5)
        for ratio in (0.05, 0.2, 0.5, 2)
    ]
    assert share == sorted(share, reverse=True)
    assert share[0] >= 0.95
    assert share[-1] <= 0.75


@pytest.mark.slow
@pytest.mark.skipif(not STEPLAW, reason="STEPLAW: the path of Step Law's table, a CSV file, is not set")
def test_on_step_law_the_methods_hit_as_often_as_was_found_before() -> None:
    """Found by another program, on all 17 settings of the table and with references of its own."""
    arms = step_law(Path(STEPLAW or ""))
    for method, octaves, share in (
        ("full grid, lowest", 0.25, 0.73),
        ("full grid, lowest", 0.5, 0.97),
        ("octave grid, lowest", 0.5, 0.83),
        ("bracket, parabola", 0.25, 0.86),
        ("bracket, parabola", 0.5, 1),
        ("formula alone", 0.25, 0.34),
        ("formula alone", 0.5, 0.63),
    ):
        assert within(rows(method, arms), octaves) == pytest.approx(share, abs=0.1), (method, octaves)
    runs = [row.runs for row in rows("bracket, parabola", arms)]
    assert np.mean(runs) == pytest.approx(3.5, abs=0.2)
    known = [row.distance is not None for row in rows("full grid, lowest", every_other_rate(arms))]
    assert np.mean(known) >= 0.85


def assert_reaches(scored: Sequence[benchmark_tune.Score], near: float, covered: float) -> None:
    """`near`: share of the answers within 0.25 octaves; `covered`: share of the intervals that hold the reference."""
    assert within(scored, 0.25) >= near
    assert within(scored, 0.5) >= 0.98
    assert np.mean([row.covered for row in scored if row.covered is not None]) >= covered


@pytest.mark.slow
@pytest.mark.parametrize("offs", [(None,), (-3, 3)])
def test_a_search_finds_the_optima_of_synthetic_arms_also_from_a_wrong_prior(offs: Sequence[float | None]) -> None:
    assert_reaches(rows("tune", of_noise(0, 0.2, offs=offs)), 0.95, 0.93)


@pytest.mark.slow
@pytest.mark.skipif(not STEPLAW, reason="STEPLAW: the path of Step Law's table, a CSV file, is not set")
def test_on_step_law_a_search_needs_a_third_of_the_grid() -> None:
    scored = rows("tune", step_law(Path(STEPLAW or "")))
    assert_reaches(scored, 0.85, 0.93)
    assert np.mean([row.share_of_grid for row in scored]) <= 0.35
    assert np.mean([row.regret for row in scored if row.regret is not None]) <= 1e-3
