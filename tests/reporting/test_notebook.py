"""The notebook that goes from a sweep to a figure, executed on a real sweep."""

import json
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import ROOT, events, runs, summary
from nbclient import NotebookClient

from gptexp.storage.run_dir import load_config

NOTEBOOK = ROOT / "gptexp/reporting/sweep.ipynb"
# Prints the label, the x and the y of each line in the two figures.
LINES = """
import json
axes = {"loss": loss, "curves": curves}
print(json.dumps({
    name: [[line.get_label(), line.get_xdata().tolist(), line.get_ydata().tolist()] for line in axes[name].get_lines()]
    for name in axes
}))
"""


def test_the_notebook_holds_no_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.slow
def test_the_notebook_draws_the_runs_of_a_sweep(
    gptexp: Callable[..., subprocess.CompletedProcess[str]],
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four cells, one of them with a second seed."""
    for grid in (
        ["optim.lr=3e-3,1e-2", "batch.total_batch_size=128,256"],
        ["optim.lr=1e-2", "batch.total_batch_size=256", "train.seed=7"],
    ):
        done = gptexp("train", "-m", *tiny, *grid, "sweep.name=tutorial", "sweep.parallel=2")
        assert done.returncode == 0, done.stderr
    directories = runs(tmp_path / "outputs/tutorial")
    assert len(directories) == 5

    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    here = tmp_path / "gptexp/reporting"
    here.mkdir(parents=True)
    notebook = nbformat.read(NOTEBOOK, 4)
    notebook.cells.append(nbformat.v4.new_code_cell(LINES))
    NotebookClient(notebook, timeout=120, startup_timeout=120, resources={"metadata": {"path": str(here)}}).execute()
    outputs = {cell["id"]: cell.get("outputs", []) for cell in notebook.cells}
    for name in ("loss", "best"):
        assert [output for output in outputs[name] if "image/png" in output.get("data", {})], name
    assert all(str(summary(run)["tokens"]) in outputs["runs"][0]["data"]["text/plain"] for run in directories)
    assert outputs["text"][-1]["text"].startswith("def main(")

    losses: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in directories:
        config = load_config(run)
        losses[str(config.batch.total_batch_size)][config.optim.lr].append(summary(run)["final_val_loss"])
    best = min(directories, key=lambda run: float(summary(run)["final_val_loss"]))
    lines: dict[str, Any] = json.loads(notebook.cells[-1].outputs[0]["text"])
    assert lines["loss"] == [
        [batch, sorted(of_batch), [pytest.approx(statistics.fmean(of_batch[lr])) for lr in sorted(of_batch)]]
        for batch, of_batch in sorted(losses.items())
    ]
    assert lines["curves"] == [
        [name, [event["tokens"] for event in logged], [event[name] for event in logged]]
        for name, logged in {"train/loss": events(best, "step"), "val/loss": events(best, "eval")}.items()
    ]
