"""The number of collectives in a step of two real ranks."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPT = """
import json, os
from contextlib import nullcontext
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from gptexp.config.schema import ModelConfig
from gptexp.data.loader import MicroBatch
from gptexp.distributed.reduction import MeanReduction
from gptexp.model.gpt import GPT
from gptexp.training.step import TrainStep

dist.init_process_group("gloo")
counts = {"buckets": 0, "all": 0}
def hook(group, bucket):
    counts["buckets"] += 1
    return allreduce_hook(group, bucket)
plain = dist.all_reduce
def all_reduce(*args, **kwargs):
    counts["all"] += 1  # also for each bucket, in the hook
    return plain(*args, **kwargs)
dist.all_reduce = all_reduce
ddp = torch.nn.parallel.DistributedDataParallel(GPT(ModelConfig(1, 2, 16, 8, 64)), gradient_as_bucket_view=True)
ddp.register_comm_hook(None, hook)
optimizer = torch.optim.AdamW(ddp.parameters())
for group in optimizer.param_groups:
    group["initial_lr"] = group["lr"]
x = torch.zeros(2, 8, dtype=torch.int64)
for accumulation in (1, 4, 16):
    counts.update(buckets=0, all=0)
    before = [p.grad.data_ptr() if p.grad is not None else 0 for p in ddp.parameters()]
    batches = iter([MicroBatch(x, x, 1, 0)] * accumulation)
    TrainStep(ddp, optimizer, MeanReduction(ddp), 1.0, nullcontext, False)(batches, accumulation, 1.0).read()
    if dist.get_rank() == 0:
        kept = before == [p.grad.data_ptr() for p in ddp.parameters()]
        print(json.dumps([accumulation, counts["buckets"], counts["all"] - counts["buckets"], kept]), flush=True)
dist.barrier()
# A gloo thread may still hold the Python hook's future, which an interpreter that tears down aborts on.
os._exit(0)
"""


@pytest.mark.e2e
def test_the_number_of_reductions_does_not_grow_with_accumulation(tmp_path: Path) -> None:
    """Counts what DDP reduces and what a step reduces itself, in two real ranks."""
    script = tmp_path / "count.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counted = [json.loads(line) for line in done.stdout.splitlines()]
    assert [c[0] for c in counted] == [1, 4, 16]
    # The first step of DDP reduces in the buckets it was built with, before it regroups them.
    assert all(buckets in (1, 2) for _, buckets, _, _ in counted)
    assert [ours for _, _, ours, _ in counted] == [1, 1, 1]
    assert [kept for _, _, _, kept in counted] == [False, False, True]  # after that, no gradient is copied
