"""Real runs whose batch grows along a ramp: sizes, cadences and data by tokens, and the same on any number of ranks."""

import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import events, summary
from real_runs import train_here

from gptexp.config.compose import compose
from gptexp.distributed.ranks import Rank
from gptexp.machine.resolve import resolve
from gptexp.process.errors import CheckpointError
from gptexp.reporting.listings.records import read_run
from gptexp.reporting.page.report import build_report
from gptexp.storage import run_dir

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

RAMP = ["batch.ramp_from_tokens=32", "batch.ramp_tokens=900"]  # of `TINY`, whose steps have 128 tokens after the ramp
LENGTHS = [
    "train.max_steps=null",
    "train.max_tokens=1600",
    "train.eval_every_tokens=300",
    "train.save_every_tokens=160",
]
KEEP_ALL = ["train.keep_last=0", "train.keep_every_tokens=0"]


def sizes_by_hand() -> list[int]:
    """32 + 96 t / 900 tokens for a step after t, rounded to the nearest multiple of 32, until 1,600 tokens."""
    found: list[int] = []
    while (t := sum(found)) < 1600:
        found.append(32 * int((32 + 96 * t / 900) / 32 + 0.5) if t < 900 else 128)
    return found


SIZES = sizes_by_hand()
ENDS = [sum(SIZES[: number + 1]) for number in range(len(SIZES))]


