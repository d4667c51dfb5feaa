"""What goes wrong while a run trains: numbers that are none, ranks that hang, disks that are full."""

import ctypes
import itertools
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import events, processes_of, signal_rank, summary, wait_for
from safetensors.torch import load_file

from gptexp import checkpoint, faults, trainer
from gptexp.checkpoint import TrainState
from gptexp.compose import compose
from gptexp.config import OptimConfig
from gptexp.data.order import mix
from gptexp.distributed import Rank
from gptexp.effective import resolve
from gptexp.errors import ConfigError, MemoryExhaustedError, MicroBatchError, SilentRankError
from gptexp.optim import build_optimizer, step_if
from gptexp.run import run
from gptexp.signals import StopRequest
from gptexp.step_report import StepTimeout

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]
Sabotage = Callable[[str, str], dict[str, str]]

# The loss of the micro-batches (step of the data, number in the step) in `BAD` becomes VALUE.
POISON = """
from gptexp.config import Config
from gptexp.data.order import mix
bad = {mix(Config().train.seed, step, number) for step, number in BAD}
plain = m.train_step

class Poisoned:
    def __init__(self, model):
        self.model, self.parameters, self.seed = model, model.parameters, None
    def __call__(self, x, y):
        return self.model(x, y) * (float("VALUE") if self.seed in bad else 1.0)

def train_step(model, optimizer, reduction, batches, *args, **kwargs):
    poisoned = Poisoned(model)
    def watched():
        for batch in batches:
            poisoned.seed = batch.dropout_seed
            yield batch
    return plain(poisoned, optimizer, reduction, watched(), *args, **kwargs)

m.train_step = train_step
"""


def poison(bad: list[tuple[int, int]], value: str = "nan") -> str:
    return POISON.replace("BAD", str(bad)).replace("VALUE", value)


def newest(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((directory / "checkpoints").glob("step-*"))[-1] / "model.safetensors")


