"""The sweeps of conf/experiment: each command that a report on one proposes has the cells that it says."""

import math
import shlex
from pathlib import Path

import pytest
from sweeps import compose_sweep, report_of, write_run

from gptexp.config.scaling import effective_optim
from gptexp.storage import run_dir, sweep_record
from gptexp.storage.sweep_record import PlannedCell, SweepRecord
from gptexp.sweep.cells import cell_name

RATIO = {"adamw": 1, "muon": 1, "lamb": 2.5, "lars": 1250}  # best learning rate, relative to AdamW's


def write_cells(directory: Path, overrides: list[str], centre: float) -> None:
    """The cells of a sweep as runs that have ended: best at `centre`, those of large batches at the top of the grid."""
    planned = {}
    for drafted in compose_sweep(overrides).drafts:
        assert drafted.config is not None
        config, values = drafted.config, drafted.values
        batch, optim = config.batch.total_batch_size, effective_optim(config)
        best = RATIO[optim.name] * centre * (4 if batch > 512 else 1)
        loss = 2 + 0.2 * math.log2(optim.lr / best) ** 2
        name = cell_name(config, values, directory)
        write_run(directory / name, 1024, optim.lr, config.train.seed, loss)  # few steps, whatever the batch size
        run_dir.save_config(directory / name, config)
        planned[name] = PlannedCell(values, batch, 2**20)
    own = [text for text in overrides if "=" in text and "," not in text]
    sweep_record.save(directory, SweepRecord(directory.name, own, cells=planned))


@pytest.mark.e2e
@pytest.mark.parametrize(("experiment", "centre"), [("beta2_two_arms", 4e-3), ("large_batch_optimizers", 8e-3)])
def test_each_proposed_command_has_the_cells_that_it_says(experiment: str, centre: float, tmp_path: Path) -> None:
    """Although the grid ties the micro-batch to the batch size, and learning rates to the optimizer."""
    write_cells(tmp_path, [f"experiment={experiment}", "train.seed=1337"], centre)
    proposed = report_of(tmp_path)["next"]
    for reason in ("measures the noise", "falls to the top of the grid"):
        assert any(reason in proposal["why"] for proposal in proposed)
    for proposal in proposed:
        drafts = compose_sweep(shlex.split(proposal["command"])[3:]).drafts
        assert [drafted.problems for drafted in drafts] == [[]] * proposal["runs"]
