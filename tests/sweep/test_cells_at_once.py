"""The trial that decides how many cells run at once on a CPU, with real processes in place of runs."""

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from gptexp.config.compose import compose
from gptexp.config.schema import Config
from gptexp.process.signals import at_parents_death
from gptexp.sweep import trial
from gptexp.sweep.trial import Fastest, fastest, most_at_once

# A run whose steps take as long as the argument for its number of runs at once says, by sleeping.
RUN = """
import json, sys, time
from pathlib import Path

directory, at_once, steps, compiled, gib = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), *sys.argv[4:]
unfinished = directory / "unfinished"
unfinished.write_text(json.dumps({"runs_at_once": int(at_once), "compile": compiled == "True", "vocab_size": 320}))
unfinished.rename(directory / "effective.json")
if steps[at_once] is None:
    sys.exit("a run that fails")
with (directory / "metrics.jsonl").open("w") as file:
    for step in range(1000):
        time.sleep(steps[at_once] / 1e3)
        event = {"event": "step", "time": time.time(), "perf/step_ms": steps[at_once], "perf/peak_mem_gib": float(gib)}
        print(json.dumps(event), file=file, flush=True)
"""

TRIED = ["model=bytes", "train.device=cpu", "train.max_steps=2000"]


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    monkeypatch.setattr(trial, "count_cores", lambda: 4)
    return [compose(TRIED)] * 8


Try = Callable[..., Fastest | None]


@pytest.fixture
def tried(configs: list[Config], tmp_path: Path) -> Try:
    """Make a trial of runs with steps of so many ms, by number of runs at once."""
    (tmp_path / "run.py").write_text(RUN)

    def make(
        steps: str, compiled: bool = False, gib: float = 0.1, is_stopped: Callable[[], bool] = bool
    ) -> Fastest | None:
        processes: list[subprocess.Popen[bytes]] = []

        def fork(directory: Path, at_once: int) -> subprocess.Popen[bytes]:
            arguments = [str(directory), str(at_once), steps, str(compiled), str(gib)]
            command = [sys.executable, str(tmp_path / "run.py"), *arguments]
            processes.append(subprocess.Popen(command, preexec_fn=partial(at_parents_death, signal.SIGKILL)))
            return processes[-1]

        found = fastest(configs, fork, is_stopped)  # type: ignore[arg-type]
        assert all(process.returncode is not None for process in processes)
        return found

    return make


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("steps", "at_once", "compared"),
    [
        ('{"1": 20, "2": 42}', 1, [2]),  # one run uses all cores
        ('{"1": 20, "2": 20, "4": 45}', 2, [2, 4]),
        ('{"1": 20, "2": 20, "4": 20}', 4, [2, 4]),
    ],
)
def test_the_number_of_runs_with_the_most_steps_per_second_is_chosen(
    tried: Try, steps: str, at_once: int, compared: list[int]
) -> None:
    found = tried(steps)
    assert found is not None
    assert (found.at_once, found.effective["runs_at_once"], [*found.tried]) == (at_once, at_once, compared)


def test_a_trial_takes_no_more_than_its_share_of_the_sweep_and_of_the_memory(
    tried: Try, configs: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = '{"1": 20, "2": 20, "4": 20}'
    too_large = 0.6 * psutil.virtual_memory().available / 2**30
    for found in (tried(steps, gib=too_large), monkeypatch.setattr(trial, "SHARE", 1e-4) or tried(steps)):
        assert found is not None
        assert (found.at_once, found.tried) == (1, {})


def test_a_number_whose_runs_fail_is_not_chosen(tried: Try) -> None:
    for steps, at_once in (('{"1": 20, "2": null}', 1), ('{"1": 20, "2": 20, "4": null}', 2)):
        found = tried(steps)
        assert found is not None
        assert found.at_once == at_once


def test_without_an_outcome_there_is_no_number(tried: Try) -> None:
    assert tried('{"1": 20, "2": 20}', compiled=True) is None  # compiling takes longer than the trial
    assert tried('{"1": null}') is None
    assert tried('{"1": 20, "2": 20}', is_stopped=lambda: True) is None


@pytest.mark.parametrize(
    ("overrides", "cells", "cores", "most"),
    [
        ([], 8, 4, 4),
        ([], 8, 7, 4),
        ([], 3, 64, 2),
        ([], 1, 64, 1),
        ([], 8, 1, 1),
        (["world.threads_per_rank=2"], 8, 4, 2),
        (["world.threads_per_rank=4"], 8, 4, 1),
        (["world.size=2"], 8, 4, 1),
        (["train.compile=on"], 8, 4, 1),
        (["train.max_steps=20"], 8, 4, 1),
    ],
)
def test_a_trial_is_made_only_where_several_cells_may_be_faster(
    overrides: list[str], cells: int, cores: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "count_cores", lambda: cores)
    keys = {text.partition("=")[0] for text in overrides}
    given = [text for text in TRIED if text.partition("=")[0] not in keys]
    assert most_at_once([compose([*given, *overrides])] * cells) == most
