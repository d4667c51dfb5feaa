"""`model.parametrisation`: the entries of its table, the forward pass against a plain one, equal bits at the base."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gptexp.config.schema import ModelConfig
from gptexp.model.gpt import GPT
from gptexp.model.huggingface import as_standard
from gptexp.model.parametrisation import describe
from gptexp.optim import OPTIMIZERS, AdamWConfig, OptimConfig
from gptexp.training.optimizer import build_optimizer, describe_groups, set_lr

BASE = ModelConfig(n_layer=2, n_head=4, n_embd=64, block_size=16, vocab_size=96)
OF_BASE: dict[str, Any] = {"base_n_embd": 64, "base_n_head": 4}
# Four times as wide, with heads twice as large; three times as deep.
LARGE = replace(BASE, n_layer=6, n_head=8, n_embd=256)
MUP = replace(LARGE, parametrisation="mup", **OF_BASE)
COMPLETEP = replace(LARGE, parametrisation="completep", **OF_BASE, base_n_layer=2)
X = torch.randint(BASE.vocab_size, (4, 16), generator=torch.Generator().manual_seed(0))

# science.md D8 with m_d = 4, m_L = 3, 8 and 6 layers: (std of c_attn and c_fc, std of c_proj).
INITIAL = {"standard": (0.02, 0.02 / 12**0.5), "mup": (0.01, 0.01 / 12**0.5), "completep": (0.01, 0.01 / 4**0.5)}
# Kind of parameter -> factors of (lr, weight decay, eps).
OPTIMIZER = {
    "standard": {"matrix": (1, 1, 1), "vector": (1, 0, 1), "embedding": (1, 1, 1), "final": (1, 0, 1)},
    "mup": {"matrix": (1 / 4, 1, 1), "vector": (1, 0, 1), "embedding": (1, 1, 1), "final": (1, 0, 1)},
    "completep": {
        "matrix": (1 / 4, 4, 1 / 12), "vector": (1, 0, 1 / 12), "embedding": (1, 1, 1 / 4), "final": (1, 0, 1 / 4),
    },
}  # fmt: skip
MODELS = {"standard": LARGE, "mup": MUP, "completep": COMPLETEP}


def built(cfg: ModelConfig, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(cfg)


def far_from_the_start(cfg: ModelConfig) -> GPT:
    """A model whose weights are all random, also biases and LayerNorms: a missing term changes the result."""
    model = built(cfg).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2)
    return model


def kind(name: str) -> str:
    if name.startswith(("h.", "layers.")):
        return "matrix" if (".c_" in name or "_proj" in name) and name.endswith("weight") else "vector"
    return "final" if name.startswith(("ln_f", "norm")) else "embedding"


@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_have_the_standard_deviations_of_the_table(name: str) -> None:
    hidden, projection = INITIAL[name]
    for key, p in built(MODELS[name]).named_parameters():
        if p.dim() == 1:
            assert torch.all(p == (1 if key.endswith("weight") else 0)), key
        else:
            std = projection if "c_proj" in key else hidden if key.startswith("h.") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03), key


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optim", [name for name, cls in OPTIMIZERS.items() if cls.is_like_adam])
def test_each_parameter_has_the_optimizer_settings_of_the_table(name: str, optim: str) -> None:
    if optim != "adamw":
        pytest.importorskip("pytorch_optimizer", reason="no pytorch_optimizer; pip install 'gptexp[optim]'")
    cfg = OPTIMIZERS[optim](lr=0.3, weight_decay=0.5)
    model = built(MODELS[name])
    optimizer = build_optimizer(model, cfg, fused=False)
    set_lr(optimizer, 0.5)
    groups = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, model.parameters())) == sorted(id(p) for p, _ in groups)
    names = {p: key for key, p in model.named_parameters()}
    for p, group in groups:
        lr, weight_decay, eps = OPTIMIZER[name][kind(names[p])]
        assert (group["lr"], group["weight_decay"]) == pytest.approx((0.15 * lr, 0.5 * weight_decay)), names[p]
        if optim != "lion":
            assert group["eps"] == pytest.approx(1e-8 * eps), names[p]


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_of_other_blocks_have_the_settings_of_their_kind(name: str) -> None:
    """And the initial values: norms after the branches take the place of the divisor of what writes to the stream."""
    block = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "qk_norm": "head", "n_kv_head": 2, "tied": False}
    hidden, projection = INITIAL[name]
    for residual_norm in ("pre", "post"):
        model = built(replace(MODELS[name], **block, residual_norm=residual_norm))
        optimizer = build_optimizer(model, AdamWConfig(lr=0.3, weight_decay=0.5), fused=False)
        names = {p: key for key, p in model.named_parameters()}
        settings = [(p, group) for group in optimizer.param_groups for p in group["params"]]
        assert {kind(names[p]) for p, _ in settings} == {"matrix", "vector", "embedding", "final"}
        for p, group in settings:
            lr, weight_decay, eps = OPTIMIZER[name][kind(names[p])]
            found = [group["lr"], group["weight_decay"], group["eps"]]
            assert found == pytest.approx([0.3 * lr, 0.5 * weight_decay, 1e-8 * eps]), names[p]
            if p.dim() > 1:
                writes = names[p].endswith(("o_proj.weight", "down_proj.weight")) and residual_norm == "pre"
                std = projection if writes else hidden if kind(names[p]) == "matrix" else 0.02
                assert p.std().item() == pytest.approx(std, rel=0.03), names[p]


def test_the_groups_of_a_parametrisation_are_told_with_their_factors() -> None:
    embeddings, matrices, vectors = 112 * 256, 6 * 12 * 256**2, 6 * 13 * 256
    assert describe_groups(built(MUP), AdamWConfig()) == [
        f"num decayed parameter tensors: 2, with {embeddings:,} parameters",
        f"num decayed parameter tensors: 24, with {matrices:,} parameters, lr × 0.25",
        f"num non-decayed parameter tensors: 50, with {vectors + 512:,} parameters",
    ]
    of_matrices = "lr × 0.25, weight_decay × 4, eps × 0.0833333"
    assert describe_groups(built(COMPLETEP), AdamWConfig()) == [
        f"num decayed parameter tensors: 2, with {embeddings:,} parameters, eps × 0.25",
        f"num decayed parameter tensors: 24, with {matrices:,} parameters, {of_matrices}",
        f"num non-decayed parameter tensors: 48, with {vectors:,} parameters, eps × 0.0833333",
        "num non-decayed parameter tensors: 2, with 512 parameters, eps × 0.25",
    ]
    assert describe(COMPLETEP) == "completep; of the base: width 256 = 4 × 64, head size 32 = 2 × 16, depth 6 = 3 × 2"


def plain_logits(model: GPT, x: Tensor, of_scores: float, of_branches: float, of_logits: float) -> Tensor:
    """The model written out, with the factors of attention's scores, of the branches and of the logits as numbers."""
    w = dict(model.named_parameters())
    heads, size, t = model.cfg.n_head, model.cfg.n_embd // model.cfg.n_head, x.shape[1]

    def normed(h: Tensor, name: str) -> Tensor:
        h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return h * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(h: Tensor, name: str) -> Tensor:
        return h @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    h = w["wte.weight"][x] + w["wpe.weight"][:t]
    for n in range(model.cfg.n_layer):
        block = f"h.{n}"
        qkv = linear(normed(h, f"{block}.ln_1"), f"{block}.attn.c_attn")
        q, k, v = (z.unflatten(-1, (heads, size)).transpose(1, 2) for z in qkv.chunk(3, dim=-1))
        scores = (q @ k.transpose(-1, -2) * of_scores).masked_fill(torch.ones(t, t).triu(1) > 0, -math.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        h = h + of_branches * linear(y, f"{block}.attn.c_proj")
        y = linear(normed(h, f"{block}.ln_2"), f"{block}.mlp.c_fc")
        y = 0.5 * y * (1 + torch.tanh((2 / math.pi) ** 0.5 * (y + 0.044715 * y**3)))
        h = h + of_branches * linear(y, f"{block}.mlp.c_proj")
    return of_logits * (normed(h, "ln_f") @ w["wte.weight"].T)


# A head has 32 numbers, and one of the base 16.
@pytest.mark.parametrize(
    ("name", "factors"),
    [("standard", (32**-0.5, 1, 1)), ("mup", (4 / 32, 1, 1 / 4)), ("completep", (4 / 32, 1 / 3, 1 / 4))],
)
def test_the_forward_pass_has_the_factors_of_the_table(name: str, factors: tuple[float, float, float]) -> None:
    model = far_from_the_start(MODELS[name])
    expected = plain_logits(model, X, *factors)
    assert expected.std() > 0.1
    torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.logits(X), expected[:, -1], rtol=1e-4, atol=1e-4)
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), X[:, 1:].flatten())
    torch.testing.assert_close(model(X[:, :-1], X[:, 1:]), loss, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mup", "completep"])
def test_the_cache_of_keys_and_values_changes_no_logit(name: str) -> None:
    model = far_from_the_start(MODELS[name])
    cache = model.empty_cache(4, 16)
    found = [model.logits(X[:, :9], cache), *(model.logits(X[:, n : n + 1], cache) for n in range(9, 16))]
    torch.testing.assert_close(torch.stack(found, 1), model(X)[:, 8:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["mup", "completep"])
def test_a_standard_model_with_the_exported_weights_has_the_same_logits(name: str, bias: bool) -> None:
    """Beside the test against transformers: at sizes that are no powers of two, so that each factor counts."""
    sizes = {"n_layer": 3, "n_head": 3, "n_embd": 60, "base_n_embd": 24, "base_n_head": 2}
    cfg = replace(MODELS[name], **sizes, bias=bias)
    model = far_from_the_start(cfg)
    standard = built(replace(cfg, parametrisation="standard", **dict.fromkeys([*OF_BASE, "base_n_layer"])), 1).eval()
    assert not torch.allclose(standard(X), model(X), atol=0.1)
    standard.load_state_dict(as_standard(model.state_dict(), cfg))
    torch.testing.assert_close(standard(X), model(X), rtol=1e-4, atol=1e-4)


def trained(cfg: ModelConfig, optim: OptimConfig, fused: bool, steps: int = 3) -> list[Tensor]:
    """All weights after `steps` updates."""
    model = built(cfg)
    optimizer = build_optimizer(model, optim, fused)
    for step in range(steps):
        set_lr(optimizer, 0.5 + step / 4)
        model(X[:, :-1], X[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("others", [True, False], ids=["all sizes", "width only"])
@pytest.mark.parametrize("name", ["mup", "completep"])
@pytest.mark.parametrize(("optim", "fused"), [("adamw", False), ("adamw", True), ("lion", False)])
def test_at_the_base_the_bits_are_those_of_the_standard_parametrisation(
    name: str, optim: str, fused: bool, others: bool
) -> None:
    """At sizes that are no powers of two: a product by the wrong order would round differently."""
    if optim == "lion":
        pytest.importorskip("pytorch_optimizer", reason="no pytorch_optimizer; pip install 'gptexp[optim]'")
    cfg = replace(BASE, n_layer=3, n_embd=60, n_head=5)
    own = replace(cfg, parametrisation=name, base_n_embd=60)
    if others:
        own = replace(own, base_n_head=5, base_n_layer=3 if name == "completep" else None)
    config = OPTIMIZERS[optim](lr=1e-2)
    for steps in (0, 3):
        pairs = zip(trained(cfg, config, fused, steps), trained(own, config, fused, steps), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    away = trained(replace(MODELS[name], n_layer=3, n_embd=60, n_head=5), config, fused)
    assert not all(torch.equal(a, b) for a, b in zip(trained(cfg, config, fused), away, strict=True))


def test_eps_follows_the_size_of_the_gradients() -> None:
    """The ratio of gradients at two sizes, for which the table has the factors of eps, at the initial weights."""

    def sizes(cfg: ModelConfig) -> dict[str, float]:
        squares: dict[str, list[Tensor]] = {}
        for seed in range(4):
            model = built(cfg, seed)
            model(X[:, :-1], X[:, 1:]).backward()
            for name, p in model.named_parameters():
                if p.grad is not None and p.dim() > 1:
                    squares.setdefault(kind(name), []).append(p.grad.square().mean())
        return {name: torch.stack(of_kind).mean().sqrt().item() for name, of_kind in squares.items()}

    base = sizes(replace(COMPLETEP, n_layer=2, n_embd=64, n_head=4))
    wide = sizes(replace(COMPLETEP, n_layer=2, n_embd=256, n_head=16))
    deep = sizes(replace(COMPLETEP, n_layer=8, n_embd=64, n_head=4))
    assert {name: wide[name] / base[name] for name in base} == pytest.approx(
        {"matrix": 1 / 4, "embedding": 1 / 4}, rel=0.3
    )
    assert {name: deep[name] / base[name] for name in base} == pytest.approx({"matrix": 1 / 4, "embedding": 1}, rel=0.3)
