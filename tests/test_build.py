"""Compiled once: one graph to train and one to validate, by one rank of a node."""

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import events

from gptexp.build import build_gpt, wrap
from gptexp.config import Config
from gptexp.distributed import Rank
from gptexp.effective import resolve
from gptexp.loss import chunked_cross_entropy, plain_cross_entropy

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
        assert wrap(gpt, effective, Rank(), cpu) is gpt  # DDP at world size 1 would only cost
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
            options: Any = wrap(gpt, replace(effective, compile=compiled), Rank(0, 2), cpu)  # type: ignore[arg-type]
            assert options == {"device_ids": None, "gradient_as_bucket_view": True, "bucket_cap_mb": bucket}


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
