"""The time of an all-reduce, and how much of it a training step waits for. No torch.

A ring of W ranks takes 2 (W - 1) messages one after the other, and each rank sends 2 (W - 1) / W of the bytes n:
t = 2 (W - 1) α + 2 (W - 1) / W · n β, with the latency α of a message and the time β of a byte (a reduce-scatter and
an allgather on a ring: Thakur, Rabenseifner and Gropp 2005, section 4; Patarasuk and Yuan 2009). Over several nodes the
model is the one by which NCCL chooses its algorithm (src/graph/tuning.cc): only 2 (M - 1) of a ring's messages go
between the M nodes, and trees take 2 (W / M - 1 + log2 M) messages in which each rank sends 2 n bytes. β is that of
the slowest part of the way. An allgather or a reduce-scatter is half of a ring's all-reduce; trees have neither.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gptexp.config.schema import ModelConfig
from gptexp.model.flops import count_parameters
from gptexp.model.networks import Link, Way


@dataclass(frozen=True)
class Network:
    """The links of ranks, and the ways of sending over them, of which the fastest is taken."""

    inside: Link  # from rank to rank
    ranks_per_node: int
    between: Link | None  # from node to node; None: unknown
    ways: tuple[Way, ...]

    def nodes(self, ranks: int) -> int:
        return -(-ranks // self.ranks_per_node)

    def reaches(self, ranks: int) -> bool:
        """Whether the links of so many ranks are known."""
        return self.nodes(ranks) == 1 or self.between is not None

    def all_reduce_s(self, ranks: int, sent_bytes: float) -> float:
        """Seconds of an all-reduce of `sent_bytes` over `ranks`."""
        return min(self._halves_s(way, 2, ranks, sent_bytes) for way in self.ways)

    def gather_s(self, ranks: int, sent_bytes: float) -> float:
        """Seconds of an allgather, or of a reduce-scatter, of `sent_bytes` in all."""
        return min(self._halves_s(way, 1, ranks, sent_bytes) for way in self.ways if not way.is_tree)

    def _halves_s(self, way: Way, halves: int, ranks: int, sent_bytes: float) -> float:
        """Seconds of an all-reduce, or of one half: the sums, or what all ranks then get of them."""
        if ranks == 1:
            return 0.0
        inside, between = messages(way, ranks, self.nodes(ranks))
        messages_s = inside * way.inside_s + between * way.between_s
        crossed = [self.inside] if inside else []
        if between:
            assert self.between is not None
            crossed.append(self.between)
        sent = sent_bytes if way.is_tree else (ranks - 1) / ranks * sent_bytes
        bytes_per_s = way.share * min(link.bytes_per_s for link in crossed)
        return way.start_s + halves * (messages_s + sent / bytes_per_s)


def messages(way: Way, ranks: int, nodes: int) -> tuple[int, int]:
    """How many messages follow each other in half of an all-reduce: inside of nodes, and between them."""
    if way.is_tree:
        return ranks // nodes - 1, nodes.bit_length() - 1
    return ranks - nodes, nodes - 1


def ring_s(ranks: int, sent_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Seconds of an all-reduce on a ring whose links are equal."""
    return 2 * (ranks - 1) * (latency_s + sent_bytes / ranks / bytes_per_s)


def fit_ring(ranks: int, seconds: Mapping[int, float]) -> tuple[float, float]:
    """The latency and the bytes/s of a ring whose links are equal, from the seconds of an all-reduce by its bytes."""
    start_s, byte_s = _fit_line(seconds)
    return start_s / (2 * (ranks - 1)), 2 * (ranks - 1) / ranks / byte_s if byte_s else math.inf


def fit_between(
    ranks: int, nodes: int, seconds: Mapping[int, float], inside_s: float, has_trees: bool
) -> tuple[float, float]:
    """The latency and the bytes/s between nodes, if those of a message inside of a node are `inside_s`.

    Small messages are taken to go on trees where there are any, large ones on a ring.
    """
    start_s, byte_s = _fit_line(seconds)
    inside, between = messages(Way(has_trees, 0.0, 0.0), ranks, nodes)
    latency_s = max(0.0, start_s / 2 - inside * inside_s) / between
    return latency_s, 2 * (ranks - 1) / ranks / byte_s if byte_s else math.inf


