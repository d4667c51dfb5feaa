"""Non-finite losses and gradients: they cause no update, and then train.nonfinite stops, skips or rolls back."""

import itertools
import json
import math
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import events, summary
from real_runs import equal, newest, train_here, weights
from safetensors.torch import load_file

from gptexp.config.compose import compose
from gptexp.config.vocabulary import with_vocab_size
from gptexp.data.loader import build_dataset
from gptexp.distributed.ranks import Rank
from gptexp.machine.resolve import resolve
from gptexp.optim import AdamWConfig
from gptexp.process.signals import StopRequest
from gptexp.run.build import _build_step
from gptexp.run.job import Decision, Job, Prepared
from gptexp.storage import checkpoint, run_dir
from gptexp.storage.checkpoint import TrainState
from gptexp.training import step as step_module
from gptexp.training.loop import _Loop
from gptexp.training.optimizer import build_optimizer, step_if
from gptexp.training.step import TrainStep

Start = Callable[..., subprocess.Popen[str]]
Sabotage = Callable[[str, str], dict[str, str]]
Poison = Callable[..., None]

# The loss of the micro-batches (step of the data, number in the step) in `BAD` becomes VALUE; `m` is training.step.
POISON = """
from dataclasses import replace
from gptexp.config.schema import Config
from gptexp.data.order import mix
bad = {mix(Config().train.seed, step, number) for step, number in BAD}
plain = m.TrainStep.__call__

class PoisonedModel:
    def __init__(self, model):
        self.model, self.parameters, self.seed = model, model.parameters, None
    def __call__(self, x, y):
        return self.model(x, y) * (float("VALUE") if self.seed in bad else 1.0)

def poisoned(self, batches, *args, **kwargs):
    model = PoisonedModel(self.model)
    def watched():
        for batch in batches:
            model.seed = batch.dropout_seed
            yield batch
    return plain(replace(self, model=model), watched(), *args, **kwargs)

m.TrainStep.__call__ = poisoned
"""


def poison_code(bad: list[tuple[int, int]], value: str = "nan") -> str:
    return POISON.replace("BAD", str(bad)).replace("VALUE", value)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    """Make the loss of chosen micro-batches non-finite, in runs of this process."""
    monkeypatch.setattr(TrainStep, "__call__", TrainStep.__call__)  # so that it is restored at the end

    def apply(bad: list[tuple[int, int]], value: str = "nan") -> None:
        exec(poison_code(bad, value), {"m": step_module})

    return apply


def check_stopped(directory: Path, err: str) -> None:
    """Check a run whose third step was non-finite and which saved after each step."""
    assert "step 3: loss" in err
    assert "the run diverged; lower optim.lr" in err
    assert "Traceback" not in err
    assert summary(directory)["status"] == "diverged"
    saved = sorted(p.name for p in (directory / "checkpoints").glob("step-*"))
    assert saved == ["step-00000001", "step-00000002"]
    assert [e["train/loss"] is None for e in events(directory, "step")] == [False, False, True]


# --- the update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_update_changes_nothing(fused: bool, value: float) -> None:
    """It changes neither weights, nor moments, nor the step count of the bias correction."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = build_optimizer(model, AdamWConfig(), fused)

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


@pytest.mark.parametrize("nonfinite", ["stop", "skip", "rollback"])
@pytest.mark.parametrize("name", ["lion", "soap"])
def test_an_update_may_spoil_weights_that_nothing_uses_if_the_optimizer_can_make_it(
    tiny: list[str], tmp_path: Path, nonfinite: str, name: str
) -> None:
    """A skipped update leaves weights that are used; SOAP's decompositions raise an error for a NaN."""
    if name == "soap":
        pytest.importorskip("pytorch_optimizer")
    cfg, device = compose([*tiny, f"optim={name}", f"train.nonfinite={nonfinite}"]), torch.device("cpu")
    dataset = build_dataset(cfg)
    effective = resolve(cfg, device, Rank(), None, dataset.n_vocab)
    job = Job(with_vocab_size(cfg, effective.vocab_size.value), tmp_path, Rank(), StopRequest())
    prepared = Prepared(dataset, [], device, None, None)
    _, step = _build_step(job, prepared, Decision(effective, None, None, TrainState(), None))
    assert step.may_spoil is (name == "lion" and nonfinite != "skip")


# --- train.nonfinite=stop --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_non_finite_loss_stops_the_run_before_the_update(
    poison: Poison, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    poison([(2, 3)], value)
    assert train_here([*tiny, "train.save_every=1", "train.keep_last=0"], tmp_path / "out") == 5
    check_stopped(tmp_path / "out", capsys.readouterr().err)


