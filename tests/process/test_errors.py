"""The codes of errors, in Python, on the terminal and as JSON; the message of a library's error as one line."""

import json
import pickle
import sys

import pytest
from refusals import problems_in

from gptexp.config.compose import compose
from gptexp.process.errors import ConfigError, DataError, Problem, UserError, first_line
from gptexp.process.terminal import report_errors

WRONG = ["model=nano", "model.n_head=3", "batch.total_batch_size=1000"]
CODES = ["heads-not-divisible", "batch-not-divisible"]


def test_an_error_has_the_code_of_each_problem() -> None:
    with pytest.raises(ConfigError) as refused:
        compose(WRONG)
    assert (refused.value.code, [problem.code for problem in refused.value.problems]) == (CODES[0], CODES)


def test_a_line_without_a_code_of_its_own_has_that_of_its_kind() -> None:
    assert (DataError("a").code, DataError("a", "b").code) == ("data", "b")
    assert [problem.code for problem in ConfigError(["x", Problem("y", "z")]).problems] == ["config", "y"]
    assert UserError("two\nlines").problems == ["two", "lines"]


def test_codes_survive_the_way_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(ConfigError([Problem("y", "z"), "x"])))
    assert [(problem.code, problem) for problem in error.problems] == [("y", "z"), ("config", "x")]


@pytest.mark.parametrize("flag", ["--json", "--yes"])
def test_codes_are_printed_and_with_json_also_as_json(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gptexp plan", flag])
    with pytest.raises(SystemExit) as end, report_errors():
        compose(WRONG)
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert [problem.code for problem in problems_in(err)] == CODES
    assert (out != "") == (flag == "--json")
    if out:
        error = json.loads(out)["error"]
        assert (error["code"], error["exit_code"]) == (CODES[0], 2)
        assert [(p["code"], p["message"]) for p in error["problems"]] == [(p.code, p) for p in problems_in(err)]


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("one\ntwo", "one"),
        ("\n  late", "late"),
        ("Error in loading for GPT:\n\tMissing key(s)", "Error in loading for GPT: Missing key(s)"),
        ("", "RuntimeError"),
    ],
)
def test_the_message_of_an_error_is_shortened_to_one_line(message: str, line: str) -> None:
    assert first_line(RuntimeError(message)) == line
