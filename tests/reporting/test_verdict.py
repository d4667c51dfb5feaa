"""The conclusions of the report from the runs of a sweep: optima, the law, warnings, and the next command."""

import math
import random
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweeps import NOISE_SCALE, compose_sweep, report_of, write_run, write_sweep

from gptexp.config.compose import compose
from gptexp.config.scaling import effective_optim
from gptexp.config.schema import ScalingConfig
from gptexp.reporting.charts.figures import figures
from gptexp.reporting.listings.records import find_runs
from gptexp.reporting.page import comparison
from gptexp.reporting.page.cells_table import cells_table
from gptexp.reporting.page.report import build_report
from gptexp.reporting.statistics.analysis import analyse
from gptexp.reporting.words.answers import table_of_answers
from gptexp.reporting.words.verdict import verdict as of_runs
from gptexp.storage import run_dir

NANO = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 256}  # the default is GPT-2's smallest model


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep whose best learning rate grows with the root of the batch size; tests must not write into it."""
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "root")


def verdict(directory: Path) -> str:
    return "\n".join(report_of(directory)["verdict"])


def answers_of(directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = report_of(directory)["answers"]
    return found


def test_the_known_optima_law_and_noise_are_found(swept: Path) -> None:
    report = report_of(swept)
    [arm] = report["arms"]
    assert [curve["status"] for curve in arm["curves"]] == ["bracketed"] * 3
    for curve, truth in zip(arm["curves"], (0.02 / 2**0.5, 0.02, 0.02 * 2**0.5), strict=True):
        assert curve["optimum"]["low"] < truth < curve["optimum"]["high"]
        assert curve["optimum"]["loss"] == pytest.approx(4 + 0.01 * (curve["total_batch_size"] // 8192), abs=0.006)
    assert arm["law"]["exponent"] == pytest.approx(0.5, abs=0.04)
    assert arm["law"]["low"] < 0.5 < arm["law"]["high"]
    for curve in arm["curves"]:
        assert curve["noise"]["sigma"] == pytest.approx(0.002, rel=0.6)
    answers = [(a["total_batch_size"], a["lr"], a["low"], a["high"], a["loss"]) for a in report["answers"]]
    optima = [
        (c["total_batch_size"], *(c["optimum"][key] for key in ("lr", "low", "high", "loss"))) for c in arm["curves"]
    ]
    assert answers == optima
    assert {a["status"] for a in report["answers"]} == {"bracketed"}
    said = "\n".join(report["verdict"])
    assert "agrees with the rule 'square root' (0.5) and not with the rules 'constant' (0) and 'linear' (1)" in said
    assert "diverged at learning rate 0.16" in said
    assert "the critical batch size needs schedule=constant" in said
    [proposal] = report["next"]
    assert proposal["command"].startswith(
        "gptexp train -m model=nano sweep.name=root batch.total_batch_size=32768 optim.lr="
    )
    assert (proposal["runs"], proposal["why"]) == (5, "tests the law at twice the largest batch size")


def test_the_report_counts_effective_learning_rates_and_proposes_configured_ones(tmp_path: Path) -> None:
    """lr grows with the square root of the batch size: over the configured one the optima of all batch sizes agree."""
    write_sweep(tmp_path / "s")
    for directory in tmp_path.glob("s/lr=*"):
        config = run_dir.load_config(directory)
        config.scaling = ScalingConfig(lr="sqrt", reference_tokens=4096)
        config.optim.lr /= math.sqrt(config.batch.total_batch_size / 4096)
        run_dir.save_config(directory, config)
    overrides = ["model=nano", "scaling.lr=sqrt", "scaling.reference_tokens=4096"]
    run_dir.write_json(tmp_path / "s" / run_dir.SWEEP, {"name": "s", "overrides": overrides})
    report = report_of(tmp_path / "s")
    law = report["arms"][0]["law"]
    assert law["exponent"] == pytest.approx(0.5, abs=0.04)
    [proposal] = report["next"]
    drafts = compose_sweep(shlex.split(proposal["command"])[3:]).drafts
    lrs = [effective_optim(drafted.config).lr for drafted in drafts if drafted.config]
    assert len(lrs) == 5
    assert abs(math.log2(lrs[2] / (law["lr"] * (32768 / law["tokens"]) ** law["exponent"]))) <= 0.5  # in octaves


def test_an_optimum_at_the_edge_gets_no_number_and_the_grid_is_extended(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "edge", centre=0.001)
    report = report_of(root)
    assert [(a["status"], a["lr"], a["low"]) for a in report["answers"]] == [("lower", None, None)] * 3
    assert [a["lowest_lr"] for a in report["answers"]] == [0.005] * 3
    assert dict(table_of_answers(build_report(root).answers))["best lr"] == ["0.005 or less"] * 3
    [arm] = report["arms"]
    assert arm["law"] is None
    assert [proposal["command"].split("optim.lr=")[1] for proposal in report["next"]] == ["0.00125,0.0025"] * 3
    assert all("lower learning rates" in answer["wanted"] for answer in report["answers"])


def test_a_constant_schedule_gives_the_critical_batch_size(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "constant", batches=(2048, 4096, 8192, 16384), schedule="constant")
    report = report_of(root)
    [arm] = report["arms"]
    assert arm["critical_batch_size"]["steps"].keys() == {"2048", "4096", "8192", "16384"}
    assert "by the 20% rule" in "\n".join(report["verdict"])
    assert "isoloss" in {picture.key for picture in figures(analyse("sweep", find_runs(root)))}


def test_runs_with_other_settings_are_separate_arms(swept: Path, tmp_path: Path) -> None:
    root = tmp_path / "arms"
    shutil.copytree(swept, root)
    for path in sorted(root.glob("lr=*")):
        other = root / f"beta-{path.name}"
        shutil.copytree(path, other)
        config = run_dir.load_config(other)
        config.optim.beta2 = 0.99
        run_dir.save_config(other, config)
    arms = report_of(root)["arms"]
    assert [arm["choices"] for arm in arms] == [{"optim.beta2": 0.99}, {"optim.beta2": 0.95}]
    assert arms[0]["law"]["exponent"] == arms[1]["law"]["exponent"]


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        (({"n_layer": 2}, {"n_layer": 12}), {"model.n_layer=2", "model.n_layer=12"}),
        (({**NANO, "dropout": 0.1}, {}), {"model=nano, model.dropout=0.1", "model=gpt2, model.dropout=0.0"}),
        (
            ({**NANO, "vocab_size": 50432}, {}),
            {"model.block_size=256, model.n_embd=32, model.n_head=2 and 2 other keys", "model=gpt2"},
        ),
    ],
)
def test_an_arm_is_named_by_the_option_of_its_model_or_a_few_keys(
    tmp_path: Path, changes: tuple[dict[str, Any], dict[str, Any]], labels: set[str]
) -> None:
    for number, of_arm in enumerate(changes):
        for lr in (0.01, 0.02, 0.04):
            directory = tmp_path / f"{number}-{lr}"
            write_run(directory, 16384, lr, 1, 4.0)
            config = run_dir.load_config(directory)
            for key, value in of_arm.items():
                setattr(config.model, key, value)
            run_dir.save_config(directory, config)
    assert {answer["arm"] for answer in answers_of(tmp_path)} == labels


def test_an_arm_of_a_parametrisation_is_named_by_it_and_its_width(tmp_path: Path) -> None:
    """Its base follows from it, and the number of heads from the width; else they are named too."""

    def labels(folder: Path, arms: list[dict[str, Any]]) -> list[str]:
        for number, of_arm in enumerate(arms):
            for lr in (0.01, 0.02):
                directory = folder / f"{number}-{lr}"
                write_run(directory, 16384, lr, 1, 4.0)
                config = run_dir.load_config(directory)
                config.model = replace(config.model, **of_arm)
                run_dir.save_config(directory, config)
        return sorted(arm.label for arm in analyse("sweep", find_runs(folder)).arms)

    sizes = [{"n_embd": width, "n_head": width // 16} for width in (64, 128)]
    mup = [{**size, "parametrisation": "mup", "base_n_embd": 64, "base_n_head": 4} for size in sizes]
    assert labels(tmp_path / "sizes", [*sizes, *mup]) == [
        "model.n_embd=128, model.parametrisation=mup",
        "model.n_embd=128, model.parametrisation=standard",
        "model.n_embd=64, model.parametrisation=mup",
        "model.n_embd=64, model.parametrisation=standard",
    ]
    bases = [{**mup[1], "base_n_embd": 64}, {**mup[1], "base_n_embd": 32}, sizes[1]]
    assert labels(tmp_path / "bases", bases) == [
        "model.base_n_embd=32, model.parametrisation=mup",
        "model.base_n_embd=64, model.parametrisation=mup",
        "model.parametrisation=standard",
    ]
    heads = [sizes[0], {"n_embd": 128, "n_head": 16}]
    assert labels(tmp_path / "heads", heads) == [
        "model.n_embd=128, model.n_head=16",
        "model.n_embd=64, model.n_head=4",
    ]


def test_arms_of_optimizers_are_named_by_them_and_their_proposals_belong_to_them(tmp_path: Path) -> None:
    """Keys that only the optimizer decides do not name an arm. Its command has them: they may be no start values."""
    pytest.importorskip("pytorch_optimizer", reason="no pytorch_optimizer; pip install 'gptexp[optim]'")
    own = (
        {"optim": "adamw"},
        {"optim": "muon", "weight_decay": 0.2},
        {"optim": "lion", "beta2": 0.9},
        {"optim": "lion"},
    )
    by_arm = []
    for number, of_arm in enumerate(own):
        optim = compose(["model=nano", f"optim={of_arm['optim']}"]).optim
        for key, value in of_arm.items():
            if key != "optim":
                setattr(optim, key, value)
        for lr in (0.01, 0.02):
            directory = tmp_path / f"{number}-{lr}"
            write_run(directory, 16384, lr, 1, 4.0)
            config = run_dir.load_config(directory)
            config.optim, config.model = replace(optim, lr=lr), compose(["model=nano"]).model
            run_dir.save_config(directory, config)
        by_arm.append(optim)
    run_dir.write_json(tmp_path / run_dir.SWEEP, {"name": "s", "overrides": ["model=nano", "optim=sgd"]})
    report = report_of(tmp_path)
    assert {answer["arm"] for answer in report["answers"]} == {
        "optim=adamw", "optim=lion, optim.beta2=0.9", "optim=lion, optim.beta2=0.99", "optim=muon",
    }  # fmt: skip
    assert analyse("sweep", find_runs(tmp_path)).named == ["optim.beta2", "optim.name"]
    proposed = []
    for proposal in report["next"]:
        grid = compose_sweep(shlex.split(proposal["command"])[3:])
        proposed += [drafted.config.optim for drafted in grid.drafts if drafted.config]
    assert len(proposed) == 4
    for optim in proposed:
        assert sum(replace(optim, lr=arm.lr) == arm for arm in by_arm if type(arm) is type(optim)) == 1


def test_the_same_cell_under_two_names_counts_once(swept: Path, tmp_path: Path) -> None:
    root = tmp_path / "twice"
    shutil.copytree(swept, root)
    for path in sorted(root.glob("lr=*")):
        shutil.copytree(path, root / f"again-{path.name}")
    again, once = (report_of(directory)["arms"][0]["curves"] for directory in (root, swept))
    assert [curve["noise"] for curve in again] == [curve["noise"] for curve in once]


def test_runs_that_trained_on_other_data_are_flagged(swept: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(swept, root)
    first, second, *_ = sorted(root.glob("lr=*"))
    run_dir.write_json(first / "summary.json", {**run_dir.read_json(first / "summary.json"), "data_hash": "4567"})
    text = (second / "metrics.jsonl").read_text()
    (second / "metrics.jsonl").write_text(re.sub(r'"data/fingerprint": "0', '"data/fingerprint": "1', text))
    said = verdict(root)
    assert f"{first.name}: trained on other text (hash 4567)" in said
    assert f"{second.name}: read other data in its first" in said
    assert said.count("Warning:") == 2


def test_runs_with_other_tokenizers_are_compared_by_their_bits_per_byte(tmp_path: Path) -> None:
    for number, (tokenizer, loss, bits) in enumerate((("bytes", 1.6, 2.3), ("gpt2", 4.1, 2.1))):
        directory = tmp_path / tokenizer
        write_run(directory, 4096, 0.02, 1, loss, data_hash=f"{number}")
        config = (directory / "config.yaml").read_text()
        (directory / "config.yaml").write_text(config.replace("tokenizer: gpt2", f"tokenizer: {tokenizer}"))
        metrics = (directory / "metrics.jsonl").read_text()
        (directory / "metrics.jsonl").write_text(metrics.replace('"val/loss"', f'"val/bpb": {bits}, "val/loss"'))
    said = verdict(tmp_path)
    assert "the tokenizers differ (bytes, gpt2): compare bits per byte, not losses, which are per token" in said
    assert "trained on other text" not in said
    table = cells_table(build_report(tmp_path))
    assert table is not None
    [bits] = [column for column in table.columns if column.title == "bits per byte"]
    assert [bits.text(row.run) for row in table.rows] == ["2.3000", "2.1000"]
    compared = comparison.compare([tmp_path / "bytes", tmp_path / "gpt2"])
    assert compared.why_incomparable == (
        "The losses are per token, and the tokenizers differ. Their bits per byte can be compared: 2.3000 for A and "
        "2.1000 for B."
    )


def test_a_warm_up_in_steps_is_flagged_in_a_sweep_of_batch_sizes(tmp_path: Path) -> None:
    for batch in (4096, 8192):
        write_run(tmp_path / f"{batch}", batch, 0.02, 1, 4.0)
        config = run_dir.load_config(tmp_path / f"{batch}")
        config.schedule.warmup_steps = 5
        run_dir.save_config(tmp_path / f"{batch}", config)
    assert "schedule.warmup_steps=5 counts steps, so the number of warm-up tokens differs" in verdict(tmp_path)


def test_a_cell_with_a_diverged_seed_is_left_out_of_the_fit(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "partly")
    write_run(root / "another-seed", 8192, 0.08, 99, None)
    report = report_of(root)
    assert "Training diverged at learning rates 0.08, 0.16 at 8,192 tokens a step." in "\n".join(report["verdict"])
    [arm] = report["arms"]
    [at_8192] = [curve for curve in arm["curves"] if curve["total_batch_size"] == 8192]
    assert [tested["lr"] for tested in at_8192["tested"]] == [0.005, 0.01, 0.02, 0.04]


@pytest.mark.parametrize(("at_double", "is_jagged"), [(4.3, True), (4.5, False)])
def test_a_learning_rate_that_diverged_is_not_recommended(tmp_path: Path, at_double: float, is_jagged: bool) -> None:
    """Below the best one it contradicts the others; above it, it ends the range of the best one."""
    losses = {0.0025: 5.5, 0.005: 4.9, 0.01: 4.4, 0.02: None, 0.04: at_double, 0.08: 5.2}
    for lr, loss in losses.items():
        write_run(tmp_path / f"{lr}", 1024, lr, 1, loss, parameters=10_000_000)
    run_dir.write_json(tmp_path / run_dir.SWEEP, {"name": "s", "overrides": ["model=nano"]})
    report = report_of(tmp_path)
    [answer] = report["answers"]
    if is_jagged:
        assert answer["status"] == "jagged, noise unknown"
        assert "training diverged at 0.02, below the best learning rate 0.04" in answer["why"]
        [proposal] = report["next"]
        assert proposal["command"].endswith("optim.lr=0.02 train.seed=2")
    else:
        assert answer["lr"] is None or answer["lr"] < 0.02


def test_a_batch_size_at_which_everything_diverged_gets_an_answer_and_a_proposal(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        write_run(tmp_path / f"{lr}", 1024, lr, 1, None)
    run_dir.write_json(tmp_path / run_dir.SWEEP, {"name": "s", "overrides": ["model=nano"]})
    report = report_of(tmp_path)
    [answer] = report["answers"]
    assert (answer["status"], answer["lr"]) == ("diverged", None)
    [proposal] = report["next"]
    assert proposal["command"].endswith("batch.total_batch_size=1024 optim.lr=0.025,0.05")


def test_the_noise_scale_is_reported_with_the_batch_sizes_and_the_critical_batch_size(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "sweep", batches=(2048, 4096, 8192, 16384), schedule="constant")
    lines = report_of(root)["verdict"]
    [line] = [line for line in lines if "gradient noise scale" in line]
    best = min((run for run in find_runs(root) if run.loss is not None), key=lambda run: run.loss or 0.0)
    assert f"of {best.name} is {NOISE_SCALE * 1024:,} tokens" in line
    assert f"a step has {best.batch:,}" in line
    [spec] = [f.spec for f in figures(analyse("sweep", find_runs(root))) if f.key == "noise-scale"]
    marked = {row["value"] for row in spec["layer"][1]["layer"][0]["data"]["values"]}
    assert marked >= {2048, 4096, 8192, 16384}
    critical = [line for line in lines if "The measured critical batch size is" in line]
    assert len(critical) == (len(marked) > 4)


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((0.93, 0.5, 0.12), "93% of the steps after the warm-up are clipped at 4,096 tokens a step and 12% at 16,384."),
        ((0.3, 0.4, 0.56), "30% of the steps after the warm-up are clipped at 4,096 tokens a step and 56% at 16,384."),
        (
            (0.97, 0.96, 0.91),
            "97% of the steps after the warm-up are clipped at 4,096 tokens a step and 91% at 16,384.",
        ),
        ((0.85, 0.8, 0.75), None),  # often, but alike
        ((0.45, 0.2, 0.05), None),  # different, but the usual step is not clipped
        ((0.02, 0.01, 0.0), None),
    ],
)
def test_clipping_that_changes_with_the_batch_size_is_a_caveat(
    swept: Path, shares: tuple[float, ...], said: str | None
) -> None:
    """At the best learning rate, after the warm-up; everything else is clipped in other shares."""
    runs = find_runs(swept)
    [arm] = analyse("sweep", runs).arms
    for (batch, curve), share in zip(arm.curves.of.items(), shares, strict=True):
        for run in runs:
            if run.batch == batch:
                run.warmup_tokens = 4 * batch
                of_best = share if run.lr == curve.best else 1 - share
                run.train[:] = [
                    replace(step, clip_fraction=of_best if step.tokens > run.warmup_tokens else 1 - share)
                    for step in run.train
                ]
    caveats = [caveat for caveat in of_runs(analyse("sweep", runs)).caveats if "clipped" in caveat.text]
    assert [caveat.text for caveat in caveats] == ([f"At the best learning rates {said}"] if said else [])
    for caveat in caveats:
        assert ("gradients of nearly equal norm" in caveat.why) == (min(shares) > 0.9)
        assert caveat.why.endswith("Compare with an arm that has optim.grad_clip=0, which clips nothing.")


def test_more_seeds_are_proposed_for_a_flat_grid(tmp_path: Path) -> None:
    rng = random.Random(0)
    for octave in range(-6, 7, 2):
        for seed in (1, 2):
            write_run(tmp_path / f"{octave}-{seed}", 4096, 0.01 * 2.0**octave, seed, 4 + rng.gauss(0, 0.05))
    run_dir.write_json(tmp_path / "sweep.json", {"name": "s", "overrides": ["model=nano", "optim.lr=1e-3"]})
    report = report_of(tmp_path)
    [answer] = report["answers"]
    assert answer["status"] == "flat"
    [first, *_] = [proposal["command"] for proposal in report["next"]]
    assert first.endswith(" train.seed=3,4")
    assert first.count("optim.lr=") == 1  # the old override of a key that is swept now is dropped
    assert "model=nano" in first


@pytest.mark.parametrize(("centre", "edges"), [(0.02, []), (0.001, [4096, 8192, 16384])])
def test_a_critical_batch_size_from_learning_rates_at_the_edge_is_flagged(
    tmp_path: Path, centre: float, edges: list[int]
) -> None:
    root = write_sweep(tmp_path / "constant", centre=centre, schedule="constant")
    report = report_of(root)
    assert ("widen the grid before you rely on this" in "\n".join(report["verdict"])) == bool(edges)
    assert report["arms"][0]["critical_batch_size"]["at_an_edge"] == edges


NEW_USER = {1024: (8.94, 5.23, 4.47, 4.18), 2048: (9.2, 6.1, 4.78, 5.01)}  # at 3e-3, 1e-2, 3e-2, 9e-2


def write_losses(
    root: Path,
    losses: dict[int, tuple[float, ...]],
    lrs: tuple[float, ...],
    seed: int = 1,
    parameters: int = 10_000_000,
) -> None:
    for batch, of_batch in losses.items():
        for lr, loss in zip(lrs, of_batch, strict=True):
            name = f"lr={lr:g},total_batch_size={batch},seed={seed}"
            write_run(root / name, batch, lr, seed, loss, wall_s=60.0, parameters=parameters)
    run_dir.write_json(root / run_dir.SWEEP, {"name": "s", "overrides": ["model=nano"]})


def test_the_first_sweep_of_a_new_user_gets_a_right_answer(tmp_path: Path) -> None:
    write_losses(tmp_path, NEW_USER, (3e-3, 1e-2, 3e-2, 9e-2))
    report = report_of(tmp_path)
    falls, bracketed = report["answers"]
    assert falls["status"] == "higher, noise unknown"
    assert bracketed["status"] == "bracketed, noise unknown"
    assert 0.01 < bracketed["low"] < bracketed["lr"] < bracketed["high"] < 0.09
    assert any(line.startswith("Noise unknown: no learning rate has two seeds") for line in report["verdict"])
    measure, extend = sorted(report["next"], key=lambda proposal: -proposal["batch"])
    assert extend["command"].endswith("batch.total_batch_size=1024 optim.lr=0.27,0.81")
    assert (extend["runs"], extend["minutes"]) == (2, pytest.approx(2.0))
    assert " train.seed=2" in measure["command"]
    assert "the noise is unknown" in measure["why"]


def test_proposals_narrow_each_interval_until_it_is_an_octave_wide(tmp_path: Path) -> None:
    """A wide interval is narrowed by the runs that are proposed, to about what was promised; then nothing is wanted."""
    rng = random.Random(2)

    def run(lr: float, seed: int) -> None:
        loss = 4 + 0.02 * math.log2(lr / 0.012) ** 2 + rng.gauss(0, 0.02)
        write_run(tmp_path / f"{lr:g}-{seed}", 4096, lr, seed, loss, wall_s=60.0)

    for octave in range(-3, 4):
        for seed in (1, 2):
            run(0.01 * 2.0**octave, seed)
    run_dir.write_json(tmp_path / "sweep.json", {"name": "s", "overrides": ["model=nano"]})
    for _ in range(8):
        report = report_of(tmp_path)
        [answer] = report["answers"]
        if not report["next"]:
            break
        [proposal] = report["next"]
        rates, seeds = (re.search(rf"{key}=(\S+)", proposal["command"])[1] for key in ("optim.lr", "train.seed"))  # type: ignore[index]
        assert answer["wanted"].endswith(f": {proposal['runs']} runs, {proposal['runs']} minutes")
        for lr in map(float, rates.split(",")):
            for seed in map(int, seeds.split(",")):
                run(lr, seed)
    assert math.log2(answer["high"] / answer["low"]) <= 1.0
    assert answer["wanted"] == "narrow enough"
    assert answer["low"] < 0.012 < answer["high"]


@pytest.mark.parametrize(
    ("seeds", "given"),
    [([], ""), (["1"], " train.seed=1"), (["1", "2"], " train.seed=1"), (["2", "1"], " train.seed=1")],
)
def test_a_new_learning_rate_is_proposed_with_the_seed_of_the_others(
    tmp_path: Path, seeds: list[str], given: str
) -> None:
    """Those have seed 1. `seeds`: what the sweep's command says."""
    write_losses(tmp_path, {1024: NEW_USER[1024]}, (3e-3, 1e-2, 3e-2, 9e-2))
    command = [
        "train",
        "-m",
        "model=nano",
        "optim.lr=3e-3,1e-2,3e-2,9e-2",
        *(f"train.seed={seed}" for seed in seeds[:1]),
    ]
    cells = {seed: {"values": {"train.seed": seed}, "total_batch_size": 2048, "tokens": 2**18} for seed in seeds[1:]}
    record = {"name": "s", "overrides": ["model=nano"], "commands": [command], "cells": cells}
    run_dir.write_json(tmp_path / run_dir.SWEEP, record)
    [extend] = report_of(tmp_path)["next"]
    assert extend["command"].endswith(f"batch.total_batch_size=1024 optim.lr=0.27,0.81{given}")
    assert extend["why"].startswith("at 1,024 tokens a step the loss is lowest at 0.09, the end of the grid")