@pytest.mark.e2e
def test_a_non_finite_loss_on_rank_1_stops_both_ranks(
    start: Start, sabotage: Sabotage, tiny: list[str], tmp_path: Path
) -> None:
    """In the last micro-batch of step 2, which rank 1 computes."""
    env = sabotage("gptexp.training.step", poison_code([(2, 3)]))
    options = ["world.size=2", "train.save_every=1", "train.keep_last=0", "hydra.run.dir=out"]
    process = start("train", *tiny, *options, env=env)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 5, err
    check_stopped(tmp_path / "out", err)


# --- train.nonfinite=skip --------------------------------------------------------------------------------------------

BAD_BUT_NOT_IN_A_ROW = [1, 2, *range(4, 26, 2)]
SKIP = ["train.nonfinite=skip", "train.reduction=tree", "train.save_every=0", "train.max_steps=26"]
MICRO_BATCHES = [(step, step % 4) for step in BAD_BUT_NOT_IN_A_ROW]


def check_skipped(directory: Path) -> None:
    assert summary(directory)["skipped_updates"] == len(BAD_BUT_NOT_IN_A_ROW) > 11
    assert [e["step"] for e in events(directory, "fault")] == BAD_BUT_NOT_IN_A_ROW
    assert [e["step"] for e in events(directory, "step")] == list(range(26))
    assert all(value.isfinite().all() for value in weights(directory).values())


@pytest.mark.e2e
def test_skipped_updates_that_are_not_consecutive_do_not_end_the_run(
    poison: Poison, tiny: list[str], tmp_path: Path
) -> None:
    poison(MICRO_BATCHES)
    assert train_here([*tiny, *SKIP], tmp_path / "out") == 0
    check_skipped(tmp_path / "out")


@pytest.mark.e2e
def test_two_ranks_that_skip_updates_have_the_bits_of_one_rank(
    start: Start, sabotage: Sabotage, poison: Poison, tiny: list[str], tmp_path: Path
) -> None:
    """With the tree reduction, whose result does not depend on the number of ranks."""
    env = sabotage("gptexp.training.step", poison_code(MICRO_BATCHES))
    process = start("train", *tiny, *SKIP, "world.size=2", "hydra.run.dir=two", env=env)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    check_skipped(tmp_path / "two")
    poison(MICRO_BATCHES)
    assert train_here([*tiny, *SKIP], tmp_path / "one") == 0
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize(("nonfinite", "last"), [pytest.param("skip", 14, marks=pytest.mark.e2e), ("rollback", 3)])
def test_a_run_diverges_after_eleven_consecutive_non_finite_steps(
    poison: Poison, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], nonfinite: str, last: int
) -> None:
    poison([(step, 0) for step in range(3, 40)])
    options = [f"train.nonfinite={nonfinite}", "train.save_every=2", "train.max_steps=40"]
    assert train_here([*tiny, *options], tmp_path / "out") == 5
    err = capsys.readouterr().err
    assert f"step {last}: loss nan" in err
    assert "diverged after 11 non-finite steps" in err


# --- train.nonfinite=rollback ----------------------------------------------------------------------------------------

# Data steps 3 and 6 are non-finite. The first rollback loads the checkpoint after two steps and continues with data
# step 4. The second loads the one after four steps and continues with data step 7.
TWICE_BAD = [(3, 2), (6, 1)]
ROLLBACK = ["train.save_every=2", "train.eval_every=0", "log.sample_tokens=0"]


def check_rolled_back(directory: Path, prefix: list[int]) -> None:
    """`prefix`: the fingerprint after each step of a run without non-finite steps."""
    assert summary(directory)["steps_passed_over"] == 3
    assert [e["step"] for e in events(directory, "step")] == list(range(8))
    texts = [fault["text"] for fault in events(directory, "fault")]
    for text, bad, good in zip(texts, (3, 4), (1, 3), strict=True):
        assert f"step {bad + 1}: loss nan" in text
        assert f"reloaded step-{good + 1:08d};" in text
    read = (prefix[1] + prefix[5] - prefix[3] + prefix[10] - prefix[6]) % 2**64
    assert int(events(directory, "step")[-1]["data/fingerprint"], 16) == read


@pytest.fixture
def prefix(tiny: list[str], tmp_path: Path) -> list[int]:
    assert train_here([*tiny, *ROLLBACK, "train.max_steps=11"], tmp_path / "clean") == 0
    return [int(e["data/fingerprint"], 16) for e in events(tmp_path / "clean", "step")]


@pytest.mark.e2e
def test_a_rollback_continues_with_the_data_after_the_failed_step(
    prefix: list[int], poison: Poison, tiny: list[str], tmp_path: Path
) -> None:
    poison(TWICE_BAD)
    options = [*ROLLBACK, "train.max_steps=8", "train.nonfinite=rollback"]
    assert train_here([*tiny, *options], tmp_path / "one") == 0
    check_rolled_back(tmp_path / "one", prefix)


