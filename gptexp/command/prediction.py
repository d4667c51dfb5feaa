"""`gptexp plan`: the time of a step at other numbers of ranks.

A step of the run's batch is divided among N ranks. Each computes its share, and waits for communication that its
computation does not hide: of gradients, and of split or shared parameters. Not modelled: ranks of different speed,
other jobs on the network, GPUs' lower efficiency with small micro-batches, and the update on a GPU that is not here.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from gptexp.config.batch import BatchPlan, legal_micro_batches
from gptexp.config.schema import Config
from gptexp.machine.effective import Effective
from gptexp.model.allreduce import Alone, Network, buckets, split_waiting_s, waiting_s
from gptexp.model.shapes import count_parameters
from gptexp.process.cores import count_cores
from gptexp.process.words import counted
from gptexp.run.build import BUCKETS, FIRST_BUCKET_MIB, LEAST_BUCKET_MIB

REPORT_BYTES = 128  # rough size of the numbers of a step, which all ranks share


@dataclass(frozen=True)
class Computing:
    """The times of one rank of a run, with the micro-batch of its plan."""

    beside: Alone  # while other ranks compute too, as many as this machine has cores for
    single: Alone  # while this rank has the machine to itself


@dataclass(frozen=True)
class StepAtRanks:
    """A step that is divided among `ranks` ranks."""

    ranks: int
    nodes: int
    sequences: int  # per rank
    micro_batch_size: int
    step_s: float
    waiting_s: float  # a part of step_s
    efficiency: float  # relative to one rank that has the machine to itself

    def in_words(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        micro_batches = (
            f" in micro-batches of {self.micro_batch_size}" if self.micro_batch_size < self.sequences else ""
        )
        step_ms = 1e3 * self.step_s
        return (
            f"at {self.ranks:,}{nodes} each has {counted(self.sequences, 'sequence')} a step{micro_batches}: "
            f"{f'{step_ms:.3g}' if step_ms < 1000 else f'{step_ms:,.0f}'} ms, of it "
            f"{self.waiting_s / self.step_s:.0%} waiting for other ranks; {self.efficiency:.0%} efficiency"
        )


@dataclass(frozen=True)
class Prediction:
    """The steps of a run at half, all and twice its ranks."""

    steps: list[StepAtRanks]
    network: Network  # for the run's own number of ranks

    @property
    def own(self) -> StepAtRanks:
        return next(step for step in self.steps if step.ranks == self.network.ranks)

    def lines(self) -> list[tuple[str, str]]:
        lines = [("" if i else "ranks", step.in_words()) for i, step in enumerate(self.steps)]
        crossed = dict.fromkeys(link for step in self.steps for link in replace(self.network, ranks=step.ranks).crossed)
        return [*lines, ("network", "; ".join(link.name for link in crossed if link is not None))]

    def to_dict(self) -> dict[str, Any]:
        network = {key: value for key, value in asdict(self.network).items() if key not in ("ranks", "ways")}
        return {"at_ranks": [asdict(step) for step in self.steps], "network": network}


def predict(
    cfg: Config, batch: BatchPlan, network: Network, computing: Computing, effective_at: Callable[[int], Effective]
) -> Prediction:
    """Predict the steps of `batch` at half, all and twice its ranks, where they divide it and the links are known.

    `effective_at` returns the choices for a number of ranks; only micro_batch_size and reduce_every may depend on it.
    """
    steps = []
    for ranks in (batch.world_size // 2, batch.world_size, 2 * batch.world_size):
        there = replace(network, ranks=ranks)
        if ranks and batch.sequences % ranks == 0 and None not in there.crossed:
            steps.append(_step(cfg, batch, effective_at(ranks), there, computing))
    return Prediction(steps, network)


def _step(cfg: Config, batch: BatchPlan, effective: Effective, network: Network, computing: Computing) -> StepAtRanks:
    ranks, sequences, most = network.ranks, batch.sequences // network.ranks, effective.micro_batch_size.value
    size = next(s for s in legal_micro_batches(batch.total_batch_size, batch.seq_len, ranks) if s <= most)
    alone = computing.single if ranks == 1 else computing.beside
    threads = ranks * effective.threads_per_rank.value
    busy = threads / count_cores() if effective.device == "cpu" else 0.0  # the share of the cores that computes
    # On a CPU the ranks' threads also send and add the gradients: without spare cores, nothing is hidden.
    scale = size / batch.micro_batch_size if busy <= 1 / 2 else 0.0
    hiding, waiting, once_s = Alone(scale * alone.micro_s, scale * alone.backward_s, 0.0), 0.0, alone.once_s
    if ranks > 1:
        waiting = _waiting_s(cfg, effective, network, hiding, sequences // size)
        if cfg.world.sharding != "none":
            once_s /= ranks  # each rank updates its part
    step_s = max(1.0, busy) * (sequences * alone.micro_s / batch.micro_batch_size + once_s) + waiting
    one_rank_s = batch.sequences * computing.single.micro_s / batch.micro_batch_size + computing.single.once_s
    return StepAtRanks(ranks, network.nodes, sequences, size, step_s, waiting, one_rank_s / (ranks * step_s))


def _waiting_s(cfg: Config, effective: Effective, network: Network, hiding: Alone, micro_steps: int) -> float:
    """Seconds for which a step of several ranks waits."""
    m, sent_bytes = cfg.model, 2 if cfg.world.comm == "bfloat16" else 4
    report_s = network.all_reduce_s(REPORT_BYTES)
    if cfg.world.sharding == "full":
        whole_bytes = 2 if effective.dtype.value == "bfloat16" else 4
        kept_s, reduced_s = (
            split_waiting_s(m, cfg.seq_len, network, hiding, whole_bytes, sent) for sent in (0, sent_bytes)
        )
        reduced = micro_steps if effective.reduce_every == "micro_step" else 1
        return (micro_steps - reduced) * kept_s + reduced * reduced_s + report_s
    first_mib, mib = FIRST_BUCKET_MIB, LEAST_BUCKET_MIB
    if effective.compile.value:
        first_mib = mib = max(LEAST_BUCKET_MIB, 4 * count_parameters(m) / 2**20 / BUCKETS)
    full = buckets(m, cfg.seq_len, 2**20 * first_mib, 2**20 * mib)
    waiting = waiting_s(full, network, hiding, sent_bytes)
    if cfg.world.sharding == "optimizer":  # then each rank sends its updated parameters to all others
        waiting += network.gather_s(4 * count_parameters(m))
    return waiting + report_s
