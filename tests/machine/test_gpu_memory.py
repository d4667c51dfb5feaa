"""Whether runs fit the memory of a GPU, by the name that a cluster gives it."""

import re
from dataclasses import replace

import pytest

from gptexp.config.compose import compose
from gptexp.machine.gpu_memory import refuse_too_large
from gptexp.model.gpus import GPUS, gpu_of, largest_of
from gptexp.process.errors import ConfigError

LARGE = ("model=gpt3_13b", "batch=gpt3_2m", "batch.micro_batch_size=1", "world.size=64", "train.device=cuda")


@pytest.mark.parametrize(
    ("kind", "name", "gigabytes"),
    [
        ("h100", "H100", 80),
        ("A100-40G", "A100", 40),
        ("nvidia_a100-sxm4-40gb", "A100", 40),
        ("NVIDIA H100 NVL 94GB", "H100", 94),
        ("nvidia_h100_1g.10gb", "H100", 10),  # a tenth of one
        ("nvidia_geforce_rtx_4090", "RTX 4090", 24),
        ("h100_nvl", "H100", None),
    ],
)
def test_a_gpu_is_known_by_the_name_that_a_cluster_gives_it(kind: str, name: str, gigabytes: int | None) -> None:
    gpu = gpu_of(kind)
    assert gpu is not None
    assert (gpu.name, gpu.memory_bytes) == (name, None if gigabytes is None else gigabytes * 10**9)


@pytest.mark.parametrize("kind", ["gh200", "gb200", "8", "tesla_v100", ""])
def test_other_gpus_are_unknown(kind: str) -> None:
    assert gpu_of(kind) is None
    assert largest_of(["h100", kind]) is None


def test_the_largest_of_several_gpus_decides() -> None:
    assert largest_of(["a100", "h200", "l40s"]) == GPUS["h200"]
    assert largest_of([]) is None


def test_a_model_that_does_not_fit_is_refused_with_the_sharding_that_does() -> None:
    few = [*LARGE, "world.size=2"]
    with pytest.raises(ConfigError) as error:
        refuse_too_large([compose(LARGE), compose([*LARGE, "optim.lr=1e-3"]), compose(few)], GPUS["h100"])
    at_64, at_2 = error.value.problems  # the learning rate changes nothing
    assert at_64.startswith("world.size=64, 1 × 2048: a rank needs about 2")
    assert " GiB, and the H100 has 74.5 GiB; use world.sharding=full, train." in at_64
    assert "on more ranks" not in at_64
    assert at_2.startswith("world.size=2, 1 × 2048: a rank needs about 2")
    assert " GiB, and the H100 has 74.5 GiB; use world.sharding=full on more ranks, train." in at_2


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ([], ["train.activation_checkpointing=true"]),
        (["train.activation_checkpointing=true"], []),
        (
            ["train.activation_checkpointing=true", "train.activation_checkpointing_every=4"],
            ["train.activation_checkpointing_every=1"],
        ),
        (["batch.micro_batch_size=2"], ["batch.micro_batch_size=auto", "train.activation_checkpointing=true"]),
    ],
)
def test_only_what_may_help_is_advised(options: list[str], advice: list[str]) -> None:
    assert advice_for(options) == ", ".join(["world.sharding=full", *advice, "or a smaller model or batch.seq_len"])


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["world.size=1", "optim=muon"], "train.activation_checkpointing=true, or "),
        (["world.size=1", "optim=soap"], "world.sharding=optimizer on more ranks, train."),
        (["world.size=2", "train.eval_tasks=[hellaswag]"], "world.sharding=optimizer on more ranks, train."),
        (["train.reduction=tree", "batch.micro_batch_size=2"], "a smaller batch.micro_batch_size, train."),
        (["train.reduction=tree", "train.activation_checkpointing=true"], "a smaller model or batch.seq_len"),
        (
            ["world.size=2", "world.sharding=full", "world.reduce_every=step"],
            "world.sharding=full on more ranks, world.r",
        ),
    ],
)
def test_what_the_run_cannot_have_is_not_advised(options: list[str], advice: str) -> None:
    assert advice_for(options).startswith(advice)


def advice_for(options: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        refuse_too_large([compose([*LARGE, *options])], GPUS["h100"])
    return error.value.problems[0].partition("; use ")[2]


def test_runs_that_fit_or_use_no_gpu_pass() -> None:
    large = compose(LARGE)
    refuse_too_large([compose([*LARGE, "world.sharding=full"])], GPUS["h100"])
    refuse_too_large([replace(large, train=replace(large.train, device="cpu"))], GPUS["h100"])
    refuse_too_large([large], replace(GPUS["h100"], memory_bytes=None))


def test_a_run_that_may_fit_by_the_error_of_the_estimate_passes() -> None:
    """A GPU of 80 GB may have 80 GiB."""
    config = compose(LARGE)
    with pytest.raises(ConfigError) as error:
        refuse_too_large([config], GPUS["h100"])
    found = re.search(r"needs about ([\d.]+) GiB", error.value.problems[0])
    assert found is not None
    needed = float(found[1])  # GiB
    refuse_too_large([config], replace(GPUS["h100"], memory_bytes=int(needed / 1.09 * 10**9)))
    with pytest.raises(ConfigError):
        refuse_too_large([config], replace(GPUS["h100"], memory_bytes=int(needed / 1.12 * 10**9)))
