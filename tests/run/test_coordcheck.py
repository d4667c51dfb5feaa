"""`gptexp coordcheck`: slopes of known sizes, the sizes of a real model, both verdicts, and refused arguments."""

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blocks import BLOCKS
from conftest import ROOT, ForkServer

from gptexp import coordcheck
from gptexp.config.schema import ModelConfig
from gptexp.model.attention import Context
from gptexp.model.gpt import GPT
from gptexp.reporting.charts.coordinates import LIMITS, Coordinates
from gptexp.run.coordcheck import activations

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
MUP, COMPLETEP = "model.parametrisation=mup", "model.parametrisation=completep"


def of_slopes(**slopes: float) -> Coordinates:
    """Sizes that are powers of the width at each of six steps, with seeds that differ around them."""
    widths = [32, 64, 256]
    sizes = {
        name: [[[factor * width**slope for _ in range(6)] for factor in (0.5, 2.0)] for width in widths]
        for name, slope in {**dict.fromkeys(LIMITS, 0.0), **slopes}.items()
    }
    return Coordinates("mup", widths, 0.01, sizes)


@pytest.mark.parametrize(
    ("name", "slope", "passes"),
    [
        ("attention", 0.24, True), ("attention", 0.26, False), ("attention", -0.26, False),
        ("mlp", -0.24, True), ("mlp", 0.26, False), ("mlp", -0.26, False),
        ("logits", 0.09, True), ("logits", 0.11, False), ("logits", -0.59, True), ("logits", -0.61, False),
    ],
)  # fmt: skip
def test_each_slope_is_that_of_a_power_law_and_has_its_limits(name: str, slope: float, passes: bool) -> None:
    found = of_slopes(**{name: slope})
    assert [of_step.value for of_step in found.slopes[name]] == pytest.approx([slope] * 6)
    assert [line.partition(":")[0] for line in found.failures] == ([] if passes else [name])


def test_one_step_outside_of_the_limits_or_without_a_number_fails() -> None:
    found = of_slopes()
    found.sizes["mlp"][2] = [[*seed[:3], 8 * seed[3], *seed[4:]] for seed in found.sizes["mlp"][2]]
    [line] = found.failures
    expected = torch.tensor([math.log(width) for width in found.widths])
    slope = float((expected - expected.mean())[2] * math.log(8) / (expected - expected.mean()).square().sum())
    assert found.slope("mlp", 3).value == pytest.approx(slope)
    assert line == f"mlp: slope {found.slope('mlp', 3)} after 3 steps, not in -0.25 to 0.25"
    found.sizes["logits"][0][1][4] = math.nan
    assert found.failures[1].startswith("logits: slope nan after 4 steps")


def test_the_error_of_a_slope_is_its_spread_over_draws() -> None:
    """A thousand checks of four widths and five seeds, whose logs have a known spread at each width."""
    draw = np.random.default_rng(0)
    values, errors = [], []
    for _ in range(1000):
        logs = draw.normal(0, [[0.4], [0.1], [0.2], [0.3]], (4, 5))
        sizes = np.exp(logs)[..., None].tolist()
        slope = Coordinates("mup", [64, 128, 256, 512], 0.01, dict.fromkeys(LIMITS, sizes)).slope("mlp", 0)
        values.append(slope.value)
        errors.append(slope.error)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(values), rel=0.1)
    assert math.isnan(Coordinates("mup", [1, 2], 0.1, {"mlp": [[[1.0]], [[2.0]]]}).slope("mlp", 0).error)


def test_the_sizes_are_those_of_the_outputs_of_the_layers() -> None:
    torch.manual_seed(0)
    gpt = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=64, dropout=0.5))
    x = torch.randint(64, (3, 8))
    found = activations(gpt, x)
    assert gpt.training
    gpt.eval()
    expected: dict[str, list[float]] = {"attention": [], "mlp": []}
    with torch.no_grad():
        h = gpt.wte(x) + gpt.wpe(torch.arange(8))
        for block in gpt.h:
            a = block.attn(block.ln_1(h), Context())
            m = block.mlp(block.ln_2(h + a))
            h = h + a + m
            expected["attention"].append(float(a.abs().mean()))
            expected["mlp"].append(float(m.abs().mean()))
        logits = float((gpt.ln_f(h) @ gpt.wte.weight.T).abs().mean())
    assert found == pytest.approx({**{name: sum(sizes) / 2 for name, sizes in expected.items()}, "logits": logits})


