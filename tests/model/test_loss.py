"""The chunked loss against torch's cross-entropy over whole logits in float64."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

from gptexp.model.compiler import compiled
from gptexp.model.gpt import Loss
from gptexp.model.loss import (
    IGNORED,
    SAFE_LOGIT,
    _buffers,
    _chunk,
    _chunked,
    _exps,
    _gpu_passes,
    chunk_rows,
    chunked_cross_entropy,
    fused_cross_entropy,
    plain_cross_entropy,
)

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler is installed")


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


FUSED = pytest.param(fused_cross_entropy, marks=[pytest.mark.slow, NEEDS_COMPILER])


# The largest scale has logits beyond ±60, for which exp needs a shift by the row's maximum.
@pytest.mark.parametrize(("scale", "shifted"), [(0.1, False), (1.0, False), (30.0, True)])
@pytest.mark.parametrize("rows", [1, 512, 1300])
@pytest.mark.parametrize("fn", [plain_cross_entropy, chunked_cross_entropy, FUSED])
def test_loss_and_gradients_equal_cross_entropy_in_float64(scale: float, shifted: bool, rows: int, fn: Loss) -> None:
    h, w, y = problem(scale, rows)
    assert ((h @ w.T).abs().max() > SAFE_LOGIT) == shifted
    if rows > 1:
        y[::7] = IGNORED
    value, grad_h, grad_w = reference(h, w, y)
    out = fn(h, w, y)
    (3 * out).backward()
    torch.testing.assert_close(out.double(), value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(h.grad.double(), grad_h, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(w.grad.double(), grad_w, rtol=1e-4, atol=1e-5)


def test_no_gradient_is_computed_under_no_grad() -> None:
    h, w, y = problem()
    with torch.no_grad(), torch.profiler.profile() as profile:
        value = chunked_cross_entropy(h, w, y)
    assert not value.requires_grad
    products = sum(e.count for e in profile.key_averages() if e.key in ("aten::mm", "aten::addmm_"))
    assert products == 2  # the logits, once a chunk


@pytest.mark.parametrize(
    ("tokens", "device", "rows"),
    [(1, "cpu", 1), (511, "cpu", 511), (1023, "cpu", 1023), (1024, "cpu", 512), (1300, "cpu", 650),
     (8192, "cpu", 512), (8192, "cuda", 4096), (4096 * 3 - 1, "cuda", 6144)],
)  # fmt: skip
def test_chunks_have_nearly_equal_sizes_of_at_least_512_rows(tokens: int, device: str, rows: int) -> None:
    assert chunk_rows(tokens, device) == rows


@pytest.mark.parametrize("fn", [chunked_cross_entropy, FUSED])
def test_bfloat16_keeps_the_loss_in_float32(fn: Loss) -> None:
    h, w, y = problem(0.3, 2048)
    value, grad_h, _ = reference(h, w, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fn(h, w, y)
    assert out.dtype == torch.float32
    assert abs(out.item() - value.item()) < 2e-3  # a sum in bfloat16 would be off by up to 0.03
    (3 * out).backward()
    assert (h.grad - grad_h).norm() / grad_h.norm() < 0.02


def test_the_compiled_graph_contains_the_loss_as_one_operation() -> None:
    """Otherwise the compiler would unroll the loop over the chunks and keep the logits of all of them."""
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
        args = (h.detach(), w.detach(), y, None, 0.0, needs_grad, False)
        torch.library.opcheck(_chunked, args, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(_chunked, (h, w, y, None, 0.0, True, False), test_utils="test_autograd_registration")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_compiler", [False, pytest.param(True, marks=[pytest.mark.slow, NEEDS_COMPILER])])
def test_the_chunk_function_of_a_gpu_has_the_right_value_and_gradients(
    in_compiler: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU, logits are always shifted, because reading their size would make the host wait."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    chunk = compiled(_chunk, dynamic=False) if in_compiler else _chunk
    h, w, y = problem(30.0 if dtype == torch.float32 else 1.0, 512)
    h, w = (z.detach().to(dtype).requires_grad_() for z in (h, w))
    value, grad_h, grad_w = reference(h, w, y)
    h, w = h.detach(), w.detach()
    into = (torch.empty_like(h), torch.zeros_like(w, dtype=torch.float32))
    with torch.no_grad():
        loss = chunk(h, w, y[:, None], torch.full((512, 1), 1 / 512), None, 0.0, into, _gpu_passes(in_compiler))
    error = 1e-5 if dtype == torch.float32 else 0.02
    assert loss.item() == pytest.approx(value.item(), rel=error)
    for found, expected in zip(into, (grad_h, grad_w), strict=True):
        assert (3 * found - expected).norm() / expected.norm() < error


def test_gradients_are_right_if_only_one_input_needs_them() -> None:
    for which in (0, 1):
        h, w, y = problem()
        _, *expected = reference(h, w, y)
        inputs = [tensor.detach() for tensor in (h, w)]
        inputs[which].requires_grad_()
        (3 * chunked_cross_entropy(*inputs, y)).backward()
        assert inputs[1 - which].grad is None
        torch.testing.assert_close(inputs[which].grad.double(), expected[which], rtol=1e-4, atol=1e-5)


def test_the_backward_pass_allocates_no_zeros_for_the_unused_gradients() -> None:
    loss = chunked_cross_entropy(*problem())
    with torch.profiler.profile() as profile:
        loss.backward()
    assert not [event.key for event in profile.key_averages() if "zero" in event.key]  # of (V, C) numbers


def test_a_second_derivative_is_an_error() -> None:
    h, w, y = problem()
    [grad] = torch.autograd.grad(chunked_cross_entropy(h, w, y), h, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()


def largest_allocation(rows: int = 1300, vocab: int = 97) -> int:
    """Bytes of the largest single allocation of the loss without gradients."""
    h, w, y = problem(0.3, 1300)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        chunked_cross_entropy(h[:rows], w[:vocab], y[:rows] % vocab)
    return max(event.self_cpu_memory_usage for event in profile.events())


LOGITS = 512 * 97 * 4  # bytes of one chunk of `problem`; one chunk is the largest tensor that the loss allocates


def test_the_memory_of_the_logits_is_allocated_once_for_all_calls_of_one_shape() -> None:
    """It is kept for the newest shape only: it does not grow with the number of shapes."""
    _buffers.cache_clear()
    assert largest_allocation() >= LOGITS
    chunked_cross_entropy(*problem(0.3, 1300)).backward()
    assert largest_allocation() < LOGITS
    largest_allocation(rows=9, vocab=50)
    assert largest_allocation() >= LOGITS


def test_training_and_validation_in_turns_reuse_their_buffers_of_each_dtype() -> None:
    h, w, y = problem(0.3, 600)
    _buffers.cache_clear()
    with torch.inference_mode():  # a tensor that is allocated here could not be used in training
        value = chunked_cross_entropy(h, w, y).item()
    for _ in range(3):
        for grad in (True, False):
            with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16):
                chunked_cross_entropy(h, w, y)
    loss = chunked_cross_entropy(h, w, y)
    loss.backward()
    assert loss.item() == value
    assert _buffers.cache_info().misses == 1
    assert _buffers(600, 97).keys() == {torch.bfloat16, torch.float32}


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("shifted", [False, True])
def test_a_cpu_passes_once_over_the_rows_of_bfloat16_logits(shifted: bool) -> None:
    """Whether the compiler computes the exps and their sums in one loop hangs on small changes of `_exps`."""
    zeros = None if shifted else torch.zeros(512, 1)
    torch.compiler.reset()
    _, [code] = run_and_get_code(compiled(_exps, dynamic=True), torch.randn(512, 97).bfloat16(), zeros)
    assert code.count("for(int64_t x0") == 1


@pytest.mark.slow
@NEEDS_COMPILER
def test_a_process_may_fuse_the_losses_of_many_shapes() -> None:
    """torchrun's process trains all cells of a sweep. torch refuses to compile one function for more than 8 shapes."""
    for rows in range(600, 611):
        h, w, y = problem(0.3, rows)
        out = fused_cross_entropy(h, w[: rows - 520], y % (rows - 520))
        (3 * out).backward()
        expected, grad_h, _ = reference(h, w[: rows - 520], y % (rows - 520))
        assert out.item() == pytest.approx(expected.item(), rel=1e-5)
        assert h.grad is not None
        assert (h.grad - grad_h).norm() / grad_h.norm() < 1e-5
