"""`train.reduction`: the tree against a brute-force one, and whole runs at world sizes 1, 2 and 4."""

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gptexp.distributed import MeanReduction, Rank, Reduction, TreeReduction

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


def pairwise(leaves: list[Tensor]) -> Tensor:
    """The sum along a binary tree, by recursion from its root."""
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return pairwise(leaves[:half]) + pairwise(leaves[half:])


def reduced(reduction: Callable[[torch.nn.Module], Reduction], inputs: list[Tensor]) -> Tensor:
    """Gradient of the mean of a linear model's outputs, through the protocol that `train_step` uses."""
    torch.manual_seed(0)
    model = torch.nn.Linear(257, 1, bias=False)
    reduce = reduction(model)
    for micro_step, x in enumerate(inputs):
        with reduce(micro_step, len(inputs)) as divisor:
            (model(x).mean() / divisor).backward()
    assert model.weight.grad is not None
    return model.weight.grad


@pytest.mark.parametrize("micro_steps", [1, 2, 8, 32])
def test_the_tree_adds_up_pairs(micro_steps: int) -> None:
    generator = torch.Generator().manual_seed(micro_steps)
    # Sizes that differ by orders of magnitude: another order of additions rounds to other bits.
    inputs = [torch.randn(4, 257, generator=generator) * 10.0**i for i in range(micro_steps)]
    inputs = [x / 10.0 ** (micro_steps // 2) for x in inputs]
    tree = reduced(lambda model: TreeReduction(model, Rank()), inputs)
    alone = [reduced(lambda _: MeanReduction(None), [x]) / micro_steps for x in inputs]
    assert torch.equal(tree, pairwise(alone))
    mean = reduced(lambda _: MeanReduction(None), inputs)
    torch.testing.assert_close(tree, mean, rtol=1e-5, atol=1e-5 * float(mean.abs().max()))
    assert torch.equal(tree, mean) == (micro_steps <= 2)  # or the test could not tell a tree from a chain


def test_gradients_of_a_step_that_was_given_up_do_not_count() -> None:
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
    return hashlib.sha256((newest / "model.safetensors").read_bytes() + (newest / "train.pt").read_bytes()).hexdigest()


@pytest.mark.parametrize("reduction", ["tree", "mean"])
def test_weights_do_not_depend_on_the_world_size(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, reduction: str
) -> None:
    """Eight micro-batches a step on one, two and four ranks, with dropout; a mean rounds to other bits."""
    options = [*tiny, "batch.micro_batch_size=1", "model.dropout=0.1", f"train.reduction={reduction}"]
    options = [o for o in options if not o.startswith("world.threads")]
    found = {}
    for world_size in (1, 2, 4):
        threads = [] if reduction == "tree" else ["world.threads_per_rank=1"]
        done = gptexp("train", *options, *threads, f"world.size={world_size}", f"hydra.run.dir=w{world_size}")
        assert done.returncode == 0, done.stderr
        found[world_size] = contents(tmp_path / f"w{world_size}")
    assert (len(set(found.values())) == 1) == (reduction == "tree"), found


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["world.size=3", "batch.total_batch_size=96"], "needs a power of two, not 3"),
        (["batch.total_batch_size=96"], "needs a power of two of them, not 3; use batch.micro_batch_size=6 or 3"),
        (["batch.micro_batch_size=auto"], "so name one; use batch.micro_batch_size=8 or 4 or 2 or 1"),
        (["world.threads_per_rank=2"], "needs one thread per rank"),
    ],
)
def test_what_a_tree_cannot_add_up_is_refused(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, overrides: list[str], line: str
) -> None:
    refused = gptexp("train", *tiny, "train.reduction=tree", *overrides, "hydra.run.dir=out")
    assert refused.returncode == 2
    assert line in refused.stderr
    assert not (tmp_path / "out").exists()
