"""What the job of a cell asks SLURM for: its nodes, tasks and GPUs, and the rules of the launcher's options.

The options are those of hydra-submitit-launcher and submitit. `options` holds the ones that are not null.
"""

import math
import re
import subprocess
from collections.abc import Mapping
from typing import Any

from gptexp.config.schema import Config
from gptexp.process.errors import ConfigError
from gptexp.process.words import counted

Options = Mapping[str, Any]

# Whole numbers, and the least value of each. submitit checks few types and no values.
LEAST = {
    "timeout_min": 1, "signal_delay_s": 1, "max_num_timeout": 0, "nodes": 1, "tasks_per_node": 1, "gpus_per_node": 0,
    "gpus_per_task": 1, "cpus_per_task": 1, "cpus_per_gpu": 1,
}  # fmt: skip
# Options of other types, and how to write them.
TYPES: dict[str, tuple[type, str]] = {
    "setup": (list, "a list of shell commands, such as ['module load cuda']"),
    "teardown": (list, "a list of shell commands, such as ['echo done']"),
    "srun_args": (list, "a list of options of srun, such as ['--label']"),
    "additional_parameters": (dict, "a mapping of options of sbatch, such as {reservation: lab}"),
    "use_srun": (bool, "true or false"),
    "stderr_to_stdout": (bool, "true or false"),
}


def check_options(cluster: str, options: Options) -> None:
    """Raise `ConfigError` for options with a wrong type or value."""
    problems = []

    def refuse(key: str, rule: str) -> None:
        problems.append(f"hydra.launcher.{key}={options[key]}: {rule}")

    for key in [key for key in LEAST if key in options]:
        if type(options[key]) is not int or options[key] < LEAST[key]:
            refuse(key, f"must be a whole number, {LEAST[key]} or above")
    for key in [key for key in TYPES if key in options]:
        if not isinstance(options[key], TYPES[key][0]):
            refuse(key, f"must be {TYPES[key][1]}")
    if "mem_gb" in options and (type(options["mem_gb"]) not in (int, float) or options["mem_gb"] <= 0):
        refuse("mem_gb", "must be a number above 0")
    if "array_parallelism" in options:
        refuse("array_parallelism", f"each cell is a job of its own; use sweep.parallel={options['array_parallelism']}")
    if "%j" not in str(options.get("submitit_folder", "%j")):
        refuse("submitit_folder", "needs %j, the number of the job")
    if problems:
        raise ConfigError(problems)
    for key, value in options.get("additional_parameters", {}).items():
        if value is False:
            refuse("additional_parameters", f"sbatch has no {key}=false; leave it out, or use no-{key}: true")
    limit_s, delay_s = 60 * options.get("timeout_min", math.inf), options.get("signal_delay_s", 0)
    if cluster == "slurm" and delay_s >= limit_s:
        refuse("signal_delay_s", f"a run would be stopped at its start, because timeout_min={options['timeout_min']} "
               f"are {limit_s} s; raise timeout_min, or use at most {limit_s // 2}")  # fmt: skip
    if problems:
        raise ConfigError(problems)


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
    """`shape` by these options alone; None: not given."""
    options = {"nodes": nodes, "tasks_per_node": tasks_per_node, "gpus_per_node": gpus_per_node}
    given = "".join(f", hydra.launcher.{key}={value}" for key, value in options.items() if value is not None)
    ranks = config.world.size or 1
    most = gpus_per_node if gpus_per_node and uses_gpus(config) else ranks  # on a node
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
    """The kinds of GPU that jobs may get, as SLURM calls them: that of `gres`, else those of the partition."""
    partition = options.get("partition")
    if (offered := options.get("gres")) is None:
        command = ["sinfo", "--noheader", "--format=%P %G", *([f"--partition={partition}"] if partition else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError:
            return set()
        # A star marks the partition of jobs that name none.
        offered = "\n".join(line for line in done.stdout.splitlines() if partition or "* " in line)
    return set(re.findall(r"\bgpu:([^:,( ]+)", str(offered)))
