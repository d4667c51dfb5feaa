"""`gptexp plan`: the time of a step at other numbers of ranks, and the verdict of the critical batch size.

A step of the run's batch is divided among N ranks. Each computes its share, and waits for what its computation does not
hide: gradients, and parameters that are split or shared. Not modelled: ranks of different speed, other jobs on the
network, GPUs that compute small micro-batches less efficiently, and of a GPU that is not here the update.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gptexp.config.batch import legal_micro_batches
from gptexp.config.branching import run_and_step
from gptexp.config.run_plan import plan_run
from gptexp.config.schema import Config
from gptexp.config.vocabulary import with_vocab_size
from gptexp.distributed.ranks import count_cores
from gptexp.machine.effective import Effective
from gptexp.machine.network import NCCL, recall, ways_of, ways_with
from gptexp.model.allreduce import Network, buckets, split_waiting_s, waiting_s
from gptexp.model.flops import count_parameters, flops_per_token
from gptexp.model.gpus import GPUS, Gpu
from gptexp.model.networks import GPUS_PER_NODE, NETWORKS, OTHER_NETWORK, USUAL_NETWORK, WITHIN_NODE
from gptexp.process.errors import ConfigError
from gptexp.process.words import counted
from gptexp.run.build import BUCKETS, FIRST_BUCKET_MIB, LEAST_BUCKET_MIB
from gptexp.run.calibrate import Alone, sample_alone
from gptexp.run.communication import MOST_CROWDED
from gptexp.storage import run_dir

REPORT_BYTES = 128  # about: the numbers of a step, which all ranks share
BACKWARD_RATIO = 2 / 3  # of the multiplications of a micro-step


@dataclass(frozen=True)
class Asked:
    """What `gptexp plan` was told beside the config."""

    gpu: Gpu | None = None  # None: this machine
    network: str | None = None  # one of `NETWORKS`, between nodes
    ranks_per_node: int | None = None
    critical: Path | None = None  # a run or a sweep that has measured its critical batch size


NOTHING = Asked()


@dataclass(frozen=True)
class Computing:
    """The times of one rank of a run."""

    beside: Alone  # while the others that this machine has cores for compute too
    single: Alone  # with the machine to itself


def predict(
    cfg: Config, planned: dict[str, Any], asked: Asked, computing: Computing, plan: Callable[[Config], dict[str, Any]]
) -> None:
    """Add to a plan the steps at half, all and twice its ranks, `at_ranks`, or the reason why they are `unpredicted`.

    `plan` is `planning.plan`: with batch.micro_batch_size=auto, each number of ranks has the size of its own plan. A
    `time` that is assumed then contains the waiting; one that is missing is added.
    """
    world_size = planned["world_size"]
    network = network_of(cfg, asked, world_size)
    if isinstance(network, str):
        planned["unpredicted"] = network
        return
    planned["at_ranks"] = []
    for ranks in (world_size // 2, world_size, 2 * world_size):
        if ranks == 0 or planned["total_batch_size"] // cfg.seq_len % ranks or not network.reaches(ranks):
            continue
        own = planned
        if ranks != world_size and cfg.batch.asked_micro_batch_size is None:
            own = plan(replace(cfg, world=replace(cfg.world, size=ranks)))
        planned["at_ranks"].append(_at(cfg, planned, own, network, computing, ranks))
    planned["network"] = {
        "inside": asdict(network.inside),
        "between": asdict(network.between) if network.between else None,
        "ranks_per_node": network.ranks_per_node,
    }
    own = next(row for row in planned["at_ranks"] if row["ranks"] == world_size)
    if "assumed" in planned and "time" in planned:
        slower = own["step_s"] / (own["step_s"] - own["waiting_s"])
        planned["time"] = {key: slower * seconds for key, seconds in planned["time"].items()}
    elif "time" not in planned:
        steps = (planned["tokens"] - planned["first_tokens"]) / planned["total_batch_size"]
        planned["time"] = {"step_s": own["step_s"], "total_s": steps * own["step_s"]}


def has_ranks_here(planned: dict[str, Any]) -> bool:
    """Whether this machine can start so many ranks, to time them."""
    on_gpus = planned["effective"]["device"] == "cuda"
    most: int = torch.cuda.device_count() if on_gpus else MOST_CROWDED * count_cores()
    world_size: int = planned["world_size"]
    return world_size <= most


def computing_on(cfg: Config, planned: dict[str, Any]) -> Computing | None:
    """The times of one rank on the GPU of a plan, at the MFU that it assumes. None: the GPU's peak is unknown."""
    if (peak := planned["assumed"]["peak_flops_per_s"]) is None:
        return None
    model = with_vocab_size(cfg, planned["effective"]["vocab_size"]).model
    palm, _ = flops_per_token(model, cfg.seq_len)
    micro_s = palm * planned["micro_batch_size"] * cfg.seq_len / (peak * planned["assumed"]["mfu"])
    alone = Alone(micro_s, BACKWARD_RATIO * micro_s, 0.0)
    return Computing(alone, alone)


