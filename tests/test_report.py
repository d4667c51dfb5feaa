"""`gptexp report` on run directories: what it writes, and what no run directory can make it do."""

import csv
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sweeps import NOISE_SCALE, write_run, write_sweep

from gptexp import run_dir
from gptexp.compose import compose
from gptexp.report import write_report
from gptexp.report.analysis import analyse
from gptexp.report.figures import figures
from gptexp.report.fitted import write_optim
from gptexp.report.records import POINTS, find_runs
from gptexp.report.table import shown, values

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep whose best learning rate goes with the root of the batch size; do not write into it."""
    root = write_sweep(tmp_path_factory.mktemp("sweeps") / "root")
    write_report(root)
    return root


def numbers(directory: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return values


def verdict(directory: Path) -> str:
    write_report(directory)
    return "\n".join(numbers(directory)["verdict"])


def test_what_is_known_is_found(swept: Path) -> None:
    [arm] = numbers(swept)["arms"]
    assert [curve["status"] for curve in arm["curves"]] == ["bracketed"] * 3
    for curve, truth in zip(arm["curves"], (0.02 / 2**0.5, 0.02, 0.02 * 2**0.5), strict=True):
        assert curve["optimum"]["low"] < truth < curve["optimum"]["high"]
        assert curve["optimum"]["loss"] == pytest.approx(4 + 0.01 * (curve["total_batch_size"] // 8192), abs=0.006)
    assert arm["law"]["exponent"] == pytest.approx(0.5, abs=0.04)
    assert arm["law"]["low"] < 0.5 < arm["law"]["high"]
    assert arm["noise"]["sigma"] == pytest.approx(0.002, rel=0.6)
    said = "\n".join(numbers(swept)["verdict"])
    assert "agrees with the rule 'square root' (0.5) and not with 'none' (0) and 'linear' (1)" in said
    assert "diverged at learning rate 0.16" in said
    assert "the critical batch size needs schedule=constant" in said
    [command] = numbers(swept)["next"]
    assert command.startswith("gptexp train -m model=nano sweep.name=root batch.total_batch_size=32768 optim.lr=")


def test_the_same_files_give_the_same_bytes(swept: Path, tmp_path: Path) -> None:
    again = tmp_path / "root"
    shutil.copytree(swept, again)
    for path in [*again.glob("report*"), *again.glob("pictures/*"), again / "cells.csv"]:
        path.unlink()
    write_report(again)
    written = [*swept.glob("pictures/*.png"), swept / "report.html", swept / "report.json", swept / "cells.csv"]
    assert len(written) == 10 + 3
    for path in written:
        assert path.read_bytes() == (again / path.relative_to(swept)).read_bytes(), path.name
        assert path.suffix != ".png" or path.read_bytes().startswith(b"\x89PNG")


def test_every_run_is_in_the_table(swept: Path) -> None:
    with (swept / "cells.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * 3 + 4
    assert [row["status"] for row in rows].count("diverged") == 3
    summary = json.loads((swept / rows[0]["run"] / "summary.json").read_text())
    assert float(rows[0]["final_val_loss"]) == summary["final_val_loss"]


def test_an_optimum_at_the_edge_is_extended_to_and_gets_no_number(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "edge", centre=0.001)
    said = verdict(root)
    assert said.count("the optimum is not bracketed") == 3
    assert "extend the grid to 0.0025" in said
    assert "best learning rate is" not in said
    [arm] = numbers(root)["arms"]
    assert arm["law"] is None
    assert [command.split("optim.lr=")[1] for command in numbers(root)["next"]] == ["0.00125,0.0025"] * 3


def test_at_a_constant_learning_rate_the_critical_batch_size_is_looked_for(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "constant", batches=(2048, 4096, 8192, 16384), schedule="constant")
    write_report(root)
    [arm] = numbers(root)["arms"]
    assert arm["critical_batch_size"]["steps"].keys() == {"2048", "4096", "8192", "16384"}
    assert "by the 20% rule" in "\n".join(numbers(root)["verdict"])
    assert (root / "pictures" / "isoloss.png").exists()


def test_runs_of_other_settings_are_arms_of_their_own(swept: Path, tmp_path: Path) -> None:
    root = tmp_path / "arms"
    shutil.copytree(swept, root)
    for path in sorted(root.glob("lr=*")):
        other = root / f"beta-{path.name}"
        shutil.copytree(path, other)
        config = run_dir.load_config(other)
        config.optim.beta2 = 0.99
        run_dir.save_config(other, config)
    write_report(root)
    arms = numbers(root)["arms"]
    assert [arm["choices"] for arm in arms] == [{"optim.beta2": 0.99}, {"optim.beta2": 0.95}]
    assert arms[0]["law"]["exponent"] == arms[1]["law"]["exponent"]


def test_a_cell_under_two_names_is_no_second_seed(swept: Path, tmp_path: Path) -> None:
    root = tmp_path / "twice"
    shutil.copytree(swept, root)
    for path in sorted(root.glob("lr=*")):
        shutil.copytree(path, root / f"again-{path.name}")
    write_report(root)
    assert numbers(root)["arms"][0]["noise"] == numbers(swept)["arms"][0]["noise"]


def test_other_data_is_flagged(swept: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(swept, root)
    first, second, *_ = sorted(root.glob("lr=*"))
    run_dir.write_json(first / "summary.json", {**run_dir.read_json(first / "summary.json"), "data_hash": "4567"})
    text = (second / "metrics.jsonl").read_text()
    (second / "metrics.jsonl").write_text(re.sub(r'"data/fingerprint": "0', '"data/fingerprint": "1', text))
    said = verdict(root)
    assert f"{first.name}: trained on other text (4567)" in said
    assert f"{second.name}: had read other data after" in said
    assert said.count("Warning:") == 2


def test_lengths_in_steps_are_said_to_confound_a_batch_sweep(tmp_path: Path) -> None:
    for batch in (4096, 8192):
        write_run(tmp_path / f"{batch}", batch, 0.02, 1, 4.0)
        config = run_dir.load_config(tmp_path / f"{batch}")
        config.schedule.warmup_steps = 5
        run_dir.save_config(tmp_path / f"{batch}", config)
    assert "schedule.warmup_steps=5 counts steps, so the warm-up in tokens differs" in verdict(tmp_path)


class Elements(HTMLParser):
    """The names of all elements, and their attributes' names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names += [tag, *(f"@{name}" for name, _ in attrs)]


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)",
    "=cmd|' '!A0",
    "@SUM(1)",
    "a\x1b[31mred",
    "$(x)`y`",
]


