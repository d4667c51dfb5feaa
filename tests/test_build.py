"""Compiled once: one graph to train and one to validate, by one rank of a node."""

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import events

from gptexp.build import build_gpt, compile_in_turn, wrap
from gptexp.config import Config, ModelConfig
from gptexp.distributed import Rank
from gptexp.effective import resolve
from gptexp.loss import chunked_cross_entropy, plain_cross_entropy
from gptexp.model import GPT

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

LOGS = "recompiles,+torch._inductor.codecache"


def test_a_model_is_built_as_decided() -> None:
    cfg, cpu = Config(), torch.device("cpu")
    cfg.model.n_layer, cfg.model.n_embd, cfg.train.activation_checkpointing = 1, 24, True
    for name, loss in (("plain", plain_cross_entropy), ("chunked", chunked_cross_entropy)):
        cfg.train.loss = name
        effective = resolve(cfg, cpu, Rank())
        gpt = build_gpt(cfg, effective, cpu)
        assert (gpt.loss, gpt.activation_checkpointing) == (loss, True)
        assert wrap(gpt, effective, "mean", Rank(), cpu) is gpt  # DDP at world size 1 would only cost
    again = build_gpt(cfg, effective, cpu)
    assert all(torch.equal(a, b) for a, b in zip(gpt.parameters(), again.parameters(), strict=True))


def test_compiled_there_are_few_buckets_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cuts the graph; and gradients are views of them, not copies."""
    monkeypatch.setattr("gptexp.build.DistributedDataParallel", lambda gpt, **options: options)
    cfg, cpu = Config(), torch.device("cpu")
    effective = resolve(cfg, cpu, Rank())
    for mib, expected in ((50, 25), (500, 100)):
        gpt = torch.nn.Linear(1024, mib * 256, bias=False)  # float32
        for compiled, bucket in ((True, expected), (False, None)):
            options: Any = wrap(gpt, replace(effective, compile=compiled), "mean", Rank(0, 2), cpu)  # type: ignore[arg-type]
            assert options == {"device_ids": None, "gradient_as_bucket_view": True, "bucket_cap_mb": bucket}


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_first_rank_compiles_first_and_no_gradient_is_left(
    monkeypatch: pytest.MonkeyPatch, local_rank: int
) -> None:
    did = []

    class Wrapped(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            did.append("step")
            loss: torch.Tensor = gpt(x, y)
            return loss

        def no_sync(self) -> AbstractContextManager[None]:
            return nullcontext()

    monkeypatch.setattr("gptexp.build.DistributedDataParallel", Wrapped)
    monkeypatch.setattr("gptexp.build.barrier", lambda patient: did.append("barrier"))
    gpt = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=64), plain_cross_entropy)
    training: Any = SimpleNamespace(
        model=Wrapped(), gpt=gpt, plan=SimpleNamespace(micro_batch_size=2, seq_len=8), device=torch.device("cpu"),
        rank=Rank(local_rank, 2, local_rank, 2), forward_context=nullcontext,
        optimizer=torch.optim.SGD(gpt.parameters()), dataset=SimpleNamespace(val_windows=[1]),
    )  # fmt: skip
    compile_in_turn(training, None)
    assert did == (["step", "barrier", "barrier"] if local_rank == 0 else ["barrier", "step", "barrier"])
    assert all(p.grad is None for p in gpt.parameters())
    assert gpt.training


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["auto", "plain"])
def test_two_ranks_compile_once_and_two_graphs_do(gptexp: Gptexp, tiny: list[str], tmp_path: Path, loss: str) -> None:
    """Three validation windows for two ranks: the last batch is padded, and still nothing is compiled again."""
    done = gptexp(
        "train", *(o for o in tiny if "val_tokens" not in o), "data.val_tokens=48", "world=ddp2", "train.compile=on",
        f"train.loss={loss}", "train.max_steps=3", "train.eval_every=1", "log=disabled", "log.sample_tokens=0",
        "hydra.run.dir=out", env={"TORCH_LOGS": LOGS, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stderr + done.stdout
    looked_up = re.findall(r"^\[rank(\d)\].*cache (hit|miss) for key (\w+)", said, re.MULTILINE)
    compiled = [key for rank, what, key in looked_up if (rank, what) == ("0", "miss")]
    assert len(compiled) == len(set(compiled)) >= 3  # forward, backward, validation
    assert {(rank, what) for rank, what, _ in looked_up} <= {("0", "miss"), ("0", "hit"), ("1", "hit")}
    assert {key for rank, _, key in looked_up if rank == "1"} == set(compiled)
    again = Counter(re.findall(r"^\[rank(\d)\].*Recompiling function forward", said, re.MULTILINE))
    assert again == {"0": 1, "1": 1}  # validation: without gradients
    assert len(events(tmp_path / "out", "eval")) == 3