def checked(tmp_path: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the numbers of a check, whose picture must exist."""
    out = tmp_path / "out"
    code = coordcheck.main([*argv, "--out", str(out)])
    assert (out / "coordcheck.png").read_bytes().startswith(b"\x89PNG")
    numbers: dict[str, Any] = json.loads((out / "coordcheck.json").read_text())
    assert numbers["passes"] == (code == 0)
    return code, numbers


def agrees_with_the_facts(numbers: dict[str, Any], passes: bool) -> None:
    """What science.md G17 asks of muP, and of the standard parametrisation as a control."""
    slopes = {name: [slope["value"] for slope in of_name] for name, of_name in numbers["slopes"].items()}
    assert {len(of_step) for of_step in slopes.values()} == {6}
    if passes:
        assert all(abs(slope) < 0.25 for name in ("attention", "mlp") for slope in slopes[name]), slopes
        assert all(-0.6 <= slope <= 0.1 for slope in slopes["logits"]), slopes
    else:
        assert all(slope > 0.4 for name in ("attention", "mlp") for slope in slopes[name]), slopes
        assert max(slopes["logits"]) > 0.4, slopes


@pytest.mark.e2e
@pytest.mark.parametrize(("parametrisation", "passes"), [("standard", False), ("mup", True)])
def test_the_standard_parametrisation_fails_and_mup_passes(
    tmp_path: Path, parametrisation: str, passes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the package's own source. A text of few words is learned within the five steps."""
    own = [f"model.parametrisation={parametrisation}", "data=text", f"data.path='{ROOT}/gptexp/**/*.py'"]
    code, numbers = checked(tmp_path, "--widths", "128,32,64", "--seeds", "6", *own, "train.device=cpu")
    assert code == (0 if passes else 1)
    assert (numbers["widths"], numbers["lr"]) == ([32, 64, 128], 0.01)
    assert numbers["parametrisation"] == ("mup, base width 32" if passes else "standard")
    agrees_with_the_facts(numbers, passes)
    logits = numbers["mean_abs"]["logits"]
    assert all(seed[5] > 3 * seed[0] for seeds in logits for seed in seeds), "it has not trained"
    said = capsys.readouterr().out
    assert ("PASS" in said, "FAIL" in said) == (passes, not passes)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "all else"])
def test_each_block_passes_in_mup_and_fails_in_the_standard_parametrisation(tmp_path: Path, name: str) -> None:
    """With two heads of queries to one of keys at each width, where a block has groups."""
    own = ["data=text", f"data.path='{ROOT}/gptexp/**/*.py'", "train.device=cpu", "model.n_head=2", "model.n_embd=32",
           *BLOCKS[name]]  # fmt: skip
    for passes in (False, True):
        chosen = f"model.parametrisation={'mup' if passes else 'standard'}"
        code, numbers = checked(
            tmp_path / chosen, "--widths", "64,128,256", "--seeds", "6", "--lr", "3e-3", *own, chosen
        )
        assert code == (0 if passes else 1), numbers["failures"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "passes"),
    [
        ([], False),
        ([MUP], True),
        ([COMPLETEP], True),
        ([MUP, "optim=lion", "--lr=3e-3"], True),
    ],
)
def test_the_verdict_over_widths_up_to_512(tmp_path: Path, own: list[str], passes: bool) -> None:
    code, numbers = checked(tmp_path, *own)
    assert (code, numbers["widths"]) == (0 if passes else 1, [64, 128, 256, 512])
    agrees_with_the_facts(numbers, passes)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--widths", "64,many"], "--widths=64,many: must be whole numbers, separated by commas"),
        (["--widths", "64,1m"], "--widths=64,1m: must be whole numbers, separated by commas"),
        (["--widths", "0.064k,7.2e1"], "--widths=0.064k,7.2e1: 72 is not a multiple of the head size 16"),
        (["--widths", "64"], "--widths=64: must be two or more different widths above 0"),
        (["--widths", "64,72"], "--widths=64,72: 72 is not a multiple of the head size 16"),
        (["--seeds", "0"], "--seeds=0: must be 1 or above"),
        (["--lr", "0"], "optim.lr=0.0: must be above 0"),
        (["optim.lr=1e-3"], "optim.lr=1e-3: the coordinate check does not read optim.lr; give --lr in its place"),
        (["optim.gradient_noise=0.1"], "optim.gradient_noise: the coordinate check adds no noise to gradients; leave"),
        (["world=ddp2"], "world=ddp2: the coordinate check does not read world; leave it out"),
        (["optim=sgd"], "optim=sgd: the limits are for updates like Adam's; use optim=adamw or lion or"),
        ([MUP, "optim=sgd"], "model.parametrisation=mup: its learning rates are for updates like Adam's"),
        (
            [MUP, "model.base_n_embd=40"],
            "model.base_n_embd=40: not a multiple of the head size 16; give model.base_n_head",
        ),
        (["--out", "full"], "--out full: exists and is not an empty directory; give a new one"),
    ],
)
def test_wrong_arguments_are_refused_before_torch_is_imported(
    light_server: ForkServer, tmp_path: Path, argv: list[str], said: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    done = light_server.ask(["coordcheck", *argv], tmp_path)
    assert (done["code"], len(done["stderr"].splitlines())) == (2, 1), done
    assert said in done["stderr"]
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
