"""Sampling: the right distribution, never a padded id, at most block_size tokens seen."""

import pytest
import torch
from scipy import stats

from gptexp.config import ModelConfig
from gptexp.model import GPT
from gptexp.sample import complete, generate


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=24))
    with torch.no_grad():
        model.wte.weight.mul_(20)  # a distribution that is far from uniform
    return model.eval()


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 5), (2.0, 3)])
def test_draws_follow_the_softmax_over_the_top_k(model: GPT, temperature: float, top_k: int) -> None:
    n_vocab, n = 20, 20_000
    prompt = torch.tensor([[3, 1, 4]])
    logits = model.logits(prompt)[0, :n_vocab].detach() / temperature
    if top_k:
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    expected = logits.softmax(-1)
    out = generate(
        model, prompt.expand(n, -1), 1, n_vocab, temperature, top_k, torch.Generator().manual_seed(0)
    )  # fmt: skip
    counts = torch.bincount(out[:, -1], minlength=24)
    assert counts[n_vocab:].sum() == 0
    drawable = expected > 1e-4
    assert counts[:n_vocab][expected == 0].sum() == 0
    observed = counts[:n_vocab][drawable].double()
    wanted = expected[drawable].double()
    wanted = wanted / wanted.sum() * observed.sum()
    assert stats.chisquare(observed.numpy(), wanted.numpy()).pvalue > 0.001


def test_temperature_zero_takes_the_likeliest(model: GPT) -> None:
    prompt = torch.tensor([[3, 1, 4]])
    out = generate(model, prompt, 5, 20, temperature=0)
    for i in range(3, 8):
        assert out[0, i] == model.logits(out[:, max(0, i - 8) : i])[0, :20].argmax()


def test_padded_ids_are_never_drawn_even_when_likeliest(model: GPT) -> None:
    with torch.no_grad():
        model.wte.weight[20:] = model.hidden(torch.tensor([[3]]))[0, -1] * 100
    out = generate(model, torch.tensor([[3]]).expand(500, -1), 4, 20, generator=torch.Generator().manual_seed(0))
    assert out.max() < 20


def test_it_writes_beyond_the_block_size(model: GPT) -> None:
    out = generate(model, torch.tensor([[1] * 7]), 20, 20, generator=torch.Generator().manual_seed(0))
    assert out.shape == (1, 27)


def test_sampling_leaves_the_training_stream_alone() -> None:
    from gptexp.data.tokenizer import load_tokenizer

    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=50304)).train()
    before = torch.get_rng_state()
    [text] = complete(model, load_tokenizer("gpt2"), "", 1, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert text