def _fit_line(seconds: Mapping[int, float]) -> tuple[float, float]:
    """The seconds of no bytes, and those of a further byte; neither is negative.

    Least squares of the relative errors, as sizes and times span orders of magnitude.
    """
    points = [(size, s, 1 / s**2) for size, s in seconds.items()]
    weight = math.fsum(w for *_, w in points)
    x_mean, y_mean = (math.fsum(w * xy[i] for *xy, w in points) / weight for i in (0, 1))
    spread = math.fsum(w * (x - x_mean) ** 2 for x, _, w in points)
    slope = math.fsum(w * (x - x_mean) * (y - y_mean) for x, y, w in points) / spread
    start = y_mean - slope * x_mean
    if start < 0:
        return 0.0, math.fsum(w * x * y for x, y, w in points) / math.fsum(w * x * x for x, _, w in points)
    return (start, slope) if slope > 0 else (y_mean, 0.0)


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
    block = [4 * c * c, 4 * c * c, c * c, 3 * c * c]  # multiplications of a token
    head, attention = _multiplications(m, seq_len)[0], 2 * c * seq_len  # that of a block's last part
    total, done = head + m.n_layer * (sum(block) + attention), head
    for _ in range(m.n_layer):
        for i, matrix in enumerate(block):
            done += matrix + (attention if i == 3 else 0)
            yield matrix, done / total
    yield m.block_size * c, 1.0
    yield vocabulary, 1.0


def split_waiting_s(
    m: ModelConfig,
    seq_len: int,
    ranks: int,
    network: Network,
    whole_bytes: int,
    sent_bytes: int,
    forward_s: float,
    backward_s: float,
) -> float:
    """Seconds for which a micro-step of a split model waits (`world.sharding=full`).

    The ranks gather each block for the forward and for the backward pass, and what is outside of the blocks once, as
    `whole_bytes` a number; then they reduce its gradients, as `sent_bytes` a number, or with 0 keep them whole. One
    of these messages is sent at a time, in the order of FSDP2: in the forward pass each block is gathered once the
    block two before it begins, in the backward pass once the next one begins. `forward_s` and `backward_s`: of the
    parts in which communication costs the computation nothing; 0 if it takes the same cores.
    """
    outside = (m.resolved_vocab_size + m.block_size + (2 if m.bias else 1)) * m.n_embd
    block = (count_parameters(m) - outside) // m.n_layer
    gather_outside_s, gather_s = (network.gather_s(ranks, whole_bytes * n) for n in (outside, block))
    reduce_outside_s, reduce_s = (
        network.gather_s(ranks, sent_bytes * n) if sent_bytes else 0.0 for n in (outside, block)
    )
    head, of_block = _multiplications(m, seq_len)
    head_share, block_share = (n / (head + m.n_layer * of_block) for n in (head, of_block))

    sent = computed = gather_outside_s  # the ends of all messages and of all computation until now
    began = [0.0, 0.0]
    for _ in range(m.n_layer):
        sent = max(sent, began[-2]) + gather_s
        began.append(max(computed, sent))
        computed = began[-1] + block_share * forward_s
    computed += head_share * forward_s

    gathered = sent = max(sent, computed) + gather_s
    computed += head_share * backward_s
    for left in reversed(range(m.n_layer)):
        start = max(computed, gathered)
        computed = start + block_share * backward_s
        if left:
            gathered = sent = max(sent, start) + gather_s
        sent = max(sent, computed) + reduce_s
    return max(sent, computed) + reduce_outside_s - forward_s - backward_s


def _multiplications(m: ModelConfig, seq_len: int) -> tuple[int, int]:
    """The multiplications of a token in the head, and in a block."""
    return m.resolved_vocab_size * m.n_embd, 12 * m.n_embd**2 + 2 * m.n_embd * seq_len


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