def test_no_name_can_inject_anything(gptexp: Gptexp, swept: Path, tmp_path: Path) -> None:
    root = tmp_path / "sweep <b>"
    shutil.copytree(swept, root)
    plain = [*Elements((swept / "report.html").read_text()).names]
    for name, path in zip(HOSTILE, sorted(root.glob("lr=*")), strict=False):
        path.rename(root / name.replace("/", "∕"))
    (root / HOSTILE[0]).mkdir(exist_ok=True)
    done = gptexp("report", str(root))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert Elements((root / "report.html").read_text()).names == plain
    with (root / "cells.csv").open() as file:
        assert not [row for row in csv.reader(file) if row[0][0] in "=+-@"]


def test_what_cannot_be_read_is_listed_and_the_rest_is_reported(swept: Path, tmp_path: Path) -> None:
    root = tmp_path / "damaged"
    shutil.copytree(swept, root)
    a, b, c, d, *_ = sorted(root.glob("lr=0.16*")) + sorted(root.glob("lr=*seed=1338"))
    (a / "config.yaml").write_text("model: [")
    (b / "summary.json").write_text("{")
    (c / "metrics.jsonl").write_bytes(b"\xff\n{}\n" + (c / "metrics.jsonl").read_bytes()[:-20])
    (d / "summary.json").unlink()
    os.mkfifo(root / "pipe")
    runs = {run.name: run for run in find_runs(root)}
    assert [runs[path.name].status for path in (a, b, c, d)] == ["damaged", "damaged", "diverged", "failed"]
    said = verdict(root)
    assert f"{a / 'config.yaml'}" in said
    assert f"{b / 'summary.json'}" in said
    assert numbers(root)["arms"][0]["law"] is not None


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("summary.json", "steps", 1.5), ("summary.json", "train_s", "x"), ("summary.json", "data_hash", [1]),
        ("summary.json", "status", "\x1b]0;owned\x07"), ("summary.json", "final_val_loss", "4"),
        ("metrics.jsonl", "tokens", "x"), ("metrics.jsonl", "perf/tokens_per_s", None),
        ("metrics.jsonl", "train/loss", {}), ("metrics.jsonl", "data/fingerprint", "\x1b[31m"),
    ],
)  # fmt: skip
def test_values_of_other_types_cost_no_report(
    gptexp: Gptexp, tmp_path: Path, file: str, key: str, value: object
) -> None:
    root = tmp_path / "sweep"
    for lr in (0.01, 0.02, 0.04):
        write_run(root / f"{lr}", 4096, lr, 1, 4.0)
    path = root / "0.02" / file
    lines = [json.loads(line) for line in path.read_text().splitlines()] if file == "metrics.jsonl" else []
    if file == "metrics.jsonl":
        path.write_text("".join(json.dumps({**line, **({key: value} if key in line else {})}) + "\n" for line in lines))
    else:
        run_dir.write_json(path, {**run_dir.read_json(path), key: value})
    for verb in ("report", "status"):
        done = gptexp(verb, str(root))
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout


