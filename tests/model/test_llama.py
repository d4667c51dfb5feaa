"""The parts of today's blocks, each against its definition."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptexp.config.schema import ModelConfig
from gptexp.model.attention import QUERIES, build_masks, causal_attention
from gptexp.model.generate import Sampling, generate
from gptexp.model.gpt import GPT
from gptexp.model.llama import rotate, rotation
from gptexp.model.loss import LOSSES, chunked_cross_entropy, plain_cross_entropy

LLAMA = ModelConfig(
    n_layer=3, n_head=4, n_embd=32, block_size=40, vocab_size=101, bias=False, norm="rmsnorm", position="rope",
    mlp="swiglu",
)  # fmt: skip
BLOCKS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"n_kv_head": 2, "qk_norm": "head", "head_dim": 6},
    "olmo2": {"residual_norm": "post", "qk_norm": "all", "tied": False},
    "gemma2": {"residual_norm": "pre_post", "mlp": "geglu", "window": 9, "window_every": 3, "logit_softcap": 3.0},
    "nanochat": {"norm_weight": False, "mlp": "relu2", "qk_norm": "head", "tied": False, "logit_softcap": 3.0},
    "positions": {"norm": "layernorm", "position": "learned", "mlp": "gelu", "bias": True, "n_kv_head": 1},
}


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(LLAMA.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def built(cfg: ModelConfig, **more: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(cfg, **more).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)  # far from the initial values
    return model


@pytest.mark.parametrize("name", BLOCKS)
def test_a_token_after_a_cache_has_the_logits_of_the_whole_text(name: str) -> None:
    model = built(replace(LLAMA, **BLOCKS[name]))
    x = tokens(2, 40)
    whole, cache = model(x), model.empty_cache(2, 40)
    found = [model.logits(x[:, :11], cache), *(model.logits(x[:, t : t + 1], cache) for t in range(11, 40))]
    torch.testing.assert_close(torch.stack(found, 1), whole[:, 10:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "positions"])
def test_a_text_goes_on_beyond_the_block(name: str) -> None:
    """The model then sees the last tokens that fit, from position 0."""
    model, text = built(replace(LLAMA, **BLOCKS[name])), tokens(1, 30)[0].tolist()
    found = [column[0] for column in generate(model, text, LLAMA.vocab_size, None, 1, Sampling(25, temperature=0.0))]
    for number, token in enumerate(found):
        with torch.no_grad():
            newest = torch.tensor([[*text, *found[:number]][-LLAMA.block_size :]])
            assert token == int(model(newest)[0, -1].argmax())


@pytest.mark.parametrize("name", BLOCKS)
def test_no_token_attends_to_later_tokens(name: str) -> None:
    model = built(replace(LLAMA, **BLOCKS[name]))
    x = tokens(1, 40)
    changed = x.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % LLAMA.vocab_size
    before, after = model.hidden(x), model.hidden(changed)
    torch.testing.assert_close(before[:, :25], after[:, :25])
    assert not torch.allclose(before[:, 25:], after[:, 25:])


def test_queries_and_keys_that_are_turned_know_their_distance_alone() -> None:
    turn = rotation(replace(LLAMA, head_dim=16, block_size=300, rope_theta=500.0))
    q, k = torch.randn(2, 1, 1, 3, 16, generator=torch.Generator().manual_seed(0))

    def score(query: int, key: int) -> Tensor:
        return (rotate(q, turn[:, query : query + 1]) * rotate(k, turn[:, key : key + 1])).sum(-1)

    for distance in (0, 1, 37):
        torch.testing.assert_close(score(50 + distance, 50), score(200 + distance, 200), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(score(51, 50), score(52, 50), atol=1e-2)
    torch.testing.assert_close(rotate(q, turn[:, 250:251]).norm(dim=-1), q.norm(dim=-1))


def definition(q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor | None) -> Tensor:
    """Attention with the mask written out, and keys repeated for each head of queries."""
    t, groups = q.shape[2], q.shape[1] // k.shape[1]
    k, v = (z.repeat_interleave(groups, 1) for z in (k, v))
    seen = torch.zeros(q.shape[0], 1, t, t, dtype=torch.bool)
    for query in range(t):
        for key in range(query + 1):
            near = window is None or query - key < window
            same = (
                torch.ones(q.shape[0], dtype=torch.bool)
                if documents is None
                else documents[:, query] == documents[:, key]
            )
            seen[:, 0, query, key] = same & near
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("heads_of_keys", [1, 2, 4])
@pytest.mark.parametrize(
    ("t", "window", "documented"),
    [(30, None, False), (30, 7, False), (30, 40, False), (30, None, True), (QUERIES + 44, 60, True)],
)
def test_attention_is_that_of_its_mask(heads_of_keys: int, t: int, window: int | None, documented: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, t, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(2, heads_of_keys, t, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    documents = (torch.rand(2, t, generator=generator) < 0.1).cumsum(1) if documented else None
    masks = build_masks(t, window, documents, q)
    assert (masks is None) == (not documented and (window or t) >= t)
    found = causal_attention(q, k, v, None, masks=masks)
    expected = definition(q, k, v, window, documents)
    torch.testing.assert_close(found, expected)
    pairs = (torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (found, expected))
    for f, e in zip(*pairs, strict=True):
        torch.testing.assert_close(f, e)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "positions"])
def test_a_document_has_the_logits_that_it_has_alone(name: str) -> None:
    """Three documents in a window, each with the end of a text before it. Learned positions go on, so they are cut."""
    cfg = replace(LLAMA, **BLOCKS[name])
    end, x = 7, tokens(2, 40) % 7  # no other id is 7
    starts = (0, 13, 29)
    x[:, list(starts)] = end
    together = built(cfg, document_start=end)(x)
    for first, after in zip(starts, (*starts[1:], 40), strict=True):
        alone = built(cfg)
        if cfg.position == "learned":
            positions = alone.get_submodule("embed_positions")
            with torch.no_grad():
                positions.weight.copy_(positions.weight.roll(-first, 0))
        torch.testing.assert_close(together[:, first:after], alone(x[:, first:after]), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(together[:, 30:], built(cfg)(x)[:, 30:], atol=1e-2)


@pytest.mark.parametrize("name", BLOCKS)
def test_initial_weights_are_those_of_the_paper(name: str) -> None:
    """0.02, divided by the square root of the number of branches where these have no norm after them (OLMo 2)."""
    cfg = replace(LLAMA, n_embd=256, n_head=8, vocab_size=512, **{**BLOCKS[name], "head_dim": None, "window": None})
    cfg = replace(cfg, window_every=None)
    torch.manual_seed(0)
    model = GPT(cfg)
    for name_, p in model.named_parameters():
        if p.dim() == 1:
            assert torch.all(p == (0 if name_.endswith("bias") else 1)), name_
        else:
            writes = name_.endswith(("o_proj.weight", "down_proj.weight")) and cfg.residual_norm == "pre"
            std = 0.02 / math.sqrt(2 * cfg.n_layer) if writes else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.05), name_
    torch.manual_seed(0)
    for (name_, drawn), (again, p) in zip(model.initial_weights(), model.named_parameters(), strict=True):
        assert name_ == again
        assert torch.equal(drawn, p), name_


@pytest.mark.parametrize("loss", ["plain", "chunked", pytest.param("fused", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("softcap", "z_loss"), [(None, 0.1), (2.0, 0.0), (2.0, 0.1)])
def test_softcap_and_z_loss_are_those_of_their_definitions(loss: str, softcap: float | None, z_loss: float) -> None:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(600, 24, generator=generator, requires_grad=True)
    w = torch.randn(150, 24, generator=generator, requires_grad=True)
    y = torch.randint(150, (600,), generator=generator)
    y[::7] = -1  # padding
    found = LOSSES[loss](h, w, y, softcap, z_loss)
    logits = (h @ w.T).double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, y, ignore_index=-1)
    log_z = torch.log(torch.exp(logits).sum(-1))[y >= 0]
    objective = expected + z_loss * log_z.square().mean()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for f, e in zip(*(torch.autograd.grad(z, (h, w)) for z in (found, objective)), strict=True):
        assert (f - e).norm() / e.norm() < 1e-5
    with torch.no_grad():
        assert LOSSES[loss](h, w, y, softcap, z_loss).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_softcap_bounds_the_logits_of_a_model() -> None:
    model = built(replace(LLAMA, logit_softcap=1.5))
    x = tokens(2, 20)
    assert 1.0 < model(x).abs().max() <= 1.5
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    for one in (plain_cross_entropy, chunked_cross_entropy):
        model.loss = one
        torch.testing.assert_close(model(x, x), loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_checkpointed_blocks_have_the_same_gradients(name: str) -> None:
    cfg, x = replace(LLAMA, **BLOCKS[name]), tokens(2, 40)

    def gradients(every: int) -> list[Tensor]:
        model = built(cfg, activation_checkpointing=every, document_start=3)
        return list(torch.autograd.grad(model(x, x), list(model.parameters())))

    for found, expected in zip(gradients(2), gradients(0), strict=True):
        assert torch.equal(found, expected)
