"""`train.reduction`: the tree against a sum by recursion, and whole runs at world sizes 1, 2 and 4."""

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gptexp.config.compose import compose
from gptexp.distributed.ranks import Rank
from gptexp.distributed.reduction import MeanReduction, Reduction, TreeReduction
from gptexp.process.errors import ConfigError

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


def pairwise(leaves: list[Tensor]) -> Tensor:
    """The sum along a balanced binary tree, by recursion."""
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return pairwise(leaves[:half]) + pairwise(leaves[half:])


def reduced(reduction: Callable[[torch.nn.Module], Reduction], inputs: list[Tensor]) -> Tensor:
    """Gradient of the mean of a linear model's outputs, as `TrainStep` uses the reduction."""
    torch.manual_seed(0)
    model = torch.nn.Linear(257, 1, bias=False)
    reduce = reduction(model)
    for micro_step, x in enumerate(inputs):
        with reduce(micro_step, len(inputs)) as divisor:
            (model(x).mean() / divisor).backward()
    assert model.weight.grad is not None
    return model.weight.grad


@pytest.mark.parametrize("micro_steps", [1, 2, 8, 32])
def test_the_tree_adds_gradients_in_pairs(micro_steps: int) -> None:
    generator = torch.Generator().manual_seed(micro_steps)
    # The gradients differ by orders of magnitude: another order of additions rounds to other bits.
    inputs = [torch.randn(4, 257, generator=generator) * 10.0**i for i in range(micro_steps)]
    inputs = [x / 10.0 ** (micro_steps // 2) for x in inputs]
    tree = reduced(lambda model: TreeReduction(model, Rank()), inputs)
    alone = [reduced(lambda _: MeanReduction(None), [x]) / micro_steps for x in inputs]
    assert torch.equal(tree, pairwise(alone))
    mean = reduced(lambda _: MeanReduction(None), inputs)
    torch.testing.assert_close(tree, mean, rtol=1e-5, atol=1e-5 * float(mean.abs().max()))
    assert torch.equal(tree, mean) == (micro_steps <= 2)  # otherwise the test could not distinguish a tree from a chain


def test_gradients_of_an_abandoned_step_are_discarded() -> None:
    x = torch.ones(2, 257)
    model = torch.nn.Linear(257, 1, bias=False)
    tree = TreeReduction(model, Rank())
    for micro_step, of in ((0, 4), (1, 4), (2, 4), (0, 2), (1, 2)):
        with tree(micro_step, of) as divisor:
            (model(x).mean() / divisor).backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.ones(1, 257))


def contents(directory: Path) -> str:
    """Hash of the weights and the optimizer's state at the end of a run."""
    newest = sorted((directory / "checkpoints").glob("step-*"))[-1]
    files = [(newest / f"{kind}.safetensors").read_bytes() for kind in ("model", "optimizer")]
    return hashlib.sha256(b"".join(files)).hexdigest()


def trained(gptexp: Gptexp, tiny: list[str], directory: Path, reduction: str, world_size: int) -> str:
    """Train with eight micro-batches a step and dropout; the contents of the checkpoint."""
    options = [*tiny, "batch.micro_batch_size=1", "model.dropout=0.1", f"train.reduction={reduction}"]
    if reduction == "tree":
        options = [o for o in options if not o.startswith("world.threads")]
    done = gptexp("train", *options, f"world.size={world_size}", f"hydra.run.dir=w{world_size}")
    assert done.returncode == 0, done.stderr
    return contents(directory / f"w{world_size}")


@pytest.mark.e2e
def test_a_tree_gives_equal_weights_on_one_and_two_ranks(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    assert trained(gptexp, tiny, tmp_path, "tree", 1) == trained(gptexp, tiny, tmp_path, "tree", 2)


@pytest.mark.parametrize(
    "reduction", [pytest.param("tree", marks=pytest.mark.e2e), pytest.param("mean", marks=pytest.mark.slow)]
)
def test_weights_are_independent_of_the_world_size_only_with_the_tree(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, reduction: str
) -> None:
    """On one, two and four ranks. The mean rounds to other bits at each world size."""
    found = {trained(gptexp, tiny, tmp_path, reduction, world_size) for world_size in (1, 2, 4)}
    assert (len(found) == 1) == (reduction == "tree")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["world.size=3", "batch.total_batch_size=96"], "the number of ranks must be a power of two, not 3"),
        (
            ["batch.total_batch_size=96"],
            "micro-batches of a step must be a power of two, not 3; use batch.micro_batch_size=6 or 3",
        ),
        (
            ["batch.micro_batch_size=auto"],
            "needs a number, because its result depends on the size; use batch.micro_batch_size=8 or 4 or 2 or 1",
        ),
        (["world.threads_per_rank=2"], "needs one thread per rank"),
    ],
)
def test_a_config_that_the_tree_does_not_support_is_refused(tiny: list[str], overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose([*tiny, "train.reduction=tree", *overrides])
    assert line in str(refused.value)


def test_a_refused_tree_creates_no_directory(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    refused = gptexp("train", *tiny, "train.reduction=tree", "world.threads_per_rank=2", "hydra.run.dir=out")
    assert refused.returncode == 2
    assert "needs one thread per rank" in refused.stderr
    assert not (tmp_path / "out").exists()
