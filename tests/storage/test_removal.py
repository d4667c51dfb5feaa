"""`gptexp rm`: whole runs and sweeps are removed, nothing that gptexp has not written is, and a kill leaves no run."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sweeps import write_run

from gptexp.loggers.wandb import ID_FILE
from gptexp.process.errors import ConfigError, InUseError, StorageError
from gptexp.reporting.listings.listing import list_runs
from gptexp.reporting.listings.records import find_runs
from gptexp.reporting.page.write import NUMBERS, PAGE, PICTURES, TABLE
from gptexp.rm import main
from gptexp.run.nodes import leave_mark
from gptexp.storage import removal, run_dir
from gptexp.storage.inventory import find
from gptexp.storage.removal import REMOVED, check_removable, remove
from gptexp.storage.search_log import FILE as DECISIONS
from gptexp.storage.unneeded import unneeded_checkpoints
from gptexp.sweep.jobs import JOB, JOBS
from gptexp.sweep.study import LOCK, STUDY

CHECKPOINT = "checkpoints/step-00000004"


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of a real completed run, below a folder of a date."""
    return shutil.copytree(finished_run, tmp_path / "outputs/2026-01-02/run")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    root = tmp_path / "outputs/sweep"
    for name in ("lr=0.01-0123abcd", "lr=0.02-4567abcd"):
        write_run(root / name, 4096, 0.02, 1, 4.0)
        (root / name / run_dir.LOCK).touch()
    (root / run_dir.COMMANDS_LOCK).touch()
    cell = {"values": {}, "total_batch_size": 4096, "tokens": 8192}
    cells = {path.name: cell for path in run_dir.subdirectories(root)}
    run_dir.write_json(root / run_dir.SWEEP, {"name": "sweep", "overrides": [], "cells": cells})
    return root


def files(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if not path.is_dir() or path.is_symlink()}


def test_a_run_and_the_empty_folder_of_its_date_are_removed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--yes"]) == 0
    assert not any((run.parents[1]).iterdir())
    assert str(run) in capsys.readouterr().out


def test_a_sweep_is_removed_with_all_that_commands_write_into_it(sweep: Path, run: Path) -> None:
    """Also with the constants of the modules that write the files, so that a new name is noticed here."""
    cell = sweep / "lr=0.01-0123abcd"
    shutil.copytree(run, sweep / "lr=0.03-89abcdef")
    for folder in (sweep, cell):
        for name in (PAGE, NUMBERS, TABLE, ID_FILE, run_dir.EFFECTIVE, f".{PAGE}.a1b2c3d4"):
            (folder / name).touch()
        (folder / PICTURES).mkdir()
        (folder / PICTURES / "loss-curves.png").touch()
        of_wandb = folder / "wandb/offline-run-20260102_030405-ab12/files/media"
        of_wandb.mkdir(parents=True)
        (of_wandb / "any name.json").touch()
        (folder / "wandb/latest-run").symlink_to("offline-run-20260102_030405-ab12")
        (folder / "wandb/debug-internal.log").symlink_to("nowhere")
    event_file = "events.out.tfevents.1795426455.some.host.7838.000000"
    for name in (run_dir.OUTPUT, run_dir.TOKENIZER, JOB, *run_dir.LOCKS, f".{run_dir.CONFIG}.a1_2c3d4", event_file):
        (cell / name).touch()
    leave_mark(cell)
    for name in (
        f".tmp-{Path(CHECKPOINT).name}-123",
        f".del-{Path(CHECKPOINT).name}",
        f"rejected-17-{Path(CHECKPOINT).name}",
    ):
        shutil.copytree(run / CHECKPOINT, cell / run_dir.CHECKPOINTS / name)
    (cell / run_dir.PROFILE).mkdir()
    (cell / run_dir.PROFILE / "steps-10-15-rank0.json.gz").touch()
    for name in (STUDY, LOCK, run_dir.COMMANDS_LOCK, run_dir.CHOICE_LOCK, DECISIONS, "optim/fitted.yaml"):
        (sweep / name).parent.mkdir(exist_ok=True)
        (sweep / name).touch()
    (sweep / JOBS / "17").mkdir(parents=True)
    (sweep / JOBS / "17" / "17_0_log.out").touch()
    (sweep / JOBS / ".submission_file_0.sh").symlink_to(sweep / JOBS / "17" / "17_submission.sh")
    assert main([str(sweep), str(cell), "--yes"]) == 0
    assert not sweep.exists()
    assert not any(REMOVED.fullmatch(path.name) for path in sweep.parent.iterdir())


