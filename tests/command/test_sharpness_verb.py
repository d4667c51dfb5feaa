"""`gptexp sharpness`: of a run's checkpoints, and the arguments that it refuses."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import BYTES
from real_runs import weights

from gptexp.config.schema import ModelConfig
from gptexp.data.loader import build_dataset
from gptexp.model.gpt import GPT
from gptexp.optim import AdamWConfig
from gptexp.run.sharpness import _scale
from gptexp.storage import run_dir
from gptexp.training.optimizer import build_optimizer

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> Path:
    own = [*BYTES, "train.max_steps=8", "train.save_every=4", "train.keep_last=0", "optim.lr=1e-2", "schedule=constant"]
    assert gptexp("train", *tiny, *own, "schedule.warmup_tokens=0", "hydra.run.dir=run").returncode == 0
    return tmp_path / "run"


@pytest.mark.e2e
def test_sharpness_is_that_of_the_runs_own_loss_and_checkpoints(run: Path, gptexp: Gptexp) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = gptexp("sharpness", "run", "--all", "--sequences", "12")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["step"] for row in rows] == [4, 8]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    for row in rows:
        assert 0 < row["sharpness/hessian"] < row["sharpness/preconditioned"]
        assert row["sharpness/threshold"] == pytest.approx(38 / 1e-2)
    newest, older = (gptexp("sharpness", "run", "--sequences", "12", *more) for more in ((), ("--checkpoint", "4")))
    assert [json.loads(one.stdout) for one in (older, newest)] == rows

    config = run_dir.load_resolved(run)
    dataset = build_dataset(config)
    starts = dataset.order.train_starts(torch.arange(12).numpy(), dataset.seq_len)
    x = torch.from_numpy(dataset.rows(dataset.train, starts).astype("int64"))
    gpt, saved = GPT(config.model), weights(run)
    gpt.load_state_dict({**saved, "lm_head.weight": saved["wte.weight"]})
    loss = gpt.eval()(x[:, :-1], x[:, 1:])
    gradient = torch.autograd.grad(loss, list(gpt.parameters()))
    norm = torch.cat([g.flatten() for g in gradient]).norm()
    with torch.no_grad():
        for p, g in zip(gpt.parameters(), gradient, strict=True):
            p += 0.05 * g / norm
        moved = gpt(x[:, :-1], x[:, 1:])
    assert rows[-1]["sharpness/sam"] == pytest.approx(float(moved - loss.detach()), rel=0.01)


def test_a_group_of_parameters_counts_with_its_own_learning_rate_and_eps() -> None:
    """P^(-1/2) · sqrt(lr of the group / lr), where P is the denominator of Adam's first update."""
    optim = AdamWConfig(lr=1e-2, beta1=0.0, eps=1e-3)
    torch.manual_seed(0)
    own = {"parametrisation": "completep", "base_n_embd": 8, "base_n_head": 2, "base_n_layer": 1}
    gpt = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=32, **own))  # type: ignore[arg-type]
    optimizer = build_optimizer(gpt, optim, fused=False)
    x = torch.randint(32, (2, 9))
    gpt(x[:, :-1], x[:, 1:]).backward()
    optimizer.step()
    found = _scale(gpt, optimizer, optim).split([p.numel() for p in gpt.parameters()])
    for (name, p), of_parameter in zip(gpt.named_parameters(), found, strict=True):
        assert p.grad is not None
        eps = 1e-3 / (2 if name.startswith(("w", "ln_f")) else 4)  # a width twice that of the base, two layers
        factor = 1 / 2 if ".c_" in name and name.endswith("weight") else 1
        expected = factor**0.5 / (p.grad.abs() + eps) ** 0.5
        torch.testing.assert_close(of_parameter.view_as(p), expected, rtol=1e-4, atol=0)


def test_text_that_has_changed_is_refused(run: Path, gptexp: Gptexp, corpus: Path, tmp_path: Path) -> None:
    """The fixed batch would be another one."""
    (tmp_path / "other.txt").write_text(corpus.read_text()[1:])
    path = run / "config.yaml"
    path.write_text(path.read_text().replace(str(corpus), str(tmp_path / "other.txt")))
    refused = gptexp("sharpness", "run")
    assert refused.returncode == 3
    assert "step-00000008: trained on other tokens (" in refused.stderr


@pytest.mark.e2e
def test_other_optimizers_have_no_preconditioned_sharpness(gptexp: Gptexp, tiny: list[str]) -> None:
    assert gptexp("train", *tiny, *BYTES, "optim=sgd", "hydra.run.dir=run").returncode == 0
    [row] = map(json.loads, gptexp("sharpness", "run", "--sequences", "4").stdout.splitlines())
    assert row["sharpness/hessian"] > 0
    assert (row["sharpness/preconditioned"], row["sharpness/threshold"]) == (None, None)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (["--sequences", "0"], 2, "--sequences=0: must be 1 or above"),
        (["--sequences", "100000"], 2, "--sequences=100000: the run's text has "),
        (["--checkpoint", "5"], 2, "--checkpoint=5: no checkpoint of step 5; the run has 8, 4"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    run: Path, gptexp: Gptexp, argv: list[str], code: int, line: str
) -> None:
    refused = gptexp("sharpness", run.name, *argv)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (code, 1), refused.stderr
    assert line in refused.stderr
