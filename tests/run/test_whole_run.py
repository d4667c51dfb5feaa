"""A whole run on one rank: its metrics, its summary, and options that must not change the result."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import ForkServer, e2e_then_slow, events, summary
from real_runs import equal, finished_run, newest, train_here

from gptexp import load_run
from gptexp.config.metrics import SHARPNESS, Metric
from gptexp.data.loader import build_dataset
from gptexp.data.tokenizer import load_tokenizer
from gptexp.process.signals import StopRequest
from gptexp.run import evaluations
from gptexp.storage import run_dir, tensor_files


@pytest.fixture
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path, torch_server: ForkServer) -> Path:
    return finished_run(tmp_path_factory, corpus, torch_server).directory


def test_metrics_have_the_names_of_the_table(finished: Path) -> None:
    logged = events(finished, "step") + events(finished, "eval")
    of_other_runs = {
        "optim/gradient_noise",
        *SHARPNESS,
        "perf/slowest_rank",
        "perf/straggler_ratio",
        "hellaswag/acc",
        "hellaswag/acc_norm",
        "hellaswag/cut",
        "val/loss_ema",
    }
    assert {name for event in logged for name in event} - {"event"} == set(Metric) - of_other_runs
    assert all(len(e["data/fingerprint"]) == 16 for e in events(finished, "step"))


def test_step_numbers_begin_at_zero_and_tokens_grow_with_each_step(finished: Path) -> None:
    steps = events(finished, "step")
    assert [e["step"] for e in steps] == list(range(40))
    assert [e["tokens"] for e in steps] == [128 * (i + 1) for i in range(40)]


def test_the_learning_rate_follows_the_cosine(finished: Path) -> None:
    """To a tenth over 40 steps with 4 steps of warm-up. Only the warm-up counts the tokens of the step itself."""
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * max(0, i - 4) / 36)) / 2 for i in range(40)]
    expected = [1e-2 * min((i + 1) / 4, cosine[i]) for i in range(40)]
    assert [e["optim/lr"] for e in events(finished, "step")] == pytest.approx(expected)


def test_a_run_evaluates_ten_times(finished: Path) -> None:
    evals = events(finished, "eval")
    assert [e["tokens"] for e in evals] == [512 * (i + 1) for i in range(10)]
    assert evals[-1]["val/ppl"] == pytest.approx(math.exp(evals[-1]["val/loss"]))


def test_bits_per_byte_are_those_of_the_decoded_validation_text(finished: Path) -> None:
    dataset, tokenizer = build_dataset(run_dir.load_config(finished)), load_tokenizer("gpt2")
    targets = dataset.rows(dataset.val, dataset.val_starts)[:, 1:].ravel().tolist()
    text_bytes = sum(len(tokenizer.decode_tokens_bytes([i])[0]) for i in targets if i != tokenizer.eot_token)
    last = events(finished, "eval")[-1]
    assert last["val/bpb"] == pytest.approx(last["val/loss"] / math.log(2) * len(targets) / text_bytes)


def test_the_summary_agrees_with_the_metrics(finished: Path) -> None:
    s = summary(finished)
    assert s["status"] == "completed"
    assert (s["steps"], s["tokens"], s["parameters"], s["seed"]) == (40, 40 * 128, 808_432, 1337)
    evals = [e["val/loss"] for e in events(finished, "eval")]
    assert s["final_val_loss"] == evals[-1]
    assert s["best_val_loss"] == min(evals)
    assert s["versions"]["torch"] == torch.__version__
    assert s["wall_s"] > s["train_s"] > 0


def test_a_run_directory_holds_the_decisions_and_the_newest_checkpoints(finished: Path) -> None:
    assert (finished / ".hydra" / "overrides.yaml").exists()
    assert len(list((finished / "checkpoints").glob("step-*"))) == 2  # keep_last
    effective = json.loads((finished / "effective.json").read_text())
    assert effective["threads_per_rank"] == 1
    assert effective["reasons"].keys() >= {"dtype", "compile", "loss", "fused", "threads_per_rank"}


def test_validation_loss_is_that_of_the_plain_model_on_the_same_windows(finished: Path) -> None:
    """The logged number against a loop over single windows with torch's own cross-entropy."""
    model, _, config = load_run(finished)
    os.environ["GPTEXP_CACHE"] = str(finished.parent / "tokens")  # clean_environment restores it
    dataset = build_dataset(config)
    losses = []
    for start in dataset.val_starts:
        ids = torch.from_numpy(dataset.val.read(int(start), 17).astype("int64"))
        logits = model.lm_head(model.hidden(ids[None, :-1]))[0]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[1:]).item())
    assert len(losses) == 7
    assert summary(finished)["final_val_loss"] == pytest.approx(sum(losses) / 7, rel=1e-5)


@pytest.mark.e2e
def test_evaluating_saving_logging_and_sampling_do_not_change_the_weights(tiny: list[str], tmp_path: Path) -> None:
    """At every interval, and with dropout, the run ends with the same bits."""
    ways = {
        "never": ["train.eval_every=0", "train.save_every=0", "train.log_every=100", "log.sample_tokens=0"],
        "always": ["train.eval_every=1", "train.save_every=1", "train.log_every=1", "log.sample_tokens=9"],
        "now and then": ["train.eval_every=3", "train.save_every=2", "train.keep_last=0", "data.val_path=null"],
        "in other batches": ["train.eval_every=1", "train.nonfinite=stop", "train.keep_best=false"],
    }
    for name, options in ways.items():
        torch.manual_seed(len(name))  # another state of the generator before each run
        assert train_here([*tiny, "train.max_steps=5", "model.dropout=0.2", *options], tmp_path / name) == 0
        assert equal(tmp_path / "never", tmp_path / name), name


@pytest.mark.parametrize(("module", "slow"), e2e_then_slow([(tensor_files, "write"), (evaluations, "validation_loss")]))
def test_max_minutes_leaves_the_time_to_save(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, slow: str
) -> None:
    """A file of a checkpoint or an evaluation takes a second here. The run saves and ends within its time."""
    assert train_here([*tiny, "train.max_steps=1"], tmp_path / "warm-up") == 0  # imports and tokens take no time later
    plain: Callable[..., object] = getattr(module, slow)

    def slowly(*args: object, **kwargs: object) -> object:
        time.sleep(1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(module, slow, slowly)
    stop = StopRequest()
    stop.limit(8 / 60)
    started = time.monotonic()
    options = ["train.max_steps=100000", "train.save_every=10", "train.eval_every=10"]
    assert train_here([*tiny, *options], tmp_path / "out", stop) == 0
    assert 3 < time.monotonic() - started < 8.2
    assert summary(tmp_path / "out")["steps"] > 10, "the machine was too slow: the run has not met the slow call"
    assert summary(tmp_path / "out")["status"] == "interrupted"
    assert newest(tmp_path / "out").name == f"step-{summary(tmp_path / 'out')['steps']:08d}"


def test_metrics_are_on_the_disk_before_the_checkpoint_that_depends_on_them(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure after a save must lose no step before it. A kill cannot test that."""
    plain_fsync, plain_rename = os.fsync, Path.rename
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
    options = ["train.save_every=2", "train.eval_every=0", "log.sample_tokens=0"]
    assert train_here([*tiny, *options], tmp_path / "out") == 0
    assert when_published == [("step-00000002", 2), ("step-00000004", 4)]
