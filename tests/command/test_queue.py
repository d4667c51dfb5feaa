"""`gptexp run FILE`: commands in turn or side by side; what is done is skipped, and the rest goes on."""

import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import BYTES, events, runs, summary, wait_for
from real_runs import equal

from gptexp.cli import VERBS
from gptexp.command.queued import read_commands
from gptexp.process.errors import ConfigError
from gptexp.storage import run_dir

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]


def queue_of(folder: Path, *lines: str) -> Path:
    (folder / "queue.txt").write_text("\n".join(lines))
    return folder / "queue.txt"


@pytest.fixture
def train(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A command that trains four steps."""
    monkeypatch.chdir(tmp_path)
    return shlex.join(["train", *tiny, *BYTES])


def test_a_file_has_a_command_on_each_line(train: str, tmp_path: Path) -> None:
    lines = ["# first", "", f"gptexp {train} log.note='a # b'  # two", f"{train} \\", "  train.seed=2", "report latest"]
    commands = read_commands(queue_of(tmp_path, *lines), VERBS)
    assert [command.arguments[0] for command in commands] == ["train", "train", "report"]
    assert commands[0].arguments[-2] == "log.note=a # b"
    assert "train.seed=2" in commands[1].arguments
    assert [command.title.partition(":")[0] for command in commands] == ["line 3", "line 4", "line 6"]
    assert [command.waits for command in commands] == [False, False, True]
    directories = [command.directory for command in commands]
    assert directories[2] is None
    assert len({*directories}) == 3
    assert all(directory.parent == Path("outputs/queue") for directory in directories[:2] if directory)
    again = read_commands(queue_of(tmp_path, *lines[3:]), VERBS)
    assert again[0].directory == directories[1], "the directory does not depend on the line"


def test_a_command_that_begins_with_a_run_of_an_earlier_one_waits_for_it(train: str, tmp_path: Path) -> None:
    later = "train continue_from=outputs/a train.max_steps=8"
    commands = read_commands(queue_of(tmp_path, f"{train} hydra.run.dir=outputs/a", later, "tune model=bytes"), VERBS)
    assert [command.waits for command in commands] == [False, True, False]
    assert commands[0].directory == Path("outputs/a")
    assert commands[2].arguments[-1] == "--yes"


def test_short_flags_are_those_of_the_shell(train: str, tmp_path: Path) -> None:
    flags = "--tag first --note 'a note'"
    lines = [f"{train} {flags}", f"train --like latest {flags} train.seed=2", f"tune {flags} model=bytes optim=adamw"]
    commands = read_commands(queue_of(tmp_path, *lines), VERBS)
    assert [command.waits for command in commands] == [False, True, False]
    assert all({"--tag", "--note"} < {*command.arguments} for command in commands)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([], "no-command"),
        (["# nothing"], "no-command"),
        (["trian model=bytes"], "usage"),
        (["run queue.txt"], "usage"),
        (["gptexp"], "usage"),
        (["train 'a"], "usage"),
        (["report nothing"], "no-such-folder"),
        (["train model=bytes", "train --config-dir nothing optim=mine"], "no-such-folder"),
        (["train continue_from=nothing train.max_steps=3"], "not-a-run"),
        (["train hydra.run.dir=a", "train hydra.run.dir=a train.seed=2"], "command-given-twice"),
        (["train hydra.run.dir=a", "train continue_from=a optim.lrr=3"], "unknown-key"),
        (["train optim.lrr=1"], "unknown-key"),
        (["train --frobnicate"], "usage"),
        (["train -m optim.lr=-1,-2"], "out-of-range"),
        (["tune --budget many"], "budget-unreadable"),
        (["train train.seed=2", "train   train.seed=2"], "command-given-twice"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_runs(
    lines: list[str], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        read_commands(queue_of(tmp_path, *lines), VERBS)
    assert (refused.value.code, [*tmp_path.iterdir()]) == (code, [tmp_path / "queue.txt"])


@pytest.mark.e2e
def test_what_is_done_is_skipped_and_a_failure_does_not_end_the_queue(
    train: str, tmp_path: Path, gptexp: Gptexp
) -> None:
    lines = [
        f"{train} optim.lr=1e9 schedule=constant optim.grad_clip=0 schedule.warmup_tokens=0",
        "rm outputs/named",
        f"{train} train.seed=2 hydra.run.dir=outputs/named",
        f"{train} continue_from=outputs/named train.max_steps=8",
    ]
    done = gptexp("run", str(queue_of(tmp_path, *lines)))
    assert done.returncode == 1, done.stderr
    outcomes = [line.split()[0] for line in done.stdout.splitlines()[-4:]]
    assert outcomes == ["diverged", "failed", "completed", "completed"]
    before = {run: (run / "metrics.jsonl").read_bytes() for run in runs(tmp_path)}
    assert len(before) == 3
    again = gptexp("run", str(queue_of(tmp_path, *lines[2:])))
    assert again.returncode == 0
    assert again.stdout.count("already completed") == 2, "of the derived directory, at its turn and at the end"
    assert {run: (run / "metrics.jsonl").read_bytes() for run in runs(tmp_path)} == before


@pytest.mark.e2e
def test_a_line_that_begins_with_a_run_of_an_earlier_line_needs_it_completed(
    train: str, tmp_path: Path, gptexp: Gptexp
) -> None:
    """And `latest` is the newest run when the line starts; once begun, it goes on with the run that it began with."""
    lines = [f"{train} train.max_minutes=1e-9 hydra.run.dir=outputs/first"]
    lines.append("train continue_from=latest train.max_steps=8")
    assert gptexp(*shlex.split(train), "hydra.run.dir=outputs/older", "train.max_steps=30").returncode == 0
    file = queue_of(tmp_path, *lines, "train continue_from=outputs/first train.max_steps=9")
    stopped = gptexp("run", str(file))
    assert "not started: the run of line 1 is interrupted" in stopped.stdout
    assert stopped.returncode == 1
    file = queue_of(tmp_path, lines[0].replace("train.max_minutes=1e-9 ", ""), *lines[1:])
    done = gptexp("run", str(file))
    [continued] = [run for run in runs(tmp_path / "outputs/queue") if "latest" in run.name]
    before = run_dir.load_config(continued).branch_from
    assert done.returncode in (0, 1), done.stderr
    gptexp("run", str(file))
    assert run_dir.load_config(continued).branch_from == before


def test_the_queue_honours_another_folder_for_outputs(train: str, tmp_path: Path, gptexp: Gptexp) -> None:
    assert gptexp("run", str(queue_of(tmp_path, f"{train} paths.outputs=disk"))).returncode == 0
    [run] = runs(tmp_path / "disk/queue")
    assert (tmp_path / "outputs/queue" / run.name).resolve() == run


@pytest.mark.e2e
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_queue_that_is_stopped_or_killed_goes_on_with_the_same_bits(
    parallel: int, train: str, tmp_path: Path, start: Start, gptexp: Gptexp
) -> None:
    steps = "train.max_steps=600 train.save_every=600 train.log_every=100"
    file = queue_of(tmp_path, f"{train} {steps} train.seed=1", f"{train} {steps} train.seed=2")
    argv = ["run", str(file), "--parallel", str(parallel)]

    def trains() -> list[Path]:
        return [run for run in runs(tmp_path / "outputs") if (run / "metrics.jsonl").exists() and events(run, "step")]

    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        process = start(*argv)
        wait_for(lambda: len([run for run in trains() if run_dir.is_locked(run)]) == parallel, process)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == code
        if number == signal.SIGINT:
            assert [summary(run)["status"] for run in trains()] == ["interrupted"] * parallel
    wait_for(lambda: not any(run_dir.is_locked(run) for run in trains()), subprocess.Popen(["sleep", "60"], text=True))
    assert gptexp(*argv).returncode == 0
    found = trains()
    assert [summary(run)["status"] for run in found] == ["completed"] * 2
    assert all((tmp_path / "outputs/queue" / f"{run.name}.log").exists() for run in found) == (parallel > 1)
    for run in found:
        seed = summary(run)["seed"]
        argument = [*shlex.split(train), *steps.split(), f"train.seed={seed}", f"hydra.run.dir=alone{seed}"]
        assert gptexp(*argument).returncode == 0
        assert equal(run, tmp_path / f"alone{seed}")
