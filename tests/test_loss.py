"""The chunked loss against torch's cross-entropy over whole logits, in float64 where it matters."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gptexp.loss import (
    IGNORED,
    SAFE_LOGIT,
    _chunk,
    _chunked,
    _compiled_chunk,
    _scratch,
    chunked_cross_entropy,
    plain_cross_entropy,
)


def problem(scale: float = 1.0, rows: int = 1300) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 24, generator=g) * scale
    weight = torch.randn(97, 24, generator=g)
    targets = torch.randint(97, (rows,), generator=g)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def reference(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and gradients in float64, by torch."""
    h64, w64 = (z.detach().double().requires_grad_() for z in (h, w))
    value = F.cross_entropy(h64 @ w64.T, y, ignore_index=IGNORED)
    (3 * value).backward()
    assert h64.grad is not None
    assert w64.grad is not None
    return value.detach(), h64.grad, w64.grad


# The larger scale has logits beyond ±60, where exp needs the shift by the row's maximum.
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("rows", [1, 512, 1300])
@pytest.mark.parametrize("fn", [plain_cross_entropy, chunked_cross_entropy])
def test_value_and_gradients(scale: float, rows: int, fn: Callable[..., torch.Tensor]) -> None:
    h, w, y = problem(scale, rows)
    if rows > 1:
        y[::7] = IGNORED
    value, grad_h, grad_w = reference(h, w, y)
    out = fn(h, w, y)
    (3 * out).backward()
    torch.testing.assert_close(out.double(), value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(h.grad.double(), grad_h, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(w.grad.double(), grad_w, rtol=1e-4, atol=1e-5)


def test_both_sides_of_the_shift_were_tested() -> None:
    sizes = [(problem(s)[0] @ problem(s)[1].T).abs().max() for s in (0.1, 1.0, 30.0)]
    assert sizes[0] < sizes[1] < SAFE_LOGIT < sizes[2]


def test_without_gradients_none_are_computed() -> None:
    h, w, y = problem()
    with torch.no_grad(), torch.profiler.profile() as profile:
        value = chunked_cross_entropy(h, w, y)
    assert not value.requires_grad
    products = sum(e.count for e in profile.key_averages() if e.key in ("aten::mm", "aten::addmm_"))
    assert products == 3  # one a chunk: the logits


def test_bfloat16_keeps_the_loss_in_float32() -> None:
    h, w, y = problem(0.3, 2048)
    value, grad_h, _ = reference(h, w, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = chunked_cross_entropy(h, w, y)
    assert out.dtype == torch.float32
    assert abs(out.item() - value.item()) < 2e-3  # of a sum in bfloat16 nothing below 0.03 would be left
    (3 * out).backward()
    assert (h.grad - grad_h).norm() / grad_h.norm() < 0.02


def test_a_compiler_sees_one_operation() -> None:
    """It would unroll the loop over the chunks and keep the logits of all of them."""
    h, w, y = problem(0.3, 2048)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        seen.extend(str(node.target) for part in parts for node in part.graph.nodes if node.op == "call_function")
        return graph

    loss = torch.compile(chunked_cross_entropy, backend=backend, fullgraph=True)(h, w, y)
    assert sum("chunked_cross_entropy" in name for name in seen) == 1
    assert not [name for name in seen if "mm" in name or "matmul" in name or "exp2" in name]
    (3 * loss).backward()
    value, grad_h, grad_w = reference(h, w, y)
    assert loss.item() == pytest.approx(value.item(), rel=1e-5)
    assert (h.grad - grad_h).norm() / grad_h.norm() < 1e-5
    assert (w.grad - grad_w).norm() / grad_w.norm() < 1e-5
    for needs_grad in (True, False):
        args = (h.detach(), w.detach(), y, needs_grad, False)
        torch.library.opcheck(_chunked, args, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(_chunked, (h, w, y, True, False), test_utils="test_autograd_registration")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_chunk_as_a_gpu_computes_it(compiled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its logits in fresh memory, and always shifted: it cannot be asked how large they are."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    chunk = _compiled_chunk() if compiled else _chunk
    h, w, y = problem(30.0, 512)
    value, grad_h, grad_w = reference(h, w, y)
    h, w = h.detach(), w.detach()
    into = (torch.empty_like(h), torch.zeros_like(w))
    loss = chunk(h, w, y[:, None], torch.ones(512, 1, dtype=torch.bool), True, into, None)
    assert loss.item() / 512 == pytest.approx(value.item(), rel=1e-5)
    for found, expected in zip(into, (grad_h, grad_w), strict=True):
        assert (3 * found / 512 - expected).norm() / expected.norm() < 1e-5


def test_one_of_the_two_may_need_a_gradient() -> None:
    for which in (0, 1):
        h, w, y = problem()
        _, *expected = reference(h, w, y)
        inputs = [tensor.detach() for tensor in (h, w)]
        inputs[which].requires_grad_()
        (3 * chunked_cross_entropy(*inputs, y)).backward()
        assert inputs[1 - which].grad is None
        torch.testing.assert_close(inputs[which].grad.double(), expected[which], rtol=1e-4, atol=1e-5)


def test_training_goes_on_after_inference() -> None:
    """The memory of the logits, which is kept, was made in between."""
    h, w, y = problem()
    _scratch.cache_clear()
    with torch.inference_mode():
        value = chunked_cross_entropy(h, w, y).item()
    loss = chunked_cross_entropy(h, w, y)
    loss.backward()
    assert loss.item() == value


def test_no_gradient_is_made_of_the_gradients() -> None:
    loss = chunked_cross_entropy(*problem())
    with torch.profiler.profile() as profile:
        loss.backward()
    assert not [event.key for event in profile.key_averages() if "zero" in event.key]  # of (V, C) numbers


def test_its_gradient_has_none() -> None:
    h, w, y = problem()
    [grad] = torch.autograd.grad(chunked_cross_entropy(h, w, y), h, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()


def test_the_memory_of_the_logits_is_kept_and_fits_what_comes() -> None:
    """One tensor for all chunks of all calls; another, and only that, for another shape or type."""
    _scratch.cache_clear()
    h, w, y = problem(0.3, 1300)
    chunked_cross_entropy(h, w, y).backward()
    with torch.no_grad():
        chunked_cross_entropy(h, w, y)
    assert _scratch.cache_info()[:2] == (1, 1)  # hits, misses
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chunked_cross_entropy(h, w, y)
    value, _, _ = reference(h[:9], w[:50], y[:9] % 50)
    assert chunked_cross_entropy(h[:9], w[:50], y[:9] % 50).item() == pytest.approx(value.item(), rel=1e-5)
    assert _scratch.cache_info() == (1, 3, 1, 1)
    low, logits = _scratch(9, 50, torch.float32)
    assert low is logits
    assert (low.shape, low.dtype) == ((9, 50), torch.float32)
