"""Whole runs with the parts of examples/own_parts: swept, killed and resumed, and read where they are not installed."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import events, processes_of, runs, summary, wait_for
from real_runs import begun, equal, newest
from safetensors.torch import load_file

from gptexp.config.compose import compose
from gptexp.model.own_model import OwnModel
from gptexp.model.shapes import count_parameters
from gptexp.process.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples/own_parts"
OWN = ["--config-dir", str(EXAMPLE / "conf"), "optim=adan", "schedule=stairs"]
Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment in which the example's package is importable."""
    monkeypatch.syspath_prepend(EXAMPLE)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLE), os.environ.get("PYTHONPATH", "")])}


def test_adan_follows_its_paper(lab: dict[str, str]) -> None:
    """Algorithm 1 with the paper's betas (1 - ours), in float64, by scalars; with the bias corrections of its code."""
    from my_lab.optim import Adan  # type: ignore[import-not-found]

    weight = torch.tensor([0.5, -2.0], dtype=torch.float64, requires_grad=True)
    optimizer = Adan([weight], lr=0.1, weight_decay=0.02)
    b1, b2, b3 = 0.02, 0.08, 0.01
    m, v, n, theta, before = [0.0] * 2, [0.0] * 2, [0.0] * 2, weight.tolist(), [0.0] * 2
    for step in range(1, 6):
        weight.grad = (weight**2 * step).detach()
        gradient = weight.grad.tolist()
        optimizer.step()
        for i, g in enumerate(gradient):
            change = g - before[i] if step > 1 else 0.0
            m[i] = (1 - b1) * m[i] + b1 * g
            v[i] = (1 - b2) * v[i] + b2 * change
            n[i] = (1 - b3) * n[i] + b3 * (g + (1 - b2) * change) ** 2
            first, second, third = (1 - (1 - b) ** step for b in (b1, b2, b3))
            rate = 0.1 / ((n[i] / third) ** 0.5 + 1e-8)
            theta[i] = (theta[i] - rate * (m[i] / first + (1 - b2) * v[i] / second)) / (1 + 0.02 * 0.1)
            before[i] = g
    torch.testing.assert_close(weight.tolist(), theta, rtol=1e-12, atol=0)


def test_a_run_of_own_parts_says_what_it_imports_and_is_read_without_it(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, lab: dict[str, str]
) -> None:
    done = gptexp("train", *tiny, *OWN, "train.max_steps=8", "hydra.run.dir=out", env=lab)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"part +(\w+)=(\w+): (\S+) from (\S+)", done.stdout + done.stderr) == [
        ("optim", "adan", "my_lab.optim.Adan", str(EXAMPLE / "my_lab/optim.py")),
        ("schedule", "stairs", "my_lab.schedule.stairs", str(EXAMPLE / "my_lab/schedule.py")),
    ]
    rates = [e["optim/lr"] for e in events(tmp_path / "out", "step")]
    assert len({round(rate, 12) for rate in rates[1:]}) == 4  # after the warm-up of a step: three stairs down
    config = (tmp_path / "out/config.yaml").read_text()
    assert "_target_: my_lab.optim.Adan" in config
    for verb in ("report", "ls", "status", "sample"):  # the package is not installed here
        read = gptexp(verb, "out")
        assert read.returncode == 0, read.stderr
    (tmp_path / "out/summary.json").unlink()
    refused = gptexp("resume", "out")
    assert refused.returncode == 2
    assert "my_lab" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


METRICS = """
import random, torch
def drawn(model, tokenizer, batches):
    random.random(), torch.rand(3)
    assert not model.training and not torch.is_grad_enabled()
    x, y = next(batches)
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
    with torch.enable_grad():
        model(x, y).backward()
    return {"loss": loss, "id": tokenizer.n_vocab, "nan": float("nan")}
def fails(model, tokenizer, batches):
    raise KeyError("no such metric")
def leaves(model, tokenizer, batches):
    raise SystemExit(3)
"""


