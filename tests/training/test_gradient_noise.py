"""Gradient noise: its size, when it is measured, and that all ranks and resumed runs add the same."""

import math
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BYTES, e2e_then_slow, events
from real_runs import branch_and_whole, equal, train_here, weights
from torch import Tensor, nn

from gptexp.config.batch import BatchPlan, plan_batch
from gptexp.config.branching import Parent, history_problems
from gptexp.config.compose import compose
from gptexp.config.noise_scale import NoiseScale, Norms
from gptexp.config.rules import confounds_of
from gptexp.config.schema import ModelConfig, result_deciding
from gptexp.data.loader import MicroBatch
from gptexp.distributed.ranks import Rank
from gptexp.distributed.reduction import MeanReduction
from gptexp.distributed.sharding import WholeParameters
from gptexp.model.gpt import GPT
from gptexp.optim import OPTIMIZERS, AdamWConfig, SGDConfig
from gptexp.process.errors import ConfigError
from gptexp.process.signals import StopRequest
from gptexp.run.job import Job
from gptexp.run.rank import run
from gptexp.training import loop
from gptexp.training.gradient_noise import StepNoise, step_noise
from gptexp.training.optimizer import build_optimizer
from gptexp.training.small_gradients import SmallGradients
from gptexp.training.step import Probe, TrainStep

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
PLAN = plan_batch(64, 2, 8, 1)  # eight sequences of eight tokens, in four micro-batches


def small_model() -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=64))


def batches() -> Iterator[MicroBatch]:
    tokens = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(0))
    return iter([MicroBatch(t[:, :-1], t[:, 1:], 0, 0) for t in tokens.split(2)])


def moved(noise: StepNoise | None, grad_clip: float) -> Tensor:
    """The gradient that a step of SGD goes along, with its noise."""
    model = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = build_optimizer(model, SGDConfig(lr=1.0, momentum=0.0, weight_decay=0.0), False)
    TrainStep(model, optimizer, MeanReduction(None), grad_clip, nullcontext, False)(batches(), 4, 1.0, noise=noise)
    return torch.cat([(b - p.detach()).flatten() for b, p in zip(before, model.parameters(), strict=True)])


@pytest.mark.parametrize("grad_clip", [0.0, 0.05, 100.0])
@pytest.mark.parametrize("step", [0, 1, 1000])
def test_the_norm_of_the_noise_is_its_share_of_the_clipped_gradient(step: int, grad_clip: float) -> None:
    noise = step_noise(AdamWConfig(gradient_noise=0.3), 1337, step, step * 64, PLAN, 0.0)
    clean, noisy = moved(None, grad_clip), moved(noise, grad_clip)
    share = 0.3 * (1 + step) ** -0.275
    assert float((noisy - clean).norm() / clean.norm()) == pytest.approx(share, rel=0.02)
    assert noise is not None
    assert noise.over(float(clean.norm())) == pytest.approx(share, rel=1e-9)
    if grad_clip == 0.05:
        assert float(clean.norm()) == pytest.approx(0.05, rel=1e-3)


def test_the_noise_is_gaussian_and_another_one_in_each_step_and_with_each_seed() -> None:
    def drawn(seed: int, step: int) -> Tensor:
        model = nn.ParameterList([torch.zeros(300, 200), torch.zeros(40_000)])
        for p in model:
            p.grad = torch.zeros_like(p)
        noise = step_noise(AdamWConfig(gradient_noise=1.0, gradient_noise_decay=0.0), seed, step, 0, PLAN, 0.0)
        assert noise is not None
        noise.add_to(WholeParameters(model), torch.tensor(math.sqrt(100_000)))
        return torch.cat([p.grad.flatten() for p in model])

    first = drawn(1, 0)
    assert torch.equal(first, drawn(1, 0))
    assert abs(float(first.mean())) < 0.02
    assert float((first.abs() < 1).float().mean()) == pytest.approx(0.6827, abs=0.01)
    assert float((first.abs() < 2).float().mean()) == pytest.approx(0.9545, abs=0.005)
    for other in (drawn(1, 1), drawn(2, 0), drawn(0, 1)):
        assert abs(float(first @ other / (first.norm() * other.norm()))) < 0.02
    assert abs(float(first[:40_000] @ first[60_000:])) < 0.02 * 40_000  # two tensors have different noise


