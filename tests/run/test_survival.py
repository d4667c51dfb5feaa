"""A run that is killed at random moments ends with the bits of an undisturbed run. tests/survival.py does the killing.

The tests also check when the kills happened. Kills before the first step, or only between saves, would prove nothing.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, e2e_then_slow
from survival import MUTANTS, POINTS, mutated_package

from gptexp.optim import OPTIMIZERS

SCRIPT = ROOT / "tests" / "survival.py"
GPTEXP = ROOT / "gptexp"


def survive(tmp_path: Path, *argv: object, package: Path = ROOT, timeout: float = 900) -> Any:
    """The result of survival.py. `package`: the folder that contains the gptexp to run."""
    command = [sys.executable, str(SCRIPT), *map(str, argv[:1]), str(tmp_path), *map(str, argv[1:])]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def unharmed(found: dict[str, Any]) -> bool:
    """Whether the kills left no trace: same bits, no rejected checkpoint, no partial file, every step logged once."""
    return (
        found["found"] == found["expected"]
        and not found["rejected"]
        and not found["left over"]
        and bool(found["metrics whole"])
    )


@pytest.mark.slow
def test_a_run_survives_fifteen_kills_at_changing_world_sizes(tmp_path: Path) -> None:
    found = survive(tmp_path, "kills", "--kills", 15, "--steps", 100, "--world-sizes", 1, 2)
    assert unharmed(found), found
    assert found["kills"] == 15, found
    assert found["resume steps"] >= 6, found
    assert found["in a save"] >= 4, found
    assert found["half-written"] >= 2, found


@pytest.mark.parametrize(
    ("world_sizes", "kills"),
    [
        pytest.param((2,), 6, marks=pytest.mark.e2e),
        pytest.param((2,), 50, marks=pytest.mark.slow),
        pytest.param((1, 2, 4), 50, marks=pytest.mark.slow),
    ],
)
def test_a_run_with_full_sharding_survives_kills(tmp_path: Path, world_sizes: tuple[int, ...], kills: int) -> None:
    """Its checkpoints have whole files or one for each rank, by turns. At another world size sums round differently."""
    sizes = ("--world-sizes", *world_sizes)
    found = survive(tmp_path, "kills", "--kills", kills, "--steps", 6 * kills + 10, *sizes, "--sharding", "full")
    print(found)
    assert found["apart"] <= (0 if len(world_sizes) == 1 else 0.01), found
    assert unharmed({**found, "expected": found["found"]}), found
    assert found["kills"] == kills, found
    assert found["in a save"] >= kills // 3, found
    assert found["starts per world size"].keys() == {str(size) for size in world_sizes}


@pytest.mark.slow
@pytest.mark.parametrize("world_sizes", [(1,), (2,), (1, 2, 4)], ids=str)
def test_a_run_survives_fifty_kills(tmp_path: Path, world_sizes: tuple[int, ...]) -> None:
    found = survive(tmp_path, "kills", "--kills", 50, "--world-sizes", *world_sizes)
    print(found)
    assert unharmed(found), found
    assert found["kills"] == 50, found
    assert found["resume steps"] >= 15, found
    assert found["in a save"] >= 15, found
    assert found["half-written"] >= 8, found
    assert found["starts per world size"].keys() == {str(size) for size in world_sizes}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in (*OPTIMIZERS, "completep") if name != "adamw"])
def test_a_run_with_each_optimizer_survives_kills_at_changing_world_sizes(tmp_path: Path, name: str) -> None:
    """So two ranks train as one does: the undisturbed run is on one rank."""
    pytest.importorskip("pytorch_optimizer", reason="no pytorch_optimizer; pip install 'gptexp[optim]'")
    overrides = [f"optim={name}"]
    if name == "completep":  # AdamW, whose groups of parameters then have settings of their own
        overrides = ["model.parametrisation=completep", "model.base_n_embd=8", "model.base_n_layer=2"]
    found = survive(tmp_path, "kills", "--kills", 20, "--steps", 130, "--world-sizes", 1, 2, "--optim", *overrides)
    print(found)
    assert unharmed(found), found
    assert found["kills"] == 20, found
    assert found["starts per world size"].keys() == {"1", "2"}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_with_a_batch_ramp_survives_kills(tmp_path: Path, world_size: int) -> None:
    found = survive(tmp_path, "kills", "--kills", 15, "--steps", 120, "--world-sizes", world_size, "--ramp")
    print(found)
    assert unharmed(found), found
    assert found["kills"] == 15, found
    assert found["resume steps"] >= 7, found


@pytest.mark.parametrize(
    ("noise", "world_sizes"),
    [
        pytest.param("gradient_noise=0.3", (1, 2), marks=pytest.mark.slow),
        # At another world size other micro-batches are measured.
        pytest.param("gradient_noise_like_batch=32", (1,), marks=pytest.mark.slow),
    ],
)
def test_a_run_with_gradient_noise_survives_kills(tmp_path: Path, noise: str, world_sizes: tuple[int, ...]) -> None:
    """At changing world sizes: all ranks of two add the noise that one rank adds."""
    sizes = ("--world-sizes", *world_sizes)
    found = survive(tmp_path, "kills", "--kills", 8, "--steps", 60, *sizes, "--optim", f"optim.{noise}")
    assert unharmed(found), found
    assert found["kills"] == 8, found
    assert found["starts per world size"].keys() == set(map(str, world_sizes))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_applies_to_the_current_code(tmp_path: Path, mutant: str) -> None:
    package = mutated_package(mutant, tmp_path) / "gptexp"
    changed = [
        p for p in (ROOT / "gptexp").rglob("*.py") if p.read_text() != (package / p.relative_to(GPTEXP)).read_text()
    ]
    assert changed == [GPTEXP / MUTANTS[mutant][0]]
    compile((package / MUTANTS[mutant][0]).read_text(), mutant, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_kills_reveal_each_mutant(tmp_path: Path, mutant: str) -> None:
    """Otherwise the tests above could not fail."""
    package = mutated_package(mutant, tmp_path)
    found = survive(tmp_path, "kills", "--kills", 15, "--steps", 100, "--world-sizes", 1, 2, package=package)
    assert found["package"] == str(package)
    assert not unharmed(found), found


@pytest.mark.parametrize("occurrence", e2e_then_slow([1, 2, 3]))
def test_a_run_killed_at_any_point_of_saving_continues_unharmed(tmp_path: Path, occurrence: int) -> None:
    found = survive(tmp_path, "crash", "--occurrences", occurrence)
    assert [f["point"] for f in found] == list(POINTS)
    for f in found:
        assert f["died"], f
        assert f["same"], f
        assert f["metrics whole"], f
        assert (f["left over"], f["rejected"]) == (0, 0), f
    assert sum(f["half-written"] for f in found) >= 5
