"""Parameter groups and AdamW."""

import pytest
import torch

from gptexp.config.schema import ModelConfig
from gptexp.model.gpt import GPT
from gptexp.optim import AdamWConfig
from gptexp.training.optimizer import build_optimizer, describe_groups, parameter_groups, set_lr, step_if


def test_gpt2_decays_fifty_tensors() -> None:
    with torch.device("meta"):
        model = GPT(ModelConfig(vocab_size=50304))
    assert describe_groups(model, AdamWConfig()) == [
        "num decayed parameter tensors: 50, with 124,354,560 parameters",
        "num non-decayed parameter tensors: 98, with 121,344 parameters",
    ]


def test_every_parameter_is_in_exactly_one_group() -> None:
    model = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=32))
    grouped = [id(p) for group in parameter_groups(model, AdamWConfig()) for p in group["params"]]  # type: ignore[attr-defined]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_the_update_equals_adamw_of_the_paper(fused: bool) -> None:
    """Two updates against the algorithm written out (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2)."""
    cfg = AdamWConfig(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-2, weight_decay=0.2)
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = build_optimizer(model, cfg, fused)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    m = {name: torch.zeros_like(p) for name, p in expected.items()}
    v = {name: torch.zeros_like(p) for name, p in expected.items()}
    for step in (1, 2):
        for name, p in model.named_parameters():
            p.grad = g = torch.randn_like(p)
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.9 * v[name] + 0.1 * g * g
            decay = 0.2 if p.dim() >= 2 else 0.0
            update = (m[name] / (1 - 0.8**step)) / ((v[name] / (1 - 0.9**step)).sqrt() + 1e-2)
            expected[name] = expected[name] - 0.01 * decay * expected[name] - 0.01 * update
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-5, atol=1e-7)


def test_the_learning_rate_is_the_peak_times_the_factor_in_every_group() -> None:
    optimizer = build_optimizer(torch.nn.Linear(5, 3), AdamWConfig(lr=0.01), fused=False)
    for factor in (0.5, 0.1, 1.0):
        set_lr(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01 * factor] * 2)


@pytest.mark.parametrize("fused", [False, True])
def test_a_non_finite_step_changes_neither_weights_nor_moments(fused: bool) -> None:
    model = torch.nn.Linear(5, 3)
    optimizer = build_optimizer(model, AdamWConfig(lr=0.01), fused)
    found = []
    for finite, gradient in ((True, 1.0), (False, torch.nan), (True, 2.0)):
        for p in model.parameters():
            p.grad = torch.full_like(p, gradient)
        step_if(torch.tensor(finite), optimizer)
        moments = [t.clone() for state in optimizer.state.values() for t in (state["exp_avg"], state["exp_avg_sq"])]
        found.append([p.detach().clone() for p in model.parameters()] + moments)
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found[1], found[2], strict=True))
