"""What a cell's job asks SLURM for, and the refusal of options that do not fit."""

import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from gptexp.config.compose import compose
from gptexp.config.schema import Config
from gptexp.model.gpus import largest_of
from gptexp.process.errors import ConfigError
from gptexp.sweep.job_options import RULES, check_options, gpu_kinds, gpus_of_node, shape, spread

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

SLURM = "hydra/launcher=submitit_slurm"


# Ranks of a cell; nodes, tasks per node and GPUs per node as given; nodes and tasks of its job.
@pytest.mark.parametrize(
    ("ranks", "nodes", "tasks", "gpus", "expected"),
    [
        (1, None, None, None, (1, 1)),
        (8, None, None, None, (1, 1)),  # one task, which starts the eight ranks
        (8, 1, 1, None, (1, 1)),  # the defaults of hydra-submitit-launcher
        (8, 1, 8, None, (1, 8)),
        (2, None, None, 8, (1, 1)),
        (16, None, None, 8, (2, 8)),
        (12, None, None, 8, (2, 6)),
        (16, 4, None, 8, (4, 4)),
        (16, None, 4, None, (4, 4)),
        (16, 2, 8, 8, (2, 8)),
    ],
)
def test_the_ranks_of_a_cell_are_spread_over_nodes(
    ranks: int, nodes: int | None, tasks: int | None, gpus: int | None, expected: tuple[int, int]
) -> None:
    assert spread(of_ranks(ranks), nodes, tasks, gpus) == expected


def test_cells_on_a_cpu_have_one_node_unless_more_are_given() -> None:
    config = of_ranks(16, "train.device=cpu")
    assert spread(config, None, None, 8) == (1, 1)
    assert spread(config, 2, None, 4) == (2, 8)


@pytest.mark.parametrize(
    ("ranks", "nodes", "tasks", "gpus", "legal"),
    [
        (12, 2, 8, 8, "2 × 6, 3 × 4, 4 × 3, 6 × 2, 12 × 1"),
        (16, 2, 1, None, "1 × 16, 2 × 8, 4 × 4, 8 × 2, 16 × 1"),
        (16, 3, None, None, "1 × 16, 2 × 8, 4 × 4, 8 × 2, 16 × 1"),
        (16, 1, 1, 8, "2 × 8, 4 × 4, 8 × 2, 16 × 1"),  # more ranks than a node has GPUs
        (16, None, None, 6, "4 × 4, 8 × 2, 16 × 1"),  # three nodes cannot have the same number of ranks each
        (1, 2, None, None, "1 × 1"),
    ],
)
def test_a_world_size_that_nodes_and_tasks_cannot_give_is_refused_with_those_that_can(
    ranks: int, nodes: int | None, tasks: int | None, gpus: int | None, legal: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        spread(of_ranks(ranks), nodes, tasks, gpus)
    options = {"nodes": nodes, "tasks_per_node": tasks, "gpus_per_node": gpus}
    given = "".join(f", hydra.launcher.{key}={value}" for key, value in options.items() if value is not None)
    assert str(refusal.value).startswith(f"world.size={ranks}{given}: ")
    assert str(refusal.value).endswith(f" nodes × tasks_per_node = {legal}")


def of_ranks(ranks: int, *overrides: str) -> Config:
    more = ["batch.total_batch_size=196608", "batch.micro_batch_size=1"]
    return compose(["model=nano", f"world.size={ranks}", *more, *overrides])


@pytest.mark.parametrize(
    ("cluster", "ranks", "options", "key"),
    [
        ("slurm", 8, {"gpus_per_task": 1}, "gpus_per_task"),  # the one task of a cell starts its ranks
        ("slurm", 2, {"nodes": 2, "gpus_per_task": 2}, "gpus_per_task"),
        ("slurm", 2, {"nodes": 2, "use_srun": False}, "use_srun"),
        ("local", 2, {"tasks_per_node": 2}, "tasks_per_node"),
        ("local", 2, {"nodes": 2}, "nodes"),
    ],
)
def test_options_that_do_not_fit_the_cells_are_refused(
    cluster: str, ranks: int, options: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?i)^hydra\.launcher\.{key}={options[key]}: .+; "):
        shape(cluster, options, of_ranks(ranks))


def test_options_that_fit_the_cells_pass() -> None:
    assert shape("slurm", {"gpus_per_task": 8}, of_ranks(8)) == (1, 1)
    assert shape("slurm", {"gpus_per_task": 1}, of_ranks(1)) == (1, 1)
    assert shape("slurm", {"tasks_per_node": 8, "gpus_per_task": 1}, of_ranks(8)) == (1, 8)
    assert shape("local", {"gpus_per_node": 2}, of_ranks(4)) == (1, 1)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        *[({"timeout_min": wrong}, ["timeout_min"]) for wrong in ("soon", 0, True)],
        ({"nodes": "two", "cpus_per_task": 0}, ["nodes", "cpus_per_task"]),
        ({"gpus_per_node": -1}, ["gpus_per_node"]),
        ({"timeout_min": 2, "signal_delay_s": 120}, ["signal_delay_s"]),  # a run would be stopped at its start
        ({"mem_gb": 0}, ["mem_gb"]),
        ({"srun_args": "--label"}, ["srun_args"]),
        ({"additional_parameters": "reservation"}, ["additional_parameters"]),
        ({"additional_parameters": {"requeue": False}}, ["additional_parameters"]),
        ({"use_srun": "no"}, ["use_srun"]),
        ({"array_parallelism": 4}, ["array_parallelism"]),
        ({"submitit_folder": "jobs"}, ["submitit_folder"]),
    ],
)
def test_an_option_with_a_wrong_type_or_value_is_refused(options: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_options("slurm", options)
    shown = [f"hydra.launcher.{key}={options[key]}: " for key in keys]
    assert [line[: len(start)] for line, start in zip(refusal.value.problems, shown, strict=True)] == shown


def test_each_option_of_the_files_has_a_legal_value() -> None:
    for name in ("slurm", "local"):
        file = yaml.safe_load((ROOT / "conf" / "hydra" / "launcher" / f"submitit_{name}.yaml").read_text())
        check_options(name, {key: value for key, value in file.items() if value is not None})
        assert RULES.keys() <= file.keys() or name == "local"
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
    assert gpus_of_node(options, of_ranks(ranks), nodes) == gpus
    assert gpus_of_node(options, of_ranks(ranks, "train.device=cpu"), nodes) == (None if gpus is None else 0)


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