def test_a_cell_of_which_a_seed_diverged_is_no_mean_of_survivors(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "partly")
    write_run(root / "another-seed", 8192, 0.02, 99, None)
    said = verdict(root)
    assert "At 8,192 tokens a step a run diverged at learning rate 0.02, 0.16." in said
    [arm] = numbers(root)["arms"]
    [at_8192] = [curve for curve in arm["curves"] if curve["total_batch_size"] == 8192]
    assert at_8192["fit"]["lrs"] == [0.005, 0.01, 0.04, 0.08]


def test_a_run_is_running_while_its_lock_is_held(swept: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(sorted(swept.glob("lr=*"))[0], directory)
    run_dir.write_json(
        directory / "summary.json", {**run_dir.read_json(directory / "summary.json"), "status": "running"}
    )
    with run_dir.held(directory):
        assert [run.status for run in find_runs(directory)] == ["running"]
    assert [run.status for run in find_runs(directory)] == ["failed"]


def test_of_a_long_run_every_so_many_steps_are_kept(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 64, 0.02, 1, 4.0)
    write_run(tmp_path / "b", 128, 0.02, 1, 4.0)
    runs = find_runs(tmp_path)
    for run in runs:
        assert POINTS <= len(run.train) <= 2 * POINTS
    assert runs[0].fingerprints.keys() == runs[1].fingerprints.keys()
    assert runs[0].train[-1].seconds == pytest.approx(4096 * 8e-3)


def test_a_single_run_is_reported_too(gptexp: Gptexp, swept: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(sorted(swept.glob("lr=*"))[0], directory)
    done = gptexp("report", str(directory))
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in (directory / "pictures").glob("*.png")} == {
        "course-tokens", "course-steps", "course-seconds", "noise-scale", "cosine", "learning-rate", "gradient-norm",
        "clipping", "speed",
    }  # fmt: skip


def test_a_run_that_logs_every_tenth_step_has_its_curve_too(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 64, 0.02, 1, 4.0)
    path = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "step": 10 * row["step"]}) + "\n" for row in rows))
    [run] = find_runs(tmp_path / "run")
    assert len(run.train) >= POINTS


def test_the_noise_scale_is_told_beside_batch_size_and_critical_one(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "sweep", batches=(2048, 4096, 8192, 16384), schedule="constant")
    lines = write_report(root).verdict
    [line] = [line for line in lines if "gradient noise scale" in line]
    best = min((run for run in find_runs(root) if run.loss is not None), key=lambda run: run.loss or 0.0)
    assert f"of {best.name} is {NOISE_SCALE * 1024:,} tokens" in line
    assert f"a step has {best.batch:,}" in line
    [spec] = [f.spec for f in figures(analyse("sweep", find_runs(root))) if f.key == "noise-scale"]
    marked = {row["value"] for row in spec["layer"][1]["data"]["values"]}
    assert marked >= {2048, 4096, 8192, 16384}
    critical = [line for line in lines if "The critical batch size measured is" in line]
    assert len(critical) == (len(marked) > 4)


