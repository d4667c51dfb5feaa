"""Sharpness against known spectra, and against exact second derivatives."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptexp.config.schema import ModelConfig
from gptexp.model.gpt import GPT
from gptexp.run.sharpness import (
    Differences,
    adamw_scale,
    adamw_threshold,
    hessian_sharpness,
    sam_sharpness,
)


def quadratic(spectrum: Tensor) -> tuple[Differences, Tensor]:
    """w'Aw / 2 at a random w, where A has a given spectrum; and A."""
    torch.manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), dtype=torch.float64))
    a = ((q * spectrum) @ q.T).float()
    w = torch.nn.Parameter(torch.randn(len(spectrum)))

    def loss() -> Tensor:
        found = 0.5 * w @ a @ w
        if torch.is_grad_enabled():
            found.backward()
        return found.detach()

    return Differences(loss, [w]), a


SPECTRA = {
    "one far above": torch.cat([torch.tensor([50.0]), torch.linspace(-1, 3, 199)]),
    "close to the next": torch.cat([torch.tensor([7.0, 6.9]), torch.linspace(-1, 3, 198)]),
    "a larger negative one": torch.cat([torch.tensor([7.0, -90.0]), torch.linspace(-1, 3, 198)]),
    "fewer than iterations": torch.tensor([1.0, 2.0, 4.0]),
    "all negative": torch.linspace(-9.0, -2.0, 50),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_the_largest_eigenvalue_of_a_known_spectrum_is_found(name: str) -> None:
    spectrum = SPECTRA[name].double()
    differences, _ = quadratic(spectrum)
    found = hessian_sharpness(differences)
    assert found is not None
    assert found.value == pytest.approx(float(spectrum.max()), rel=1e-3)


def test_a_preconditioned_quadratic_has_the_spectrum_of_the_product() -> None:
    differences, a = quadratic(SPECTRA["one far above"].double())
    scale = torch.rand(len(a)) + 0.1
    found = hessian_sharpness(differences, scale)
    assert found is not None
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(scale[:, None] * a * scale).max()), rel=1e-3)


TODAY = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "n_mlp": 16, "n_kv_head": 1, "qk_norm": "head"}


def trained(**block: Any) -> tuple[GPT, Tensor, torch.optim.AdamW]:
    torch.manual_seed(0)
    gpt = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=32, **block))
    optimizer = torch.optim.AdamW(gpt.parameters(), 1e-2, (0.9, 0.95))
    x = torch.randint(32, (8, 9))
    for _ in range(20):
        optimizer.zero_grad()
        gpt(x[:, :-1], x[:, 1:]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return gpt.eval(), x, optimizer


def of_gpt(gpt: GPT, x: Tensor) -> Differences:
    def loss() -> Tensor:
        found = gpt(x[:, :-1], x[:, 1:])
        if torch.is_grad_enabled():
            found.backward()
        return found.detach()

    return Differences(loss, list(gpt.parameters()))


def exact_hessian(gpt: GPT, x: Tensor) -> Tensor:
    """By double backward, which only the plain attention kernel has."""
    parameters = list(gpt.parameters())
    with sdpa_kernel(SDPBackend.MATH):
        gradient = torch.autograd.grad(gpt(x[:, :-1], x[:, 1:]), parameters, create_graph=True)
        flat = torch.cat([g.flatten() for g in gradient])
        rows = [torch.autograd.grad(g, parameters, retain_graph=True) for g in flat]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


@pytest.mark.e2e
@pytest.mark.parametrize("block", [{}, TODAY])
def test_differences_agree_with_double_backward_and_keep_the_bits_of_the_weights(block: dict[str, Any]) -> None:
    gpt, x, optimizer = trained(**block)
    hessian = exact_hessian(gpt, x)
    before = [p.detach().clone() for p in gpt.parameters()]
    differences = of_gpt(gpt, x)
    plain = hessian_sharpness(differences)
    moments = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in gpt.parameters()])
    scale = adamw_scale(moments, 20, 0.9, 0.95, 1e-8)
    preconditioned = hessian_sharpness(differences, scale)
    assert plain is not None
    assert preconditioned is not None
    assert plain.value == pytest.approx(float(torch.linalg.eigvalsh(hessian.double()).max()), rel=0.01)
    product = scale.double()[:, None] * hessian.double() * scale.double()
    assert preconditioned.value == pytest.approx(float(torch.linalg.eigvalsh(product).max()), rel=0.01)
    sam_sharpness(differences)
    assert all(torch.equal(p, b) for p, b in zip(gpt.parameters(), before, strict=True))
    assert all(p.grad is None for p in gpt.parameters())


def test_the_preconditioner_is_that_of_an_adamw_step() -> None:
    """A step without weight decay moves by lr * m / P, with m after its update (arXiv 2207.14484, equation 2)."""
    w = torch.nn.Parameter(torch.randn(5))
    optimizer = torch.optim.AdamW([w], 0.01, (0.9, 0.95), eps=1e-3, weight_decay=0.0)
    for _ in range(3):
        before, w.grad = w.detach().clone(), torch.randn(5)
        optimizer.step()
    state = optimizer.state[w]
    scale = adamw_scale(state["exp_avg_sq"], 3, 0.9, 0.95, 1e-3)
    torch.testing.assert_close(before - w.detach(), 0.01 * scale**2 * state["exp_avg"])
    assert adamw_threshold(0.01, 0.9) == pytest.approx(3800)


def test_sharpness_of_sam_is_the_rise_of_a_quadratic_along_its_gradient() -> None:
    differences, a = quadratic(torch.linspace(1, 5, 20).double())
    w = differences.at[0]
    g = a @ w
    moved = w + 0.05 * g / g.norm()
    expected = float(0.5 * moved @ a @ moved - 0.5 * w @ a @ w)
    assert sam_sharpness(differences) == pytest.approx(expected, rel=1e-3)


def test_a_loss_without_curvature_that_can_be_measured_has_no_sharpness() -> None:
    """Its gradient jumps, so that no two steps agree."""
    w = torch.nn.Parameter(torch.full((4,), 1e-6))

    def loss() -> Tensor:
        found = w.abs().sum()
        if torch.is_grad_enabled():
            found.backward()
        return found.detach()

    assert hessian_sharpness(Differences(loss, [w])) is None
