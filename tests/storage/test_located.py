"""Names of runs and sweeps in place of paths."""

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gptexp.process.errors import ConfigError
from gptexp.storage.inventory import located

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs and a sweep of two cells; the sweep was begun last."""
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("s/a-1", "s/a-2", "2026-11-28/10-nano", "2026-11-29/10-nano", "mine")):
        folder = tmp_path / "outputs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("model: {}\n")
        os.utime(folder / "config.yaml", (2_000_000_000 - 100 * age,) * 2)
    (tmp_path / "outputs/s/sweep.json").write_text("{}")
    os.utime(tmp_path / "outputs/s/sweep.json", (2_000_000_500,) * 2)
    return tmp_path / "outputs"


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("latest", "outputs/s"),
        ("latest@best", "outputs/s@best"),
        ("@best", "outputs/s@best"),
        ("mine", "outputs/mine"),
        ("mi", "outputs/mine"),
        ("mi@120", "outputs/mine@120"),
        ("2026-11-29", "outputs/2026-11-29/10-nano"),
        ("2026-11-28/10-nano", "outputs/2026-11-28/10-nano"),
        ("s/a-2", "outputs/s/a-2"),
        ("outputs/mine", "outputs/mine"),
        ("outputs/mine@best", "outputs/mine@best"),
        ("nothing", "nothing"),
    ],
)
def test_a_name_stands_for_a_directory(outputs: Path, given: str, path: str) -> None:
    assert located(given) == path


def test_a_path_that_exists_comes_before_a_name(outputs: Path) -> None:
    (outputs.parent / "mine").mkdir()
    assert located("mine") == "mine"
    (outputs.parent / "latest").mkdir()
    assert located("latest") == "latest"


def test_a_name_of_several_is_refused(outputs: Path) -> None:
    for given in ("10-nano", "2026", "s/a"):
        with pytest.raises(ConfigError) as caught:
            located(given)
        assert caught.value.code == "ambiguous"


def test_rm_takes_paths_only(gptexp: Gptexp, outputs: Path) -> None:
    refused = gptexp("rm", "--yes", "min")
    assert refused.returncode == 2
    assert (outputs / "mine").exists()


def test_without_a_run_there_is_no_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        located("latest")
    assert caught.value.code == "no-run-yet"


@pytest.mark.e2e
def test_verbs_take_names_and_another_place_for_outputs(
    gptexp: Gptexp, start: Callable[..., subprocess.Popen[str]], tiny: list[str], tmp_path: Path
) -> None:
    env = {**os.environ, "GPTEXP_OUTPUTS": str(tmp_path / "disk")}
    for argv in (["train", *tiny], ["train", "-m", *tiny, "optim.lr=1e-3,2e-3", "sweep.name=both"]):
        done = start(*argv, env=env)
        assert done.wait() == 0
    assert (tmp_path / "disk/both/sweep.json").exists()
    assert not (tmp_path / "outputs").exists()
    for argv in (
        ["report"],
        ["status"],
        ["status", "both"],
        ["ls"],
        ["evaluate", "latest@best"],
        ["sample", "bo@best"],
    ):
        process = start(*argv, env=env)
        out, err = process.communicate()
        assert process.returncode == 0, (argv, err)
        assert "both" in out + err
    process = start("compare", "both", str(next(tmp_path.glob("disk/2*/*"))), "--json", env=env)
    assert process.wait() == 0
    moved = tmp_path / "disk/renamed"
    (tmp_path / "disk/both").rename(moved)
    process = start("report", "renamed", env=env)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "sweep.name=renamed" in out


@pytest.mark.e2e
def test_a_folder_on_another_disk_is_seen_by_all_verbs_and_a_moved_sweep_goes_on_where_it_is(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    own = [*tiny, f"paths.outputs={disk}"]
    assert gptexp("train", *own).returncode == 0
    assert gptexp("train", "-m", *own, "optim.lr=1e-3,2e-3,4e-3", "sweep.name=three").returncode == 0
    assert (tmp_path / "outputs/three").resolve() == disk / "three"
    [single] = [path for path in disk.glob("2*/*") if path.is_dir()]
    assert (tmp_path / "outputs" / single.relative_to(disk)).resolve() == single
    listed = gptexp("ls", "--json").stdout
    assert {row["kind"] for row in json.loads(listed)} == {"run", "sweep"}
    assert gptexp("evaluate", "three@best").returncode == gptexp("status", single.name).returncode == 0
    assert gptexp("rm", str(Path("outputs") / single.relative_to(disk)), "--yes").returncode == 0
    assert not single.exists()
    assert not (tmp_path / "outputs" / single.relative_to(disk)).is_symlink()
    (disk / "three").rename(tmp_path / "moved")
    (tmp_path / "outputs/three").unlink()
    report = gptexp("report", "moved")
    [command, *_] = [line for line in report.stdout.splitlines() if line.strip().startswith("gptexp train -m")]
    before = {path.name for path in (tmp_path / "moved").glob("*lr=*")}
    assert len(before) == 3
    done = gptexp(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    assert before < {path.name for path in (tmp_path / "moved").glob("*lr=*")}
    assert not (tmp_path / "outputs/three").exists()
