"""Blocked attention against torch's in float64."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gptexp.model.attention import BLOCK, _backward, _forward, blocked_attention

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler is installed"),
]
D = 8


def problem(
    t: int, dtype: torch.dtype = torch.float32, spread: float = 1.0, b: int = 2, h: int = 3
) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values (B, H, T, D) as a layer has them, parts of one (B, T, 3·H·D); the output's gradient."""
    g = torch.Generator().manual_seed(t)
    parts = (spread * torch.randn(b, t, 3 * h * D, generator=g)).to(dtype).split(h * D, dim=2)
    qkv = [part.view(b, t, h, D).transpose(1, 2).requires_grad_() for part in parts]
    return qkv, torch.randn(b, h, t, D, generator=g).to(dtype)


def reference(qkv: list[Tensor], grad: Tensor, scale: float | None) -> list[Tensor]:
    """The output and the three gradients in float64, by torch."""
    exact = [z.detach().double().requires_grad_() for z in qkv]
    out = F.scaled_dot_product_attention(*exact, is_causal=True, scale=scale)
    return [out.detach(), *torch.autograd.grad(out, exact, grad.double())]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((f.double() - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)]


@pytest.mark.parametrize(("b", "h"), [(2, 3), (1, 2), (2, 1), (1, 1)])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("t", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 100])
def test_output_and_gradients_equal_torchs_in_float64(t: int, scale: float | None, b: int, h: int) -> None:
    qkv, grad = problem(t, b=b, h=h)
    out = blocked_attention(*qkv, is_causal=True, scale=scale)
    found = [out, *torch.autograd.grad(out, qkv, grad)]
    exact = reference(qkv, grad, scale)
    for f, e in zip(found, exact, strict=True):  # with one token, the gradients of query and key are 0
        torch.testing.assert_close(f.double(), e, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_about_as_exact_as_flash() -> None:
    """Not quite: the scores and the products are rounded to bfloat16, and flash keeps its own in float32."""
    qkv, grad = problem(2 * BLOCK + 100, torch.bfloat16)
    exact = reference(qkv, grad, None)
    ours, flash = (
        errors([out, *torch.autograd.grad(out, qkv, grad)], exact)
        for out in (f(*qkv, is_causal=True) for f in (blocked_attention, F.scaled_dot_product_attention))
    )
    assert all(o < 2 * f for o, f in zip(ours, flash, strict=True))


def test_scores_beyond_the_range_of_exp_are_no_problem() -> None:
    """The largest are about 3,000. A key that comes later may have the largest score, and must not count."""
    qkv, grad = problem(BLOCK + 50, spread=30.0)
    out = blocked_attention(*qkv, is_causal=True)
    found = [out, *torch.autograd.grad(out, qkv, grad)]
    assert max(errors(found, reference(qkv, grad, None))) < 1e-4


def test_the_output_lies_in_memory_as_a_layer_goes_on_with_it_and_what_is_kept_is_contiguous() -> None:
    """So that the backward pass need not copy the queries, keys and values again."""
    qkv, _ = problem(20)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = blocked_attention(*qkv, is_causal=True)
    assert out.transpose(1, 2).is_contiguous()
    assert [z.is_contiguous() for z in kept[:3]] == [True] * 3  # q, k, v; then the results
    assert not any(z.is_contiguous() for z in qkv)


def test_gradients_are_right_if_only_one_input_needs_them() -> None:
    qkv, grad = problem(BLOCK + 3)
    _, *exact = reference(qkv, grad, None)
    for which in range(3):
        inputs = [z.detach().requires_grad_(i == which) for i, z in enumerate(qkv)]
        [found] = torch.autograd.grad(blocked_attention(*inputs, is_causal=True), inputs[which], grad)
        torch.testing.assert_close(found.double(), exact[which], rtol=1e-4, atol=1e-5)


def test_a_gradient_that_repeats_one_number_in_memory_is_right() -> None:
    qkv, grad = problem(BLOCK + 3)
    _, *exact = reference(qkv, torch.ones_like(grad), None)
    found = torch.autograd.grad(blocked_attention(*qkv, is_causal=True).sum(), qkv)
    assert max(errors(list(found), exact)) < 1e-5


def test_a_checkpoint_recomputes_the_same_bits() -> None:
    qkv, grad = problem(BLOCK + 3)
    outs = (
        blocked_attention(*qkv, is_causal=True),
        checkpoint(blocked_attention, *qkv, is_causal=True, use_reentrant=False),
    )
    plain, recomputed = (torch.autograd.grad(out, qkv, grad) for out in outs)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_a_second_derivative_is_an_error() -> None:
    qkv, _ = problem(5)
    [grad] = torch.autograd.grad(blocked_attention(*qkv, is_causal=True).sum(), qkv[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()


def test_torch_computes_what_needs_no_gradient_is_not_causal_or_has_dropout() -> None:
    qkv, _ = problem(9)
    torchs = F.scaled_dot_product_attention
    with torch.profiler.profile() as profile:
        blocked_attention(*qkv, dropout_p=0.5, is_causal=True)
        assert torch.equal(blocked_attention(*qkv), torchs(*qkv))
        with torch.no_grad():
            assert torch.equal(blocked_attention(*qkv, is_causal=True), torchs(*qkv, is_causal=True))
    assert not [e.key for e in profile.key_averages() if "blocked" in e.key]


def test_the_operations_are_well_defined_for_the_compiler() -> None:
    qkv, grad = problem(BLOCK + 3)
    torch.library.opcheck(_forward, (*qkv, 0.3))
    detached = [z.detach() for z in qkv]
    out, log_sum = _forward(*detached, 0.3)
    torch.library.opcheck(_backward, (grad, detached, out, log_sum, 0.3))
    compiled = torch.compile(lambda q, k, v: blocked_attention(q, k, v, is_causal=True, scale=0.3), fullgraph=True)
    found = torch.autograd.grad(compiled(*qkv), qkv, grad)
    assert max(errors(list(found), reference(qkv, grad, 0.3)[1:])) < 1e-5
