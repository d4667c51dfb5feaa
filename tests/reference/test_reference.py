"""Real runs against an independent trainer, and their weights against transformers.

The runs start from random weights, as `init_from` reads them, so that the trainer need not know how weights are drawn.
"""

import ast
import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import trainer
from conftest import TINY, events
from omegaconf import OmegaConf
from real_runs import newest
from safetensors.torch import load_file, save_file
from trainer import Kind, Setup

import gptexp
from gptexp.config.schema import ModelConfig
from gptexp.model.gpt import GPT
from gptexp.model.loss import plain_cross_entropy
from gptexp.optim import AdamWConfig
from gptexp.run.load import load_run
from gptexp.training.optimizer import build_optimizer

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

RANKS = Path(gptexp.__file__).parent / "data/gpt2.tiktoken"
SETUP = Setup(
    text=Path("text.txt"), n_layer=2, n_head=2, seq_len=16, total_batch_size=128, micro_batch_size=2, world_size=1,
    steps=8, val_tokens=112, eval_every=384, lr=2e-2, warmup=400, min_lr_ratio=0.2, seed=7, beta1=0.8, beta2=0.9,
    eps=1e-7, weight_decay=0.3, grad_clip=0.0,
)  # fmt: skip


def overrides(s: Setup, *more: str) -> list[str]:
    return [
        *(o for o in TINY if not o.startswith(("train.max_steps", "optim.", "data.val_tokens", "model."))),
        f"model.n_layer={s.n_layer}", f"model.n_head={s.n_head}", "model.n_embd=16", f"model.block_size={s.seq_len}",
        f"batch.micro_batch_size={s.micro_batch_size}", f"world.size={s.world_size}", f"data.path={s.text}",
        f"train.max_steps={s.steps}", f"data.val_tokens={s.val_tokens}", f"train.eval_every_tokens={s.eval_every}",
        f"optim.lr={s.lr}", f"schedule.warmup_tokens={s.warmup}", f"schedule.min_lr_ratio={s.min_lr_ratio}",
        f"train.seed={s.seed}", f"optim.beta1={s.beta1}", f"optim.beta2={s.beta2}", f"optim.eps={s.eps}",
        f"optim.weight_decay={s.weight_decay}", f"optim.grad_clip={s.grad_clip}", *more,
        *([f"batch.ramp_from_tokens={s.ramp_from}", f"batch.ramp_tokens={s.ramp_over}"] if s.ramp_from else []),
    ]  # fmt: skip


def random_start(gptexp: Gptexp, s: Setup, folder: Path, *more: str) -> dict[str, torch.Tensor]:
    """A run in `folder`/start whose checkpoint holds random weights, far from those that a run starts with."""
    first = replace(s, world_size=1, steps=1)
    done = gptexp("train", *overrides(first, *more), "schedule.warmup_tokens=0", "hydra.run.dir=start")
    assert done.returncode == 0, done.stderr
    file = newest(folder / "start") / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(w.shape, generator=generator) * 0.2 for name, w in load_file(file).items()}
    save_file(weights, file)
    manifest = json.loads(file.with_name("manifest.json").read_text())
    body = file.read_bytes()
    manifest[file.name] = [len(body), hashlib.sha256(body).hexdigest()]
    file.with_name("manifest.json").write_text(json.dumps(manifest))
    return weights


@pytest.fixture
def short_text(tmp_path: Path, corpus: Path) -> Path:
    """49 windows, of which 7 are held out: the 64 sequences of a run take more than one epoch."""
    path = tmp_path / "text.txt"
    path.write_text(corpus.read_text()[:3000])
    return path


# From one micro-batch to four, over two thirds of the run.
RAMP = replace(SETUP, steps=15, ramp_from=32, ramp_over=800)

CASES = {
    "one rank": (SETUP, []),
    "one micro-batch": (replace(SETUP, micro_batch_size=8), ["model.bias=false", "log.noise_scale=off"]),
    "clipped": (replace(SETUP, grad_clip=0.5, micro_batch_size=4), []),
    "two ranks": (replace(SETUP, world_size=2), []),
    "two ranks, clipped": (replace(SETUP, world_size=2, grad_clip=0.5, micro_batch_size=4), []),
    "two ranks, tree": (replace(SETUP, world_size=2, grad_clip=0.5), ["train.reduction=tree"]),
    "chunked": (SETUP, ["train.loss=chunked"]),
    "ramp": (RAMP, []),
    "two ranks, ramp": (replace(RAMP, world_size=2, micro_batch_size=1, grad_clip=0.5), []),
    "checkpointed": (SETUP, ["train.activation_checkpointing=true", "train.loss=plain"]),
}


