"""The noise scale at the end of a run: Fieller's interval of a ratio of means, against simulation."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from real_runs import train_here

from gptexp.config.compose import compose
from gptexp.config.noise_scale import Norms
from gptexp.reporting.listings.records import Run, Step, find_runs
from gptexp.reporting.statistics.analysis import analyse
from gptexp.reporting.statistics.noise_scale import end_scale, in_words, ratio_interval
from gptexp.reporting.words.verdict import verdict
from gptexp.storage import run_dir


def test_the_interval_contains_the_true_ratio_in_95_percent_of_the_draws() -> None:
    """Over 2,000 draws of correlated pairs. Without their covariance, the interval would contain it more often."""
    draw = np.random.default_rng(0)
    above, below, n, draws = 6.0, 2.0, 10, 2000
    contained = 0
    for _ in range(draws):
        common = draw.normal(size=n)
        low, high = ratio_interval(above + 3 * common, below + common + 0.3 * draw.normal(size=n))
        contained += low <= above / below <= (high or math.inf)
    assert 0.935 < contained / draws < 0.965


def test_a_denominator_that_may_be_zero_gives_no_upper_end() -> None:
    draw = np.random.default_rng(0)
    low, high = ratio_interval(6 + 0.1 * draw.normal(size=10), 0.1 + draw.normal(size=10))
    assert high is None
    # At the lower end, the difference of the means is just significant.
    pairs = draw.normal(size=(10, 2))
    pairs += np.array([6.0, 0.2]) - pairs.mean(0)
    low, high = ratio_interval(*pairs.T)
    assert high is None
    assert low > 0
    rest = pairs @ [1, -low]
    t = rest.mean() / (rest.std(ddof=1) / math.sqrt(10))
    assert abs(t) == pytest.approx(2.262, abs=0.001)  # Student's quantile, 9 degrees of freedom


def test_a_known_scale_is_found_at_the_end_of_a_run() -> None:
    exact = [Norms(2 * (1 + 6 / 1), 2 * (1 + 6 / n), 1, n) for n in (4, 8) * 20]
    scale = end_scale(exact, seq_len=100)
    assert scale is not None
    assert (scale.tokens, scale.low, scale.high) == pytest.approx((600, 600, 600))


@pytest.mark.e2e
def test_a_run_ends_with_the_sentence_of_its_report(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, name in ((50, "long"), (10, "short")):  # the last fifth of the long one has just enough steps
        length = [f"train.max_steps={steps}", "train.save_every=0", "train.eval_every=0"]
        overrides = [*tiny, "log=disabled", "log.progress=lines", "batch.micro_batch_size=4", *length]
        run_dir.save_config(tmp_path / name, compose(overrides))
        assert train_here(overrides, tmp_path / name) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if re.match("noise scale .* noise scale", line)]
        [run] = find_runs(tmp_path / name)
        assert line.removeprefix("noise scale     ") in verdict(analyse(name, [run])).lines
        assert ("cannot be estimated" in line) == (steps == 10)


def test_the_sentence_gives_the_sizes_of_the_last_steps_of_a_ramp() -> None:
    run = Run("ramp", Path(), "running", {}, batch=800, seq_len=100)
    sizes = [400] * 40 + [500, 600] * 10  # the last fifth has ten steps, of the larger two sizes
    for number, size in enumerate(sizes, 1):
        norms = Norms(2 * (1 + 6 / 1), 2 * (1 + 6 * 100 / size), 1, size // 100)
        tokens = sum(sizes[:number])
        values = dict.fromkeys(("lr", "grad_norm", "clip_fraction", "mfu", "noise_scale", "cosine"))
        run.train.append(Step(number, tokens, 0.0, 1.0, size, tokens_per_s=1.0, norms=norms, **values))
    assert "is 600 tokens" in in_words(run)
    assert in_words(run).endswith("a step has 500 to 600 there.")


def test_too_few_steps_give_no_scale() -> None:
    exact = [Norms(2 * (1 + 6 / 1), 2 * (1 + 6 / n), 1, n) for n in (4, 8) * 20]
    assert end_scale(exact[:9], 100) is None


def test_steps_without_a_signal_give_no_scale() -> None:
    assert end_scale([Norms(8.0, 0.5, 1, 8)] * 20, 100) is None
