"""What makes a step fast leaves its losses where plain float32 has them."""

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

from gptexp.bench import SMALL
from gptexp.build import build_gpt
from gptexp.config import Config, ModelConfig, OptimConfig
from gptexp.data.loader import MicroBatch
from gptexp.distributed import MeanReduction, Rank
from gptexp.effective import forward_context, resolve, step_context
from gptexp.loss import chunked_cross_entropy, plain_cross_entropy
from gptexp.machine import has_native_bfloat16
from gptexp.model import GPT, Loss
from gptexp.optim import build_optimizer
from gptexp.trainer import train_step

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
) -> list[float]:
    """Of twenty steps of two micro-steps, on text that can be learnt: each token follows from the one before."""
    torch.manual_seed(1337)
    gpt = GPT(MODEL, loss, checkpointing)
    if compiled:
        gpt.compile(fullgraph=True, dynamic=False)
    optimizer = build_optimizer(gpt, OptimConfig(), fused)
    context = nullcontext if dtype == torch.float32 else partial(torch.autocast, "cpu", dtype)
    generator = torch.Generator().manual_seed(0)
    found = []
    torch.set_float32_matmul_precision(precision)
    try:
        for step in range(STEPS):
            start = torch.randint(512, (24, 1), generator=generator)
            tokens = (start + 7 * torch.arange(33)) % 512
            batches = [MicroBatch(half[:, :-1], half[:, 1:], 0, 0) for half in tokens.split(12)]
            lr = LR * min(1.0, (step + 1) / WARM_UP)
            report = train_step(gpt, optimizer, MeanReduction(None), iter(batches), 2, lr, 1.0, context, dropout=False)
            found.append(report.read().loss)
    finally:
        torch.set_float32_matmul_precision("highest")
    return found


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """Float32, eager, whole logits, AdamW as a loop over the tensors."""
    found = losses(plain_cross_entropy, fused=False)
    assert found[-1] < found[0] - 0.3  # it learns, so that a wrong gradient would show
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
}


@pytest.mark.parametrize("name", [*SETTINGS, *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED)])
def test_losses_stay_where_plain_float32_has_them(
    name: str, plain: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what is compiled is what is there now
    setting: Callable[[], dict[str, object]] = {**SETTINGS, **COMPILED}[name]
    fast = losses(**setting())  # type: ignore[arg-type]
    assert fast == pytest.approx(plain, rel=1e-3 if "bfloat16" in name else 1e-5)
    assert fast != plain or name in ("medium", "checkpointed")  # another computation, or the very same


def test_checkpointing_keeps_less_and_changes_no_bit() -> None:
    assert losses(plain_cross_entropy, checkpointing=True) == losses(plain_cross_entropy)
    x = torch.zeros(8, 32, dtype=torch.int64)
    kept = []
    for checkpointing in (False, True):
        seen: dict[int, int] = {}

        def pack(t: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        model = GPT(MODEL, plain_cross_entropy, checkpointing)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(x, x)
        kept.append(sum(seen.values()))
        del loss
    assert kept[1] < kept[0] / 2


def test_checkpointing_drops_the_same_values_twice() -> None:
    """With dropout the blocks are computed again from the same random numbers: gradients are equal to the bit."""
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, dropout=0.3),
                    plain_cross_entropy, checkpointing)  # fmt: skip
        x = torch.arange(32).view(2, 16)
        torch.manual_seed(1)
        model(x, x).backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert a is not None
        assert torch.equal(a, b)


def test_a_checkpointed_block_attends_twice_with_the_same_kernel() -> None:
    """The backward pass computes it again, outside of autocast and of all that the forward pass alone runs in."""
    cfg = Config()
    cfg.model, cfg.train.attention, cfg.train.activation_checkpointing = MODEL, "math", True
    cfg.batch.micro_batch_size = 2
    cpu = torch.device("cpu")
    effective = resolve(cfg, cpu, Rank())
    gpt = build_gpt(cfg, effective, cpu)
    optimizer, x = build_optimizer(gpt, cfg.optim, True), torch.zeros(2, 32, dtype=torch.int64)
    with step_context(effective), torch.profiler.profile() as profile:
        batches, context = iter([MicroBatch(x, x, 0, 0)]), forward_context(effective)
        train_step(gpt, optimizer, MeanReduction(None), batches, 1, 1e-3, 1.0, context, False)
    count = Counter(e.name for e in profile.events())
    assert count["aten::_scaled_dot_product_attention_math"] == 2 * MODEL.n_layer
    assert count["aten::_scaled_dot_product_flash_attention_for_cpu"] == 0


