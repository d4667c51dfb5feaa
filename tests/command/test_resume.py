"""Resuming a run: the result after a kill or a stop, and the settings that may change in between."""

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import moments
from conftest import ForkServer, e2e_then_slow, events, summary, wait_for
from real_runs import Finished, begun, equal, finished_run, newest, train_here, weights

from gptexp.config.compose import compose
from gptexp.process.signals import StopRequest
from gptexp.storage import run_dir
from gptexp.training.step import TrainStep

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path, torch_server: ForkServer) -> Finished:
    return finished_run(tmp_path_factory, corpus, torch_server)


@pytest.mark.e2e
def test_a_run_can_be_repeated_from_config_yaml_alone(finished: Finished, tmp_path: Path, gptexp: Gptexp) -> None:
    again = tmp_path / "again"
    again.mkdir()
    shutil.copy(finished.directory / "config.yaml", again)
    done = gptexp("resume", str(again), "--world-size", "1")
    assert done.returncode == 0, done.stderr
    assert equal(finished.directory, again)


@pytest.mark.e2e
def test_a_config_edited_after_an_interruption_is_refused_by_key(
    finished: Finished, gptexp: Gptexp, tmp_path: Path
) -> None:
    directory = shutil.copytree(finished.directory, tmp_path / "run")
    (directory / "summary.json").write_text('{"status": "interrupted"}')
    config = run_dir.load_config(directory)
    config.optim.lr, config.train.seed, config.train.log_every = 3e-4, 7, 5
    run_dir.save_config(directory, config)
    refused = gptexp("resume", "run")
    assert refused.returncode == 2, refused.stderr
    lines = refused.stderr.splitlines()
    assert ["optim.lr was" in lines[0], "train.seed was 1337, now 7" in lines[1], len(lines)] == [True, True, 2]


def test_a_run_directory_with_a_linked_lock_is_refused_in_one_line(
    finished: Finished, gptexp: Gptexp, tmp_path: Path
) -> None:
    directory = shutil.copytree(finished.directory, tmp_path / "run")
    (tmp_path / "precious").write_text("precious")
    (directory / ".lock").unlink(missing_ok=True)
    (directory / ".lock").symlink_to(tmp_path / "precious")
    refused = gptexp("resume", "run")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused.stderr
    assert ".lock: a link" in refused.stderr
    assert (tmp_path / "precious").read_text() == "precious"


def test_resume_of_a_completed_run_changes_no_file(finished: Finished, gptexp: Gptexp) -> None:
    before = {p: p.read_bytes() for p in finished.directory.rglob("*") if p.is_file()}
    done = gptexp("resume", str(finished.directory))
    assert (done.returncode, "completed; nothing to do" in done.stdout) == (0, True)
    assert {p: p.read_bytes() for p in finished.directory.rglob("*") if p.is_file()} == before


