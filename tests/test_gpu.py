"""What only a GPU can show; run with `pytest -m gpu`."""

import json
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import events, summary

from gptexp.config import ModelConfig, OptimConfig
from gptexp.data.loader import MicroBatch
from gptexp.loss import ChunkedCrossEntropy, plain_cross_entropy
from gptexp.model import GPT
from gptexp.optim import build_optimizer
from gptexp.phases import StepTimer
from gptexp.trainer import StepReport, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


def test_it_trains_compiled_in_bfloat16_and_resumes(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    overrides = [
        *tiny,
        "log=disabled",
        "train.device=cuda",
        "train.dtype=auto",
        "optim.lr=1e-2",
        "train.max_steps=60",
        "hydra.run.dir=out",
    ]
    stopped = gptexp("train", *overrides, "train.max_minutes=0.0001")
    assert stopped.returncode == 0, stopped.stderr
    done = gptexp("train", *overrides)
    assert done.returncode == 0, done.stderr
    effective = json.loads((tmp_path / "out" / "effective.json").read_text())
    assert (effective["device"], effective["dtype"], effective["compile"]) == ("cuda", "bfloat16", True)
    losses = [e["train/loss"] for e in events(tmp_path / "out", "step")]
    assert len(losses) == 60
    assert losses[-1] < losses[0] - 3
    own = json.loads(gptexp("evaluate", str(tmp_path / "out")).stdout)
    assert own["val/loss"] == pytest.approx(summary(tmp_path / "out")["final_val_loss"], rel=1e-2)


def test_gpu_and_cpu_agree_in_float32(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        done = gptexp("train", *tiny, "train.max_steps=20", "schedule.warmup_steps=5", f"train.device={device}",
                      "train.dtype=float32", "train.compile=off", f"hydra.run.dir={device}")  # fmt: skip
        assert done.returncode == 0, done.stderr
    for a, b in zip(events(tmp_path / "cpu", "step"), events(tmp_path / "cuda", "step"), strict=True):
        assert a["data/fingerprint"] == b["data/fingerprint"]
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-3)


def test_nothing_waits_for_the_device_inside_a_step() -> None:
    """torch raises on every synchronising call while the mode is on."""
    device = torch.device("cuda")
    model = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=512)).to(device)
    optimizer = build_optimizer(model, OptimConfig(), fused=True)
    x = torch.zeros(4, 32, dtype=torch.int64, device=device)
    batches = iter([MicroBatch(x, x, 1, 0)] * 16)
    train_step(model, optimizer, batches, 4, 1e-3, 1.0, nullcontext, False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        timer = StepTimer(device)
        out = train_step(model, optimizer, batches, 4, 1e-3, 1.0, nullcontext, False, timer.mark)
        report = StepReport(0, 1e-3, *out, [0.0] * 4, 1, timer)
        with pytest.raises(RuntimeError, match="synchronizing"):
            out[0].item()  # the mode does catch what it should
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report.read()[0] > 0
    assert all(ms > 0 for ms in timer.read().values())


def test_losses_agree_on_the_gpu() -> None:
    g = torch.Generator("cuda").manual_seed(0)
    h = torch.randn(1300, 64, generator=g, device="cuda")
    w = torch.randn(777, 64, generator=g, device="cuda")
    y = torch.randint(777, (1300,), generator=g, device="cuda")
    torch.testing.assert_close(ChunkedCrossEntropy()(h, w, y), plain_cross_entropy(h, w, y), rtol=1e-4, atol=1e-4)


def test_an_automatic_micro_batch_fills_the_gpu_and_no_more(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    """Tried once, at the first start; a resumed run takes what was found."""
    overrides = [
        *(o for o in tiny if not o.startswith(("model.", "batch.", "train."))), "model=gpt2", "batch.seq_len=1024",
        "batch.total_batch_size=4194304", "batch.micro_batch_size=auto", "log=disabled", "train.max_steps=2",
        "log.sample_tokens=0", "data.val_tokens=0", "hydra.run.dir=out",
    ]  # fmt: skip
    stopped = gptexp("train", *overrides, "train.max_minutes=0.0001", timeout=900)
    assert stopped.returncode == 0, stopped.stderr
    effective = json.loads((tmp_path / "out" / "effective.json").read_text())
    assert effective["reasons"]["micro_batch_size"] == "the largest that divides and ran"
    assert effective["micro_batch_size"] >= 64
    done = gptexp("train", *overrides, timeout=900)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "effective.json").read_text()) == effective
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    assert 0.5 * total < events(tmp_path / "out", "step")[-1]["perf/peak_mem_gib"] < total


@pytest.mark.parametrize("micro_batch_size", [16, 64])
def test_peak_memory_is_within_15_percent_of_the_estimate(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, micro_batch_size: int
) -> None:
    overrides = [
        *(o for o in tiny if not o.startswith(("model.", "batch.", "train."))), "model=gpt2", "batch.seq_len=1024",
        f"batch.total_batch_size={2 * 1024 * micro_batch_size}", f"batch.micro_batch_size={micro_batch_size}",
        "train.device=cuda", "train.max_steps=4", "data.val_tokens=0", "log=disabled", "log.sample_tokens=0",
    ]  # fmt: skip
    plan = json.loads(gptexp("plan", *overrides, "--json").stdout)
    done = gptexp("train", *overrides, "hydra.run.dir=out", timeout=600)
    assert done.returncode == 0, done.stderr
    peak = 2**30 * events(tmp_path / "out", "step")[-1]["perf/peak_mem_gib"]
    assert plan["memory_bytes"]["peak"] == pytest.approx(peak, rel=0.15)
