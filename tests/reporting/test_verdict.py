"""The conclusions of the report from the runs of a sweep: optima, the law, warnings, and the next command."""

import math
import random
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweeps import NOISE_SCALE, compose_sweep, report_of, write_run, write_sweep

from gptexp.config.compose import compose
from gptexp.config.scaling import scaled_optim
from gptexp.config.schema import result_deciding
from gptexp.reporting.charts.figures import figures
from gptexp.reporting.listings.records import Run, find_runs
from gptexp.reporting.page import comparison
from gptexp.reporting.page.cells_table import cells_table
from gptexp.reporting.page.report import build_report
from gptexp.reporting.statistics.analysis import analyse
from gptexp.reporting.words.answers import NOTHING, Answer, answers_of, table_of_answers
from gptexp.reporting.words.proposals import Proposal, proposals
from gptexp.reporting.words.thresholds import WITHIN
from gptexp.reporting.words.verdict import verdict as of_runs
from gptexp.storage import run_dir
from gptexp.storage.sweep_record import PlannedCell, SweepRecord

NANO = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 256}  # the default is GPT-2's smallest model


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep whose best learning rate grows with the root of the batch size; tests must not write into it."""
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "root")


def verdict(directory: Path) -> str:
    return "\n".join(report_of(directory)["verdict"])


def record(root: Path, **more: Any) -> None:
    run_dir.write_json(root / run_dir.SWEEP, {"name": "s", "overrides": ["model=nano"], **more})


def change(directory: Path, section: str, **values: Any) -> None:
    """Change keys of a run's config."""
    config = run_dir.load_config(directory)
    setattr(config, section, replace(getattr(config, section), **values))
    run_dir.save_config(directory, config)


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
    [proposal] = report["next"]
    place = f"'hydra.sweep.dir=\"{swept}\"'"
    begin = f"gptexp train -m model=nano {place} sweep.name=root batch.total_batch_size=32768 optim.lr="
    assert proposal["command"].startswith(begin)
    assert (proposal["runs"], proposal["batch"]) == (5, 32768)


@pytest.mark.e2e
def test_the_report_counts_effective_learning_rates_and_proposes_configured_ones(tmp_path: Path) -> None:
    """lr grows with the square root of the batch size: over the configured one the optima of all batch sizes agree."""
    write_sweep(tmp_path / "s")
    for directory in tmp_path.glob("s/lr=*"):
        config = run_dir.load_config(directory)
        change(directory, "optim", lr=config.optim.lr / math.sqrt(config.batch.total_batch_size / 4096))
        change(directory, "scaling", lr="sqrt", reference_tokens=4096)
    record(tmp_path / "s", overrides=["model=nano", "scaling.lr=sqrt", "scaling.reference_tokens=4096"])
    report = report_of(tmp_path / "s")
    law = report["arms"][0]["law"]
    assert law["exponent"] == pytest.approx(0.5, abs=0.04)
    [proposal] = report["next"]
    drafts = compose_sweep(shlex.split(proposal["command"])[3:]).drafts
    lrs = [scaled_optim(drafted.config).lr for drafted in drafts if drafted.config]
    assert len(lrs) == 5
    assert abs(math.log2(lrs[2] / (law["lr"] * (32768 / law["tokens"]) ** law["exponent"]))) <= 0.5  # in octaves


@pytest.mark.e2e
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


def test_runs_with_other_settings_are_separate_arms(swept: Path, tmp_path: Path) -> None:
    root = tmp_path / "arms"
    shutil.copytree(swept, root)
    for path in sorted(root.glob("lr=*")):
        other = root / f"beta-{path.name}"
        shutil.copytree(path, other)
        change(other, "optim", beta2=0.99)
    arms = report_of(root)["arms"]
    assert [arm["choices"] for arm in arms] == [{"optim.beta2": 0.99}, {"optim.beta2": 0.95}]
    assert arms[0]["law"]["exponent"] == arms[1]["law"]["exponent"]


