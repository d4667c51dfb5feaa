"""Each optimizer against its published formula, and what the trainer needs of all of them."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import moments, save
from conftest import events
from real_runs import newest, weights
from torch import Tensor

from gptexp.config.compose import compose
from gptexp.config.rules import confounds_of, problems
from gptexp.config.schema import Config, ModelConfig, ScalingConfig, WorldConfig
from gptexp.distributed.sharding import WholeParameters
from gptexp.model.gpt import GPT
from gptexp.model.optimizer_state import state_bytes
from gptexp.optim import OPTIMIZERS
from gptexp.optim.base import OptimConfig, optimizer_name
from gptexp.storage.checkpoint import TrainState
from gptexp.training.optimizer import TRAINED, build_optimizer, set_lr, step_if, weights_for_use
from gptexp.training.snapshot import load_checkpoint

pytest.importorskip("pytorch_optimizer", reason="no pytorch_optimizer; pip install 'gptexp[optim]'")

TINY = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=64)
Array = np.ndarray
NAMES = [*OPTIMIZERS]
Gptexp = Callable[..., subprocess.CompletedProcess[str]]


def config(name: str, **changed: float) -> OptimConfig:
    """The start values of optim=NAME, with some changes."""
    found = compose([f"optim={name}"]).optim
    for key, value in changed.items():
        assert hasattr(found, key)
        setattr(found, key, value)
    return found


class Sgd:
    """With momentum (Sutskever et al., ICML 2013), in the form of torch, whose sum of gradients has no rate in it."""

    def __init__(self, c: OptimConfig, w: Array) -> None:
        self.c, self.m = c, np.zeros_like(w)

    def __call__(self, w: Array, g: Array, step: int) -> Array:
        g = g + self.c.weight_decay * w * (w.ndim > 1)
        self.m = self.c.momentum * self.m + g
        return w - self.c.lr * (g + self.c.momentum * self.m if self.c.nesterov else self.m)


class Lion:
    """arXiv 2302.06675, algorithm 2."""

    def __init__(self, c: OptimConfig, w: Array) -> None:
        self.c, self.m = c, np.zeros_like(w)

    def __call__(self, w: Array, g: Array, step: int) -> Array:
        c = self.c
        update = np.sign(c.beta1 * self.m + (1 - c.beta1) * g)
        self.m = c.beta2 * self.m + (1 - c.beta2) * g
        return w - c.lr * (update + c.weight_decay * w * (w.ndim > 1))


class Lamb:
    """arXiv 1904.00962 version 3, algorithm 2, with phi(z) = z; vectors by Adam (arXiv 1412.6980, algorithm 1)."""

    def __init__(self, c: OptimConfig, w: Array) -> None:
        self.c, self.m, self.v = c, np.zeros_like(w), np.zeros_like(w)

    def __call__(self, w: Array, g: Array, step: int) -> Array:
        c = self.c
        self.m = c.beta1 * self.m + (1 - c.beta1) * g
        self.v = c.beta2 * self.v + (1 - c.beta2) * g * g
        if w.ndim < 2:
            unbiased = self.v / (1 - c.beta2**step)
            return w - c.lr * self.m / (1 - c.beta1**step) / (np.sqrt(unbiased) + c.eps)
        u = self.m / (np.sqrt(self.v) + c.eps) + c.weight_decay * w
        return w - c.lr * np.linalg.norm(w) / (np.linalg.norm(u) + c.eps) * u


class Lars:
    """arXiv 1708.03888, algorithm 1; vectors by SGD."""

    def __init__(self, c: OptimConfig, w: Array) -> None:
        self.c, self.m = c, np.zeros_like(w)

    def __call__(self, w: Array, g: Array, step: int) -> Array:
        c = self.c
        if w.ndim > 1:
            norm = np.linalg.norm
            local = c.trust_coefficient * norm(w) / (norm(g) + c.weight_decay * norm(w))
            g = local * (g + c.weight_decay * w)
        self.m = c.momentum * self.m + g
        return w - c.lr * self.m


class Soap:
    """arXiv 2409.11321, algorithms 3 and 4. The first gradient only gives the first eigenbases."""

    def __init__(self, c: OptimConfig, w: Array) -> None:
        self.c, self.m, self.v = c, np.zeros_like(w), np.zeros_like(w)

    def __call__(self, w: Array, g: Array, step: int) -> Array:
        c = self.c
        sides = (lambda a: a @ a.T, lambda a: a.T @ a) if w.ndim > 1 else ()
        if step == 1:
            self.gg = [(1 - c.beta2) * side(g) for side in sides]
            self.q = [np.linalg.eigh(gg)[1][:, ::-1] for gg in self.gg]
            return w
        self.m = c.beta1 * self.m + (1 - c.beta1) * g
        self.v = c.beta2 * self.v + (1 - c.beta2) * self.into(g) ** 2
        t = step - 1
        size = c.lr * np.sqrt(1 - c.beta2**t) / (1 - c.beta1**t)
        w = w - size * self.back(self.into(self.m) / (np.sqrt(self.v) + c.eps))
        self.gg = [c.beta2 * gg + (1 - c.beta2) * side(g) for gg, side in zip(self.gg, sides, strict=True)]
        if t % c.precondition_every == 0:
            for axis, (gg, q) in enumerate(zip(self.gg, self.q, strict=True)):
                order = np.argsort(-np.diag(q.T @ gg @ q))  # as in the authors' code: large eigenvalues first
                self.v = np.take(self.v, order, axis)
                self.q[axis] = np.linalg.qr((gg @ q[:, order]).astype(np.float32))[0]
        return w * (1 - c.lr * c.weight_decay * (w.ndim > 1))

    def into(self, a: Array) -> Array:
        return self.q[0].T @ a @ self.q[1] if self.q else a

    def back(self, a: Array) -> Array:
        return self.q[0] @ a @ self.q[1].T if self.q else a


class ScheduleFree:
    """arXiv 2405.15682, algorithm 1. `x` is the average."""

    def __init__(self, c: OptimConfig, w: Array) -> None:
        self.c, self.x, self.z, self.v, self.weights = c, w, w, np.zeros_like(w), 0.0

    def __call__(self, w: Array, g: Array, step: int) -> Array:
        """`w` is y, the point of the gradient."""
        c = self.c
        self.v = c.beta2 * self.v + (1 - c.beta2) * g * g
        update = g / (np.sqrt(self.v / (1 - c.beta2**step)) + c.eps) + c.weight_decay * w * (w.ndim > 1)
        self.z = self.z - c.lr * update
        self.weights += c.lr**2
        share = c.lr**2 / self.weights
        self.x = (1 - share) * self.x + share * self.z
        return (1 - c.beta1) * self.z + c.beta1 * self.x


def rms(a: Array) -> float:
    return float(np.sqrt(np.mean(a * a)))


class Adafactor:
    """arXiv 1804.04235, algorithms 4 and 5, with the relative step of section 8."""

    def __init__(self, c: OptimConfig, w: Array) -> None:
        self.c, self.r, self.s, self.v = c, 0.0, 0.0, 0.0

    def __call__(self, w: Array, g: Array, step: int) -> Array:
        c, new = self.c, step**self.c.beta2_decay
        if w.ndim > 1:
            self.r = (1 - new) * self.r + new * (g * g).mean(1, keepdims=True)
            self.s = (1 - new) * self.s + new * (g * g).mean(0, keepdims=True)
            v = self.r @ self.s / self.r.mean()
        else:
            v = self.v = (1 - new) * self.v + new * g * g
        update = g / np.sqrt(v)
        update = update / max(1.0, rms(update) / c.clip_threshold)
        size = max(1e-3, rms(w)) * min(c.lr, 1 / np.sqrt(step))
        return w * (1 - c.lr * c.weight_decay * (w.ndim > 1)) - size * update


class NAdamW:
    """Dozat, ICLR workshop 2016, at a constant momentum, with the decay of arXiv 1711.05101."""

    def __init__(self, c: OptimConfig, w: Array) -> None:
        self.c, self.m, self.v = c, np.zeros_like(w), np.zeros_like(w)

    def __call__(self, w: Array, g: Array, step: int) -> Array:
        c = self.c
        self.m = c.beta1 * self.m + (1 - c.beta1) * g
        self.v = c.beta2 * self.v + (1 - c.beta2) * g * g
        m = c.beta1 * self.m / (1 - c.beta1 ** (step + 1)) + (1 - c.beta1) * g / (1 - c.beta1**step)
        v = self.v / (1 - c.beta2**step)
        return w * (1 - c.lr * c.weight_decay * (w.ndim > 1)) - c.lr * m / (np.sqrt(v) + c.eps)


REFERENCES = {
    "sgd": Sgd, "lion": Lion, "lamb": Lamb, "lars": Lars, "soap": Soap, "schedulefree": ScheduleFree,
    "adafactor": Adafactor, "nadamw": NAdamW,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        *((name, {}) for name in REFERENCES),
        ("sgd", {"momentum": 0.8}),
        ("sgd", {"momentum": 0.8, "nesterov": True}),
        ("soap", {"precondition_every": 1}),
    ],
)
def test_three_steps_equal_the_published_formula(name: str, changed: dict[str, float]) -> None:
    c = config(name, lr=0.02, weight_decay=0.1, **changed)
    torch.manual_seed(0)
    # SOAP's eigenbases are determined by one gradient only if it has full rank on both sides.
    model = torch.nn.Linear(4 if name == "soap" else 5, 4).double()
    optimizer = build_optimizer(model, c, False)
    expected = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    reference = {n: REFERENCES[name](c, w) for n, w in expected.items()}
    for step in (1, 2, 3):
        for n, p in model.named_parameters():
            p.grad = torch.randn_like(p)
            expected[n] = reference[n](expected[n], p.grad.numpy().copy(), step)
        optimizer.step()
        for n, p in model.named_parameters():
            rtol = 1e-5 if name == "nadamw" else 1e-6  # torch keeps the product of its beta1 in float32
            np.testing.assert_allclose(p.detach().numpy(), expected[n], rtol=rtol, err_msg=f"{n}, step {step}")
    if name == "schedulefree":
        with weights_for_use(optimizer):
            for n, p in model.named_parameters():
                np.testing.assert_allclose(p.detach().numpy(), reference[n].x, rtol=1e-6)


@pytest.mark.parametrize("name", ["adafactor", "lamb", "lars"])
def test_the_formula_holds_for_the_sizes_of_a_large_model(name: str) -> None:
    """Gradients that are clipped to a norm of 1 over a hundred million numbers, and matrices of norm 30, in float32."""
    c = config(name, lr=0.02)
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    with torch.no_grad():
        model.weight.mul_(30 / model.weight.norm())
    optimizer = build_optimizer(model, c, False)
    expected = model.weight.detach().double().numpy().copy()
    reference, start = REFERENCES[name](c, expected), expected.copy()
    for step in (1, 2, 3):
        model.weight.grad = 1e-5 * torch.randn(30, 40) * torch.logspace(-1, 0, 30)[:, None]
        expected = reference(expected, model.weight.grad.double().numpy().copy(), step)
        optimizer.step()
    moved, wanted = model.weight.detach().double().numpy() - start, expected - start
    assert np.linalg.norm(moved - wanted) < 1e-3 * np.linalg.norm(wanted)


def gradients(model: GPT, step: int) -> None:
    torch.manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn_like(p)


def tiny(seed: int = 0, m: ModelConfig = TINY) -> GPT:
    torch.manual_seed(seed)
    return GPT(m)


GATED = replace(TINY, norm="rmsnorm", position="rope", mlp="swiglu", qk_norm="head", tied=False)


@pytest.mark.parametrize(("m", "count"), [(TINY, 4), (GATED, 7)])
def test_muon_updates_the_matrices_of_the_blocks_and_adamw_the_rest(m: ModelConfig, count: int) -> None:
    c = config("muon", lr=0.02)
    model, twin = tiny(m=m), tiny(m=m)
    joined = build_optimizer(model, c, False)
    matrices = [p for n, p in twin.named_parameters() if n.startswith(("h.", "layers.")) and p.dim() == 2]
    assert len(matrices) == count
    others = {dim: [p for n, p in twin.named_parameters() if p.dim() == dim and all(p is not m for m in matrices)]
              for dim in (2, 1)}  # fmt: skip
    muon = torch.optim.Muon(matrices, 0.02, 0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([{"params": others[2]}, {"params": others[1], "weight_decay": 0.0}], 0.02, (0.9, 0.95),
                              weight_decay=0.1)  # fmt: skip
    for step in range(3):
        gradients(model, step)
        gradients(twin, step)
        joined.step()
        muon.step()
        adamw.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


LIKE_ADAM, ROWS, PARAMETERS, TIMESCALE = "is_like_adam", "may_split_rows", "may_split_parameters", "has_timescale"
FLAGS = {
    "adamw": ({LIKE_ADAM, ROWS, PARAMETERS, TIMESCALE}, ("beta1", "beta2")),
    "nadamw": ({LIKE_ADAM, ROWS, PARAMETERS, TIMESCALE}, ("beta1", "beta2")),
    "sgd": ({ROWS, PARAMETERS, TIMESCALE}, ()),
    "lion": ({LIKE_ADAM, ROWS, PARAMETERS, TIMESCALE}, ("beta2",)),
    "lamb": (set[str](), ("beta1", "beta2")),
    "lars": ({PARAMETERS}, ()),
    "muon": ({TIMESCALE}, ("beta1", "beta2", "momentum")),
    "soap": ({PARAMETERS, TIMESCALE}, ("beta1", "beta2")),
    "schedulefree": ({LIKE_ADAM, ROWS, TIMESCALE}, ("beta2",)),
    "adafactor": ({PARAMETERS, TIMESCALE}, ()),
}


def test_the_program_may_do_with_an_optimizer_what_its_algorithm_allows() -> None:
    flags = (LIKE_ADAM, ROWS, PARAMETERS, TIMESCALE)
    said = {name: ({f for f in flags if getattr(o, f)}, o.decay_rates) for name, o in OPTIMIZERS.items()}
    assert said == FLAGS
    assert {name for name, cls in OPTIMIZERS.items() if cls.step_dependence} == {"adafactor", "soap"}
    assert {name for name, cls in OPTIMIZERS.items() if cls.averages_weights} == {"schedulefree"}
    assert {*OPTIMIZERS} == {*REFERENCES, "adamw", "muon"}, "an optimizer without a formula"


@pytest.mark.e2e
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_updated_alike_alone_if_the_optimizer_says_so(name: str) -> None:
    """World.sharding=full gives each rank some rows of a matrix, as a parameter of its own."""

    def updated(parts: int) -> Tensor:
        torch.manual_seed(0)
        weight, steps = torch.randn(6, 4), torch.randn(3, 6, 4)
        rows = [torch.nn.Parameter(part.clone()) for part in weight.chunk(parts)]
        named = {f"h.{number}": p for number, p in enumerate([*rows, torch.nn.Parameter(torch.ones(2))])}
        optimizer = build_optimizer(torch.nn.Module(), config(name, lr=0.01), False, named)
        for gradient in steps:
            for p, part in zip(rows, gradient.chunk(parts), strict=True):
                p.grad = part.clone()
            named[f"h.{parts}"].grad = torch.ones(2)
            optimizer.step()
        return torch.cat([p.detach() for p in rows])

    assert torch.equal(updated(1), updated(3)) == OPTIMIZERS[name].may_split_rows


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", NAMES)
def test_an_update_takes_a_gradient_that_is_not_finite_if_the_optimizer_says_so(name: str, value: float) -> None:
    """As the first update, on which alone SOAP computes eigenvectors, and as a later one."""

    def raises(bad_step: int) -> bool:
        model = tiny()
        optimizer = build_optimizer(model, config(name), False)
        for step in range(12):
            gradients(model, step)
            if step >= bad_step:
                model.wpe.weight.grad = torch.full_like(model.wpe.weight, value)
            try:
                optimizer.step()
            except torch.linalg.LinAlgError:
                return True
        return False

    assert (raises(0) or raises(1)) == (not OPTIMIZERS[name].takes_nonfinite)


@dataclass
class Silent(OptimConfig):
    name: str = optimizer_name("silent")


def test_nothing_is_allowed_to_an_optimizer_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "silent", Silent)
    model = ModelConfig(parametrisation="mup", base_n_embd=256, base_n_head=4)
    cfg = Config(model, optim=Silent(), world=WorldConfig(size=2, sharding="full"))
    cfg.scaling = ScalingConfig(betas="half_life", weight_decay="tau", reference_tokens=1024)
    assert {problem.code for problem in problems(cfg, 2)} >= {
        "parametrisation-of-adam", "sharding-of-matrices", "nothing-to-scale",
    }  # fmt: skip
    cfg.world.sharding = "optimizer"
    assert "sharding-of-optimizer" in {problem.code for problem in problems(cfg, 2)}
    assert any("optim=silent" in line for line in confounds_of({"optim.name": "silent"}))


@pytest.mark.e2e
def test_no_optimizer_imports_the_compiler() -> None:
    """It would take a second of each start."""
    script = """
