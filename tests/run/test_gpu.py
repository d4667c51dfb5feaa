"""Tests that need a GPU; run with `pytest -m gpu`."""

import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import events, summary

from gptexp.config.batch import plan_batch
from gptexp.config.compose import compose
from gptexp.config.run_plan import PlannedStep
from gptexp.data.loader import MicroBatch, build_dataset, micro_batches
from gptexp.distributed.ranks import Rank
from gptexp.distributed.reduction import MeanReduction
from gptexp.distributed.sharding import WholeParameters
from gptexp.machine.effective import forward_context, step_context
from gptexp.machine.resolve import resolve
from gptexp.model.loss import chunked_cross_entropy, plain_cross_entropy
from gptexp.optim import OPTIMIZERS
from gptexp.process.signals import REASONS
from gptexp.run.build import build_gpt
from gptexp.training.gradient_noise import StepNoise
from gptexp.training.optimizer import build_optimizer
from gptexp.training.phases import StepTimer
from gptexp.training.small_gradients import SmallGradients
from gptexp.training.step import Probe, TrainStep
from gptexp.training.step_report import SlowestRank, StepReport, StepTimeout
from gptexp.training.weight_average import WeightAverage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


def test_a_run_trains_compiled_in_bfloat16_and_resumes(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    overrides = [
        *tiny,
        "log.progress=auto",
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


@pytest.mark.parametrize(
    ("compiled", "loss", "optim"),
    [
        *itertools.product(("on", "off"), ("plain", "chunked"), ("adamw",)),
        *(("off", "plain", name) for name in OPTIMIZERS if name not in ("adamw", "soap", "adafactor")),
    ],
)
def test_a_step_does_not_synchronise_with_the_device(tiny: list[str], compiled: str, loss: str, optim: str) -> None:
    """torch raises at every synchronising call while the mode is on, also in the thread that copies batches."""
    if package := OPTIMIZERS[optim].needs:
        pytest.importorskip(package)
    device, steps = torch.device("cuda"), 8
    cfg = compose([
        *tiny, "train.device=cuda", "train.dtype=bfloat16", f"train.compile={compiled}", f"train.loss={loss}",
        "batch.total_batch_size=128", "batch.micro_batch_size=2", f"optim={optim}", "optim.lr=1e-3",
    ])  # fmt: skip
    effective = resolve(cfg, device, Rank())
    gpt = build_gpt(cfg, effective, device)
    optimizer = build_optimizer(gpt, cfg.optim, effective.fused.value)
    plan = plan_batch(cfg.batch.total_batch_size, 2, cfg.seq_len, 1)
    planned = [PlannedStep(n, n * plan.total_batch_size, plan) for n in range(steps)]
    batches, accumulation = micro_batches(build_dataset(cfg), planned, 0, device), plan.grad_accum_steps
    mean, context = MeanReduction(None), forward_context(effective)
    step = TrainStep(gpt, optimizer, mean, 1.0, context, dropout=False, may_spoil=True)
    with step_context(effective):
        for _ in range(2):
            step(batches, accumulation, lr_factor=1.0)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(batches, accumulation, lr_factor=1.0)
            timer = StepTimer(device)
            probe = Probe(slowest=SlowestRank(7.5, device))
            report = step(batches, accumulation, lr_factor=1.0, timer=timer, probe=probe)
            with pytest.raises(RuntimeError, match="synchronizing"):
                report.finite.item()  # the mode does raise at a synchronising call
        finally:
            torch.cuda.set_sync_debug_mode("default")
    numbers = report.read()
    assert numbers.loss > 0
    assert numbers.work == pytest.approx((7.5, 7.5, 0))
    assert all(ms > 0 for ms in timer.read().values())


def test_waiting_for_a_gpu_that_does_not_answer_ends_after_the_timeout() -> None:
    one = torch.ones((), device="cuda")
    torch.cuda._sleep(2 * 10**9)  # about a second
    report = StepReport(one, 7, [0.0] * len(REASONS))
    report.complete(one)
    with pytest.raises(StepTimeout, match="did not arrive within"):
        report.read(timeout_s=0.05)
    assert report.read(timeout_s=60).fingerprint == 7


@pytest.mark.parametrize("compiled", [False, True])
def test_the_chunked_and_the_plain_loss_agree_on_the_gpu(compiled: bool) -> None:
    """With three chunks of 4,096 rows, the last one short."""
    chunked_loss = torch.compile(chunked_cross_entropy, fullgraph=True) if compiled else chunked_cross_entropy
    g = torch.Generator("cuda").manual_seed(0)
    y = torch.randint(777, (9000,), generator=g, device="cuda")
    h, w = (torch.randn(rows, 64, generator=g, device="cuda", requires_grad=True) for rows in (9000, 777))
    found = [loss(h, w, y) for loss in (chunked_loss, plain_cross_entropy)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    grads = zip(*(torch.autograd.grad(loss, (h, w)) for loss in found), strict=True)
    for chunked, plain in grads:
        assert (chunked - plain).norm() < 1e-4 * plain.norm()


def test_an_automatic_micro_batch_takes_more_than_half_of_the_gpu(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    """The first start finds the size by trials. A resumed run uses the same size."""
    overrides = [
        *(o for o in tiny if not o.startswith(("model.", "batch.", "train."))), "model=gpt2", "batch.seq_len=1024",
        "batch.total_batch_size=4194304", "batch.micro_batch_size=auto", "log=disabled", "train.max_steps=2",
        "log.sample_tokens=0", "data.val_tokens=0", "hydra.run.dir=out",
    ]  # fmt: skip
    stopped = gptexp("train", *overrides, "train.max_minutes=0.0001", timeout=900)
    assert stopped.returncode == 0, stopped.stderr
    effective = json.loads((tmp_path / "out" / "effective.json").read_text())
    assert effective["sources"]["micro_batch_size"] == "decided"
    assert effective["micro_batch_size"] >= 64
    done = gptexp("train", *overrides, timeout=900)
    assert done.returncode == 0, done.stderr
    resumed = json.loads((tmp_path / "out" / "effective.json").read_text())
    assert resumed["micro_batch_size"] == effective["micro_batch_size"]
    assert resumed["sources"]["micro_batch_size"] == "saved"  # tried once
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


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_the_noise_scale_equals_that_of_a_cpu(gptexp: Gptexp, tiny: list[str], tmp_path: Path, compiled: str) -> None:
    for device, more in (("cpu", []), ("cuda", [f"train.compile={compiled}"])):
        done = gptexp("train", *tiny, *more, f"train.device={device}", f"hydra.run.dir={device}")
        assert done.returncode == 0, done.stderr
    cpu, cuda = (events(tmp_path / device, "step")[0] for device in ("cpu", "cuda"))
    for name in ("gns/small_sq_norm", "gns/big_sq_norm", "gns/cos"):
        assert cuda[name] == pytest.approx(cpu[name], rel=1e-3)


def test_neither_noise_nor_its_measurement_nor_the_average_synchronises_with_the_device() -> None:
    """torch raises where a step with gradient noise, a noise scale and averaged weights would wait for the device."""
    cfg = compose(["model=gpt2", "model.n_layer=2", "batch.total_batch_size=4096", "batch.micro_batch_size=1"])
    device = torch.device("cuda")
    effective = resolve(cfg, device, Rank())
    gpt = build_gpt(cfg, effective, device)
    optimizer = build_optimizer(gpt, cfg.optim, effective.fused.value)
    x = torch.zeros((1, 1024), dtype=torch.int64, device=device)
    batches = (MicroBatch(x, x.clone(), 0, 0) for _ in range(8))
    probe = Probe(small_gradients=SmallGradients(gpt, WholeParameters(gpt)))
    step = TrainStep(gpt, optimizer, MeanReduction(None), 1.0, forward_context(effective), dropout=False)
    noise, average = StepNoise(seed=1, relative=0.1, absolute=0.1), WeightAverage(WholeParameters(gpt), 8192)
    with step_context(effective):
        report = step(batches, 4, lr_factor=1.0, probe=probe, noise=noise)  # compiles
        average.update(4096, report.finite)
        torch.cuda.set_sync_debug_mode("error")
        try:
            report = step(batches, 4, lr_factor=1.0, probe=probe, noise=noise)
            average.update(4096, report.finite)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert report.read().small_sq_norm > 0


def test_a_trace_contains_the_kernels_of_the_gpu(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    done = gptexp("train", *tiny, "train.device=cuda", "train.max_steps=12", "train.profile=true", "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    [found] = events(tmp_path / "out", "profile")
    assert len(found["operations"]) == 10
    assert sum(operation["share"] for operation in found["operations"]) > 0.3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flexattention_trains_as_masks_in_chunks(gptexp: Gptexp, tiny: list[str], tmp_path: Path, dtype: str) -> None:
    shape = ["model.n_layer=2", "model.n_embd=64", "model.block_size=160", "model.window=40", "model.window_every=2",
             "batch.total_batch_size=1280", "data.document_mask=true", "data.val_tokens=320"]  # fmt: skip
    for kernel in ("auto", "flex"):
        done = gptexp("train", *tiny, *shape, "train.max_steps=20", "train.device=cuda", f"train.dtype={dtype}",
                      f"train.attention={kernel}", "train.compile=on", f"hydra.run.dir={kernel}")  # fmt: skip
        assert done.returncode == 0, done.stderr
    for a, b in zip(events(tmp_path / "auto", "step"), events(tmp_path / "flex", "step"), strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-3 if dtype == "float32" else 1e-2)
