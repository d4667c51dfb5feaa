"""`data.validation`: each text has the losses that it has as `data.val_path`, in runs, evaluations and reports."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from conftest import events, runs, summary
from real_runs import equal, train_here
from sweeps import write_sweep

from gptexp.config.compose import compose
from gptexp.config.metrics import bits_metric
from gptexp.process.errors import ConfigError, DataError
from gptexp.reporting.page.comparison import compare, numbers
from gptexp.reporting.page.report import build_report
from gptexp.storage import run_dir

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "code.py").write_text("".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(100)))
    (tmp_path / "prose.txt").write_text("Nobody likes bread. A dog eats fish.\n" * 50)
    return {"code": str(tmp_path / "code.py"), "prose": str(tmp_path / "prose.txt")}


def trained(tiny: list[str], directory: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train a run; its evaluations."""
    argv = [*tiny, "data.tokenizer=bytes", "train.eval_every=2", *overrides]
    run_dir.save_config(directory, compose(argv))
    assert train_here(argv, directory) == 0
    return events(directory, "eval")


def of_all(texts: dict[str, str]) -> str:
    return f"data.validation={{code: {texts['code']}, prose: [{texts['prose']}]}}"


def test_a_text_has_the_losses_that_it_has_alone(tiny: list[str], tmp_path: Path, texts: dict[str, str]) -> None:
    together = trained(tiny, tmp_path / "together", f"data.val_path={texts['prose']}", of_all(texts))
    for name, path in texts.items():
        alone = trained(tiny, tmp_path / name, f"data.val_path={path}")
        for metric in ("loss", "bpb"):
            assert [e[f"val/{name}/{metric}"] for e in together] == [e[f"val/{metric}"] for e in alone]
        assert equal(tmp_path / name, tmp_path / "together")
    assert [e["val/prose/loss"] for e in together] == [e["val/loss"] for e in together]
    assert abs(together[-1]["val/code/loss"] - together[-1]["val/prose/loss"]) > 1e-3


@pytest.mark.e2e
def test_evaluate_prints_what_the_run_has_logged(
    tiny: list[str], tmp_path: Path, texts: dict[str, str], gptexp: Gptexp
) -> None:
    """Over two ranks, and resumed; each rank opens the texts that rank 0 has tokenised."""
    argv = ["train", *tiny, "data.tokenizer=bytes", "world.size=2", "data.val_ratio=0.01", of_all(texts)]
    assert gptexp(*argv, "train.max_minutes=1e-9", "hydra.run.dir=out").returncode == 0
    done = gptexp(*argv, "hydra.run.dir=out")
    assert (done.returncode, summary(tmp_path / "out")["status"]) == (0, "completed"), done.stderr
    logged = events(tmp_path / "out", "eval")[-1]
    printed = json.loads(gptexp("evaluate", "out").stdout)
    for name in texts:
        for metric in ("loss", "bpb"):
            assert printed[f"val/{name}/{metric}"] == pytest.approx(logged[f"val/{name}/{metric}"], rel=1e-6)
    given = json.loads(gptexp("evaluate", "out", "--data", texts["code"], "--val-tokens", "112").stdout)
    assert given["val/loss"] == pytest.approx(logged["val/code/loss"], rel=1e-6)


@pytest.mark.e2e
def test_a_search_minimises_the_loss_of_the_text_that_it_is_given(
    tiny: list[str], tmp_path: Path, texts: dict[str, str], gptexp: Gptexp
) -> None:
    own = ["data.tokenizer=bytes", of_all(texts), "sweep.name=found", "sweep.objective=val/code/loss"]
    done = gptexp("tune", *tiny, *own, "--budget", "3 runs", "--json")
    assert done.returncode == 0, done.stderr
    [cells] = [runs(tmp_path / "outputs/found")]
    losses = {run: events(run, "eval")[-1] for run in cells}
    report = json.loads((tmp_path / "outputs/found/report.json").read_text())
    assert (report["objective"], len(cells)) == ("val/code/loss", 3)
    assert sorted(run["final_val_loss"] for run in report["runs"]) == sorted(
        event["val/code/loss"] for event in losses.values()
    )
    best = min(losses, key=lambda run: losses[run]["val/code/loss"])
    shown = gptexp("evaluate", "outputs/found")
    assert Path(json.loads(shown.stdout)["directory"]).name == best.name


def test_runs_whose_text_of_a_name_differs_are_not_compared_by_it(
    tiny: list[str], tmp_path: Path, texts: dict[str, str]
) -> None:
    trained(tiny, tmp_path / "a", of_all(texts))
    Path(texts["code"]).write_text("print(1)\n" * 500)
    trained(tiny, tmp_path / "b", of_all(texts), "train.seed=2")
    pair = [tmp_path / "a", tmp_path / "b"]
    assert compare(pair, "val/code/loss").why_incomparable
    for comparable in ("val/loss", "val/prose/loss"):
        assert not compare(pair, comparable).why_incomparable


