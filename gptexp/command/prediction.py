"""`gptexp plan`: the time of a step at other numbers of ranks, and the verdict of the critical batch size.

A step of the run's batch is divided among N ranks. Each computes its share, and then waits for the gradients that the
backward pass of its last micro-step has not hidden. Not modelled: ranks of different speed, other jobs on the network,
GPUs that compute small micro-batches less efficiently, and of a GPU that is not here the update.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
from gptexp.machine.network import recall
from gptexp.model.allreduce import Network, buckets, split_waiting_s, waiting_s
from gptexp.model.flops import count_parameters, flops_per_token
from gptexp.model.gpus import GPUS, Gpu
from gptexp.model.networks import GPUS_PER_NODE, NETWORKS, OTHER_NETWORK, USUAL_NETWORK, WITHIN_NODE
from gptexp.process.errors import ConfigError
from gptexp.process.words import counted
from gptexp.run.build import BUCKETS, FIRST_BUCKET_MIB, LEAST_BUCKET_MIB
from gptexp.run.calibrate import Alone, sample_alone
from gptexp.storage import run_dir

REPORT_BYTES = 128  # about: the numbers of a step, which all ranks share
MOST_CROWDED = 4  # ranks on a core; more are not started
BACKWARD_RATIO = 2 / 3  # of the multiplications of a micro-step


@dataclass(frozen=True)
class Asked:
    """What `gptexp plan` was told beside the config."""

    gpu: Gpu | None = None  # None: this machine
    network: str | None = None  # one of `NETWORKS`, between nodes
    ranks_per_node: int | None = None
    critical: Path | None = None  # a run or a sweep that has measured its critical batch size


NOTHING = Asked()


def predict(cfg: Config, planned: dict[str, Any], asked: Asked, alone: Alone) -> None:
    """Add to a plan the steps at half, all and twice its ranks, `at_ranks`, or the reason why they are `unpredicted`.

    `alone` has the times of one rank. A `time` that is assumed then contains the waiting; one that is missing is added.
    """
    world_size, effective = planned["world_size"], Effective.from_dict(planned["effective"])
    cfg = with_vocab_size(cfg, effective.vocab_size.value)
    network = network_of(cfg, asked, world_size)
    if isinstance(network, str):
        planned["unpredicted"] = network
        return
    rows = (_at(cfg, planned, effective, network, alone, n) for n in (world_size // 2, world_size, 2 * world_size))
    planned["at_ranks"] = [row for row in rows if row is not None]
    planned["network"] = {
        "inside": asdict(network.inside),
        "between": asdict(network.between) if network.between else None,
        "ranks_per_node": network.ranks_per_node,
    }
    own = next((row for row in planned["at_ranks"] if row["ranks"] == world_size), None)
    if own is None:
        return
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


def alone_on(cfg: Config, planned: dict[str, Any]) -> Alone | None:
    """The times of one rank on the GPU of a plan, at the MFU that it assumes. None: the GPU's peak is unknown."""
    if (peak := planned["assumed"]["peak_flops_per_s"]) is None:
        return None
    model = with_vocab_size(cfg, planned["effective"]["vocab_size"]).model
    palm, _ = flops_per_token(model, cfg.seq_len)
    micro_s = palm * planned["micro_batch_size"] * cfg.seq_len / (peak * planned["assumed"]["mfu"])
    return Alone(micro_s, BACKWARD_RATIO * micro_s, 0.0)