import sys, torch
from gptexp.optim import OPTIMIZERS
from gptexp.training.optimizer import build_optimizer
for name, cls in OPTIMIZERS.items():
    model = torch.nn.Linear(4, 4)
    optimizer = build_optimizer(model, cls(), False)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if "torch._dynamo" in sys.modules:
        sys.exit(name)"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.e2e
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_in_exactly_one_group_and_vectors_do_not_decay(name: str) -> None:
    model = tiny()
    groups = build_optimizer(model, config(name, weight_decay=0.3), False).param_groups
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    for group in groups:
        assert all(group["weight_decay"] == (0.3 if p.dim() > 1 else 0.0) for p in group["params"])


@pytest.mark.e2e
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_not_clipped_inside(name: str) -> None:
    """Adaptive optimizers do not see the size of gradients; the updates of the others are proportional to it.

    The second gradient has 64 times the norm of the first. Of the smaller ones neither norm is above 1, of the larger
    ones the second is 33, so a limit between would change how the two are weighted.
    """
    moved = []
    for factor in (1.0, 64.0):  # powers of two change no rounding
        model = tiny().double()
        c = config(name, lr=1e-3, weight_decay=0.0)
        if hasattr(c, "eps"):
            c.eps = 1e-30
        optimizer, before = build_optimizer(model, c, False), [p.detach().clone() for p in model.parameters()]
        for step in (0, 1):
            gradients(model, step)
            for p in model.parameters():
                p.grad *= factor * 2.0 ** (-13 if step == 0 else -7)
            optimizer.step()
        moved.append([p.detach() - b for p, b in zip(model.parameters(), before, strict=True)])
    for small, large in zip(*moved, strict=True):
        grows = name == "sgd" or (name == "lars" and small.dim() == 1)
        wanted = small * (64.0 if grows else 1.0)
        assert (large - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("name", ["adamw", "nadamw", "lamb", "muon", "schedulefree"])
def test_a_first_update_by_tiny_gradients_has_the_size_that_eps_gives_it(name: str) -> None:
    """|g| / (|g| + eps) for a vector, with a g far below the root of what an implementation may add to g²."""
    c, moved = config(name, lr=1e-3, weight_decay=0.0), []
    for c.eps in (1e-12, 3e-10, 1e-6):
        model = tiny().double()
        vector, optimizer = model.ln_f.weight.detach(), build_optimizer(model, c, False)
        before = vector.clone()
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-10)
        optimizer.step()
        moved.append((vector - before).norm().item())
    assert moved == pytest.approx([moved[0] * (1 + 0.01) / (1 + eps) for eps in (0.01, 3, 10_000)], rel=1e-6)


