"""The model against transformers' GPT-2, weight by weight."""

import math
import shutil

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from gptexp.config.schema import ModelConfig
from gptexp.model.gpt import GPT, Linear, gelu

SMALL = ModelConfig(n_layer=3, n_head=4, n_embd=48, block_size=24, vocab_size=101)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(SMALL.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_logits_and_gradients_equal_transformers_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ours = GPT(SMALL)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=SMALL.vocab_size,
            n_positions=SMALL.block_size,
            n_embd=SMALL.n_embd,
            n_layer=SMALL.n_layer,
            n_head=SMALL.n_head,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    with torch.no_grad():
        for p in ours.parameters():
            p.normal_(std=0.3)  # far from the initial values, also the biases: a missing term changes the result
    mapped = {}
    for name, value in ours.state_dict().items():
        transposed = name.endswith("weight") and ".c_" in name  # transformers has GPT-2's Conv1D: (in, out)
        mapped[name if name.startswith("lm_head") else f"transformer.{name}"] = value.T if transposed else value
    missing = theirs.load_state_dict(mapped, strict=False)
    assert not missing.unexpected_keys
    assert all("attn.bias" in key or "masked_bias" in key for key in missing.missing_keys)

    x = tokens(2, 24)
    out = theirs(x, labels=x)
    torch.testing.assert_close(ours(x), out.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.logits(x), out.logits[:, -1], rtol=1e-4, atol=1e-4)
    loss = ours(x[:, :-1], x[:, 1:])
    torch.testing.assert_close(loss, out.loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    out.loss.backward()
    torch.testing.assert_close(ours.wte.weight.grad, theirs.transformer.wte.weight.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("compiling", [False, True])
def test_the_activation_is_gelu_with_tanh_in_both_of_its_forms(
    compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    for found, wanted in zip(
        (gelu(x), *torch.autograd.grad(gelu(x).sum(), x)),
        (expected, *torch.autograd.grad(expected.sum(), x)),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert type(gelu(x).grad_fn) is type(expected.grad_fn) or compiling  # eagerly it is torch's kernel


@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_layer_adds_its_bias_in_an_operation_of_its_own(autocast: bool) -> None:
    torch.manual_seed(0)
    layer, x = Linear(50, 70), torch.randn(2, 3, 50, requires_grad=True)
    products: list[int] = []  # the number of operands of each

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        products.extend(
            sum(operand is not None for operand in (*node.args, *node.kwargs.values()))
            for node in graph.graph.nodes
            if "linear" in str(node.target) and node.op == "call_function"
        )
        return graph

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = torch.compile(layer, backend=backend, fullgraph=True)(x)
        expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert products == [2]
    tolerance = 1e-2 if autocast else 1e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)  # the types too
    inputs = [x, layer.weight, layer.bias]
    for f, e in zip(*(torch.autograd.grad(out.sum(), inputs) for out in (found, expected)), strict=True):
        torch.testing.assert_close(f, e, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler is installed")
def test_the_generated_code_has_products_without_a_bias() -> None:
    """The compiler joins a product and an addition again if they fit each other."""
    torch.compiler.reset()
    model = GPT(SMALL)
    _, code = run_and_get_code(torch.compile(model), tokens(2, 24), tokens(2, 24, seed=1))
    assert "mm(" in code[0]
    assert "addmm(" not in code[0]


def test_no_token_attends_to_later_tokens() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL).eval()
    x = tokens(1, 20)
    changed = x.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % SMALL.vocab_size
    before, after = model.hidden(x), model.hidden(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_more_tokens_than_a_block_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"25 tokens: the model has model\.block_size=24"):
        GPT(SMALL)(tokens(1, SMALL.block_size + 1))


def test_initial_weights_have_the_standard_deviations_of_gpt2() -> None:
    torch.manual_seed(0)
    cfg = ModelConfig(n_layer=2, n_head=4, n_embd=256, block_size=64, vocab_size=512)
    model = GPT(cfg)
    for name, p in model.named_parameters():
        if "ln_" in name and name.endswith("weight"):
            assert torch.all(p == 1)
        elif p.dim() == 1:
            assert torch.all(p == 0)
        else:
            std = 0.02 / math.sqrt(2 * cfg.n_layer) if name.endswith("c_proj.weight") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03), name
    assert model.lm_head.weight is model.wte.weight


@pytest.mark.e2e
def test_the_initial_loss_is_that_of_a_uniform_guess() -> None:
    """ln 50304 = 10.83, plus a little for the spread of the initial logits."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=2, vocab_size=50304))
    x = torch.randint(50257, (2, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert 10.80 < model(x[:, :-1], x[:, 1:]).item() < 11.10


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=64, dropout=0.5))
    x = torch.zeros(1, 16, dtype=torch.int64)
    assert not torch.equal(model.hidden(x), model.hidden(x))
    model.eval()
    assert torch.equal(model.hidden(x), model.hidden(x))