def alone_here(cfg: Config, planned: dict[str, Any]) -> Alone:
    """The times of one rank on this machine, measured beside as many others as it has cores for, on a CPU."""
    effective = Effective.from_dict(planned["effective"])
    at_once = 1
    if effective.device == "cpu":
        at_once = max(1, min(planned["world_size"], count_cores() // effective.threads_per_rank.value))
    return sample_alone(cfg, plan_run(cfg, planned["micro_batch_size"]), effective, at_once)


def _at(
    cfg: Config, planned: dict[str, Any], effective: Effective, network: Network, alone: Alone, ranks: int
) -> dict[str, Any] | None:
    """The step on `ranks` ranks. None: the batch cannot be divided so, or the network is unknown."""
    total, size = planned["total_batch_size"], planned["micro_batch_size"]
    legal = [s for s in legal_micro_batches(total, cfg.seq_len, ranks) if s <= size] if ranks else []
    if not legal or not network.reaches(ranks):
        return None
    threads, cores, on_cpu = effective.threads_per_rank.value, count_cores(), effective.device == "cpu"
    # On a CPU the ranks' threads also send and add the gradients: without further cores, nothing is hidden.
    hidden_s = 0.0 if on_cpu and 2 * ranks * threads > cores else alone.backward_s * legal[-1] / size
    gradients_mib = 4 * count_parameters(cfg.model) / 2**20
    compiled = effective.compile.value
    mib = max(LEAST_BUCKET_MIB, gradients_mib / BUCKETS) if compiled else LEAST_BUCKET_MIB
    found = buckets(cfg.model, cfg.seq_len, 2**20 * (mib if compiled else FIRST_BUCKET_MIB), 2**20 * mib)
    waiting, sequences = 0.0, total // cfg.seq_len
    if ranks > 1:
        element_bytes = 2 if cfg.world.comm == "bfloat16" else 4
        parameters = count_parameters(cfg.model)
        if cfg.world.sharding == "full":
            micro_steps, width = sequences // ranks // legal[-1], 2 if effective.dtype.value == "bfloat16" else 4
            hidden = 0.0 if hidden_s == 0 else alone.micro_s * legal[-1] / size
            reduced = micro_steps if effective.reduce_every == "micro_step" else 1
            waiting = split_waiting_s(parameters, width, element_bytes, ranks, network, [hidden] * micro_steps, reduced)
        else:
            waiting = waiting_s(found, ranks, network, hidden_s, element_bytes)
        if cfg.world.sharding == "optimizer":  # then each rank sends its updated parameters to all others
            waiting += network.all_reduce_s(ranks, 4 * parameters) / 2
        waiting += network.all_reduce_s(ranks, REPORT_BYTES)
    crowded = max(1.0, ranks * threads / cores) if on_cpu else 1.0
    step_s = crowded * (sequences // ranks * alone.micro_s / size + alone.once_s) + waiting
    one_rank_s = sequences * alone.micro_s / size + alone.once_s
    return {
        "ranks": ranks,
        "nodes": network.nodes(ranks),
        "sequences": sequences // ranks,
        "step_s": step_s,
        "waiting_s": waiting,
        "efficiency": one_rank_s / (ranks * step_s),
    }


def network_of(cfg: Config, asked: Asked, ranks: int) -> Network | str:
    """The links of `ranks`: as measured on this machine, or else as published. Or why they give no prediction."""
    if cfg.train.reduction == "tree":
        return "not predicted for train.reduction=tree, which sends all gradients at the end of a step"
    on_gpus = asked.gpu is not None or (cfg.train.device in ("auto", "cuda") and torch.cuda.is_available())
    backend = cfg.world.backend if cfg.world.backend != "auto" else "nccl" if on_gpus else "gloo"
    per_node = asked.ranks_per_node or (GPUS_PER_NODE if on_gpus else 2 * ranks)  # all rows on this machine
    here = torch.cuda.get_device_name() if asked.gpu is None and on_gpus else ""
    name = next((name for name, gpu in GPUS.items() if gpu is asked.gpu or (here and gpu.name in here)), None)
    between = NETWORKS.get(asked.network or USUAL_NETWORK.get(name or "", OTHER_NETWORK if on_gpus else ""))
    measured = recall(cfg.data, backend, cfg.world.comm, ranks) if asked.gpu is None else None
    if measured is not None:
        several = measured.nodes > 1
        link, has_trees = measured.link, backend == "nccl" and not several
        return Network(link, measured.ranks // measured.nodes if several else per_node, link if several else between,
                       has_trees)  # fmt: skip
    if name is None or backend != "nccl":
        return f"the network is unknown; gptexp bench comm world.size={ranks} measures it"
    return Network(WITHIN_NODE[name], per_node, between, has_trees=True)


def critical_of(cfg: Config, planned: dict[str, Any], directory: Path | None) -> dict[str, Any] | None:
    """The critical batch size that a run or a sweep has measured: by default the run of `branch_from`, if it has.

    Raises `ConfigError` if a given directory has measured none.
    """
    if directory is None:
        if cfg.branch_from is None:
            return None
        directory = Path(run_and_step(cfg.branch_from)[0])
        found = _noise_scale_of(directory)
    elif run_dir.is_run(directory):
        found = _noise_scale_of(directory)
        if found is None:
            raise ConfigError(f"--critical {directory}: this run has no gradient noise scale; train for longer")
    else:
        found = _critical_of_sweep(directory)
    if found is None:
        return None
    passes = planned["total_batch_size"] > found["tokens"]
    micro_batch = planned["micro_batch_size"] * cfg.seq_len
    # With one micro-batch for each rank, this many ranks have a batch of the critical size.
    return {**found, "from": str(directory), "passes": passes, "ranks": max(1, int(found["tokens"] // micro_batch))}


def _noise_scale_of(directory: Path) -> dict[str, Any] | None:
    from gptexp.reporting.noise_scale import at_the_end  # imports scipy, which nothing else here needs
    from gptexp.reporting.records import read_run

    scale = at_the_end(read_run(directory))
    return None if scale is None else {"what": "gradient noise scale", **asdict(scale)}


def _critical_of_sweep(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise ConfigError(f"--critical {directory}: no such directory; give a run or a sweep")
    from gptexp.reporting.analysis import analyse
    from gptexp.reporting.noise_scale import lowest_measured
    from gptexp.reporting.records import find_runs

    runs = find_runs(directory)
    arms = [arm for arm in analyse(directory.name, runs).arms if arm.critical is not None]
    fits = [arm.critical.hyperbola for arm in arms if arm.critical is not None and arm.critical.hyperbola is not None]
    if len(fits) > 1:
        raise ConfigError(f"--critical {directory}: {counted(len(fits), 'arm')} with a critical batch size; give a run")
    if fits:
        return {"what": "critical batch size", "tokens": fits[0].tokens, "low": fits[0].low, "high": fits[0].high}
    measured = lowest_measured(runs)
    found = _noise_scale_of(measured.directory) if measured is not None else None
    if found is None:
        raise ConfigError(
            f"--critical {directory}: no run there has measured a noise scale, and its runs show no critical batch "
            "size; give another run or sweep"
        )
    return found


def lines(planned: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a plan about its ranks: a title and a text."""
    if "unpredicted" in planned:
        yield "ranks", planned["unpredicted"]
    for i, row in enumerate(planned.get("at_ranks", [])):
        nodes = f" on {row['nodes']} nodes" if row["nodes"] > 1 else ""
        yield (
            "" if i else "ranks",
            f"at {row['ranks']:,}{nodes} each has {counted(row['sequences'], 'sequence')} a step: "
            f"{1e3 * row['step_s']:,.3g} ms, of it {row['waiting_s'] / row['step_s']:.0%} waiting for gradients; "
            f"{row['efficiency']:.0%} efficiency",
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
        verdict = "passes" if critical["passes"] else "is within"
        yield (
            "critical size",
            f"the batch of {planned['total_batch_size']:,} tokens {verdict} the measured {critical['what']} of "
            f"{critical['tokens']:,.0f} tokens (95% interval {interval}), which a micro-batch for each rank reaches "
            f"at {counted(critical['ranks'], 'rank')}",
        )