# --- numbers that are none -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_update_by_what_is_no_number_changes_nothing(fused: bool, value: float) -> None:
    """Neither weights nor moments nor the count of steps that the bias correction takes."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = build_optimizer(model, OptimConfig(), fused)

    def step(factor: float, finite: bool) -> None:
        (model(torch.ones(2, 5)).sum() * factor).backward()
        step_if(torch.tensor(finite), optimizer)
        optimizer.zero_grad()

    step(1.0, True)
    before = [p.detach().clone() for p in model.parameters()]
    moments = [v.clone() for s in optimizer.state.values() for v in s.values()]
    step(value, False)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(
        torch.equal(a, b)
        for a, b in zip(moments, [v for s in optimizer.state.values() for v in s.values()], strict=True)
    )
    step(1.0, True)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(("value", "world_size"), [("nan", 2), ("inf", 1)])
def test_a_number_that_is_none_stops_the_run_before_the_update(
    start: Start, sabotage: Sabotage, tiny: list[str], tmp_path: Path, value: str, world_size: int
) -> None:
    """In the last micro-batch of step 2, which rank 1 of two has: both stop, and what was saved before stays."""
    env = sabotage("gptexp.trainer", poison([(2, 3)], value))
    options = [f"world.size={world_size}", "train.save_every=1", "train.keep_last=0", "hydra.run.dir=out"]
    process = start("train", *tiny, *options, env=env)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 5, err
    assert "step 2: loss" in err
    assert "the run diverged; lower optim.lr" in err
    assert "Traceback" not in err
    assert summary(tmp_path / "out")["status"] == "diverged"
    saved = sorted(p.name for p in (tmp_path / "out" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000001", "step-00000002"]
    assert [e["train/loss"] is None for e in events(tmp_path / "out", "step")] == [False, False, True]


def test_an_update_that_is_left_out_leaves_a_run_that_goes_on(
    start: Start, sabotage: Sabotage, tiny: list[str], tmp_path: Path
) -> None:
    """On one rank and on two, with a tree of gradients: the same bits. However many there are, if not in a row."""
    bad = [1, 2, *range(4, 26, 2)]
    env = sabotage("gptexp.trainer", poison([(step, step % 4) for step in bad]))
    options = ["train.nonfinite=skip", "train.reduction=tree", "train.save_every=0", "train.max_steps=26"]
    found = []
    for world_size in (1, 2):
        directory = tmp_path / f"w{world_size}"
        process = start("train", *tiny, *options, f"world.size={world_size}", f"hydra.run.dir={directory}", env=env)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert summary(directory)["skipped_updates"] == len(bad) > 11
        assert [e["step"] for e in events(directory, "fault")] == bad
        assert [e["step"] for e in events(directory, "step")] == list(range(26))
        found.append(newest(directory))
    assert all(value.isfinite().all() for value in found[0].values())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize(("nonfinite", "last"), [("skip", 13), ("rollback", 2)])
def test_a_run_that_meets_nothing_else_has_diverged(
    start: Start, sabotage: Sabotage, tiny: list[str], tmp_path: Path, nonfinite: str, last: int
) -> None:
    env = sabotage("gptexp.trainer", poison([(step, 0) for step in range(3, 40)]))
    options = [f"train.nonfinite={nonfinite}", "train.save_every=2", "train.max_steps=40", "hydra.run.dir=out"]
    process = start("train", *tiny, *options, env=env)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, f"step {last}: loss nan" in err, "diverged 11 times" in err) == (5, True, True), err


def test_a_rollback_trains_on_the_data_behind_and_an_interruption_changes_nothing(
    start: Start, gptexp: Gptexp, sabotage: Sabotage, tiny: list[str], tmp_path: Path
) -> None:
    """Data steps 3 and 6 are bad: back to after two steps and on with data step 4; then to after four, and with 7."""
    options = [*tiny, "train.save_every=2", "train.eval_every=0", "train.nonfinite=rollback"]
    clean = gptexp("train", *options, "train.max_steps=11", "train.nonfinite=stop", "hydra.run.dir=clean")
    assert clean.returncode == 0, clean.stderr
    prefix = [int(e["data/fingerprint"], 16) for e in events(tmp_path / "clean", "step")]
    env = sabotage("gptexp.trainer", poison([(3, 2), (6, 1)]))
    for name, world_size in (("one", 1), ("two", 2)):
        process = start(
            "train", *options, "train.max_steps=8", f"world.size={world_size}", f"hydra.run.dir={name}", env=env
        )
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        directory = tmp_path / name
        assert summary(directory)["steps_passed_over"] == 3
        assert [e["step"] for e in events(directory, "step")] == list(range(8))
        texts = [fault["text"] for fault in events(directory, "fault")]
        for text, bad, good in zip(texts, (3, 4), (1, 3), strict=True):
            assert f"step {bad}: loss nan" in text
            assert f"back to after step {good}" in text
        read = (prefix[1] + prefix[5] - prefix[3] + prefix[10] - prefix[6]) % 2**64
        assert int(events(directory, "step")[-1]["data/fingerprint"], 16) == read


@pytest.fixture
def poisoned(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Runs in this process whose data step 5 is bad, stopped after so many calls of `train_step` and resumed."""
    plain, threads = trainer.train_step, torch.get_num_threads()
    config = compose([*tiny, "train.max_steps=9", "train.eval_every=0", "model.dropout=0.1", "log.sample_tokens=0",
                      "train.nonfinite=rollback"])  # fmt: skip
    bad = mix(config.train.seed, 5, 1)

    def train(directory: Path, stop_after: int, save_every: int = 4) -> Path:
        config.train.save_every = save_every
        stop, calls = StopRequest(), itertools.count(1)

        def train_step(model: Any, optimizer: Any, reduction: Any, batches: Any, *args: Any, **kwargs: Any) -> Any:
            seeds: list[int] = []

            def watched() -> Iterator[Any]:
                for batch in batches:
                    seeds.append(batch.dropout_seed)
                    yield batch

            def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return model(x, y) * (math.nan if seeds[-1] == bad else 1.0)

            forward.parameters = model.parameters  # type: ignore[attr-defined]
            report = plain(forward, optimizer, reduction, watched(), *args, **kwargs)  # type: ignore[arg-type]
            if next(calls) == stop_after:
                stop.on_signal(signal.SIGTERM, None)
            return report

        monkeypatch.setattr(trainer, "train_step", train_step)
        assert run(config, directory, stop, Rank()) == (143 if stop_after else 0)
        if stop_after:
            train(directory, stop_after=0)
        return sorted((directory / "checkpoints").glob("step-*"))[-1]

    yield train
    torch.set_num_threads(threads)