@pytest.mark.slow
def test_another_kernel_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And not taken from the cache, whose own key knows nothing of the choice."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cfg, cpu, x = Config(), torch.device("cpu"), torch.zeros(2, 32, dtype=torch.int64)
    cfg.model, cfg.train.compile, cfg.train.loss = MODEL, "on", "plain"  # a graph that the cache takes whole
    for kernel in ("math", "flash"):
        cfg.train.attention = kernel
        effective = resolve(cfg, cpu, Rank())
        gpt = build_gpt(cfg, effective, cpu)
        with step_context(effective):
            gpt(x, x).backward()
            with torch.profiler.profile() as profile:
                gpt(x, x).backward()
        used = {e.name for e in profile.events()}
        assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in used) == (kernel == "flash")


COMPILED_GRADIENT = """
import torch
from gptexp.build import build_gpt
from gptexp.config import Config, ModelConfig
from gptexp.distributed import Rank
from gptexp.effective import resolve
cfg, cpu = Config(), torch.device("cpu")
cfg.model = ModelConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=64)
cfg.train.compile, cfg.train.loss = "on", "chunked"
gpt = build_gpt(cfg, resolve(cfg, cpu, Rank()), cpu)
x = torch.arange(64).view(2, 32)
gpt(x, x).backward()
print(gpt.ln_f.weight.grad.norm().item())
"""


@pytest.mark.slow
def test_other_gradients_of_the_loss_are_compiled_anew(tmp_path: Path) -> None:
    """Of an operation the cache's own key knows the name only: one that a new release mends would stay as it was."""
    shutil.copytree(ROOT / "gptexp", tmp_path / "gptexp")
    source = tmp_path / "gptexp" / "loss.py"
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
    # Kept whole: not even its derivatives are made again.
    assert re.findall(r"AOTAutograd cache (hit|miss) for key", log) == ["miss", "hit", "miss"]
    assert found[1:] == [found[0], pytest.approx(2 * found[0])]


SMALL_RUN = [  # performance figures are given for it: 4 layers, 128 wide, 50,304 ids, 2,048 tokens a step
    *SMALL, "train.max_steps=20", "schedule.warmup_steps=5", "train.eval_every=0", "log=quiet", "data.val_tokens=0",
]  # fmt: skip
PLAIN_RUN = ["train.dtype=float32", "train.matmul_precision=highest", "train.compile=off", "train.loss=plain"]


CHOICES = {
    "auto": ["train.dtype=float32"],
    "compiled": ["train.dtype=float32", "train.compile=on"],
    "bfloat16": ["train.dtype=bfloat16", "train.compile=on"],
}
EMULATED = pytest.mark.skipif(
    not has_native_bfloat16(torch.device("cpu")), reason="this CPU emulates bfloat16: half a minute a step"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "compiled", pytest.param("bfloat16", marks=EMULATED)])
def test_what_is_chosen_loses_nothing_in_a_real_run(gptexp: Gptexp, tmp_path: Path, name: str) -> None:
    """As `gptexp train` puts it together, against float32, eager, whole logits and AdamW's loop."""
    found = []
    for directory, overrides in (("plain", [*PLAIN_RUN, "optim.fused=off"]), ("chosen", CHOICES[name])):
        done = gptexp("train", *SMALL_RUN, *overrides, f"hydra.run.dir={directory}")
        assert done.returncode == 0, done.stderr
        found.append([event["train/loss"] for event in events(tmp_path / directory, "step")])
    plain, chosen = found
    assert plain[-1] < plain[0] - 0.5
    assert chosen == pytest.approx(plain, rel=1e-3 if name == "bfloat16" else 1e-5)