# Combinations of the keys of `model`.
LLAMA = ["model.norm=rmsnorm", "model.position=rope", "model.mlp=swiglu", "model.bias=false"]
BLOCKS: dict[str, tuple[Kind, list[str]]] = {
    "llama": (Kind(), LLAMA),
    "grouped queries, untied": (Kind(n_kv_head=1, tied=False), [*LLAMA, "model.n_kv_head=1", "model.tied=false"]),
    "qwen3": (
        Kind(n_kv_head=1, head_dim=6, qk_norm="head", theta=1e6),
        [*LLAMA, "model.n_kv_head=1", "model.head_dim=6", "model.qk_norm=head", "model.rope_theta=1e6"],
    ),
    "olmo2": (
        Kind(residual_norm="post", qk_norm="all", tied=False),
        [*LLAMA, "model.residual_norm=post", "model.qk_norm=all", "model.tied=false"],
    ),
    "nanochat": (
        Kind(norm_weight=False, qk_norm="head", mlp="relu2", tied=False, softcap=3.0),
        ["model.norm=rmsnorm", "model.norm_weight=false", "model.position=rope", "model.qk_norm=head",
         "model.mlp=relu2", "model.bias=false", "model.tied=false", "model.logit_softcap=3"],
    ),
    "gemma2": (
        Kind(residual_norm="pre_post", mlp="geglu", window=5, window_every=2, softcap=4.0),
        ["model.norm=rmsnorm", "model.position=rope", "model.mlp=geglu", "model.bias=false",
         "model.residual_norm=pre_post", "model.window=5", "model.window_every=2", "model.logit_softcap=4"],
    ),
    "layer norms, biases, learned positions": (
        Kind(norm="layernorm", position="learned", mlp="gelu", n_kv_head=1, window=7),
        ["model.n_kv_head=1", "model.window=7"],
    ),
    "scaled waves": (
        Kind(scaling={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 16.0}, mlp="gelu", norm="layernorm"),
        ["model.position=rope", "model.bias=false", "model.rope_scaling={factor: 8.0, low_freq_factor: 1.0, "
         "high_freq_factor: 4.0, original_max_position_embeddings: 16.0}"],
    ),
    "no positions": (
        Kind(position="none", mlp="relu2", norm="layernorm"),
        ["model.position=none", "model.mlp=relu2", "model.bias=false"],
    ),
}  # fmt: skip
CASES |= {
    f"two ranks, {name}": (replace(SETUP, world_size=2, kind=kind, z_loss=0.01), [*keys, "train.z_loss=0.01"])
    for name, (kind, keys) in BLOCKS.items()
}