def test_a_wide_flat_grid_wants_seeds_and_no_more_learning_rates(tmp_path: Path) -> None:
    rng = random.Random(0)
    for lr in (1e-3, 4e-3, 1.6e-2, 6.4e-2):
        for seed in (1, 2):
            write_run(tmp_path / f"{lr}-{seed}", 4096, lr, seed, 4 + rng.gauss(0, 0.05))
    run_dir.write_json(tmp_path / "sweep.json", {"name": "s", "overrides": ["model=nano", "optim.lr=1e-3"]})
    assert "the loss is flat within noise" in verdict(tmp_path)
    [first, *_] = numbers(tmp_path)["next"]
    assert "optim.lr=0.001," in first
    assert first.endswith("0.064 train.seed=3,4,5,6")
    assert first.count("optim.lr=") == 1  # of what all cells were started with, nothing that is swept now
    assert "model=nano" in first


@pytest.mark.parametrize(("centre", "edges"), [(0.02, []), (0.001, [4096, 8192, 16384])])
def test_steps_of_a_learning_rate_at_the_edge_are_not_relied_on(
    tmp_path: Path, centre: float, edges: list[int]
) -> None:
    root = write_sweep(tmp_path / "constant", centre=centre, schedule="constant")
    said = verdict(root)
    assert ("widen the grid before you rely on this" in said) == bool(edges)
    assert numbers(root)["arms"][0]["critical_batch_size"]["at_an_edge"] == edges


def test_tables_hold_what_was_read_and_pages_what_people_read(swept: Path) -> None:
    run = find_runs(swept)[0]
    assert values([run], ["model.n_layer"]) == [{
        "run": run.name, "status": run.status, "lr": run.lr, "total_batch_size": run.batch, "seed": run.seed,
        "steps": run.summary["steps"], "tokens": run.summary["tokens"], "tokens_per_parameter": run.summary["tokens"],
        "final_val_loss": run.loss, "tokens_per_s": 8e3, "mfu_palm": None, "train_h": 1 / 60, "model.n_layer": 12,
    }]  # fmt: skip
    names, [texts] = shown([run])
    assert "MFU" not in names  # no peak is known of a CPU
    differing, _ = shown(find_runs(swept), all_of_them=False)
    assert {"status", "val loss", "seed"} < {*differing} < {*names} - {"tokens/s"}
    assert texts[names.index("val loss")] == f"{run.loss:.4f}"
    run.mfu = 0.4321
    assert "43.2%" in shown([run])[1][0]


@pytest.mark.parametrize("what", ["nothing", "empty"])
def test_where_there_is_no_run_a_line_says_so(gptexp: Gptexp, tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    done = gptexp("report", what)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


# --- the law as a config ---------------------------------------------------------------------------------------------


def test_the_law_sets_the_learning_rate_of_any_batch_size(gptexp: Gptexp, swept: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine" / "optim" / "fitted.yaml"
    done = gptexp("report", str(swept), "--write-optim", str(file))
    assert done.returncode == 0, done.stderr
    law = numbers(swept)["arms"][0]["law"]
    for batch in (4096, 32768):
        cfg = compose(["optim=fitted", f"batch.total_batch_size={batch}"], str(tmp_path / "mine"))
        assert cfg.optim.lr == pytest.approx(law["lr"] * (batch / law["tokens"]) ** law["exponent"], rel=1e-3)
        assert cfg.optim.name == "adamw"
    assert compose(["optim=fitted", "optim.lr=0.5"], str(tmp_path / "mine")).optim.lr == 0.5
    again = gptexp("report", str(swept), "--write-optim", str(file))
    assert again.returncode == 0, again.stderr


def test_the_law_goes_nowhere_else(swept: Path, tmp_path: Path) -> None:
    analysis = write_report(swept).analysis
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "own.yaml").write_text("lr: 1\n")
    for path, said in (
        ("fitted.yaml", "is a file optim/NAME.yaml"),
        ("optim/fitted.txt", "is a file optim/NAME.yaml"),
        ("lib/site-packages/gptexp/conf/optim/fitted.yaml", "lies in an installed package"),
        ("optim/own.yaml", "is there, and not from gptexp report"),
    ):
        with pytest.raises(ValueError, match=said):
            write_optim(tmp_path / path, analysis)
    assert (tmp_path / "optim" / "own.yaml").read_text() == "lr: 1\n"
    edge = write_report(write_sweep(tmp_path / "edge", centre=0.001)).analysis
    with pytest.raises(ValueError, match="has 0 fitted laws"):
        write_optim(tmp_path / "optim" / "fitted.yaml", edge)