@pytest.mark.e2e
def test_a_killed_and_resumed_run_has_the_bits_of_an_undisturbed_run(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """With dropout, whose random numbers depend on the step and not on the number of starts."""
    overrides = [*tiny, "train.max_steps=28", "train.save_every=4", "train.eval_every=0", "model.dropout=0.1"]
    assert train_here(overrides, tmp_path / "whole") == 0
    directory = tmp_path / "out"
    process = start("train", *overrides, "hydra.run.dir=out")
    wait_for((directory / "checkpoints" / "step-00000004").exists, process)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    logged = len(events(directory, "step"))
    assert 4 <= logged < 28, "the kill must fall between the first checkpoint and the end"
    resumed = gptexp("resume", "out")
    assert resumed.returncode == 0, resumed.stderr
    assert equal(directory, tmp_path / "whole")
    whole, parts = (events(tmp_path / d, "step") for d in ("whole", "out"))
    assert [e["step"] for e in parts] == list(range(28))
    assert [e["data/fingerprint"] for e in parts] == [e["data/fingerprint"] for e in whole]


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.e2e)]
)
def test_an_interrupted_run_resumed_on_one_rank_equals_an_undisturbed_run(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path, world_size: int
) -> None:
    """A run that began on one rank is equal to the bit. Two ranks add up gradients in another order."""
    overrides = [*tiny, "train.max_steps=60", "train.save_every=1000", "train.eval_every=0", "model.dropout=0.1"]
    undisturbed = gptexp("train", *overrides, "hydra.run.dir=whole")
    assert undisturbed.returncode == 0, undisturbed.stderr
    directory = tmp_path / "out"
    process = start("train", *overrides, "hydra.run.dir=out", f"world.size={world_size}")
    wait_for(begun(directory, 9), process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    stopped_at = summary(directory)["steps"]
    assert 8 < stopped_at < 60
    resumed = gptexp("train", *overrides, "hydra.run.dir=out", "world.size=1")
    assert resumed.returncode == 0, resumed.stderr
    for name, value in weights(tmp_path / "whole").items():
        tolerance = {"rtol": 0.0, "atol": 0.0} if world_size == 1 else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(weights(directory)[name], value, **tolerance)
    assert [e["step"] for e in events(directory, "step")] == list(range(60))
    whole, parts = (events(tmp_path / d, "step")[-1] for d in ("whole", "out"))
    assert whole["data/fingerprint"] == parts["data/fingerprint"]


@pytest.fixture
def stopped(tiny: list[str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Overrides of a run of 40 steps in `out`, on `text.txt`, that was interrupted after its first step."""
    (tmp_path / "text.txt").write_text(corpus.read_text())
    overrides = [*tiny, f"data.path={tmp_path}/text.txt", "train.max_steps=40", "train.save_every=2"]
    stop, plain = StopRequest(), TrainStep.__call__

    def stopping(step: TrainStep, *args: object, **kwargs: object) -> object:
        stop.on_signal(signal.SIGTERM, None)
        return plain(step, *args, **kwargs)  # type: ignore[arg-type]

    def train() -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr(TrainStep, "__call__", stopping)
            assert train_here(overrides, tmp_path / "out", stop) == 143
        assert summary(tmp_path / "out")["steps"] == 1
        run_dir.save_config(tmp_path / "out", compose(overrides))
        return [*overrides, "hydra.run.dir=out"]

    return train


@pytest.mark.e2e
def test_resuming_with_other_data_at_the_same_path_is_refused(
    stopped: Callable[[], list[str]], gptexp: Gptexp, tmp_path: Path
) -> None:
    overrides = stopped()
    text = (tmp_path / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(text.replace("cat", "cow"))
    for told_by in ("out", "step-00000001"):  # summary.json has the hash of the data; without it, the checkpoint
        refused = gptexp("train", *overrides)
        assert (refused.returncode, f"{told_by}: trained on other data" in refused.stderr) == (3, True), refused.stderr
        (tmp_path / "out" / "summary.json").unlink(missing_ok=True)


@pytest.mark.e2e
def test_a_run_resumes_with_another_micro_batch_and_world_size(
    stopped: Callable[[], list[str]], gptexp: Gptexp, tmp_path: Path
) -> None:
    overrides = stopped()
    resumed = gptexp("train", *overrides, "batch.micro_batch_size=4", "world.size=2", "log.progress=auto")
    assert resumed.returncode == 0, resumed.stderr
    assert "4 sequences × 16 tokens × 2 ranks × 1 micro-step" in resumed.stdout
    assert "resuming        after step 1, 128 tokens" in resumed.stdout
    assert next(line for line in resumed.stdout.splitlines() if line.startswith("step ")).startswith("step    2 | loss")
    assert summary(tmp_path / "out")["status"] == "completed"


def test_a_run_that_exceeds_max_minutes_exits_with_0(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    done = gptexp("train", *tiny, "train.max_steps=40", "train.max_minutes=0.000001", "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "out")["status"] == "interrupted"
    assert 0 < summary(tmp_path / "out")["steps"] < 40


@pytest.mark.parametrize("name", e2e_then_slow(["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"]))
def test_a_signal_stops_a_resumed_run_after_a_checkpoint(
    start: Start, tiny: list[str], tmp_path: Path, name: str
) -> None:
    directory, number = tmp_path / "out", getattr(signal, name)
    endless = compose([*tiny, "train.max_steps=100000", "train.save_every=0", "train.eval_every=0"])
    run_dir.save_config(directory, endless)
    process = start("resume", "out")
    wait_for(begun(directory), process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert summary(directory)["status"] == "interrupted"
    assert newest(directory).name == f"step-{summary(directory)['steps']:08d}"


# --- init_from: the weights of another run ---------------------------------------------------------------------------


@pytest.mark.e2e
def test_init_from_loads_the_weights_only(finished: Finished, gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    """With a learning rate near zero, the new run ends with the loaded weights. Moments and data start from zero."""
    shutil.copytree(finished.directory, tmp_path / "old")
    still = ["optim.lr=1e-30", "optim.weight_decay=0", "train.max_steps=2", "init_from=old", "hydra.run.dir=new"]
    new = gptexp("train", *tiny, *still, "log.progress=auto")
    assert new.returncode == 0, new.stderr
    before, after = (weights(tmp_path / name) for name in ("old", "new"))
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert f"weights         those of {tmp_path / 'old'}" in new.stdout
    prints = [events(tmp_path / name, "step")[1]["data/fingerprint"] for name in ("old", "new")]
    assert prints[0] == prints[1]
    assert moments(newest(tmp_path / "new"))["wte.weight.step"] == 2
    # The new run does not need the other one to continue.
    (tmp_path / "old").rename(tmp_path / "moved")
    again = gptexp("resume", "new")
    assert (again.returncode, "completed; nothing to do" in again.stdout) == (0, True), again.stderr


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["init_from=nowhere"], "init_from="),
        (["model.n_embd=32"], "model.n_embd=32: init_from="),
        (["model.n_layer=2", "model.bias=false"], "has n_layer=1"),
    ],
)
def test_init_from_an_unsuitable_run_is_refused_before_a_directory_is_created(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, overrides: list[str], line: str
) -> None:
    (tmp_path / "old").mkdir()
    run_dir.save_config(tmp_path / "old", compose(tiny))
    refused = gptexp("train", *tiny, "init_from=old", *overrides, "hydra.run.dir=new")
    assert (refused.returncode, line in refused.stderr) == (2, True), refused.stderr
    assert not (tmp_path / "new").exists()


def test_init_from_a_run_without_a_checkpoint_is_refused(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    run_dir.save_config(tmp_path / "old", compose(tiny))
    refused = gptexp("train", *tiny, "init_from=old", "hydra.run.dir=new")
    assert (refused.returncode, "no checkpoint has been saved yet" in refused.stderr) == (4, True), refused.stderr
    assert not (tmp_path / "new").exists()