@pytest.mark.e2e
def test_a_rollback_in_a_ramp_passes_over_the_tokens_of_the_failed_steps(
    poison: Poison, tiny: list[str], tmp_path: Path
) -> None:
    """The steps after it have the sizes of the steps before, and read what follows the failed one."""
    ramp = [*tiny, "batch.ramp_from_tokens=32", "batch.ramp_tokens=600", "train.max_steps=12", "train.eval_every=null",
            "train.save_every_tokens=160", "train.nonfinite=rollback"]  # fmt: skip
    assert train_here(ramp, tmp_path / "clean") == 0
    poison([(8, 1)])  # the ninth step, in its second micro-batch
    assert train_here(ramp, tmp_path / "bad") == 0
    clean, bad = (events(tmp_path / run, "step") for run in ("clean", "bad"))
    assert [event["batch/tokens"] for event in bad] == [event["batch/tokens"] for event in clean]
    [fault] = events(tmp_path / "bad", "fault")
    back = fault["step"]  # the last step of the checkpoint
    assert 0 < back < 7
    assert fault["tokens"] == clean[back]["tokens"]
    state = json.loads((newest(tmp_path / "bad") / "state.json").read_text())
    failed, reloaded, end = clean[8]["tokens"], clean[back]["tokens"], clean[-1]["tokens"]
    assert (state["steps_passed_over"], state["tokens_passed_over"]) == (8 - back, failed - reloaded)
    assert len({clean[number]["batch/tokens"] for number in range(back + 1, 12)}) > 1

    one_size = [*tiny, "batch.total_batch_size=32", f"train.max_steps={(end + failed - reloaded) // 32}"]
    poison([])
    assert train_here([*one_size, "log.noise_scale=off"], tmp_path / "data") == 0
    read = {e["tokens"]: int(e["data/fingerprint"], 16) for e in events(tmp_path / "data", "step")}
    expected = (read[reloaded] + read[end + failed - reloaded] - read[failed]) % 2**64
    assert int(bad[-1]["data/fingerprint"], 16) == expected


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(["world.sharding=full"], marks=pytest.mark.e2e),
        pytest.param([], marks=pytest.mark.slow),
    ],
)
def test_two_ranks_roll_back_like_one_rank(
    prefix: list[int], start: Start, sabotage: Sabotage, tiny: list[str], tmp_path: Path, own: list[str]
) -> None:
    env = sabotage("gptexp.training.step", poison_code(TWICE_BAD))
    options = [*ROLLBACK, "train.max_steps=8", "train.nonfinite=rollback", "world.size=2", "hydra.run.dir=two"]
    process = start("train", *tiny, *options, *own, env=env)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    check_rolled_back(tmp_path / "two", prefix)


