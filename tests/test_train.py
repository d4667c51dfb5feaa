"""Whole runs in real processes: what a user types, and what lies in the run directory afterwards."""

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, events, processes_of, runs, signal_rank, summary, wait_for

from gptexp import load_run
from gptexp.compose import compose
from gptexp.config import DataConfig
from gptexp.data.prepare import prepare
from gptexp.distributed import Rank
from gptexp.loggers import METRICS
from gptexp.signals import StopRequest

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    newest = sorted((directory / "checkpoints").glob("step-*"))[-1]
    return load_file(newest / "model.safetensors")


# --- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, str]:
    """A run of 40 steps at world size 1, and what it printed."""
    from conftest import TINY

    root = tmp_path_factory.mktemp("finished")
    overrides = [*TINY, f"data.path={corpus}", "log=disabled", "optim.lr=1e-2", "train.max_steps=40"]
    command = [sys.executable, "-m", "gptexp.train", *overrides, "hydra.run.dir=out"]
    env = {**os.environ, "GPTEXP_CACHE": str(root / "cache")}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return root / "out", done.stdout


def test_it_learns_and_prints_the_lines_of_the_contract(finished: tuple[Path, str]) -> None:
    directory, out = finished
    losses = [e["train/loss"] for e in events(directory, "step")]
    assert losses[0] == pytest.approx(math.log(50304), abs=0.15)
    assert losses[-1] < losses[0] - 3
    assert "schedule        cosine, warm-up over 512 tokens (4 steps), horizon 5,120 (40 steps)" in out
    assert "validation      every 512 tokens (4 steps)" in out
    assert "num decayed parameter tensors: 6, with 808,192 parameters" in out
    assert "learning rate   0.01, from the command line" in out
    [line] = [line for line in out.splitlines() if line.startswith("step   10 | loss")]
    step10 = events(directory, "step")[10]
    assert line == (
        f"step   10 | loss: {step10['train/loss']:.6f} | lr {step10['optim/lr']:.4e} | "
        f"norm: {step10['optim/grad_norm']:.4f} | dt: {step10['perf/step_ms']:.2f}ms | "
        f"tok/sec: {step10['perf/tokens_per_s']:.2f}"
    )
    assert "--- a sample" in out
    assert str(directory) in out.splitlines()[-1]


def test_metrics_have_the_names_of_the_table_and_whole_counts(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    steps, evals = events(directory, "step"), events(directory, "eval")
    assert [e["step"] for e in steps] == list(range(40))
    assert [e["tokens"] for e in steps] == [128 * (i + 1) for i in range(40)]
    # Cosine to a tenth over 40 steps, 4 of them warm-up: the step's own batch counts in the warm-up only.
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * max(0, i - 4) / 36)) / 2 for i in range(40)]
    assert [e["optim/lr"] for e in steps] == pytest.approx([1e-2 * min((i + 1) / 4, cosine[i]) for i in range(40)])
    assert len(evals) == 10  # ten times a run
    assert evals[-1]["tokens"] == 40 * 128
    of_several_ranks = {"perf/slowest_rank", "perf/straggler_ratio"}
    assert {name for e in steps + evals for name in e} - {"event"} == set(METRICS) - of_several_ranks
    assert all(len(e["data/fingerprint"]) == 16 for e in steps)
    assert evals[-1]["val/ppl"] == pytest.approx(math.exp(evals[-1]["val/loss"]))


