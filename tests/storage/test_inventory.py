"""Where a new run or sweep may lie."""

from pathlib import Path

import pytest

from gptexp.config.schema import Config
from gptexp.process.errors import ConfigError
from gptexp.storage import run_dir
from gptexp.storage.inventory import refuse_run_in, refuse_sweep_in


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, one below a date, a sweep with and one without its record, and a project that only looks like a run."""
    monkeypatch.chdir(tmp_path)
    for name in ("run", "sweep/cell", "no_record/cell", "dated/2026-01-02/run"):
        run_dir.save_config(tmp_path / name, Config())
        (tmp_path / name / ".lock").touch()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    (tmp_path / "project" / "checkpoints").mkdir(parents=True)
    (tmp_path / "project" / "config.yaml").write_text("mine: 1\n")
    return tmp_path


@pytest.mark.parametrize(
    "where",
    ["sweep", "no_record", "dated", "sweep/x", "sweep/new/x", "sweep/cell/s", "run/inside", "run/checkpoints/deeper"],
)
def test_a_new_run_among_the_files_of_a_sweep_or_a_run_is_refused(mixed: Path, where: str) -> None:
    for directory in (Path(where), mixed / where):
        with pytest.raises(ConfigError, match=f"hydra.run.dir={directory}: (holds a sweep|lies in the directory of)"):
            refuse_run_in(directory)


@pytest.mark.parametrize("where", ["run", "run/inside", "sweep/x", "sweep/cell", "sweep/cell/s"])
def test_a_new_sweep_among_the_files_of_a_run_or_a_sweep_is_refused(mixed: Path, where: str) -> None:
    for directory in (Path(where), mixed / where):
        with pytest.raises(
            ConfigError, match=f"hydra.sweep.dir={directory}: (holds a single|lies in the directory of)"
        ):
            refuse_sweep_in(directory)


def test_a_new_directory_and_one_to_continue_are_accepted(mixed: Path) -> None:
    for where in ("new", "run", "sweep/cell", "project", "project/outputs/run"):
        refuse_run_in(mixed / where)
    for where in ("new", "sweep", "no_record", "project", "project/outputs/sweep"):
        refuse_sweep_in(mixed / where)


@pytest.mark.parametrize("where", ["outputs", "."])
def test_the_folder_of_all_outputs_is_no_run(mixed: Path, where: str) -> None:
    """Every later run would lie in the directory of that run."""
    for directory in (Path(where), mixed / where):
        with pytest.raises(ConfigError, match=f"hydra.run.dir={directory}: outputs/ of other runs is in it"):
            refuse_run_in(directory)


def test_a_run_around_the_default_directory_is_named_with_both_ways_out(mixed: Path) -> None:
    run_dir.save_config(mixed / "outputs", Config())
    (mixed / "outputs/.lock").touch()
    with pytest.raises(ConfigError, match=r"outputs; move that run elsewhere, or set hydra\.run\.dir to a folder"):
        refuse_run_in(Path("outputs/2026-01-02/run"))
