"""How OpenMP says, in a real process of a verb, that its threads wait."""

import os
import re
import subprocess
import sys

import pytest

from gptexp.process.terminal import SPINS

PLAN = [sys.executable, "-m", "gptexp.plan", "model=bytes", "train.device=cpu"]


def spins(**environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    shown = {"OMP_DISPLAY_ENV": "VERBOSE", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        PLAN, env={**kept, **shown, **environment}, capture_output=True, text=True, check=True, timeout=120
    )
    found = {str(value) for value in re.findall(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)}
    if not found:
        pytest.skip("torch has another OpenMP here")
    [value] = found
    return value


@pytest.mark.e2e
def test_a_thread_that_waits_sleeps_soon() -> None:
    assert spins() == str(SPINS)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({"GOMP_SPINCOUNT": "77"}, "77"), pytest.param({"OMP_WAIT_POLICY": "PASSIVE"}, "0", marks=pytest.mark.e2e)],
)
def test_the_environment_decides_if_it_says_how_threads_wait(environment: dict[str, str], expected: str) -> None:
    assert spins(**environment) == expected