def test_the_decay_counts_steps_or_tokens() -> None:
    """In tokens it does not depend on the batch size."""

    def share(step: int, tokens: int, decay_tokens: int | None) -> float:
        optim = AdamWConfig(gradient_noise=2.0, gradient_noise_decay=1.0, gradient_noise_decay_tokens=decay_tokens)
        noise = step_noise(optim, 0, step, tokens, PLAN, 0.0)
        assert noise is not None
        return noise.relative

    assert share(8, 512, None) == pytest.approx(2 / 3)
    assert share(8, 512, 64) == pytest.approx(2 / 3)
    assert share(4, 512, 64) == pytest.approx(2 / 3)
    assert share(0, 0, 64) == 2.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_gets_the_clipped_gradient_with_its_noise(name: str) -> None:
    """The embedding, which is the output layer too, gets noise once."""
    if name not in ("adamw", "sgd", "muon", "adafactor"):
        pytest.importorskip("pytorch_optimizer", reason="no pytorch_optimizer; pip install 'gptexp[optim]'")
    model, reference = small_model(), small_model()
    optimizer, seen = build_optimizer(model, compose([f"optim={name}"]).optim, False), list[Tensor]()
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))  # type: ignore[union-attr]
    step = TrainStep(model, optimizer, MeanReduction(None), 0.5, nullcontext, False)
    step(batches(), 4, 1.0, noise=StepNoise(9, 0.5, 0.0))
    for batch in batches():
        (reference(batch.x, batch.y) / 4).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    generator = torch.Generator().manual_seed(9)
    deviation = 0.5 * 0.5 / math.sqrt(sum(p.numel() for p in reference.parameters()))
    for noisy, p in zip(seen, reference.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(noisy, p.grad + deviation * torch.randn(p.shape, generator=generator))


def test_no_noise_is_no_work() -> None:
    assert step_noise(AdamWConfig(), 0, 3, 96, PLAN, 5.0) is None
    assert step_noise(AdamWConfig(gradient_noise_like_batch=16), 0, 3, 96, PLAN, 0.0) is None  # nothing known yet
    assert step_noise(AdamWConfig(gradient_noise_like_batch=64), 0, 3, 96, PLAN, 5.0) is None  # its own size


def test_noise_of_zero_changes_no_bit_and_another_one_the_weights(tiny: list[str], tmp_path: Path) -> None:
    settings = {"off": [], "zero": ["optim.gradient_noise=0", "optim.gradient_noise_decay=0"],
                "on": ["optim.gradient_noise=0.1"]}  # fmt: skip
    for name, more in settings.items():
        assert train_here([*tiny, *more, "data.tokenizer=bytes"], tmp_path / name) == 0
    assert equal(tmp_path / "off", tmp_path / "zero")
    assert not equal(tmp_path / "off", tmp_path / "on")
    logged = [event["optim/gradient_noise"] for event in events(tmp_path / "on", "step")]
    assert logged == pytest.approx([0.1 * (1 + step) ** -0.275 for step in range(4)])
    assert "optim/gradient_noise" not in events(tmp_path / "off", "step")[0]


class Gaussian(nn.Module):
    """The loss |theta - x|²/2 of sequences x ~ N(0, S): the gradient of one has covariance S, and mean theta."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.theta - x) ** 2).sum(1).mean() / 2


class Recorder(torch.optim.SGD):
    """Keeps the newest gradient, and updates nothing."""

    def __init__(self, model: Gaussian) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.param_groups[0]["initial_lr"] = 0.0
        self.seen = torch.empty(0)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        theta = self.param_groups[0]["params"][0]
        self.seen = theta.grad.detach().clone()


@pytest.mark.parametrize("grad_clip", [0.0, 5.0])
def test_the_noise_like_that_of_a_smaller_batch_has_its_variance(grad_clip: float) -> None:
    """A step has 32 sequences of 4 tokens in 16 micro-batches, and its gradient gets the noise of 8 sequences."""
    width, steps, small, big = 2000, 200, 8, 32
    draw = torch.Generator().manual_seed(0)
    spread = torch.sqrt(1.0 + torch.arange(width) % 7)
    theta = torch.randn(width, generator=draw) * 0.35
    trace = float(spread.square().sum())
    model, plan = Gaussian(theta.clone()), BatchPlan(4 * big, 2, 4, 1, 16)
    optimizer = Recorder(model)
    step = TrainStep(model, optimizer, MeanReduction(None), grad_clip, nullcontext, dropout=False)
    probe, averages = Probe(small_gradients=SmallGradients(model, WholeParameters(model))), NoiseScale()  # type: ignore[arg-type]
    optim = AdamWConfig(gradient_noise_like_batch=4 * small)
    added, deviations = [], []
    for number in range(steps):
        x = torch.randn((big, width), generator=draw) * spread
        noise = step_noise(optim, 0, number, number * 128, plan, averages.valid_noise)
        micro_batches = iter([MicroBatch(part, part, 0, 0) for part in x.split(2)])
        numbers = step(micro_batches, 16, 1.0, noise=noise, probe=probe).read()
        norms = Norms(numbers.small_sq_norm, numbers.grad_norm**2, plan.micro_batch_size, plan.sequences)
        averages.take(norms, (number + 1) * 128, 20 * 128)
        factor = min(1.0, grad_clip / numbers.grad_norm) if grad_clip else 1.0
        if number >= 20:
            gradient = theta - x.mean(0)
            added.append(float((optimizer.seen - factor * gradient).square().sum()) / factor**2)
            deviations.append(float((optimizer.seen / factor - theta).square().sum()))
        elif number == 0:
            assert noise is None
    assert np.mean(added) == pytest.approx(trace * (1 / small - 1 / big), rel=0.05)
    assert np.mean(deviations) == pytest.approx(trace / small, rel=0.05)


LIKE = ["optim.gradient_noise_like_batch=32", "train.max_steps=12", "data.tokenizer=bytes", "optim.lr=1e-2"]


@pytest.mark.parametrize("late", [False, True])
def test_a_run_takes_the_noise_from_measurements_up_to_the_last_step_but_one(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """However often it logs, evaluates and saves, and if it reads the numbers of a step one step late, as on a GPU."""
    plain = loop._Loop.__init__

    def init(self: Any, *args: Any) -> None:
        plain(self, *args)
        self.late = int(late)

    assert train_here([*tiny, *LIKE], tmp_path / "each") == 0
    monkeypatch.setattr(loop._Loop, "__init__", init)
    rarely = ["train.log_every=5", "train.eval_every=3", "train.save_every=4"]
    assert train_here([*tiny, *LIKE, *rarely], tmp_path / "rarely") == 0
    assert equal(tmp_path / "each", tmp_path / "rarely")
    steps = events(tmp_path / "each", "step")
    assert "optim/gradient_noise" not in steps[0] | steps[1]
    for now, before in zip(steps[2:], steps, strict=False):
        sq_norm = before["gns/noise_trace"] * (1 / 2 - 1 / 8)
        assert now["optim/gradient_noise"] == pytest.approx(math.sqrt(sq_norm) / now["optim/grad_norm"])
    assert [step["gns/noise_trace"] for step in events(tmp_path / "rarely", "step")] == [
        steps[number]["gns/noise_trace"] for number in (0, 5, 10, 11)
    ]


def test_a_step_without_numbers_does_not_change_which_measurements_are_used(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 5 and 6 are non-finite and skipped; the numbers are read at once, or one step late."""
    plain, forward = loop._Loop.__init__, GPT.forward

    def train(name: str, late: int) -> None:
        passes = 0

        def init(self: Any, *args: Any) -> None:
            plain(self, *args)
            self.late = late

        def broken(self: GPT, *args: Any) -> Any:
            nonlocal passes
            passes += self.training
            found = forward(self, *args)
            return found * math.nan if self.training and 16 < passes <= 24 else found

        monkeypatch.setattr(loop._Loop, "__init__", init)
        monkeypatch.setattr(GPT, "forward", broken)
        more = ["train.nonfinite=skip", "train.eval_every=0", "train.save_every=0", "train.compile=off"]
        assert train_here([*tiny, *LIKE, *more], tmp_path / name) == 0
        assert len(events(tmp_path / name, "fault")) == 2

    train("at once", 0)
    train("late", 1)
    assert equal(tmp_path / "at once", tmp_path / "late")


def test_noise_that_needs_a_measurement_is_refused_without_one(tiny: list[str], tmp_path: Path) -> None:
    like = "optim.gradient_noise_like_batch=32"
    for more, line in (
        ("batch.micro_batch_size=8", f"{like}: the estimate compares micro-batches"),
        ("log.noise_scale=off", f"log.noise_scale=off: {like} needs the noise scale; leave out one of them"),
    ):
        with pytest.raises(ConfigError) as refused:
            compose([*tiny, like, more])
        assert line in str(refused.value)
    cfg = compose([*tiny, like, "batch.micro_batch_size=auto"])  # only the rank knows the size
    with pytest.raises(ConfigError, match=f"{like}: the estimate compares .*use batch.micro_batch_size=4"):
        run(Job(cfg, tmp_path, Rank(), StopRequest()))


@pytest.mark.parametrize("noise", ["gradient_noise=0.3", "gradient_noise_like_batch=32"])
def test_a_branch_ends_with_the_noise_of_an_uninterrupted_run(tiny: list[str], tmp_path: Path, noise: str) -> None:
    assert equal(*branch_and_whole([*tiny, *BYTES, f"optim.{noise}", "train.eval_every=0"], tmp_path))


def test_a_branch_with_another_half_life_of_the_noise_is_refused() -> None:
    own = ["schedule=constant", "schedule.warmup_tokens=0", "optim.gradient_noise_like_batch=512"]

    def problems(*more: str, **longer: int) -> list[str]:
        cfg = compose([*own, "train.max_tokens=1000000", *more])
        parent = Parent(Path("/parent"), cfg, step=10, tokens=10240)
        return [*history_problems(replace(cfg, train=replace(cfg.train, **longer)), parent)]

    [line] = problems(max_tokens=2_000_000)
    assert "half-life of 10,000 tokens, 1% of the length of /parent, and this run has another length" in line
    assert problems() == []
    assert problems("log.noise_half_life_tokens=9000", max_tokens=2_000_000) == []


def test_what_the_noise_depends_on_decides_the_result() -> None:
    cfg = compose(["optim.gradient_noise_like_batch=512"])
    assert "log.noise_half_life_tokens" in result_deciding(cfg)
    assert "log.noise_half_life_tokens" not in result_deciding(compose([]))


def test_a_sweep_of_batch_sizes_warns_of_a_decay_confounds_of() -> None:
    noisy = ["optim.gradient_noise=0.3"]
    [line] = confounds_of(result_deciding(compose(noisy)))
    assert line.startswith("optim.gradient_noise_decay=0.55 counts steps, so the noise after a number of tokens")
    for more in ("optim.gradient_noise_decay=0", "optim.gradient_noise_decay_tokens=8192", "optim.gradient_noise=0"):
        assert not [*confounds_of(result_deciding(compose([*noisy, more])))]


@pytest.mark.parametrize("noise", e2e_then_slow(["gradient_noise_like_batch=32", "gradient_noise=0.5"]))
def test_the_weights_of_all_ranks_stay_equal(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, sabotage: Callable[[str, str], dict[str, str]], noise: str
) -> None:
    """Each of two ranks under DDP writes its weights' hash after every step."""
    code = f"""
        import hashlib, os
        plain = m.TrainStep.__call__
        def call(self, *args, **kwargs):
            report = plain(self, *args, **kwargs)
            content = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
            with open({str(tmp_path)!r} + "/rank-" + os.environ["RANK"], "a") as file:
                file.write(hashlib.sha256(content).hexdigest() + "\\n")
            return report
        m.TrainStep.__call__ = call
    """
    own = [*tiny, f"optim.{noise}", "world.size=2", "train.max_steps=10", "hydra.run.dir=out"]
    done = gptexp("train", *own, env=sabotage("gptexp.training.step", code))
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / f"rank-{rank}").read_text().splitlines() for rank in (0, 1))
    assert len(set(first)) == 10
    assert first == second


@pytest.mark.e2e
def test_one_rank_and_two_agree(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    """To rounding with DDP. With the tree to the last bit, as test_survival.py has it."""
    for size in (1, 2):
        done = gptexp("train", *tiny, "optim.gradient_noise=0.5", f"world.size={size}", f"hydra.run.dir={size}-ranks")
        assert done.returncode == 0, done.stderr
    one, two = (weights(tmp_path / f"{size}-ranks") for size in (1, 2))
    for name, w in one.items():
        assert float((w - two[name]).norm()) <= 1e-5 * float(w.norm()), name
