"""`world.comm`: the type in which ranks send their gradients. Unlike the rest of `world`, it decides the result."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, events

from gptexp.config.compose import compose
from gptexp.config.schema import memory_key, result_deciding
from gptexp.sweep.cells import cell_name

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

# Each rank compares the gradients that DDP leaves with those of a model that no DDP wraps, gathered from all ranks.
SCRIPT = """
import json, os, sys
from contextlib import nullcontext
import torch, torch.distributed as dist
from gptexp.config.schema import Config
from gptexp.distributed.ranks import Rank
from gptexp.distributed.reduction import MeanReduction
from gptexp.machine.resolve import resolve
from gptexp.model.gpt import GPT
from gptexp.config.schema import ModelConfig
from gptexp.run.build import wrap
from gptexp.distributed.sharding import WholeParameters
from gptexp.training.small_gradients import SmallGradients

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world_size, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
effective = resolve(Config(), cpu, Rank())
found = {}
for comm in ("float32", "bfloat16"):
    torch.manual_seed(0)
    plain = GPT(ModelConfig(2, 2, 16, 8, 64))
    gpt = GPT(ModelConfig(2, 2, 16, 8, 64))
    gpt.load_state_dict(plain.state_dict())
    ddp = wrap(gpt, effective, "mean", Rank(rank, world_size), cpu, comm)
    reduce, small = MeanReduction(ddp), SmallGradients(ddp, WholeParameters(ddp))
    exact, norms = True, []
    for step in range(3):  # DDP arranges its buckets anew after the first
        ddp.zero_grad(set_to_none=False)
        x = torch.randint(64, (2, 2, 8), generator=torch.Generator().manual_seed(10 * step + rank))
        plain.zero_grad()
        for micro_step in range(2):
            with reduce(micro_step, 2) as divisor:
                loss = ddp(x[micro_step], x[micro_step])
                with small(micro_step, divisor):
                    (loss / divisor).backward()
            (plain(x[micro_step], x[micro_step]) / 2).backward()
        mine = [p.grad for p in plain.parameters()]
        of_all = [None] * world_size
        dist.all_gather_object(of_all, mine)
        for i, p in enumerate(gpt.parameters()):
            parts = [gradients[i] for gradients in of_all]
            if comm == "bfloat16":
                parts = [part.bfloat16() for part in parts]
            mean = (parts[0] / world_size + parts[1] / world_size).float()
            exact &= torch.equal(p.grad, mean)
        norms.append(small.measured().tolist())
    found[comm] = {"exact": exact, "norms": norms, "reduce": ddp._get_ddp_logging_data()["backward_comm_time"] > 0}
if rank == 0:
    print(json.dumps(found), flush=True)
dist.barrier()
os._exit(0)  # a gloo thread may still hold the hook's future
"""


@pytest.mark.e2e
def test_two_ranks_get_the_mean_of_their_gradients_in_the_type_of_the_config(tmp_path: Path) -> None:
    """To the bit: of float32 the mean of plain backward passes, of bfloat16 that of gradients rounded to it.

    What is measured of single micro-batches is not rounded, and DDP still measures how long it waits.
    """
    script = tmp_path / "compare.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [found[comm]["exact"] for comm in ("float32", "bfloat16")] == [True, True]
    assert found["float32"]["norms"] == found["bfloat16"]["norms"]
    assert found["bfloat16"]["reduce"]


@pytest.mark.e2e
def test_a_run_says_how_it_sends_trains_with_it_and_is_not_resumed_with_another_type(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    start = ["train", *tiny, "world.size=2", "log.progress=lines"]
    rounded = gptexp(*start, "world.comm=bfloat16", "hydra.run.dir=rounded")
    exact = gptexp(*start, "world.comm=float32", "hydra.run.dir=exact")
    assert (rounded.returncode, exact.returncode) == (0, 0), rounded.stderr + exact.stderr
    assert "reduction of gradients: mean, sent as bfloat16" in rounded.stdout
    assert "sent as" not in exact.stdout
    first, last = (
        [[event["train/loss"] for event in events(tmp_path / run, "step")][i] for run in ("rounded", "exact")]
        for i in (0, -1)
    )
    assert first[0] == first[1]
    assert last[0] != last[1]
    assert last[0] == pytest.approx(last[1], rel=1e-3)
    for now, was in (("float32", "bfloat16"), ("bfloat16", "float32")):
        directory = "rounded" if was == "bfloat16" else "exact"
        refused = gptexp(*start, f"world.comm={now}", f"hydra.run.dir={directory}")
        assert refused.returncode == 2
        assert f"world.comm was {was}, now {now}; start a new run" in refused.stderr
    refused = gptexp("resume", "rounded", "--world-size", "1")
    assert (refused.returncode, "one rank sends no gradients" in refused.stderr) == (2, True)


def test_the_type_is_another_cell_and_the_default_keeps_the_hashes_of_older_cells(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The cat sees fish.\n" * 2000)
    overrides = ["model=nano", "data=text", f"data.path={text}", "data.tokenizer=bytes", "world.size=2"]
    overrides += ["train.max_tokens=409600"]
    default, rounded = (
        compose([*overrides, "batch.micro_batch_size=2", *more]) for more in ([], ["world.comm=bfloat16"])
    )
    lr = {"optim.lr": "1e-3"}
    # The hash is that of the commit before there was `world.comm`.
    assert cell_name(default, lr, tmp_path) == "lr=0.0075-8c465d7a"
    assert cell_name(rounded, lr, tmp_path) != cell_name(default, lr, tmp_path)
    swept = [cell_name(c, {"world.comm": c.world.comm}, tmp_path)[-8:] for c in (default, rounded)]
    assert swept == [cell_name(c, lr, tmp_path)[-8:] for c in (default, rounded)]
    assert result_deciding(default).keys() == result_deciding(rounded).keys()
    assert memory_key(default) != memory_key(rounded)