def test_an_evaluation_neither_changes_a_run_nor_ends_it(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, lab: dict[str, str]
) -> None:
    (tmp_path / "metrics.py").write_text(METRICS)
    env = {**lab, "PYTHONPATH": str(tmp_path)}
    names = ("drawn, every_tokens: 256", "fails", "leaves")
    own = f"train.evaluations=[{', '.join(f'{{_target_: metrics.{name}}}' for name in names)}]"
    argv = [*tiny, "train.max_steps=4", "model.dropout=0.1", "log.progress=lines"]
    assert gptexp("train", *argv, "hydra.run.dir=plain").returncode == 0
    done = gptexp("train", *argv, own, "hydra.run.dir=own", env=env)
    assert done.returncode == 0, done.stderr
    assert equal(tmp_path / "plain", tmp_path / "own")
    assert "KeyError: 'no such metric' (" in done.stderr
    assert 'raise KeyError("no such metric")' in done.stderr
    found = [e for e in events(tmp_path / "own", "eval") if "eval/drawn/loss" in e]
    assert [e["step"] for e in found] == [1, 3]
    assert found[-1]["eval/drawn/nan"] is None
    assert re.search(r"eval/drawn/loss: [\d.]+ \| eval/drawn/id: .* \| eval/drawn/nan: not finite", done.stdout)
    assert found[-1]["eval/drawn/loss"] == pytest.approx(found[-1]["val/loss"], rel=0.2)


STEP_METRICS = """
import torch
def gradient(model):
    norms = [p.grad.norm() for p in model.parameters()]
    torch.manual_seed(torch.randint(9, ()).item())
    return {"norm": torch.stack(norms).norm(), "tensors": len(norms)}
def weights(model, order: float = 2.0):
    return sum(float(p.norm(order)) ** 2 for p in model.parameters()) ** 0.5
def fails(model):
    return torch.zeros(2)
"""


