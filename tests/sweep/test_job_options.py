"""What a cell's job asks SLURM for, and the refusal of options that do not fit."""

import re
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from gptexp.config.compose import compose
from gptexp.model.gpus import largest_of
from gptexp.process.errors import ConfigError
from gptexp.sweep.job_options import check_options, gpu_kinds, gpus_of_node, shape, spread

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

SLURM = "hydra/launcher=submitit_slurm"


@pytest.mark.parametrize(
    ("ranks", "nodes", "tasks", "gpus", "expected"),
    [
        (1, None, None, None, (1, 1)),
        (8, None, None, None, (1, 1)),  # one task, which starts the eight ranks
        (8, 1, 1, None, (1, 1)),  # the defaults of hydra-submitit-launcher
        (8, 1, 8, None, (1, 8)),
        (8, None, 8, None, (1, 8)),
        (2, None, None, 8, (1, 1)),
        (16, None, None, 8, (2, 8)),
        (12, None, None, 8, (2, 6)),
        (6, None, None, 4, (2, 3)),
        (16, 4, None, 8, (4, 4)),
        (16, 4, None, None, (4, 4)),
        (16, None, 4, None, (4, 4)),
        (16, 2, 8, 8, (2, 8)),
    ],
)
def test_the_ranks_of_a_cell_are_spread_over_nodes(
    ranks: int, nodes: int | None, tasks: int | None, gpus: int | None, expected: tuple[int, int]
) -> None:
    config = compose(["model=nano", f"world.size={ranks}", "batch.total_batch_size=196608"])
    assert spread(config, nodes, tasks, gpus) == expected


def test_cells_on_a_cpu_have_one_node_unless_more_are_given() -> None:
    config = compose(["model=nano", "world.size=16", "train.device=cpu", "batch.micro_batch_size=1"])
    assert spread(config, None, None, 8) == (1, 1)
    assert spread(config, 2, None, 4) == (2, 8)


@pytest.mark.parametrize(
    ("ranks", "nodes", "tasks", "gpus", "why"),
    [
        (12, 2, 8, 8, ", hydra.launcher.nodes=2, hydra.launcher.tasks_per_node=8, hydra.launcher.gpus_per_node=8: "
         "nodes × tasks_per_node = 2 × 8 = 16 ranks; use another world.size, or nodes × tasks_per_node = 2 × 6, 3 × 4, "
         "4 × 3, 6 × 2, 12 × 1"),
        (16, 2, 1, None, ", hydra.launcher.nodes=2, hydra.launcher.tasks_per_node=1: nodes × tasks_per_node = 2 × 1 = "
         "2 ranks; use another world.size, or nodes × tasks_per_node = 1 × 16, 2 × 8, 4 × 4, 8 × 2, 16 × 1"),
        (16, 3, None, None, ", hydra.launcher.nodes=3: 3 nodes cannot have the same number of ranks each; use"),
        (16, 1, 1, 8, ", hydra.launcher.nodes=1, hydra.launcher.tasks_per_node=1, hydra.launcher.gpus_per_node=8: 16 "
         "ranks on each node, which has 8 GPUs; use"),
        (16, 1, 16, 8, ", hydra.launcher.nodes=1, hydra.launcher.tasks_per_node=16, hydra.launcher.gpus_per_node=8: 16 "
         "ranks on each node, which has 8 GPUs; use"),
        (16, None, None, 6, ", hydra.launcher.gpus_per_node=6: 3 nodes cannot have the same number of ranks each; use "
         "another world.size, or nodes × tasks_per_node = 4 × 4, 8 × 2, 16 × 1"),
        (1, 2, None, None, ", hydra.launcher.nodes=2: 2 nodes cannot have the same number of ranks each; use another "
         "world.size, or nodes × tasks_per_node = 1 × 1"),
    ],
)  # fmt: skip
def test_a_world_size_that_nodes_and_tasks_cannot_give_is_refused_with_those_that_can(
    ranks: int, nodes: int | None, tasks: int | None, gpus: int | None, why: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"world.size={ranks}{why}")):
        spread(_of_ranks(ranks), nodes, tasks, gpus)