def test_a_rollback_leads_to_the_same_checkpoint_whatever_interruptions_there_were(
    poisoned: Callable[..., Path], tmp_path: Path
) -> None:
    """A checkpoint saved to leave with lies nearer to the bad step; it is not gone back to."""
    whole = poisoned(tmp_path / "whole", stop_after=0)
    assert json.loads((whole / "state.json").read_text())["steps_passed_over"] == 2
    for stop_after in (2, 4, 5, 6, 8):  # after 4 it leaves with step 5, as the request is seen in the next step
        parts = poisoned(tmp_path / f"{stop_after}", stop_after)
        assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes(), stop_after


def test_a_rollback_past_a_damaged_checkpoint_saves_that_step_anew(
    poisoned: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = checkpoint.save

    def damaging(directory: Path, *args: Any) -> Path:
        path = plain(directory, *args)
        if path.name == "step-00000004" and not list(directory.glob("rejected-*")):
            (path / "train.pt").write_bytes(b"")
        return path

    monkeypatch.setattr(checkpoint, "save", damaging)
    newest = poisoned(tmp_path / "out", stop_after=0, save_every=2)
    assert newest.name == "step-00000009"
    assert json.loads((newest / "state.json").read_text())["steps_passed_over"] == 4  # back to step 2
    [rejected] = (tmp_path / "out" / "checkpoints").glob("rejected-*")
    assert rejected.name.endswith("step-00000004")
    saved = [e["step"] for e in events(tmp_path / "out", "checkpoint")]
    assert saved == [1, 3, 5, 7, 8]
    assert checkpoint.newest(newest.parent)[0] == newest


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(
    start: Start, sabotage: Sabotage, tiny: list[str], tmp_path: Path
) -> None:
    env = sabotage("gptexp.trainer", poison([(1, 0)]))
    process = start("train", *tiny, "train.nonfinite=rollback", "train.save_every=0", "hydra.run.dir=out", env=env)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, "before its first checkpoint" in err) == (5, True), err


# --- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_and_is_named(start: Start, long_run: list[str], tmp_path: Path) -> None:
    """It does not answer SIGTERM either: torch's agent kills it after half a minute."""
    directory = tmp_path / "out"
    process = start("train", *long_run, "world.size=2", "world.timeout_s=4")
    wait_for(lambda: (directory / "metrics.jsonl").exists() and len(events(directory, "step")) > 3, process)
    signal_rank(directory, 1, signal.SIGSTOP)
    stopped = time.monotonic()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1, err
    assert "gptexp: rank 1: silent for world.timeout_s=4 s" in err
    assert "Traceback" not in err
    assert time.monotonic() - stopped < 4 + 5 + 30 + 15
    assert processes_of(directory) == []


