"""Norms and dot products of long tensors against numpy in float64."""

import math

import numpy as np
import pytest
import torch

from gptexp.training.norms import BLOCK, block_norms, dot, norm_of_norms, total_norm

RIGHT = 1e-6  # relative error
WTE = 50_257 * 768  # elements of GPT-2's largest tensor
ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def exact_dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(np.dot(a.double().numpy().ravel(), b.double().numpy().ravel()))


def exact_norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(np.dot(of, of)) for of in (t.double().numpy().ravel() for t in tensors)))


def gradients(kind: str, device: str = "cpu") -> list[torch.Tensor]:
    """Tensors of all sizes: elements of one size, of very different sizes, or all equal, the worst case of a sum."""
    torch.manual_seed(0)
    shapes = [(WTE // 768, 768), (3, 1025), (1024,), (7,), (), (1,), (2, 2048)]
    noise = [torch.randn(shape) * 1e-4 for shape in shapes]
    if kind == "spread":
        noise = [t * torch.exp(2 * torch.randn(t.shape)) for t in noise]
    if kind == "equal":
        noise = [torch.full(shape, 1e-3) for shape in shapes]
    return [t.to(device) for t in noise]


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        *(pytest.param("cpu", kind, marks=pytest.mark.e2e) for kind in ("equal", "normal", "spread")),
        *(pytest.param("cuda", kind, marks=ON_A_GPU) for kind in ("normal", "spread", "equal")),
    ],
)
def test_norm_and_dot_product_are_right_at_the_size_of_gpt2(kind: str, device: str) -> None:
    tensors = gradients(kind, device)
    on_host = [t.cpu() for t in tensors]
    norms = [exact_norm([t]) for t in on_host]
    assert total_norm(tensors).item() == pytest.approx(math.hypot(*norms), rel=RIGHT)
    assert total_norm(tensors[:1]).item() == pytest.approx(norms[0], rel=RIGHT)
    assert norm_of_norms(block_norms(tensors[0])).item() == pytest.approx(norms[0], rel=RIGHT)
    for a, norm in zip(tensors[:2], norms, strict=False):
        for b in (a.roll(1) / 2 + a, a.roll(1)):  # at an angle; nearly orthogonal unless all elements are equal
            of_norms = norm * exact_norm([b.cpu()])
            assert dot(a, b).item() == pytest.approx(exact_dot(a.cpu(), b.cpu()), rel=0, abs=RIGHT * of_norms)


def test_small_tensors_and_parts_of_tensors() -> None:
    torch.manual_seed(0)
    for size in (1, 2, 1023, 1024, 1025, 2048, 2049):
        t = torch.randn(size)
        assert total_norm([t]).item() == pytest.approx(exact_norm([t]), rel=RIGHT)
        assert dot(t, t).item() == pytest.approx(exact_dot(t, t), rel=RIGHT)
    columns = torch.randn(3000, 4).t()  # not contiguous
    assert total_norm([columns, columns[:2]]).item() == pytest.approx(exact_norm([columns, columns[:2]]), rel=RIGHT)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 2049, 1024 * 1024 + 1])
def test_the_norms_of_blocks_and_of_the_tensor_that_they_form(size: int) -> None:
    t = torch.randn(size)
    norms = block_norms(t)
    assert norms.tolist() == pytest.approx([exact_norm([block]) for block in t.split(BLOCK) if size], rel=RIGHT)
    assert norm_of_norms(norms).item() == pytest.approx(exact_norm([t]), rel=RIGHT)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_makes_the_norm_non_finite(bad: float) -> None:
    for at in (0, 1024, 5000):
        t = torch.ones(5001)
        t[at] = bad
        assert not total_norm([torch.ones(3), t]).isfinite()


def test_the_bits_of_a_norm_do_not_depend_on_the_number_of_threads() -> None:
    """`train.reduction=tree` promises equal bits at any world size, and ranks share the cores."""
    tensors, threads = gradients("spread"), torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 3, 8):
            torch.set_num_threads(number)
            found.append(total_norm(tensors).item())
    finally:
        torch.set_num_threads(threads)
    assert len(set(found)) == 1
