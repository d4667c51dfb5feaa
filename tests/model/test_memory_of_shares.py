"""The memory estimate of `world.sharding` against the tensors that one of many ranks allocates.

torch's fake process group has any number of ranks in one process: collectives return at once, and leave the values of
their results undefined. The tensors and their sizes are those of a real group.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_bytes import LiveBytes, peak_bytes, split_gpt
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from gptexp.config.schema import ModelConfig
from gptexp.data.loader import MicroBatch
from gptexp.distributed.reduction import MeanReduction
from gptexp.model.gpt import GPT
from gptexp.model.loss import LOSSES
from gptexp.model.memory import StepShape, memory_estimate
from gptexp.model.optimizer_state import most_state_bytes
from gptexp.model.shapes import count_parameters
from gptexp.optim import AdafactorConfig, AdamWConfig, OptimConfig, SGDConfig
from gptexp.training.optimizer import build_optimizer
from gptexp.training.step import TrainStep

DEEP = ModelConfig(n_layer=6, n_head=2, n_embd=64, block_size=64, vocab_size=256)  # the blocks need most memory
LARGE = ModelConfig(n_layer=4, n_head=4, n_embd=192, block_size=64, vocab_size=2048)  # many parameters for its tokens
FEW_TOKENS = ModelConfig(n_layer=4, n_head=4, n_embd=192, block_size=16, vocab_size=64)  # nearly all is parameters
QWEN = replace(
    LARGE, bias=False, norm="rmsnorm", position="rope", mlp="swiglu", n_kv_head=2, qk_norm="head", tied=False
)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "m", "sizes", "more"),
    [
        (64, LARGE, (1, 1, "bfloat16", "chunked", 0), {}),
        (64, LARGE, (1, 1, "bfloat16", "chunked", 0), {"comm": "bfloat16"}),
        (4, LARGE, (1, 2, "float32", "chunked", 0), {}),
        (4, QWEN, (1, 2, "float32", "chunked", 0), {}),
        (64, QWEN, (1, 1, "bfloat16", "chunked", 0), {}),
        *(
            pytest.param(*case, marks=pytest.mark.e2e)
            for case in [
                (4, LARGE, (1, 1, "float32", "chunked", 0), {}),
                (4, LARGE, (1, 2, "float32", "plain", 0), {"reduce_every": "micro_step"}),
                (64, LARGE, (1, 2, "bfloat16", "plain", 1), {"reduce_every": "micro_step"}),
                (4, DEEP, (6, 2, "float32", "chunked", 0), {}),
                (64, DEEP, (6, 2, "bfloat16", "chunked", 2), {}),
                (4, DEEP, (6, 2, "bfloat16", "plain", 1), {"reduce_every": "micro_step"}),
            ]
        ),
    ],
    indirect=["ranks"],
)
def test_the_estimate_counts_the_tensors_of_one_rank(
    ranks: int, m: ModelConfig, sizes: tuple[int, int, str, str, int], more: dict[str, str]
) -> None:
    batch, micro_steps, dtype, loss, every = sizes
    whole = StepShape(batch, m.block_size, micro_steps, ranks, "cpu", dtype, False, loss, every)
    step = replace(whole, sharding="full", **more)  # type: ignore[arg-type]
    assert memory_estimate(m, AdamWConfig(), step).tensors == pytest.approx(peak_bytes(m, step), rel=0.08)


def ddp_peak_bytes(m: ModelConfig, comm: str) -> int:
    """The peak of a step over a network so slow that no bucket has arrived when the last one is sent."""
    on_their_way = list[torch.Tensor]()

    def never_arrives(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        on_their_way.append(bucket.buffer().to(getattr(torch, comm)))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    with LiveBytes() as live:
        gpt = GPT(m, LOSSES["plain"])
        ddp = DistributedDataParallel(gpt, gradient_as_bucket_view=True, bucket_cap_mb=0.5)
        ddp.register_comm_hook(None, never_arrives)
        optimizer = build_optimizer(gpt, AdamWConfig(), True)
        x = torch.zeros(1, m.block_size, dtype=torch.int64)
        train = TrainStep(ddp, optimizer, MeanReduction(ddp), 1.0, nullcontext, False)
        for live.counts in (False, False, True):  # in the second, DDP changes its buckets
            train(iter([MicroBatch(x, x, 0, 0)]), 1, lr_factor=0.0)
            on_their_way.clear()
    return live.peak


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_the_estimate_counts_the_copies_that_are_on_their_way() -> None:
    step = StepShape(1, FEW_TOKENS.block_size, 1, 2, "cpu", "float32", False, "plain", 0)
    steps = {comm: replace(step, comm=comm) for comm in ("float32", "bfloat16")}
    estimated = {comm: memory_estimate(FEW_TOKENS, AdamWConfig(), one).tensors for comm, one in steps.items()}
    counted = {comm: ddp_peak_bytes(FEW_TOKENS, comm) for comm in steps}
    assert estimated == pytest.approx(counted, rel=0.03)
    assert counted["bfloat16"] > 1.05 * counted["float32"]


@pytest.mark.parametrize("ranks", [2, 4, 7, 64], indirect=True)
@pytest.mark.parametrize("optim", [AdamWConfig(), SGDConfig(), AdafactorConfig()], ids=lambda optim: optim.name)
def test_a_rank_has_the_most_state_that_is_said(ranks: int, optim: OptimConfig) -> None:
    """Of the parameters as torch's optimizer shares them out, not of a copy of its rule."""
    gpt = GPT(DEEP)
    zero = build_optimizer(gpt, optim, fused=False, split_state=True)
    assert isinstance(zero, ZeroRedundancyOptimizer)
    sizes = []
    for groups in zero._partition_parameters():
        named = {id(p): name for name, p in gpt.named_parameters()}
        single = [(named[id(p)], p) for group in groups for p in group["params"]]
        fresh = build_optimizer(gpt, optim, fused=False, named=dict(single)) if single else None
        for _, p in single:
            p.grad = torch.zeros_like(p)
        if fresh is not None:
            fresh.step()
        state = [] if fresh is None else [v for of in fresh.state.values() for v in of.values()]
        sizes.append(4 * sum(v.numel() for v in state if isinstance(v, torch.Tensor) and v.dim()))
        gpt.zero_grad()
    assert most_state_bytes(optim, DEEP, ranks) == pytest.approx(max(sizes), rel=0.002)


