"""Compilation, bfloat16, the chunked loss and activation checkpointing keep losses close to plain float32."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT, events

from gptexp.config.schema import Config, ModelConfig
from gptexp.data.loader import MicroBatch
from gptexp.distributed.ranks import Rank
from gptexp.distributed.reduction import MeanReduction
from gptexp.machine.device import has_native_bfloat16
from gptexp.machine.effective import forward_context, step_context
from gptexp.machine.resolve import resolve
from gptexp.model.gpt import GPT, Loss
from gptexp.model.kernels import attention_kernel
from gptexp.model.loss import chunked_cross_entropy, fused_cross_entropy, plain_cross_entropy
from gptexp.optim import AdamWConfig
from gptexp.run.build import build_gpt
from gptexp.run.workloads import SMALL
from gptexp.training.optimizer import build_optimizer
from gptexp.training.step import TrainStep

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

MODEL = ModelConfig(n_layer=2, n_head=4, n_embd=48, block_size=32, vocab_size=512)
STEPS, WARM_UP, LR = 20, 5, 6e-4


def losses(
    loss: Loss,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    checkpointing: bool = False,
    fused: bool = True,
    precision: str = "highest",
    kernel: str = "flash",
) -> list[float]:
    """Losses of twenty steps with two micro-steps. Each token determines the next, so the model can learn."""
    torch.manual_seed(1337)
    gpt = GPT(MODEL, loss, activation_checkpointing=checkpointing)
    if compiled:
        torch.compiler.reset()  # its graphs do not depend on the kernel that is allowed
        gpt.compile(fullgraph=True, dynamic=False)
    optimizer = build_optimizer(gpt, AdamWConfig(lr=LR), fused)
    context = nullcontext if dtype == torch.float32 else partial(torch.autocast, "cpu", dtype)
    train_step = TrainStep(gpt, optimizer, MeanReduction(None), 1.0, context, dropout=False)
    generator = torch.Generator().manual_seed(0)
    found = []
    torch.set_float32_matmul_precision(precision)
    try:
        for step in range(STEPS):
            start = torch.randint(512, (24, 1), generator=generator)
            tokens = (start + 7 * torch.arange(33)) % 512
            batches = [MicroBatch(half[:, :-1], half[:, 1:], 0, 0) for half in tokens.split(12)]
            with attention_kernel(kernel, False, "cpu"):
                report = train_step(iter(batches), 2, lr_factor=min(1.0, (step + 1) / WARM_UP))
            found.append(report.read().loss)
    finally:
        torch.set_float32_matmul_precision("highest")
    return found


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """Losses with float32, eager mode, whole logits, and AdamW as a loop over the tensors."""
    found = losses(plain_cross_entropy, fused=False)
    assert found[-1] < found[0] - 0.3  # it learns, so a wrong gradient would change the losses
    return found


SETTINGS = {
    "chunked": lambda: {"loss": chunked_cross_entropy},
    "checkpointed": lambda: {"loss": plain_cross_entropy, "checkpointing": True},
    "medium": lambda: {"loss": plain_cross_entropy, "precision": "medium"},
    "bfloat16": lambda: {"loss": plain_cross_entropy, "dtype": torch.bfloat16},
    "bfloat16, chunked": lambda: {"loss": chunked_cross_entropy, "dtype": torch.bfloat16},
}
COMPILED = {
    "compiled": lambda: {"loss": plain_cross_entropy, "compiled": True},
    "compiled, chunked": lambda: {"loss": chunked_cross_entropy, "compiled": True},
    "compiled, checkpointed": lambda: {"loss": plain_cross_entropy, "compiled": True, "checkpointing": True},
    "bfloat16, compiled": lambda: {"loss": plain_cross_entropy, "dtype": torch.bfloat16, "compiled": True},
    "bfloat16, compiled, chunked": lambda: {
        "loss": chunked_cross_entropy,
        "dtype": torch.bfloat16,
        "compiled": True,
    },
    "fused": lambda: {"loss": fused_cross_entropy},
    "bfloat16, fused": lambda: {"loss": fused_cross_entropy, "dtype": torch.bfloat16},
    "bfloat16, compiled, fused": lambda: {
        "loss": fused_cross_entropy,
        "dtype": torch.bfloat16,
        "compiled": True,
    },
    "compiled, math": lambda: {"loss": plain_cross_entropy, "compiled": True, "kernel": "math"},
    "bfloat16, compiled, math": lambda: {
        "loss": plain_cross_entropy,
        "dtype": torch.bfloat16,
        "compiled": True,
        "kernel": "math",
    },
}


@pytest.mark.parametrize("name", [*SETTINGS, *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED)])
def test_losses_are_close_to_those_of_plain_float32(
    name: str, plain: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # an empty cache: everything is compiled now
    setting: Callable[[], dict[str, object]] = {**SETTINGS, **COMPILED}[name]
    fast = losses(**setting())  # type: ignore[arg-type]
    assert fast == pytest.approx(plain, rel=1e-3 if "bfloat16" in name else 1e-5)
    assert fast != plain or name in (
        "medium",
        "checkpointed",
    )  # other settings compute in another way: equal bits would mean that they had no effect


def test_activation_checkpointing_saves_memory_and_changes_no_bit() -> None:
    assert losses(plain_cross_entropy, checkpointing=True) == losses(plain_cross_entropy)
    x = torch.zeros(8, 32, dtype=torch.int64)
    kept = []
    for checkpointing in (False, True):
        seen: dict[int, int] = {}

        def pack(t: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        model = GPT(MODEL, plain_cross_entropy, activation_checkpointing=checkpointing)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(x, x)
        kept.append(sum(seen.values()))
        del loss
    assert kept[1] < kept[0] / 2


def test_dropout_is_the_same_in_a_recomputed_block() -> None:
    """A block is recomputed with the same random numbers, so its gradients are equal to the bit."""
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, dropout=0.3),
                    plain_cross_entropy, activation_checkpointing=checkpointing)  # fmt: skip
        x = torch.arange(32).view(2, 16)
        torch.manual_seed(1)
        model(x, x).backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert a is not None
        assert torch.equal(a, b)


def test_a_recomputed_block_uses_the_requested_attention_kernel() -> None:
    """The backward pass recomputes the block outside of the context of the forward pass."""
    cfg = Config()
    cfg.model, cfg.train.attention, cfg.train.activation_checkpointing = MODEL, "math", True
    cfg.batch.micro_batch_size = 2
    cpu = torch.device("cpu")
    effective = resolve(cfg, cpu, Rank())
    gpt = build_gpt(cfg, effective, cpu)
    optimizer, x = build_optimizer(gpt, cfg.optim, True), torch.zeros(2, 32, dtype=torch.int64)
    with step_context(effective), torch.profiler.profile() as profile:
        step = TrainStep(gpt, optimizer, MeanReduction(None), 1.0, forward_context(effective), dropout=False)
        step(iter([MicroBatch(x, x, 0, 0)]), 1, lr_factor=1.0)
    count = Counter(e.name for e in profile.events())
    assert count["aten::_scaled_dot_product_attention_math"] == 2 * MODEL.n_layer
    assert count["aten::_scaled_dot_product_flash_attention_for_cpu"] == 0


@pytest.mark.slow
def test_a_compiled_model_is_compiled_again_for_another_attention_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch's key of the compile cache does not contain the kernel; the package adds it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cfg, cpu, x = Config(), torch.device("cpu"), torch.zeros(2, 32, dtype=torch.int64)
    cfg.model, cfg.train.compile, cfg.train.loss = MODEL, "on", "plain"  # torch caches this graph as a whole
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    for kernel, operations in (("math", set()), ("flash", {flash}), ("math", set())):
        cfg.train.attention = kernel
        effective = resolve(cfg, cpu, Rank())
        gpt = build_gpt(cfg, effective, cpu)
        with step_context(effective):
            gpt(x, x).backward()
            with torch.profiler.profile() as profile:
                gpt(x, x).backward()
        assert {e.name for e in profile.events()} & {flash} == operations


COMPILED_GRADIENT = """
import torch
from gptexp.config.schema import Config, ModelConfig
from gptexp.distributed.ranks import Rank
from gptexp.machine.resolve import resolve
from gptexp.run.build import build_gpt
cfg, cpu = Config(), torch.device("cpu")
cfg.model = ModelConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=64)
cfg.train.compile, cfg.train.loss, cfg.train.attention = "on", "chunked", "flash"  # only the model is compiled
gpt = build_gpt(cfg, resolve(cfg, cpu, Rank()), cpu)
x = torch.arange(64).view(2, 32)
gpt(x, x).backward()
print(gpt.ln_f.weight.grad.norm().item())
"""


@pytest.mark.slow
def test_a_compiled_model_is_compiled_again_after_a_change_of_the_loss_gradient(tmp_path: Path) -> None:
    """torch's key of the compile cache contains the operation's name only; the package adds a hash of its source.

    Without it, a fix in a new release would have no effect where an old result is cached.
    """
    shutil.copytree(ROOT / "gptexp", tmp_path / "gptexp")
    source = tmp_path / "gptexp" / "model" / "loss.py"
    text = source.read_text()
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"),
        "TORCH_LOGS": "+torch._functorch._aot_autograd.autograd_cache",
    }
    found, log = [], ""
    for factor in ("grad", "grad", "2 * grad"):
        source.write_text(text.replace("return grad_hidden * grad", f"return grad_hidden * {factor}"))
        done = subprocess.run(
            [sys.executable, "-c", COMPILED_GRADIENT], cwd=tmp_path, env={**os.environ, **env}, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        log += done.stderr
        found.append(float(done.stdout))
    # Nothing is computed again for the second process, not even the derivatives.
    assert re.findall(r"AOTAutograd cache (hit|miss) for key", log) == ["miss", "hit", "miss"]
    assert found[1:] == [found[0], pytest.approx(2 * found[0])]


SMALL_RUN = [  # a workload of `gptexp bench`: 4 layers, 128 wide, 50,304 ids, 2,048 tokens a step
    *SMALL, "train.max_steps=20", "schedule.warmup_steps=5", "train.eval_every=0", "data.val_tokens=0",
    "log=disabled", "log.progress=off", "log.sample_tokens=0",
]  # fmt: skip
PLAIN_RUN = ["train.dtype=float32", "train.matmul_precision=highest", "train.compile=off", "train.loss=plain"]


CHOICES = {
    "auto": ["train.dtype=float32"],
    "compiled": ["train.dtype=float32", "train.compile=on"],
    "own kernels": [
        "train.dtype=float32", "train.loss=fused", "world=ddp2", "batch.micro_batch_size=4",
    ],
    "bfloat16": ["train.dtype=bfloat16", "train.compile=on"],
    "own kernels in bfloat16": [
        "train.dtype=bfloat16", "train.compile=on", "train.activation_checkpointing=true",
    ],
}  # fmt: skip
EMULATED = pytest.mark.skipif(
    not has_native_bfloat16(torch.device("cpu")), reason="this CPU emulates bfloat16: a step takes half a minute"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=EMULATED if "bfloat16" in name else ()) for name in CHOICES])
def test_the_automatic_choices_keep_the_losses_of_a_real_run(gptexp: Gptexp, tmp_path: Path, name: str) -> None:
    """Compares `gptexp train` with float32, eager mode, whole logits and AdamW as a loop over the tensors."""
    found = []
    for directory, overrides in (("plain", [*PLAIN_RUN, "optim.fused=off"]), ("chosen", CHOICES[name])):
        done = gptexp("train", *SMALL_RUN, *overrides, f"hydra.run.dir={directory}")
        assert done.returncode == 0, done.stderr
        found.append([event["train/loss"] for event in events(tmp_path / directory, "step")])
    plain, chosen = found
    assert plain[-1] < plain[0] - 0.5
    assert chosen == pytest.approx(plain, rel=1e-3 if "bfloat16" in name else 1e-5)
