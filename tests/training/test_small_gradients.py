"""The measured gradients of single micro-batches: in this process, and in runs with DDP and with trees."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import events
from safetensors.torch import load_file

from gptexp.config.batch import plan_batch
from gptexp.config.compose import compose
from gptexp.config.noise_scale import Norms
from gptexp.config.run_plan import PlannedStep
from gptexp.config.schema import ModelConfig
from gptexp.data.loader import MicroBatch, build_dataset, micro_batches
from gptexp.distributed.ranks import Rank
from gptexp.distributed.reduction import MeanReduction
from gptexp.distributed.sharding import WholeParameters
from gptexp.model.gpt import GPT
from gptexp.model.loss import plain_cross_entropy
from gptexp.process.errors import ConfigError
from gptexp.process.signals import StopRequest
from gptexp.run.job import Job
from gptexp.run.rank import run
from gptexp.storage import run_dir
from gptexp.training.small_gradients import SmallGradients
from gptexp.training.step import Probe, TrainStep


def gradients(model: GPT, batches: list[MicroBatch]) -> torch.Tensor:
    """The gradient of each micro-batch's mean loss, by plain torch; (micro-batches, parameters)."""
    found = []
    for batch in batches:
        model.zero_grad()
        model(batch.x, batch.y).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    model.zero_grad()
    return torch.stack(found).double()


class Case:
    """A small model, the micro-batches of a step and their gradients, and a step that changes no weight."""

    def __init__(self, micro_steps: int, **block: Any) -> None:
        torch.manual_seed(0)
        self.model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=64, **block))
        self.batches = [MicroBatch(t[:, :-1], t[:, 1:], 0, 0) for t in torch.randint(64, (2 * micro_steps, 9)).split(2)]
        self.gradients = gradients(self.model, self.batches)[:2]
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        optimizer.param_groups[0]["initial_lr"] = 0.0
        self.step = TrainStep(self.model, optimizer, MeanReduction(None), 1.0, nullcontext, dropout=False)
        self.small = SmallGradients(self.model, WholeParameters(self.model))

    def check(self) -> None:
        """Check the numbers of a step that is measured."""
        g, probe = self.gradients, Probe(small_gradients=self.small)
        numbers = self.step(iter(self.batches), len(self.batches), lr_factor=1.0, probe=probe).read()
        assert numbers.small_sq_norm == pytest.approx(float(g.square().sum(1).mean()), rel=1e-5)
        if len(g) > 1:
            cosine = float(g[0] @ g[1] / (g[0].norm() * g[1].norm()))
            assert numbers.cosine == pytest.approx(cosine, rel=1e-4)
        else:
            assert np.isnan(numbers.cosine)

    def measured_tensors(self) -> int:
        """Number of gradients that hooks have measured in the newest pass that they measure."""
        return len(self.small._block_norms)


TODAY = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "n_kv_head": 1, "qk_norm": "head", "tied": False}


def test_a_step_measures_all_tensors_of_a_block_of_today() -> None:
    case = Case(2, bias=False, window=3, **TODAY)
    case.check()


@pytest.mark.parametrize("micro_steps", [1, 2, 4])
def test_a_step_on_one_rank_measures_its_first_two_micro_batches(micro_steps: int) -> None:
    """Also after a step that is not measured, and after a backward pass that is of no step."""
    case = Case(micro_steps)
    case.check()
    before = case.measured_tensors()
    case.step(iter(case.batches), micro_steps, lr_factor=1.0)
    (3 * case.model(case.batches[0].y, case.batches[0].x)).backward()
    case.model.zero_grad()
    assert case.measured_tensors() == before
    case.check()


@pytest.mark.parametrize("micro_steps", [2, 4])
def test_after_an_error_in_a_backward_pass_nothing_is_measured_until_the_next_step(micro_steps: int) -> None:
    case = Case(micro_steps)
    case.check()

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    failing = case.model.wte.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"), case.small(1, micro_steps):
        case.model(case.batches[0].x, case.batches[0].y).backward()
    failing.remove()
    before = case.measured_tensors()
    assert before > 0
    case.model(case.batches[0].x, case.batches[0].y).backward()
    case.model.zero_grad()
    assert case.measured_tensors() == before
    case.check()


