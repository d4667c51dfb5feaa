"""Real runs against an independent trainer, and their weights against transformers.

The runs start from random weights, as `init_from` reads them, so that the trainer need not know how weights are drawn.
"""

import ast
import hashlib
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trainer
from conftest import TINY, events
from real_runs import newest
from safetensors.torch import load_file, save_file
from trainer import Setup

import gptexp
from gptexp.run.load import load_run

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


TIER = {
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

    def compare(name: str, found: float, right: float, rel: float) -> None:
        worst[name] = max(worst.get(name, 0.0), abs(found / right - 1))
        assert found == pytest.approx(right, rel=rel), name

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