def _of_ranks(ranks: int, *overrides: str) -> Any:
    return compose(["model=nano", f"world.size={ranks}", "batch.total_batch_size=196608", *overrides])


@pytest.mark.parametrize(
    ("cluster", "ranks", "options", "line"),
    [
        ("slurm", 8, {"gpus_per_task": 1}, "hydra.launcher.gpus_per_task=1: the one task of a cell starts its 8 ranks, "
         "which use one GPU each; use tasks_per_node=8 with gpus_per_task=1, or leave both out"),
        ("slurm", 2, {"nodes": 2, "gpus_per_task": 2}, "hydra.launcher.gpus_per_task=2: each of the 2 tasks is a rank, "
         "which uses one GPU; use 1"),
        ("slurm", 2, {"nodes": 2, "use_srun": False}, "hydra.launcher.use_srun=false: srun starts the ranks where each "
         "is a task; leave it out, or use one node and tasks_per_node=1"),
        ("local", 2, {"tasks_per_node": 2}, "hydra.launcher.tasks_per_node=2: with submitit_local a cell is one task; "
         "leave it out"),
        ("local", 2, {"nodes": 2}, "hydra.launcher.nodes=2: with submitit_local a cell is one task; leave it out"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_the_cells_are_refused(
    cluster: str, ranks: int, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        shape(cluster, options, _of_ranks(ranks))
    assert str(refusal.value) == line


def test_options_that_fit_the_cells_pass() -> None:
    assert shape("slurm", {"gpus_per_task": 8}, _of_ranks(8)) == (1, 1)
    assert shape("slurm", {"gpus_per_task": 1}, _of_ranks(1)) == (1, 1)
    assert shape("slurm", {"tasks_per_node": 8, "gpus_per_task": 1}, _of_ranks(8)) == (1, 8)
    assert shape("local", {"gpus_per_node": 2}, _of_ranks(4)) == (1, 1)


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"timeout_min": "soon"}, ["timeout_min=soon: must be a whole number, 1 or above"]),
        ({"timeout_min": 0}, ["timeout_min=0: must be a whole number, 1 or above"]),
        ({"nodes": "two", "cpus_per_task": 0},
         ["nodes=two: must be a whole number, 1 or above", "cpus_per_task=0: must be a whole number, 1 or above"]),
        ({"nodes": True}, ["nodes=True: must be a whole number, 1 or above"]),
        ({"gpus_per_node": -1}, ["gpus_per_node=-1: must be a whole number, 0 or above"]),
        ({"gpus_per_task": "two"}, ["gpus_per_task=two: must be a whole number, 1 or above"]),
        ({"signal_delay_s": "x"}, ["signal_delay_s=x: must be a whole number, 1 or above"]),
        ({"timeout_min": 2, "signal_delay_s": 120},
         ["signal_delay_s=120: a run would be stopped at its start, because timeout_min=2 are 120 s; raise "
          "timeout_min, or use at most 60"]),
        ({"mem_gb": 0}, ["mem_gb=0: must be a number above 0"]),
        ({"srun_args": "--label"}, ["srun_args=--label: must be a list of options of srun, such as ['--label']"]),
        ({"setup": "module load cuda"},
         ["setup=module load cuda: must be a list of shell commands, such as ['module load cuda']"]),
        ({"additional_parameters": "reservation"},
         ["additional_parameters=reservation: must be a mapping of options of sbatch, such as {reservation: lab}"]),
        ({"additional_parameters": {"requeue": False}},
         ["additional_parameters={'requeue': False}: sbatch has no requeue=false; leave it out, or use no-requeue: "
          "true"]),
        ({"use_srun": "no"}, ["use_srun=no: must be true or false"]),
        ({"array_parallelism": 4},
         ["array_parallelism=4: each cell is a job of its own; use sweep.parallel=4"]),
        ({"submitit_folder": "jobs"}, ["submitit_folder=jobs: needs %j, the number of the job"]),
    ],
)  # fmt: skip
def test_an_option_with_a_wrong_type_or_value_is_refused(options: dict[str, Any], lines: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_options("slurm", options)
    assert refusal.value.problems == [f"hydra.launcher.{line}" for line in lines]


def test_each_option_of_the_files_has_a_legal_value() -> None:
    for name in ("slurm", "local"):
        file = yaml.safe_load((ROOT / "conf" / "hydra" / "launcher" / f"submitit_{name}.yaml").read_text())
        check_options(name, {key: value for key, value in file.items() if value is not None})
    check_options("slurm", {"mem_gb": 0.5, "srun_args": ["--label"], "additional_parameters": {"no-requeue": True}})


@pytest.mark.parametrize(
    ("ranks", "options", "nodes", "gpus"),
    [
        (1, {}, 1, 1),
        (2, {"gpus_per_node": 8}, 1, 2),  # how many a node has, not how many each cell gets
        (16, {"gpus_per_node": 8}, 2, 8),
        (2, {"gpus_per_node": 0}, 1, 0),
        (2, {"gres": "gpu:h100:2"}, 1, None),
        (2, {"gpus_per_task": 2}, 1, None),
    ],
)
def test_a_job_requests_a_gpu_for_each_rank(ranks: int, options: dict[str, Any], nodes: int, gpus: int | None) -> None:
    assert gpus_of_node(options, _of_ranks(ranks), nodes) == gpus
    assert gpus_of_node(options, _of_ranks(ranks, "train.device=cpu"), nodes) == (None if gpus is None else 0)


def test_the_kinds_of_gpu_are_those_of_gres_else_of_the_partition(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """sweep/test_jobs.py asks a real SLURM."""
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(
        '#!/bin/sh\ncase "$*" in\n*--partition=old) echo "old gpu:8" ;;\n'
        '*) echo "debug* gpu:h100:8(S:0-1),nvme:1"; echo "debug* gpu:a100-40g:4"; echo "other gpu:h200:8" ;;\nesac\n'
    )
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpu_kinds({}) == {"h100", "a100-40g"}
    assert largest_of(gpu_kinds({"partition": "old"})) is None  # not typed
    assert gpu_kinds({"gres": "gpu:l40s:8"}) == {"l40s"}
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_kinds({}) == set()


@pytest.mark.skipif(find_spec("submitit") is None, reason="no submitit; pip install 'gptexp[slurm]'")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["hydra/launcher=submitit_local", "sweep.parallel=2"], "submitit_local runs one cell at a time"),
        ([SLURM, "hydra.launcher.setup=module load cuda"], "hydra.launcher.setup=module load cuda: must be a list"),
        ([SLURM, "+hydra.launcher.nodelists=n1"], "hydra.launcher: "),
        ([SLURM, "hydra.launcher.gres=gpu:h100:8", "train.device=cuda", "model.n_layer=24", "model.n_embd=8192",
          "world.size=8", "batch.total_batch_size=256"],
         "GiB, and the H100 has 74.5 GiB; use world.sharding=full, "),
    ],
)  # fmt: skip
def test_what_jobs_cannot_do_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, gptexp: Gptexp, tiny: list[str], tmp_path: Path, options: list[str], why: str
) -> None:
    srun = tmp_path / "bin" / "srun"  # submitit looks for it, and does not call it
    srun.parent.mkdir()
    srun.write_text("")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(srun.parent), prepend=":")
    done = gptexp("train", "-m", *tiny, *options, "optim.lr=1e-3,2e-3")
    assert done.returncode == 2, done.stderr
    assert why in done.stderr
    assert len(done.stderr.splitlines()) <= 2  # a line may say that the text was tokenised
    assert not [*(tmp_path / "outputs").rglob("config.yaml")]


def test_a_plan_refuses_options_that_do_not_fit_its_cells(gptexp: Gptexp, tiny: list[str]) -> None:
    """It needs neither submitit nor SLURM."""
    refused = gptexp("plan", "-m", *tiny, SLURM, "hydra.launcher.nodes=2", "world.size=3", "batch.micro_batch_size=1",
                     "batch.total_batch_size=96", "optim.lr=1e-3,2e-3")  # fmt: skip
    assert refused.returncode == 2
    assert "world.size=3, hydra.launcher.nodes=2: 2 nodes cannot have the same number of ranks each" in refused.stderr
