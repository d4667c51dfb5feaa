"""`gptexp rm --unneeded-checkpoints`: of each run the newest intact checkpoint stays, and all that is not done."""

import hashlib
import shutil
from pathlib import Path

import pytest
import yaml

from gptexp.process.errors import ConfigError
from gptexp.rm import main
from gptexp.storage import run_dir
from gptexp.storage.checkpoint import newest

STEPS = ["step-00000002", "step-00000003", "step-00000004"]  # the last is the newest


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A completed run with three checkpoints, leftovers of a killed save and removal, and one that was set aside."""
    run = shutil.copytree(finished_run, tmp_path / "outputs/2026-01-02/run")
    checkpoints = run / run_dir.CHECKPOINTS
    assert sorted(path.name for path in checkpoints.iterdir()) == STEPS[1:]
    for name in (STEPS[0], ".tmp-step-00000004-17", ".del-step-00000001", "rejected-12-step-00000005"):
        shutil.rmtree(checkpoints / name, ignore_errors=True)
        shutil.copytree(checkpoints / STEPS[-1], checkpoints / name)
    return run


def left(run: Path) -> list[str]:
    return sorted(path.name for path in (run / run_dir.CHECKPOINTS).iterdir())


def set_status(run: Path, status: str) -> None:
    run_dir.write_json(run / run_dir.SUMMARY, {**run_dir.read_json(run / run_dir.SUMMARY), "status": status})


@pytest.mark.parametrize("status", run_dir.DONE)
def test_of_a_run_that_is_done_the_newest_checkpoint_stays(
    run: Path, status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_status(run, status)
    before = newest(run / run_dir.CHECKPOINTS)
    assert main(["--unneeded-checkpoints", str(tmp_path / "outputs"), "--yes"]) == 0
    assert left(run) == STEPS[-1:]
    assert newest(run / run_dir.CHECKPOINTS) == before
    out = capsys.readouterr().out
    assert str(run) in out
    assert "freed" in out


@pytest.mark.parametrize("status", ["interrupted", "failed", "running", "nonsense"])
def test_of_a_run_that_may_resume_every_checkpoint_stays(run: Path, status: str) -> None:
    set_status(run, status)
    main(["--unneeded-checkpoints", str(run), "--yes"])
    assert left(run) == ["rejected-12-step-00000005", *STEPS]


def test_nothing_of_a_running_run_is_removed(run: Path) -> None:
    before = left(run)
    for lock in run_dir.LOCKS:
        with run_dir.held(run, lock):
            assert main(["--unneeded-checkpoints", str(run), "--yes"]) == 0
    assert left(run) == before


def set_keys(run: Path, **train: object) -> None:
    config = yaml.safe_load((run / run_dir.CONFIG).read_text())
    config["train"] |= {"keep_last": 2, "keep_every": None, "keep_every_tokens": 0, **train}
    (run / run_dir.CONFIG).write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    ("keys", "steps"),
    [({"keep_last": 0}, [3, 4]), ({"keep_last": 1}, [4]), ({"keep_every": 1}, [3, 4]), ({"keep_every": 4}, [4])],
)
def test_what_a_changed_key_keeps_stays_unless_all_are_given(
    run: Path, keys: dict[str, int], steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    set_keys(run, **keys)
    main(["--unneeded-checkpoints", str(run), "--yes"])
    assert [run_dir.step_of(run / name) for name in left(run)] == steps
    assert ", ".join(map(str, steps)) in capsys.readouterr().out
    main(["--unneeded-checkpoints", str(run), "--yes", "--newest-only"])
    assert left(run) == STEPS[-1:]


@pytest.mark.parametrize("status", run_dir.DONE)
def test_the_best_checkpoint_stays(run: Path, status: str) -> None:
    set_status(run, status)
    for name, loss in ((STEPS[1], 5.0), (STEPS[2], 9.0)):
        path = run / run_dir.CHECKPOINTS / name
        state = run_dir.read_json(path / "state.json")
        run_dir.write_json(path / "state.json", {**state, "val_loss": loss, "evaluated_tokens": state["tokens"]})
        text = (path / "state.json").read_bytes()
        manifest = run_dir.read_json(path / "manifest.json")
        manifest["state.json"] = [len(text), hashlib.sha256(text).hexdigest()]
        run_dir.write_json(path / "manifest.json", manifest)
    main(["--unneeded-checkpoints", str(run), "--yes"])
    assert left(run) == STEPS[1:]


def test_hashes_are_computed_only_before_a_removal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hashed(path: Path) -> str:
        raise AssertionError(path)

    monkeypatch.setattr("gptexp.storage.checkpoint._sha256", hashed)
    assert main(["--unneeded-checkpoints", str(run), "--dry-run"]) == 0


@pytest.mark.parametrize("intact_before", [True, False])
def test_a_damaged_newest_checkpoint_stays_with_the_intact_one_before_it(run: Path, intact_before: bool) -> None:
    """Only intact checkpoints count. Without one, nothing proves that another may go."""
    damaged = STEPS if not intact_before else STEPS[2:]
    for name in damaged:
        weights = run / run_dir.CHECKPOINTS / name / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")  # of the same size, so that only its hash tells
    before = left(run)
    assert main(["--unneeded-checkpoints", str(run), "--yes"]) == 1  # less was freed than the table said
    assert left(run) == (STEPS[1:] if intact_before else before)


@pytest.mark.parametrize("what", ["a file", "a link", "linked checkpoints", "a linked run"])
def test_what_gptexp_has_not_written_stays(run: Path, what: str, tmp_path: Path) -> None:
    older, place = run / run_dir.CHECKPOINTS / STEPS[0], run.parent
    if what == "a file":
        (older / "notes.txt").touch()
    elif what == "a link":
        older.rename(tmp_path / "elsewhere")
        older.symlink_to(tmp_path / "elsewhere")
    elif what == "linked checkpoints":
        older.parent.rename(tmp_path / "elsewhere")
        (run / run_dir.CHECKPOINTS).symlink_to(tmp_path / "elsewhere")
    else:
        run.rename(tmp_path / "elsewhere")
        run.symlink_to(tmp_path / "elsewhere")
    main(["--unneeded-checkpoints", str(place), "--yes"])
    assert older.exists()
    assert ((tmp_path / "elsewhere").exists()) == (what != "a file")
    assert {STEPS[0], STEPS[2]} <= {*left(run)}


def test_dry_run_and_no_answer_remove_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = left(run)
    assert main(["--unneeded-checkpoints", str(run), "--dry-run"]) == 0
    assert "would free" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--yes"):
        main(["--unneeded-checkpoints", str(run)])
    assert left(run) == before


def test_a_kill_leaves_no_checkpoint_that_looks_damaged(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of the removal is the last one in turn."""

    class KilledError(BaseException):
        pass

    unlink, checkpoints = Path.unlink, run / run_dir.CHECKPOINTS
    for moment in range(30):
        count = [moment]

        def killed(self: Path, missing_ok: bool = False, count: list[int] = count) -> None:
            if self.is_relative_to(checkpoints):
                if not count[0]:
                    raise KilledError
                count[0] -= 1
            unlink(self, missing_ok)

        monkeypatch.setattr(Path, "unlink", killed)
        try:
            main(["--unneeded-checkpoints", str(run), "--yes"])
        except KilledError:
            for path in run_dir.published(checkpoints):
                assert len(list(path.iterdir())) == 4
            continue
        break
    assert left(run) == STEPS[-1:]


def test_a_directory_without_garbage_is_left_alone(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = left(finished_run)
    if len(before) == 1:
        assert main(["--unneeded-checkpoints", str(finished_run), "--yes"]) == 0
        assert "nothing to remove" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no such directory"):
        main(["--unneeded-checkpoints", "nowhere"])
