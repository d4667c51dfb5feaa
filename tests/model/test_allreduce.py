"""The time of an all-reduce and the waiting of a step against simulations of each message; the fit; DDP's buckets."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gptexp.config.schema import ModelConfig
from gptexp.distributed.sharding import split
from gptexp.model.allreduce import NVLINK_WAYS, Alone, Bucket, Network, Way, buckets, split_waiting_s, waiting_s
from gptexp.model.gpt import GPT
from gptexp.model.gpus import GPUS, NETWORKS, Link
from gptexp.model.shapes import count_parameters
from gptexp.run.communication import fit

LINK = Link("", 2e9)
RING, TREES = Way(False, 3e-6, 10e-6), Way(True, 2e-6, 20e-6, 5e-6, 0.9)


def simulated_ring(ranks: int, sent_bytes: int, latency_s: float, bytes_per_s: float) -> tuple[float, float]:
    """The ends of the reduce-scatter and of the whole of a ring all-reduce of real numbers.

    Each rank sends a message once it has the one before it.
    """
    chunks = [[float(rank == c % ranks) + rank for c in range(ranks)] for rank in range(ranks)]
    total = [sum(of_rank[c] for of_rank in chunks) for c in range(ranks)]
    clock = [0.0] * ranks
    for step in range(2 * (ranks - 1)):
        adds = step < ranks - 1  # of the reduce-scatter; the allgather replaces
        sent = [(rank, (rank - step) % ranks) for rank in range(ranks)]  # each to the next rank
        values = {(rank, c): chunks[rank][c] for rank, c in sent}
        arrives = [clock[rank] + latency_s + sent_bytes / ranks / bytes_per_s for rank, _ in sent]
        for rank, c in sent:
            to = (rank + 1) % ranks
            chunks[to][c] = values[rank, c] + (chunks[to][c] if adds else 0)
        clock = [max(clock[rank], arrives[rank - 1]) for rank in range(ranks)]
        if step == ranks - 2:
            half_s = max(clock)
            assert all(chunks[rank][(rank + 1) % ranks] == total[(rank + 1) % ranks] for rank in range(ranks))
    assert all(of_rank == total for of_rank in chunks)  # it is an all-reduce
    return half_s, max(clock)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 33])
@pytest.mark.parametrize("size", [4, 10**6])
def test_the_time_of_a_ring_is_that_of_its_messages(ranks: int, size: int) -> None:
    half_s, whole_s = simulated_ring(ranks, size, 3e-6, 2e9)
    node = Network(ranks, ranks, LINK, None, (RING,))
    one_on_each = Network(ranks, 1, None, LINK, (replace(RING, between_s=3e-6),))
    for network in (node, one_on_each):
        assert network.all_reduce_s(size) == pytest.approx(whole_s, rel=1e-9)
        assert network.gather_s(size) == pytest.approx(half_s, rel=1e-9)
    assert replace(node, ranks=1).all_reduce_s(size) == replace(node, ranks=1).gather_s(size) == 0


@pytest.mark.parametrize("ranks", [2, 4, 33])
def test_a_fit_finds_the_latency_and_the_bandwidth_of_a_ring(ranks: int) -> None:
    exact = {4**i: simulated_ring(ranks, 4**i, 20e-6, 5e9)[1] for i in range(5, 14)}
    draw = random.Random(ranks)
    noisy = {size: s * math.exp(draw.gauss(0, 0.05)) for size, s in exact.items()}
    for seconds, error in ((exact, 1e-6), (noisy, 0.2)):
        fitted = fit(ranks, ranks, seconds)
        assert (fitted.latency_s, fitted.bytes_per_s) == pytest.approx((20e-6, 5e9), rel=error)


def test_a_fit_has_no_negative_latency() -> None:
    fitted = fit(2, 2, {10**6: 1e-3, 10**7: 12e-3, 10**8: 130e-3})
    assert fitted.latency_s == 0
    assert 0.7e9 < fitted.bytes_per_s < 1.1e9


def test_between_nodes_the_slowest_link_counts_and_trees_need_few_messages() -> None:
    ring, large = Network(16, 8, LINK, Link("", 5e8), (RING,)), 10**9
    both, many = replace(ring, ways=(RING, TREES)), replace(ring, ranks=4096)
    assert ring.all_reduce_s(large) == pytest.approx(2 * (14 * 3e-6 + 10e-6) + 2 * 15 / 16 * large / 5e8)
    assert both.all_reduce_s(large) == ring.all_reduce_s(large)
    by_trees = replace(both, ranks=4096)
    assert by_trees.all_reduce_s(8) == pytest.approx(5e-6 + 2 * (7 * 2e-6 + 9 * 20e-6) + 16 / (0.9 * 5e8))
    assert by_trees.gather_s(8) == many.gather_s(8) == pytest.approx(many.all_reduce_s(8) / 2)
    unknown = replace(ring, between=None)
    assert (unknown.crossed, replace(unknown, ranks=8).crossed) == ([LINK, None], [LINK])


def test_published_figures_give_the_times_of_nccl_by_hand() -> None:
    """512 H100 on 64 nodes, by the tables and formulas of NCCL 2.30.7's src/graph/tuning.cc."""
    network = Network(512, 8, GPUS["h100"].link, NETWORKS["ndr"], NVLINK_WAYS)
    assert network.all_reduce_s(0) == pytest.approx(133.5e-6)  # trees, LL128: 14 + 2 (7 · 1.25 + 6 · 8.5)
    assert network.gather_s(0) == pytest.approx(1117.2e-6)  # a ring, LL128: 14 + 448 · 1.9 + 63 · 4
    # A ring with the protocol Simple: 8.4 + 448 · 3.4 + 63 · 14 µs, and 511 / 512 of the bytes at 370.8 GB/s.
    assert network.gather_s(10**11) == pytest.approx(2413.6e-6 + 511 / 512 * 1e11 / 370.8e9)


