"""Sampling: draws follow the softmax, padded ids are never drawn, a text may be longer than block_size."""

import pytest
import torch
from scipy import stats

from gptexp.config.schema import ModelConfig
from gptexp.model.generate import Sampling, complete, generate
from gptexp.model.gpt import GPT


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=24))
    with torch.no_grad():
        model.wte.weight.mul_(20)  # far from a uniform distribution
    return model.eval()


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 5), (2.0, 3)])
def test_draws_follow_the_softmax_over_the_top_k(model: GPT, temperature: float, top_k: int) -> None:
    n_vocab, n = 20, 20_000
    prompt = torch.tensor([[3, 1, 4]])
    logits = model.logits(prompt)[0, :n_vocab].detach() / temperature
    if top_k:
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    expected = logits.softmax(-1)
    out = generate(model, prompt.expand(n, -1), n_vocab, Sampling(1, temperature, top_k))
    counts = torch.bincount(out[:, -1], minlength=24)
    assert counts[n_vocab:].sum() == 0
    drawable = expected > 1e-4
    assert counts[:n_vocab][expected == 0].sum() == 0
    observed = counts[:n_vocab][drawable].double()
    wanted = expected[drawable].double()
    wanted = wanted / wanted.sum() * observed.sum()
    assert stats.chisquare(observed.numpy(), wanted.numpy()).pvalue > 0.001


def test_temperature_zero_takes_the_most_probable_id(model: GPT) -> None:
    prompt = torch.tensor([[3, 1, 4]])
    out = generate(model, prompt, 20, Sampling(5, temperature=0))
    for i in range(3, 8):
        assert out[0, i] == model.logits(out[:, max(0, i - 8) : i])[0, :20].argmax()


def test_padded_ids_are_not_drawn_even_if_most_probable(model: GPT) -> None:
    with torch.no_grad():
        model.wte.weight[20:] = model.hidden(torch.tensor([[3]]))[0, -1] * 100
    out = generate(model, torch.tensor([[3]]).expand(500, -1), 20, Sampling(4))
    assert out.max() < 20


def test_a_text_may_be_longer_than_the_block_size(model: GPT) -> None:
    out = generate(model, torch.tensor([[1] * 7]), 20, Sampling(20))
    assert out.shape == (1, 27)


def test_sampling_changes_neither_the_random_state_nor_the_mode_of_the_model() -> None:
    from gptexp.data.tokenizer import load_tokenizer

    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=50304)).train()
    before = torch.get_rng_state()
    [text] = complete(model, load_tokenizer("gpt2"), "", 1, Sampling(4))
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert text
