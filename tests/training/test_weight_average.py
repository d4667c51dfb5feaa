"""The average of the weights: against numpy, over batch sizes, in whole runs, and by hand on the validation text."""

import json
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BYTES, events, summary
from real_runs import equal, newest, train_here
from safetensors.torch import load_file
from torch import nn

from gptexp import load_run
from gptexp.config.compose import compose
from gptexp.data.loader import build_dataset
from gptexp.distributed.ranks import Rank
from gptexp.distributed.sharding import WholeParameters
from gptexp.machine.resolve import estimate, resolve
from gptexp.model.memory import Memory
from gptexp.process.errors import CheckpointError
from gptexp.reporting.charts.line_charts import Lines, line_charts
from gptexp.reporting.listings.records import read_run
from gptexp.run.load import load_checkpointed
from gptexp.storage import checkpoint, run_dir
from gptexp.storage.checkpoint import AVERAGED_TOKENS
from gptexp.training.weight_average import WeightAverage

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
YES, NO = torch.tensor(True), torch.tensor(False)
SMALL = [*BYTES, "optim.lr=1e-2", "schedule=constant"]
EMA = "train.ema_half_life_tokens=300"


def brute_force(weights: list[np.ndarray], tokens: list[int], half_life: float) -> np.ndarray:
    """The mean of the weights after each update of so many `tokens`, with shares 2^(-age / half-life)."""
    ends = np.cumsum(tokens)
    shares = 2.0 ** ((ends - ends[-1]) / half_life) * -np.expm1(-math.log(2) * np.array(tokens) / half_life)
    return np.tensordot(shares / shares.sum(), np.stack(weights).astype(np.float64), 1)