@pytest.mark.parametrize("error", [StepTimeout("not there"), RuntimeError("gloo: Timed out")])
@pytest.mark.parametrize(
    ("there", "line"),
    [
        ([2], r"^ranks 1, 3: silent for world\.timeout_s=7 s; gptexp resume"),
        ([1, 2, 3], r"^every rank is there, but a step took longer than world\.timeout_s=7 s; raise it"),
    ],
)
def test_of_a_step_that_never_ends_the_ranks_that_do_not_answer_are_named(
    error: Exception, there: list[int], line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(faults, "ANSWER_S", 0.3)
    store, cfg = torch.distributed.HashStore(), compose(["world.timeout_s=7"])
    for rank in there:  # have given up too
        store.set(f"failed/{rank}", "")
    effective = resolve(cfg, torch.device("cpu"), Rank())
    with (
        pytest.raises(SilentRankError, match=line),
        faults.explained(cfg, effective, tmp_path, Rank(0, 4), store, TrainState()),
    ):
        raise error


@pytest.mark.parametrize(
    ("size", "steps_made", "error"),
    [("auto", 0, MicroBatchError), ("auto", 1, MemoryExhaustedError), ("8", 0, ConfigError)],
)
def test_a_micro_batch_is_chosen_anew_only_where_it_was_ours_to_choose_and_nothing_was_made_with_it(
    size: str, steps_made: int, error: type[Exception], tmp_path: Path
) -> None:
    cfg, state = compose([f"batch.micro_batch_size={size}"]), TrainState(step=40)
    effective = replace(resolve(cfg, torch.device("cpu"), Rank()), micro_batch_size=8)

    def train() -> None:
        with faults.explained(cfg, effective, tmp_path, Rank(), None, state):
            state.step += steps_made
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(error, match="needs more memory"):
        train()
    assert (tmp_path / "effective.json").exists() == (error is MicroBatchError)
    if error is MicroBatchError:
        assert json.loads((tmp_path / "effective.json").read_text())["micro_batch_size"] == 4


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_killed_rank_is_started_again_as_often_as_asked_for(
    start: Start, tiny: list[str], tmp_path: Path, world_size: int
) -> None:
    directory = tmp_path / "out"
    options = ["train.max_steps=120", "train.save_every=10", "train.eval_every=0", "hydra.run.dir=out"]
    process = start("train", *tiny, *options, f"world.size={world_size}", "world.max_restarts=1")
    wait_for(lambda: (directory / "checkpoints" / "step-00000010").exists(), process)
    signal_rank(directory, world_size - 1, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "gptexp: restart 1 of 1" in err
    assert summary(directory)["status"] == "completed"
    assert [e["step"] for e in events(directory, "step")] == list(range(120))


@pytest.mark.slow
def test_torchruns_restarts_find_one_another(tiny: list[str], tmp_path: Path) -> None:
    """torch 2.13 hands each attempt the store of the one before, with its addresses in it (pytorch#135712)."""
    directory = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "-m",
        "gptexp.train",
    ]
    options = ["train.max_steps=120", "train.save_every=10", "train.eval_every=0", "hydra.run.dir=out"]
    process = subprocess.Popen(
        [*command, *tiny, *options], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: (directory / "checkpoints" / "step-00000010").exists(), process)
        [rank] = [
            int(p.parent.name) for p in Path("/proc").glob("[0-9]*/environ")
            if _has(p, b"RANK=1") and _has(p, b"TORCHELASTIC_RUN_ID") and _parent(p) == process.pid
        ]  # fmt: skip
        os.kill(rank, signal.SIGKILL)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert summary(directory)["status"] == "completed"


def _has(environ: Path, variable: bytes) -> bool:
    try:
        return any(entry.startswith(variable) for entry in environ.read_bytes().split(b"\0"))
    except OSError:
        return False


def _parent(environ: Path) -> int:
    return int(environ.with_name("stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_auto_takes_a_smaller_micro_batch_where_memory_runs_out_at_the_start(
    start: Start, sabotage: Sabotage, tiny: list[str], tmp_path: Path, world_size: int
) -> None:
    """An estimate that is far too low, for a process that may have 6 GB: three times 3 GB of whole logits."""
    guess = "m._micro_batch_size = lambda cfg, *_: (cfg.batch.total_batch_size // (16 * cfg.world.size), 'a guess')"
    env = sabotage("gptexp.effective", guess)
    options = ["batch.total_batch_size=16384", "batch.micro_batch_size=auto", "train.loss=plain", "train.compile=off",
               "train.max_steps=1", "data.val_tokens=0", f"world.size={world_size}", "hydra.run.dir=out"]  # fmt: skip

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))

    process = start("train", *tiny, *options, env=env, preexec_fn=limit)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert f"=auto: a step of {1024 // world_size} sequences needs more memory than this cpu has left; the next" in err
    assert "Traceback" not in err
    assert summary(tmp_path / "out")["status"] == "completed"
    chosen = json.loads((tmp_path / "out" / "effective.json").read_text())
    assert 1 <= chosen["micro_batch_size"] < 1024 / world_size
    assert "needed more memory than there was" in chosen["reasons"]["micro_batch_size"]


def test_wandbs_service_may_be_killed(start: Start, tiny: list[str], tmp_path: Path) -> None:
    options = [o for o in tiny if not o.startswith("log=")]
    process = start("train", *options, "log=offline", "log.progress=off", "train.max_steps=120", "train.save_every=0",
                    "train.eval_every=0", "log.sample_tokens=0", "hydra.run.dir=out")  # fmt: skip
    directory = tmp_path / "out"
    wait_for(lambda: (directory / "metrics.jsonl").exists() and len(events(directory, "step")) > 3, process)
    services = [p for p in psutil.Process(process.pid).children(recursive=True) if "wandb-core" in p.name()]
    assert services
    for service in services:
        service.kill()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "gptexp: wandb: failed" in err
    assert summary(directory)["status"] == "completed"
    assert [e["step"] for e in events(directory, "step")] == list(range(120))


