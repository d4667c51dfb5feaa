"""What the job of a cell asks SLURM for: its nodes, tasks and GPUs, and the rules of the launcher's options.

The options are those of hydra-submitit-launcher and submitit. `options` holds the ones that are not null.
"""

import math
import re
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from gptexp.config.schema import Config
from gptexp.process.errors import ConfigError
from gptexp.process.words import counted

Options = Mapping[str, Any]

Rule = tuple[Callable[[Any], bool], str]  # whether a value is legal, and the rule in words


def _whole(least: int) -> Rule:
    return lambda value: type(value) is int and value >= least, f"must be a whole number, {least} or above"


def _of_type(kind: type, words: str) -> Rule:
    return lambda value: isinstance(value, kind), f"must be {words}"


# submitit checks few types and no values.
RULES: dict[str, Rule] = {
    "timeout_min": _whole(1),
    "signal_delay_s": _whole(1),
    "max_num_timeout": _whole(0),
    "nodes": _whole(1),
    "tasks_per_node": _whole(1),
    "gpus_per_node": _whole(0),
    "gpus_per_task": _whole(1),
    "cpus_per_task": _whole(1),
    "cpus_per_gpu": _whole(1),
    "mem_gb": (lambda value: type(value) in (int, float) and value > 0, "must be a number above 0"),
    "setup": _of_type(list, "a list of shell commands, such as ['module load cuda']"),
    "teardown": _of_type(list, "a list of shell commands, such as ['echo done']"),
    "srun_args": _of_type(list, "a list of options of srun, such as ['--label']"),
    "additional_parameters": _of_type(dict, "a mapping of options of sbatch, such as {reservation: lab}"),
    "use_srun": _of_type(bool, "true or false"),
    "stderr_to_stdout": _of_type(bool, "true or false"),
    "array_parallelism": (lambda _: False, "each cell is a job of its own; use sweep.parallel in its place"),
    "submitit_folder": (lambda value: "%j" in str(value), "needs %j, the number of the job"),
}


def check_options(cluster: str, options: Options) -> None:
    """Raise `ConfigError` for options with a wrong type or value."""
    problems = [(key, rule) for key, (is_legal, rule) in RULES.items() if key in options and not is_legal(options[key])]
    if not problems:
        problems += [
            ("additional_parameters", f"sbatch has no {key}=false; leave it out, or use no-{key}: true")
            for key, value in options.get("additional_parameters", {}).items()
            if value is False
        ]
        limit_s = 60 * options.get("timeout_min", math.inf)
        if cluster == "slurm" and options.get("signal_delay_s", 0) >= limit_s:
            rule = (
                f"a run would be stopped at its start, because timeout_min={options['timeout_min']} are {limit_s} s; "
                f"raise timeout_min, or use at most {limit_s // 2}"
            )
            problems.append(("signal_delay_s", rule))
    if problems:
        raise ConfigError([f"hydra.launcher.{key}={options[key]}: {rule}" for key, rule in problems])


def shape(cluster: str, options: Options, config: Config) -> tuple[int, int]:
    """The number of nodes of a cell's job, and of tasks on each. Raises `ConfigError` for options that do not fit it.

    On several nodes, or if a node has several tasks, each task is a rank. A single task starts all ranks of the cell.
    """
    ranks = config.world.size or 1
    if cluster == "local":
        for key in ("nodes", "tasks_per_node"):
            if options.get(key, 1) != 1:
                raise ConfigError(
                    f"hydra.launcher.{key}={options[key]}: with submitit_local a cell is one task; leave it out"
                )
        return 1, 1
    nodes, tasks = spread(config, *map(options.get, ("nodes", "tasks_per_node", "gpus_per_node")))
    gpus = options.get("gpus_per_task")
    if nodes * tasks == 1:
        if gpus is not None and gpus != ranks:
            raise ConfigError(
                f"hydra.launcher.gpus_per_task={gpus}: the one task of a cell starts its {counted(ranks, 'rank')}, "
                f"which use one GPU each; use tasks_per_node={ranks} with gpus_per_task=1, or leave both out"
            )
    elif gpus not in (None, 1):
        raise ConfigError(
            f"hydra.launcher.gpus_per_task={gpus}: each of the {nodes * tasks} tasks is a rank, which uses one GPU; "
            "use 1"
        )
    elif not options.get("use_srun", True):
        raise ConfigError(
            "hydra.launcher.use_srun=false: srun starts the ranks where each is a task; leave it out, or use one node "
            "and tasks_per_node=1"
        )
    return nodes, tasks


def spread(config: Config, nodes: int | None, tasks_per_node: int | None, gpus_per_node: int | None) -> tuple[int, int]:
    """`shape` by these three options alone; None: not given."""
    options = {"nodes": nodes, "tasks_per_node": tasks_per_node, "gpus_per_node": gpus_per_node}
    given = "".join(f", hydra.launcher.{key}={value}" for key, value in options.items() if value is not None)
    ranks = config.world.size or 1
    most = gpus_per_node if gpus_per_node and uses_gpus(config) else ranks  # most ranks on a node
    if nodes is None:
        on_each = tasks_per_node if tasks_per_node is not None and tasks_per_node > 1 else most
        nodes = math.ceil(ranks / on_each)
    tasks = tasks_per_node if tasks_per_node is not None else 1 if nodes == 1 else ranks // nodes
    if (nodes, tasks) == (1, 1) or nodes * tasks == ranks:
        if ranks <= nodes * most:
            return nodes, tasks
        problem = f"{counted(ranks // nodes, 'rank')} on each node, which has {counted(most, 'GPU')}"
    elif tasks_per_node is None:
        problem = f"{counted(nodes, 'node')} cannot have the same number of ranks each"
    else:
        problem = f"nodes × tasks_per_node = {nodes} × {tasks} = {nodes * tasks} ranks"
    legal = [f"{ranks // n} × {n}" for n in range(min(most, ranks), 0, -1) if ranks % n == 0]
    raise ConfigError(
        f"world.size={ranks}{given}: {problem}; use another world.size, or nodes × tasks_per_node = {', '.join(legal)}"
    )


def uses_gpus(config: Config) -> bool:
    return config.train.device in ("auto", "cuda")


def gpus_of_node(options: Options, config: Config, nodes: int) -> int | None:
    """GPUs of a job on each node, one for each rank; None if other options ask for them."""
    if {"gpus_per_task", "gres"} & options.keys():
        return None
    needless = not uses_gpus(config) or options.get("gpus_per_node") == 0
    return 0 if needless else (config.world.size or 1) // nodes


def gpu_kinds(options: Options) -> set[str]:
    """The kinds of GPU that jobs may get, as SLURM calls them: the kind in `gres`, else the partition's kinds."""
    partition = options.get("partition")
    if (offered := options.get("gres")) is None:
        command = ["sinfo", "--noheader", "--format=%P %G", *([f"--partition={partition}"] if partition else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError:
            return set()
        # A star marks the default partition, that of jobs that name none.
        offered = "\n".join(line for line in done.stdout.splitlines() if partition or "* " in line)
    return set(re.findall(r"\bgpu:([^:,( ]+)", str(offered)))