STRANGERS: dict[str, Callable[[Path], object]] = {
    "notes.txt": lambda path: path.touch(),
    "events.out.tfevents": lambda path: path.mkdir(),
    "checkpoints/best.pt": lambda path: path.touch(),
    f"{CHECKPOINT}/notes": lambda path: path.touch(),
    ".hydra/mine.yaml": lambda path: path.touch(),
    "wandb/mine": lambda path: path.touch(),
    "empty": lambda path: path.mkdir(),
    "data": lambda path: path.symlink_to("/"),
    "pictures": lambda path: path.symlink_to(path.parents[1]),
    "report.html": lambda path: path.symlink_to("/nowhere"),
    "output.log": lambda path: path.mkdir(),
    "checkpoints/step-00000009": lambda path: path.symlink_to(path.parent / "step-00000004"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_run_with_anything_else_in_it_is_refused_by_its_name(run: Path, name: str) -> None:
    path = run / name
    path.parent.mkdir(exist_ok=True)
    STRANGERS[name](path)
    before = files(run)
    with pytest.raises(ConfigError, match=path.name):
        main([str(run), "--yes"])
    assert files(run) == before


def test_a_sweep_with_a_strange_folder_is_refused(sweep: Path) -> None:
    (sweep / "thesis").mkdir()
    (sweep / "thesis/config.yaml").write_text("model: mine\n")
    with pytest.raises(ConfigError, match="thesis"):
        remove(sweep)
    assert (sweep / "thesis/config.yaml").exists()


@pytest.mark.parametrize("content", [{}, {"config.yaml": "a: 1\n"}, {"config.yaml": "{}"}, {"metrics.jsonl": "x\n"},
                                     {"summary.json": "{}"}, {"checkpoints/step-00000001/model.safetensors": ""},
                                     {"config.yaml": "x", ".lock": "", "output.log": ""}])  # fmt: skip
def test_a_directory_that_only_looks_like_a_run_is_refused(tmp_path: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_text(text)
    (tmp_path / "x").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match="nothing in it shows"):
        main([str(tmp_path / "x"), "--yes"])
    assert {path.relative_to(tmp_path / "x").as_posix() for path in files(tmp_path / "x")} == set(content)


@pytest.mark.parametrize("lost", [run_dir.CONFIG, run_dir.SUMMARY, run_dir.METRICS, run_dir.CHECKPOINTS])
def test_a_damaged_run_can_be_removed(run: Path, lost: str) -> None:
    path = run / lost
    shutil.rmtree(path) if path.is_dir() else path.write_bytes(b"\xff")
    remove(run)
    assert not run.exists()


def test_folders_of_runs_links_and_missing_directories_are_refused(run: Path, sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    before = files(tmp_path)
    for path in (run.parent, run.parents[1], tmp_path / "link", tmp_path / "nowhere", tmp_path / "link/"):
        with pytest.raises(ConfigError, match=path.name):
            main([str(path), str(sweep), "--yes"])
    assert files(tmp_path) == before


@pytest.mark.parametrize("lock", run_dir.LOCKS)
def test_what_runs_is_refused(run: Path, sweep: Path, lock: str) -> None:
    cell = sweep / "lr=0.02-4567abcd"
    for path, holder in ((run, run), (sweep, cell), (cell, cell)):
        with run_dir.held(holder, lock), pytest.raises(ConfigError, match="another process uses it"):
            main([str(path), "--yes"])
        assert (holder / lock).exists()


@pytest.mark.e2e
def test_a_run_that_begins_between_the_check_and_the_removal_stays(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []

    def begins_after_the_first_check(directory: Path) -> None:
        check_removable(directory)
        if not checks:
            checks.append(run_dir.acquire(directory, run_dir.LOCK))

    monkeypatch.setattr(removal, "check_removable", begins_after_the_first_check)
    before = files(run)
    with pytest.raises(ConfigError, match=f"{run}: another process uses it"):
        remove(run)
    checks[0].release()
    assert files(run) == before


def test_a_sweep_that_a_command_runs_is_refused_between_its_cells_too(sweep: Path) -> None:
    """Also with a cell that is claimed and has no file yet, and with two commands of which one has ended."""
    one, other = run_dir.lock_sweep(sweep), run_dir.lock_sweep(sweep)
    for lock in (one, other):
        with pytest.raises(InUseError):
            main([str(sweep), "--yes"])
        [mine] = [found.row for found in list_runs(sweep.parent)]
        assert mine.status == "running"
        lock.release()
    with run_dir.held(sweep / "lr=0.03-89abcdef", run_dir.SWEEP_LOCK), pytest.raises(InUseError):
        main([str(sweep), "--yes"])
    assert [found.row.status for found in list_runs(sweep.parent)] == ["completed"]
    assert main([str(sweep), "--yes"]) == 0


def test_no_run_and_no_sweep_begins_in_a_directory_that_is_being_removed(
    run: Path, sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "LOCK_TIMEOUT_S", 0.1)
    begun = []

    def begins_before_the_rename(self: Path, target: Path, rename: Callable[..., Path] = Path.rename) -> Path:
        if self in (run, sweep):
            with pytest.raises(InUseError):
                run_dir.lock_sweep(sweep) if self == sweep else run_dir.acquire(run, run_dir.LOCK)
            begun.append(self)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", begins_before_the_rename)
    for directory in (run, sweep):
        remove(directory)
        assert not directory.exists()
    assert begun == [run, sweep]


def test_a_cell_begun_by_hand_during_the_removal_of_its_sweep_is_kept_and_named(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if its process has made the sweep's directory anew, so that the old one cannot have its name back."""
    cell, begun = sweep / "lr=0.02-4567abcd", []

    def rename(self: Path, target: Path, rename: Callable[..., Path] = Path.rename) -> Path:
        if self == sweep:
            begun.append(run_dir.acquire(cell, run_dir.LOCK))
            rename(self, target)
            cell.mkdir(parents=True)
            return target
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(StorageError) as refused:
        remove(sweep)
    [hidden] = sweep.parent.glob(".removed-*")
    assert str(sweep) in str(refused.value)
    assert str(hidden) in str(refused.value)
    assert (hidden / cell.name / run_dir.CONFIG).exists()
    assert unneeded_checkpoints(sweep.parent) == []
    begun[0].release()
    [removal] = unneeded_checkpoints(sweep.parent)
    with run_dir.held(hidden / cell.name, run_dir.LOCK), pytest.raises(InUseError):
        removal.remove()
    assert removal.remove() > 0
    assert not hidden.exists()


def test_after_an_error_the_others_are_removed_and_the_rest_is_named(
    run: Path, sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unlink(self: Path, missing_ok: bool = False, unlink: Callable[..., None] = Path.unlink) -> None:
        if self.name == run_dir.METRICS and "checkpoints" in {path.name for path in self.parent.iterdir()}:
            raise PermissionError(1, "Operation not permitted")
        unlink(self, missing_ok)

    other = shutil.copytree(run, run.with_name("other"))
    shutil.rmtree(other / run_dir.CHECKPOINTS)
    (run / run_dir.CHECKPOINTS / "kept").mkdir(parents=True)
    (run / run_dir.CHECKPOINTS / "kept").rmdir()
    monkeypatch.setattr(Path, "unlink", unlink)
    monkeypatch.setattr(removal, "_sorted", lambda folder: sorted(folder.iterdir(), reverse=True))
    assert main([str(run), str(other), str(sweep), "--yes"]) == 1
    [hidden] = run.parent.glob(".removed-*")
    assert not other.exists()
    assert not sweep.exists()
    said = capsys.readouterr()
    assert (
        f"{run}: partly removed; `gptexp rm --unneeded-checkpoints {run.parent}` removes the rest, {hidden}" in said.err
    )
    monkeypatch.undo()
    assert main(["--unneeded-checkpoints", str(run.parent), "--yes"]) == 0
    assert not hidden.exists()


def test_a_run_that_needs_the_removed_weights_is_named_before_the_question(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(run, run.with_name("other"))
    config = (other / run_dir.CONFIG).read_text()
    (other / run_dir.CONFIG).write_text(config.replace("init_from: null", f"init_from: {run}"))
    with pytest.raises(ConfigError, match="--yes"):
        main([str(run)])
    assert "starts from" not in capsys.readouterr().err
    shutil.rmtree(other / run_dir.CHECKPOINTS)
    with pytest.raises(ConfigError, match="--yes"):
        main([str(run)])
    assert f"{other} starts from the weights in {run}" in capsys.readouterr().err


def test_without_an_answer_nothing_is_removed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--yes"):
        main([str(run)])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, code in (("", 1), ("n", 1), ("yess", 1), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        assert run.exists()
        assert main([str(run)]) == code
    assert not run.exists()


KILLED = """
import os, sys
from pathlib import Path
from gptexp.storage import removal
from gptexp.storage.removal import remove
left = int(sys.argv[2])
for name in ("unlink", "rmdir", "rename"):
    def call(self, *rest, do=getattr(Path, name)):
        global left
        if left == 0:
            os._exit(9)
        left -= 1
        return do(self, *rest)
    setattr(Path, name, call)
remove(Path(sys.argv[1]))
"""


@pytest.mark.e2e
def test_a_kill_at_any_moment_leaves_the_whole_sweep_or_none(sweep: Path, tmp_path: Path) -> None:
    """And what it leaves can be removed with `--unneeded-checkpoints`, which takes it for nothing else."""
    for number, moment in enumerate((0, 1, 2, 5, 8, 9, 10, 11)):
        root = tmp_path / str(number)
        copy = shutil.copytree(sweep, root / "sweep")
        before = {path.relative_to(copy) for path in files(copy)}
        done = subprocess.run([sys.executable, "-c", KILLED, str(copy), str(moment)], timeout=60)
        if copy.exists():
            assert (done.returncode, moment) == (9, 0)
            assert {path.relative_to(copy) for path in files(copy)} == before
            continue
        assert find(root) == []
        with pytest.raises(ConfigError):
            find_runs(root)
        assert any(root.iterdir()) == (done.returncode == 9)
        assert main(["--unneeded-checkpoints", str(root), "--yes"]) == 0
        assert not any(root.iterdir())
