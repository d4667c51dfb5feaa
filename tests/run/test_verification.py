"""`gptexp verify`: all checks pass here, and each fails if its part of the package is broken on purpose."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from gptexp.process.errors import ConfigError
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


@pytest.mark.slow
def test_all_checks_pass(tmp_path: Path) -> None:
    done = verify(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line[:4] for line in done.stdout.splitlines()[1::2]] == ["PASS"] * 5
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
        ("gptexp.training.validation", "m.evaluate = lambda *a: 3.0", ["validation loss, for several splits"]),
    ],
)
def test_a_check_fails_if_the_package_is_broken(
    tmp_path: Path, sabotage: Sabotage, module: str, code: str, broken: list[str]
) -> None:
    done = verify(tmp_path, env=sabotage(module, code))
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line[6:48].strip() for line in done.stdout.splitlines() if line.startswith("FAIL")]
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
