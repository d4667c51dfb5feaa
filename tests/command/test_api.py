"""gptexp from Python: the same runs, checks and errors as from the shell."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import torch
from conftest import ROOT, events, wait_for
from nbclient import NotebookClient
from real_runs import begun, equal

import gptexp
from gptexp.config.schema import to_dict
from gptexp.storage import run_dir

NOTEBOOK = ROOT / "examples/answer.ipynb"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_module_of_the_same_name_is_the_function_too() -> None:
    import gptexp.report
    import gptexp.sweep
    import gptexp.train
    import gptexp.tune

    for name in ("report", "sweep", "train", "tune"):
        with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'nonsense'"):
            getattr(gptexp, name)(nonsense=1)
    assert gptexp.train.main.__module__ == "gptexp.train"
    assert {*gptexp.__all__} <= {*dir(gptexp)}


def test_composing_checks_as_the_shell_does(tiny: list[str]) -> None:
    config = gptexp.compose([*tiny, "optim.lr=2e-3"])
    assert (config.optim.lr, config.train.max_steps) == (2e-3, 4)
    with pytest.raises(gptexp.ConfigError) as caught:
        gptexp.compose([*tiny, "optim.lr=-1", "train.seeed=1"])
    assert {problem.code for problem in caught.value.problems} == {"out-of-range", "unknown-key"}
    with pytest.raises(gptexp.ConfigError) as caught:
        gptexp.compose([*tiny, "sweep=lr"])
    assert caught.value.code in ("is-a-sweep", "needs-multirun")


def test_a_run_from_python_is_the_run_of_the_shell(
    shell: Callable[..., subprocess.CompletedProcess[str]],
    tiny: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = gptexp.train([*tiny, "log.progress=lines"], directory="python")
    assert "completed after 4 steps" in capfd.readouterr().out
    assert (run.directory, run.status) == (tmp_path / "python", "completed")
    assert shell("train", *tiny, "hydra.run.dir=shell").returncode == 0
    assert equal(tmp_path / "python", tmp_path / "shell")
    assert list(run.metrics["step"]) == [0, 1, 2, 3]
    assert run.config.train.max_steps == 4
    x = torch.zeros((1, 4), dtype=torch.int64)
    assert run.model()(x).shape == (1, 4, run_dir.load_resolved(run.directory).model.resolved_vocab_size)
    again = gptexp.train([*tiny], directory="python", quiet=True)
    assert capfd.readouterr().out == ""
    assert len(events(again.directory, "step")) == 4
    with pytest.raises(gptexp.ConfigError) as caught:
        gptexp.train([*tiny, "data.path=missing.txt"], quiet=True)
    assert caught.value.code == "no-such-file"
    with pytest.raises(gptexp.ConfigError, match="nope"):
        gptexp.train([*tiny, "hydra.run.dir=${nope}"], quiet=True)


@pytest.fixture
def shell(gptexp: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    return gptexp


@pytest.mark.e2e
def test_a_config_is_trained_as_its_overrides_on_other_ranks_too(tiny: list[str], tmp_path: Path) -> None:
    config = gptexp.compose([*tiny, "train.save_every=2"])
    one = gptexp.train(config, quiet=True)
    two = gptexp.train(gptexp.compose([*tiny]), world_size=2, quiet=True)
    assert (one.status, two.status) == ("completed", "completed")
    losses = [[event["train/loss"] for event in events(run.directory, "step")] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    half = one.directory
    (half / "summary.json").unlink()
    assert one.status == "running"
    assert one.resume(quiet=True).status == "completed"
    assert to_dict(one.config)["train"] == to_dict(config)["train"]


@pytest.mark.e2e
def test_a_diverged_run_is_returned_and_a_lost_checkpoint_is_an_error(tiny: list[str]) -> None:
    wild = gptexp.train([*tiny, "optim.lr=1e18", "optim.grad_clip=0", "train.max_steps=20"], quiet=True)
    assert wild.status == "diverged"
    with pytest.raises(gptexp.UserError):
        wild.model()


@pytest.mark.e2e
def test_a_sweep_and_a_search_end_with_a_report(tiny: list[str], tmp_path: Path) -> None:
    swept = gptexp.sweep([*tiny, "optim.lr=1e-3,4e-3", "sweep.name=s"], quiet=True)
    assert swept.directory == tmp_path / "outputs/s"
    assert [run.status for run in swept.runs] == ["completed"] * 2
    assert sorted(swept.to_pandas()["lr"]) == [1e-3, 4e-3]
    report = swept.report()
    assert [answer.total_batch_size for answer in report.answers] == [128]
    assert report.laws == {}
    assert "<table>" in report._repr_html_()
    found = gptexp.tune([*tiny, "sweep.name=t"], budget="3 runs", quiet=True)
    assert len(found.to_pandas()) == 3
    with pytest.raises(gptexp.ConfigError, match="budget"):
        gptexp.tune([*tiny], budget="3 bananas")


@pytest.mark.e2e
def test_ctrl_c_saves_a_checkpoint_and_raises(long_run: list[str], tmp_path: Path) -> None:
    own = [text for text in long_run if not text.startswith("hydra.run.dir=")]
    caught = "except KeyboardInterrupt:\n    print('caught')"
    code = f"import gptexp\ntry:\n    gptexp.train({own!r}, directory='out')\n{caught}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    wait_for(begun(tmp_path / "out"), process)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert "caught" in out
    assert gptexp.Run(tmp_path / "out").status == "interrupted"
    assert list(tmp_path.glob("out/checkpoints/step-*"))


def test_the_notebook_holds_no_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.e2e
def test_the_notebook_goes_from_a_config_to_an_answer(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = nbformat.read(NOTEBOOK, 4)
    settings = next(cell for cell in notebook.cells if cell["id"] == "settings")
    settings["source"] = f"import gptexp\n\nSETTINGS = {[*tiny, 'train.max_steps=8']!r}"
    tune = next(cell for cell in notebook.cells if cell["id"] == "tune")
    tune["source"] = tune["source"].replace("12 runs", "4 runs")
    NotebookClient(
        notebook, timeout=240, startup_timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = {cell["id"]: cell.get("outputs", []) for cell in notebook.cells}
    assert "must be above 0" in outputs["wrong"][0]["text"]
    assert "completed" in outputs["train"][-1]["data"]["text/plain"]
    assert "<table>" in outputs["tune"][-1]["data"]["text/html"]
    assert "lr" in outputs["answer"][-1]["data"]["text/html"]