def updates(model: nn.Linear, count: int) -> Iterator[np.ndarray]:
    """Give the model `count` random weights, one after the other."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        with torch.no_grad():
            model.weight.copy_(torch.randn(3, 5, generator=draw))
        yield model.weight.detach().numpy().copy()


def averaged(average: WeightAverage) -> torch.Tensor:
    return average.tensors()["weight"]


def test_the_average_equals_the_sum_of_all_weights_with_their_shares() -> None:
    """With steps of different sizes, as in a ramp, and from the first step on."""
    model = nn.Linear(5, 3)
    average, sizes = WeightAverage(WholeParameters(model), 700), [16, 64, 64, 128, 256, 1024, 64, 32] * 4
    seen = []
    for step, weight in enumerate(updates(model, len(sizes))):
        seen.append(weight)
        average.update(sizes[step], YES)
        expected = brute_force(seen, sizes[: step + 1], 700)
        np.testing.assert_allclose(averaged(average).numpy(), expected, rtol=0, atol=1e-6)
    assert float(average.tensors()[AVERAGED_TOKENS]) == sum(sizes)


def test_the_first_average_is_the_weights_after_the_first_update() -> None:
    model = nn.Linear(5, 3)
    average = WeightAverage(WholeParameters(model), 10**9)
    next(updates(model, 1))
    average.update(8, YES)
    assert torch.equal(averaged(average), model.weight)


@pytest.mark.parametrize("step_tokens", [2**10, 2**12, 2**15])
def test_a_half_life_in_tokens_does_not_depend_on_the_batch_size(step_tokens: int) -> None:
    """After 2^15 tokens at 1 an average that was 0 for long is halfway there."""
    model = nn.Linear(5, 3)
    average = WeightAverage(WholeParameters(model), 2**15)
    for value, tokens in ((0.0, 40 * 2**15), (1.0, 2**15)):
        nn.init.constant_(model.weight, value)
        for _ in range(tokens // step_tokens):
            average.update(step_tokens, YES)
    torch.testing.assert_close(averaged(average), torch.full((3, 5), 0.5), rtol=0, atol=1e-5)


def test_a_skipped_update_does_not_count() -> None:
    """Neither do its tokens, and the first one leaves the initial weights, which are finite."""
    model = nn.Linear(5, 3)
    average, start = WeightAverage(WholeParameters(model), 100), model.weight.detach().clone()
    average.update(64, NO)
    assert torch.equal(averaged(average), start)
    seen = []
    for step, weight in enumerate(updates(model, 12)):
        if step % 3:
            seen.append(weight)
        average.update(64, YES if step % 3 else NO)
    np.testing.assert_allclose(averaged(average).numpy(), brute_force(seen, [64] * 8, 100), rtol=0, atol=1e-6)


def test_the_weights_come_back_to_the_last_bit_also_after_an_error() -> None:
    model = nn.Linear(5, 3)
    average = WeightAverage(WholeParameters(model), 100)
    for _ in updates(model, 3):
        average.update(64, YES)
    own, of_average = model.weight.detach().clone(), averaged(average).clone()
    assert not torch.equal(own, of_average)

    def fails() -> None:
        with average.in_place_of_weights():
            assert torch.equal(model.weight, of_average)
            assert torch.equal(averaged(average), own)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert torch.equal(model.weight, own)
    assert torch.equal(averaged(average), of_average)


# --- whole runs -------------------------------------------------------------------------------------------------------


def average_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(newest(directory) / "ema.safetensors")


@pytest.mark.e2e
def test_a_run_saves_the_average_of_its_weights_and_evaluates_it(tiny: list[str], tmp_path: Path) -> None:
    """Against the weights of the checkpoints of all steps, and a loop over single windows."""
    own = [*SMALL, "train.max_steps=8", "train.save_every=1", "train.keep_last=0", "train.eval_every=4"]
    for name, options in {"without": [], "with": [EMA]}.items():
        assert train_here([*tiny, *own, *options], tmp_path / name) == 0
        run_dir.save_config(tmp_path / name, compose([*tiny, *own, *options]))
    run = tmp_path / "with"
    assert equal(tmp_path / "without", run)
    assert not list((tmp_path / "without").rglob("ema*"))

    of_steps = [load_file(path / "model.safetensors") for path in sorted((run / "checkpoints").iterdir())]
    average = average_of(run)
    assert float(average.pop(AVERAGED_TOKENS)) == 8 * 128
    assert average.keys() == of_steps[0].keys()
    for name, tensor in average.items():
        expected = brute_force([weights[name].numpy() for weights in of_steps], [128] * 8, 300)
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=0, atol=1e-6)

    model, _, config = load_run(run, ema=True)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in average.items())
    dataset = build_dataset(config)
    rows = torch.from_numpy(dataset.rows(dataset.val, dataset.val_starts).astype("int64"))
    with torch.no_grad():
        by_hand = sum(float(model(row[None, :-1], row[None, 1:])) for row in rows) / len(rows)
    evaluations = [(event["step"], event["val/loss_ema"]) for event in events(run, "eval")]
    assert [step for step, _ in evaluations] == [3, 7]
    assert evaluations[-1][1] == pytest.approx(by_hand, rel=1e-5)
    assert summary(run)["final_val_loss_ema"] == evaluations[-1][1] != summary(run)["final_val_loss"]
    assert summary(tmp_path / "without")["final_val_loss_ema"] is None
    assert "val/loss_ema" not in events(tmp_path / "without", "eval")[-1]

    runs = [read_run(run), read_run(tmp_path / "without")]
    expected = [((step + 1) * 128, loss) for step, loss in evaluations]
    for shown, key in ((runs[:1], "loss"), (runs, "averaged-loss")):
        [chart] = [chart for chart in line_charts(Lines(shown)) if chart.key == key]
        points = chart.spec["data"]["values"]
        assert [(p["tokens"], p["loss"]) for p in points if p["of"] == "averaged"] == expected


@pytest.mark.e2e
def test_a_resumed_run_ends_with_the_same_average(tiny: list[str], tmp_path: Path) -> None:
    own = [*tiny, *SMALL, EMA, "train.max_steps=6", "train.save_every=3", "train.eval_every=3"]
    assert train_here(own, tmp_path / "run") == 0
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "run", resumed)
    shutil.rmtree(newest(resumed))
    assert train_here(own, resumed) == 0
    before, after = average_of(tmp_path / "run"), average_of(resumed)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert summary(resumed)["final_val_loss_ema"] == summary(tmp_path / "run")["final_val_loss_ema"]

    damaged = newest(resumed) / "ema.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    found = checkpoint.load_latest(resumed / run_dir.CHECKPOINTS)
    assert found is not None
    assert found[1].step == 3  # the older one


@pytest.mark.e2e
def test_what_the_verbs_take_is_the_average(tiny: list[str], tmp_path: Path, gptexp: Gptexp) -> None:
    own = ["train.max_steps=4", "train.save_every=4", "log.progress=lines", "hydra.run.dir=run"]
    trained = gptexp("train", *tiny, *SMALL, EMA, *own)
    assert trained.returncode == 0, trained.stderr
    loss = summary(tmp_path / "run")["final_val_loss_ema"]
    assert "average         of the weights, half-life 300 tokens (2.3 steps)" in trained.stdout
    assert f"averaged weights: {loss:.6f}" in trained.stdout
    assert f"average         val loss {loss:.4f} with the averaged weights" in trained.stdout

    found = json.loads(gptexp("evaluate", "run", "--ema").stdout)
    assert found["val/loss"] == pytest.approx(loss, rel=1e-5)
    assert found["ema"] is True
    of_weights = json.loads(gptexp("evaluate", "run").stdout)
    assert of_weights["val/loss"] == pytest.approx(summary(tmp_path / "run")["final_val_loss"], rel=1e-5)
    assert "ema" not in of_weights
    assert gptexp("export", "run", "out", "--ema").returncode == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    average = average_of(tmp_path / "run")
    assert torch.equal(exported["transformer.ln_f.weight"], average["ln_f.weight"])
    assert f"| {loss:.4f} |" in (tmp_path / "out" / "README.md").read_text()
    texts = [gptexp("sample", "run", *more, "--temperature", "0") for more in ((), ("--ema",))]
    assert [done.returncode for done in texts] == [0, 0]
    assert gptexp("rm", "run", "--yes").returncode == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", [["sample"], ["evaluate"], ["evaluate", "--tasks=hellaswag"], ["export", "out"]])
def test_a_run_without_an_average_is_refused(finished_run: Path, gptexp: Gptexp, verb: list[str]) -> None:
    done = gptexp(verb[0], str(finished_run), *verb[1:], "--ema")
    assert done.returncode == 2
    assert done.stderr == (
        f"gptexp: config error: --ema: {finished_run} was trained without train.ema_half_life_tokens; leave out --ema\n"
    )


def test_a_checkpoint_that_lacks_the_average_is_refused(tiny: list[str], tmp_path: Path) -> None:
    """Its config has been edited. Without it, the run cannot continue either."""
    assert train_here([*tiny, *SMALL, "train.max_steps=2"], tmp_path) == 0
    config = compose([*tiny, *SMALL, "train.max_steps=2", EMA])
    run_dir.save_config(tmp_path, config)
    with pytest.raises(CheckpointError, match=r"ema\.safetensors"):
        load_checkpointed(tmp_path, averaged=True)


def memory(overrides: list[str]) -> Memory:
    config = compose(overrides)
    return estimate(config, resolve(config, torch.device("cpu"), Rank(), None), 1)


def test_the_memory_estimate_has_another_copy_of_the_weights(tiny: list[str]) -> None:
    plain, with_average = (memory([*tiny, *SMALL, *more]) for more in ([], [EMA]))
    assert with_average.average == plain.weights
    assert with_average.tensors - plain.tensors == plain.weights