def test_summary_and_files(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    s = summary(directory)
    assert s["status"] == "completed"
    assert (s["steps"], s["tokens"], s["parameters"], s["seed"]) == (40, 40 * 128, 808_432, 1337)
    evals = [e["val/loss"] for e in events(directory, "eval")]
    assert s["final_val_loss"] == evals[-1]
    assert s["best_val_loss"] == min(evals)
    assert s["versions"]["torch"] == torch.__version__
    assert (directory / ".hydra" / "overrides.yaml").exists()
    assert len(list((directory / "checkpoints").glob("step-*"))) == 2  # keep_last
    effective = json.loads((directory / "effective.json").read_text())
    assert effective["threads_per_rank"] == 1
    assert s["wall_s"] > s["train_s"] > 0
    assert effective["reasons"].keys() >= {"dtype", "compile", "loss", "fused", "threads_per_rank"}


def test_validation_loss_is_that_of_the_plain_model_on_the_same_windows(finished: tuple[Path, str]) -> None:
    """The logged number against a loop over single windows with torch's own cross-entropy."""
    from gptexp.data.loader import build_dataset

    directory, _ = finished
    model, _, config = load_run(directory)
    os.environ["GPTEXP_CACHE"] = str(directory.parent / "cache")  # clean_environment puts it back
    dataset = build_dataset(config)
    losses = []
    for window in dataset.val_windows:
        ids = torch.from_numpy(dataset.val.read(int(window) * 16, 17).astype("int64"))
        logits = model.lm_head(model.hidden(ids[None, :-1]))[0]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[1:]).item())
    assert len(losses) == 7
    assert summary(directory)["final_val_loss"] == pytest.approx(sum(losses) / 7, rel=1e-5)


def test_what_a_gpu_trained_with_its_own_kernels_opens_on_a_cpu(
    finished: tuple[Path, str], gptexp: Gptexp, tmp_path: Path
) -> None:
    directory = tmp_path / "from_gpu"
    shutil.copytree(finished[0], directory)
    config = yaml.safe_load((directory / "config.yaml").read_text())
    config["train"].update(device="auto", attention="cudnn")
    config["optim"].update(fused="on")
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    effective = json.loads((directory / "effective.json").read_text())
    (directory / "effective.json").write_text(json.dumps({**effective, "device": "cuda", "attention": "cudnn"}))
    model, _, _ = load_run(directory)
    assert next(model.parameters()).device.type == "cpu"
    done = gptexp("evaluate", str(directory), env={"GPTEXP_CACHE": str(finished[0].parent / "cache")})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["val/loss"] == pytest.approx(summary(finished[0])["final_val_loss"], rel=1e-5)


def test_config_yaml_is_enough_to_run_again(
    finished: tuple[Path, str], tmp_path: Path, gptexp: Gptexp, corpus: Path
) -> None:
    directory, _ = finished
    again = tmp_path / "again"
    again.mkdir()
    shutil.copy(directory / "config.yaml", again)
    done = gptexp("resume", str(again), "--world-size", "1")
    assert done.returncode == 0, done.stderr
    for name, value in weights(directory).items():
        assert torch.equal(value, weights(again)[name])


