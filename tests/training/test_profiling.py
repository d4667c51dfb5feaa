"""The profiler's arithmetic, and the traces of real runs on one and two ranks."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import e2e_then_slow, events

from gptexp.training.phases import PHASES
from gptexp.training.profiling import COSTLIEST, covered


def test_overlapping_intervals_count_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert covered([]) == 0


@pytest.mark.parametrize("world", e2e_then_slow([2, 1]))
def test_a_trace_is_written_of_steps_after_the_warm_up(
    gptexp: Any, tiny: list[str], tmp_path: Path, world: int
) -> None:
    done = gptexp(
        "train", *tiny, "train.max_steps=11", "train.profile=true", f"world.size={world}", "log.progress=lines",
        "hydra.run.dir=out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "USDT" not in done.stderr
    [found] = events(tmp_path / "out", "profile")
    assert found["step"] == 8
    traces = sorted((tmp_path / "out/profile").iterdir())
    assert [path.name for path in traces] == [f"steps-6-8-rank{rank}.json.gz" for rank in range(world)]
    trace = json.loads(gzip.decompress(traces[0].read_bytes()))
    marked = {e["name"] for e in trace["traceEvents"] if e.get("name", "").startswith("ProfilerStep")}
    assert len(marked) == 3
    # Writing the trace takes far longer than a step and is not counted as a part of one.
    last = events(tmp_path / "out", "step")[8]
    assert last["perf/step_ms"] < 5 * sum(last[phase] for phase in PHASES)
    operations = found["operations"]
    assert len(operations) == COSTLIEST
    assert operations == sorted(operations, key=lambda op: -op["ms_per_step"])
    assert any(op["name"].startswith("aten::") for op in operations)
    assert (found["shares"]["collectives"] > 0) == (world == 2)
    assert 0 < found["shares"]["optimizer"] < 0.9
    assert "the most expensive operations" in done.stdout
    assert f"in the optimizer\nthe trace: {traces[0]}" in done.stdout


@pytest.mark.e2e
def test_a_run_shorter_than_the_warm_up_is_traced_from_its_second_step(
    gptexp: Any, tiny: list[str], tmp_path: Path
) -> None:
    done = gptexp("train", *tiny, "train.max_steps=2", "train.profile=true", "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "out/profile").iterdir()] == ["steps-1-1-rank0.json.gz"]


@pytest.mark.e2e
def test_profiling_changes_no_bit_of_the_weights(gptexp: Any, tiny: list[str], tmp_path: Path) -> None:
    for wanted in ("true", "false"):
        assert gptexp("train", *tiny, f"train.profile={wanted}", f"hydra.run.dir=out-{wanted}").returncode == 0
    weights = [
        (tmp_path / f"out-{w}" / "checkpoints/step-00000004/model.safetensors").read_bytes() for w in ("true", "false")
    ]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_resumed_run_traces_its_own_steps_beside_the_first_traces(
    gptexp: Any, tiny: list[str], tmp_path: Path
) -> None:
    run = ["train", *tiny, "train.profile=true", "train.save_every=10", "hydra.run.dir=out"]
    assert gptexp(*run, "train.max_steps=20").returncode == 0
    last = tmp_path / "out/checkpoints/step-00000020"
    last.rename(last.with_name("gone"))
    path = tmp_path / "out/summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "running"}))
    assert gptexp("resume", "out").returncode == 0
    names = sorted(path.name for path in (tmp_path / "out/profile").iterdir())
    assert names == ["steps-16-18-rank0.json.gz", "steps-6-8-rank0.json.gz"]


@pytest.mark.e2e
def test_a_run_of_one_step_cannot_be_traced(gptexp: Any, tiny: list[str]) -> None:
    refused = gptexp("train", *tiny, "train.max_steps=1", "train.profile=true")
    assert refused.returncode == 2
    assert "train.profile=true: the profiler skips the first step, and this run has only one" in refused.stderr


@pytest.mark.e2e
def test_a_run_that_ends_before_the_traced_steps_prints_that_no_trace_was_written(
    gptexp: Any, tiny: list[str], tmp_path: Path
) -> None:
    diverging = ["optim.lr=1e6", "optim.grad_clip=0", "train.max_steps=200", "hydra.run.dir=out"]
    done = gptexp("train", *tiny, *diverging, "train.profile=true", "log.progress=lines")
    assert done.returncode == 5
    steps = len(events(tmp_path / "out", "step"))
    assert ("no trace, because the run ended before step 9" in done.stdout) == (steps < 9)