def test_a_text_that_has_changed_is_refused_at_resume(tiny: list[str], tmp_path: Path, texts: dict[str, str]) -> None:
    argv = [*tiny, "data.tokenizer=bytes", of_all(texts)]
    run_dir.save_config(tmp_path / "run", compose(argv))
    assert train_here(argv, tmp_path / "run") == 0
    Path(texts["code"]).write_text("print(1)\n" * 500)
    with pytest.raises(DataError, match=r"data\.validation\.code"):
        train_here(argv, tmp_path / "run")
    short = tmp_path / "short.txt"
    short.write_text("abc")
    with pytest.raises(DataError, match=r"data\.validation\.s: "):
        trained(tiny, tmp_path / "short", f"data.validation={{s: {short}}}")


@pytest.mark.e2e
def test_optuna_minimises_the_loss_that_it_is_given_and_refuses_another(
    tiny: list[str], tmp_path: Path, texts: dict[str, str], gptexp: Gptexp
) -> None:
    own = ["train", "-m", *tiny, "data.tokenizer=bytes", of_all(texts), "sweep.name=o", "hydra/sweeper=optuna"]
    own += ["optim.lr=interval(1e-3,1e-1)", "hydra.sweeper.n_trials=2"]
    assert gptexp(*own, "sweep.objective=val/code/loss").returncode == 0
    study = optuna.load_study(study_name="gptexp", storage=f"sqlite:///{tmp_path}/outputs/o/study.db")
    losses = sorted(events(run, "eval")[-1]["val/code/loss"] for run in runs(tmp_path / "outputs/o"))
    assert sorted(trial.value for trial in study.trials) == losses
    other = gptexp(*own)
    assert (other.returncode, "another-objective" in other.stderr) == (2, True)


@pytest.mark.e2e
def test_a_search_whose_first_run_was_not_evaluated_goes_on(
    tiny: list[str], tmp_path: Path, texts: dict[str, str], gptexp: Gptexp
) -> None:
    own = ["tune", *tiny, "data.tokenizer=bytes", "sweep.name=t", "--budget", "3 runs", "--yes"]
    stopped = gptexp(*own, "train.max_minutes=1e-9")
    assert stopped.returncode == 0, stopped.stderr
    assert {summary(run)["status"] for run in runs(tmp_path / "outputs/t")} == {"interrupted"}
    done = gptexp(*own)
    assert done.returncode == 0, done.stderr
    assert {summary(run)["status"] for run in runs(tmp_path / "outputs/t")} == {"completed"}


def test_the_bits_of_averaged_weights_are_not_those_of_the_others() -> None:
    assert [bits_metric(loss) for loss in ("val/loss", "val/a/loss", "val/loss_ema")] == [
        "val/bpb", "val/a/bpb", "val/bpb_ema",
    ]  # fmt: skip


def with_another_text(root: Path, octaves: int) -> Path:
    """Give each run of a sweep the loss, on another text, that the run has with a rate `octaves` higher."""
    finals = {run: summary(run) for run in runs(root)}
    of_cell = {}
    for run in finals:
        config = run_dir.load_config(run)
        of_cell[config.batch.total_batch_size, config.train.seed, config.optim.lr] = run
    for (batch, seed, lr), run in of_cell.items():
        source = of_cell.get((batch, seed, lr * 2**octaves))
        loss = finals[source]["final_val_loss"] if source else None
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for event in lines:
            if event["event"] == "eval":
                event["val/other/loss"] = 5.0 if loss is None else loss
        (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    return root


def test_a_report_about_another_text_has_the_best_learning_rates_of_that_text(tmp_path: Path) -> None:
    """On the other text the loss at lr is that at lr / 2 on the first, so the best learning rate is twice as high."""
    root = with_another_text(write_sweep(tmp_path / "root"), -1)
    first, other = build_report(root), build_report(root, objective="val/other/loss")
    assert (first.objective, other.objective) == ("val/loss", "val/other/loss")
    for one, twice in zip(first.answers, other.answers, strict=True):
        assert one.lr is not None
        assert twice.lr == pytest.approx(2 * one.lr, rel=0.15)
    assert "val/other/loss" in other.verdict.lines[0]
    with pytest.raises(ConfigError) as refused:
        build_report(root, objective="val/lost/loss")
    assert refused.value.code == "no-such-loss"


def test_runs_of_different_objectives_are_compared_by_the_validation_loss(tmp_path: Path) -> None:
    root = with_another_text(write_sweep(tmp_path / "root", batches=(4096,), seeds=1), 1)
    a, b = runs(root)[:2]
    config = run_dir.load_config(a)
    config.sweep.objective = "val/other/loss"
    run_dir.save_config(a, config)

    def losses(objective: str | None) -> list[float]:
        return [run["final_val_loss"] for run in numbers(compare([a, b], objective))["runs"]]

    assert losses(None) == [summary(run)["final_val_loss"] for run in (a, b)]
    assert losses("val/other/loss") == [events(run, "eval")[-1]["val/other/loss"] for run in (a, b)]
    found = numbers(compare([a, b]))["runs"]
    assert [run["val/other/loss"] for run in found] == losses("val/other/loss")