def test_same_directory_again_is_skipped_and_another_config_refused(
    finished: tuple[Path, str], gptexp: Gptexp, tmp_path: Path
) -> None:
    directory, _ = finished
    overrides = yaml.safe_load((directory / ".hydra" / "overrides.yaml").read_text())
    before = {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    same = gptexp("train", *overrides, f"hydra.run.dir={directory}")
    assert (same.returncode, "completed; nothing to do" in same.stdout) == (0, True)
    other = gptexp("train", *overrides, "optim.lr=2e-2", f"hydra.run.dir={directory}")
    assert other.returncode == 2
    assert "optim.lr was 0.01, now 0.02" in other.stderr
    assert gptexp("resume", str(directory)).returncode == 0
    assert {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()} == before


def test_evaluate_prints_json_and_takes_other_text(finished: tuple[Path, str], gptexp: Gptexp, tmp_path: Path) -> None:
    directory, _ = finished
    own = json.loads(gptexp("evaluate", str(directory)).stdout)
    assert own["val/loss"] == pytest.approx(summary(directory)["final_val_loss"], rel=1e-6)
    assert (own["step"], own["tokens"]) == (40, 112)
    (tmp_path / "other.txt").write_text("Completely different words, never seen in training. " * 40)
    args = ("evaluate", str(directory), "--data", "other.txt", "--val-tokens", "96")
    other = json.loads(gptexp(*args).stdout)
    assert other["tokens"] == 96
    assert other["val/loss"] > own["val/loss"] + 1


def test_evaluate_never_scores_what_was_trained_on(finished: tuple[Path, str], gptexp: Gptexp, tmp_path: Path) -> None:
    more = gptexp("evaluate", str(finished[0]), "--val-tokens", "128")
    assert (more.returncode, "the run has held out 112; use fewer, or --data FILE" in more.stderr) == (2, True)
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    saved = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(saved.replace("val_tokens: 112", "val_tokens: 0"))
    nothing = gptexp("evaluate", str(run))
    assert (nothing.returncode, "has held nothing out; give --data FILE" in nothing.stderr) == (2, True)
    (tmp_path / "now.txt").write_text("Another text. " * 500)
    (run / "config.yaml").write_text(re.sub(r"path: .*text\.txt", f"path: {tmp_path}/now.txt", saved))
    changed = gptexp("evaluate", str(run))
    assert (changed.returncode, "trained on other tokens" in changed.stderr) == (3, True)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.yaml", "optim: {lr: 6e-4}", "lr=6e-4 in a saved OptimConfig: not the type it had; write 6.0e-4"),
        ("config.yaml", "[1, 2]", "a saved Config holds keys and values"),
        ("effective.json", "", "effective.json: no JSON"),
        ("summary.json", "[]", "summary.json: no JSON object"),
    ],
)
def test_a_damaged_run_directory_is_one_line(
    finished: tuple[Path, str], gptexp: Gptexp, tmp_path: Path, file: str, content: str, said: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    (run / file).write_text(content)
    done = gptexp("evaluate", str(run))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_goes_on_when_nobody_reads_what_it_says(start: Start, long_run: list[str], tmp_path: Path) -> None:
    process = start("train", *long_run, "train.max_steps=60", "hydra.run.dir=out", "log.progress=lines")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0, process.stderr and process.stderr.read()
    assert summary(tmp_path / "out")["status"] == "completed"
    assert len(events(tmp_path / "out", "step")) == 60


def test_sample_prints_what_was_asked_for(finished: tuple[Path, str], gptexp: Gptexp) -> None:
    directory, _ = finished
    args = ("--prompt", "The cat", "--num-samples", "3", "--max-new-tokens", "8")
    done = gptexp("sample", str(directory), *args)
    samples = done.stdout.rstrip("\n").split("\n---\n")
    assert done.returncode == 0, done.stderr
    assert len(samples) == 3
    assert all(s.startswith("The cat") for s in samples)
    assert gptexp("sample", str(directory), *args).stdout == done.stdout
    bad = gptexp("sample", str(directory), "--top-k", "-1")
    assert (bad.returncode, bad.stderr) == (2, "gptexp: config error: --top-k=-1: must be 0 or above\n")


@pytest.mark.parametrize("verb", ["sample", "evaluate", "resume"])
def test_verbs_refuse_what_is_no_run(gptexp: Gptexp, tmp_path: Path, verb: str) -> None:
    done = gptexp(verb, str(tmp_path))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no run directory" in done.stderr


def test_no_whole_checkpoint_is_exit_code_four(finished: tuple[Path, str], gptexp: Gptexp, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(finished[0], broken)
    for file in broken.glob("checkpoints/*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    done = gptexp("sample", str(broken))
    assert done.returncode == 4
    assert done.stderr.count("checkpoint passed over: ") == 2
    assert "no checkpoint is whole" in done.stderr
    shutil.rmtree(broken / "checkpoints")
    done = gptexp("evaluate", str(broken))
    assert (done.returncode, "no checkpoint has been saved yet" in done.stderr) == (4, True)


def test_bad_data_is_exit_code_three_and_divergence_five(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    short = gptexp("train", *tiny, "data.path=short.txt")
    assert short.returncode == 3, short.stderr
    tokenised, error = short.stderr.splitlines()
    assert tokenised.startswith("tokenised text")
    assert "fewer than one window" in error
    wild = gptexp("train", *tiny, "optim.lr=1e30", "optim.grad_clip=0", "hydra.run.dir=wild", "train.max_steps=20")
    assert wild.returncode == 5, wild.stderr
    assert "diverged" in wild.stderr
    assert summary(tmp_path / "wild")["status"] == "diverged"
    losses = [e["train/loss"] for e in events(tmp_path / "wild", "step")]
    assert losses[-1] is None  # JSON has no NaN
    assert None not in losses[:-1]  # the first step that is not finite is the last
    assert not list(tmp_path.glob("wild/checkpoints/*"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_damaged_token_file_ends_a_run_before_its_first_step(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, world_size: int
) -> None:
    cache = tmp_path / "tokens"
    assert gptexp("prepare", *tiny, f"data.cache_dir={cache}").returncode == 0
    [shard] = cache.glob("*/*.bin")
    body = bytearray(shard.read_bytes())
    body[-7] ^= 1  # some token is now its neighbour: nothing but the hash can tell
    shard.write_bytes(body)
    done = gptexp("train", *tiny, f"data.cache_dir={cache}", f"world.size={world_size}", "hydra.run.dir=out")
    assert done.returncode == 3
    [line] = done.stderr.splitlines()
    assert line.startswith(f"gptexp: {shard}: ")
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


# --- stopping and going on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "world_size"), [("SIGINT", 1), ("SIGTERM", 2)])
def test_a_signal_to_the_parent_saves_and_leaves(
    start: Start, long_run: list[str], tmp_path: Path, name: str, world_size: int
) -> None:
    directory = tmp_path / "out"
    process = start("train", *long_run, f"world.size={world_size}", start_new_session=True)
    wait_for(lambda: (directory / "metrics.jsonl").exists() and len(events(directory, "step")) > 5, process)
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=60)
    assert process.returncode == {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 138}[name], err
    assert "Traceback" not in err
    s = summary(directory)
    assert s["status"] == "interrupted"
    assert (directory / "checkpoints" / f"step-{s['steps']:08d}").is_dir()
    assert processes_of(directory) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_interrupted_and_resumed_on_one_rank_equals_undisturbed(
    start: Start, gptexp: Gptexp, tiny: list[str], tmp_path: Path, world_size: int
) -> None:
    """Dropout is on: its randomness is derived from the step, not from how often the run was started.

    What began on one rank ends with the same bits; two ranks add up their gradients in another order.
    """
    overrides = [*tiny, "train.max_steps=60", "train.save_every=1000", "train.eval_every=0", "model.dropout=0.1"]
    undisturbed = gptexp("train", *overrides, "hydra.run.dir=whole")
    assert undisturbed.returncode == 0, undisturbed.stderr
    directory = tmp_path / "out"
    process = start("train", *overrides, "hydra.run.dir=out", f"world.size={world_size}")
    wait_for(lambda: (directory / "metrics.jsonl").exists() and len(events(directory, "step")) > 8, process)
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


def test_resume_takes_what_may_change_and_refuses_other_data(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, corpus: Path
) -> None:
    """After an interruption: another micro-batch and world size are taken, another text at the same place is not."""
    (tmp_path / "text.txt").write_text(corpus.read_text())
    overrides = [*tiny, "data.path=text.txt", "hydra.run.dir=out", "train.max_steps=40", "train.save_every=2"]
    stopped = gptexp("train", *overrides, "train.max_minutes=0.000001")
    assert stopped.returncode == 0, stopped.stderr
    done = summary(tmp_path / "out")["steps"]
    assert 0 < done < 40
    changed = ("batch.micro_batch_size=4", "world.size=2")
    original = (tmp_path / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(original.replace("cat", "cow"))
    for told_by in ("out", f"step-{done:08d}"):  # summary.json in it; where that is gone, the checkpoint
        refused = gptexp("train", *overrides, *changed)
        assert (refused.returncode, f"{told_by}: began with other data" in refused.stderr) == (3, True), refused.stderr
        (tmp_path / "out" / "summary.json").unlink(missing_ok=True)
    (tmp_path / "text.txt").write_text(original)
    resumed = gptexp("train", *overrides, *changed, "log=disabled")
    assert resumed.returncode == 0, resumed.stderr
    assert "4 sequences × 16 tokens × 2 ranks × 1 micro-steps" in resumed.stdout
    assert f"resuming        after step {done - 1}" in resumed.stdout
    assert summary(tmp_path / "out")["status"] == "completed"


def test_ctrl_c_while_a_rank_tokenises_leaves_nothing(start: Start, tiny: list[str], tmp_path: Path) -> None:
    """One rank tokenises the standard library, the other waits for it; neither has anything to save."""
    cache = tmp_path / "cache"
    overrides = [*tiny, "data=stdlib", "data.path=null", f"data.cache_dir={cache}", "hydra.run.dir=out"]
    process = start("train", *overrides, "world.size=2", start_new_session=True)
    wait_for(lambda: any(cache.glob("*.tmp")), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert processes_of(tmp_path / "out") == []
    assert not list(cache.glob("*/manifest.json"))


def test_a_signal_to_one_rank_stops_all_and_loses_nothing(start: Start, long_run: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "out"
    process = start("train", *long_run, "world.size=2")
    wait_for(lambda: (directory / "metrics.jsonl").exists() and len(events(directory, "step")) > 3, process)
    signal_rank(directory, 0, signal.SIGUSR1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 138, err
    s = summary(directory)
    assert s["status"] == "interrupted"
    assert (directory / "checkpoints" / f"step-{s['steps']:08d}" / "manifest.json").exists()


def test_a_killed_rank_ends_the_run_and_is_named(start: Start, long_run: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "out"
    process = start("train", *long_run, "world.size=2")
    wait_for(lambda: (directory / "metrics.jsonl").exists() and len(events(directory, "step")) > 3, process)
    signal_rank(directory, 1, signal.SIGKILL)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "rank 1 failed (exit code -9): killed by SIGKILL" in err
    assert processes_of(directory) == []


def test_of_a_defect_in_one_rank_the_cause_is_told_once(tiny: list[str], tmp_path: Path) -> None:
    """Rank 1 meets an error nobody expects in the middle of training, rank 0 a connection that is gone."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import hashlib, os
        if os.environ.get("RANK") == "1":
            plain, calls = hashlib.blake2b, 0
            def blake2b(*args, **kwargs):  # what makes a fingerprint
                global calls
                calls += 1
                if calls == 5:
                    raise RuntimeError("a defect")
                return plain(*args, **kwargs)
            hashlib.blake2b = blake2b
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "gptexp.train", *tiny, "world.size=2"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "gptexp: rank 1 failed (exit code 1): RuntimeError: a defect" in done.stderr


def test_a_killed_parent_leaves_no_rank_behind(start: Start, long_run: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "out"
    process = start("train", *long_run, "world.size=2")
    wait_for(lambda: (directory / "metrics.jsonl").exists() and len(events(directory, "step")) > 3, process)
    assert len(processes_of(directory)) == 2
    process.kill()
    deadline = time.monotonic() + 60
    while (left := processes_of(directory)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for number in left:
        os.kill(number, signal.SIGKILL)
    assert left == []
    assert summary(directory)["status"] == "interrupted"  # they had the time to save


def test_a_directory_in_use_is_refused(start: Start, gptexp: Gptexp, long_run: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "out"
    process = start("train", *long_run)
    wait_for(lambda: (directory / "metrics.jsonl").exists() and len(events(directory, "step")) > 1, process)
    second = gptexp("train", *long_run)
    assert (second.returncode, "another process is running in it" in second.stderr) == (2, True)


# --- several ranks ---------------------------------------------------------------------------------------------------


def test_losses_and_fingerprints_do_not_depend_on_ranks_or_micro_batch(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """20 steps of 512 tokens at lr 6e-4, 5 warm-up steps, one thread per rank: to 1e-5 relative."""
    cuts = [(1, 2), (2, 2), (4, 2), (1, 4), (1, 8)]
    for world_size, micro_batch_size in cuts:
        overrides = [
            *tiny,
            "batch.total_batch_size=512",
            "train.max_steps=20",
            "schedule.warmup_steps=5",
            "train.eval_every=0",
            f"world.size={world_size}",
            f"batch.micro_batch_size={micro_batch_size}",
        ]
        name = f"w{world_size}b{micro_batch_size}"
        if world_size > 1:
            done = gptexp("train", *overrides, f"hydra.run.dir={name}")
            assert done.returncode == 0, done.stderr
        else:
            from gptexp.run import run  # one rank needs no process of its own

            assert run(compose(overrides), tmp_path / name, StopRequest(), Rank()) == 0
    reference = tmp_path / "w1b2"
    for world_size, micro_batch_size in cuts[1:]:
        other = tmp_path / f"w{world_size}b{micro_batch_size}"
        for kind, keys in (("step", ("train/loss", "optim/grad_norm")), ("eval", ("val/loss",))):
            for a, b in zip(events(reference, kind), events(other, kind), strict=True):
                assert a.get("data/fingerprint") == b.get("data/fingerprint")
                for key in keys:
                    assert b[key] == pytest.approx(a[key], rel=1e-5), (other.name, a["step"], key)


def test_too_little_memory_is_one_line_with_the_ways_out(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    """Logits of half a million tokens, 100 GB, in one piece, on each of two ranks."""
    options = ["batch.total_batch_size=1048576", "batch.micro_batch_size=32768", "train.loss=plain",
               "train.compile=off", "world.size=2"]  # fmt: skip
    done = gptexp("train", *tiny, *options, "hydra.run.dir=out")
    assert done.returncode == 2
    assert "batch.micro_batch_size=32768: a step needs more memory than this cpu has left" in done.stderr
    assert "use a smaller one or auto, train.loss=chunked" in done.stderr
    assert "Traceback" not in done.stderr
    assert summary(tmp_path / "out")["status"] == "failed"


def test_reductions_do_not_grow_with_accumulation(tmp_path: Path) -> None:
    """Counts what DDP reduces and what we reduce ourselves, in two real ranks."""
    script = tmp_path / "count.py"
    script.write_text(
        textwrap.dedent("""
        import json, os
        import torch, torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        from contextlib import nullcontext
        from gptexp.config import ModelConfig
        from gptexp.data.loader import MicroBatch
        from gptexp.model import GPT
        from gptexp.distributed import MeanReduction
        from gptexp.trainer import train_step

        dist.init_process_group("gloo")
        counts = {"buckets": 0, "ours": 0}
        def hook(group, bucket):
            counts["buckets"] += 1
            return allreduce_hook(group, bucket)
        plain = dist.all_reduce
        def all_reduce(*args, async_op=False, **kwargs):
            counts["ours"] += not async_op  # the hook's own calls are asynchronous
            return plain(*args, async_op=async_op, **kwargs)
        dist.all_reduce = all_reduce
        ddp = torch.nn.parallel.DistributedDataParallel(GPT(ModelConfig(1, 2, 16, 8, 64)), gradient_as_bucket_view=True)
        ddp.register_comm_hook(None, hook)
        optimizer = torch.optim.AdamW(ddp.parameters())
        x = torch.zeros(2, 8, dtype=torch.int64)
        for accumulation in (1, 4, 16):
            counts.update(buckets=0, ours=0)
            before = [p.grad.data_ptr() if p.grad is not None else 0 for p in ddp.parameters()]
            batches = iter([MicroBatch(x, x, 1, 0)] * accumulation)
            mean = MeanReduction(ddp)
            train_step(ddp, optimizer, mean, batches, accumulation, 1e-3, 1.0, nullcontext, False).read()
            if dist.get_rank() == 0:
                kept = before == [p.grad.data_ptr() for p in ddp.parameters()]
                print(json.dumps([accumulation, counts["buckets"], counts["ours"], kept]), flush=True)
        dist.barrier()
        # A gloo thread may still hold the Python hook's future, which an interpreter that tears down aborts on.
        os._exit(0)
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counted = [json.loads(line) for line in done.stdout.splitlines()]
    assert [c[0] for c in counted] == [1, 4, 16]
    # The first step of DDP reduces in the buckets it was built with, before it regroups them.
    assert all(buckets in (1, 2) for _, buckets, _, _ in counted)
    assert [ours for _, _, ours, _ in counted] == [1, 1, 1]
    assert [kept for _, _, _, kept in counted] == [False, False, True]  # then they stay: nothing is copied


def test_two_torchrun_agents_train_one_run_in_one_directory(tiny: list[str], tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test", "-m", "gptexp.train", *tiny,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    agents = [
        subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [agent.communicate(timeout=180) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    [directory] = runs(tmp_path)
    assert summary(directory)["world_size"] == 2
    assert summary(directory)["status"] == "completed"
    assert [e["step"] for e in events(directory, "step")] == list(range(4))
    assert len(list((tmp_path / "outputs").glob("*/*"))) == 1


def srun(directory: Path, overrides: list[str], *envs: dict[str, str]) -> list[tuple[int, str]]:
    """SLURM's variables, simulated: a job step of a task for each of `envs`; (exit code, stderr) of each."""
    step = {
        "SLURM_STEP_NUM_TASKS": str(len(envs)),
        "SLURM_STEP_TASKS_PER_NODE": str(len(envs)),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "PYTHONPATH": str(ROOT),
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "gptexp.train", *overrides], cwd=directory, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **step, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), **env},
        )
        for i, env in enumerate(envs)
    ]  # fmt: skip
    errors = [task.communicate(timeout=120)[1] for task in tasks]
    return [(task.returncode, error) for task, error in zip(tasks, errors, strict=True)]


def test_ranks_with_other_data_than_rank_0_are_refused(tiny: list[str], tmp_path: Path, corpus: Path) -> None:
    """Two nodes with caches of their own; the text of one was changed under the same size and time."""
    text = tmp_path / "text.txt"
    text.write_text(corpus.read_text())
    apart = {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    nodes = [{**apart, "GPTEXP_CACHE": str(tmp_path / f"cache{i}")} for i in range(2)]
    prepare(DataConfig(name="text", path=[str(text)], cache_dir=nodes[1]["GPTEXP_CACHE"]))
    time_of_change = text.stat().st_mtime_ns
    text.write_text(corpus.read_text().replace("cat", "cow"))
    os.utime(text, ns=(time_of_change, time_of_change))
    done = srun(tmp_path, [*tiny, "data.path=text.txt"], *nodes)
    assert [code for code, _ in done] == [3, 3], done
    assert all("rank 1: has other data than rank 0" in error for _, error in done)


@pytest.mark.slow
def test_srun_tasks_are_ranks_and_an_sbatch_script_is_none(tiny: list[str], tmp_path: Path) -> None:
    """A job step of two tasks, then a script outside any step."""
    done = srun(tmp_path, tiny, {}, {})
    assert [code for code, _ in done] == [0, 0], done
    [directory] = runs(tmp_path)
    assert summary(directory)["world_size"] == 2
    script = {**os.environ, "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gptexp.train", *tiny, "hydra.run.dir=alone"]
    done = subprocess.run(command, cwd=tmp_path, env=script, timeout=120, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "alone")["world_size"] == 1


def test_under_a_launcher_multirun_and_questions_work_and_world_size_must_agree(
    tiny: list[str], tmp_path: Path
) -> None:
    def torchrun(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [*command, "gptexp.train", *argv], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180
        )

    swept = torchrun("-m", *tiny, "train.seed=1,2")
    assert swept.returncode == 0, swept.stderr
    assert [summary(d)["world_size"] for d in runs(tmp_path)] == [2, 2]
    asked = torchrun("--cfg", "job", *tiny)
    assert (asked.returncode, asked.stdout.count("n_layer: 1")) == (0, 1)
    wrong = torchrun(*tiny, "world.size=4")
    assert wrong.returncode != 0
    assert "world.size=4: the launcher started 2 ranks" in wrong.stderr
    assert len(runs(tmp_path)) == 2


# --- multirun --------------------------------------------------------------------------------------------------------


def test_four_cells_in_four_directories_and_a_crash_costs_one(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    grid = ("optim.lr=3e-4,6e-4", "batch.total_batch_size=128,256")
    done = gptexp("train", "-m", *tiny, *grid)
    assert done.returncode == 0, done.stderr
    cells = runs(tmp_path)
    assert len(cells) == 4
    assert len({c.parent for c in cells}) == 1
    seen = {
        (c["optim"]["lr"], c["batch"]["total_batch_size"], summary(d)["tokens"])
        for d in cells
        for c in [yaml.safe_load((d / "config.yaml").read_text())]
    }
    assert {c["sweep"]["name"] for d in cells for c in [yaml.safe_load((d / "config.yaml").read_text())]} == {
        cells[0].parent.name
    }
    assert seen == {(lr, b, 4 * b) for lr in (3e-4, 6e-4) for b in (128, 256)}
    # A step at 2B is the union of two at B: the same tokens make the same fingerprint.
    by_batch = {json.loads((d / "summary.json").read_text())["tokens"]: events(d, "step") for d in cells}
    assert by_batch[512][3]["data/fingerprint"] == by_batch[1024][1]["data/fingerprint"]

    stamp = {d: (d / "summary.json").stat().st_mtime_ns for d in cells}
    # What the first cell decided holds for all, those of a later day too.
    effective = json.loads((cells[0].parent / "effective.json").read_text())
    (cells[0].parent / "effective.json").write_text(json.dumps({**effective, "loss": "plain"}))
    wider = ("optim.lr=0.0003,6e-4,1e-3", "batch.total_batch_size=choice(128)")
    widened = gptexp("train", "-m", *tiny, *wider, "world.size=2")  # another world size is the same grid
    assert widened.returncode == 0, widened.stderr
    assert widened.stdout.count("completed before") == 2
    assert widened.stdout.count("completed    val loss") == 3
    assert len(runs(tmp_path)) == 5
    assert {d: (d / "summary.json").stat().st_mtime_ns for d in cells} == stamp
    [new] = set(runs(tmp_path)) - set(cells)
    assert json.loads((new / "effective.json").read_text())["loss"] == "plain"

    path = next(o for o in tiny if o.startswith("data.path="))
    crashed = gptexp("train", "-m", *tiny, f"{path},short.txt", "sweep.name=crash")
    assert crashed.returncode == 1
    assert "1 of 2 cells failed" in crashed.stderr
    assert "fewer than one window" in crashed.stderr
    assert "Traceback" not in crashed.stderr
    assert len([d for d in runs(tmp_path / "outputs" / "crash") if summary(d)["status"] == "completed"]) == 1


def test_one_illegal_cell_stops_the_sweep_before_the_first(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    done = gptexp("train", "-m", *tiny, "batch.total_batch_size=128,100")
    assert done.returncode == 2
    assert "(cell batch.total_batch_size=100)" in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_a_cell_that_diverges_is_an_outcome_and_not_tried_again(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    grid = ("-m", *tiny, "optim.lr=1e-3,1e30", "optim.grad_clip=0", "train.max_steps=10", "sweep.name=s")
    first = gptexp("train", *grid)
    assert first.returncode == 0, first.stderr
    assert "diverged" in first.stderr
    again = gptexp("train", *grid)
    assert again.returncode == 0
    assert "diverged before" in again.stdout
    assert sorted(summary(d)["status"] for d in runs(tmp_path)) == ["completed", "diverged"]


@pytest.mark.parametrize("name", ["gpt2_124m", "gpt3_125m", "shakespeare_50_steps"])
def test_every_recipe_starts(gptexp: Gptexp, tmp_path: Path, name: str) -> None:
    """As far as the data, which is too short or cannot be downloaded here."""
    (tmp_path / "short.txt").write_text("too short")
    path = () if name.startswith("shakespeare") else ("data.path=short.txt",)
    done = gptexp("train", f"experiment={name}", *path, env={"https_proxy": "http://127.0.0.1:9"})
    assert done.returncode == 3, done.stderr
    assert "learning rate   0.0006, from model=gpt" in done.stdout


def test_ctrl_c_in_a_sweep_saves_the_cell_and_starts_no_other(
    start: Start, long_run: list[str], tmp_path: Path
) -> None:
    process = start("train", "-m", *long_run, "train.seed=1,2", "sweep.name=s", start_new_session=True)
    cells = tmp_path / "outputs" / "s"
    wait_for(lambda: any(len(events(d.parent, "step")) > 3 for d in cells.glob("*/metrics.jsonl")), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    [cell] = runs(cells)
    assert summary(cell)["status"] == "interrupted"
    assert processes_of(cell) == []


def test_a_named_grid_runs_as_a_sweep(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    cut = gptexp("train", *tiny, "sweep=seeds", "train.seed=1338,7", "train.max_steps=1", "sweep.name=two")
    assert cut.returncode == 0, cut.stderr
    assert {summary(d)["seed"] for d in runs(tmp_path / "outputs" / "two")} == {1338, 7}  # the command line wins
    illegal = gptexp("train", *tiny, "sweep=seeds", "model.n_head=3")
    assert "(all 5 cells)" in illegal.stderr