def test_a_sweep_of_which_one_learning_rate_has_ended_says_that_this_is_too_few(tmp_path: Path) -> None:
    write_losses(tmp_path, {1024: (8.94,)}, (3e-3,))
    assert build_report(tmp_path).answers == []
    cells = {lr: {"values": {"optim.lr": lr}, "total_batch_size": 1024, "tokens": 2**18} for lr in ("3e-3", "1e-2")}
    run_dir.write_json(tmp_path / run_dir.SWEEP, {"name": "s", "overrides": [], "cells": cells})
    [answer] = build_report(tmp_path).answers
    assert answer.badges == ("too few", "noise unknown", "so far")


def test_batch_sizes_with_one_learning_rate_have_answers_too(tmp_path: Path) -> None:
    write_losses(tmp_path, {1024: (5.2,), 4096: (5.4,)}, (1e-2,))
    cells = {str(b): {"values": {}, "total_batch_size": b, "tokens": 2**18} for b in (1024, 4096)}
    run_dir.write_json(tmp_path / run_dir.SWEEP, {"name": "s", "overrides": [], "cells": cells})
    answers = build_report(tmp_path).answers
    assert [(answer.total_batch_size, answer.badges[0]) for answer in answers] == [(1024, "too few"), (4096, "too few")]


def test_nothing_is_proposed_at_a_batch_size_where_a_cell_waits_or_runs(tmp_path: Path) -> None:
    write_losses(tmp_path, NEW_USER, (3e-3, 1e-2, 3e-2, 9e-2))
    waiting = {"values": {"optim.lr": "0.27"}, "total_batch_size": 1024, "tokens": 2**18}

    def proposed(cells: dict[str, Any]) -> list[str]:
        run_dir.write_json(tmp_path / run_dir.SWEEP, {"name": "s", "overrides": [], "cells": cells})
        found = [proposal["command"].split(" batch.total_batch_size=")[1] for proposal in report_of(tmp_path)["next"]]
        assert any(command.startswith("2048 ") for command in found)
        return [command for command in found if not command.startswith("2048 ")]

    assert proposed({}) == ["1024 optim.lr=0.27,0.81"]
    assert proposed({"waiting": waiting}) == []
    write_run(tmp_path / "waiting", 1024, 0.27, 1, 4.3)
    with run_dir.held(tmp_path / "waiting"):
        assert proposed({"waiting": waiting}) == []
    assert proposed({"waiting": waiting}) != []


