"""The time of an all-reduce, and how much of it a training step waits for. No torch.

A ring of W ranks takes 2 (W - 1) messages one after the other, and each rank sends 2 (W - 1) / W of the bytes n:
t = 2 (W - 1) α + 2 (W - 1) / W · n β, with the latency α of a message and the time β of a byte (a reduce-scatter and
an allgather on a ring: Thakur, Rabenseifner and Gropp 2005, section 4; Patarasuk and Yuan 2009). Over several nodes the
model is the one by which NCCL chooses its algorithm (src/graph/tuning.cc): only 2 (M - 1) of a ring's messages go
between the M nodes, and trees take 2 (W / M - 1 + log2 M) messages in which each rank sends 2 n bytes. β is that of
the slowest link on the way. An allgather or a reduce-scatter is half of a ring's all-reduce; trees have neither.

Three parts of NCCL's model are left out: the protocol LL, which makes messages of a few KB faster than predicted; sums
in the switches (NVLS, CollNet), which are faster too; and corrections of up to a factor of two in latency or bandwidth,
for medium sizes, numbers of channels, processors and single ranks per node.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gptexp.config.schema import ModelConfig
from gptexp.model.gpus import PCIE_4, Link
from gptexp.model.shapes import block_parameters, count_parameters, linear_layers, parameter_shapes
from gptexp.optim.base import in_block

NCCL = "nccl"


@dataclass(frozen=True)
class Way:
    """One way of sending to all ranks: on a ring, or on trees."""

    is_tree: bool
    inside_s: float  # latency of a message from rank to rank in a node
    between_s: float  # latency of a message from node to node
    start_s: float = 0.0  # before the first message
    share: float = 1.0  # usable share of the links' bandwidth

    def messages(self, ranks: int, nodes: int) -> tuple[int, int]:
        """How many messages follow each other in half of an all-reduce: inside of nodes, and between them."""
        if self.is_tree:
            return ranks // nodes - 1, nodes.bit_length() - 1
        return ranks - nodes, nodes - 1


# NCCL 2.30.7, src/graph/tuning.cc: `baseLatencies`, `hwLatencies` and the shares of bandwidth of rings and trees, with
# the protocol LL128 before Simple. NVLink has both protocols, PCIe only Simple.
NVLINK_WAYS = (
    Way(False, 1.9e-6, 4.0e-6, 14.0e-6, 0.92),
    Way(False, 3.4e-6, 14.0e-6, 8.4e-6),
    Way(True, 1.25e-6, 8.5e-6, 14.0e-6, 0.92 * 120 / 128),
    Way(True, 4.0e-6, 14.0e-6, 8.4e-6, 0.92),
)
PCIE_WAYS = (Way(False, 5.7e-6, 14.0e-6, 8.4e-6), Way(True, 4.0e-6, 14.0e-6, 8.4e-6, 0.92))


def ways_of(backend: str, link: Link | None) -> tuple[Way, ...]:
    """The ways in which a backend sends, if GPUs of a node have this link (None: unknown). gloo has only rings."""
    if backend == NCCL:
        return PCIE_WAYS if link in (None, PCIE_4) else NVLINK_WAYS
    return tuple(way for way in PCIE_WAYS if not way.is_tree)


@dataclass(frozen=True)
class Network:
    """The links between some ranks, and the ways of sending over them. The fastest way is taken."""

    ranks: int
    ranks_per_node: int
    inside: Link | None  # from rank to rank
    between: Link | None  # from node to node
    ways: tuple[Way, ...]

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    @property
    def crossed(self) -> list[Link | None]:
        """The links that messages cross; None: unknown."""
        inside = [self.inside] if self.ranks > self.nodes else []
        return [*inside, self.between] if self.nodes > 1 else inside

    def all_reduce_s(self, sent_bytes: float) -> float:
        """Seconds of an all-reduce of `sent_bytes`."""
        return min(self._halves_s(way, 2, sent_bytes) for way in self.ways)

    def gather_s(self, sent_bytes: float) -> float:
        """Seconds of an allgather, or of a reduce-scatter, of `sent_bytes` in all."""
        return min(self._halves_s(way, 1, sent_bytes) for way in self.ways if not way.is_tree)

    def _halves_s(self, way: Way, halves: int, sent_bytes: float) -> float:
        """Seconds of 2 `halves` of an all-reduce, or of 1: the reduce-scatter or the allgather."""
        if self.ranks == 1:
            return 0.0
        inside, between = way.messages(self.ranks, self.nodes)
        messages_s = inside * way.inside_s + between * way.between_s
        sent = sent_bytes if way.is_tree else (self.ranks - 1) / self.ranks * sent_bytes
        slowest = min(link.bytes_per_s for link in self.crossed if link is not None)
        return way.start_s + halves * (messages_s + sent / (way.share * slowest))


@dataclass(frozen=True)
class Alone:
    """Seconds of a rank that waits for no other."""

    micro_s: float  # one micro-step
    backward_s: float  # its backward pass
    once_s: float  # what a step has once: clipping and the update


@dataclass(frozen=True)
class Bucket:
    """Gradients that DDP reduces together."""

    elements: int
    ready_ratio: float  # share of the backward pass after which all of them are known


def buckets(m: ModelConfig, seq_len: int, first_bytes: float, bucket_bytes: float) -> list[Bucket]:
    """The buckets of DDP in the order of the backward pass, which ends with the embeddings.

    A bucket is full once it has `bucket_bytes` of float32 gradients, the first one with `first_bytes`. A tied
    embedding is used in the first operation of the backward pass (the head) and in the last one, so its gradient is
    known only at the end.
    """
    limit, full, elements, done = first_bytes, list[Bucket](), 0, 0.0
    for size, done in _gradients(m, seq_len):
        elements += size
        if 4 * elements >= limit:
            full.append(Bucket(elements, done))
            limit, elements = bucket_bytes, 0
    return [*full, Bucket(elements, done)] if elements else full


def _gradients(m: ModelConfig, seq_len: int) -> Iterator[tuple[int, float]]:
    """Yield the elements of each gradient in the order of the backward pass, and the share of that pass done then."""
    outside = [math.prod(shape) for name, shape, _ in parameter_shapes(m) if not in_block(name) and len(shape) > 1]
    block = [inputs * outputs for name, (inputs, outputs, _) in linear_layers(m).items() if name != "lm_head"]
    head, of_block = _multiplications(m, seq_len)
    attention = of_block - sum(block)  # part of a block's last entry
    total, done = head + m.n_layer * of_block, head
    if not m.tied:
        yield outside.pop(), done / total
    for _ in range(m.n_layer):
        for left, matrix in enumerate(block[::-1], 1 - len(block)):
            done += matrix + (0 if left else attention)
            yield matrix, done / total
    yield from ((elements, 1.0) for elements in outside[::-1])


def split_waiting_s(
    m: ModelConfig, seq_len: int, network: Network, hiding: Alone, whole_bytes: int, sent_bytes: int
) -> float:
    """Seconds for which a micro-step of a split model waits (`world.sharding=full`).

    The ranks gather each block for the forward and for the backward pass, and the rest of the model once, with
    `whole_bytes` per number. They reduce gradients with `sent_bytes` per number; 0: they keep whole gradients. They
    send one message at a time, in FSDP2's order: in the forward pass a block is gathered when the block two before it
    begins, in the backward pass when the block that is computed before it begins. `hiding`: as for `waiting_s`.
    """
    backward_s, forward_s = hiding.backward_s, hiding.micro_s - hiding.backward_s
    block = block_parameters(m)
    outside = count_parameters(m) - m.n_layer * block
    gather_outside_s, gather_s = (network.gather_s(whole_bytes * n) for n in (outside, block))
    reduce_outside_s, reduce_s = (network.gather_s(sent_bytes * n) if sent_bytes else 0.0 for n in (outside, block))
    head, of_block = _multiplications(m, seq_len)
    head_share, block_share = (n / (head + m.n_layer * of_block) for n in (head, of_block))

    sent = computed = gather_outside_s  # when all messages, and all computation so far, have ended
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
    *block, head = (inputs * outputs for inputs, outputs, _ in linear_layers(m).values())
    return head, sum(block) + 2 * m.n_head * m.head_size * seq_len


def waiting_s(full: list[Bucket], network: Network, hiding: Alone, element_bytes: int) -> float:
    """Seconds for which a step waits after its last backward pass, until all buckets are reduced.

    A bucket is reduced as soon as it is full and the bucket before it is reduced. `hiding` is the computation that can
    hide communication: zeros if both need the same cores.
    """
    end_s = 0.0
    for bucket in full:
        start_s = max(end_s, bucket.ready_ratio * hiding.backward_s)
        end_s = start_s + network.all_reduce_s(element_bytes * bucket.elements)
    return max(0.0, end_s - hiding.backward_s)
