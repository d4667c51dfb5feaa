"""Failures during a run: ranks that do not answer, and out-of-memory errors."""

import json
import resource
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import summary

from gptexp.config.compose import compose
from gptexp.distributed.ranks import Rank
from gptexp.machine.resolve import resolve
from gptexp.process.errors import ConfigError, MemoryExhaustedError, MicroBatchError, SilentRankError
from gptexp.process.signals import StopRequest
from gptexp.run import faults
from gptexp.run.job import Job
from gptexp.storage.checkpoint import TrainState
from gptexp.training.step_report import StepTimeout

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]
Sabotage = Callable[[str, str], dict[str, str]]


@pytest.mark.parametrize("error", [StepTimeout("not there"), RuntimeError("gloo: Timed out")])
@pytest.mark.parametrize(
    ("there", "line"),
    [
        ([2], r"^ranks 1, 3: no answer for world\.timeout_s=7 s; gptexp resume"),
        ([1, 2, 3], r"^every rank answers, but a step took longer than world\.timeout_s=7 s; raise world\.timeout_s"),
    ],
)
def test_ranks_that_do_not_answer_within_the_timeout_are_named(
    error: Exception, there: list[int], line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(faults, "ANSWER_S", 0.3)
    store, cfg = torch.distributed.HashStore(), compose(["world.timeout_s=7"])
    for rank in there:  # these ranks answer: they have failed too
        store.set(f"failed/{rank}", "")
        store.add("failures", 1)
    effective = resolve(cfg, torch.device("cpu"), Rank(), None)
    job = Job(cfg, tmp_path, Rank(0, 4), StopRequest())
    with pytest.raises(SilentRankError, match=line), faults.explained(job, store, effective, TrainState()):
        raise error


@pytest.mark.parametrize(
    ("size", "steps_made", "error"),
    [("auto", 0, MicroBatchError), ("auto", 1, MemoryExhaustedError), ("8", 0, ConfigError)],
)
def test_a_smaller_micro_batch_is_chosen_only_for_auto_and_before_the_first_step(
    size: str, steps_made: int, error: type[Exception], tmp_path: Path
) -> None:
    cfg, state = compose(["model=nano", f"batch.micro_batch_size={size}"]), TrainState(step=40)
    effective = resolve(cfg, torch.device("cpu"), Rank(), None)
    effective = replace(effective, micro_batch_size=replace(effective.micro_batch_size, value=8))

    def train() -> None:
        with faults.explained(Job(cfg, tmp_path, Rank(), StopRequest()), None, effective, state):
            state.step += steps_made
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(error, match="needs more memory"):
        train()
    assert (tmp_path / "effective.json").exists() == (error is MicroBatchError)
    if error is MicroBatchError:
        assert json.loads((tmp_path / "effective.json").read_text())["micro_batch_size"] == 4


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.e2e)])
def test_an_out_of_memory_error_proposes_fixes_without_a_traceback(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, world_size: int
) -> None:
    """Each rank needs 100 GB for the logits of half a million tokens."""
    options = ["batch.total_batch_size=1048576", "batch.micro_batch_size=32768", "train.loss=plain",
               "train.compile=off", f"world.size={world_size}"]  # fmt: skip
    done = gptexp("train", *tiny, *options, "hydra.run.dir=out")
    assert done.returncode == 2
    assert "batch.micro_batch_size=32768: a step needs more memory than this cpu has free" in done.stderr
    assert "use a smaller size or auto, train.loss=chunked" in done.stderr
    assert "Traceback" not in done.stderr
    assert summary(tmp_path / "out")["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_auto_retries_with_a_smaller_micro_batch_after_running_out_of_memory(
    start: Start, sabotage: Sabotage, tiny: list[str], tmp_path: Path, world_size: int
) -> None:
    """The estimate is far too low: the process may use 6 GB, and the whole logits need three times 3 GB."""
    guess = "m._micro_batch_size = lambda cfg, *_: (cfg.batch.total_batch_size // (16 * cfg.world.size), 'a guess')"
    env = sabotage("gptexp.machine.resolve", guess)
    options = ["batch.total_batch_size=16384", "batch.micro_batch_size=auto", "train.loss=plain", "train.compile=off",
               "train.dtype=float32", "train.max_steps=1", "data.val_tokens=0", f"world.size={world_size}",
               "hydra.run.dir=out"]  # fmt: skip

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))

    process = start("train", *tiny, *options, env=env, preexec_fn=limit)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert f"=auto: a step of {1024 // world_size} sequences needs more memory than this cpu has free; the next" in err
    assert "Traceback" not in err
    assert summary(tmp_path / "out")["status"] == "completed"
    chosen = json.loads((tmp_path / "out" / "effective.json").read_text())
    assert 1 <= chosen["micro_batch_size"] < 1024 / world_size
    assert "did not fit into memory" in chosen["reasons"]["micro_batch_size"]