# --- disks -----------------------------------------------------------------------------------------------------------
def test_checkpoints_that_do_not_fit_are_lines_until_the_run_must_leave_with_one(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """No file may have more than a megabyte, as if a disk were full; with room again the same command goes on."""
    options = [*tiny, "train.save_every=1", "hydra.run.dir=out"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))

    process = start("train", *options, preexec_fn=limit)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.count("cannot be saved (File too large); what was saved before is untouched; training goes on") == 3, err
    assert err.count("cannot be saved") == 4
    assert "Traceback" not in err
    assert list((tmp_path / "out" / "checkpoints").iterdir()) == []
    done = gptexp("train", *options)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "out")["status"] == "completed"


def test_metrics_that_cannot_be_written_end_the_run_with_a_line(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    options = [*tiny, "train.max_steps=60", "train.save_every=0", "train.eval_every=0", "hydra.run.dir=out"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, resource.RLIM_INFINITY))

    assert gptexp("prepare", *options).returncode == 0  # the tokens are larger than what may be written then
    process = start("train", *options, "world.size=2", preexec_fn=limit)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    [line] = [line for line in err.splitlines() if "cannot be written" in line]
    assert re.search(r"^gptexp: .*metrics.jsonl: cannot be written \((No space|File too large).*; make room", line)
    assert "Traceback" not in err
    for text in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines():
        json.loads(text)
    done = gptexp("train", *options)
    assert done.returncode == 0, done.stderr
    assert [e["step"] for e in events(tmp_path / "out", "step")] == list(range(60))


def test_metrics_are_on_the_disk_before_the_checkpoint_that_stands_on_them(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure after a save loses no step before it; a kill would not show that."""
    plain_fsync, plain_rename, threads = os.fsync, Path.rename, torch.get_num_threads()
    steps_on_disk, when_published = 0, []

    def fsync(handle: int) -> None:
        nonlocal steps_on_disk
        plain_fsync(handle)
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.name == "metrics.jsonl":
            steps_on_disk = len(events(path.parent, "step"))

    def rename(path: Path, target: Path) -> Path:
        if target.name.startswith("step-"):
            when_published.append((target.name, steps_on_disk))
        return plain_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    config = compose([*tiny, "train.save_every=2", "train.eval_every=0", "log.sample_tokens=0"])
    try:
        assert run(config, tmp_path / "out", StopRequest(), Rank()) == 0
    finally:
        torch.set_num_threads(threads)
    assert when_published == [("step-00000002", 2), ("step-00000004", 4)]


def bound_by_permissions() -> None:
    """For the process to come: what may not be written to cannot be, by root neither (capabilities(7))."""
    drop_from_bounding_set, cap_dac_override = 24, 1
    ctypes.CDLL(None).prctl(drop_from_bounding_set, cap_dac_override, 0, 0, 0)


@pytest.mark.parametrize("choice", ["train.compile=off", pytest.param("train.compile=on", marks=pytest.mark.slow)])
def test_caches_that_cannot_be_written_to(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path, choice: str
) -> None:
    """Prepared tokens are read; what the compiler keeps lies elsewhere, and goes with the run."""
    tokens, temporary = tmp_path / "tokens", tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "read-only").mkdir(mode=0o555)
    compiled = tmp_path / "read-only" / "compiled"  # torch would make it, and fail
    env = {
        **os.environ,
        "GPTEXP_CACHE": str(tokens),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled),
        "TMPDIR": str(temporary),
    }
    assert gptexp("prepare", *tiny, env=env).returncode == 0
    for folder in (*tokens.glob("*/"), tokens):
        folder.chmod(0o555)
    process = start("train", *tiny, choice, "world.size=2", env=env, preexec_fn=bound_by_permissions)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert err.count(f"TORCHINDUCTOR_CACHE_DIR={compiled}: cannot be written to (Permission denied)") == 1
    assert "Traceback" not in err
    assert not list(temporary.glob("gptexp*"))
    other = tmp_path / "other.txt"
    other.write_text("Of something else. " * 99)
    process = start("train", *tiny, f"data.path={other}", env=env, preexec_fn=bound_by_permissions)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3
    assert (
        err.splitlines()[-1]
        == f"gptexp: data.cache_dir={tokens}: cannot be written (Permission denied); choose another"
    )