TIER = {
    **{case: [pytest.mark.slow] for case in CASES if case.startswith("two ranks, ")},
    "two ranks, gemma2": [pytest.mark.e2e],
    "two ranks, qwen3": [pytest.mark.e2e],
    "one rank": [pytest.mark.e2e],
    "one micro-batch": [pytest.mark.slow],
    "two ranks": [pytest.mark.e2e],
    "two ranks, clipped": [pytest.mark.slow],
    "two ranks, tree": [pytest.mark.slow],
    "chunked": [pytest.mark.e2e],
    "ramp": [pytest.mark.slow],
    "two ranks, ramp": [pytest.mark.e2e],
    "checkpointed": [pytest.mark.slow],
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=TIER.get(case, [])) for case in CASES])
def test_a_run_trains_as_the_independent_trainer(gptexp: Gptexp, short_text: Path, tmp_path: Path, case: str) -> None:
    """Losses, norms, learning rates and validation losses of eight steps, over an epoch's end."""
    setup, more = CASES[case]
    s = replace(setup, text=short_text)
    weights = random_start(gptexp, s, tmp_path, *more)
    done = gptexp("train", *overrides(s, *more), "init_from=start", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    logged = events(tmp_path / "run", "step")
    validated = {event["step"]: event["val/loss"] for event in events(tmp_path / "run", "eval")}
    ids = trainer.token_ids(short_text, RANKS)
    assert (len(ids) - 1) // s.seq_len - 7 < logged[-1]["tokens"] // s.seq_len  # more than an epoch
    expected = list(trainer.train(weights, ids, s))
    assert len(logged) == len(expected)
    worst: dict[str, float] = {}
    # Norms without weights make its attention sharp: its float32 gradients differ by 1e-6, those of the others by 5e-7.
    rounding = 3 if "nanochat" in case else 1

    def compare(name: str, found: float, right: float, rel: float) -> None:
        worst[name] = max(worst.get(name, 0.0), abs(found / right - 1))
        assert found == pytest.approx(right, rel=rounding * rel), name

    for event, step in zip(logged, expected, strict=True):
        compare("train/loss", event["train/loss"], step.loss, 1e-6)
        compare("optim/grad_norm", event["optim/grad_norm"], step.grad_norm, 1e-6)
        compare("optim/lr", event["optim/lr"], step.lr, 1e-12)
        measured = "log.noise_scale=off" not in more and event["batch/tokens"] > s.micro_batch_size * s.seq_len
        assert ("gns/small_sq_norm" in event) == measured
        if measured:
            compare("gns/small_sq_norm", event["gns/small_sq_norm"], step.small_sq_norm, 2e-6)
            compare("gns/big_sq_norm", event["gns/big_sq_norm"], step.grad_norm**2, 2e-6)
        assert (event["step"] in validated) == (step.val_loss is not None)
        if step.val_loss is not None:
            compare("val/loss", validated[event["step"]], step.val_loss, 1e-6)
    if s.grad_clip:
        assert {event["optim/clip_fraction"] for event in logged} == {float(step.grad_norm > 0.5) for step in expected}
    print(f"{case}: largest relative differences", {name: f"{value:.1e}" for name, value in worst.items()})


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_model_in_float64_trains_as_the_independent_trainer(short_text: Path, name: str) -> None:
    """20 steps of the model and the optimizer, to 1e-7: nothing is left of the float32 of real runs."""
    kind, keys = BLOCKS[name]
    s = replace(SETUP, text=short_text, steps=20, kind=kind, z_loss=0.01, total_batch_size=64, micro_batch_size=4)
    sizes = {"n_layer": s.n_layer, "n_head": s.n_head, "n_embd": 16, "block_size": s.seq_len, "vocab_size": 300}
    given = OmegaConf.to_container(OmegaConf.from_dotlist(keys))["model"]  # type: ignore[index, call-overload]
    model = GPT(ModelConfig(**sizes, **given), partial(plain_cross_entropy, z_loss=s.z_loss))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = [id % 300 for id in trainer.token_ids(short_text, RANKS)]
    optim = AdamWConfig(lr=s.lr, beta1=s.beta1, beta2=s.beta2, eps=s.eps, weight_decay=s.weight_decay)
    optimizer = build_optimizer(model, optim, fused=False)
    order, _ = trainer.windows((len(ids) - 1) // s.seq_len, 7, s.seed, range(s.steps * 4))
    for number, expected in enumerate(trainer.train(weights, ids, s)):
        rows = torch.tensor([ids[i * s.seq_len : (i + 1) * s.seq_len + 1] for i in order[4 * number : 4 * number + 4]])
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert loss.item() == pytest.approx(expected.loss, rel=1e-7)
        assert norm.item() == pytest.approx(expected.grad_norm, rel=1e-7)
        for group in optimizer.param_groups:
            group["lr"] = expected.lr
        optimizer.step()
        optimizer.zero_grad()


def test_the_independent_trainer_imports_nothing_of_the_package() -> None:
    tree = ast.parse(Path(trainer.__file__).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.partition(".")[0] == "gptexp"]


@pytest.mark.e2e
def test_transformers_computes_the_same_logits_and_validation_loss_from_a_runs_weights(
    gptexp: Gptexp, short_text: Path, tmp_path: Path
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    s = replace(SETUP, text=short_text)
    random_start(gptexp, s, tmp_path)
    done = gptexp("train", *overrides(s), "init_from=start", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    saved = load_file(newest(tmp_path / "run") / "model.safetensors")
    config = GPT2Config(
        vocab_size=50304, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    theirs = GPT2LMHeadModel(config).eval()
    # transformers keeps GPT-2's Conv1D, whose weights are (in, out).
    mapped = {f"transformer.{name}": w.T if ".c_" in name and w.dim() == 2 else w for name, w in saved.items()}
    theirs.load_state_dict({**mapped, "lm_head.weight": saved["wte.weight"]})
    ours, _, _ = load_run(tmp_path / "run")
    ids = trainer.token_ids(short_text, RANKS)
    _, held_out = trainer.windows((len(ids) - 1) // 16, 7, s.seed, range(0))
    rows = torch.tensor([ids[i * 16 : i * 16 + 17] for i in held_out])
    with torch.no_grad():
        for length in (1, 7, 16):
            judged = theirs(rows[:, :length]).logits[:, -1]
            torch.testing.assert_close(ours.logits(rows[:, :length]), judged, rtol=1e-5, atol=1e-5)
        logits = theirs(rows[:, :-1]).logits
        judged_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), rows[:, 1:].flatten()).item()
    found = json.loads(gptexp("evaluate", "run").stdout)
    assert found["val/loss"] == pytest.approx(judged_loss, rel=1e-6)
