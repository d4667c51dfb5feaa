"""The time of an all-reduce, and how much of it a training step waits for. No torch.

A ring of W ranks takes 2 (W - 1) messages one after the other, and each rank sends 2 (W - 1) / W of the bytes n:
t = 2 (W - 1) α + 2 (W - 1) / W · n β, with the latency α of a message and the time β of a byte (a reduce-scatter and
an allgather on a ring: Thakur, Rabenseifner and Gropp 2005, section 4; Patarasuk and Yuan 2009). Over several nodes the
model is the one by which NCCL chooses its algorithm (src/graph/tuning.cc): only 2 (M - 1) of a ring's messages go
between the M nodes, and two trees take 2 (W / M - 1 + log2 M) messages in which each rank sends 2 n bytes. β is that of
the slowest part of the way.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gptexp.config.schema import ModelConfig
from gptexp.model.networks import Link

TREE = 0.9  # share of a ring's bandwidth that NCCL counts for its trees


@dataclass(frozen=True)
class Network:
    """The links of W ranks."""

    inside: Link  # from rank to rank
    ranks_per_node: int
    between: Link | None  # from node to node; None: unknown
    has_trees: bool = False  # NCCL

    def nodes(self, ranks: int) -> int:
        return -(-ranks // self.ranks_per_node)

    def reaches(self, ranks: int) -> bool:
        """Whether the links of so many ranks are known."""
        return self.nodes(ranks) == 1 or self.between is not None

    def all_reduce_s(self, ranks: int, sent_bytes: float) -> float:
        """Seconds of an all-reduce of `sent_bytes` over `ranks`."""
        if ranks == 1:
            return 0.0
        nodes = self.nodes(ranks)
        if nodes == 1:
            return ring_s(ranks, sent_bytes, self.inside.latency_s, self.inside.bytes_per_s)
        assert self.between is not None
        per_node = min(self.ranks_per_node, ranks)
        bytes_per_s = self.between.bytes_per_s
        if per_node > 1:
            bytes_per_s = min(bytes_per_s, self.inside.bytes_per_s)
        messages_s = 2 * ((ranks - nodes) * self.inside.latency_s + (nodes - 1) * self.between.latency_s)
        ring = messages_s + 2 * (ranks - 1) / ranks * sent_bytes / bytes_per_s
        if not self.has_trees:
            return ring
        messages_s = 2 * ((per_node - 1) * self.inside.latency_s + math.log2(nodes) * self.between.latency_s)
        return min(ring, messages_s + 2 * sent_bytes / (TREE * bytes_per_s))


def ring_s(ranks: int, sent_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Seconds of an all-reduce on a ring."""
    return 2 * (ranks - 1) * (latency_s + sent_bytes / ranks / bytes_per_s)


def fit_ring(ranks: int, seconds: Mapping[int, float]) -> tuple[float, float]:
    """The latency and the bytes/s of a ring, from the seconds of an all-reduce by its bytes.

    Least squares of the relative errors, as sizes and times span orders of magnitude; neither is negative.
    """
    # t / 2 (W - 1) = latency + bytes / W / bandwidth, with weights 1 / t.
    points = [(size / ranks, s / (2 * (ranks - 1)), 1 / s**2) for size, s in seconds.items()]
    weight = math.fsum(w for *_, w in points)
    x_mean, y_mean = (math.fsum(w * xy[i] for *xy, w in points) / weight for i in (0, 1))
    spread = math.fsum(w * (x - x_mean) ** 2 for x, _, w in points)
    slope = math.fsum(w * (x - x_mean) * (y - y_mean) for x, y, w in points) / spread
    latency = y_mean - slope * x_mean
    if latency < 0:
        latency, slope = 0.0, math.fsum(w * x * y for x, y, w in points) / math.fsum(w * x * x for x, _, w in points)
    if slope <= 0:
        return y_mean, math.inf
    return latency, 1 / slope


@dataclass(frozen=True)
class Bucket:
    """Gradients that DDP reduces together."""

    elements: int
    ready_ratio: float  # share of the backward pass after which all of them are known


def buckets(m: ModelConfig, seq_len: int, first_bytes: float, bucket_bytes: float) -> list[Bucket]:
    """The buckets of DDP in the order of the backward pass, which ends with the embeddings.

    A bucket is full once it has `bucket_bytes` of float32 gradients, the first one with `first_bytes`. wte is a factor
    of the first product of the backward pass and of its last operation, so its gradient is known at the end.
    """
    limit, found, elements, done = first_bytes, list[Bucket](), 0, 0.0
    for size, done in _gradients(m, seq_len):
        elements += size
        if 4 * elements >= limit:
            found.append(Bucket(elements, done))
            limit, elements = bucket_bytes, 0
    return [*found, Bucket(elements, done)] if elements else found


def _gradients(m: ModelConfig, seq_len: int) -> Iterator[tuple[int, float]]:
    """Yield the elements of each gradient in the order of the backward pass, and the share of it that is then done."""
    c, vocabulary = m.n_embd, m.resolved_vocab_size * m.n_embd
    # Multiplications of a token; of a block's last part, those of attention.
    block = [4 * c * c, 4 * c * c, c * c, 3 * c * c]
    attention = 2 * c * seq_len
    total, done = vocabulary + m.n_layer * (sum(block) + attention), vocabulary
    for _ in range(m.n_layer):
        for i, matrix in enumerate(block):
            done += matrix + (attention if i == 3 else 0)
            yield matrix, done / total
    yield m.block_size * c, 1.0
    yield vocabulary, 1.0


def split_waiting_s(
    parameters: int, whole_bytes: int, sent_bytes: int, ranks: int, network: Network, micro_s: list[float], reduced: int
) -> float:
    """Seconds for which a step of a split model waits (`world.sharding=full`).

    In each micro-step, of `micro_s` seconds, the ranks gather all parameters of `whole_bytes` each for the forward and
    for the backward pass; in the last `reduced` of them they also reduce gradients of `sent_bytes` each. Each of these
    is half of an all-reduce, and hidden behind the computation of other blocks as far as that is long enough.
    """
    gather_s = network.all_reduce_s(ranks, whole_bytes * parameters) / 2
    reduce_s = network.all_reduce_s(ranks, sent_bytes * parameters) / 2
    plain = len(micro_s) - reduced
    return sum(max(0.0, 2 * gather_s + (reduce_s if i >= plain else 0.0) - s) for i, s in enumerate(micro_s))


def waiting_s(found: list[Bucket], ranks: int, network: Network, backward_s: float, element_bytes: int) -> float:
    """Seconds for which a step waits after its last backward pass, until all buckets are reduced.

    Each is reduced as soon as it is full and the one before is reduced. `backward_s`: of the part of the backward pass
    in which communication costs the computation nothing; 0 if it takes the same cores.
    """
    end_s = 0.0
    for bucket in found:
        start_s = max(end_s, bucket.ready_ratio * backward_s)
        end_s = start_s + network.all_reduce_s(ranks, element_bytes * bucket.elements)
    return max(0.0, end_s - backward_s)