@pytest.mark.e2e
def test_metrics_of_steps_see_weights_and_clipped_gradients(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, lab: dict[str, str]
) -> None:
    """Over two ranks. The norms are those of the clipped gradient, and of the weights in the checkpoint."""
    (tmp_path / "step.py").write_text(STEP_METRICS)
    entries = [f"{{_target_: step.{name}}}" for name in ("gradient", "weights", "fails")]
    names = ", ".join([*entries, "{_target_: my_lab.step_metric.norms, name: ratios, least_rows: 32}"])
    argv = [*tiny, "world.size=2", "model.dropout=0.1", "optim.grad_clip=0.5", "train.log_every=2", "train.max_steps=6"]
    argv += ["train.save_every=2", "train.keep_last=0"]
    assert gptexp("train", *argv, "hydra.run.dir=plain").returncode == 0
    env = {**lab, "PYTHONPATH": os.pathsep.join([str(tmp_path), lab["PYTHONPATH"]])}
    done = gptexp("train", *argv, f"log.metrics=[{names}]", "log.tensorboard=true", "hydra.run.dir=own", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("it is not called again") == 1
    assert equal(tmp_path / "plain", tmp_path / "own")
    logged = events(tmp_path / "own", "step")
    assert [e["step"] for e in logged] == [0, 2, 4, 5]
    for event in logged:
        assert event["own/gradient/norm"] == pytest.approx(min(0.5, event["optim/grad_norm"]), rel=1e-4)
    saved = load_file(tmp_path / "own/checkpoints/step-00000002/model.safetensors")
    norm = sum(float(w.norm()) ** 2 for w in saved.values()) ** 0.5
    assert [e["own/weights"] for e in logged if e["step"] == 2] == [pytest.approx(norm, rel=1e-6)]
    assert {name for name in logged[0] if "ratios" in name} == {"own/ratios/wte.weight"} | {
        f"own/ratios/h.0.{name}.weight" for name in ("attn.c_attn", "mlp.c_fc")
    }
    assert gptexp("report", "own").returncode == 0
    assert {path.stem for path in (tmp_path / "own/pictures").iterdir()} >= {
        "own-gradient",
        "own-weights",
        "own-ratios",
    }
    [shown] = json.loads(gptexp("compare", "own", "plain", "--json").stdout)["runs"][:1]
    assert shown["own/weights"] == logged[-1]["own/weights"]
    again = gptexp("train", "--like", "own", "hydra.run.dir=again", env=env)
    assert (again.returncode, len(events(tmp_path / "again", "step"))) == (0, 4), again.stderr


LSTM = ["model=lstm", "model.width=16", "model.dropout=0.1", "model.block_size=16"]


LATE = """
import torch
class Late(torch.optim.Optimizer):
    def __init__(self, params, lr: float = 1e-3, as_list: bool = False):
        super().__init__(params, {"lr": lr})
        self.as_list = as_list
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["seen"] = state.get("seen", 0) + 1
                if state["seen"] == 3:
                    slow = torch.zeros_like(p)
                    state |= {"slow": [slow] if self.as_list else slow, "since": 0}
                if state["seen"] >= 3:
                    slow = state["slow"][0] if self.as_list else state["slow"]
                    slow.lerp_(p.grad, 0.1)
                    state["since"] += 1
                    p.add_(slow / (1 - 0.9 ** state["since"]), alpha=-group["lr"])
"""


def test_state_that_an_optimizer_begins_later_is_resumed_with_the_same_bits_or_refused(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    (tmp_path / "late.py").write_text(LATE)
    (tmp_path / "conf/optim").mkdir(parents=True)
    (tmp_path / "conf/optim/late.yaml").write_text("_target_: late.Late\nlr: 0.01\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    argv = ["train", "--config-dir", "conf", *tiny, "optim=late", "optim.lr=1e-2", "data.tokenizer=bytes"]
    argv += ["train.max_steps=8", "train.save_every=4"]
    for name, more in (("plain", []), ("list", ["optim.as_list=true"])):
        done = gptexp(*argv, *more, f"hydra.run.dir={name}", env=env)
        assert done.returncode == 0, done.stderr
        shutil.copytree(tmp_path / name, tmp_path / f"{name}-again")
        shutil.rmtree(newest(tmp_path / f"{name}-again"))
        (tmp_path / f"{name}-again/summary.json").unlink()
    assert gptexp("resume", "plain-again", env=env).returncode == 0
    assert equal(tmp_path / "plain", tmp_path / "plain-again")
    refused = gptexp("resume", "list-again", env=env)
    assert refused.returncode == 4
    assert "state that begins after the first step, and a list" in refused.stderr.splitlines()[-1]


def test_a_block_of_the_users_own_is_causal_and_there_are_as_many_as_asked(lab: dict[str, str]) -> None:
    overrides = ["model=conv", "model.n_layer=3", "model.n_embd=32", "model.kernel=4", "model.vocab_size=320"]
    cfg = compose(overrides, config_dir=str(EXAMPLE / "conf")).model
    model = OwnModel(cfg)
    block = (32 * 32 * 4 + 32) + 32 * 128 + 64 * 32 + 2 * 32
    assert count_parameters(cfg) == sum(p.numel() for p in model.parameters()) == 3 * block + (320 + 64) * 32 + 64
    x = torch.randint(0, 64, (2, 64))
    later = torch.cat([x[:, :40], torch.randint(0, 64, (2, 24))], dim=1)
    with torch.no_grad():
        assert torch.equal(model(x)[:, :40], model(later)[:, :40])
        assert not torch.equal(model(x)[:, 40:], model(later)[:, 40:])
    for key in ("model.n_head=2", "model.kernl=3", "model.n_layer=0"):
        with pytest.raises(ConfigError):
            compose([*overrides, key], config_dir=str(EXAMPLE / "conf"))


@pytest.mark.e2e
def test_a_block_of_the_users_own_is_trained_and_read(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, lab: dict[str, str]
) -> None:
    """Over two ranks as over one, stopped and resumed with the same bits."""
    own = [text for text in tiny if not text.startswith("model")]
    argv = ["--config-dir", str(EXAMPLE / "conf"), *own, "model=conv", "model.n_layer=1", "model.n_embd=16"]
    argv += ["model.block_size=16", "data.tokenizer=bytes"]
    for name, more in (("one", []), ("two", ["world.size=2"]), ("rest", ["train.max_minutes=1e-9"]), ("rest", [])):
        done = gptexp("train", *argv, *more, f"hydra.run.dir={name}", env=lab)
        assert done.returncode == 0, done.stderr
    assert equal(tmp_path / "one", tmp_path / "rest")
    losses = [[e["train/loss"] for e in events(tmp_path / name, "step")] for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert gptexp("report", "one").returncode == gptexp("compare", "one", "two").returncode == 0
    assert gptexp("sample", "one", "--max-new-tokens", "20", env=lab).returncode == 0


def with_lstm(tiny: list[str]) -> list[str]:
    return [*(text for text in tiny if not text.startswith("model")), *LSTM]


@pytest.mark.e2e
def test_an_own_model_is_planned_trained_evaluated_and_sampled(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, lab: dict[str, str]
) -> None:
    argv = [*with_lstm(tiny), *OWN]
    planned = gptexp("plan", *argv, env=lab)
    assert planned.returncode == 0, planned.stderr
    assert re.search(r"memory .* activations is unknown", planned.stdout)
    for ranks in (1, 2):
        done = gptexp("train", *argv, f"world.size={ranks}", "model.dropout=0", f"hydra.run.dir={ranks}", env=lab)
        assert done.returncode == 0, done.stderr
    losses = [[e["train/loss"] for e in events(tmp_path / f"{ranks}", "step")] for ranks in (1, 2)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    evaluated = gptexp("evaluate", "1", env=lab)
    assert json.loads(evaluated.stdout)["val/loss"] == pytest.approx(
        summary(tmp_path / "1")["final_val_loss"], rel=1e-5
    )
    sampled = gptexp("sample", "1", "--max-new-tokens", "40", "--prompt", "a", env=lab)
    assert sampled.returncode == 0, sampled.stderr
    assert "part model=lstm: my_lab.model.LSTM from" in sampled.stderr
    refused = gptexp("export", "1", "hf", env=lab)
    assert refused.returncode == 2
    assert "not-exportable" in refused.stderr.splitlines()[-1]
    for verb in ("report", "ls", "status"):
        assert gptexp(verb, "1").returncode == 0
    for verb in ("sample", "evaluate"):
        missing = gptexp(verb, "1")
        assert missing.returncode == 2
        assert "my_lab" in missing.stderr


@pytest.mark.e2e
@pytest.mark.parametrize("model", ["nano", "lstm"])
def test_own_parts_killed_on_two_ranks_end_with_the_same_bits(
    gptexp: Gptexp, start: Start, tiny: list[str], tmp_path: Path, lab: dict[str, str], model: str
) -> None:
    argv = [
        *(with_lstm(tiny) if model == "lstm" else tiny),
        *OWN,
        "world=ddp2",
        "train.max_steps=40",
        "train.save_every=10",
    ]
    assert gptexp("train", *argv, "hydra.run.dir=whole", env=lab).returncode == 0
    process = start("train", *argv, "hydra.run.dir=cut", env=lab)
    wait_for(begun(tmp_path / "cut", 12), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while processes_of(tmp_path / "cut"):
        time.sleep(0.02)
    done = gptexp("resume", "cut", env=lab)
    assert done.returncode == 0, done.stderr
    assert equal(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.e2e
def test_own_parts_are_arms_of_a_sweep_whose_proposals_run(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, lab: dict[str, str]
) -> None:
    grid = ["optim=adan,adamw", "optim.lr=1e-3,4e-3", "train.max_steps=8", "sweep.name=ab"]
    swept = gptexp("train", "-m", *tiny, *OWN[:2], "schedule=stairs", *grid, env=lab)
    assert swept.returncode == 0, swept.stderr
    assert len(runs(tmp_path / "outputs/ab")) == 4
    report = gptexp("report", "outputs/ab")
    assert {"optim=adan", "optim=adamw"} <= set(report.stdout.split())
    [proposal] = re.findall(r"gptexp (train .*optim=adan .*)", report.stdout)[:1]
    assert "_target_" not in proposal
    assert "_source_" not in proposal
    done = gptexp(*shlex.split(proposal), env=lab)
    assert done.returncode == 0, done.stderr
    assert len(runs(tmp_path / "outputs/ab")) == 5


FAILING = """
import torch
class Fails(torch.optim.Optimizer):
    def __init__(self, params, lr: float, at: int = 3):
        super().__init__(params, {"lr": lr})
        self.at, self.steps = at, 0
    def step(self):
        self.steps += 1
        if self.steps == self.at:
            self.divide()
    def divide(self):
        return 1 / (self.steps - self.at)
class Model(torch.nn.Module):
    def __init__(self, vocab_size, block_size):
        super().__init__()
        self.own = torch.nn.Embedding(vocab_size, 4)
    def forward(self, x):
        return self.own(x) @ torch.ones(5, 5)
def slope(tokens, warmup_tokens, decay_tokens):
    return 1.0
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.e2e)])
@pytest.mark.parametrize(
    ("file", "target", "line"),
    [
        ("optim/own.yaml", "failing.Fails", "optim=own: in step 3: ZeroDivisionError: division by zero ("),
        ("model/own.yaml", "failing.Model", "model=own: in step 1: RuntimeError: "),
    ],
)
def test_a_part_that_raises_ends_the_run_with_its_own_lines(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, file: str, target: str, line: str, ranks: int
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    option = tmp_path / "conf" / file
    option.parent.mkdir(parents=True)
    option.write_text(f"_target_: {target}\n")
    argv = [text for text in tiny if not (text.startswith("model") and file.startswith("model"))]
    own = ["--config-dir", "conf", f"{option.parent.name}=own", "train.save_every=1", f"world.size={ranks}"]
    more = ["model.block_size=16"] if file.startswith("model") else []
    done = gptexp("train", *argv, *own, *more, "hydra.run.dir=out", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1, done.stderr
    assert f"gptexp: {line}" in done.stderr
    assert "torch/nn/modules" not in done.stderr, "only the user's own lines"
    assert "failing.py" in done.stderr
    assert "gptexp resume" in done.stderr
    assert summary(tmp_path / "out")["status"] == "failed"
    assert len(list(tmp_path.glob("out/checkpoints/step-*"))) == (2 if file.startswith("optim") else 0)


CYCLES = """
import torch
class Cycles(torch.optim.Optimizer):
    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr, "turn": 0})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["turn"] = (group["turn"] + 1) % 2
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] * (1 + group["turn"]) / state["steps"])
"""


def test_counters_of_an_own_optimizer_go_on_where_they_were(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    """Also one that has its first value again at the checkpoint."""
    (tmp_path / "cycles.py").write_text(CYCLES)
    (tmp_path / "conf/optim").mkdir(parents=True)
    (tmp_path / "conf/optim/cycles.yaml").write_text("_target_: cycles.Cycles\n")
    env = {"PYTHONPATH": str(tmp_path)}
    argv = [*tiny, "--config-dir", "conf", "optim=cycles", "optim.lr=1.0", "train.max_steps=6", "train.save_every=2"]
    assert gptexp("train", *argv, "hydra.run.dir=whole", env=env).returncode == 0
    half = shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(newest(half))
    (half / "summary.json").unlink()
    assert newest(half).name == "step-00000004"
    done = gptexp("resume", "half", env=env)
    assert done.returncode == 0, done.stderr
    assert equal(tmp_path / "whole", half)


WRONG_MODELS = """
import torch
from torch import nn
class Plain(nn.Module):
    def __init__(self, vocab_size, block_size):
        super().__init__()
        self.e, self.h = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)
    def forward(self, x):
        return self.h(self.e(x))
class Future(Plain):
    def forward(self, x):
        h = self.e(x)
        return self.h(h + h.mean(1, keepdim=True))
class Unused(Plain):
    def __init__(self, vocab_size, block_size):
        super().__init__(vocab_size, block_size)
        self.spare = nn.Linear(8, 8)
"""


@pytest.mark.e2e
def test_a_model_that_sees_later_tokens_or_has_unused_parameters_is_refused(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path
) -> None:
    (tmp_path / "wrong.py").write_text(WRONG_MODELS)
    (tmp_path / "conf/model").mkdir(parents=True)
    for name in ("Plain", "Future", "Unused"):
        (tmp_path / f"conf/model/{name.lower()}.yaml").write_text(f"_target_: wrong.{name}\nblock_size: 16\n")
    own = [text for text in tiny if not text.startswith("model")]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for name, ranks, code, named in (
        ("plain", 2, 0, ""),
        ("future", 1, 2, "later tokens"),
        ("unused", 1, 0, ""),
        ("unused", 2, 2, "spare.weight, spare.bias"),
    ):
        argv = ["train", "--config-dir", "conf", *own, f"model={name}", f"world.size={ranks}", "data.tokenizer=bytes"]
        done = gptexp(*argv, f"hydra.run.dir={name}{ranks}", env=env)
        assert (done.returncode, named in done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr
