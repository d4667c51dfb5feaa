"""Real runs on full and read-only disks."""

import ctypes
import errno
import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import BYTES, e2e_then_slow, events, runs, summary, wait_for
from real_runs import begun

from gptexp.process.errors import StorageError
from gptexp.storage.run_dir import write_summary

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler; apt-get install g++")


def largest_file(size: int) -> Callable[[], None]:
    """For `preexec_fn`: limit the size of files, which simulates a full disk."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.e2e
@pytest.mark.parametrize("grid", [[], ["-m", "train.seed=1,2"]], ids=["train", "train -m"])
def test_a_disk_that_is_full_at_the_start_is_one_line(
    start: Start, gptexp: Gptexp, tiny: list[str], grid: list[str]
) -> None:
    assert gptexp("prepare", *tiny).returncode == 0
    process = start("train", *tiny, *grid, preexec_fn=largest_file(0))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    [line] = err.splitlines()
    assert re.fullmatch(r"gptexp: .*: cannot be written \(File too large\)", line)


@pytest.mark.e2e
def test_each_failed_save_is_one_line_and_a_failed_last_save_ends_the_run(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """No file may exceed a megabyte. Without the limit, the same command continues the run."""
    options = [*tiny, "train.save_every=1", "hydra.run.dir=out"]
    process = start("train", *options, preexec_fn=largest_file(1_000_000))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    unsaved = r"cannot be saved \(.*File too large.*\); earlier ones are unchanged; training continues"
    assert len(re.findall(unsaved, err)) == 3, err
    assert err.count("cannot be saved") == 4
    assert "Traceback" not in err
    assert list((tmp_path / "out" / "checkpoints").iterdir()) == []
    done = gptexp("train", *options)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "out")["status"] == "completed"


@pytest.mark.e2e
def test_metrics_that_cannot_be_written_end_the_run_with_one_line(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    options = [*tiny, "train.max_steps=60", "train.save_every=0", "train.eval_every=0", "hydra.run.dir=out"]
    assert gptexp("prepare", *options).returncode == 0  # the token file is longer than what may be written later
    process = start("train", *options, "world.size=2", preexec_fn=largest_file(16_000))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    [line] = [line for line in err.splitlines() if "cannot be written" in line]
    assert re.search(
        r"^gptexp: .*metrics.jsonl: cannot be written \((No space|File too large).*; free disk space", line
    )
    assert "Traceback" not in err
    for text in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines():
        json.loads(text)
    done = gptexp("train", *options)
    assert done.returncode == 0, done.stderr
    assert [e["step"] for e in events(tmp_path / "out", "step")] == list(range(60))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 900 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=900k", "none", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system needs root and mount")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize(
    "arguments", e2e_then_slow([["world.size=2", "hydra.run.dir=out"], ["-m", "train.seed=1,2", "sweep.name=x"]])
)
def test_a_run_that_fills_the_disk_is_failed_and_goes_on_once_there_is_room(
    start: Start, gptexp: Gptexp, tiny: list[str], small_disk: Path, arguments: list[str]
) -> None:
    """Also the first cell of a sweep, and the status of a run says so while the disk is full."""
    options = [*tiny, *BYTES, "train.max_steps=1200", "train.save_every=100", "train.eval_every=0", *arguments]
    options = [text.replace("=out", f"={small_disk}/out") for text in options]
    if "-m" in options:
        options.append(f"hydra.sweep.dir={small_disk}/x")
    process = start("train", *options)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "Traceback" not in err
    first = runs(small_disk)[0]
    assert summary(first)["status"] == "failed"
    assert 100 < summary(first)["steps"] < 1200
    assert not re.search(r"^running", out, re.MULTILINE), "the last lines of a sweep"
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    done = gptexp("train", *options)
    assert done.returncode == 0, done.stderr
    assert {summary(run)["status"] for run in runs(small_disk)} == {"completed"}
    assert [event["step"] for event in events(first, "step")] == list(range(1200))


def test_a_status_is_written_in_place_if_there_is_no_room_for_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = {"status": "running", "final_val_loss": None, "device": "é" * 50}
    after = {"status": "interrupted", "final_val_loss": 3.14159265358979, "device": "é" * 50}
    write_summary(tmp_path, before)
    with monkeypatch.context() as full:
        full.setattr("tempfile.NamedTemporaryFile", no_file)
        for values in (after, before, after):
            write_summary(tmp_path, values)
            assert summary(tmp_path) == values
        with pytest.raises(StorageError, match="No space left"):  # too long for the file's place
            write_summary(tmp_path, {**before, "note": "x" * 5000})
        with pytest.raises(StorageError, match="No space left"):
            write_summary(tmp_path / "other", after)
    assert summary(tmp_path) == after
    write_summary(tmp_path, before)
    assert summary(tmp_path) == before


@pytest.mark.e2e
def test_a_run_whose_directory_is_deleted_ends_with_a_line(start: Start, long_run: list[str], tmp_path: Path) -> None:
    process = start("train", *long_run, "hydra.run.dir=out")
    wait_for(begun(tmp_path / "out", 3), process)
    while (tmp_path / "out").exists():  # the run may just be writing a file
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    errors = [line for line in err.splitlines() if line.startswith("gptexp: ")]
    assert "metrics.jsonl: deleted while the run trains" in errors[-1]
    assert all(str(tmp_path / "out") in line for line in errors), err
    assert "Traceback" not in err


def bound_by_permissions() -> None:
    """For `preexec_fn`: make permissions apply to root too (capabilities(7))."""
    drop_from_bounding_set, cap_dac_override = 24, 1
    ctypes.CDLL(None).prctl(drop_from_bounding_set, cap_dac_override, 0, 0, 0)


@pytest.fixture
def read_only(tiny: list[str], gptexp: Gptexp, tmp_path: Path) -> dict[str, str]:
    """An environment whose token cache is filled and read-only, and whose compile cache cannot be created."""
    tokens, temporary = tmp_path / "tokens", tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "read-only").mkdir(mode=0o555)
    compiled = tmp_path / "read-only" / "compiled"  # torch would try to create it, and fail
    env = {
        **os.environ,
        "GPTEXP_CACHE": str(tokens),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled),
        "TMPDIR": str(temporary),
    }
    assert gptexp("prepare", *tiny, env=env).returncode == 0
    for folder in (*tokens.glob("*/"), tokens):
        folder.chmod(0o555)
    return env


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param("train.compile=off", marks=pytest.mark.e2e),
        pytest.param("train.compile=on", marks=[pytest.mark.slow, needs_compiler]),
    ],
)
def test_a_run_reads_a_read_only_token_cache_and_compiles_elsewhere(
    start: Start, read_only: dict[str, str], tiny: list[str], choice: str
) -> None:
    """The folder that replaces the compile cache is removed at the end."""
    process = start("train", *tiny, choice, "world.size=2", env=read_only, preexec_fn=bound_by_permissions)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    line = f"TORCHINDUCTOR_CACHE_DIR={read_only['TORCHINDUCTOR_CACHE_DIR']}: cannot be written (Permission denied)"
    assert err.count(line) == 1
    assert "Traceback" not in err
    assert not list(Path(read_only["TMPDIR"]).glob("gptexp*"))


@pytest.mark.e2e
def test_a_read_only_token_cache_is_compared_with_its_text(
    start: Start, read_only: dict[str, str], tiny: list[str]
) -> None:
    process = start("prepare", *tiny, "--verify", env=read_only, preexec_fn=bound_by_permissions)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "are those of the text" in err
    assert not list(Path(read_only["TMPDIR"]).glob(".gptexp*"))


@pytest.mark.e2e
def test_new_tokens_in_a_read_only_cache_are_refused(
    start: Start, read_only: dict[str, str], tiny: list[str], tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Of something else. " * 99)
    process = start("train", *tiny, f"data.path={other}", env=read_only, preexec_fn=bound_by_permissions)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3
    line = f"gptexp: data.cache_dir={read_only['GPTEXP_CACHE']}: cannot be written (Permission denied); choose another"
    assert err.splitlines()[-1] == line