def crossing(every: int) -> list[int]:
    """The steps after which something is due."""
    return [number for number, (a, b) in enumerate(pairwise([0, *ENDS])) if b // every > a // every]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def directory(trained: Path, tiny: list[str]) -> Path:
    """A run on one rank that the tests of this module share: read it, never write to it."""
    directory = trained / "ramp"
    if not directory.exists():
        overrides = [*tiny, *RAMP, *LENGTHS, *KEEP_ALL, "schedule.warmup_tokens=320", "schedule=linear"]
        assert train_here(overrides, directory) == 0
        run_dir.save_config(directory, compose(overrides))
    return directory


def test_every_cadence_of_a_run_counts_its_tokens(directory: Path) -> None:
    assert len(set(SIZES)) == 4
    steps = events(directory, "step")
    assert [event["batch/tokens"] for event in steps] == SIZES
    assert [event["tokens"] for event in steps] == ENDS
    last = len(SIZES) - 1
    assert [event["step"] for event in events(directory, "eval")] == sorted({*crossing(300), last})
    assert [event["step"] for event in events(directory, "checkpoint")] == sorted({*crossing(160), last})
    for event in events(directory, "checkpoint"):
        assert event["tokens"] == ENDS[event["step"]]
        assert event["path"].endswith(f"step-{event['step'] + 1:08d}")
    for event, (before, after) in zip(steps, pairwise([0, *ENDS]), strict=True):
        assert event["perf/tokens_per_s"] == pytest.approx(1e3 * (after - before) / event["perf/step_ms"])
        factor = after / 320 if after <= 320 else 1 - (max(before, 320) - 320) / (1600 - 320)
        assert event["optim/lr"] == pytest.approx(6e-4 * factor, rel=1e-9)
        assert ("gns/small_sq_norm" in event) == (after - before > 32)  # the first steps have one micro-batch
    assert (summary(directory)["steps"], summary(directory)["tokens"]) == (len(SIZES), ENDS[-1])


def test_the_report_reads_the_norms_of_each_step_with_its_own_batch(directory: Path) -> None:
    run = read_run(directory)
    assert (run.problem, run.batch) == (None, 128)
    found = [step.norms and step.norms.big_sequences for step in run.train]
    assert found == [size // 16 if size > 32 else None for size in SIZES]
    report = build_report(directory)
    assert ("Batch ramp", "from 32 over 900 tokens") in report.overview.facts
    [spec] = [figure.spec for figure in report.figures if figure.key == "noise-scale"]
    [sizes] = spec["layer"][1]["layer"]
    drawn = [(row["tokens"], row["value"]) for row in sizes["data"]["values"]]
    assert drawn == list(zip(ENDS, SIZES, strict=True))  # and no rule at the size of the last steps


def test_steps_read_the_one_stream_of_data_where_the_step_before_ended(
    directory: Path, tiny: list[str], tmp_path: Path
) -> None:
    """After equal tokens the fingerprint is that of a run with steps of one size."""
    constant = [*tiny, *LENGTHS, "batch.total_batch_size=64", "train.max_tokens=960", "log.noise_scale=off"]
    assert train_here(constant, tmp_path) == 0
    fingerprints = {event["tokens"]: event["data/fingerprint"] for event in events(tmp_path, "step")}
    compared = [event for event in events(directory, "step") if event["tokens"] in fingerprints]
    assert len({event["batch/tokens"] for event in compared}) >= 3
    assert all(event["data/fingerprint"] == fingerprints[event["tokens"]] for event in compared)


def test_an_automatic_micro_batch_divides_the_quantum(tiny: list[str]) -> None:
    """At a step of eight sequences it would be 8."""
    cfg = compose([*tiny, *RAMP, "batch.micro_batch_size=auto"])
    assert resolve(cfg, torch.device("cpu"), Rank()).micro_batch_size.value == 2
    cfg.batch.ramp_from_tokens = cfg.batch.ramp_tokens = None
    assert resolve(cfg, torch.device("cpu"), Rank()).micro_batch_size.value == 8


def test_a_checkpoint_whose_tokens_do_not_match_its_steps_is_refused(
    directory: Path, tiny: list[str], tmp_path: Path
) -> None:
    shutil.copytree(directory / "checkpoints", tmp_path / "checkpoints")
    steps = f"{len(SIZES)} steps"
    with pytest.raises(CheckpointError, match=rf"{ENDS[-1]:,} tokens after {steps}, and in this run they have 2,560 "):
        train_here([*tiny, *LENGTHS], tmp_path)


def losses_agree(one: Path, other: Path) -> None:
    """Equal data and sizes, and losses within a relative 1e-5."""
    for kind in ("step", "eval"):
        assert len(events(one, kind)) == len(events(other, kind)) > 0
        for a, b in zip(events(one, kind), events(other, kind), strict=True):
            for key in ("step", "tokens", "batch/tokens", "data/fingerprint", "optim/lr"):
                assert a.get(key) == b.get(key)
            for key in {"train/loss", "val/loss", "optim/grad_norm"} & a.keys():
                assert b[key] == pytest.approx(a[key], rel=1e-5)


@pytest.mark.e2e
def test_a_ramp_is_the_same_on_two_ranks_and_after_a_resume_on_another_number(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """With dropout, whose values depend on the step and the micro-batch, and not on the rank."""
    overrides = [*tiny, *RAMP, *LENGTHS, *KEEP_ALL, "model.dropout=0.1", "batch.micro_batch_size=1"]
    for world in (1, 2):
        done = gptexp("train", *overrides, f"world.size={world}", f"hydra.run.dir=on{world}")
        assert done.returncode == 0, done.stderr
    losses_agree(tmp_path / "on1", tmp_path / "on2")
    for first, then in (("on1", 2), ("on2", 1)):
        directory = cut(tmp_path / first, tmp_path / f"{first}-then-{then}")
        resumed = gptexp("resume", directory.name, "--world-size", f"{then}")
        assert resumed.returncode == 0, resumed.stderr
        losses_agree(tmp_path / "on1", directory)
        assert events(directory, "step")[0] == events(tmp_path / first, "step")[0]  # it was not run again


def cut(run: Path, copy: Path) -> Path:
    """A copy of a run without the checkpoints after the middle of its ramp, as after a kill."""
    shutil.copytree(run, copy)
    (copy / "summary.json").unlink()
    saved = sorted((copy / "checkpoints").iterdir())
    newest = max(number for number in crossing(160) if ENDS[number] < 450)
    for path in saved:
        if int(path.name.removeprefix("step-")) > newest + 1:
            shutil.rmtree(path)
    assert 0 < len(list((copy / "checkpoints").iterdir())) < len(saved)
    return copy


@pytest.mark.e2e
def test_a_ramp_goes_on_with_another_micro_batch_size(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    overrides = [*tiny, *RAMP, *LENGTHS, *KEEP_ALL]
    for size, out in ((1, "whole"), (2, "cut")):
        done = gptexp("train", *overrides, f"batch.micro_batch_size={size}", f"hydra.run.dir={out}")
        assert done.returncode == 0, done.stderr
        if size == 1:
            cut(tmp_path / "whole", tmp_path / "cut")
    losses_agree(tmp_path / "whole", tmp_path / "cut")
    assert events(tmp_path / "cut", "step")[0] == events(tmp_path / "whole", "step")[0]  # it was not run again


@pytest.mark.e2e
def test_the_start_block_says_how_the_batch_grows(gptexp: Gptexp, tiny: list[str]) -> None:
    done = gptexp("train", *tiny, *RAMP, *LENGTHS, "log.progress=lines", "schedule.warmup_tokens=320")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    below = sum(end < 900 for end in [0, *ENDS])
    assert (
        f"batch ramp      from 32 tokens per step, linear over the first 900 tokens ({below} steps), in multiples of 32"
        in lines
    )
    assert "validation      every 300 tokens" in lines
    warm_up = sum(end < 320 for end in [0, *ENDS])
    assert any(
        line.endswith(
            f"warm-up over 320 tokens ({warm_up} steps; beta2 asks for 40), end at 1,600 tokens ({len(SIZES)} steps)"
        )
        for line in lines
    )
    assert f"length          {len(SIZES)} steps, {ENDS[-1]:,} tokens, " in done.stdout