@pytest.mark.parametrize("sharding", ["none", "optimizer", "full"])
def test_each_sharding_needs_less_than_the_one_before(sharding: str) -> None:
    """At 64 ranks, of what does not depend on the batch: 16 bytes a parameter, a little over 8, and next to none."""
    m = ModelConfig(n_layer=24, n_head=16, n_embd=2048, block_size=1024, vocab_size=50304)
    step = StepShape(1, 1024, 1, 64, "cuda", "bfloat16", True, "plain", 1, sharding=sharding)
    memory = memory_estimate(m, AdamWConfig(), step)
    state = (memory.weights + memory.optimizer) / count_parameters(m)
    low, high = {"none": (12, 12), "optimizer": (4.1, 5), "full": (0.18, 0.2)}[sharding]
    assert low <= state <= high


@pytest.mark.e2e
@pytest.mark.parametrize("ranks", [4, 16], indirect=True)
def test_no_rank_holds_the_whole_model_while_it_is_built(ranks: int) -> None:
    m = ModelConfig(n_layer=24, n_head=4, n_embd=64, block_size=32, vocab_size=256)
    with LiveBytes() as live:
        live.counts = True
        gpt, parameters = split_gpt(m, StepShape(1, 32, 1, ranks, "cpu", "float32", False, "plain", 0))
        for name, whole in gpt.initial_weights():
            parameters.named[name].data.copy_(whole[parameters.rows(name)])
    whole_bytes, block_bytes = 4 * count_parameters(m), 4 * (12 * 64 * 64 + 13 * 64)
    assert live.peak < whole_bytes / ranks + 2.5 * block_bytes


def test_the_initial_weights_are_those_of_a_new_model() -> None:
    for m in (DEEP, ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=100, bias=False)):
        torch.manual_seed(7)
        whole = dict(GPT(m).named_parameters())
        with torch.device("meta"):
            gpt = GPT(m)
        torch.manual_seed(7)
        found = dict(gpt.initial_weights())
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], p) for name, p in whole.items())