def test_without_a_checkpoint_a_rollback_ends_the_run(
    poison: Poison, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    poison([(1, 0)])
    assert train_here([*tiny, "train.nonfinite=rollback", "train.save_every=0"], tmp_path / "out") == 5
    assert "before its first checkpoint" in capsys.readouterr().err


def test_a_rollback_restores_the_average_of_the_weights(poison: Poison, tiny: list[str], tmp_path: Path) -> None:
    """Step 3 was done twice, and only its second update is part of the average."""
    poison([(3, 0)])
    own = ["train.nonfinite=rollback", "train.save_every=2", "train.ema_half_life_tokens=300"]
    assert train_here([*tiny, *own], tmp_path / "out") == 0
    assert events(tmp_path / "out", "fault")
    assert float(load_file(newest(tmp_path / "out") / "ema.safetensors")["averaged_tokens"]) == 4 * 128


@pytest.mark.parametrize(
    "name", ["schedulefree", *(pytest.param(name, marks=pytest.mark.e2e) for name in ("lion", "lamb", "muon"))]
)
def test_a_rollback_leaves_nothing_of_an_update_that_spoilt_the_weights(
    poison: Poison, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On a GPU such an update takes place, and the next step is queued before the host knows of it."""

    def update(finite: torch.Tensor, optimizer: torch.optim.Optimizer, may_spoil: bool) -> None:
        assert may_spoil
        spoilt.append(not finite)
        optimizer.step()

    plain, spoilt = _Loop.__init__, list[bool]()

    def reads_late(self: _Loop, *args: Any) -> None:
        plain(self, *args)
        self.late = 1

    poison([(2, 0)])
    monkeypatch.setattr(_Loop, "__init__", reads_late)
    own = [*tiny, *ROLLBACK, f"optim={name}", "optim.lr=1e-3", "train.nonfinite=rollback", "train.max_steps=6"]
    averaged = name != "schedulefree"  # which averages weights by itself
    own += ["train.ema_half_life_tokens=300"] * averaged
    assert train_here(own, tmp_path / "waits") == 0
    monkeypatch.setattr(step_module, "step_if", update)
    assert train_here(own, tmp_path / "spoils") == 0
    assert (spoilt.index(True), len(spoilt)) == (2, 8)  # two steps were done again
    averages = [load_file(file) for file in sorted(tmp_path.glob("*/checkpoints/step-00000006/ema.safetensors"))]
    assert len(averages) == 2 * averaged
    assert all(torch.equal(average, averages[0][name]) for of in averages for name, average in of.items())
    assert equal(tmp_path / "waits", tmp_path / "spoils")


@pytest.mark.e2e
def test_a_branch_rolls_back_to_the_checkpoint_that_it_began_with(
    poison: Poison, tiny: list[str], tmp_path: Path
) -> None:
    """The run that it branches from passed over two steps before that checkpoint, and over one after it."""
    poison([(5, 1), (10, 0)])
    whole, branched = tmp_path / "whole", tmp_path / "branch"
    own = [*tiny, "schedule=constant", "train.max_steps=12", "train.save_every=4", "train.keep_last=0",
           "train.nonfinite=rollback"]  # fmt: skip
    run_dir.save_config(whole, compose(own))
    assert train_here(own, whole) == 0
    assert train_here([f"branch_from={whole}@8"], branched) == 0
    [_, late], [fault] = events(whole, "fault"), events(branched, "fault")
    assert (fault["step"], fault["text"]) == (late["step"], late["text"])
    states = [json.loads((newest(directory) / "state.json").read_text()) for directory in (whole, branched)]
    assert [state["steps_passed_over"] for state in states] == [3, 3]
    assert states[0]["fingerprint"] == states[1]["fingerprint"]
    assert equal(whole, branched)


@pytest.fixture
def rollback_run(tiny: list[str], poison: Poison, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Trains 9 steps; data step 5 is non-finite. Interrupts the run after `stop_after` steps (0: never)."""
    poison([(5, 1)])
    options = ["train.max_steps=9", "train.eval_every=0", "model.dropout=0.1", "log.sample_tokens=0",
               "train.nonfinite=rollback"]  # fmt: skip

    def train(directory: Path, stop_after: int, save_every: int = 4) -> Path:
        overrides = [*tiny, *options, f"train.save_every={save_every}"]
        stop, calls, plain = StopRequest(), itertools.count(1), TrainStep.__call__

        def counted(step: TrainStep, *args: Any, **kwargs: Any) -> Any:
            report = plain(step, *args, **kwargs)
            if next(calls) == stop_after:
                stop.on_signal(signal.SIGTERM, None)
            return report

        if stop_after:
            with monkeypatch.context() as patch:
                patch.setattr(TrainStep, "__call__", counted)
                assert train_here(overrides, directory, stop) == 143
        assert train_here(overrides, directory) == 0
        return newest(directory)

    return train


@pytest.mark.parametrize(
    "stops", [pytest.param((4,), marks=pytest.mark.e2e), pytest.param((2, 5, 6, 8), marks=pytest.mark.slow)]
)
def test_interruptions_do_not_change_the_result_of_a_rollback(
    rollback_run: Callable[..., Path], tmp_path: Path, stops: tuple[int, ...]
) -> None:
    """The checkpoint of an interruption is nearer to the non-finite step, but a rollback does not use it."""
    whole = rollback_run(tmp_path / "whole", stop_after=0)
    assert json.loads((whole / "state.json").read_text())["steps_passed_over"] == 2
    for stop_after in stops:  # a request in step 4 takes effect after step 5
        parts = rollback_run(tmp_path / f"{stop_after}", stop_after)
        assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes(), stop_after


@pytest.mark.e2e
def test_a_rollback_past_a_damaged_checkpoint_saves_that_step_again(
    rollback_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = checkpoint.prune

    def damaging(directory: Path, keep: checkpoint.Keep) -> None:
        plain(directory, keep)
        saved = directory / "step-00000004"
        if saved.exists() and not list(directory.glob("rejected-*")):
            (saved / "optimizer.safetensors").write_bytes(b"")

    monkeypatch.setattr(checkpoint, "prune", damaging)
    last = rollback_run(tmp_path / "out", stop_after=0, save_every=2)
    assert last.name == "step-00000009"
    assert json.loads((last / "state.json").read_text())["steps_passed_over"] == 4  # back to step 2
    [rejected] = (tmp_path / "out" / "checkpoints").glob("rejected-*")
    assert rejected.name.endswith("step-00000004")
    saved = [e["step"] for e in events(tmp_path / "out", "checkpoint")]
    assert saved == [1, 3, 5, 7, 8]
    assert checkpoint.newest(last.parent)[0] == last