def test_the_verdict_of_an_unfinished_sweep_says_what_is_still_to_come(tmp_path: Path) -> None:
    write_losses(tmp_path, NEW_USER, (3e-3, 1e-2, 3e-2, 9e-2))
    waits = {
        str(batch): {"values": {"optim.lr": "0.27"}, "total_batch_size": batch, "tokens": 2**18}
        for batch in (1024, 4096)
    }
    run_dir.write_json(tmp_path / run_dir.SWEEP, {"name": "s", "overrides": [], "cells": waits})
    answers = build_report(tmp_path).answers
    assert [answer.total_batch_size for answer in answers] == [1024, 2048, 4096]
    assert [answer.badges[-1] == "so far" for answer in answers] == [True, False, True]
    assert answers[0].wanted == "its other cells"


def test_a_batch_size_that_nobody_asked_for_comes_last(swept: Path, tmp_path: Path) -> None:
    """After what is open in any arm, and after cells that still wait."""
    for directory in swept.glob("lr=*"):
        (tmp_path / directory.name).symlink_to(directory)
    record = {"name": "s", "overrides": ["model=nano"]}
    run_dir.write_json(tmp_path / run_dir.SWEEP, record)
    assert [proposal["batch"] for proposal in report_of(tmp_path)["next"]] == [32768]
    for octave in range(4):
        write_run(tmp_path / f"open{octave}", 8192, 0.02 * 2.0**octave, 1, 4.5 - 0.1 * octave)
        config = run_dir.load_config(tmp_path / f"open{octave}")
        config.model.n_layer = 3
        run_dir.save_config(tmp_path / f"open{octave}", config)
    assert [proposal["batch"] for proposal in report_of(tmp_path)["next"]] == [8192]
    for octave in range(4):
        shutil.rmtree(tmp_path / f"open{octave}")
    waits = {"waits": {"values": {"optim.lr": "0.02"}, "total_batch_size": 65536, "tokens": 2**18}}
    run_dir.write_json(tmp_path / run_dir.SWEEP, {**record, "cells": waits})
    assert report_of(tmp_path)["next"] == []