@pytest.mark.e2e
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    c = config(name, lr=0.01)

    def advance(model: GPT, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            set_lr(optimizer, 1 / (1 + step))
            gradients(model, step)
            step_if(torch.tensor(True), optimizer)

    model = tiny()
    optimizer = build_optimizer(model, c, True)
    advance(model, optimizer, range(12))
    trained_at = [p.detach().clone() for p in model.parameters()]
    with weights_for_use(optimizer):
        path = save(tmp_path / "c", model, optimizer, TrainState(step=12, tokens=12))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), trained_at, strict=True))
    advance(model, optimizer, range(12, 24))
    other = tiny(9)
    resumed = build_optimizer(other, c, True)
    load_checkpoint(path, WholeParameters(other), resumed)
    advance(other, resumed, range(12, 24))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(TRAINED in state for state in resumed.state.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_as_large_as_is_said(name: str) -> None:
    """Of real steps, the second of which may add something, on real memory."""
    model, c = tiny(), config(name)
    optimizer = build_optimizer(model, c, True)
    for step in (0, 1):
        gradients(model, step)
        optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [t for value in values for t in (value if isinstance(value, list) else [value]) if isinstance(t, Tensor)]
    assert state_bytes(c, TINY) == 4 * sum(t.numel() for t in tensors if t.dim())


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_before_the_first_update_can_be_loaded(name: str, tmp_path: Path) -> None:
    """train.nonfinite=skip may skip all updates so far."""
    c, model = config(name), tiny()
    optimizer = build_optimizer(model, c, True)
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    step_if(torch.tensor(False), optimizer)
    with weights_for_use(optimizer):
        path = save(tmp_path / "c", model, optimizer, TrainState(step=1, tokens=1, skipped_updates=1))
    other = tiny(9)
    load_checkpoint(path, WholeParameters(other), build_optimizer(other, c, True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.e2e
def test_a_schedule_free_run_logs_and_saves_its_averaged_weights(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    run = ["optim=schedulefree", "optim.lr=1e-2", "train.max_steps=6", "hydra.run.dir=run"]
    kept = [text for text in tiny if not text.startswith("schedule")]
    done = gptexp("train", *kept, *run)
    assert done.returncode == 0, done.stderr
    logged = events(tmp_path / "run", "eval")[-1]["val/loss"]
    assert json.loads(gptexp("evaluate", "run").stdout)["val/loss"] == pytest.approx(logged, rel=1e-6)
    saved = moments(newest(tmp_path / "run"))
    averaged = sorted(float(w.norm()) for w in weights(tmp_path / "run").values())
    trained_at = sorted(float(tensor.norm()) for name, tensor in saved.items() if name.endswith(f".{TRAINED}"))
    assert len(averaged) == len(trained_at)
    assert all(a != t for a, t in zip(averaged, trained_at, strict=True))


@pytest.mark.e2e
@pytest.mark.parametrize("name", NAMES)
def test_one_batch_is_learnt_by_heart(name: str) -> None:
    lr = {"sgd": 0.5, "lars": 1.0, "adafactor": 0.1, "lion": 3e-3, "lamb": 3e-2}.get(name, 1e-2)
    changed = {"trust_coefficient": 0.02} if name == "lars" else {}
    model, x = tiny(), torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))
    optimizer = build_optimizer(model, config(name, lr=lr, weight_decay=0.0, **changed), False)
    for step in range(300):
        set_lr(optimizer, 1.0 if name == "schedulefree" else 1 - step / 300)
        loss = model(x[:, :-1], x[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with weights_for_use(optimizer), torch.no_grad():
        assert float(model(x[:, :-1], x[:, 1:])) < 0.05


def test_a_schedule_free_model_is_used_with_its_averaged_weights() -> None:
    model = tiny()
    optimizer = build_optimizer(model, config("schedulefree", lr=0.05), False)
    with weights_for_use(optimizer):
        pass  # before the first step there is no average
    for step in range(5):
        gradients(model, step)
        optimizer.step()
    trained = [p.detach().clone() for p in model.parameters()]
    with weights_for_use(optimizer):
        assert not any(torch.equal(p, t) for p, t in zip(model.parameters(), trained, strict=True))
    assert all(torch.equal(p, t) for p, t in zip(model.parameters(), trained, strict=True))