def run_gradients(directory: Path, micro_batch: int, step: int) -> torch.Tensor:
    """The gradient of every micro-batch of a run's step `step`, computed here; (micro-batches, parameters).

    The weights are those of the checkpoint before that step.
    """
    cfg = run_dir.load_resolved(directory)
    torch.manual_seed(cfg.train.seed)
    model = GPT(cfg.model, plain_cross_entropy)
    if step:
        model.load_state_dict(load_file(directory / f"checkpoints/step-{step:08d}/model.safetensors"), strict=False)
    plan = plan_batch(cfg.batch.total_batch_size, micro_batch, cfg.seq_len, 1)
    planned = [PlannedStep(step, step * cfg.batch.total_batch_size, plan)]
    return gradients(model, list(micro_batches(build_dataset(cfg), planned, 0, torch.device("cpu"))))


@pytest.mark.parametrize(
    ("world", "micro_batch", "reduction", "seen"),
    [
        (1, 2, "mean", [(0, 1)]),  # of four micro-batches, the first two
        pytest.param(1, 4, "mean", [(0, 1)], marks=pytest.mark.slow),
        pytest.param(2, 2, "mean", [(0, 1), (2, 3)], marks=pytest.mark.e2e),  # DDP reduces in the second backward pass
        pytest.param(2, 1, "mean", [(0, 1), (4, 5)], marks=pytest.mark.slow),
        pytest.param(2, 4, "mean", [(0,), (1,)], marks=pytest.mark.e2e),  # DDP reduces in the only backward pass
        pytest.param(2, 4, "tree", [(0,), (1,)], marks=pytest.mark.slow),
        pytest.param(2, 2, "tree", [(0, 1), (2, 3)], marks=pytest.mark.e2e),
        pytest.param(4, 2, "mean", [(0,), (1,), (2,), (3,)], marks=pytest.mark.slow),
    ],
)
def test_a_run_measures_the_gradients_that_one_process_computes(
    gptexp: Any, tiny: list[str], tmp_path: Path, world: int, micro_batch: int, reduction: str, seen: Any
) -> None:
    done = gptexp(
        "train", *tiny, "train.max_steps=3", f"world.size={world}", f"batch.micro_batch_size={micro_batch}",
        f"train.reduction={reduction}", "log.noise_scale=on", "train.save_every=1", "train.keep_last=0",
        "hydra.run.dir=out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = events(tmp_path / "out", "step")
    assert len(measured) == 3
    for step, event in enumerate(measured):
        g = run_gradients(tmp_path / "out", micro_batch, step)
        cosines = (g @ g.T) / (g.norm(dim=1)[:, None] * g.norm(dim=1))
        small = float(g[[i for of_rank in seen for i in of_rank]].square().sum(1).mean())
        assert event["gns/small_sq_norm"] == pytest.approx(small, rel=1e-4)
        assert event["gns/big_sq_norm"] == pytest.approx(float(g.mean(0).square().sum()), rel=1e-4)
        assert event["gns/small_sequences"] == micro_batch
        norms = Norms(event["gns/small_sq_norm"], event["gns/big_sq_norm"], micro_batch, 8)
        if len(seen[0]) == 2:
            assert event["gns/cos"] == pytest.approx(np.mean([float(cosines[i, j]) for i, j in seen]), rel=1e-4)
        else:
            assert event["gns/cos"] == pytest.approx(norms.cosine(), rel=1e-5)
        if step == 0:  # later ones are averages
            assert event["gns/grad_sq"] == pytest.approx(norms.signal(), rel=1e-5)
            if norms.noise() > 0:
                assert event["gns/tokens"] == pytest.approx(16 * norms.noise() / norms.signal(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_a_compiled_model_has_the_same_measured_gradients(
    gptexp: Any, tiny: list[str], tmp_path: Path, micro_batch: int
) -> None:
    """Under DDP, with two micro-steps and with one."""
    found = []
    for compiled in ("off", "on"):
        done = gptexp(
            "train", *tiny, "train.max_steps=2", "world.size=2", f"batch.micro_batch_size={micro_batch}",
            f"train.compile={compiled}", f"hydra.run.dir={compiled}-run",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        first = events(tmp_path / f"{compiled}-run", "step")[0]
        found.append([first[f"gns/{name}"] for name in ("small_sq_norm", "big_sq_norm", "cos")])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize(
    "micro_batch", [pytest.param(2, marks=pytest.mark.e2e), pytest.param(4, marks=pytest.mark.slow)]
)
def test_measuring_changes_no_bit_of_the_weights(
    gptexp: Any, tiny: list[str], tmp_path: Path, micro_batch: int
) -> None:
    """On two ranks, with two micro-steps and with one."""
    weights = []
    for wanted in ("on", "off"):
        done = gptexp(
            "train", *tiny, "world.size=2", f"batch.micro_batch_size={micro_batch}", f"log.noise_scale={wanted}",
            f"hydra.run.dir={wanted}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        weights.append((tmp_path / wanted / "checkpoints/step-00000004/model.safetensors").read_bytes())
        assert ("gns/tokens" in events(tmp_path / wanted, "step")[0]) == (wanted == "on")
    assert weights[0] == weights[1]


def test_only_steps_that_are_logged_are_measured(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []  # the steps done when a measurement is read
    steps = 0
    plain_measured, plain_step = SmallGradients.measured, TrainStep.__call__

    def measure(self: SmallGradients) -> torch.Tensor:
        measured.append(steps)
        return plain_measured(self)

    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        report = plain_step(*args, **kwargs)
        steps += 1
        return report

    monkeypatch.setattr(SmallGradients, "measured", measure)
    monkeypatch.setattr(TrainStep, "__call__", train_step)
    cfg = compose([*tiny, "train.max_steps=12", "train.log_every=3", "train.eval_every=0", "log.sample_tokens=0"])
    assert run(Job(cfg, tmp_path, Rank(), StopRequest())) == 0
    assert measured == [event["step"] for event in events(tmp_path, "step")] == [0, 3, 6, 9, 11]


@pytest.mark.e2e
def test_a_resumed_run_continues_its_averages(gptexp: Any, tiny: list[str], tmp_path: Path) -> None:
    """The averages are over logged steps only. They are equal to those of an uninterrupted run."""

    def train(out: str, *more: str) -> None:
        done = gptexp("train", *tiny, "train.max_steps=12", "train.log_every=3", f"hydra.run.dir={out}", *more)
        assert done.returncode == 0, done.stderr

    train("whole")
    # The same run without its last checkpoint, as after a kill.
    train("cut", "train.save_every=6", "train.keep_last=0")
    last = tmp_path / "cut/checkpoints/step-00000012"
    last.rename(last.with_name("gone"))
    path = tmp_path / "cut/summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "running"}))
    assert run_dir.load_config(tmp_path / "cut").log.noise_scale == "auto"
    done = gptexp("resume", "cut")
    assert done.returncode == 0, done.stderr
    whole, cut = (events(tmp_path / out, "step") for out in ("whole", "cut"))
    assert [event["step"] for event in cut] == [0, 3, 6, 9, 11]
    assert [event["gns/grad_sq"] for event in cut] == [event["gns/grad_sq"] for event in whole]


def test_a_refused_measurement_creates_no_directory(gptexp: Any, tiny: list[str], tmp_path: Path) -> None:
    refused = gptexp("train", *tiny, "batch.micro_batch_size=8", "log.noise_scale=on", "hydra.run.dir=out")
    assert refused.returncode == 2
    assert (
        "log.noise_scale=on: the estimate compares micro-batches, and a step on one rank has only one" in refused.stderr
    )
    assert "use batch.micro_batch_size=4" in refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.e2e
def test_a_run_that_cannot_measure_the_noise_scale_prints_the_reason(
    gptexp: Any, tiny: list[str], tmp_path: Path
) -> None:
    done = gptexp("train", *tiny, "batch.micro_batch_size=8", "log.progress=lines", "hydra.run.dir=out")
    assert "noise scale     not measured: the estimate compares micro-batches" in done.stdout
    assert not any(key.startswith("gns/") for key in events(tmp_path / "out", "step")[0])


def test_an_automatic_micro_batch_that_cannot_be_measured_is_refused_by_the_rank(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the rank knows the size that `auto` selects."""
    cfg = compose([*tiny, "batch.micro_batch_size=auto", "log.noise_scale=on"])
    with pytest.raises(ConfigError, match=r"log.noise_scale=on: .*use batch.micro_batch_size=4"):
        run(Job(cfg, tmp_path, Rank(), StopRequest()))


@pytest.mark.e2e
def test_a_config_error_of_a_rank_sets_the_exit_code_of_the_command(gptexp: Any, tiny: list[str]) -> None:
    late = gptexp("train", *tiny, "batch.micro_batch_size=auto", "log.noise_scale=on", "hydra.run.dir=late")
    assert late.returncode == 2
    assert "use batch.micro_batch_size=4" in late.stderr