def test_a_gap_below_a_rate_that_diverged_is_filled(tmp_path: Path) -> None:
    lrs = (0.01, 0.02, 0.04, 0.08)
    write_losses(tmp_path, {4096: (4.3, 4.2, 4.1, 4.0)}, lrs)
    write_run(tmp_path / "diverged", 4096, 0.32, 1, None)
    run_dir.write_json(tmp_path / run_dir.SWEEP, {"name": "s", "overrides": []})
    report = report_of(tmp_path)
    assert report["answers"][0]["status"] == "higher, noise unknown"
    [proposal] = report["next"]
    assert proposal["command"].endswith("optim.lr=0.16")


def test_no_cell_beyond_a_diverged_one_is_proposed(tmp_path: Path) -> None:
    write_losses(tmp_path, NEW_USER, (3e-3, 1e-2, 3e-2, 9e-2))
    write_run(tmp_path / "diverged", 1024, 0.36, 1, None)
    for proposal in report_of(tmp_path)["next"]:
        if "batch.total_batch_size=1024" in proposal["command"]:
            rates = proposal["command"].partition("optim.lr=")[2].split()[0]
            assert all(float(lr) < 0.36 for lr in rates.split(","))


def test_a_run_that_nothing_explains_is_named(tmp_path: Path) -> None:
    lrs = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
    write_losses(tmp_path, {4096: (4.5, 4.3, 4.2, 4.25, 5.9, 4.6)}, lrs)
    report = report_of(tmp_path)
    [line] = [line for line in report["verdict"] if line.startswith("An outlier")]
    assert "lr=0.016,total_batch_size=4096,seed=1, with a loss of 5.9000" in line
    assert report["arms"][0]["best"] == [4096, 4e-3]


def test_a_lowest_loss_that_no_curve_explains_gets_a_second_seed_and_no_optimum(tmp_path: Path) -> None:
    lrs = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
    write_losses(tmp_path, {4096: (4.5, 4.3, 4.2, 4.25, 3.0, 4.4)}, lrs)
    report = report_of(tmp_path)
    [answer] = report["answers"]
    assert (answer["status"], answer["lr"]) == ("jagged, noise unknown", None)
    assert answer["why"] == "no curve explains how low the loss at 0.016 is"
    [proposal] = report["next"]
    assert proposal["command"].endswith("train.seed=2")


def test_a_completed_run_that_is_worse_than_a_guess_counts_as_diverged(tmp_path: Path) -> None:
    write_losses(tmp_path, {4096: (4.5, 4.3, 4.2, 4.25, 25.0)}, (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2))
    report = report_of(tmp_path)
    [warning] = [line for line in report["verdict"] if line.startswith("Warning")]
    assert "completed with a loss of 25, far above that of a uniform guess (10.8); it counts as diverged" in warning
    assert "Training diverged at learning rate 0.016 at 4,096 tokens a step." in report["verdict"]
