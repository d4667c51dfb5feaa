"""`gptexp train`: its command lines, its printed lines and its exit codes."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, ForkServer, e2e_then_slow, events, processes_of, runs, summary, wait_for
from real_runs import Finished, begun, finished_run

from gptexp.reporting.listings.progress import survey
from gptexp.storage import run_dir

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]
Sabotage = Callable[[str, str], dict[str, str]]


@pytest.fixture
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path, torch_server: ForkServer) -> Finished:
    return finished_run(tmp_path_factory, corpus, torch_server)


def test_the_loss_falls_from_that_of_a_uniform_guess(finished: Finished) -> None:
    losses = [e["train/loss"] for e in events(finished.directory, "step")]
    assert losses[0] == pytest.approx(math.log(50304), abs=0.15)
    assert losses[-1] < losses[0] - 3


def test_the_start_block_prints_schedule_validation_and_learning_rate(finished: Finished) -> None:
    assert (
        "schedule        cosine, warm-up over 512 tokens (4 steps; beta2 asks for 40), end at 5,120 tokens (40 steps)"
        in finished.stdout
    )
    assert "validation      every 512 tokens (4 steps)" in finished.stdout
    assert "num decayed parameter tensors: 6, with 808,192 parameters" in finished.stdout
    assert "learning rate   0.01, from the command line" in finished.stdout


def test_a_step_is_printed_in_the_documented_format(finished: Finished) -> None:
    [line] = [line for line in finished.stdout.splitlines() if line.startswith("step   11 | loss")]
    step10 = events(finished.directory, "step")[10]
    assert line == (
        f"step   11 | loss: {step10['train/loss']:.6f} | lr {step10['optim/lr']:.4e} | "
        f"norm: {step10['optim/grad_norm']:.4f} | dt: {step10['perf/step_ms']:.2f}ms | "
        f"tok/sec: {step10['perf/tokens_per_s']:.2f}"
    )


def test_the_last_lines_are_a_sample_and_the_run_directory(finished: Finished) -> None:
    assert "--- a sample" in finished.stdout
    assert str(finished.directory) in finished.stdout.splitlines()[-1]


def test_a_completed_directory_is_skipped_and_refused_for_another_config(finished: Finished, gptexp: Gptexp) -> None:
    directory = finished.directory
    overrides = yaml.safe_load((directory / ".hydra" / "overrides.yaml").read_text())
    before = {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    same = gptexp("train", *overrides, f"hydra.run.dir={directory}")
    assert (same.returncode, "completed; nothing to do" in same.stdout) == (0, True)
    other = gptexp("train", *overrides, "optim.lr=2e-2", f"hydra.run.dir={directory}")
    assert other.returncode == 2
    assert "cannot resume with another config: optim.lr was 0.01, now 0.02" in other.stderr
    assert {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()} == before


def test_extending_a_completed_run_is_refused(finished: Finished, gptexp: Gptexp, tmp_path: Path) -> None:
    shutil.copytree(finished.directory, tmp_path / "out")
    overrides = yaml.safe_load((tmp_path / "out" / ".hydra" / "overrides.yaml").read_text())
    before = {p: p.read_bytes() for p in (tmp_path / "out" / "checkpoints").rglob("*") if p.is_file()}
    for longer in ("train.max_steps=90", "train.max_tokens=1000000"):
        refused = gptexp("train", *overrides, longer, "hydra.run.dir=out")
        assert refused.returncode == 2
        assert "the run is completed, and its learning rate has decayed" in refused.stderr
        assert re.search(rf"continue_from=({tmp_path}/)?out", refused.stderr)
    assert {p: p.read_bytes() for p in (tmp_path / "out" / "checkpoints").rglob("*") if p.is_file()} == before


def test_a_run_directory_locked_by_another_process_is_refused(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "out"
    directory.mkdir()
    with run_dir.held(directory):
        refused = gptexp("train", *tiny, "hydra.run.dir=out")
        assert (refused.returncode, "another process uses it" in refused.stderr) == (2, True)
    assert not (directory / "metrics.jsonl").exists()


@pytest.mark.slow
def test_the_validation_loss_of_the_default_run_never_rises(start: Start, tmp_path: Path) -> None:
    process = start("train", "log.wandb.mode=disabled", "log.progress=off", "hydra.run.dir=out")
    _, err = process.communicate(timeout=540)
    assert process.returncode == 0, err
    losses = [e["val/loss"] for e in events(tmp_path / "out", "eval")]
    assert len(losses) == 10
    assert losses == sorted(losses, reverse=True)


@pytest.mark.e2e
def test_a_run_locks_its_directory_while_it_trains(
    start: Start, gptexp: Gptexp, long_run: list[str], tmp_path: Path
) -> None:
    process = start("train", *long_run)
    wait_for(begun(tmp_path / "out"), process)
    second = gptexp("train", *long_run)
    assert (second.returncode, "another process uses it" in second.stderr) == (2, True)
    assert process.poll() is None


def test_a_too_short_text_exits_with_3(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    short = gptexp("train", *tiny, "data.path=short.txt")
    assert short.returncode == 3, short.stderr
    tokenised, error = short.stderr.splitlines()
    assert tokenised.startswith("tokenised text")
    assert "fewer than one window" in error


def test_a_diverged_run_exits_with_5(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    wild = gptexp("train", *tiny, "optim.lr=1e18", "optim.grad_clip=0", "hydra.run.dir=wild", "train.max_steps=20")
    assert wild.returncode == 5, wild.stderr
    assert "diverged" in wild.stderr
    assert summary(tmp_path / "wild")["status"] == "diverged"
    losses = [e["train/loss"] for e in events(tmp_path / "wild", "step")]
    assert losses[-1] is None  # JSON has no NaN
    assert None not in losses[:-1]  # the first non-finite step is the last
    assert not list(tmp_path.glob("wild/checkpoints/*"))


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.e2e)])
def test_a_damaged_token_file_ends_a_run_before_its_first_step(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, world_size: int
) -> None:
    cache = tmp_path / "tokens"
    assert gptexp("prepare", *tiny, f"data.cache_dir={cache}").returncode == 0
    [shard] = cache.glob("*/*.bin")
    body = bytearray(shard.read_bytes())
    body[-7] ^= 1  # another valid token: only the hash can tell
    shard.write_bytes(body)
    done = gptexp("train", *tiny, f"data.cache_dir={cache}", f"world.size={world_size}", "hydra.run.dir=out")
    assert done.returncode == 3
    [line] = done.stderr.splitlines()
    assert line.startswith(f"gptexp: {shard}: ")
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["gpt2_124m", "gpt3_125m", "shakespeare_50_steps"])
def test_every_recipe_starts(gptexp: Gptexp, tmp_path: Path, name: str) -> None:
    """The run stops at its data, which is too short or cannot be downloaded here."""
    (tmp_path / "short.txt").write_text("too short")
    path = () if name.startswith("shakespeare") else ("data.path=short.txt",)
    done = gptexp("train", f"experiment={name}", *path, env={"https_proxy": "http://127.0.0.1:9"})
    assert done.returncode == 3, done.stderr
    assert "learning rate   0.0006, from model=gpt" in done.stdout


@pytest.mark.e2e
def test_a_run_completes_after_its_stdout_is_closed(start: Start, long_run: list[str], tmp_path: Path) -> None:
    process = start("train", *long_run, "train.max_steps=60", "log.progress=lines")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0, process.stderr and process.stderr.read()
    assert summary(tmp_path / "out")["status"] == "completed"
    assert len(events(tmp_path / "out", "step")) == 60


@pytest.mark.e2e
def test_ctrl_c_saves_a_checkpoint_and_exits_with_130(start: Start, long_run: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "out"
    process = start("train", *long_run, start_new_session=True)
    wait_for(begun(directory, 6), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert summary(directory)["status"] == "interrupted"
    assert (directory / "checkpoints" / f"step-{summary(directory)['steps']:08d}").is_dir()
    assert processes_of(directory) == []


@pytest.mark.parametrize(
    ("delay_s", "name"),
    [
        pytest.param(delay_s, name, marks=pytest.mark.e2e)
        for delay_s in (0.3, 2.5)
        for name in ("SIGTERM", "SIGUSR1", "SIGINT")
    ],
)
def test_a_signal_before_training_has_the_documented_exit_code(
    start: Start, tiny: list[str], tmp_path: Path, name: str, delay_s: float
) -> None:
    """The signal arrives before or during the import of torch, when there is nothing to save."""
    process = start("train", *tiny, "train.max_steps=100000", "hydra.run.dir=out")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(delay_s)
    number = getattr(signal, name)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    # Until Python runs gptexp's code, after a third of a second here, the signal has its default action.
    assert process.returncode in ((128 + number,) if delay_s > 2 else (128 + number, -number)), err
    assert "Traceback" not in err


# Code that makes a process wait at a moment before the first step: a module, and what runs once it is imported.
WAIT = "import pathlib, time; pathlib.Path('reached').touch(); time.sleep(100)"
WAITING = {
    "the import of torch": ("torch", WAIT),
    "its data": ("gptexp.data.loader", f"def wait(*_, **__):\n    {WAIT}\nm.build_dataset = m.open_dataset = wait"),
    "the other rank": (  # rank 0 waits for rank 1 in C++, where Python handles no signal
        "gptexp.data.loader",
        f"import os, time\ndef wait(*_, sleep=time.sleep, **__):\n    sleep(2); {WAIT}\n"
        "if os.environ.get('RANK') == '1':\n    m.open_dataset = wait",
    ),
    "the first step": ("gptexp.training.loop", f"def wait(*_):\n    {WAIT}\nm.fit = wait"),
}


@pytest.mark.parametrize(
    ("options", "moment"),
    [
        ([], "the import of torch"),
        *e2e_then_slow(
            [
                (["world.size=2"], "the other rank"),
                (["-m", "train.seed=1,2"], "the import of torch"),
                (["-m", "train.seed=1,2", "world.size=2"], "its data"),
                ([], "its data"),
                ([], "the first step"),
                (["world.size=2"], "its data"),
                (["world.size=2"], "the first step"),
                (["-m", "train.seed=1,2"], "its data"),
                (["-m", "train.seed=1,2"], "the first step"),
            ],
            3,
        ),
    ],
)
def test_a_run_that_ctrl_c_stops_before_its_first_step_is_interrupted(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path, sabotage: Sabotage, options: list[str], moment: str
) -> None:
    """The terminal sends SIGINT to all processes of its group."""
    assert gptexp("prepare", *tiny).returncode == 0
    where = "hydra.sweep.dir=out" if "-m" in options else "hydra.run.dir=out"
    process = start("train", *options, *tiny, where, start_new_session=True, env=sabotage(*WAITING[moment]))
    wait_for((tmp_path / "reached").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "interrupted before the first step" in err
    assert "fail" not in out + err
    assert all(line.startswith("gptexp: ") for line in err.splitlines()), err
    assert "after this step" not in err
    statuses = [run.status for run in survey(tmp_path / "out")]
    if "-m" in options:
        assert statuses == ["interrupted", "left"]
        assert "gptexp: interrupted: 2 of 2 cells left; repeat the command to go on" in err
    else:
        assert statuses == ["interrupted"]
    [directory] = runs(tmp_path)
    assert f"interrupted before the first step; gptexp resume {directory} starts it\n" in err
    if moment == "the import of torch":
        resumed = gptexp("resume", str(directory))
        assert (resumed.returncode, summary(directory)["status"]) == (0, "completed"), resumed.stderr
    assert processes_of(directory) == []


@pytest.mark.e2e
def test_a_second_ctrl_c_in_the_first_step_ends_an_interrupted_run(
    start: Start, tiny: list[str], tmp_path: Path, sabotage: Sabotage
) -> None:
    """As while the model is compiled, which takes long and cannot be stopped."""
    env = sabotage("gptexp.training.step", f"def wait(*_):\n    {WAIT}\nm.TrainStep.__call__ = wait")
    process = start("train", *tiny, "hydra.run.dir=out", start_new_session=True, env=env)
    wait_for((tmp_path / "reached").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted at once" in err
    assert summary(tmp_path / "out")["status"] == "interrupted"


@pytest.mark.e2e
def test_nano_saves_and_exits_within_ten_seconds_of_a_signal(start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    options = ["log=disabled", "log.progress=off", "world.size=2", "train.save_every_tokens=0", "hydra.run.dir=out"]
    process = start("train", *options)
    wait_for(begun(directory, 2), process)
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, time.monotonic() - asked < 10) == (143, True), err
    assert (directory / "checkpoints" / f"step-{summary(directory)['steps']:08d}" / "manifest.json").exists()


@pytest.mark.e2e
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv, to become another user"
)
def test_a_user_without_a_name_and_a_home_trains_and_reports(tiny: list[str]) -> None:
    """As in a container that runs under any user id. The user may read Python, which may lie in root's home."""
    user = ["--reuid=54321", "--regid=54321", "--clear-groups"]
    may_read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to other users
        folder = Path(name)
        folder.chmod(0o777)
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": name}
        for argv in (["train", *tiny, "hydra.run.dir=out"], ["report", "out"]):
            command = ["setpriv", *user, *may_read, sys.executable, "-m", "gptexp", *argv]
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stderr
        assert summary(folder / "out")["status"] == "completed"
        assert (folder / "out" / "report.html").stat().st_uid == 54321
        assert (folder / "gptexp-54321").is_dir()


@pytest.mark.e2e
def test_names_that_are_not_utf8_can_be_trained_on_and_into(tiny: list[str], corpus: Path, tmp_path: Path) -> None:
    text, folder = (Path(os.fsdecode(os.fsencode(tmp_path) + name)) for name in (b"/a\xff.txt", b"/d\xfe"))
    shutil.copy(corpus, text)
    folder.mkdir()
    others = [option for option in tiny if not option.startswith("data.path=")]
    command = [sys.executable, "-m", "gptexp", "train", *others, f'data.path="{text}"', f'hydra.run.dir="{folder}/run"']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert summary(folder / "run")["status"] == "completed"
    assert run_dir.load_config(folder / "run").data.path == str(text)
