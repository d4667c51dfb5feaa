"""The sweeps of conf/experiment: each command that a report on one proposes has the cells that it says."""

import math
import shlex
from pathlib import Path

import pytest
from conftest import e2e_then_slow
from sweeps import compose_sweep, report_of, write_run

from gptexp.config.scaling import scaled_optim
from gptexp.config.schema import Config
from gptexp.storage import run_dir, sweep_record
from gptexp.storage.sweep_record import PlannedCell, SweepRecord
from gptexp.sweep.cells import cell_name


def write_cells(directory: Path, overrides: list[str]) -> None:
    """The cells of a sweep as ended runs: best in the middle of the grid, those of large batches at its top."""
    planned = {}
    drafts = [(drafted.config, drafted.values) for drafted in compose_sweep(overrides).drafts]
    configs = [config for config, _ in drafts if config is not None]
    assert len(configs) == len(drafts)

    def learning_rates(like: Config) -> list[float]:
        """Of the cells that have this optimizer and batch size."""
        batch = like.batch.total_batch_size
        return sorted(
            {c.optim.lr for c in configs if (c.optim.name, c.batch.total_batch_size) == (like.optim.name, batch)}
        )

    for config, (_, values) in zip(configs, drafts, strict=True):
        batch, optim = config.batch.total_batch_size, scaled_optim(config)
        tried = learning_rates(config)
        best = tried[-1] if batch > 512 else tried[len(tried) // 2]
        loss = 2 + 0.2 * math.log2(optim.lr / best) ** 2
        name = cell_name(config, values, directory)
        write_run(directory / name, 1024, optim.lr, config.train.seed, loss)  # few steps, whatever the batch size
        run_dir.save_config(directory / name, config)
        planned[name] = PlannedCell(values, batch, 2**20)
    own = [*overrides, "batch.micro_batch_size=1"]  # the newest command fixed what the grid varies
    sweep_record.save(directory, SweepRecord(directory.name, own, cells=planned))


@pytest.mark.parametrize("experiment", e2e_then_slow(["large_batch_optimizers", "beta2_two_arms"]))
def test_each_proposed_command_has_the_cells_that_it_says(experiment: str, tmp_path: Path) -> None:
    """Although the grid ties the micro-batch to the batch size, and learning rates to the optimizer."""
    write_cells(tmp_path, [f"experiment={experiment}", "train.seed=1337"])
    proposed = report_of(tmp_path)["next"]
    for reason in ("the noise is unknown", "the end of the grid"):
        assert any(reason in proposal["why"] for proposal in proposed)
    for proposal in proposed:
        arguments = shlex.split(proposal["command"])[3:]
        assert len(arguments) == len({text.partition("=")[0] for text in arguments})
        drafts = compose_sweep(arguments).drafts
        assert [drafted.problems for drafted in drafts] == [[]] * proposal["runs"]