def computing_here(cfg: Config, planned: dict[str, Any]) -> Computing:
    """The times of one rank on this machine, measured."""
    effective = Effective.from_dict(planned["effective"])
    run, at_once = plan_run(cfg, planned["micro_batch_size"]), 1
    if effective.device == "cpu":
        at_once = max(1, min(planned["world_size"], count_cores() // effective.threads_per_rank.value))
    single = sample_alone(cfg, run, effective, 1)
    return Computing(sample_alone(cfg, run, effective, at_once) if at_once > 1 else single, single)


def _at(
    cfg: Config,
    planned: dict[str, Any],
    own: dict[str, Any],
    network: Network,
    computing: Computing,
    ranks: int,
) -> dict[str, Any]:
    """The step on `ranks` ranks, whose own plan is `own`, from the times of a micro-batch of `planned`."""
    reduce_every = Effective.from_dict(own["effective"]).reduce_every
    effective = replace(Effective.from_dict(planned["effective"]), reduce_every=reduce_every)
    cfg = with_vocab_size(cfg, effective.vocab_size.value)
    total, measured_size = planned["total_batch_size"], planned["micro_batch_size"]
    sequences = total // cfg.seq_len
    size = next(s for s in legal_micro_batches(total, cfg.seq_len, ranks) if s <= own["micro_batch_size"])
    alone = computing.single if ranks == 1 else computing.beside
    threads, cores, on_cpu = effective.threads_per_rank.value, count_cores(), effective.device == "cpu"
    # On a CPU the ranks' threads also send and add the gradients: without further cores, nothing is hidden.
    hides = not on_cpu or 2 * ranks * threads <= cores
    micro_s, backward_s = (size / measured_size * s if hides else 0.0 for s in (alone.micro_s, alone.backward_s))
    waiting, once_s = 0.0, alone.once_s
    if ranks > 1:
        waiting = _waiting_s(cfg, effective, network, ranks, sequences // ranks // size, micro_s, backward_s)
        if cfg.world.sharding != "none":
            once_s /= ranks  # each rank updates its part
    crowded = max(1.0, ranks * threads / cores) if on_cpu else 1.0
    step_s = crowded * (sequences // ranks * alone.micro_s / measured_size + once_s) + waiting
    one_rank_s = sequences * computing.single.micro_s / measured_size + computing.single.once_s
    return {
        "ranks": ranks,
        "nodes": network.nodes(ranks),
        "sequences": sequences // ranks,
        "micro_batch_size": size,
        "step_s": step_s,
        "waiting_s": waiting,
        "efficiency": one_rank_s / (ranks * step_s),
    }


def _waiting_s(
    cfg: Config,
    effective: Effective,
    network: Network,
    ranks: int,
    micro_steps: int,
    micro_s: float,
    backward_s: float,
) -> float:
    """Seconds for which a step of several ranks waits.

    A micro-step takes `micro_s`, of it the backward pass `backward_s`; both are 0 if nothing is hidden behind them.
    """
    sent_bytes, parameters = 2 if cfg.world.comm == "bfloat16" else 4, count_parameters(cfg.model)
    report_s = network.all_reduce_s(ranks, REPORT_BYTES)
    if cfg.world.sharding == "full":
        whole_bytes = 2 if effective.dtype.value == "bfloat16" else 4
        kept_s, reduced_s = (
            split_waiting_s(cfg.model, cfg.seq_len, ranks, network, whole_bytes, sent, micro_s - backward_s, backward_s)
            for sent in (0, sent_bytes)
        )
        reduced = micro_steps if effective.reduce_every == "micro_step" else 1
        return (micro_steps - reduced) * kept_s + reduced * reduced_s + report_s
    compiled = effective.compile.value
    mib = max(LEAST_BUCKET_MIB, 4 * parameters / 2**20 / BUCKETS) if compiled else LEAST_BUCKET_MIB
    found = buckets(cfg.model, cfg.seq_len, 2**20 * (mib if compiled else FIRST_BUCKET_MIB), 2**20 * mib)
    waiting = waiting_s(found, ranks, network, backward_s, sent_bytes)
    if cfg.world.sharding == "optimizer":  # then each rank sends its updated parameters to all others
        waiting += network.gather_s(ranks, 4 * parameters)
    return waiting + report_s


def network_of(cfg: Config, asked: Asked, ranks: int) -> Network | str:
    """The links of `ranks`, as measured, or else as published. Or why they give no prediction.

    What `asked` names is never replaced by what is measured.
    """
    if cfg.train.reduction == "tree":
        return "not predicted for train.reduction=tree, which sends all gradients at the end of a step"
    on_gpus = asked.gpu is not None or (cfg.train.device in ("auto", "cuda") and torch.cuda.is_available())
    backend = cfg.world.backend if cfg.world.backend != "auto" else NCCL if on_gpus else "gloo"
    here = torch.cuda.get_device_name() if asked.gpu is None and on_gpus else ""
    name = next((name for name, gpu in GPUS.items() if gpu is asked.gpu or (here and gpu.name in here)), None)
    measured = recall(cfg.data, backend, cfg.world.comm, ranks, asked.gpu.name if asked.gpu else here)
    of_inside = next((one for one in measured if one.inside is not None), None)
    of_between = next((one for one in measured if one.between is not None and asked.network is None), None)
    inside, between = WITHIN_NODE.get(name or "") if backend == NCCL else None, None
    per_node = 2 * ranks  # on a CPU: all rows on this machine
    if on_gpus:
        per_node = GPUS_PER_NODE if asked.gpu is not None else torch.cuda.device_count()
        between = NETWORKS[USUAL_NETWORK.get(name or "", OTHER_NETWORK)]
    if of_inside is not None:
        inside = of_inside.link_inside
    if of_between is not None:
        between, per_node = of_between.link_between, of_between.ranks_per_node
    if asked.network is not None:
        between = NETWORKS[asked.network]
    per_node = asked.ranks_per_node or per_node
    if inside is None and per_node == 1:
        inside = between  # is not used
    if inside is None:
        return f"the network is unknown; gptexp bench comm world.size={ranks} measures it"
    ways = ways_with(
        ways_of(backend, name),
        of_inside.inside if of_inside is not None else None,
        of_between.between if of_between is not None else None,
    )
    network = Network(inside, per_node, between, ways)
    if not network.reaches(ranks):
        return (
            f"the network between {network.nodes(ranks)} nodes is unknown; give --network, or measure it there: "
            "torchrun --nnodes=2 … -m gptexp.bench comm"
        )
    return network


def critical_of(cfg: Config, planned: dict[str, Any], directory: Path | None) -> dict[str, Any] | None:
    """The critical batch size that a run or a sweep has measured: by default the run of `branch_from`, if it has.

    Raises `ConfigError` if a given directory has measured none.
    """
    if directory is None:
        if cfg.branch_from is None:
            return None
        directory = Path(run_and_step(cfg.branch_from)[0])
        found, run = _noise_scale_of(directory), directory
    elif run_dir.is_run(directory):
        found, run = _noise_scale_of(directory), directory
        if found is None:
            raise ConfigError(f"--critical {directory}: this run has no gradient noise scale; train for longer")
    else:
        found, run = _critical_of_sweep(directory)
    if found is None:
        return None
    total, micro_batch = planned["total_batch_size"], planned["micro_batch_size"] * cfg.seq_len
    verdict = "below" if total < found["low"] else "within"  # of its 95% interval
    if found["high"] is not None and total > found["high"]:
        verdict = "above"
    # With one micro-batch for each rank, this many ranks have a batch of the critical size.
    ranks = max(1, int(found["tokens"] // micro_batch))
    other_keys = _differing(with_vocab_size(cfg, planned["effective"]["vocab_size"]), run_dir.load_resolved(run))
    return {**found, "from": str(directory), "verdict": verdict, "ranks": ranks, "other_keys": other_keys}


def _differing(cfg: Config, measured: Config) -> list[str]:
    """The keys of the model and of the data that differ from those of the run that has measured."""
    of_data = ("name", "path", "tokenizer")
    return [
        *(f"model.{key}" for key, value in asdict(measured.model).items() if getattr(cfg.model, key) != value),
        *(f"data.{key}" for key in of_data if getattr(cfg.data, key) != getattr(measured.data, key)),
    ]


def _noise_scale_of(directory: Path) -> dict[str, Any] | None:
    from gptexp.reporting.listings.records import read_run
    from gptexp.reporting.statistics.noise_scale import at_the_end  # imports scipy, which nothing else here needs

    scale = at_the_end(read_run(directory))
    return None if scale is None else {"what": "gradient noise scale", **asdict(scale)}


def _critical_of_sweep(directory: Path) -> tuple[dict[str, Any], Path]:
    """What a sweep has measured, and one of the runs that it is of."""
    run_dir.require_directory(directory, "a run or a sweep", "--critical")
    from gptexp.reporting.listings.records import find_runs
    from gptexp.reporting.statistics.analysis import analyse
    from gptexp.reporting.statistics.noise_scale import lowest_measured

    runs = find_runs(directory)
    arms = [arm for arm in analyse(directory.name, runs).arms if arm.critical is not None]
    fits = [(arm, arm.critical.hyperbola) for arm in arms if arm.critical is not None and arm.critical.hyperbola]
    if len(fits) > 1:
        raise ConfigError(f"--critical {directory}: {counted(len(fits), 'arm')} with a critical batch size; give a run")
    for arm, fit in fits:
        found = {"what": "critical batch size", "tokens": fit.tokens, "low": fit.low, "high": fit.high}
        return found, arm.runs[0].directory
    measured = lowest_measured(runs)
    if measured is not None and (scale := _noise_scale_of(measured.directory)) is not None:
        return scale, measured.directory
    raise ConfigError(
        f"--critical {directory}: no run there has measured a noise scale, and its runs show no critical batch size; "
        "give another run or sweep"
    )


def lines(planned: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a plan about its ranks: a title and a text."""
    if "unpredicted" in planned:
        yield "ranks", planned["unpredicted"]
    for i, row in enumerate(planned.get("at_ranks", [])):
        nodes = f" on {row['nodes']} nodes" if row["nodes"] > 1 else ""
        size, step_ms = row["micro_batch_size"], 1e3 * row["step_s"]
        micro_batches = f" in micro-batches of {size}" if size < row["sequences"] else ""
        yield (
            "" if i else "ranks",
            f"at {row['ranks']:,}{nodes} each has {counted(row['sequences'], 'sequence')} a step{micro_batches}: "
            f"{f'{step_ms:.3g}' if step_ms < 1000 else f'{step_ms:,.0f}'} ms, of it "
            f"{row['waiting_s'] / row['step_s']:.0%} waiting for other ranks; {row['efficiency']:.0%} efficiency",
        )
    if network := planned.get("network"):
        between = network["between"]
        several = any(row["nodes"] > 1 for row in planned["at_ranks"])
        yield "network", network["inside"]["name"] + (f"; {between['name']}" if between and several else "")
    if critical := planned.get("critical"):
        interval = (
            f"{critical['low']:,.0f} to {critical['high']:,.0f}"
            if critical["high"]
            else f"{critical['low']:,.0f} or more"
        )
        verdict = {"below": "is below", "within": "is within the interval of", "above": "passes"}[critical["verdict"]]
        yield (
            "critical size",
            f"the batch of {planned['total_batch_size']:,} tokens {verdict} the measured {critical['what']} of "
            f"{critical['tokens']:,.0f} tokens (95% interval {interval}), which a micro-batch for each rank reaches "
            f"at {counted(critical['ranks'], 'rank')}",
        )
