"""The gradient noise scale against brute force: all pairs of gradients, a known covariance, one process for several."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import events

from gptexp import run_dir
from gptexp.batch import plan_batch
from gptexp.config import Config
from gptexp.data.loader import build_dataset, micro_batches
from gptexp.loss import plain_cross_entropy
from gptexp.model import GPT
from gptexp.noise_scale import NoiseScale, Norms, unmeasurable
from gptexp.report.noise_scale import end_scale, ratio_interval

B = 3  # sequences of a small gradient


def gradients(n: int = 6, width: int = 40) -> np.ndarray:
    """Gradients of `n` micro-batches, (n, width), with something in common."""
    draw = np.random.default_rng(0)
    return 0.3 * draw.normal(size=width) + draw.normal(size=(n, width))


def norms_of(g: np.ndarray, scale: float = 1.0) -> Norms:
    """Of all small gradients; `scale` is what somebody forgot to multiply their squares by."""
    return Norms(float((g**2).sum(1).mean()) * scale, float((g.mean(0) ** 2).sum()), B, B * len(g))


def check_identities(signal: Callable[[Norms], float], noise: Callable[[Norms], float], scale: float = 1.0) -> None:
    """What the two estimates are when every small gradient was measured."""
    g = gradients()
    pairs = [float(g[i] @ g[j]) for i, j in itertools.permutations(range(len(g)), 2)]
    norms = norms_of(g, scale)
    assert signal(norms) == pytest.approx(np.mean(pairs), rel=1e-6)
    assert noise(norms) == pytest.approx(B * g.var(axis=0, ddof=1).sum(), rel=1e-6)


def test_estimates_are_the_mean_pairwise_product_and_the_sample_variance() -> None:
    check_identities(Norms.signal, Norms.noise)


@pytest.mark.parametrize(
    "mutant",
    [
        (Norms.signal, Norms.noise, 1 / 6**2),  # the loss was divided by the accumulation steps, and nobody undid it
        (lambda n: (6 * n.big - n.small) / 6, Norms.noise, 1.0),  # n for n - 1
        (Norms.signal, lambda n: B * (n.small - n.big), 1.0),
        (lambda n: n.big, Norms.noise, 1.0),  # the biased estimate
    ],
)
def test_mutants_break_the_identities(mutant: Any) -> None:
    with pytest.raises(AssertionError):
        check_identities(*mutant)


def test_cosine_is_that_of_pairs() -> None:
    g = gradients()
    pairs = [float(g[i] @ g[j]) for i, j in itertools.permutations(range(len(g)), 2)]
    assert norms_of(g).cosine() == pytest.approx(np.mean(pairs) / np.mean((g**2).sum(1)), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_a_known_noise_scale_is_found_from_four_of_32_micro_batches(seed: int) -> None:
    """Loss |θ - x|²/2 with x ~ N(0, S): a sequence's gradient has covariance S, and |G| is |θ|."""
    draw = np.random.default_rng(seed)
    width, m, world, accumulated, steps = 2000, 8, 2, 16, 200
    spread = np.sqrt(1 + np.arange(width) % 7)
    theta = draw.normal(size=width) * 0.35
    truth = float((spread**2).sum() / (theta**2).sum())
    averages = NoiseScale()
    for step in range(1, steps + 1):
        # A mean of m sequences is itself Gaussian: drawn as such.
        means = theta - draw.normal(size=(world * accumulated, width)) * spread / math.sqrt(m)
        first = means.reshape(world, accumulated, width)[:, :2].reshape(-1, width)  # the first two of each rank
        sequences = m * world * accumulated
        norms = Norms(float((first**2).sum(1).mean()), float((means.mean(0) ** 2).sum()), m, sequences)
        averages.take(norms, step * 1000, 1e9)
    assert averages.sequences == pytest.approx(truth, rel=0.05)


def test_averages_forget_by_half_in_a_half_life_whatever_the_batch_size() -> None:
    """Equal numbers of tokens weigh alike: one large step as two of half its size."""
    early, late = Norms(10.0, 2.0, 1, 8), Norms(4.0, 3.0, 1, 8)
    coarse, fine = NoiseScale(), NoiseScale()
    for averages, step in ((coarse, 1000), (fine, 500)):
        for tokens in range(step, 3001, step):
            averages.take(early if tokens <= 2000 else late, tokens, 1000)
    assert (coarse.signal, coarse.noise) == pytest.approx((fine.signal, fine.noise))
    # Weights 1/8, 1/4 and 1/2, from the oldest thousand tokens to the newest.
    assert coarse.signal == pytest.approx((0.375 * early.signal() + 0.5 * late.signal()) / 0.875)