@pytest.mark.parametrize("has_trees", [False, True])
@pytest.mark.parametrize("per_node", [1, 8])
@pytest.mark.parametrize("nodes", [2, 8])
def test_what_is_measured_on_several_nodes_tells_the_links_between_them(
    nodes: int, per_node: int, has_trees: bool
) -> None:
    """The times of a network of known links, fitted, give those of other numbers of nodes."""
    ways = (RING, replace(RING, is_tree=True, share=0.9)) if has_trees else (RING,)
    known = Network(nodes * per_node, per_node, Link("", 100e9), Link("", 20e9), ways)
    seconds = {4**i: known.all_reduce_s(4**i) for i in range(5, 15)}
    found = fit(known.ranks, nodes, seconds, RING.inside_s, has_trees)
    measured = tuple(replace(way, between_s=found.latency_s) for way in ways)
    fitted = replace(known, between=Link("", found.bytes_per_s), ways=measured)
    for more, size in itertools.product((2, 8, 64), (2**10, 2**20, 2**28)):
        exact_s = replace(known, ranks=more * per_node).all_reduce_s(size)
        fitted_s = replace(fitted, ranks=more * per_node).all_reduce_s(size)
        assert fitted_s == pytest.approx(exact_s, rel=0.25 if has_trees else 1e-6)


SMALL = ModelConfig(3, 4, 320, 64, 1024, bias=False)


def test_buckets_hold_all_matrices_and_end_with_the_embeddings() -> None:
    found = buckets(SMALL, 64, 2**20, 25 * 2**20)
    norms = 2 * SMALL.n_layer * SMALL.n_embd + SMALL.n_embd
    assert sum(bucket.elements for bucket in found) == count_parameters(SMALL) - norms
    assert [bucket.ready_ratio for bucket in found] == sorted(bucket.ready_ratio for bucket in found)
    assert found[-1].ready_ratio == 1.0
    # The first matrix is known after the products with wte and with its own transpose.
    c, v, t = 320, 1024, 64
    whole = v * c + 3 * (12 * c * c + 2 * c * t)
    assert found[0] == Bucket(4 * c * c, (v * c + 4 * c * c) / whole)


