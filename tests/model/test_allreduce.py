"""The time of an all-reduce and the waiting of a step against simulations of each message; the fit; DDP's buckets."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from gptexp.config.schema import ModelConfig
from gptexp.model.allreduce import TREE, Bucket, Network, buckets, fit_ring, ring_s, split_waiting_s, waiting_s
from gptexp.model.flops import count_parameters
from gptexp.model.gpt import GPT
from gptexp.model.gpus import GPUS
from gptexp.model.networks import NETWORKS, USUAL_NETWORK, WITHIN_NODE, Link

LINK = Link("", 3e-6, 2e9)


def simulated_ring(ranks: int, sent_bytes: int, latency_s: float, bytes_per_s: float) -> float:
    """The end of a ring all-reduce of real numbers. Each rank sends a message once it has the one before it."""
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
    assert all(of_rank == total for of_rank in chunks)  # it is an all-reduce
    return max(clock)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 33])
@pytest.mark.parametrize("size", [4, 10**6])
def test_the_time_of_a_ring_is_that_of_its_messages(ranks: int, size: int) -> None:
    assert ring_s(ranks, size, 3e-6, 2e9) == pytest.approx(simulated_ring(ranks, size, 3e-6, 2e9), rel=1e-9)
    alone = Network(LINK, ranks, None)
    assert alone.all_reduce_s(ranks, size) == ring_s(ranks, size, LINK.latency_s, LINK.bytes_per_s)
    assert alone.all_reduce_s(1, size) == 0


@pytest.mark.parametrize("ranks", [2, 4, 1024])
def test_a_fit_finds_the_latency_and_the_bandwidth_of_a_ring(ranks: int) -> None:
    sizes = [4**i for i in range(5, 14)]
    exact = {size: ring_s(ranks, size, 20e-6, 5e9) for size in sizes}
    assert fit_ring(ranks, exact) == pytest.approx((20e-6, 5e9), rel=1e-6)
    draw = random.Random(ranks)
    noisy = {size: s * math.exp(draw.gauss(0, 0.05)) for size, s in exact.items()}
    assert fit_ring(ranks, noisy) == pytest.approx((20e-6, 5e9), rel=0.2)


def test_a_fit_has_no_negative_latency() -> None:
    latency, bytes_per_s = fit_ring(2, {10**6: 1e-3, 10**7: 12e-3, 10**8: 130e-3})
    assert latency == 0
    assert 0.7e9 < bytes_per_s < 1.1e9


def test_between_nodes_the_slowest_link_counts_and_trees_need_few_messages() -> None:
    between = Link("", 10e-6, 5e8)
    ring, nccl = Network(LINK, 8, between), Network(LINK, 8, between, has_trees=True)
    for network in (ring, nccl):
        assert network.all_reduce_s(8, 10**6) == ring_s(8, 10**6, 3e-6, 2e9)  # within a node
    large = 10**9
    assert ring.all_reduce_s(16, large) == pytest.approx(2 * (14 * 3e-6 + 10e-6) + 2 * 15 / 16 * large / 5e8)
    assert nccl.all_reduce_s(16, large) == ring.all_reduce_s(16, large)
    assert nccl.all_reduce_s(4096, 8) == pytest.approx(2 * (7 * 3e-6 + 9 * 10e-6) + 16 / (TREE * 5e8))
    assert ring.all_reduce_s(4096, 8) > 50 * nccl.all_reduce_s(4096, 8)
    one_per_node = replace(ring, ranks_per_node=1)
    assert one_per_node.all_reduce_s(4, large) == pytest.approx(ring_s(4, large, 10e-6, 5e8))
    assert not Network(LINK, 8, None).reaches(9)
    assert Network(LINK, 8, None).reaches(8)


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
    network, found = Network(LINK, 8, None), buckets(SMALL, 64, 2**20, 4 * 2**20)
    waiting = waiting_s(found, 4, network, backward_s, element_bytes)
    tick = 2e-6
    left = [(b.ready_ratio * backward_s, network.all_reduce_s(4, element_bytes * b.elements)) for b in found]
    for number in itertools.count():
        if left and left[0][0] <= number * tick:
            left[0] = (left[0][0], left[0][1] - tick)
            if left[0][1] <= 0:
                left.pop(0)
        if not left:
            break
    assert waiting == pytest.approx(max(0.0, (number + 1) * tick - backward_s), abs=2 * tick * len(found))
    last = network.all_reduce_s(4, element_bytes * found[-1].elements)
    every = sum(network.all_reduce_s(4, element_bytes * b.elements) for b in found)
    assert last * 0.999 <= waiting <= every * 1.001


def test_a_split_model_sends_its_parameters_twice_and_its_gradients_once() -> None:
    """Without a latency its waiting is the bytes that a rank sends, as far as nothing hides them."""
    network, ranks, parameters = Network(Link("", 0.0, 1e9), 8, None), 4, 1_000_000

    def waits(micro_s: list[float], reduced: int) -> float:
        return split_waiting_s(parameters, 2, 4, ranks, network, micro_s, reduced)

    share = 3 / 4 * parameters / 1e9  # a rank has a quarter of what it gathers, and keeps a quarter of what it reduces
    assert waits([0.0] * 3, reduced=1) == pytest.approx(share * (3 * 2 * 2 + 4))
    assert waits([0.0] * 3, reduced=3) == pytest.approx(share * (3 * 2 * 2 + 3 * 4))
    hidden = share * 3  # most of the gathering of each micro-step
    assert waits([hidden] * 3, reduced=1) == pytest.approx(share * (3 * (4 - 3) + 4))
    assert waits([1.0] * 3, reduced=3) == 0


def test_every_gpu_has_its_links() -> None:
    assert WITHIN_NODE.keys() == GPUS.keys()
    assert {*USUAL_NETWORK.values()} <= NETWORKS.keys()
    assert USUAL_NETWORK.keys() <= GPUS.keys()