MUP = {"parametrisation": "mup", "base_n_embd": 64, "base_n_head": 4}
SIZES = [{"n_embd": width, "n_head": width // 16} for width in (64, 128)]


@pytest.mark.parametrize(
    ("arms", "labels"),
    [
        ([{"n_layer": 2}, {"n_layer": 12}], {"model.n_layer=2", "model.n_layer=12"}),
        ([{**NANO, "dropout": 0.1}, {}], {"model=nano, model.dropout=0.1", "model=gpt2, model.dropout=0.0"}),
        (
            [{**NANO, "vocab_size": 50432}, {}],
            {"model=nano, model.vocab_size=50432", "model=gpt2"},
        ),
        (  # the base of a parametrisation follows from it, and the number of heads from the width
            [*SIZES, *({**size, **MUP} for size in SIZES)],
            {f"model.n_embd={width}, model.parametrisation={p}" for width in (64, 128) for p in ("mup", "standard")},
        ),
        (
            [{**SIZES[1], **MUP}, {**SIZES[1], **MUP, "base_n_embd": 32}, SIZES[1]],
            {
                "model.parametrisation=standard",
                "model.base_n_embd=32, model.parametrisation=mup",
                "model.base_n_embd=64, model.parametrisation=mup",
            },
        ),
        (
            [SIZES[0], {"n_embd": 128, "n_head": 16}],
            {"model.n_embd=64, model.n_head=4", "model.n_embd=128, model.n_head=16"},
        ),
    ],
)  # fmt: skip
def test_an_arm_is_named_by_the_option_of_its_model_or_a_few_keys(
    tmp_path: Path, arms: list[dict[str, Any]], labels: set[str]
) -> None:
    for number, keys in enumerate(arms):
        write_run(tmp_path / f"{number}", 16384, 0.01, 1, 4.0)
        change(tmp_path / f"{number}", "model", **keys)
    assert {arm.label for arm in analyse("sweep", find_runs(tmp_path)).arms} == labels


@pytest.mark.e2e
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
    for number, keys in enumerate(own):
        config = compose(["model=nano", f"optim={keys['optim']}"])
        by_arm.append(replace(config.optim, **{key: value for key, value in keys.items() if key != "optim"}))
        for lr in (0.01, 0.02):
            directory = tmp_path / f"{number}-{lr}"
            write_run(directory, 16384, lr, 1, 4.0)
            written = run_dir.load_config(directory)
            written.optim, written.model = replace(by_arm[-1], lr=lr), config.model
            run_dir.save_config(directory, written)
    record(tmp_path, overrides=["model=nano", "optim=sgd"])
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


@pytest.mark.e2e
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
        change(tmp_path / f"{batch}", "schedule", warmup_steps=5)
    assert "schedule.warmup_steps=5 counts steps, so the number of warm-up tokens differs" in verdict(tmp_path)


@pytest.mark.e2e
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


@pytest.mark.e2e
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
    for (batch, curve), share in zip(arm.curves.by_batch.items(), shares, strict=True):
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


@pytest.mark.e2e
@pytest.mark.parametrize(("centre", "edges"), [(0.02, []), (0.001, [4096, 8192, 16384])])
def test_a_critical_batch_size_from_learning_rates_at_the_edge_is_flagged(
    tmp_path: Path, centre: float, edges: list[int]
) -> None:
    root = write_sweep(tmp_path / "constant", centre=centre, schedule="constant")
    report = report_of(root)
    assert ("widen the grid before you rely on this" in "\n".join(report["verdict"])) == bool(edges)
    assert report["arms"][0]["critical_batch_size"]["at_an_edge"] == edges


# --- Answers and proposals, from runs in memory

CONFIG = {**result_deciding(compose(["model=nano"])), "model.vocab_size": 50304}
GRID = (3e-3, 1e-2, 3e-2, 9e-2)
NEW_USER = {1024: (8.94, 5.23, 4.47, 4.18), 2048: (9.2, 6.1, 4.78, 5.01)}  # at the learning rates of GRID
SIX = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)


def a_run(batch: int, lr: float, loss: float | None, seed: int = 1, status: str = "", **config: Any) -> Run:
    """A run of a minute. Without a loss it has diverged."""
    own = {"batch.total_batch_size": batch, "optim.lr": lr, "train.seed": seed, **config}
    summary = {"parameters": 10_000_000, "tokens": 2**18, "wall_s": 60.0, "data_hash": "0123"}
    status = status or ("completed" if loss is not None else "diverged")
    return Run(
        f"{batch}-{lr:g}-{seed}", Path(), status, {**CONFIG, **own}, batch, lr, seed=seed, loss=loss, summary=summary
    )


def runs_of(losses: Mapping[int, Sequence[float | None]], lrs: Sequence[float], seed: int = 1) -> list[Run]:
    return [a_run(b, lr, loss, seed) for b, of in losses.items() for lr, loss in zip(lrs, of, strict=True)]


def asked(runs: Sequence[Run], **sweep: Any) -> tuple[list[Answer], list[Proposal]]:
    """The answers and the proposals of a report on these runs of a sweep."""
    record = SweepRecord("s", **{"overrides": ["model=nano"], **sweep})
    analysis = analyse("s", runs)
    further = proposals(analysis, record)
    return answers_of(analysis, record, further, WITHIN), further


def swept_keys(proposal: Proposal) -> dict[str, str]:
    """The arguments of a proposal."""
    return dict(text.split("=", 1) for text in shlex.split(proposal.command)[3:])


def waiting(lr: str, batch: int) -> PlannedCell:
    return PlannedCell({"optim.lr": lr}, total_batch_size=batch, tokens=2**18)


def test_the_first_sweep_of_a_new_user_gets_a_right_answer() -> None:
    (falls, bracketed), further = asked(runs_of(NEW_USER, GRID))
    assert falls.badges == ("higher", "noise unknown")
    assert bracketed.badges == ("bracketed", "noise unknown")
    assert bracketed.low is not None
    assert bracketed.high is not None
    assert 0.01 < bracketed.low < bracketed.high < 0.09
    measure, extend = sorted(further, key=lambda proposal: -proposal.batch)
    assert (swept_keys(extend)["batch.total_batch_size"], swept_keys(extend)["optim.lr"]) == ("1024", "0.27,0.81")
    assert (extend.runs, extend.minutes) == (2, 2.0)
    assert swept_keys(measure)["train.seed"].startswith("2")


DIVERGED = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
PROPOSED: dict[str, tuple[list[Run], str, dict[str, str]]] = {
    "jagged: does it diverge again": (
        runs_of({1024: (5.5, 4.9, 4.4, None, 4.3, 5.2)}, DIVERGED), "jagged", {"optim.lr": "0.02", "train.seed": "2"},
    ),
    "everything diverged": ([a_run(1024, lr, None) for lr in (0.1, 0.2)], "diverged", {"optim.lr": "0.025,0.05"}),
    "a gap below one that diverged": (
        [*runs_of({1024: (4.3, 4.2, 4.1, 4.0)}, (0.01, 0.02, 0.04, 0.08)), a_run(1024, 0.25, None)],
        "higher", {"optim.lr": "0.16"},
    ),
    "no curve explains the lowest": (
        runs_of({1024: (4.5, 4.3, 4.2, 4.25, 3.0, 4.4)}, SIX), "jagged", {"train.seed": "2"},
    ),
    "flat": (
        [a_run(1024, 0.01 * 4.0**i, 4 + 0.05 * math.sin(9 * i + seed), seed) for i in range(-3, 4) for seed in (1, 2)],
        "flat", {"train.seed": "3,4"},
    ),
}  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize("name", PROPOSED)
def test_what_is_open_gets_its_status_and_a_proposal(name: str) -> None:
    runs, status, keys = PROPOSED[name]
    [answer], further = asked(runs, overrides=["model=nano", "optim.lr=1e-3"])
    assert (answer.badges[0], answer.lr) == (status, None)
    assert keys.items() <= swept_keys(further[0]).items()
    assert further[0].command.count("optim.lr=") == 1  # the old override of a key that is swept now is dropped
    assert answer.wanted


@pytest.mark.e2e
def test_no_learning_rate_above_one_that_diverged_is_recommended() -> None:
    [answer], _ = asked(runs_of({1024: (5.5, 4.9, 4.4, None, 4.5, 5.2)}, DIVERGED))
    assert answer.lr is None or answer.lr < 0.02
    _, further = asked([*runs_of(NEW_USER, GRID), a_run(1024, 0.36, None)])
    proposed = [swept_keys(proposal)["optim.lr"] for proposal in further if proposal.batch == 1024]
    assert all(float(lr) < 0.36 for rates in proposed for lr in rates.split(","))


# The default model at 4,096 tokens a step, three seeds: above 0.005 the loss jumps to a plateau.
JUMPS = {0.00125: (2.153, 2.153, 2.145), 0.0025: (1.985, 1.968, 1.996), 0.005: (1.877, 1.876, 1.893),
         0.01: (2.281, 2.12, 2.248), 0.02: (2.353, 2.389, 2.354)}  # fmt: skip


def test_an_optimum_next_to_a_jump_is_where_losses_are_known_and_narrowed_below_the_jump() -> None:
    [answer], further = asked([a_run(4096, lr, x, seed) for lr, of in JUMPS.items() for seed, x in enumerate(of, 1)])
    assert answer.lr == pytest.approx(0.005)
    assert answer.low is not None
    assert answer.high is not None
    assert answer.low <= 0.005 < answer.high < 0.0105  # it may lie between the best one and the jump
    assert answer.loss == pytest.approx(1.882, abs=0.005)  # not a lower one that nobody has seen
    proposed = {float(lr) for of in further for lr in swept_keys(of)["optim.lr"].split(",") if of.batch == 4096}
    assert proposed
    assert max(proposed) < 0.01


def test_proposals_narrow_each_interval_until_it_is_an_octave_wide() -> None:
    """A wide interval is narrowed by the runs that are proposed, to about what was promised; then nothing is wanted."""
    rng = random.Random(2)

    def run(lr: float, seed: int) -> Run:
        return a_run(4096, lr, 4 + 0.02 * math.log2(lr / 0.012) ** 2 + rng.gauss(0, 0.02), seed)

    runs = [run(0.01 * 2.0**octave, seed) for octave in range(-3, 4) for seed in (1, 2)]
    for _ in range(8):
        [answer], further = asked(runs)
        if not further:
            break
        keys = swept_keys(further[0])
        assert answer.wanted.startswith(f"{further[0].runs} runs, {further[0].runs} minutes: ")
        runs += [
            run(float(lr), int(seed)) for lr in keys["optim.lr"].split(",") for seed in keys["train.seed"].split(",")
        ]
    assert answer.low is not None
    assert answer.high is not None
    assert math.log2(answer.high / answer.low) <= 1.0
    assert answer.wanted == NOTHING
    assert answer.low < 0.012 < answer.high


@pytest.mark.parametrize(("seeds", "given"), [([], None), (["1"], "1"), (["2", "1"], "1")])
def test_a_new_learning_rate_is_proposed_with_the_seed_of_the_others(seeds: list[str], given: str | None) -> None:
    """Those have seed 1. `seeds`: what the sweep's command says."""
    command = ["train", "-m", "model=nano", *(f"train.seed={seed}" for seed in seeds[:1])]
    cells = {seed: PlannedCell({"train.seed": seed}, 2048, 2**18) for seed in seeds[1:]}
    _, [extend] = asked(runs_of({1024: NEW_USER[1024]}, GRID), commands=[command], cells=cells)
    assert (swept_keys(extend)["optim.lr"], swept_keys(extend).get("train.seed")) == ("0.27,0.81", given)


def test_batch_sizes_with_one_learning_rate_have_answers_if_some_axis_was_swept() -> None:
    [one], _ = asked(runs_of({1024: (8.94,)}, (3e-3,)), cells={lr: waiting(lr, 1024) for lr in ("3e-3", "1e-2")})
    assert one.badges == ("too few", "noise unknown", "so far")
    assert asked(runs_of({1024: (8.94,)}, (3e-3,)))[0] == []
    sizes, _ = asked(
        runs_of({1024: (5.2,), 4096: (5.4,)}, (1e-2,)), cells={str(b): waiting("1e-2", b) for b in (1024, 4096)}
    )
    assert [(answer.total_batch_size, answer.badges[0]) for answer in sizes] == [(1024, "too few"), (4096, "too few")]


def test_while_cells_wait_or_run_answers_are_so_far_and_nothing_is_proposed_there() -> None:
    runs = runs_of(NEW_USER, GRID)
    cells = {str(batch): waiting("0.27", batch) for batch in (1024, 4096)}
    answers, further = asked(runs, cells=cells)
    assert [(answer.total_batch_size, answer.badges[-1] == "so far") for answer in answers] == [
        (1024, True), (2048, False), (4096, True),
    ]  # fmt: skip
    assert {proposal.batch for proposal in further} == {2048}
    runs.append(replace(a_run(1024, 0.27, None, status="running"), name="waits"))
    for status, is_open in (("running", False), ("failed", True)):
        runs[-1].status = status
        _, further = asked(runs, cells={"waits": waiting("0.27", 1024)})
        assert {proposal.batch for proposal in further} == ({1024, 2048} if is_open else {2048})


def test_a_batch_size_that_nobody_asked_for_comes_last(swept: Path) -> None:
    """After what is open in any arm, and after cells that still wait."""
    runs = find_runs(swept)
    assert [proposal.batch for proposal in asked(runs)[1]] == [32768]
    other = [a_run(8192, 0.02 * 2.0**i, 4.5 - 0.1 * i) for i in range(4)]
    assert [proposal.batch for proposal in asked([*runs, *other])[1]] == [8192]
    assert asked(runs, cells={"waits": waiting("0.02", 65536)})[1] == []


def test_a_run_that_does_not_count_is_named() -> None:
    """One that nothing explains; one that completed, but is worse than a guess; and the other seeds of a cell."""
    analysis = analyse("s", runs_of({4096: (4.5, 4.3, 4.2, 4.25, 5.9, 4.6)}, SIX))
    [outlier] = [finding.text for finding in of_runs(analysis).findings if "outlier" in finding.text]
    assert "4096-0.016-1, with a loss of 5.9000" in outlier
    assert analysis.arms[0].best == (4096, 4e-3)
    analysis = analyse("s", [*runs_of({4096: (4.5, 4.3, 4.2, 4.25, 25.0)}, SIX[:5]), a_run(4096, 8e-3, None, seed=2)])
    [warning] = analysis.warnings
    assert warning.startswith("4096-0.016-1: completed with a loss of 25, far above")
    [arm] = analysis.arms
    assert (arm.diverged, list(arm.losses[4096])) == ({4096: [8e-3, 1.6e-2]}, list(SIX[:3]))
    assert "Training diverged at learning rates 0.008, 0.016 at 4,096 tokens a step." in of_runs(analysis).lines
