"""`gptexp verify`: all checks pass here, and each fails if its part of the package is broken on purpose."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from gptexp.process.errors import ConfigError, UserError
from gptexp.run import verification
from gptexp.verify import main

Sabotage = Callable[[str, str], dict[str, str]]

FORGETFUL = """
import random
plain = m.micro_batches
def micro_batches(*args):
    for batch in plain(*args):
        batch.dropout_seed = random.getrandbits(60)
        yield batch
m.micro_batches = micro_batches
"""
EAGER = """
import contextlib
@contextlib.contextmanager
def every_micro_step(self, micro_step, grad_accum_steps):
    yield grad_accum_steps
m.MeanReduction.__call__ = every_micro_step
"""


def verify(cwd: Path, *argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = env or {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gptexp", "verify", "--device", "cpu", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=cwd, env=environment)


def test_a_check_is_shown_as_it_runs_and_the_output_of_its_runs_only_if_it_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown: list[tuple[str, str]] = []  # what the terminal got before each check, and after the last

    def check(name: str, difference: float) -> verification.Check:
        def found(_: verification.Bench) -> list[verification.Result]:
            shown.append(tuple(capfd.readouterr()))
            print(f"{name} prints")
            subprocess.run([sys.executable, "-c", f"import sys; print('{name} warns', file=sys.stderr)"], check=True)
            return [verification.Result(f"promise of {name}", f"how {name}", difference, 1e-5)]

        return found

    def broken(_: verification.Bench) -> list[verification.Result]:
        print("the last words")
        raise UserError("a run failed")

    checks = {"first": check("one", 1e-6), "second": check("two", 2e-5), "third": check("three", 0.0)}
    monkeypatch.setattr(verification, "CHECKS", checks)
    assert verification.verify("cpu", 2) == 1
    out, errors = zip(*shown, capfd.readouterr(), strict=True)
    assert [[line.removesuffix("       0") for line in text.splitlines()] for text in out] == [
        ["      2 × cpu                                  difference allowed        seconds", "RUN   first"],
        ["PASS  promise of one                           1.0e-06    1e-05 relative", "      how one", "RUN   second"],
        ["FAIL  promise of two                           2.0e-05    1e-05 relative", "      how two", "RUN   third"],
        ["PASS  promise of three                         none       1e-05 relative", "      how three"],
    ]
    assert [sorted(err.splitlines()) for err in errors] == [[], [], ["two prints", "two warns"], []]
    monkeypatch.setattr(verification, "CHECKS", {"first": broken})
    with pytest.raises(UserError):
        verification.verify("cpu", 2)
    assert capfd.readouterr().err == "the last words\n"


@pytest.mark.slow
def test_all_checks_pass(tmp_path: Path) -> None:
    done = verify(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "2 × cpu" in done.stdout.splitlines()[0]
    verdicts = [line.split(" ")[0] for line in done.stdout.splitlines()[1:]]  # empty: how a result was found
    found = ["PASS", ""]
    assert verdicts == ["RUN", *found, *found, "RUN", *found, "RUN", *found, "RUN", *found]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "code", "broken"),
    [
        (
            "gptexp.training.loop",
            FORGETFUL,
            ["weights and moments of a resumed run", "the same, resumed at another world size"],
        ),
        (
            "gptexp.storage.checkpoint",
            "m.load_latest = lambda *a, **k: None",  # every start begins from step 0
            ["weights and moments of a resumed run", "the same, resumed at another world size"],
        ),
        ("gptexp.distributed.reduction", EAGER, ["reductions of gradients in a step"]),
        ("gptexp.training.evaluation", "m.validation_loss = lambda *a: 3.0", ["validation loss, for several splits"]),
    ],
)
def test_a_check_fails_if_the_package_is_broken(
    tmp_path: Path, sabotage: Sabotage, module: str, code: str, broken: list[str]
) -> None:
    done = verify(tmp_path, env=sabotage(module, code))
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line[6:47].strip() for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert failed == broken


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--world-size", "3"], "--world-size=3: must divide the 8 sequences of a step; use 1, 2, 4 or 8"),
        (["--world-size", "0"], "use 1, 2, 4 or 8"),
        (["--device", "cuda", "--world-size", "8"], "--device=cuda: no GPU is visible"),
        (["--device", "cuda"], "--device=cuda: no GPU is visible"),
    ],
)
def test_a_world_size_that_cannot_be_checked_is_refused(argv: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        main(argv)
    assert line in str(refused.value)