def test_the_buckets_are_those_of_ddp() -> None:
    """Which also holds the small gradients of the norms."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(GPT(SMALL), gradient_as_bucket_view=True, bucket_cap_mb=None)
        x = torch.zeros(1, 8, dtype=torch.int64)
        for _ in range(3):  # DDP arranges its buckets after the first step, and says so in the third
            ddp(x, x).backward()
        arranged = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    finally:
        dist.destroy_process_group()
    sizes = [int(size) for size in arranged.split(",")]
    found = buckets(SMALL, 8, 2**20, 25 * 2**20)
    assert [4 * bucket.elements for bucket in found] == pytest.approx(sizes, rel=0.01)


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("backward_s", [0.0, 1e-3, 2e-2, 1.0])
def test_a_step_waits_for_what_the_backward_pass_has_not_hidden(backward_s: float, element_bytes: int) -> None:
    """Against a simulation in small steps of time: one bucket is sent at a time, once it is full."""
    network, full = Network(4, 8, LINK, None, (RING,)), buckets(SMALL, 64, 2**20, 4 * 2**20)
    waiting = waiting_s(full, network, Alone(2 * backward_s, backward_s, 0.0), element_bytes)
    tick = 2e-6
    left = [(b.ready_ratio * backward_s, network.all_reduce_s(element_bytes * b.elements)) for b in full]
    for number in itertools.count():
        if left and left[0][0] <= number * tick:
            left[0] = (left[0][0], left[0][1] - tick)
            if left[0][1] <= 0:
                left.pop(0)
        if not left:
            break
    assert waiting == pytest.approx(max(0.0, (number + 1) * tick - backward_s), abs=2 * tick * len(full))


OUTSIDE = (SMALL.resolved_vocab_size + SMALL.block_size + 1) * SMALL.n_embd  # parameters outside of the blocks
BLOCK = (count_parameters(SMALL) - OUTSIDE) // SMALL.n_layer
# What FSDP2 sends in a micro-step of three blocks, in this order: the kind, and whether it is of a block.
SENT = [("gather", False), *[("gather", True)] * 5, ("reduce", True), ("gather", True), *[("reduce", True)] * 2]
SENT = [*SENT, ("reduce", False)]


def test_fsdp_sends_a_message_for_each_block_and_one_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sent = []
    for called, kind in ((collectives.DefaultAllGather, "gather"), (collectives.DefaultReduceScatter, "reduce")):

        def recorded(
            self: object, *, plain: Callable[..., Any] = called.__call__, kind: str = kind, **kwargs: Any
        ) -> Any:
            sent.append((kind, max(kwargs["output_tensor"].numel(), kwargs["input_tensor"].numel())))
            return plain(self, **kwargs)

        monkeypatch.setattr(called, "__call__", recorded)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with torch.device("meta"):
            gpt = GPT(SMALL)
        split(gpt, list(gpt.blocks), ("logits",), torch.device("cpu"), torch.float32)
        with torch.no_grad():
            for p in gpt.parameters():
                p.zero_()
        x = torch.zeros(1, 8, dtype=torch.int64)
        gpt(x, x).backward()
    finally:
        dist.destroy_process_group()
    assert sent == [(kind, pytest.approx(BLOCK if of_block else OUTSIDE, rel=1e-3)) for kind, of_block in SENT]


def simulated_split(message_s: Callable[[str, bool], float], forward_s: list[float], backward_s: list[float]) -> float:
    """The end of a micro-step. The computation and the network each do one thing after the other, in these orders.

    `forward_s` is of the blocks and of the head, `backward_s` of the head and of the blocks from the last one on.
    """
    gather_s, reduce_s = message_s("gather", True), message_s("reduce", True)
    # name: (seconds, what must have ended, what must have begun). F0 … F2 are forward passes, F3 and B3 the head.
    network = {
        "gather": (message_s("gather", False), "", ""), "gather F0": (gather_s, "", ""),
        "gather F1": (gather_s, "", ""), "gather F2": (gather_s, "", "F0"), "gather B2": (gather_s, "F3", ""),
        "gather B1": (gather_s, "", "B2"), "reduce B2": (reduce_s, "B2", ""), "gather B0": (gather_s, "", "B1"),
        "reduce B1": (reduce_s, "B1", ""), "reduce B0": (reduce_s, "B0", ""),
        "reduce": (message_s("reduce", False), "B0", ""),
    }  # fmt: skip
    compute = {
        "F0": (forward_s[0], "gather F0", ""), "F1": (forward_s[1], "gather F1", ""),
        "F2": (forward_s[2], "gather F2", ""), "F3": (forward_s[3], "", ""), "B3": (backward_s[0], "", ""),
        "B2": (backward_s[1], "gather B2", ""), "B1": (backward_s[2], "gather B1", ""),
        "B0": (backward_s[3], "gather B0", ""),
    }  # fmt: skip
    begun, ended = {"": 0.0}, {"": 0.0}
    queues = [[*network.items()], [*compute.items()]]
    free_s = [0.0, 0.0]
    while any(queues):
        for i, queue in enumerate(queues):
            if not queue:
                continue
            name, (seconds, after_end, after_begin) = queue[0]
            if after_end in ended and after_begin in begun:
                begun[name] = max(free_s[i], ended[after_end], begun[after_begin])
                free_s[i] = ended[name] = begun[name] + seconds
                queue.pop(0)
    return max(free_s)


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("ranks", [4, 512])
@pytest.mark.parametrize("computing_s", [0.0, 1e-3, 2e-2, 1.0])
def test_a_split_model_waits_for_the_messages_that_other_blocks_do_not_hide(
    computing_s: float, ranks: int, reduces: bool
) -> None:
    network, sent_bytes = Network(ranks, 8, LINK, Link("", 5e8), (RING, TREES)), 4 if reduces else 0
    head = SMALL.resolved_vocab_size * SMALL.n_embd
    of_block = 12 * SMALL.n_embd**2 + 2 * SMALL.n_embd * 64
    parts = [of_block, of_block, of_block, head]
    forward_s = [computing_s / 3 * part / sum(parts) for part in parts]

    def message_s(kind: str, of_block: bool) -> float:
        size = 2 if kind == "gather" else sent_bytes
        return network.gather_s(size * (BLOCK if of_block else OUTSIDE)) if size else 0.0

    expected = simulated_split(message_s, forward_s, [2 * s for s in reversed(forward_s)]) - computing_s
    hiding = Alone(computing_s, 2 * computing_s / 3, 0.0)
    waiting = split_waiting_s(SMALL, 64, network, hiding, 2, sent_bytes)
    assert waiting == pytest.approx(expected, abs=1e-12)
    # What comes first and last is never hidden.
    never_hidden_s = message_s("gather", False) + message_s("gather", True) + message_s("reduce", False)
    assert waiting >= never_hidden_s - 1e-12
    if computing_s == 0:
        assert waiting == pytest.approx(sum(message_s(*message) for message in SENT))