def test_no_signal_is_no_number() -> None:
    averages = NoiseScale()
    averages.take(Norms(10.0, 0.5, 1, 8), 1, 10)
    assert averages.signal < 0
    assert math.isnan(averages.sequences)
    assert math.isnan(NoiseScale().sequences)


def run_gradients(directory: Path, micro_batch: int) -> torch.Tensor:
    """The gradient of every micro-batch of a run's first step, computed here; (micro-batches, parameters)."""
    cfg = run_dir.load_config(directory)
    torch.manual_seed(cfg.train.seed)
    model = GPT(cfg.model, plain_cross_entropy)
    plan = plan_batch(cfg.batch.total_batch_size, micro_batch, cfg.seq_len, 1)
    found = []
    for batch in micro_batches(build_dataset(cfg), plan, 0, 0, 1, torch.device("cpu")):
        model.zero_grad()
        model(batch.x, batch.y).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return torch.stack(found).double()


@pytest.mark.parametrize(
    ("world", "micro_batch", "reduction", "seen"),
    [
        (1, 2, "mean", [(0, 1)]),  # four micro-batches, of each rank its first two
        (1, 4, "mean", [(0, 1)]),
        (2, 2, "mean", [(0, 1), (2, 3)]),  # DDP reduces in the second backward pass
        (2, 1, "mean", [(0, 1), (4, 5)]),
        (2, 4, "mean", [(0,), (1,)]),  # DDP reduces in the only one
        (2, 4, "tree", [(0,), (1,)]),
        (2, 2, "tree", [(0, 1), (2, 3)]),
        (4, 2, "mean", [(0,), (1,), (2,), (3,)]),
    ],
)
def test_every_way_of_measuring_sees_what_one_process_computes(
    gptexp: Any, tiny: list[str], tmp_path: Path, world: int, micro_batch: int, reduction: str, seen: Any
) -> None:
    done = gptexp(
        "train", *tiny, "train.max_steps=2", f"world.size={world}", f"batch.micro_batch_size={micro_batch}",
        f"train.reduction={reduction}", "log.noise_scale=on", "hydra.run.dir=out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first = events(tmp_path / "out", "step")[0]
    g = run_gradients(tmp_path / "out", micro_batch)
    cosines = (g @ g.T) / (g.norm(dim=1)[:, None] * g.norm(dim=1))
    small = float(g[[i for of_rank in seen for i in of_rank]].square().sum(1).mean())
    assert first["gns/small_sq_norm"] == pytest.approx(small, rel=1e-4)
    assert first["gns/big_sq_norm"] == pytest.approx(float(g.mean(0).square().sum()), rel=1e-4)
    assert first["gns/small_sequences"] == micro_batch
    norms = Norms(first["gns/small_sq_norm"], first["gns/big_sq_norm"], micro_batch, 8)
    if len(seen[0]) == 2:
        assert first["gns/cos"] == pytest.approx(np.mean([float(cosines[i, j]) for i, j in seen]), rel=1e-4)
    else:
        assert first["gns/cos"] == pytest.approx(norms.cosine(), rel=1e-5)
    assert first["gns/grad_sq"] == pytest.approx(norms.signal(), rel=1e-5)
    if norms.noise() > 0:
        assert first["gns/tokens"] == pytest.approx(16 * norms.noise() / norms.signal(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_hooks_see_the_same_in_a_compiled_model(gptexp: Any, tiny: list[str], tmp_path: Path, micro_batch: int) -> None:
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


def test_measuring_changes_no_bit(gptexp: Any, tiny: list[str], tmp_path: Path) -> None:
    for micro_batch in (2, 4):
        weights = []
        for wanted in ("on", "off"):
            out = f"{micro_batch}-{wanted}"
            done = gptexp(
                "train", *tiny, "world.size=2", f"batch.micro_batch_size={micro_batch}", f"log.noise_scale={wanted}",
                f"hydra.run.dir={out}",
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            weights.append((tmp_path / out / "checkpoints/step-00000004/model.safetensors").read_bytes())
            assert ("gns/tokens" in events(tmp_path / out, "step")[0]) == (wanted == "on")
        assert weights[0] == weights[1]


def test_what_is_not_logged_is_not_measured(start: Any, tiny: list[str], sabotage: Any, tmp_path: Path) -> None:
    count = """
        plain = m.SmallGradients.measured
        def measured(self):
            open("measured.txt", "a").write("x")
            return plain(self)
        m.SmallGradients.measured = measured
        """
    env = sabotage("gptexp.small_gradients", count)
    training = start("train", *tiny, "train.max_steps=12", "train.log_every=3", env=env)
    assert training.wait(100) == 0
    assert len((tmp_path / "measured.txt").read_text()) == 5  # steps 0, 3, 6, 9 and the last


def test_only_logged_steps_are_averaged_and_a_resumed_run_goes_on_averaging(
    gptexp: Any, tiny: list[str], tmp_path: Path
) -> None:
    def train(out: str, *more: str) -> None:
        done = gptexp("train", *tiny, "train.max_steps=12", "train.log_every=3", f"hydra.run.dir={out}", *more)
        assert done.returncode == 0, done.stderr

    train("whole")
    # The same run with its last checkpoints gone, as a kill leaves it.
    train("cut", "train.save_every=6", "train.keep_last=0")
    config = yaml.safe_load((tmp_path / "cut/config.yaml").read_text())
    last = tmp_path / "cut/checkpoints/step-00000012"
    last.rename(last.with_name("gone"))
    path = tmp_path / "cut/summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "running"}))
    assert config["log"]["noise_scale"] == "auto"
    done = gptexp("resume", "cut")
    assert done.returncode == 0, done.stderr
    whole, cut = (events(tmp_path / out, "step") for out in ("whole", "cut"))
    assert [event["step"] for event in cut] == [0, 3, 6, 9, 11]
    assert [event["gns/grad_sq"] for event in cut] == [event["gns/grad_sq"] for event in whole]


def test_one_micro_batch_on_one_rank_is_refused_with_the_way_out(gptexp: Any, tiny: list[str], tmp_path: Path) -> None:
    refused = gptexp("train", *tiny, "batch.micro_batch_size=8", "log.noise_scale=on", "hydra.run.dir=out")
    assert refused.returncode == 2
    assert "log.noise_scale=on: one micro-batch on one rank has nothing to be compared with" in refused.stderr
    assert "use batch.micro_batch_size=4" in refused.stderr
    assert not (tmp_path / "out").exists()
    # Left on auto it is not measured, and the start says why.
    done = gptexp("train", *tiny, "batch.micro_batch_size=8", "log.progress=lines", "hydra.run.dir=out")
    assert "noise scale     not measured: one micro-batch on one rank" in done.stdout
    assert not any(key.startswith("gns/") for key in events(tmp_path / "out", "step")[0])
    # What `auto` comes to, only the rank knows.
    late = gptexp("train", *tiny, "batch.micro_batch_size=auto", "log.noise_scale=on", "hydra.run.dir=late")
    assert late.returncode == 2
    assert "use batch.micro_batch_size=4" in late.stderr


def test_neighbouring_text_is_no_sample() -> None:
    cfg = Config()
    assert unmeasurable(cfg, 8, 2) is None
    cfg.data.order = "sequential"
    assert "use data.order=shuffled" in str(unmeasurable(cfg, 8, 2))


def test_the_interval_of_a_ratio_holds_the_truth_as_often_as_it_says() -> None:
    """Fieller's, over 2,000 draws of correlated pairs; a mutant without the covariance would hold it too often."""
    draw = np.random.default_rng(0)
    above, below, n, draws = 6.0, 2.0, 10, 2000
    held = 0
    for _ in range(draws):
        common = draw.normal(size=n)
        low, high = ratio_interval(above + 3 * common, below + common + 0.3 * draw.normal(size=n))
        held += low <= above / below <= (high or math.inf)
    assert 0.935 < held / draws < 0.965


def test_a_signal_that_may_be_zero_has_no_upper_end() -> None:
    draw = np.random.default_rng(0)
    low, high = ratio_interval(6 + 0.1 * draw.normal(size=10), 0.1 + draw.normal(size=10))
    assert high is None
    # Whatever lies below it makes the difference of the means significant.
    pairs = draw.normal(size=(10, 2))
    pairs += np.array([6.0, 0.2]) - pairs.mean(0)
    low, high = ratio_interval(*pairs.T)
    assert high is None
    assert low > 0
    rest = pairs @ [1, -low]
    t = rest.mean() / (rest.std(ddof=1) / math.sqrt(10))
    assert abs(t) == pytest.approx(2.262, abs=0.001)  # Student's quantile, 9 degrees of freedom


def test_the_end_of_a_run_tells_its_scale() -> None:
    exact = [Norms(2 * (1 + 6 / 1), 2 * (1 + 6 / n), 1, n) for n in (4, 8) * 20]
    scale = end_scale(exact, seq_len=100)
    assert scale is not None
    assert (scale.tokens, scale.low, scale.high) == pytest.approx((600, 600, 600))
    assert end_scale(exact[:9], 100) is None  # too few
    assert end_scale([Norms(8.0, 0.5, 1, 8)] * 20, 100) is None  # no signal
